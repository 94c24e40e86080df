/* The cheapest possible peers for the producer benchmark.

   sink stream PORT NAME VBUCKETS MUTATIONS [latency]
       opens a DCP connection, streams vbuckets 0..VBUCKETS-1 from the start, and stops after MUTATIONS mutations.
       Prints: "open" when the last stream is granted, then mutations bytes seconds; with "latency" also p50 and p99 in microseconds of (now - the time that the
       first 8 bytes of each value carry, big-endian nanoseconds of CLOCK_MONOTONIC).
   sink write PORT VBUCKETS MUTATIONS VALUE_BYTES WINDOW RATE
       sets MUTATIONS documents round robin over the vbuckets, at most WINDOW unanswered, RATE per second (0: all it
       can), each value beginning with the time. Prints: sets seconds.
*/
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define HEADER 24
#define BUFFER (4u << 20)

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static void die(const char *what)
{
    fprintf(stderr, "sink: %s: %s\n", what, strerror(errno));
    exit(1);
}

static int dial(int port)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int one = 1, s = socket(AF_INET, SOCK_STREAM, 0);
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (s < 0 || connect(s, (struct sockaddr *)&to, sizeof to) < 0)
        die("connect");
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return s;
}

static void put32(uint8_t *p, uint32_t v) { v = htonl(v); memcpy(p, &v, 4); }
static uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return ntohl(v); }
static void put64(uint8_t *p, uint64_t v) { put32(p, (uint32_t)(v >> 32)); put32(p + 4, (uint32_t)v); }
static uint64_t get64(const uint8_t *p) { return (uint64_t)get32(p) << 32 | get32(p + 4); }

static size_t frame(uint8_t *p, int op, int vb, const void *extras, size_t extlen, const void *key, size_t klen,
                    size_t vlen, uint32_t opaque)
{
    memset(p, 0, HEADER);
    p[0] = 0x80, p[1] = (uint8_t)op, p[2] = (uint8_t)(klen >> 8), p[3] = (uint8_t)klen, p[4] = (uint8_t)extlen;
    p[6] = (uint8_t)(vb >> 8), p[7] = (uint8_t)vb;
    put32(p + 8, (uint32_t)(extlen + klen + vlen));
    put32(p + 12, opaque);
    memcpy(p + HEADER, extras, extlen);
    memcpy(p + HEADER + extlen, key, klen);
    return HEADER + extlen + klen + vlen;
}

static void send_all(int s, const uint8_t *p, size_t n)
{
    while (n) {
        ssize_t k = send(s, p, n, MSG_NOSIGNAL);
        if (k <= 0)
            die("send");
        p += k, n -= (size_t)k;
    }
}

/* Buffered reading of whole frames. */
static uint8_t *in;
static size_t in_at, in_end;

static int more(int s)
{
    if (in_at) {
        memmove(in, in + in_at, in_end - in_at);
        in_end -= in_at, in_at = 0;
    }
    ssize_t k = recv(s, in + in_end, BUFFER - in_end, 0);
    if (k <= 0)
        return 0;
    in_end += (size_t)k;
    return 1;
}

static const uint8_t *next_frame(size_t *size)
{
    if (in_end - in_at < HEADER)
        return NULL;
    *size = HEADER + get32(in + in_at + 8);
    if (in_end - in_at < *size)
        return NULL;
    const uint8_t *f = in + in_at;
    in_at += *size;
    return f;
}

static void expect_success(int s, const char *what)
{
    size_t size;
    const uint8_t *f;
    while (!(f = next_frame(&size)))
        if (!more(s))
            die(what);
    if (f[6] || f[7]) {
        fprintf(stderr, "sink: %s: status 0x%02x%02x\n", what, f[6], f[7]);
        exit(1);
    }
}

static void select_bucket(int s)
{
    uint8_t p[64];
    send_all(s, p, frame(p, 0x89, 0, "", 0, "default", 7, 0, 0));
    expect_success(s, "select bucket");
}

static int by_value(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return x < y ? -1 : x > y;
}

