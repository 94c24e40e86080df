"""``upriver wire decode`` as people call it: a process, its output, its exit code."""

import io
import json
import socket
import subprocess
import sys

import dpkt
import pytest

from upriver.wire.constants import Feature
from upriver.wire.messages import dcp, kv, session, upr

CLIENT, SERVER = ("10.0.0.1", 40000), ("10.0.0.2", 11210)
NOOP = dcp.DcpNoop(opaque=7).encode()
MUTATION = dcp.DcpMutation(4, 1, key=b"hello", value=b"world", vbucket=528).encode()
BROKEN = MUTATION[:24] + bytes(8) + MUTATION[32:]  # seqno 0


def upriver(*args, stdin=b"", env=None):
    command = [sys.executable, "-m", "upriver", *args]
    return subprocess.run(command, input=stdin, capture_output=True, timeout=60, env=env)


def decoded(*args, stdin=b""):
    done = upriver("wire", "decode", "--json", *args, stdin=stdin)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_hex_is_shown_field_by_field_with_offsets():
    done = upriver("wire", "decode", MUTATION.hex())

    lines = [line.split() for line in done.stdout.decode().splitlines()]
    assert done.returncode == 0
    assert ["Opcode", "(1)", "0x57", "DCP_MUTATION"] in lines
    assert ["Vbucket", "(6,7)", "0x0210", "528"] in lines
    assert ["by_seqno", "(24-31)", "0x0000000000000004", "4"] in lines
    assert ["key", "(55-59)", "0x68656c6c6f", "hello"] in lines


def test_json_is_one_object_a_line():
    [first, second] = decoded((NOOP + MUTATION).hex())

    assert first == {
        "magic": 0x80, "opcode": 0x5C, "name": "DCP_NOOP", "vbucket": 0, "opaque": 7, "cas": 0, "datatype": 0,
        "fields": {}, "key": "", "value": "",
    }  # fmt: skip
    assert second["fields"] == {
        "by_seqno": 4, "rev_seqno": 1, "flags": 0, "expiry": 0, "lock_time": 0, "nmeta": 0, "nru": 0,
    }  # fmt: skip
    assert (second["key"], second["value"]) == ("hello", "world")


def test_a_value_that_is_no_text_is_hex():
    [found] = decoded(dcp.DcpMutation(4, 1, key=b"k", value=b"\0\xff").encode().hex())

    assert found["value"] == {"hex": "00ff"}


def test_a_broken_frame_says_which_rule_it_breaks_and_the_exit_code_is_1():
    done = upriver("wire", "decode", "--json", (BROKEN + NOOP).hex())

    broken, fine = map(json.loads, done.stdout.splitlines())
    assert done.returncode == 1
    assert broken["error"] == {"field": "by_seqno", "offset": 24, "reason": "seqnos start at 1", "status": 4}
    assert "error" not in fine
    shown = upriver("wire", "decode", BROKEN.hex()).stdout.decode()
    assert "BROKEN: by_seqno at byte 24: seqnos start at 1. A server answers EINVAL 0x04." in shown


def test_bytes_that_end_inside_a_frame_are_broken():
    [found] = decoded(MUTATION[:30].hex())

    assert (found["name"], found["error"]["field"], found["error"]["offset"]) == ("DCP_MUTATION", "body", 30)
    assert found["error"]["status"] is None


@pytest.mark.parametrize("dialect", ["dcp", "upr"])
def test_the_dialect_can_be_told(dialect):
    [found] = decoded("--dialect", dialect, upr.UprFlush().encode().hex())

    assert ("error" in found) == (dialect == "dcp")


def test_collections_can_be_told():
    raw = kv.Get(b"\x08hello").encode().hex()

    assert decoded("--collections", raw)[0]["collection_id"] == 8
    assert decoded("--no-collections", raw)[0]["key"] == {"hex": "0868656c6c6f"}
    assert decoded("--collections", kv.Get(b"\x01hello").encode().hex())[0]["error"]["field"] == "key"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(NOOP + MUTATION, id="binary"),
        pytest.param((NOOP + MUTATION).hex().encode(), id="hex"),
        pytest.param(NOOP.hex(" ").encode() + b"  # a noop\n" + MUTATION.hex(":").encode() + b"\n", id="pasted hex"),
        pytest.param(", ".join(f"0x{byte:02x}" for byte in NOOP + MUTATION).encode(), id="an array of bytes"),
    ],
)
def test_files_and_standard_input_may_be_binary_or_hex(tmp_path, content):
    path = tmp_path / "frames"
    path.write_bytes(content)

    assert [each["name"] for each in decoded(str(path))] == ["DCP_NOOP", "DCP_MUTATION"]
    assert decoded(str(path)) == decoded("-", stdin=content)


