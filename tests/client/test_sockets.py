"""Both shells against scripted producers behind real sockets: bytes one at a time, cuts anywhere, broken peers."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from scripted_producer import ScriptedProducer, marker, mutation

import upriver
from upriver.client.blocking import connect
from upriver.errors import RemoteProtocolError
from upriver.wire import Message, Opcode
from upriver.wire.cluster import GetManifest
from upriver.wire.constants import StreamEndStatus
from upriver.wire.dcp import DcpNoop, StreamEnd, StreamRequest
from upriver.wire.session import ValueResponse

MANIFEST = b'{"uid":"0","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}]}'
VBUCKETS, SEQNOS = 2, 40
Speak = Callable[["Peer", StreamRequest], bytes]


class Peer(ScriptedProducer):
    """Behind a socket: also knows the manifest, and answers each stream request as ``speak`` says."""

    def __init__(self, config: bytes, speak: Speak) -> None:
        super().__init__(config)
        self.speak = speak

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, GetManifest):
            yield ValueResponse.under(Opcode.COLLECTIONS_GET_MANIFEST)(MANIFEST, opaque=message.opaque)
        else:
            yield from super()._answer(message)


class Behaviour:
    """How the network treats the bytes; a connection is cut after so many, and the next one gets further."""

    def __init__(self, piece: int = 0, cut_after: list[int] | None = None) -> None:
        self.piece, self.cut_after = piece, list(cut_after or [])

    def send(self, sock: socket.socket, data: bytes, limit: int | None) -> int | None:
        for at in range(0, len(data), self.piece or len(data) or 1):
            part = data[at : at + (self.piece or len(data))]
            if limit is not None:
                part, limit = part[:limit], limit - len(part)
            sock.sendall(part)
            if limit is not None and limit <= 0:
                raise ConnectionError
        return limit


@contextmanager
def serving(speak: Speak, behaviour: Behaviour) -> Iterator[str]:
    """A server for as many connections as come; each is spoken to by a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    nodes = [{"hostname": "127.0.0.1", "services": {"kv": port}}]
    server_map = {"serverList": [f"127.0.0.1:{port}"], "vBucketMap": [[0]] * VBUCKETS}
    config = json.dumps({"rev": 1, "nodesExt": nodes, "vBucketServerMap": server_map}).encode()

    def talk(sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer, limit, feeding = Peer(config, speak), None, False
        with sock:
            try:
                while data := sock.recv(65536):
                    answer = peer.receive(data)
                    if not feeding and peer.seen_of(Opcode.DCP_OPEN):
                        feeding = True
                        limit = behaviour.cut_after.pop(0) if behaviour.cut_after else None
                    limit = behaviour.send(sock, answer, limit)
                    while peer.requests:
                        limit = behaviour.send(sock, speak(peer, peer.requests.pop(0)), limit)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(sock,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"couchbase://127.0.0.1:{port}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()


def everything(peer: Peer, request: StreamRequest) -> bytes:
    """All changes after the requested seqno, in snapshots of ten, with noops in between, then the end."""
    out = peer.accepts(request)
    for first in range(request.start_seqno + 1, SEQNOS + 1, 10):
        last = min(first + 9, SEQNOS)
        out += marker(request, first - 1 if first > 1 else 0, last) + DcpNoop(opaque=first).encode()
        for n in range(first, last + 1):
            out += mutation(request, n, b"%d:%d" % (request.vbucket, n), b"v" * (n % 7))
    return out + StreamEnd(StreamEndStatus.OK, vbucket=request.vbucket, opaque=request.opaque).encode()


ENDS = dict.fromkeys(range(VBUCKETS), SEQNOS)
ALL = sorted((vb, n) for vb in range(VBUCKETS) for n in range(1, SEQNOS + 1))


def read_blocking(connection: str, objects: bool) -> list[tuple[int, int]]:
    with connect(connection) as db:
        if objects:
            return [(c.vbucket, c.seqno) for c in db.changes(end=ENDS)]
        batches = list(db.change_batches(end=ENDS, rows=7))
        return [pair for b in batches for pair in zip(b["vbucket"].to_pylist(), b["seqno"].to_pylist(), strict=True)]


def read_async(connection: str, objects: bool) -> list[tuple[int, int]]:
    async def read() -> list[tuple[int, int]]:
        async with upriver.connect(connection) as db:
            if objects:
                return [(c.vbucket, c.seqno) async for c in db.changes(end=ENDS)]
            batches = [batch async for batch in db.change_batches(end=ENDS, rows=7)]
        return [pair for b in batches for pair in zip(b["vbucket"].to_pylist(), b["seqno"].to_pylist(), strict=True)]

    return asyncio.run(read())


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("objects", [False, True], ids=["batches", "objects"])
@pytest.mark.parametrize("piece", [0, 1, 13])
def test_pieces_of_any_size_make_the_same_changes(read: Any, objects: bool, piece: int) -> None:
    with serving(everything, Behaviour(piece)) as connection:
        assert sorted(read(connection, objects)) == ALL


@pytest.mark.parametrize("read", [read_blocking, read_async])
@pytest.mark.parametrize("seed", range(6))
def test_connections_that_break_anywhere_lose_nothing_and_repeat_nothing(read: Any, seed: int) -> None:
    chance = random.Random(seed)
    cuts = [chance.randrange(1, 4000) for _ in range(5)]
    with serving(everything, Behaviour(0, cuts)) as connection:
        assert sorted(read(connection, objects=bool(seed % 2))) == ALL


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_a_producer_that_always_breaks_its_promise_is_given_up(read: Any) -> None:
    def lie(peer: Peer, request: StreamRequest) -> bytes:
        return peer.accepts(request) + mutation(request, 1)

    with serving(lie, Behaviour()) as connection, pytest.raises(RemoteProtocolError, match="outside its snapshot"):
        read(connection, objects=False)


@pytest.mark.parametrize("read", [read_blocking, read_async])
def test_a_producer_that_hangs_up_at_once_is_asked_again_with_growing_pauses(read: Any) -> None:
    with serving(everything, Behaviour(0, [1] * 4)) as connection:
        started = time.monotonic()
        assert sorted(read(connection, objects=True)) == ALL
        assert time.monotonic() - started >= 0.05 / 2