static int run_stream(int port, const char *name, int vbuckets, uint64_t wanted, int latency)
{
    uint8_t extras[48] = {0}, *p = malloc(HEADER + 48);
    uint32_t *delays = latency ? malloc(wanted * sizeof *delays) : NULL;
    uint64_t mutations = 0, bytes = 0, began = 0;
    size_t size;
    int s = dial(port), opened = 0;
    select_bucket(s);
    extras[7] = 1;
    uint8_t open_frame[128];
    send_all(s, open_frame, frame(open_frame, 0x50, 0, extras, 8, name, strlen(name), 0, 0));
    expect_success(s, "open");
    memset(extras, 0, sizeof extras);
    memset(extras + 16, 0xff, 8);
    for (int vb = 0; vb < vbuckets; vb++)
        send_all(s, p, frame(p, 0x53, vb, extras, 48, "", 0, 0, (uint32_t)vb));
    while (mutations < wanted) {
        const uint8_t *f = next_frame(&size);
        if (!f) {
            if (!more(s))
                die("stream ended early");
            continue;
        }
        if (f[0] == 0x81 && f[1] == 0x53 && ++opened == vbuckets) {
            printf("open\n");
            fflush(stdout);
        }
        if (f[1] != 0x57)
            continue;
        if (!began)
            began = now_ns();
        if (latency)
            delays[mutations] = (uint32_t)((now_ns() - get64(f + HEADER + f[4] + (f[2] << 8 | f[3]))) / 1000);
        mutations++, bytes += size;
    }
    printf("%llu %llu %.6f", (unsigned long long)mutations, (unsigned long long)bytes, (double)(now_ns() - began) / 1e9);
    if (latency) {
        qsort(delays, mutations, sizeof *delays, by_value);
        printf(" %u %u", delays[mutations / 2], delays[mutations * 99 / 100]);
    }
    printf("\n");
    return 0;
}

static uint64_t take_answers(int s, uint64_t answered, int block)
{
    size_t size;
    const uint8_t *f;
    uint64_t before = answered;
    for (;;) {
        while ((f = next_frame(&size))) {
            if (f[6] || f[7]) {
                fprintf(stderr, "sink: set: status 0x%02x%02x\n", f[6], f[7]);
                exit(1);
            }
            answered++;
        }
        if (!block || answered != before)
            return answered;
        if (!more(s))
            die("write");
    }
}

static int run_write(int port, int vbuckets, uint64_t wanted, size_t value_bytes, uint64_t window, uint64_t rate)
{
    uint8_t *p = malloc(window * (HEADER + 8 + 32 + value_bytes)), extras[8] = {0};
    uint64_t sent = 0, answered = 0, began;
    int s = dial(port);
    select_bucket(s);
    began = now_ns();
    while (answered < wanted) {
        size_t used = 0;
        uint64_t due = rate ? (now_ns() - began) * rate / 1000000000ull : wanted;
        for (; sent < wanted && sent < due && sent - answered < window; sent++) {
            char key[32];
            size_t klen = (size_t)snprintf(key, sizeof key, "user::%012llu", (unsigned long long)sent);
            size_t size = frame(p + used, 0x01, (int)(sent % (uint64_t)vbuckets), extras, 8, key, klen, value_bytes, 0);
            put64(p + used + HEADER + 8 + klen, now_ns());
            used += size;
        }
        if (used)
            send_all(s, p, used);
        if (sent > answered)
            answered = take_answers(s, answered, 1);
        else
            usleep(200);
    }
    printf("%llu %.6f\n", (unsigned long long)answered, (double)(now_ns() - began) / 1e9);
    return 0;
}

int main(int argc, char **argv)
{
    in = malloc(BUFFER);
    if (argc >= 6 && !strcmp(argv[1], "stream"))
        return run_stream(atoi(argv[2]), argv[3], atoi(argv[4]), strtoull(argv[5], 0, 10), argc > 6);
    if (argc == 8 && !strcmp(argv[1], "write"))
        return run_write(atoi(argv[2]), atoi(argv[3]), strtoull(argv[4], 0, 10), strtoull(argv[5], 0, 10),
                         strtoull(argv[6], 0, 10), strtoull(argv[7], 0, 10));
    fprintf(stderr, "usage: see the top of sink.c\n");
    return 2;
}
