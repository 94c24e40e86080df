"""Readers of streams, for the tests of the producer over real sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.node.raw import ALL, Raw, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.wire import Message, decode
from upriver.wire.checks import Context
from upriver.wire.constants import OpenFlag, StreamFlag
from upriver.wire.messages import dcp

OK = Status.SUCCESS
_names = itertools.count()


def manifest(uid: int, *collections: tuple[int, str]) -> bytes:
    shop = ",".join(f'{{"name":"{name}","uid":"{cid:x}"}}' for cid, name in collections)
    return (
        f'{{"uid":"{uid:x}","scopes":[{{"name":"_default","uid":"0","collections":[{{"name":"_default","uid":"0"}}]}},'
        f'{{"name":"shop","uid":"8","collections":[{shop}]}}]}}'
    ).encode()


def producer(node: NodeThread, *features: int, flags: int = 1, **controls: str) -> Raw:
    raw = ready(node.port, *(features or ALL))
    assert raw.ask(dcp.Open(0, flags | OpenFlag.PRODUCER, b"streams-%d" % next(_names))).specific == OK
    for key, value in {"enable_noop": "true", **controls}.items():
        assert raw.ask(dcp.DcpControl(key.encode(), value.encode())).specific == OK
    raw.context = Context(collections=raw.context.collections)
    return raw


def take(raw: Raw, until: Callable[[Message], bool]) -> list[Message]:
    """Messages up to and including the first that ``until`` accepts."""
    found: list[Message] = []
    while True:
        got = raw.receive()
        if got.magic.is_response:
            assert got.specific == OK, got
            continue
        found.append(decode(got, raw.context))
        if until(found[-1]):
            return found


def is_end(message: Message) -> bool:
    return isinstance(message, dcp.StreamEnd)


def stream(raw: Raw, vbucket: int, until: Callable[[Message], bool] = is_end, **fields: int | bytes) -> list[Message]:
    raw.send(dcp.StreamRequest(vbucket=vbucket, **fields))  # type: ignore[arg-type]
    return take(raw, until)


def whole(node: NodeThread, raw: Raw, vbucket: int, **fields: int | bytes) -> list[Message]:
    """Every message up to the present high seqno, including the end of the stream."""
    return stream(raw, vbucket, flags=StreamFlag.TO_LATEST, **fields)


def only(messages: list[Message], *kinds: type[Message]) -> list[Message]:
    return [m for m in messages if isinstance(m, kinds)]


def write(node: NodeThread, vbucket: int, *keys: bytes, cid: int = 0, value: bytes = b"v", **how: int) -> None:
    for key in keys:
        node.call(lambda key=key: node.vbucket(vbucket).documents.set(key, value, cid, **how))


def to_disk(node: NodeThread) -> None:
    """Move everything from memory to disk, so that the next stream backfills."""
    store = node.node.buckets.get("default").store
    node.call(store.flush)
    node.call(store.trim_memory)
