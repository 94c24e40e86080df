"""The clients of the soak: some write, some stream, some ask, and some misbehave. Each function is one short life."""

from __future__ import annotations

import itertools
import json
import random
import socket
import time
from collections import Counter
from struct import pack

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from upriver.errors import Status
from upriver.wire import Magic, Opcode, decode
from upriver.wire.constants import OpenFlag, PathFlag, StreamFlag
from upriver.wire.messages import cluster, dcp, events, kv, session, upr

VBUCKETS = 16
KEYS = 200
OK = Status.SUCCESS
LONGEST_LIFE_S = 4  # of a document that expires
_names = itertools.count()
_EXPECTED = frozenset(
    {
        OK, Status.KEY_ENOENT, Status.KEY_EEXISTS, Status.NOT_STORED, Status.DELTA_BADVAL, Status.ETMPFAIL,
        Status.SUBDOC_PATH_ENOENT, Status.SUBDOC_PATH_MISMATCH, Status.SUBDOC_DOC_NOT_JSON,
    }
)  # fmt: skip


class Misbehaviour(AssertionError):
    """The node did something that it must not do."""


def expect(true: bool, what: str) -> None:
    if not true:
        raise Misbehaviour(what)


# ---------------------------------------------------------------------------------------------- writers


def write(port: int, chance: random.Random) -> None:
    """Pipelined operations of every kind; answers must come in order, with a status that makes sense."""
    with ready(port, *ALL) as raw:
        for _ in range(20):
            batch = [_operation(chance, opaque) for opaque in range(chance.randrange(1, 200))]
            raw.send(*batch)
            for opaque in range(len(batch)):
                got = raw.receive()
                expect(got.opaque == opaque, "answers out of order")
                expect(got.specific in _EXPECTED, f"opcode {got.opcode:#x} answered {got.specific:#x}")


def _operation(chance: random.Random, opaque: int) -> bytes:
    at = {"vbucket": chance.randrange(VBUCKETS), "opaque": opaque}
    key = b"\0key-%d" % chance.randrange(KEYS)
    kind = chance.random()
    if kind < 0.55:
        expiry = chance.randrange(1, LONGEST_LIFE_S) if chance.random() < 0.1 else 0
        return kv.Set(key=key, value=_value(chance), expiry=expiry, **at).frame().encode()
    if kind < 0.7:
        return kv.Delete(key, **at).frame().encode()
    if kind < 0.75:
        return kv.Append(key, b"+", **at).frame().encode()
    if kind < 0.8:
        return kv.Counter(1, 1, 0, b"\0count-%d" % chance.randrange(KEYS), **at).frame().encode()
    if kind < 0.9:
        return kv.Get(key, **at).frame().encode()
    return _sub_document(chance, key, at)


def _value(chance: random.Random) -> bytes:
    size = chance.choice((10, 200, 3000))
    if chance.random() < 0.4:
        return json.dumps({"n": chance.randrange(1000), "text": "x" * size}).encode()
    return chance.randbytes(size)


def _sub_document(chance: random.Random, key: bytes, at: dict[str, int]) -> bytes:
    """Change a field of the body, or an attribute; creates the document if need be."""
    flags = chance.choice((0, PathFlag.XATTR))
    path = b"_sys" if flags and chance.random() < 0.5 else b"field"
    extras = pack(">HBB", len(path), flags, 1)
    return frame(Opcode.SUBDOC_DICT_UPSERT, extras=extras, key=key, value=path + b"%d" % chance.randrange(1000), **at)


# ---------------------------------------------------------------------------------------------- readers


def open_producer(raw: Raw, flags: int = 0, **controls: bytes) -> None:
    name = b"soak-%d" % next(_names)  # never twice: a name belongs to the connection that opened it last
    expect(raw.ask(dcp.Open(0, OpenFlag.PRODUCER | flags, name)).specific == OK, "OPEN refused")
    for key, value in {**controls, "enable_noop": b"true"}.items():  # noops last: before the streams nothing reads them
        expect(raw.ask(dcp.DcpControl(key.encode(), value)).specific == OK, f"control {key} refused")


