"""Which records a stream may see: a stream request's filter, kept up to date by system events.

The bulk encoder filters documents by ``collection_ids``; system events come here one by one. The filter of a scope
grows and shrinks with the events; a list of collections only shrinks. ``is_empty`` ends the stream with FilterEmpty.

See docs/protocol/collections.md#filters.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from upriver.model import DEFAULT_COLLECTION
from upriver.wire.constants import SystemEventId

_SCOPE_AND_COLLECTION = Struct(">II")
_AFTER_UID = 8
_SCOPE_EVENTS = (SystemEventId.CREATE_SCOPE, SystemEventId.DROP_SCOPE)


class StreamFilter:
    """The filter of one stream. ``collection_ids`` is None if every collection passes."""

    __slots__ = ("_ids", "flatbuffers", "is_empty", "legacy", "scope_id")

    def __init__(
        self, *, collections: bool, ids: Iterable[int] | None = None, scope_id: int | None = None,
        flatbuffers: bool = False,
    ) -> None:  # fmt: skip
        self.legacy = not collections
        self.scope_id = scope_id
        self.flatbuffers = flatbuffers
        self._ids: set[int] | None = {DEFAULT_COLLECTION} if self.legacy else None if ids is None else set(ids)
        self.is_empty = self._ids is not None and not self._ids and scope_id is None  # nothing can ever pass

    @property
    def collection_ids(self) -> frozenset[int] | None:
        return None if self._ids is None else frozenset(self._ids)

    @property
    def is_filtered(self) -> bool:
        """Whether the client chose collections; the single collection of a legacy stream is not a choice."""
        return not self.legacy and self._ids is not None

    def sees_collection(self, collection_id: int) -> bool:
        return self._ids is None or collection_id in self._ids

    def passes(self, event: int, value: bytes) -> bool:
        """Whether to send a system event (its value is in the plain layout); updates the filter."""
        if self.legacy:
            self._drop_default(event, value)
            return False
        if event == SystemEventId.MODIFY_COLLECTION and not self.flatbuffers:
            return False
        if self._ids is None:
            return True
        if event in _SCOPE_EVENTS:
            return self._passes_scope_event(event, value)
        return self._passes_collection(event, value)

    def _drop_default(self, event: int, value: bytes) -> None:
        if event == SystemEventId.END_COLLECTION and _ids_of(value)[1] == DEFAULT_COLLECTION:
            self.is_empty = True

    def _passes_scope_event(self, event: int, value: bytes) -> bool:
        if self.scope_id is None or int.from_bytes(value[_AFTER_UID : _AFTER_UID + 4], "big") != self.scope_id:
            return False
        self.is_empty = event == SystemEventId.DROP_SCOPE
        return True

    def _passes_collection(self, event: int, value: bytes) -> bool:
        assert self._ids is not None
        scope_id, collection_id = _ids_of(value)
        ours = scope_id == self.scope_id if self.scope_id is not None else collection_id in self._ids
        if ours and event == SystemEventId.END_COLLECTION:
            self._ids.discard(collection_id)
            self.is_empty = self.scope_id is None and not self._ids
        elif ours:
            self._ids.add(collection_id)
        return ours


def _ids_of(value: bytes) -> tuple[int, int]:
    scope_id, collection_id = _SCOPE_AND_COLLECTION.unpack_from(value, _AFTER_UID)
    return scope_id, collection_id
