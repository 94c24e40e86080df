"""A vbucket, with everything that can be done to it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.model import SEQNO_MAX, Document, VbucketState
from upriver.store import kernels as k
from upriver.store.bulk import Bulk
from upriver.store.documents import prefix_of
from upriver.store.durable import DurableWrites
from upriver.store.log.stream import StreamSource
from upriver.store.upkeep.rollback import roll_back
from upriver.store.withmeta import WithMetaWrites
from upriver.wire.packed import unpack
from upriver.wire.source_events import EndReason, Run


class VBucket(Bulk, WithMetaWrites, DurableWrites):
    """One vbucket of a ``Bucket``."""

    def stream(
        self, start: int, end: int = SEQNO_MAX, *, snap_start: int | None = None, snap_end: int | None = None,
        collections: frozenset[int] | None = None, wake: Callable[[], None] | None = None, ignore_purged: bool = False,
        purge_seqno: int = 0, disk_only: bool = False, oso: bool = False, visible_only: bool = False,
    ) -> StreamSource:  # fmt: skip
        """Everything in ``(start, end]``; the caller has checked the history (``protocol.history``)."""
        with self.shared.lock:
            if start > self.high_seqno and start < end:
                raise InvalidArguments(f"start {start} is above the high seqno {self.high_seqno}")
            if end == self.high_seqno:
                self.close_segment()  # so that a snapshot ends exactly there
            if disk_only:
                end = min(end, self.persisted_seqno)
            source = StreamSource(
                self, start, end, snap_start=snap_start, snap_end=snap_end, collections=collections, wake=wake,
                ignore_purged=ignore_purged, purge_seqno=purge_seqno, disk_only=disk_only, oso=oso,
                visible_only=visible_only,
            )  # fmt: skip
            self.sources.add(source)
            return source

    def get_random_key(self, collection_id: int = 0) -> Document:
        """Some live document of the collection."""
        with self.shared.lock:
            self._require_active()
            row = self.collection_row(collection_id)
            if not row[k.C_ITEMS]:
                raise KeyNotFound
            begin = random.randrange(int(row[k.C_START]), int(row[k.C_HIGH]) + 1)
            for start in (begin, int(row[k.C_START])):
                for document in self._documents_after(start, collection_id):
                    return document
        raise KeyNotFound

    def _documents_after(self, start: int, collection_id: int) -> Iterator[Document]:
        source = self.stream(start, self.high_seqno)
        while (event := source.poll()) is not None:
            if not isinstance(event, Run):
                continue
            at = 0
            while at < len(event.data):
                head, wire_key, _ = unpack(event.data, at)
                at += head.size
                key = wire_key[len(prefix_of(collection_id)) :]
                if head.collection_id == collection_id and self._lookup(wire_key).seqno == head.seqno:
                    document = self._version(wire_key, key, collection_id)
                    if document is not None and not document.deleted and not self._is_expired(document):
                        source.close()
                        yield document

    def end_streams(self, reason: EndReason) -> None:
        for source in list(self.sources):
            source.kill(reason)

    def release_memory(self) -> None:
        """Let go of every checkpoint that is on disk; who reads next reads there."""
        with self.shared.lock:
            log = self.memory
            while log.checkpoints and log.flushed(log.checkpoints[0]):
                log.checkpoints[0].closed = True
                log.evict()

    def change_state(self, state: VbucketState, *, takeover: bool, silent: bool) -> None:
        """To ``state``; the caller holds the lock and makes it durable."""
        self.close_segment()
        if state is VbucketState.ACTIVE:
            self._become_active(takeover)
        self.state = state
        self.locks.clear()
        if state is VbucketState.ACTIVE:
            self.adopt_manifest()
        if not silent:
            self.end_streams(EndReason.STATE_CHANGED)
        self.wake()

    def _become_active(self, takeover: bool) -> None:
        high = self.high_seqno
        if not takeover:
            complete = self.snap_end if self.snapshot_complete else self.complete_seqno
            self.failover_log = self.failover_log.branch(
                self.shared.random_uuid(), min(complete, high), self.shared.options.max_failover_entries
            )
        self.purge_seqno = min(self.purge_seqno, high)  # the rest of a snapshot that was cut short is no history
        self.memory.settle(high)
        self.snap_start = self.snap_end = self.complete_seqno = high
        self.registers[k.DEDUPED] = 0

    def rollback(self, to: int) -> int:
        """Undo every change above ``to``; durable on return. Returns where it really went, which may be lower.

        Only states that existed can be gone back to; if none is left the vbucket is emptied, and returns 0.
        """
        with self.shared.commit_lock, self.shared.lock:
            self._require_replica()
            self.shared.flush()
            self.end_streams(EndReason.STATE_CHANGED)
            return roll_back(self, to)

    @property
    def receiving_initial_disk_snapshot(self) -> bool:
        """A replica that has nothing consistent to offer yet (5.4, step 22)."""
        receiving = self.state is not VbucketState.ACTIVE and not self.snapshot_complete
        return receiving and self.snapshot_from_disk and self.complete_seqno == 0
