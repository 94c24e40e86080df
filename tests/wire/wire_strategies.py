"""Hypothesis strategies for every message, derived from the declarations that encode and decode it."""

from __future__ import annotations

from struct import calcsize
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from upriver.errors import PAYLOAD_STATUSES, Status
from upriver.wire import FrameInfo, Message, Response
from upriver.wire.constants import RequestFrameId, ResponseFrameId
from upriver.wire.layout import Bytes, FieldInfo, Number, Presence, Repeated, Section, ValueCodec
from upriver.wire.messages import cluster, dcp, events, kv, subdoc, upr

blobs = st.binary(max_size=40)
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20)
# Keys that are valid with and without collections: a zero byte is the default collection's prefix.
doc_keys = blobs.map(lambda raw: b"\0k" + raw)


def numbers(code: str) -> st.SearchStrategy[int]:
    bits = 8 * calcsize(">" + code)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if code.islower() else (0, (1 << bits) - 1)
    return st.sampled_from([low, 0, 1, 2, high]) | st.integers(low, high)


def content_of(info: FieldInfo, present: bool) -> st.SearchStrategy[Any]:
    layout = info.layout
    if isinstance(layout, Number):
        if not present:
            return st.none()
        if info.enum:
            return st.sampled_from([int(member) for member in info.enum])
        return numbers(layout.code)
    if isinstance(layout, Bytes):
        if layout.section is Section.KEY:
            return doc_keys if layout.document else blobs.map(lambda raw: b"k" + raw)
        return blobs.map(lambda raw: b"v" + raw) if layout.presence is Presence.REQUIRED else blobs
    if isinstance(layout, Repeated):
        entry = st.tuples(*map(numbers, layout.codes)).map(lambda each: layout.make(*each))
        return st.lists(entry, min_size=layout.at_least, max_size=5).map(tuple)
    assert isinstance(layout, ValueCodec)
    return PACKED[info.name]


_path = st.binary(min_size=1, max_size=12)
_status = st.sampled_from([0, int(Status.SUBDOC_PATH_ENOENT)])
_byte, _flags, _u64 = numbers("B"), numbers("I"), numbers("Q")
_lookup = st.builds(subdoc.LookupSpec, _byte, _byte, _path)
_change = st.builds(subdoc.MutationSpec, _byte, _byte, _path, blobs)
_cached = st.builds(
    events.CachedItem, _u64, _u64, _u64, _flags, _flags, st.integers(0, 7), _byte, doc_keys, blobs
)  # fmt: skip
PACKED: dict[str, st.SearchStrategy[Any]] = {
    "items": st.lists(_cached, min_size=1, max_size=3).map(tuple),
    "observed": st.lists(st.builds(cluster.ObservedKey, numbers("H"), doc_keys), min_size=1, max_size=3).map(tuple),
    "states": st.lists(
        st.builds(cluster.KeyState, numbers("H"), doc_keys, st.sampled_from([0, 1, 0x80, 0x81]), _u64), max_size=3
    ).map(tuple),
}
SPECS: dict[type[Message], st.SearchStrategy[Any]] = {
    subdoc.SubdocMultiLookup: st.lists(_lookup, min_size=1, max_size=4).map(tuple),
    subdoc.SubdocMultiMutation: st.lists(_change, min_size=1, max_size=4).map(tuple),
    subdoc.SubdocMultiLookupResponse: st.lists(st.builds(subdoc.LookupResult, _status, blobs), max_size=4).map(tuple),
    subdoc.SubdocMultiMutationResponse: st.lists(
        st.builds(subdoc.MutationResult, _byte, st.just(0), blobs)
        | st.builds(subdoc.MutationResult, _byte, st.just(int(Status.SUBDOC_PATH_ENOENT)), st.just(b"")),
        max_size=4,
    ).map(tuple),
}


@st.composite
def collection_events(draw: st.DrawFn) -> events.CollectionEvent:
    uid, scope, collection = draw(_u64), draw(_flags), draw(_flags)
    return draw(
        st.sampled_from(
            [
                events.CollectionBegun(draw(texts), uid, scope, collection, max_ttl=draw(st.none() | _flags)),
                events.CollectionEnded(uid, scope, collection),
                events.ScopeCreated(draw(texts), uid, scope),
                events.ScopeDropped(uid, scope),
            ]
        )
    )