def test_the_drawing_shows_four_bytes_in_a_row():
    shown = upriver("wire", "decode", "--drawing", MUTATION.hex()).stdout.decode()

    assert "      56| 0x65 ('e')    | 0x6c ('l')    | 0x6c ('l')    | 0x6f ('o')    |" in shown


def test_what_is_neither_file_nor_hex_is_one_red_line(tmp_path):
    done = upriver("wire", "decode", "no-such-file")
    (tmp_path / "photo").write_bytes(b"\x89PNG\r\n")

    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode().splitlines() == ["upriver: 'no-such-file' is neither a file nor hex digits"]
    assert b"holds neither frames" in upriver("wire", "decode", str(tmp_path / "photo")).stderr


def test_debug_shows_the_traceback():
    assert b"Traceback" in upriver("--debug", "wire", "decode", "no-such-file").stderr


# ---------------------------------------------------------------------------------------------- captures


def packet(source, target, seq, data=b"", flags=dpkt.tcp.TH_ACK, ipv6=False):
    tcp = dpkt.tcp.TCP(sport=source[1], dport=target[1], seq=seq % (1 << 32), flags=flags, data=data)
    tcp.off = 5
    if ipv6:
        src, dst = (socket.inet_pton(socket.AF_INET6, "::" + each[0].rpartition(".")[2]) for each in (source, target))
        ip = dpkt.ip6.IP6(src=src, dst=dst, nxt=dpkt.ip.IP_PROTO_TCP, hlim=64, data=tcp, plen=len(tcp))
        return dpkt.ethernet.Ethernet(type=dpkt.ethernet.ETH_TYPE_IP6, data=ip)
    src, dst = (socket.inet_aton(each[0]) for each in (source, target))
    ip = dpkt.ip.IP(src=src, dst=dst, p=dpkt.ip.IP_PROTO_TCP, data=tcp)
    ip.len = len(ip)
    return dpkt.ethernet.Ethernet(data=ip)


def capture(tmp_path, packets, writer=dpkt.pcap.Writer, **options):
    buffer = io.BytesIO()
    out = writer(buffer, **options)
    for time, each in enumerate(packets):
        out.writepkt(bytes(each), ts=1_700_000_000 + time)
    path = tmp_path / "capture"
    path.write_bytes(buffer.getvalue())
    return str(path)


def syn(source, target, seq, answer=False):
    return packet(source, target, seq - 1, flags=dpkt.tcp.TH_SYN | (dpkt.tcp.TH_ACK if answer else 0))


STREAM = b"".join(dcp.DcpMutation(n, 1, key=b"hello", value=b"world" * 9).encode() for n in range(1, 9))


def segments(data, start, size=50):
    return [packet(SERVER, CLIENT, start + at, data[at : at + size]) for at in range(0, len(data), size)]


def seqnos(found):
    return [each["fields"]["by_seqno"] for each in found if each.get("name") == "DCP_MUTATION"]


@pytest.mark.parametrize("writer", [dpkt.pcap.Writer, dpkt.pcapng.Writer], ids=["pcap", "pcapng"])
@pytest.mark.parametrize("start", [1000, (1 << 32) - 120], ids=["plain", "sequence numbers wrap"])
def test_split_reordered_and_repeated_segments_are_put_in_order(tmp_path, writer, start):
    pieces = segments(STREAM, start)
    mixed = [pieces[2], pieces[0], pieces[1], pieces[0], *reversed(pieces[3:]), pieces[5]]
    overlap = packet(SERVER, CLIENT, start + 10, STREAM[10:70])
    packets = [syn(CLIENT, SERVER, 5), syn(SERVER, CLIENT, start, answer=True), *mixed[:4], overlap, *mixed[4:]]

    found = decoded(capture(tmp_path, packets, writer))

    assert seqnos(found) == list(range(1, 9))
    assert {each["connection"] for each in found} == {"10.0.0.2:11210 > 10.0.0.1:40000"}


def test_a_segment_that_repeats_the_end_of_another_adds_only_what_is_new(tmp_path):
    cuts = [(0, 50), (10, 70), (60, 61), (30, 200), (190, len(STREAM))]
    packets = [packet(SERVER, CLIENT, 1 + first, STREAM[first:last]) for first, last in cuts]

    found = decoded(capture(tmp_path, [syn(SERVER, CLIENT, 1, answer=True), *packets]))

    assert seqnos(found) == list(range(1, 9))


