"""Peers that restart, mix answers up, answer too slowly, or are something else altogether."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import upriver
from tests.support.scripted_producer import BRANCH, HOME, Wire, marker, mutation
from tests.support.scripted_server import SEQNOS, VBUCKETS, Behaviour, Peer, everything, serving
from upriver.client.blocking import Database, connect
from upriver.client.options import ConnectOptions
from upriver.errors import (
    AccessDenied,
    ConfigError,
    ConnectFailed,
    KeyNotFound,
    RemoteProtocolError,
    Status,
    UpriverError,
)
from upriver.protocol.feed.events import FeedRequest, RolledBack
from upriver.protocol.position import Position
from upriver.wire import Message, Opcode, OtherResponse
from upriver.wire.messages.dcp import RollbackResponse
from upriver.wire.messages.kv import Get, GetResponse
from upriver.wire.messages.session import SelectBucket

ENDS = dict.fromkeys(range(VBUCKETS), SEQNOS)
ALL = sorted((vb, n) for vb in range(VBUCKETS) for n in range(1, SEQNOS + 1))


# -------------------------------------------------------------------------------------------------- restarts


class Restarting(Peer):
    """Refuses to select the bucket, once for each status in ``refusals``."""

    refusals: list[Status] = []  # of the whole server

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, SelectBucket) and self.refusals:
            yield OtherResponse(Opcode.SELECT_BUCKET, status=self.refusals.pop(), opaque=message.opaque)
        else:
            yield from super()._answer(message)


@pytest.mark.parametrize("status", [Status.KEY_ENOENT, Status.NO_BUCKET, Status.EACCESS])
def test_a_feed_waits_for_a_bucket_that_a_restarting_node_does_not_have_yet(status: Status) -> None:
    with serving(everything, Behaviour(), make=Restarting) as connection, connect(connection) as db:
        db._drop(db.topology.nodes[0])
        Restarting.refusals = [status] * 3
        assert db.manifest()["uid"] == "0"
        assert Restarting.refusals == []


@pytest.mark.parametrize("status", [Status.KEY_ENOENT, Status.NO_BUCKET, Status.EACCESS])
def test_the_asynchronous_client_waits_for_it_too(status: Status) -> None:
    async def reconnect(connection: str) -> str:
        async with upriver.aio.connect(connection) as db:
            db._drop(db.topology.nodes[0])
            Restarting.refusals = [status] * 3
            return str((await db.manifest())["uid"])

    with serving(everything, Behaviour(), make=Restarting) as connection:
        assert asyncio.run(reconnect(connection)) == "0"


def test_a_feed_survives_a_restart_that_takes_a_while() -> None:
    """Its connection is cut, and then neither it nor the one for key-value requests may select the bucket."""
    with serving(everything, Behaviour(0, [900]), make=Restarting) as connection, connect(connection) as db:
        with db.changes(end=ENDS) as feed:
            Restarting.refusals = []
            found = []
            for change in feed:
                if not found:
                    db._drop(db.topology.nodes[0])
                    Restarting.refusals = [Status.KEY_ENOENT] * 4
                found.append((change.vbucket, change.seqno))
        assert sorted(found) == ALL


@pytest.mark.parametrize(("status", "kind"), [(Status.KEY_ENOENT, KeyNotFound), (Status.EACCESS, AccessDenied)])
def test_at_the_first_connect_a_missing_bucket_is_an_error_at_once(status: Status, kind: type[UpriverError]) -> None:
    with serving(everything, Behaviour(), make=Restarting) as connection:
        Restarting.refusals = [status]
        with pytest.raises(kind, match="cannot select bucket 'default'"):
            connect(connection)
        Restarting.refusals = [status]
        with pytest.raises(ConnectFailed, match="has just started"):
            Database(ConnectOptions.parse(connection), again=True)


def test_the_error_says_that_no_username_was_given() -> None:
    with serving(everything, Behaviour(), make=Restarting) as connection:
        Restarting.refusals = [Status.EACCESS]
        with pytest.raises(AccessDenied, match="no username was given"):
            connect(connection)


# -------------------------------------------------------------------------------------------------- answers


class MixedUp(Peer):
    """Answers a GET with a wrong opaque."""

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, Get):
            yield GetResponse(0, value=b"somebody else's", cas=1, opaque=message.opaque + 1)
        else:
            yield from super()._answer(message)


def test_the_answer_to_another_request_is_not_taken_for_ours() -> None:
    with serving(everything, Behaviour(), make=MixedUp) as connection:
        with connect(connection) as db, pytest.raises(RemoteProtocolError, match="not the one that waits"):
            db.get("k")

        async def get() -> None:
            async with upriver.aio.connect(connection) as db:
                await db.get("k")

        with pytest.raises(RemoteProtocolError, match="not the one that waits"):
            asyncio.run(get())


class Answering(Peer):
    """Answers a GET with a value that can be recognized in the bytes."""

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, Get):
            yield GetResponse(0, value=b"v" * 100, cas=1, opaque=message.opaque)
        else:
            yield from super()._answer(message)


@contextmanager
def talking(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that treats every connection as ``answer`` does; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=answer, args=(sock,), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
    accepting.join()


def dripping(sock: socket.socket) -> None:
    """Sends a response byte by byte, slowly, and never completes it."""
    with sock:
        try:
            sock.sendall(b"\x81\x1f\0\0\0\0\0\0\0\xff\xff\xff" + b"\0" * 12)
            while True:
                time.sleep(0.05)
                sock.sendall(b"x")
        except OSError:
            return


def test_connecting_takes_no_longer_than_its_timeout_however_slowly_the_peer_speaks() -> None:
    with talking(dripping) as port:
        options = ConnectOptions.parse(f"couchbase://127.0.0.1:{port}", connect_timeout_s=1.5, request_timeout_s=600)
        with pytest.raises(ConnectFailed, match="did not answer"):
            Database(options)

        async def open_it() -> None:
            async with upriver.aio.connect(options):
                pass

        with pytest.raises(ConnectFailed, match="did not answer"):
            asyncio.run(open_it())


def test_a_request_takes_no_longer_than_its_timeout_however_slowly_the_answer_comes() -> None:
    class Slow(Behaviour):
        def send(self, sock: socket.socket, data: bytes, limit: int | None) -> int | None:
            if b"vvvvvvvv" not in data:
                return super().send(sock, data, limit)
            for byte in data:
                sock.sendall(bytes([byte]))
                time.sleep(0.1)
            return limit

    with serving(everything, Slow(), make=Answering) as connection, connect(connection) as db:
        db.options = replace(db.options, request_timeout_s=0.5)
        db.operations.options = db.options
        db._drop(db.topology.nodes[0])
        with pytest.raises(ConnectFailed, match="did not answer in time"):
            db.get("k")


def test_a_feed_gives_up_a_handshake_that_never_ends() -> None:
    wire = Wire(FeedRequest({0: Position()}))
    wire.feed.connected(HOME, 100.0)
    assert wire.feed.late(105.0, 10.0) == []
    assert wire.feed.late(111.0, 10.0) == [HOME]
    wire.feed.lost(HOME, 111.0)
    wire.connect()
    assert wire.feed.late(1000.0, 10.0) == []


# -------------------------------------------------------------------------------------------------- wrong ports


@contextmanager
def closing_web() -> Iterator[str]:
    """A web server that hangs up on what it does not understand."""

    def answer(sock: socket.socket) -> None:
        with sock:
            if sock.recv(1000).startswith(b"HEAD"):
                sock.sendall(b"HTTP/1.1 200 OK\r\n\r\n")

    with talking(answer) as port:
        yield f"couchbase://127.0.0.1:{port}"


@contextmanager
def waiting_web() -> Iterator[str]:
    """A web server that waits for the end of the line."""

    def answer(sock: socket.socket) -> None:
        with sock:
            data = b""
            while b"\r\n\r\n" not in data and (more := sock.recv(1000)):
                data += more
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with talking(answer) as port:
        yield f"couchbase://127.0.0.1:{port}"


@pytest.mark.parametrize("serve", [waiting_web, closing_web])
def test_a_management_port_is_recognized_and_the_right_one_named(serve: Any) -> None:
    async def open_it(connection: str) -> None:
        async with upriver.aio.connect(connection):
            pass

    with serve() as connection:
        with pytest.raises(ConfigError, match=r"speaks HTTP.* 11210"):
            connect(connection)
        with pytest.raises(ConfigError, match=r"speaks HTTP.* 11210"):
            asyncio.run(open_it(connection))


# -------------------------------------------------------------------------------------------------- rollbacks


def rollback(request: Any, seqno: int) -> bytes:
    return RollbackResponse(seqno, status=Status.ROLLBACK, opaque=request.opaque).encode()


def test_a_producer_that_asks_for_one_rollback_after_the_other_is_asked_less_and_less_often() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 10, 10, 10)}))
    producer = wire.connect()
    for _ in range(200):
        asked, producer.requests = producer.requests, []
        for request in asked:
            wire.says(rollback(request, 0))
        wire.tick(0.05)
    assert len([m for m in producer.seen if m.opcode == Opcode.DCP_STREAM_REQ]) < 15, "within ten seconds"
    told = [event for event in wire.told if isinstance(event, RolledBack)]
    assert [(event.to_seqno, event.epoch) for event in told] == [(0, 1)], "there is nothing more to undo"


def test_a_first_rollback_is_followed_at_once() -> None:
    wire = Wire(FeedRequest({0: Position(BRANCH, 10, 10, 10)}))
    producer = wire.connect()
    wire.says(rollback(producer.requests.pop(), 0))
    request = producer.requests.pop()
    wire.says(producer.accepts(request) + marker(request, 0, 1) + mutation(request, 1))
    assert wire.seqnos == [1]
