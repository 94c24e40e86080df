"""Durable writes on a standalone node that stops between prepare and commit: none is lost, no key stays locked."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.node.raw import ALL, Raw, frame, ready
from upriver import testing
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.store import Bucket, StoreOptions
from upriver.wire import Opcode
from upriver.wire.messages import kv

OK, MISSING = Status.SUCCESS, Status.KEY_ENOENT
TWO_COLLECTIONS = (
    b'{"uid":"1","scopes":[{"name":"_default","uid":"0","collections":'
    b'[{"name":"_default","uid":"0"},{"name":"c","uid":"8"}]}]}'
)
ONE_COLLECTION = b'{"uid":"2","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]}]}'


def durable(opcode: int, key: bytes, value: bytes, level: int, vbucket: int = 0) -> bytes:
    extras = b"" if opcode == Opcode.DELETE else bytes(8)
    return frame(opcode, extras=extras, key=key, value=value, vbucket=vbucket, framing=bytes((0x11, level)))


def write(raw: Raw, key: bytes, value: bytes, level: int) -> None:
    assert raw.ask(durable(Opcode.SET, key, value, level)).specific == OK


def test_a_durable_write_that_was_acknowledged_survives_kill_9():
    """The node dies as soon as the answer is here, while the commit waits for the disk."""
    with testing.node(vbuckets=2) as node:
        for level in (2, 3):
            with ready(node.kv_port) as raw:
                assert raw.ask(kv.Set(key=b"gone-%d" % level, value=b"v")).specific == OK
                write(raw, b"k%d" % level, b"[1]", level)
                assert raw.ask(durable(Opcode.DELETE, b"gone-%d" % level, b"", level)).specific == OK
            node.restart(kill=True)
            with ready(node.kv_port) as raw:
                assert raw.ask(kv.Get(b"k%d" % level)).value == b"[1]"
                assert raw.ask(kv.Get(b"gone-%d" % level)).specific == MISSING
                write(raw, b"k%d" % level, b"[2]", level)  # the key is not locked
                assert raw.ask(kv.Set(key=b"gone-%d" % level, value=b"v")).specific == OK


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """The data of a node whose prepares are on disk and whose commits are not."""
    path = tmp_path / "data" / "default"
    path.mkdir(parents=True)
    bucket = Bucket.open(path, name="default", vbuckets=8, options=StoreOptions(background=False))
    bucket.create_all(VbucketState.ACTIVE)
    bucket.apply_manifest(TWO_COLLECTIONS)
    vb = bucket.vbucket(0)
    vb.documents.set(b"old", b"1")
    vb.durable.prepare(b"new", b"2", level=2)
    vb.durable.prepare(b"old", b"", level=3, deleted=True)
    vb.durable.prepare(b"dropped", b"3", 8, level=2)
    bucket.flush()
    bucket.apply_manifest(ONE_COLLECTION)
    for key in (b"new", b"old"):
        vb.durable.commit(key)
    bucket.abandon()
    (path / "upriver.bucket").write_text("8")
    return tmp_path / "data"


def test_what_was_prepared_is_committed_when_the_bucket_opens(crashed: Path, make_node):
    node = make_node(data=crashed)
    with ready(node.port, *ALL) as raw:
        assert raw.ask(kv.Get(b"\0new")).value == b"2"
        assert raw.ask(kv.Get(b"\0old")).specific == MISSING
        for key in (b"\0new", b"\0old"):
            assert raw.ask(kv.Set(key=key, value=b"4")).specific == OK
    assert node.call(lambda: node.vbucket(0).pending) == {}


def test_a_durable_write_ends_with_its_collection(tmp_path: Path):
    with Bucket.open(tmp_path, name="b", vbuckets=1, options=StoreOptions(background=False)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        bucket.apply_manifest(TWO_COLLECTIONS)
        vb.durable.prepare(b"k", b"1", 8, level=1)
        vb.durable.prepare(b"k", b"1", 0, level=1)
        bucket.apply_manifest(ONE_COLLECTION)
        assert list(vb.pending) == [b"\0k"]