@st.composite
def headers(draw: st.DrawFn, cls: type[Message]) -> dict[str, Any]:
    declared = cls.declared
    cas = {Presence.FORBIDDEN: st.just(0), Presence.REQUIRED: st.integers(1, (1 << 64) - 1), Presence.OPTIONAL: _u64}
    datatype = draw(st.sampled_from([*declared.datatypes]))
    found = {"opaque": draw(_flags), "cas": draw(cas[declared.cas]), "datatype": datatype}
    if issubclass(cls, Response):
        found["status"] = draw(st.sampled_from(sorted(PAYLOAD_STATUSES))) if cls.when is None else 0
        infos = st.builds(FrameInfo, st.sampled_from([*ResponseFrameId]).map(int), st.binary(min_size=2, max_size=2))
    else:
        found["vbucket"] = draw(numbers("H"))
        ids = [RequestFrameId.STREAM_ID] if declared.stream_id else []
        infos = st.builds(FrameInfo, st.sampled_from([*ids, RequestFrameId.IMPERSONATE_USER]).map(int), _two_bytes)
    if not cls.magic.is_server:
        found["frame_infos"] = tuple(draw(st.lists(infos, max_size=2)))
    return found


_two_bytes = st.binary(min_size=2, max_size=2)


@st.composite
def messages_of(draw: st.DrawFn, cls: type[Message]) -> Message:
    """A valid message of this class."""
    shape = draw(st.sampled_from([*cls.declared.shapes.values()]))
    found = draw(headers(cls))
    for info in cls.declared.fields:
        special = next((SPECS[base] for base in cls.__mro__ if base in SPECS), None)
        if isinstance(info.layout, ValueCodec) and special is not None:
            found[info.name] = draw(special)
        else:
            in_value = isinstance(info.layout, Number) and info.layout.section is Section.VALUE
            found[info.name] = draw(content_of(info, present=in_value or info.name in shape.names))
    for base, amend in AMENDMENTS.items():
        if issubclass(cls, base):
            amend(draw, found)
    return _mended(cls, found)


def _mended(cls: type[Message], found: dict[str, Any]) -> Message:
    """Replace numbers that break a rule by numbers that keep it."""
    for _ in range(8):
        broken = next(cls(**found).rules(), None)
        if broken is None:
            return cls(**found)
        for attempt in (0, 1, 2, 3):
            found[broken.field] = attempt
            again = next(cls(**found).rules(), None)
            if again is None or again.field != broken.field:
                break
    assume(False)
    raise AssertionError


def _open(draw: Any, found: dict[str, Any]) -> None:
    found["flags"] = draw(st.sampled_from([0, 1, 5, 0x20, 0x104, 0x201]))
    named = not found["flags"] & 1 and draw(st.booleans())
    found["value"], found["datatype"] = (b'{"consumer_name":"c"}', 1) if named else (b"", 0)


def _event(draw: Any, found: dict[str, Any]) -> None:
    event = events.SystemEvent.of(1, draw(collection_events()), flat=draw(st.booleans()))
    found |= {name: getattr(event, name) for name in ("event", "version", "key", "value")}


def _path_of(draw: Any, found: dict[str, Any]) -> None:
    found["path_len"] = len(found["path"])


def _path_in(draw: Any, found: dict[str, Any]) -> None:
    found["path_len"] = draw(st.integers(0, len(found["value"])))


def _collection_path(draw: Any, found: dict[str, Any]) -> None:
    sections = ("key", "value") if draw(st.booleans()) else ("value", "key")
    found[sections[0]], found[sections[1]] = b"_default.c", b""
    found["vbucket"] = 0


def _compaction(draw: Any, found: dict[str, Any]) -> None:
    found["datatype"] = int(bool(found["value"]))


def _of(**fixed: Any) -> Any:
    return lambda draw, found: found.update(fixed)


# What the declarations cannot express: fields that depend on each other, and statuses that choose a class.
AMENDMENTS: dict[type[Message], Any] = {
    dcp.Open: _open,
    dcp.SnapshotMarkerV20: _of(version=0),
    dcp.SnapshotMarkerV22: _of(version=2),
    dcp.RollbackResponse: _of(status=0x23),
    upr.UprRollbackResponse: _of(status=0x23),
    upr.UprStreamRequest: _of(flags=1),
    events.SystemEvent: _event,
    cluster.SetVbucket: _compaction,
    cluster.SetVbucketWide: _compaction,
    cluster.CompactDb: _compaction,
    cluster.GetCollectionId: _collection_path,
    cluster.ObserveSeqnoResponse: _of(format=0),
    cluster.ObserveSeqnoFailedOver: _of(format=1),
    kv.WithMeta: _of(nmeta=None),
    subdoc.SubdocLookup: _path_of,
    subdoc.SubdocMutation: _path_in,
}
