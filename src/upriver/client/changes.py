"""Changes as typed objects, for callers that read them one by one; made from columns in bulk."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise, repeat
from typing import NamedTuple

from upriver.client._feed.outbox import Bundle
from upriver.client.names import Names
from upriver.model import Datatype
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import CollectionChange, FeedEvent, FeedRows, RolledBack
from upriver.wire.bulk.decode import Columns
from upriver.wire.constants import Opcode
from upriver.wire.messages.events import CollectionBegun, CollectionEvent
from upriver.wire.values import inflate, split_xattrs

__all__ = ["Change", "CollectionChanged", "Deletion", "Mutation", "ObjectMaker", "RolledBack"]

_WRAPPED = int(Datatype.SNAPPY | Datatype.XATTR)


class Mutation(NamedTuple):
    """A document was written.

    ``value`` has no xattrs and is not compressed; None if values were not requested. ``vbuuid`` is the branch of the
    change, ``epoch`` the number of rollbacks of the vbucket before it.
    """

    vbucket: int
    seqno: int
    key: bytes
    value: bytes | None
    cas: int
    rev_seqno: int
    scope: str | None
    collection: str | None
    collection_id: int
    datatype: int
    flags: int
    expiry: int
    vbuuid: int
    epoch: int
    xattrs: Mapping[str, bytes] | None = None


class Deletion(NamedTuple):
    """A document was deleted, or has expired (``expired``)."""

    vbucket: int
    seqno: int
    key: bytes
    cas: int
    rev_seqno: int
    scope: str | None
    collection: str | None
    collection_id: int
    delete_time: int
    expired: bool
    vbuuid: int
    epoch: int
    xattrs: Mapping[str, bytes] | None = None


class CollectionChanged(NamedTuple):
    """A collection or scope was created, changed or dropped; every vbucket reports it. ``content`` has the details."""

    vbucket: int
    seqno: int
    scope: str | None
    collection: str | None
    content: CollectionEvent
    vbuuid: int
    epoch: int

    @property
    def created(self) -> bool:
        """Whether the collection exists after this event: it was created, changed or flushed."""
        return isinstance(self.content, CollectionBegun)


Change = Mutation | Deletion | RolledBack | CollectionChanged


class ObjectMaker:
    """Turns feed events into changes, one bundle per event."""

    holds = False  # every event becomes a bundle at once

    def __init__(
        self,
        feed: ClusterFeed,
        names: Names,
        *,
        values: bool = True,
        xattrs: bool = False,
        system_events: bool = True,
        where: Callable[[Mutation | Deletion], bool] | None = None,
    ) -> None:
        self.feed, self.names, self._where = feed, names, where
        self._values, self._xattrs, self._system_events = values, xattrs, system_events

    def add(self, event: FeedEvent) -> Iterator[Bundle]:
        if isinstance(event, FeedRows):
            yield self._rows(event)
        elif isinstance(event, RolledBack):
            yield Bundle([event], [], self.feed.table.frozen(), rolled_back=(event.vbucket, event.to_seqno))
        elif isinstance(event, CollectionChange):
            content = event.message.content()
            self.names.note(content)
            changed = CollectionChanged(
                event.vbucket, event.message.by_seqno, *self.names.path(content), content, event.vbuuid, event.epoch
            )
            yield Bundle([changed] if self._system_events else [], [], self.feed.table.frozen())

    def flush(self) -> Iterator[Bundle]:
        return iter(())

    def _rows(self, event: FeedRows) -> Bundle:
        rows = event.rows
        changes = self._changes(rows.columns, rows.first, rows.last)
        if self._where:
            changes = list(filter(self._where, changes))
        link = self.feed.links.get(event.link)
        if link and link.decoder.columns is rows.columns and rows.last == rows.columns.rows:
            link.decoder.clear()
        return Bundle(changes, [event], self.feed.table.frozen(), single=True)

    def _changes(self, columns: Columns, first: int, last: int) -> list[Mutation | Deletion]:
        events = columns["event"][first:last].tolist()
        datatypes = columns["datatype"][first:last]
        if columns.dropped or (datatypes & _WRAPPED).any() or set(events) != {Opcode.DCP_MUTATION}:
            return self._one_by_one(columns, first, last, events)
        c = _Lists(columns, first, last, self.names)
        values = _cut(columns, "value", first, last) if self._values else [None] * (last - first)
        rows = zip(
            c.vbucket, c.seqno, c.keys, values, c.cas, c.rev_seqno, c.scopes, c.collections, c.collection_id,
            datatypes.tolist(), c.flags, c.expiry, c.vbuuid, c.epoch, repeat(None), strict=False,
        )  # fmt: skip
        return _make_mutations(rows)

    def _one_by_one(self, columns: Columns, first: int, last: int, events: list[int]) -> list[Mutation | Deletion]:
        c = _Lists(columns, first, last, self.names)
        datatypes = columns["datatype"][first:last].tolist()
        delete_times = columns["delete_time"][first:last].tolist()
        found: list[Mutation | Deletion] = []
        for n, event in enumerate(events):
            if not event:
                continue
            value, xattrs, datatype = self._unwrapped(columns.value(first + n), datatypes[n])
            here = c.scopes[n], c.collections[n], c.collection_id[n]
            branch = c.vbuuid[n], c.epoch[n], xattrs
            if event == Opcode.DCP_MUTATION:
                content = value if self._values else None
                found.append(
                    Mutation(
                        c.vbucket[n], c.seqno[n], c.keys[n], content, c.cas[n], c.rev_seqno[n], *here, datatype,
                        c.flags[n], c.expiry[n], *branch,
                    )
                )  # fmt: skip
            else:
                expired = event == Opcode.DCP_EXPIRATION
                found.append(
                    Deletion(
                        c.vbucket[n], c.seqno[n], c.keys[n], c.cas[n], c.rev_seqno[n], *here, delete_times[n], expired,
                        *branch,
                    )
                )  # fmt: skip
        return found

    def _unwrapped(self, value: bytes, datatype: int) -> tuple[bytes, Mapping[str, bytes] | None, int]:
        if not value or not datatype & _WRAPPED:
            return value, None, datatype
        xattrs = None
        if datatype & Datatype.SNAPPY:
            value = inflate(value)
        if datatype & Datatype.XATTR:
            xattrs, value = split_xattrs(value)
        return value, xattrs if self._xattrs else None, datatype & ~_WRAPPED


def _make_mutations(rows: Iterator[tuple[object, ...]]) -> list[Mutation | Deletion]:
    """Make mutations from their fields, in a third of the time that calling ``Mutation`` takes.

    The garbage collector is paused: it would take as long again to look for cycles, which these tuples cannot have.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        return list(map(tuple.__new__, repeat(Mutation), rows))
    finally:
        if collecting:
            gc.enable()


