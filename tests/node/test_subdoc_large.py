"""Sub-document commands on large documents: run in another thread, answered in order, and no update is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from struct import pack
from typing import Any

import pytest

from tests.node.raw import BASIC, Raw, frame, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.node.subdoc import commands as subdoc
from upriver.node.subdoc import write as subdoc_write
from upriver.wire import Opcode
from upriver.wire.constants import Feature, PathFlag
from upriver.wire.messages import kv, session

OK = Status.SUCCESS
LARGE = {"first": 1, "text": "x" * subdoc.LARGE, "counter": 0, "last": 2}


class Gate:
    """Holds work back until it is released, and tells when work has arrived."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.reached.set()
            assert self.open.wait(30)
            return work(*arguments)

        return run


@pytest.fixture
def raw(node: NodeThread) -> Iterator[Raw]:
    with ready(node.port, *BASIC, Feature.ALT_REQUEST) as made:
        yield made


@pytest.fixture
def key(raw: Raw, request: pytest.FixtureRequest) -> bytes:
    name = request.node.name.encode()[:200]
    assert raw.ask(kv.Set(key=name, value=json.dumps(LARGE).encode())).specific == OK
    return name


def get(key: bytes, path: bytes, opaque: int = 0) -> bytes:
    return frame(Opcode.SUBDOC_GET, extras=pack(">HB", len(path), 0), key=key, value=path, opaque=opaque)


def change(opcode: int, key: bytes, path: bytes, value: bytes, flags: int = 0, cas: int = 0) -> bytes:
    return frame(opcode, extras=pack(">HB", len(path), flags), key=key, value=path + value, cas=cas)


def document(raw: Raw, key: bytes) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(raw.ask(kv.Get(key)).value)
    return content


def test_others_are_served_while_a_large_document_is_searched(
    node: NodeThread, raw: Raw, key: bytes, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(subdoc, "look", gate.around(subdoc.look))
    raw.send(get(key, b"last", opaque=1), session.Noop(opaque=2))
    assert gate.reached.wait(30)
    with ready(node.port) as other:
        assert other.ask(kv.Set(key=b"other", value=b"v")).specific == OK
    assert raw.is_silent(0.1), "its own answers keep their order"
    gate.open.set()
    assert [(got.opaque, got.value) for got in (raw.receive(), raw.receive())] == [(1, b"2"), (2, b"")]


def test_a_change_that_others_made_meanwhile_is_not_lost(
    node: NodeThread, raw: Raw, key: bytes, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(subdoc_write, "_apply", gate.around(subdoc_write._apply))
    raw.send(change(Opcode.SUBDOC_DICT_UPSERT, key, b"mine", b"1"))
    assert gate.reached.wait(30)
    changed = {**LARGE, "theirs": 2}
    with ready(node.port) as other:
        assert other.ask(kv.Set(key=key, value=json.dumps(changed).encode())).specific == OK
    gate.open.set()
    assert raw.receive().specific == OK
    assert document(raw, key) == {**changed, "mine": 1}


def test_a_cas_that_is_outdated_meanwhile_is_refused(
    node: NodeThread, raw: Raw, key: bytes, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(subdoc_write, "_apply", gate.around(subdoc_write._apply))
    cas = raw.ask(kv.Get(key)).cas
    raw.send(change(Opcode.SUBDOC_DICT_UPSERT, key, b"mine", b"1", cas=cas))
    assert gate.reached.wait(30)
    with ready(node.port) as other:
        assert other.ask(kv.Delete(key)).specific == OK
        assert other.ask(kv.Set(key=key, value=b"{}")).specific == OK
    gate.open.set()
    assert raw.receive().specific == Status.KEY_EEXISTS
    assert document(raw, key) == {}


def test_counting_from_many_connections_counts_everything(node: NodeThread, raw: Raw, key: bytes):
    clients = [ready(node.port) for _ in range(6)]
    for client in clients:
        client.send(*[change(Opcode.SUBDOC_COUNTER, key, b"counter", b"1") for _ in range(10)])
    statuses = {client.receive().specific for client in clients for _ in range(10)}
    for client in clients:
        client.socket.close()
    assert statuses == {OK}
    assert document(raw, key)["counter"] == 60


def test_macros_are_right_although_others_write_meanwhile(
    node: NodeThread, raw: Raw, key: bytes, monkeypatch: pytest.MonkeyPatch
):
    gate = Gate()
    monkeypatch.setattr(subdoc_write, "_apply", gate.around(subdoc_write._apply))
    flags = PathFlag.XATTR | PathFlag.EXPAND_MACROS
    raw.send(change(Opcode.SUBDOC_DICT_UPSERT, key, b"at", b'"${Mutation.seqno}"', flags=flags))
    assert gate.reached.wait(30)
    with ready(node.port) as other:
        assert other.ask(kv.Set(key=b"another", value=b"v")).specific == OK
    gate.open.set()
    seqno = int.from_bytes(raw.receive().extras[8:], "big")
    found = raw.ask(frame(Opcode.SUBDOC_GET, extras=pack(">HB", 2, PathFlag.XATTR), key=key, value=b"at")).value
    assert int(json.loads(found), 16) == seqno


def test_a_durable_change_is_durable(raw: Raw, key: bytes):
    extras = pack(">HB", 4, 0)
    request = frame(Opcode.SUBDOC_DICT_UPSERT, extras=extras, key=key, value=b"mine3", framing=b"\x11\x02")
    assert raw.ask(request).specific == OK
    assert document(raw, key)["mine"] == 3


@pytest.mark.parametrize(
    ("opcode", "path", "value", "status"),
    [
        (Opcode.SUBDOC_GET, b"none", b"", Status.SUBDOC_PATH_ENOENT),
        (Opcode.SUBDOC_DICT_ADD, b"first", b"1", Status.SUBDOC_PATH_EEXISTS),
        (Opcode.SUBDOC_COUNTER, b"text", b"1", Status.SUBDOC_PATH_MISMATCH),
    ],
)
def test_failures_have_their_status(raw: Raw, key: bytes, opcode: int, path: bytes, value: bytes, status: Status):
    assert raw.ask(change(opcode, key, path, value)).specific == status
    assert document(raw, key) == LARGE
