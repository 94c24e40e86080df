"""How the sink writes rows: each document becomes a request, pipelined per node and retried.

Writing the same rows again leaves the same documents. An upsert, a deletion or a write with metadata overwrites itself;
an insert or a replace recognises its own earlier success by the content.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from upriver.client._requests.operations import Ask, Operation
from upriver.client.blocking import Database, collection_names
from upriver.errors import TEMPORARY, ConfigError, ConnectFailed, Status, status_name
from upriver.model import DEFAULT_COLLECTION, Datatype, unsigned, vbucket_of
from upriver.protocol.feed.stream_states import backoff
from upriver.protocol.topology import Address
from upriver.records.schema import Event
from upriver.spark.options import WriteOperation, WriteOptions
from upriver.wire.constants import MetaOption, Opcode
from upriver.wire.keys import join_key
from upriver.wire.message import Message, Response
from upriver.wire.messages.kv import Add, Delete, Get, Set, WithMeta
from upriver.wire.values import join_xattrs

# Beside what a node refuses for a while: a document that somebody else is about to change.
_LATER = TEMPORARY | {
    Status.NOT_MY_VBUCKET,
    Status.LOCKED,
    Status.SYNC_WRITE_IN_PROGRESS,
    Status.SYNC_WRITE_RE_COMMIT_IN_PROGRESS,
}
_GONE = frozenset({Event.DELETION.value, Event.EXPIRATION.value})
_Replace = Set.under(Opcode.REPLACE)
_DeleteWithMeta = WithMeta.under(Opcode.DEL_WITH_META)
_META_COLUMNS = ("cas", "rev_seqno", "flags", "expiry")


@dataclass(slots=True)
class Write:
    """One row as a request, with what is needed to report its refusal."""

    key: bytes
    collection_id: int
    message: Message
    value: bytes | None = None  # None: a deletion
    row: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A document that the database will not take."""

    key: bytes
    value: bytes | None
    event: str | None
    scope: str | None
    collection: str | None
    reason: str


REFUSALS = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("event", pa.string()),
        pa.field("scope", pa.string()),
        pa.field("collection", pa.string()),
        pa.field("reason", pa.string()),
    ]
)


def check_columns(names: Sequence[str], options: WriteOptions) -> None:
    """``ConfigError``, before anything is written, if a column is missing."""
    needed = ["key"] if options.operation is WriteOperation.DELETE else ["key", "value"]
    if options.with_meta:
        needed += _META_COLUMNS
    missing = [name for name in needed if name not in names]
    if missing:
        why = " with withMeta=true" if options.with_meta else ""
        raise ConfigError(f"writing to dcp{why} needs the columns {', '.join(needed)}; missing: {', '.join(missing)}")


