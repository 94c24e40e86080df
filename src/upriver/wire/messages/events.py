"""System events and cache transfers: messages whose value has its own structure.

See docs/protocol/collections.md#system-events and docs/protocol/messages.md#cache-transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from struct import Struct
from typing import Annotated, NamedTuple

from upriver.errors import InvalidMessage
from upriver.wire.constants import Opcode, SystemEventId
from upriver.wire.layout import U8, U64, Broken, Number, OptKey, OptValue, Presence, ValueCodec
from upriver.wire.message import Message, message
from upriver.wire.messages.flatbuffer import Column, Schema, read_table, write_table


@dataclass(frozen=True, slots=True)
class CollectionBegun:
    """A collection was created or flushed, or, if ``modified``, changed."""

    name: str
    manifest_uid: int
    scope_id: int
    collection_id: int
    max_ttl: int | None = None
    history: bool = False
    metered: bool = False
    flush_uid: int = 0
    default_collection_mvs: int = 0
    modified: bool = False


@dataclass(frozen=True, slots=True)
class CollectionEnded:
    """A collection was dropped."""

    manifest_uid: int
    scope_id: int
    collection_id: int
    system: bool = False


@dataclass(frozen=True, slots=True)
class ScopeCreated:
    name: str
    manifest_uid: int
    scope_id: int


@dataclass(frozen=True, slots=True)
class ScopeDropped:
    manifest_uid: int
    scope_id: int
    system: bool = False


CollectionEvent = CollectionBegun | CollectionEnded | ScopeCreated | ScopeDropped

_IDS: dict[type, SystemEventId] = {
    CollectionBegun: SystemEventId.BEGIN_COLLECTION,
    CollectionEnded: SystemEventId.END_COLLECTION,
    ScopeCreated: SystemEventId.CREATE_SCOPE,
    ScopeDropped: SystemEventId.DROP_SCOPE,
}
_UID_SCOPE = Struct(">QI")
_UID_SCOPE_COLLECTION = Struct(">QII")
_WITH_TTL = Struct(">QIII")
_RECORD_SUFFIX = Struct(">??Q")  # what the plain layout lacks: history, metered, flush uid
_FLAT_COLLECTION: Schema = (
    Column("uid", "Q"), Column("scopeId", "I"), Column("collectionId", "I"), Column("ttlValid", "?", False),
    Column("maxTtl", "I"), Column("name", "s", ""), Column("history", "?", False), Column("defaultCollectionMVS", "Q"),
    Column("metered", "?", False), Column("flushUid", "Q"),
)  # fmt: skip
_FLAT_DROPPED_COLLECTION: Schema = (
    Column("uid", "Q"), Column("scopeId", "I"), Column("collectionId", "I"), Column("systemCollection", "?", False),
)  # fmt: skip
_FLAT_SCOPE: Schema = (Column("uid", "Q"), Column("scopeId", "I"), Column("name", "s", ""))
_FLAT_DROPPED_SCOPE: Schema = (Column("uid", "Q"), Column("scopeId", "I"), Column("systemScope", "?", False))


@message(Opcode.DCP_SYSTEM_EVENT)
class SystemEvent(Message):
    """A collection or scope was created, changed or dropped; ``content()`` reads every version."""

    by_seqno: U64
    event: Annotated[int, Number("I"), SystemEventId]
    version: U8 = 0
    key: OptKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        if self.by_seqno == 0:
            yield Broken("by_seqno", "seqnos start at 1")
        if self.event not in SystemEventId._value2member_map_:
            yield Broken("event", f"system event {self.event} does not exist")
            return
        if self.version not in _versions(self.event):
            yield Broken("version", f"{SystemEventId(self.event).name} has no version {self.version}")
            return
        try:
            self.content()
        except InvalidMessage as error:
            yield Broken(error.field, error.reason)

    def content(self) -> CollectionEvent:
        """The event that this message describes; ``InvalidMessage`` if the bytes are wrong."""
        if self.version == 2:
            return _content_flat(self)
        size, wanted = len(self.value), _struct_of(self.event, self.version).size
        if size != wanted:
            raise InvalidMessage(f"value is {size} bytes, not {wanted}", "value")
        return _content_plain(self)

    @classmethod
    def of(cls, by_seqno: int, content: CollectionEvent, *, flat: bool = False, **header: int) -> SystemEvent:
        """The message for an event: version 2 if ``flat`` (FlatBuffers), else version 0 or 1."""
        name = _name_of(content)
        modified = isinstance(content, CollectionBegun) and content.modified
        event = SystemEventId.MODIFY_COLLECTION if modified else _IDS[type(content)]
        if flat:
            return cls(by_seqno, event, 2, name, _write_flat(content), **header)  # type: ignore[arg-type]
        version = 1 if isinstance(content, CollectionBegun) and content.max_ttl is not None else 0
        return cls(by_seqno, event, version, name, _write_plain(content), **header)  # type: ignore[arg-type]


def to_record(content: CollectionEvent) -> tuple[int, int, bytes, bytes]:
    """(event, version, key, value) for a record in the store: the plain layout, then the fields that it lacks."""
    plain = SystemEvent.of(0, content)
    suffix = b""
    if isinstance(content, CollectionBegun) and (content.history or content.metered or content.flush_uid):
        suffix = _RECORD_SUFFIX.pack(content.history, content.metered, content.flush_uid)
    return plain.event, plain.version, plain.key, plain.value + suffix


def of_record(event: int, version: int, key: bytes, value: bytes) -> CollectionEvent:
    """Undo ``to_record``, which stores a modification in the layout of a creation."""
    begins = event in (SystemEventId.BEGIN_COLLECTION, SystemEventId.MODIFY_COLLECTION)
    size = _struct_of(event, version).size
    plain = SystemEvent(0, SystemEventId.BEGIN_COLLECTION if begins else event, version, key, value[:size]).content()
    if not isinstance(plain, CollectionBegun):
        return plain
    history, metered, flush_uid = _RECORD_SUFFIX.unpack(value[size:]) if len(value) > size else (False, False, 0)
    modified = event == SystemEventId.MODIFY_COLLECTION
    return replace(plain, history=history, metered=metered, flush_uid=flush_uid, modified=modified)


def _versions(event: int) -> tuple[int, ...]:
    if event == SystemEventId.MODIFY_COLLECTION:
        return (2,)
    return (0, 1, 2) if event == SystemEventId.BEGIN_COLLECTION else (0, 2)


def _struct_of(event: int, version: int) -> Struct:
    if event in (SystemEventId.CREATE_SCOPE, SystemEventId.DROP_SCOPE):
        return _UID_SCOPE
    return _WITH_TTL if version == 1 else _UID_SCOPE_COLLECTION


def _content_plain(event: SystemEvent) -> CollectionEvent:
    uid, scope_id, *rest = _struct_of(event.event, event.version).unpack(event.value)
    if event.event == SystemEventId.BEGIN_COLLECTION:
        return CollectionBegun(_text(event.key), uid, scope_id, *rest)
    if event.event == SystemEventId.END_COLLECTION:
        return CollectionEnded(uid, scope_id, *rest)
    if event.event == SystemEventId.CREATE_SCOPE:
        return ScopeCreated(_text(event.key), uid, scope_id)
    return ScopeDropped(uid, scope_id)


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError as error:
        raise InvalidMessage("the name is not UTF-8", "key") from error


def _content_flat(event: SystemEvent) -> CollectionEvent:
    if event.event == SystemEventId.END_COLLECTION:
        f = read_table(event.value, _FLAT_DROPPED_COLLECTION)
        ended = (int(f["uid"]), int(f["scopeId"]), int(f["collectionId"]))
        return CollectionEnded(*ended, system=bool(f["systemCollection"]))
    if event.event == SystemEventId.CREATE_SCOPE:
        f = read_table(event.value, _FLAT_SCOPE)
        return ScopeCreated(str(f["name"]), int(f["uid"]), int(f["scopeId"]))
    if event.event == SystemEventId.DROP_SCOPE:
        f = read_table(event.value, _FLAT_DROPPED_SCOPE)
        return ScopeDropped(int(f["uid"]), int(f["scopeId"]), bool(f["systemScope"]))
    return _collection_flat(event)


def _collection_flat(event: SystemEvent) -> CollectionBegun:
    f = read_table(event.value, _FLAT_COLLECTION)
    return CollectionBegun(
        name=str(f["name"]),
        manifest_uid=int(f["uid"]),
        scope_id=int(f["scopeId"]),
        collection_id=int(f["collectionId"]),
        max_ttl=int(f["maxTtl"]) if f["ttlValid"] else None,
        history=bool(f["history"]),
        metered=bool(f["metered"]),
        flush_uid=int(f["flushUid"]),
        default_collection_mvs=int(f["defaultCollectionMVS"]),
        modified=event.event == SystemEventId.MODIFY_COLLECTION,
    )


def _name_of(content: CollectionEvent) -> bytes:
    return content.name.encode() if isinstance(content, CollectionBegun | ScopeCreated) else b""


def _write_plain(content: CollectionEvent) -> bytes:
    if isinstance(content, ScopeCreated | ScopeDropped):
        return _UID_SCOPE.pack(content.manifest_uid, content.scope_id)
    ids = content.manifest_uid, content.scope_id, content.collection_id
    if isinstance(content, CollectionBegun) and content.max_ttl is not None:
        return _WITH_TTL.pack(*ids, content.max_ttl)
    return _UID_SCOPE_COLLECTION.pack(*ids)


def _write_flat(content: CollectionEvent) -> bytes:
    f = asdict(content)
    common = {"uid": f["manifest_uid"], "scopeId": f["scope_id"]}
    if isinstance(content, ScopeCreated):
        return write_table(_FLAT_SCOPE, {**common, "name": content.name})
    if isinstance(content, ScopeDropped):
        return write_table(_FLAT_DROPPED_SCOPE, {**common, "systemScope": content.system})
    common["collectionId"] = f["collection_id"]
    if isinstance(content, CollectionEnded):
        return write_table(_FLAT_DROPPED_COLLECTION, {**common, "systemCollection": content.system})
    return write_table(
        _FLAT_COLLECTION,
        {
            **common, "ttlValid": content.max_ttl is not None, "maxTtl": content.max_ttl or 0, "name": content.name,
            "history": content.history, "defaultCollectionMVS": content.default_collection_mvs,
            "metered": content.metered, "flushUid": content.flush_uid,
        },
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- cache transfer

_CACHED = Struct(">QQQIIIHBB")


class CachedItem(NamedTuple):
    """One document of a cache transfer; the value is empty if only key and metadata were cached."""

    cas: int
    by_seqno: int
    rev_seqno: int
    flags: int
    expiry: int
    datatype: int
    hint: int
    key: bytes
    value: bytes


def _encode_items(items: tuple[CachedItem, ...]) -> bytes:
    out = bytearray()
    for item in items:
        out += _CACHED.pack(
            item.cas, item.by_seqno, item.rev_seqno, len(item.value), item.flags, item.expiry,
            len(item.key), item.datatype, item.hint,
        )  # fmt: skip
        out += item.key + item.value
    return bytes(out)


def _decode_items(data: bytes, offset: int) -> tuple[CachedItem, ...]:
    items = []
    at = 0
    while at < len(data):
        if len(data) - at < _CACHED.size:
            raise InvalidMessage("a cached item's header is cut short", "items", offset + at)
        cas, seqno, rev, value_len, flags, expiry, key_len, datatype, hint = _CACHED.unpack_from(data, at)
        if not 2 <= key_len <= 251:
            raise InvalidMessage(f"a cached key has {key_len} bytes, not 2 to 251", "items", offset + at + 36)
        start = at + _CACHED.size
        end = start + key_len + value_len
        if end > len(data):
            raise InvalidMessage("a cached item overruns the value", "items", offset + at)
        key, value = data[start : start + key_len], data[start + key_len : end]
        items.append(CachedItem(cas, seqno, rev, flags, expiry, datatype, hint, key, value))
        at = end
    return tuple(items)


@message(Opcode.DCP_CACHE_TRANSFER, cas=Presence.FORBIDDEN)
class CacheTransfer(Message):
    """Documents from the producer's cache, in no particular order, sent before the ordinary stream."""

    items: Annotated[tuple[CachedItem, ...], ValueCodec(_encode_items, _decode_items)]

    def rules(self) -> Iterator[Broken]:
        if not self.items:
            yield Broken("items", "a cache transfer has at least one item")