def follow(port: int, chance: random.Random) -> None:
    """Stream some vbuckets up to now; seqnos must rise inside their snapshots, and every stream must end."""
    with ready(port, *chance.choice((ALL, BASIC))) as raw:
        flags = chance.choice((0, OpenFlag.INCLUDE_XATTRS, OpenFlag.NO_VALUE, OpenFlag.INCLUDE_DELETE_TIMES))
        window = b"%d" % chance.choice((1000, 50_000, 10**7))
        open_producer(raw, flags, connection_buffer_size=window)
        vbuckets = chance.sample(range(VBUCKETS), chance.randrange(1, 6))
        for vbucket in vbuckets:
            raw.send(dcp.StreamRequest(vbucket=vbucket, flags=StreamFlag.TO_LATEST))
        _read_streams(raw, len(vbuckets))


def _read_streams(raw: Raw, streams: int) -> None:
    last: Counter[int] = Counter()
    ends: dict[int, int] = {}
    while streams:
        message = next_message(raw)
        if isinstance(message, dcp.StreamEnd):
            streams -= 1
        elif isinstance(message, dcp.SnapshotMarker):
            ends[message.vbucket] = message.end_seqno
        elif isinstance(message, dcp.DcpMutation | dcp.DcpDeletion | dcp.DeletionV2 | events.SystemEvent):
            expect(last[message.vbucket] < message.by_seqno <= ends[message.vbucket], "seqno outside its snapshot")
            last[message.vbucket] = message.by_seqno


def next_message(raw: Raw) -> object | None:
    """The next message of a stream, acknowledged. None: it was a noop, or a response, which must be a success."""
    got = raw.receive()
    if got.magic.is_response:
        expect(got.specific == OK, f"opcode {got.opcode:#x} refused with {got.specific:#x}")
        return None
    if got.opcode == Opcode.DCP_NOOP:
        raw.send(frame(Opcode.DCP_NOOP, magic=Magic.RESPONSE, opaque=got.opaque))
        return None
    raw.send(dcp.BufferAck(got.size))
    return decode(got, raw.context)


def close_early(port: int, chance: random.Random) -> None:
    """Close streams in the middle; the end must come for each, and the names must be free again."""
    with ready(port, *ALL) as raw:
        open_producer(raw, send_stream_end_on_client_close_stream=b"true")
        for _ in range(10):
            vbuckets = chance.sample(range(VBUCKETS), 4)
            raw.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in vbuckets])
            raw.send(*[dcp.CloseStream(vbucket=vbucket) for vbucket in vbuckets])
            _read_ends(raw, len(vbuckets))


def _read_ends(raw: Raw, left: int) -> None:
    while left:
        left -= isinstance(next_message(raw), dcp.StreamEnd)


def older_dialect(port: int, chance: random.Random) -> None:
    """UPR streams up to a seqno that exists."""
    with ready(port, *BASIC) as raw:
        vbucket = chance.randrange(VBUCKETS)
        seqnos = _seqnos(raw)
        open_producer(raw)
        if not seqnos.get(vbucket):
            return
        raw.send(upr.UprStreamRequest(end_seqno=seqnos[vbucket], vbucket=vbucket))
        while (got := raw.receive()).opcode != Opcode.DCP_STREAM_END:
            expect(not got.magic.is_response or got.specific == OK, f"UPR stream refused with {got.specific:#x}")


def _seqnos(raw: Raw) -> dict[int, int]:
    value = raw.ask(cluster.GetAllVbSeqnos()).value
    return {
        int.from_bytes(value[at : at + 2], "big"): int.from_bytes(value[at + 2 : at + 10], "big")
        for at in range(0, len(value), 10)
    }