class DocumentWriter:
    """Writes the rows of one task."""

    def __init__(self, database: Database, options: WriteOptions) -> None:
        self._database, self._options = database, options
        self._ids = {path: number for number, path in collection_names(database).items()}
        self.written = 0

    def write(self, batch: pa.RecordBatch) -> list[Refusal]:
        """Write every row of a batch; the documents that the database refused for good."""
        refused: list[Refusal] = []
        left: dict[tuple[int, bytes], Write] = {}
        for row in batch.to_pylist():
            try:
                one = self._request(row)
            except (ConfigError, KeyError, ValueError, TypeError) as error:
                refused.append(_refusal(row, str(error)))
                continue
            if one is not None:
                self._queue(left, one)
        refused += self._send_until_done(list(left.values()))
        self.written += batch.num_rows - len(refused)
        return refused

    def _queue(self, left: dict[tuple[int, bytes], Write], one: Write) -> None:
        """Keep one write per document, or a retry could overtake a later one: the last, of inserts the first."""
        at = one.collection_id, one.key
        if self._options.operation is WriteOperation.INSERT and at in left:
            return
        left.pop(at, None)
        left[at] = one

    # ---------------------------------------------------------------------------------------------- one row

    def _request(self, row: Mapping[str, Any]) -> Write | None:
        event = row.get("event")
        if event is not None and event != Event.MUTATION and event not in _GONE:
            return None  # a rollback or a collection event, not a document
        key, number = _bytes(row["key"], "key"), self._collection(row)
        vb, wire_key = vbucket_of(key, self._database.topology.vbuckets), join_key(number, key)
        gone = event in _GONE or (event is None and self._options.operation is WriteOperation.DELETE)
        if self._options.with_meta:
            return self._with_meta(row, gone, Write(key, number, Delete(wire_key, vbucket=vb), None, row))
        if gone:
            return Write(key, number, Delete(wire_key, vbucket=vb), None, row)
        value = _bytes(row["value"], "value")
        head = (int(row.get("flags") or 0), self._expiry(row), wire_key, value)
        if self._options.operation is WriteOperation.INSERT:
            return Write(key, number, Add(*head, vbucket=vb), value, row)
        if self._options.operation is WriteOperation.REPLACE:
            cas = unsigned(row.get("cas") or 0)
            return Write(key, number, _Replace(*head, vbucket=vb, cas=cas), value, row)
        return Write(key, number, Set(*head, vbucket=vb), value, row)

    def _with_meta(self, row: Mapping[str, Any], gone: bool, base: Write) -> Write:
        """The document exactly as the row has it, without conflict resolution."""
        vb, wire_key = base.message.vbucket, join_key(base.collection_id, base.key)
        options = MetaOption.SKIP_CONFLICT_RESOLUTION
        rev, cas = unsigned(row["rev_seqno"]), unsigned(row["cas"])
        if gone:
            when = int(row.get("delete_time") or 0)
            if row.get("event") == Event.EXPIRATION:
                options |= MetaOption.IS_EXPIRATION
            head = (int(row["flags"] or 0), when, rev, cas, options, None, wire_key, b"")
            return Write(base.key, base.collection_id, _DeleteWithMeta(*head, vbucket=vb), None, row)
        value, datatype = _bytes(row["value"], "value"), Datatype(int(row.get("datatype") or 0)) & Datatype.JSON
        if row.get("xattrs"):
            value, datatype = join_xattrs(dict(row["xattrs"]), value), datatype | Datatype.XATTR
        head = (int(row["flags"] or 0), int(row["expiry"] or 0), rev, cas, options, None, wire_key, value)
        return Write(base.key, base.collection_id, WithMeta(*head, vbucket=vb, datatype=int(datatype)), value, row)

    def _collection(self, row: Mapping[str, Any]) -> int:
        scope, name = row.get("scope"), row.get("collection")
        if not name:
            first, dot, second = self._options.collection.partition(".")
            scope, name = (first, second) if dot else (self._options.scope or None, first)
        if not name:
            return DEFAULT_COLLECTION
        path = (scope or self._options.scope or "_default", name)
        if path not in self._ids:
            known = ", ".join(sorted(".".join(p) for p in self._ids))
            raise ConfigError(f"no collection {'.'.join(path)}; there are {known}")
        return self._ids[path]

    def _expiry(self, row: Mapping[str, Any]) -> int:
        """Absolute Unix seconds: a time to live from the option or the ``ttl`` column, else the ``expiry`` column."""
        ttl = row.get("ttl") or self._options.ttl_seconds
        return int(time.time()) + int(ttl) if ttl else int(row.get("expiry") or 0)

    # ---------------------------------------------------------------------------------------------- many rows

    def _send_until_done(self, left: list[Write]) -> list[Refusal]:
        refused: list[Refusal] = []
        deadline, attempt = time.monotonic() + self._options.timeout_seconds, 0
        while left:
            left, failed, trouble = self._send_once(left)
            refused += failed
            if not left:
                break
            attempt += 1
            if time.monotonic() > deadline:
                refused += [_refusal(one.row, f"{trouble}; gave up after timeoutSeconds") for one in left]
                break
            time.sleep(backoff(attempt))
            self._refresh()
        return refused

    def _refresh(self) -> None:
        try:
            self._database.refresh()
        except ConnectFailed:
            return  # the next attempt reports it, until the deadline

    def _send_once(self, writes: list[Write]) -> tuple[list[Write], list[Refusal], str]:
        """Send all writes once, node by node: those to send again, those refused, and the last temporary error."""
        again: list[Write] = []
        refused: list[Refusal] = []
        trouble = ""
        for address, part in self._by_node(writes):
            try:
                answers = self._ask(address, [one.message for one in part])
            except ConnectFailed as error:
                again, trouble = again + part, str(error)
                continue
            for one, answer in zip(part, answers, strict=True):
                if answer.status in _LATER:
                    again.append(one)
                    trouble = status_name(answer.status)
                elif reason := self._judge(one, answer, address):
                    refused.append(_refusal(one.row, reason))
        return again, refused, trouble

    def _by_node(self, writes: Iterable[Write]) -> Iterator[tuple[Address | None, list[Write]]]:
        found: dict[Address | None, list[Write]] = {}
        for one in writes:
            found.setdefault(self._database.topology.active(one.message.vbucket), []).append(one)
        return iter(found.items())

    def _ask(self, address: Address | None, messages: Sequence[Message]) -> list[Response]:
        if address is None:
            raise ConnectFailed("no node owns the vbucket")

        def conversation() -> Operation[list[Response]]:
            answers: list[Response] = yield Ask(address, messages)
            return answers

        return self._database.run(conversation())

    def _judge(self, one: Write, answer: Response, address: Address | None) -> str:
        """Why a document was refused; empty if it was written."""
        if answer.status == Status.SUCCESS:
            return ""
        if one.value is None and answer.status == Status.KEY_ENOENT:
            return ""  # it is already deleted
        if answer.status == Status.KEY_EEXISTS and one.value is not None and self._is_there(one, address):
            return ""  # an earlier attempt of ours succeeded
        return status_name(answer.status)

    def _is_there(self, one: Write, address: Address | None) -> bool:
        found = self._ask(address, [Get(join_key(one.collection_id, one.key), vbucket=one.message.vbucket)])[0]
        return found.status == Status.SUCCESS and getattr(found, "value", None) == one.value


def _bytes(value: Any, name: str) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    hint = "; use to_json() for structs" if isinstance(value, dict) else ""
    raise ConfigError(f"{name} is {type(value).__name__}, not binary or string{hint}")


def _refusal(row: Mapping[str, Any], reason: str) -> Refusal:
    def safely(name: str) -> Any:
        value = row.get(name)
        return value.encode() if isinstance(value, str) else value if isinstance(value, bytes) else None

    texts = {name: str(row[name]) if row.get(name) is not None else None for name in ("event", "scope", "collection")}
    return Refusal(safely("key") or b"", safely("value"), texts["event"], texts["scope"], texts["collection"], reason)
