"""What a feed reads, as one frozen dataclass, and the stream requests for it.

Names of collections are looked up when a feed is opened, and again when a collection is gone, so that a collection
that is dropped and created again is followed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from upriver.client._requests.operations import Operation, Operations
from upriver.client.names import Path, beyond, covers, named, path_of
from upriver.client.options import ConnectOptions
from upriver.client.positions import Positions
from upriver.errors import ConfigError, ForeignCheckpoint, UnknownCollection, UnknownScope
from upriver.model import OnRollback
from upriver.protocol.feed.events import FeedRequest
from upriver.protocol.filters import Filter
from upriver.protocol.position import Position
from upriver.protocol.session import FeedSettings
from upriver.wire.constants import OpenFlag, StreamFlag

if TYPE_CHECKING:
    from upriver.client.changes import Deletion, Mutation
    from upriver.client.checkpoints import CheckpointStore

BEGINNING, NOW, FOREVER = "beginning", "now", "forever"


class Content(StrEnum):
    """How much of each document a feed gets."""

    VALUES = "values"
    KEYS = "keys"  # key and metadata, no value
    METADATA = "metadata"  # the same, but with the datatype of the omitted value


class FeedKeywords(TypedDict, total=False):
    """The keyword arguments of ``changes`` and ``change_batches``; ``FeedOptions`` has their defaults."""

    start: Literal["beginning", "now"] | Mapping[int, Position]
    end: Literal["forever", "now"] | Mapping[int, int] | Positions
    vbuckets: Iterable[int] | None
    scope: str
    collections: str | Iterable[str]
    content: Content | Literal["values", "keys", "metadata"]
    xattrs: bool
    expiry_events: bool
    compressed: bool
    system_events: bool
    history: bool
    out_of_order: bool
    ignore_purged_tombstones: bool
    where: Callable[[Mutation | Deletion], bool] | None
    on_rollback: OnRollback | Literal["emit", "fail", "rewind"]
    wait_for_disk: bool
    rows: int
    linger_s: float
    idle_s: float | None
    name: str
    checkpoint: CheckpointStore | None


@dataclass(frozen=True, slots=True)
class FeedOptions:
    """What a feed reads, from where to where, and what it does at a rollback."""

    start: str | Mapping[int, Position] = BEGINNING  # "beginning", "now", or positions
    end: str | Mapping[int, int] | Positions = FOREVER  # "forever", "now", or seqnos or positions by vbucket
    vbuckets: tuple[int, ...] | None = None  # all
    scope: str = ""
    collections: tuple[str, ...] = ()  # "scope.collection"
    content: Content = Content.VALUES
    xattrs: bool = False
    expiry_events: bool = True  # an expired document is an expiration, not a deletion
    compressed: bool = False  # ask for compressed values on the wire; callers get them inflated
    system_events: bool = True
    history: bool = False  # every version of documents in collections that keep history
    out_of_order: bool = False  # allow any order in the first load of a collection, which is quicker
    ignore_purged_tombstones: bool = False
    where: Callable[[Mutation | Deletion], bool] | None = None  # the changes to deliver; the position moves anyway
    on_rollback: OnRollback = OnRollback.EMIT
    wait_for_disk: bool = False  # deliver changes only when they are on the disks of the active and all replicas
    rows: int = 16_384  # of an Arrow batch, about; always less than twice as many
    linger_s: float = 0.01  # how long rows wait for others to fill a batch
    idle_s: float | None = None  # stop when nothing has come for this time
    name: str = ""  # of the connections, in the nodes' statistics; by default a unique one
    checkpoint: CheckpointStore | None = None  # start at its position, if it has one; ``confirm`` saves to it
    completes: bool = False  # this feed reads what another one lacks: the only consistent point is 0

    @classmethod
    def of(cls, **given: Unpack[FeedKeywords]) -> FeedOptions:
        """From keyword arguments; strings are accepted for enums and for a single collection."""
        if unknown := sorted(set(given) - FeedKeywords.__annotations__.keys()):
            raise ConfigError(f"unknown option {unknown[0]!r}; valid are {', '.join(FeedKeywords.__annotations__)}")
        said: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        for name, kind in (("content", Content), ("on_rollback", OnRollback)):
            if name in said:
                said[name] = _enum(name, kind, said[name])
        if isinstance(said.get("collections"), str):
            said["collections"] = (said["collections"],)
        for name in ("collections", "vbuckets"):
            if name in said:
                said[name] = tuple(said[name])
        return cls(**said)

    def __post_init__(self) -> None:
        if self.scope and self.collections:
            raise ConfigError("give a scope or collections, not both")
        if isinstance(self.start, str) and self.start not in (BEGINNING, NOW):
            raise ConfigError(f"start: {self.start!r} is neither 'beginning', 'now' nor positions")
        if isinstance(self.end, str) and self.end not in (FOREVER, NOW):
            raise ConfigError(f"end: {self.end!r} is neither 'forever', 'now' nor positions")

    @property
    def filtered(self) -> bool:
        """Whether only a part of the bucket is read."""
        return bool(self.scope or self.collections)

    @property
    def filter(self) -> Filter:
        """What is read, as positions record it."""
        return named(self.scope, self.collections)

    @property
    def paths(self) -> set[Path]:
        """The collections that are read by name."""
        return set(map(path_of, self.collections))


def _enum(name: str, kind: type[StrEnum], value: str) -> StrEnum:
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name}: {value!r} is not one of {', '.join(kind)}") from None


def settings_of(options: ConnectOptions, read: FeedOptions) -> FeedSettings:
    """How the connections of a feed are opened.

    Without a ``name`` they get a unique one: a node closes a connection when another with the same name is opened.
    """
    flags = OpenFlag.PRODUCER | OpenFlag.INCLUDE_DELETE_TIMES
    if read.content is Content.KEYS:
        flags |= OpenFlag.NO_VALUE
    elif read.content is Content.METADATA:
        flags |= OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE
    if read.xattrs:
        flags |= OpenFlag.INCLUDE_XATTRS
    controls = [
        ("send_stream_end_on_client_close_stream", "true", False),
        ("flatbuffers_system_events", "true", False),  # the older layout does not distinguish a flush from a creation
    ]
    if read.expiry_events:
        controls.append(("enable_expiry_opcode", "true", False))
    if read.out_of_order:
        controls.append(("enable_out_of_order_snapshots", "true_with_seqno_advanced", False))
    if read.history:
        controls.append(("change_streams", "true", True))
    name = read.name or f"upriver:{secrets.token_hex(6)}"
    return FeedSettings(name, flags, options.window_bytes, options.noop_interval_s, read.compressed, tuple(controls))


def settled(operations: Operations, read: FeedOptions) -> Operation[FeedOptions]:
    """The options that this bucket supports: without a disk there is nothing to wait for."""
    if read.wait_for_disk and not (yield from operations.has_disk()):
        return replace(read, wait_for_disk=False)
    return read


def plan(operations: Operations, read: FeedOptions) -> Operation[FeedRequest]:
    """The stream requests for what is to be read."""
    total = operations.topology.vbuckets
    wanted = range(total) if read.vbuckets is None else list(read.vbuckets)
    if any(not 0 <= vb < total for vb in wanted):
        raise ConfigError(f"vbuckets: this bucket has 0 to {total - 1}")
    starts = yield from _starts(operations, read, wanted)
    ends: Mapping[int, int] = {}
    if read.end == NOW:
        ends = yield from operations.high_seqnos()
    elif not isinstance(read.end, str):
        ends = {vb: p.seqno if isinstance(p, Position) else int(p) for vb, p in read.end.items()}
    flags = StreamFlag.ACTIVE_VB_ONLY
    if read.ignore_purged_tombstones:
        flags |= StreamFlag.IGNORE_PURGED_TOMBSTONES
    value = yield from filter_value(operations, read)
    return FeedRequest(
        starts=starts,
        ends={vb: ends.get(vb, 0) for vb in starts} if read.end != FOREVER else {},
        flags=flags, value=value, on_rollback=read.on_rollback, follow=read.filtered,
        resumed=isinstance(read.start, Positions), back_to_zero=read.completes,
    )  # fmt: skip


def _starts(operations: Operations, read: FeedOptions, wanted: Iterable[int]) -> Operation[dict[int, Position]]:
    if read.start == BEGINNING:
        return {vb: Position() for vb in wanted}
    if read.start == NOW:
        seqnos = yield from operations.high_seqnos()
        logs = yield from operations.failover_logs(wanted)
        here = {vb: seqnos.get(vb, 0) for vb in logs}
        return {vb: Position.consistent_at(logs[vb].uuid, s) if s else Position() for vb, s in here.items()}
    if isinstance(read.start, Positions):
        check_belongs(read.start, operations)
    assert not isinstance(read.start, str)
    return {vb: read.start.get(vb, Position()) for vb in wanted}


def missed(operations: Operations, read: FeedOptions) -> Operation[list[FeedOptions]]:
    """Feeds for what the start positions lack because they were reached with a narrower filter.

    They must be read first. A stream has one filter and one start, so this takes separate streams.
    """
    if not isinstance(read.start, Positions):
        return []
    lacking: dict[Filter, dict[int, Position]] = {}
    for vb, at in read.start.items():
        wanted = read.vbuckets is None or vb in read.vbuckets
        if wanted and at.seqno and at.filter is not None and not covers(at.filter, read.filter):
            lacking.setdefault(at.filter, {})[vb] = at
    if not lacking:
        return []
    existing = yield from operations.collection_names()
    highs = yield from operations.high_seqnos()
    found = ((vbs, beyond(read.filter, had, existing.values())) for had, vbs in lacking.items())
    return [_feed_for_missed(read, vbs, what, highs) for vbs, what in found if what]


def _feed_for_missed(
    read: FeedOptions, vbuckets: Mapping[int, Position], what: Filter, highs: Mapping[int, int]
) -> FeedOptions:
    """A feed up to the position, or up to the high seqno if that is lower: the rest may be on a lost branch."""
    start = Positions({vb: Position(epoch=at.epoch) for vb, at in vbuckets.items()})
    ends = {vb: min(at.seqno, highs.get(vb, 0)) for vb, at in vbuckets.items()}
    scope, names = str(what.scope or ""), tuple(sorted(map(str, what.collections or ())))
    name = f"{read.name}:missed" if read.name else ""
    return replace(
        read, start=start, end=ends, vbuckets=tuple(vbuckets), scope=scope, collections=names, name=name,
        checkpoint=None, completes=True,
    )  # fmt: skip


def check_belongs(positions: Positions, operations: Operations) -> None:
    """``ForeignCheckpoint`` if positions are of another bucket, or of one with another number of vbuckets."""
    topology = operations.topology
    if positions.vbuckets and positions.vbuckets != topology.vbuckets:
        raise ForeignCheckpoint(
            f"the checkpoint is of a bucket with {positions.vbuckets} vbuckets, this one has {topology.vbuckets}; "
            "use another checkpoint name, or delete it to start again"
        )
    if positions.bucket_uuid and topology.bucket_uuid and positions.bucket_uuid != topology.bucket_uuid:
        raise ForeignCheckpoint(
            f"the checkpoint is of bucket {positions.bucket_uuid}, this one is {topology.bucket_uuid}: it was "
            "deleted and created again, or it is another cluster; use another checkpoint name, or delete it"
        )


def filter_value(operations: Operations, read: FeedOptions) -> Operation[bytes]:
    """The filter JSON of a stream request, with names looked up now; ``UnknownCollection`` if one does not exist."""
    if not read.filtered:
        return b""
    if read.scope:
        number = yield from operations.scope_id(read.scope)
        value = json.dumps({"scope": f"{number:x}"}).encode()
    else:
        value = filter_of((yield from collection_ids(operations, read)).values())
    # A server without collections has only the default one, and does not understand a filter.
    return value if (yield from operations.has_collections()) else b""


def collection_ids(
    operations: Operations, read: FeedOptions, missing_ok: bool = False
) -> Operation[dict[tuple[str, str], int]]:
    """The ids of the collections that are read by name."""
    found = {}
    for scope, name in sorted(read.paths):
        try:
            found[scope, name] = yield from operations.collection_id(f"{scope}.{name}")
        except (UnknownCollection, UnknownScope):
            if not missing_ok:
                raise
    return found


def filter_of(ids: Iterable[int]) -> bytes:
    """The filter JSON for these collections; empty if there are none."""
    listed = [f"{number:x}" for number in sorted(ids)]
    return json.dumps({"collections": listed}).encode() if listed else b""
