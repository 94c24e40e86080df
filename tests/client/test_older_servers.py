"""Servers without collections (5.x, 6.x): one collection, bare keys, and the whole client works."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import upriver
from tests.support.by_id import ById
from tests.support.scripted_producer import ScriptedProducer, marker
from tests.support.scripted_server import SEQNOS, VBUCKETS, Behaviour, Peer, serving
from upriver.cli import cli
from upriver.client.blocking import connect
from upriver.errors import Status, StatusError, UnknownCollection, UnknownScope
from upriver.protocol.position import Position
from upriver.spark.options import ReadOptions as SparkOptions
from upriver.spark.reader.executor import Task, TaskReader
from upriver.spark.reader.planning import Range
from upriver.wire import Context, Message, Opcode, OtherResponse, decode
from upriver.wire.constants import Feature, StreamEndStatus
from upriver.wire.messages.cluster import GetAllVbSeqnos, GetAllVbSeqnosResponse, VbucketSeqno
from upriver.wire.messages.dcp import DcpMutation, StreamEnd, StreamRequest
from upriver.wire.messages.kv import Get, GetResponse, Set
from upriver.wire.messages.session import Hello, HelloResponse, Noop

ENDS = dict.fromkeys(range(VBUCKETS), SEQNOS)


class Older(Peer):
    """Grants no collections, and answers requests about them with the status of a real 6.0."""

    documents: dict[bytes, bytes] = {}  # shared by all connections, as a server's are

    def receive(self, data: bytes) -> bytes:
        answers = bytearray()
        for frame in self._splitter.receive(data):
            message = decode(frame, Context())
            self.seen.append(message)
            for answer in self._answer(message):
                answers += answer.encode()
        return bytes(answers)

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, Hello):
            features = tuple(f for f in message.features if f != Feature.COLLECTIONS)
            yield HelloResponse(features, opaque=message.opaque)
        elif message.opcode in (0xBA, 0xBB, 0xBC):
            status = Status.NO_COLLECTIONS_MANIFEST
            yield OtherResponse(message.opcode, status=status, opaque=message.opaque)
        elif isinstance(message, GetAllVbSeqnos):
            seqnos = tuple(VbucketSeqno(vb, SEQNOS) for vb in range(VBUCKETS))
            yield GetAllVbSeqnosResponse(seqnos, opaque=message.opaque)
        elif isinstance(message, Set):
            self.documents[message.key] = message.value
            if message.opcode == Opcode.SET:
                yield OtherResponse(Opcode.SET, cas=7, opaque=message.opaque)
        elif isinstance(message, Get):
            value = self.documents.get(message.key)
            if value is None:
                yield OtherResponse(Opcode.GET, status=Status.KEY_ENOENT, opaque=message.opaque)
            else:
                yield GetResponse(0, value=value, cas=7, opaque=message.opaque)
        elif isinstance(message, Noop):
            yield OtherResponse(Opcode.NOOP, opaque=message.opaque)
        elif isinstance(message, StreamRequest) and message.value:
            yield OtherResponse(Opcode.DCP_STREAM_REQ, status=Status.EINVAL, opaque=message.opaque)
        else:
            yield from super()._answer(message)


def stream(peer: ScriptedProducer, request: StreamRequest) -> bytes:
    """All changes after the requested seqno, with bare keys."""
    out = peer.accepts(request) + marker(request, request.start_seqno, SEQNOS)
    at = {"vbucket": request.vbucket, "opaque": request.opaque}
    for n in range(request.start_seqno + 1, SEQNOS + 1):
        out += DcpMutation(n, 1, key=b"%d:%d" % (request.vbucket, n), value=b"{}", cas=n << 16, **at).encode()
    return out + StreamEnd(StreamEndStatus.OK, **at).encode()


@pytest.fixture
def older() -> Iterator[str]:
    Older.documents = {}
    with serving(stream, Behaviour(), make=Older) as connection:
        yield connection


def test_a_server_without_collections_has_one_and_its_changes_are_read(older: str) -> None:
    with connect(older) as db:
        assert db.collections() == ["_default._default"]
        assert db.run(db.operations.collection_id("_default._default")) == 0
        changes = list(db.changes(end=ENDS))
        assert len(changes) == VBUCKETS * SEQNOS
        assert {(c.scope, c.collection, c.collection_id) for c in changes} == {("_default", "_default", 0)}
        assert sorted(c.seqno for c in changes if c.key.startswith(b"0:")) == list(range(1, SEQNOS + 1))
        assert sum(b.num_rows for b in db.change_batches(end="now", scope="_default")) == VBUCKETS * SEQNOS
        assert sum(b.num_rows for b in db.change_batches(end="now", collections="_default._default")) == 80
        assert sum(db.collection("_default").high_seqnos().values()) == VBUCKETS * SEQNOS


def test_the_asynchronous_client_reads_it_too(older: str) -> None:
    async def read() -> tuple[list[str], int]:
        async with upriver.aio.connect(older) as db:
            found = [change async for change in db.changes(end="now")]
            return await db.collections(), len(found)

    assert asyncio.run(read()) == (["_default._default"], VBUCKETS * SEQNOS)


def test_documents_have_bare_keys(older: str) -> None:
    with connect(older) as db:
        db.set("one", b"1")
        db.set_many({b"two": b"2", b"three": b"3"})
        assert Older.documents == {b"one": b"1", b"two": b"2", b"three": b"3"}
        assert db.get("two").value == b"2"


def test_a_collection_that_it_cannot_have_is_unknown(older: str) -> None:
    with connect(older) as db:
        with pytest.raises(UnknownCollection, match="no collections but"):
            db.collection("shop.orders").get("k")
        with pytest.raises(UnknownScope, match="no collections but"):
            list(db.changes(scope="shop"))
        with pytest.raises(UnknownCollection, match="no collections but the default one"):
            ById(db, 8).get("k")
        with pytest.raises(UnknownCollection, match="only the default one"):
            ById(db, 8).set_many({b"k": b"v"})


def run(*arguments: str) -> str:
    found = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.output


def test_tail_and_dump_work_on_it(older: str, tmp_path: Path) -> None:
    assert len(run("tail", older, "--json").splitlines()) == VBUCKETS * SEQNOS
    out = str(tmp_path / "dump")
    summary: Any = json.loads(run("dump", older, "--out", out, "--json"))
    assert summary["rows"] == VBUCKETS * SEQNOS
    assert json.loads(run("dump", older, "--out", out, "--json"))["rows"] == 0


def test_a_task_of_spark_reads_it(older: str) -> None:
    ranges = tuple(Range(vb, Position(), SEQNOS, 0) for vb in range(VBUCKETS))
    options = SparkOptions.parse({"connection": older, "timeoutSeconds": "60"})
    batches = list(TaskReader(Task(ranges, follow=True), options).batches())
    assert sum(batch.num_rows for batch in batches) == VBUCKETS * SEQNOS
    assert {path for batch in batches for path in batch["collection"].to_pylist()} == {"_default"}


@pytest.mark.parametrize(("code", "name"), [(0x34, "SCOPE_SIZE_LIMIT_EXCEEDED"), (0x89, "NO_COLLECTIONS_MANIFEST"),
                                            (0x8B, "COLLECTIONS_MANIFEST_IS_AHEAD")])  # fmt: skip
def test_every_status_of_real_servers_has_a_name(code: int, name: str) -> None:
    assert name in str(StatusError.of(code))