def test_both_directions_are_one_conversation(tmp_path):
    hello = session.HelloResponse((Feature.COLLECTIONS,)).encode()
    asked = upr.UprStreamRequest(opaque=9).encode()
    sent = dcp.DcpMutation(4, 1, key=b"\x08hello").encode() + upr.UprStreamEnd(1, opaque=9).encode()
    packets = [
        syn(CLIENT, SERVER, 1), syn(SERVER, CLIENT, 1, answer=True), packet(SERVER, CLIENT, 1, hello),
        packet(CLIENT, SERVER, 1, asked), packet(SERVER, CLIENT, 1 + len(hello), sent),
    ]  # fmt: skip

    found = decoded(capture(tmp_path, packets))

    assert [each["name"] for each in found] == ["HELLO", "DCP_STREAM_REQ", "DCP_MUTATION", "DCP_STREAM_END"]
    assert found[2]["collection_id"] == 8
    shown = upriver("wire", "decode", str(tmp_path / "capture")).stdout.decode()
    assert "UprStreamEnd" in shown
    assert "STATE_CHANGED" in shown


def test_a_lost_segment_is_reported_and_reading_goes_on_at_the_next_frame(tmp_path):
    pieces = segments(STREAM, 1)
    packets = [syn(SERVER, CLIENT, 1, answer=True), *pieces[:3], *pieces[4:]]

    done = upriver("wire", "decode", "--json", capture(tmp_path, packets))

    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["gap"] for each in found if "gap" in each] == [50]
    assert seqnos(found) == [1, 3, 4, 5, 6, 7, 8]
    assert done.returncode == 0
    assert b"50 bytes are missing from the capture" in upriver("wire", "decode", str(tmp_path / "capture")).stdout


def test_a_capture_that_begins_in_the_middle_starts_at_the_next_frame(tmp_path):
    assert seqnos(decoded(capture(tmp_path, segments(STREAM, 1)[1:]))) == [2, 3, 4, 5, 6, 7, 8]


def test_connections_that_speak_something_else_are_skipped(tmp_path):
    web = ("10.0.0.2", 80)
    packets = [
        syn(CLIENT, web, 1), packet(CLIENT, web, 1, b"GET / HTTP/1.1\r\n\r\n" * 2),
        syn(SERVER, CLIENT, 1, answer=True), *segments(STREAM, 1),
    ]  # fmt: skip
    path = capture(tmp_path, packets)

    found = decoded(path)

    assert [each["connection"] for each in found if "skipped" in each] == ["10.0.0.1:40000 > 10.0.0.2:80"]
    assert seqnos(found) == list(range(1, 9))
    assert not [each for each in decoded("--port", "11210", path) if "skipped" in each]


def test_the_same_ports_used_again_are_a_new_connection(tmp_path):
    first = [syn(SERVER, CLIENT, 1, answer=True), *segments(STREAM[:60], 1)]
    again = [syn(CLIENT, SERVER, 900), syn(SERVER, CLIENT, 70_000, answer=True), *segments(STREAM, 70_000)]

    assert seqnos(decoded(capture(tmp_path, first + again))) == list(range(1, 9))


def test_ipv6_and_raw_ip_captures_are_read(tmp_path):
    six = [packet(SERVER, CLIENT, 1, STREAM, ipv6=True)]
    assert seqnos(decoded(capture(tmp_path, six))) == list(range(1, 9))

    raw = [packet(SERVER, CLIENT, 1, STREAM).data]
    assert seqnos(decoded(capture(tmp_path, raw, linktype=101))) == list(range(1, 9))


def test_a_capture_that_is_damaged_or_of_an_unknown_link_is_one_clear_line(tmp_path):
    path = capture(tmp_path, segments(STREAM, 1), linktype=147)

    done = upriver("wire", "decode", path)

    assert done.returncode == 1
    assert done.stderr.decode() == "upriver: the capture cannot be read any further: link type 147 is not supported\n"


@pytest.mark.parametrize("size", [5, 20, 24, 30, 45, 60, 200])
def test_a_capture_cut_short_ends_without_a_traceback(tmp_path, size):
    path = capture(tmp_path, segments(STREAM, 1))
    with open(path, "r+b") as file:
        file.truncate(size)

    assert b"Traceback" not in upriver("wire", "decode", path).stderr