# ---------------------------------------------------------------------------------------------- questions


def ask(port: int, chance: random.Random) -> None:
    """Statistics and facts about vbuckets."""
    with ready(port, *ALL) as raw:
        for group in ("", "dcp", "vbucket-seqno", "vbucket-details", "failovers", "collections", "dcpagg :"):
            raw.send(session.Stat(group.encode()))
            while (got := raw.receive()).key:
                pass
            expect(got.specific == OK, f"statistics {group!r} answered {got.specific:#x}")
        expect(len(_seqnos(raw)) == VBUCKETS, "vbuckets missing in GET_ALL_VB_SEQNOS")
        for vbucket in range(VBUCKETS):
            log = raw.ask(cluster.GetFailoverLog(vbucket=vbucket))
            expect(log.specific == OK and len(log.value) >= 16, "no failover log")


# ---------------------------------------------------------------------------------------------- misbehaving clients


def vanish(port: int, chance: random.Random) -> None:
    """Open every stream and go, with a reset or without, perhaps after some garbage."""
    raw = ready(port, *ALL)
    open_producer(raw)
    raw.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(VBUCKETS)])
    if chance.random() < 0.3:
        raw.socket.sendall(chance.randbytes(100))
    time.sleep(chance.random() * 0.05)
    if chance.random() < 0.5:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    raw.socket.close()


def never_read(port: int, chance: random.Random) -> None:
    """Ask for everything, over and over, and read nothing."""
    with ready(port, *ALL) as raw:
        open_producer(raw)
        raw.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(VBUCKETS)])
        raw.socket.settimeout(0.2)
        try:
            for _ in range(100):
                raw.send(*[frame(Opcode.GET_CLUSTER_CONFIG)] * 100)
        except TimeoutError:
            pass  # the node stops reading, as it should
        time.sleep(chance.random() * 2)


def never_acknowledge(port: int, chance: random.Random) -> None:
    """Fill the window and stay; noops still come, and nothing else."""
    with ready(port, *ALL) as raw:
        open_producer(raw, connection_buffer_size=b"5000", set_noop_interval=b"0.1")
        raw.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(VBUCKETS)])
        noops = received = 0
        while noops < 5:
            got = raw.receive()
            if got.opcode == Opcode.DCP_NOOP:
                noops += 1
                raw.send(frame(Opcode.DCP_NOOP, magic=Magic.RESPONSE, opaque=got.opaque))
            elif not got.magic.is_response:
                received += got.size
        expect(received < 5000 + 4096, f"{received} bytes through a window of 5000")


def take_a_name(port: int, chance: random.Random) -> None:
    """A second connection takes the name of the first, which must be closed."""
    with ready(port, *ALL) as old, ready(port, *ALL) as new:
        name = b"twin-%d" % next(_names)
        for raw in (old, new):
            expect(raw.ask(dcp.Open(0, 1, name)).specific == OK, "OPEN refused")
            expect(raw.ask(dcp.DcpControl(b"enable_noop", b"true")).specific == OK, "control refused")
            if raw is old:
                raw.send(*[dcp.StreamRequest(vbucket=vbucket) for vbucket in range(VBUCKETS)])
        expect(old.is_closed(), "the older connection of a name lives on")


def cut_in_the_middle(port: int, chance: random.Random) -> None:
    """Die inside a frame."""
    raw = ready(port, *ALL)
    data = kv.Set(key=b"\0torn", value=bytes(10_000)).frame().encode()
    raw.socket.sendall(data[: chance.randrange(1, len(data))])
    raw.socket.close()


KINDS = (
    (write, 2), (follow, 2), (close_early, 1), (older_dialect, 1), (ask, 1), (vanish, 1), (never_read, 1),
    (never_acknowledge, 1), (take_a_name, 1), (cut_in_the_middle, 1),
)  # fmt: skip
BAD = frozenset({vanish, never_read, cut_in_the_middle})
