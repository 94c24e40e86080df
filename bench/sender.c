/* A producer that is never the bottleneck: answers a handshake by rote, then sends a file of encoded messages.
 *
 * usage: sender FILE CONFIG MANIFEST STREAMS ROUNDS     (prints its port; serves until it is killed)
 * A connection whose first byte is 'R' gets the file at once, without a handshake. ROUNDS > 1 repeats the file with
 * seqnos moved on, for soak runs. Flow control is ignored: this measures the reader.
 */
#include <arpa/inet.h>
#include <endian.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

static char *data, *config, *manifest;
static size_t data_size;
static int streams, rounds;
static uint64_t per_stream;

static void write_all(int fd, const char *p, size_t n) {
    while (n) {
        ssize_t sent = write(fd, p, n);
        if (sent <= 0) _exit(0);
        p += sent, n -= sent;
    }
}

static void reply(int fd, const unsigned char *request, const char *value, size_t size) {
    unsigned char head[24] = {0x81, request[1]};
    uint32_t body = htonl((uint32_t)size);
    memcpy(head + 8, &body, 4), memcpy(head + 12, request + 12, 4);
    write_all(fd, (char *)head, 24), write_all(fd, value, size);
}

/* Seqnos of the next round lie behind those of this one; stream ends stay out until the last. */
static void move_on(void) {
    for (size_t at = 0; at < data_size;) {
        unsigned char *p = (unsigned char *)data + at;
        uint32_t body;
        memcpy(&body, p + 8, 4);
        int fields = p[1] == 0x57 ? 1 : p[1] == 0x56 ? 2 : 0;
        for (int i = 0; i < fields; i++) {
            uint64_t seqno;
            memcpy(&seqno, p + 24 + 8 * i, 8);
            seqno = htobe64(be64toh(seqno) + per_stream);
            memcpy(p + 24 + 8 * i, &seqno, 8);
        }
        at += 24 + ntohl(body);
    }
}

static void *drain(int fd) {
    char sink[65536];
    while (read(fd, sink, sizeof sink) > 0) {}
    return 0;
}

static void blast(int fd) {
    if (fork() == 0) { drain(fd); _exit(0); } /* acknowledgements must not fill the reader's socket */
    size_t ends = (size_t)streams * 28, main_part = data_size - ends;
    for (int round = 0; round < rounds; round++) {
        for (size_t at = 0; at < main_part; at += 1 << 20)
            write_all(fd, data + at, main_part - at < 1 << 20 ? main_part - at : 1 << 20);
        if (round + 1 < rounds) move_on();
    }
    write_all(fd, data + main_part, ends);
}

static int answer(int fd, const unsigned char *frame, uint32_t body, int opened) {
    static const char log[16] = {0, 0, 0, 0, 0, 0, 0xab, 0xcd};
    switch (frame[1]) {
    case 0x1f: reply(fd, frame, (char *)frame + 24 + ntohs(*(uint16_t *)(frame + 2)), body - ntohs(*(uint16_t *)(frame + 2))); break;
    case 0xb5: reply(fd, frame, config, strlen(config)); break;
    case 0xba: reply(fd, frame, manifest, strlen(manifest)); break;
    case 0x53: reply(fd, frame, log, 16); return opened + 1;
    case 0x5d: case 0x5c: break;
    default: reply(fd, frame, "", 0);
    }
    return opened;
}

static void serve(int fd) {
    static unsigned char in[1 << 20];
    size_t have = 0;
    int opened = 0;
    for (;;) {
        ssize_t got = read(fd, in + have, sizeof in - have);
        if (got <= 0) _exit(0);
        have += got;
        if (in[0] == 'R') { blast(fd); break; }
        size_t at = 0;
        while (have - at >= 24) {
            uint32_t body = ntohl(*(uint32_t *)(in + at + 8));
            if (have - at < 24 + body) break;
            opened = answer(fd, in + at, body, opened);
            at += 24 + body;
        }
        memmove(in, in + at, have -= at);
        if (opened == streams) { blast(fd); break; }
    }
    drain(fd);
    _exit(0);
}

int main(int argc, char **argv) {
    if (argc != 6) return 2;
    config = argv[2], manifest = argv[3], streams = atoi(argv[4]), rounds = atoi(argv[5]);
    signal(SIGCHLD, SIG_IGN);
    int file = open(argv[1], O_RDONLY);
    struct stat st;
    if (file < 0 || fstat(file, &st)) return 1;
    data_size = st.st_size;
    data = mmap(0, data_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_POPULATE, file, 0);
    per_stream = strtoull(getenv("PER_STREAM") ? getenv("PER_STREAM") : "0", 0, 10);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK),
                               .sin_port = htons(atoi(getenv("PORT") ? getenv("PORT") : "0"))};
    socklen_t size = sizeof here;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(listener, (void *)&here, sizeof here) || listen(listener, 8)) return 1;
    getsockname(listener, (void *)&here, &size);
    printf("%d\n", ntohs(here.sin_port)), fflush(stdout);
    for (;;) {
        int fd = accept(listener, 0, 0);
        if (fd < 0) return 0;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        if (fork() == 0) serve(fd);
        close(fd);
    }
}