class _Lists:
    """The columns of some rows as Python lists."""

    def __init__(self, columns: Columns, first: int, last: int, names: Names) -> None:
        def listed(name: str) -> list[int]:
            return columns[name][first:last].tolist()  # type: ignore[no-any-return]

        self.vbucket, self.seqno, self.cas = listed("vbucket"), listed("seqno"), listed("cas")
        self.rev_seqno, self.flags, self.expiry = listed("rev_seqno"), listed("flags"), listed("expiry")
        self.collection_id, self.epoch = listed("collection_id"), listed("epoch")
        self.vbuuid = columns["vbuuid"][first:last].view("u8").tolist()
        self.keys = _cut(columns, "key", first, last)
        self.scopes, self.collections = _names(self.collection_id, names)


def _names(ids: list[int], names: Names) -> tuple[list[str | None], list[str | None]]:
    """The scope and collection of each row; usually the same for all."""
    paths = {number: names.collections.get(number, (None, None)) for number in set(ids)}
    if len(paths) == 1:
        [(scope, collection)] = paths.values()
        return [scope] * len(ids), [collection] * len(ids)
    return [paths[number][0] for number in ids], [paths[number][1] for number in ids]


def _cut(columns: Columns, name: str, first: int, last: int) -> list[bytes]:
    at = columns.view(name + "_at")[first : last + 1]
    base, end = int(at[0]), int(at[-1])
    data = columns.view(name)[base:end].tobytes()
    edges = (at - base).tolist()
    return [data[a:b] for a, b in pairwise(edges)]
