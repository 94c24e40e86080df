"""Durable writes as records: prepare, commit, abort. Who has acknowledged what is decided elsewhere.

A prepare lives beside the committed version of its key. A COMMIT record carries the whole document, so that a stream
without sync writes can send it as an ordinary change; bit 63 of ``extra`` says that it deletes. The time of a deletion
is that of its prepare, which the active and its replicas have in common.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.model import SEQNO_MAX, Document
from upriver.store import kernels as k
from upriver.store.disk.file import Octets
from upriver.store.documents import Documents, Stored
from upriver.store.log import runs
from upriver.store.replica import DISK_FLAG, Replica
from upriver.wire.keys import split_key
from upriver.wire.packed import HEADER_SIZE, RecordHead, RecordKind, pack, unpack

DELETES = 1 << 63
LEVELS = range(1, 4)


class DurableWrites(Documents, Replica):
    """Both sides: the active vbucket that decides, and the replica that is told."""

    _unsettled = True  # documents may have come (from disk, or before a restart) that complete a prepare silently

    @contextmanager
    def preparing(self, level: int) -> Iterator[None]:
        """Inside, every write of a document is only prepared, whichever command makes it."""
        if level not in LEVELS:
            raise InvalidArguments(f"durability level {level} is not one of 1, 2, 3")
        with self.shared.lock:  # nobody else's writes
            self._preparing = level
            try:
                yield
            finally:
                self._preparing = 0

    def is_prepared(self, key: bytes, collection_id: int, seqno: int) -> bool:
        """Whether this very write waits for its commit."""
        return self.pending.get(self._wire_key(key, collection_id)) == seqno

    def _write(
        self, kind: RecordKind, wire_key: bytes, value: bytes, datatype: int, collection_id: int, *, flags: int = 0,
        time: int = 0, cas: int = 0, rev_seqno: int = 0, extra: int = 0,
    ) -> Stored:  # fmt: skip
        if not self._preparing or kind not in (RecordKind.MUTATION, RecordKind.DELETION):
            return self._write_now(kind, wire_key, value, datatype, collection_id, flags, time, cas, rev_seqno, extra)
        stored = self._write_now(
            RecordKind.PREPARE, wire_key, value, datatype, collection_id, flags=flags, time=time, cas=cas,
            rev_seqno=rev_seqno or self._lookup(wire_key).rev_seqno + 1,
            extra=self._preparing << 8 | (kind is RecordKind.DELETION),
        )  # fmt: skip
        self.pending[wire_key] = stored.seqno
        return stored

    def prepare(
        self, key: bytes, value: bytes, collection_id: int = 0, *, level: int, deleted: bool = False, flags: int = 0,
        expiry: int = 0, datatype: int = 0, cas: int = 0,
    ) -> Stored:  # fmt: skip
        """Announce a write; the key takes no other until ``commit`` or ``abort``."""
        if level not in LEVELS:
            raise InvalidArguments(f"durability level {level} is not one of 1, 2, 3")
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, value)
            self._checked_body(value, datatype)
            current = self._current_for_write(wire_key, key, collection_id, cas)
            if current is None and (cas or deleted):
                raise KeyNotFound
            time = self.shared.now_s if deleted else self._absolute_expiry(expiry, collection_id)
            stored = self._write(
                RecordKind.PREPARE, wire_key, value, datatype or self.detected(value), collection_id, flags=flags,
                time=time, rev_seqno=self._lookup(wire_key).rev_seqno + 1, extra=level << 8 | deleted,
            )  # fmt: skip
            self.pending[wire_key] = stored.seqno
            return stored

    def commit(self, key: bytes, collection_id: int = 0, prepared_seqno: int = 0) -> Stored:
        """Make the prepared document current."""
        with self.shared.lock:
            self._require_active()
            wire_key = self._wire_key(key, collection_id)
            head, value = self._prepared(wire_key, prepared_seqno)
            return self._complete(RecordKind.COMMIT, wire_key, head, value)

    def abort(self, key: bytes, collection_id: int = 0, prepared_seqno: int = 0) -> Stored:
        """Give the prepared document up."""
        with self.shared.lock:
            self._require_active()
            wire_key = self._wire_key(key, collection_id)
            head, _ = self._prepared(wire_key, prepared_seqno)
            return self._complete(RecordKind.ABORT, wire_key, head, b"")

    def commit_replica(self, key: bytes, collection_id: int, prepared_seqno: int, commit_seqno: int) -> None:
        """COMMIT as DCP sends it: the document is the one that was prepared here."""
        self._complete_replica(RecordKind.COMMIT, key, collection_id, prepared_seqno, commit_seqno)

    def abort_replica(self, key: bytes, collection_id: int, prepared_seqno: int, abort_seqno: int) -> None:
        self._complete_replica(RecordKind.ABORT, key, collection_id, prepared_seqno, abort_seqno)

    def get_prepared(self, key: bytes, collection_id: int = 0) -> Document:
        """The pending durable write of a key."""
        with self.shared.lock:
            head, value = self._prepared(self._wire_key(key, collection_id), 0)
            return self._document(head, key, value)

    def _prepared(self, wire_key: bytes, seqno: int) -> tuple[RecordHead, bytes]:
        found = self._lookup(wire_key, int(k.PREPARE_SALT))
        if wire_key not in self.pending or (seqno and self.pending[wire_key] != seqno) or not found.seqno:
            raise KeyNotFound("no such durable write is pending")
        head, _, value = self._record(found)
        return head, value

    def _complete(self, kind: RecordKind, wire_key: bytes, head: RecordHead, value: bytes) -> Stored:
        deletes = kind is RecordKind.COMMIT and head.extra & 1
        stored = self._write(
            kind, wire_key, value, head.datatype if value else 0, head.collection_id, flags=head.flags,
            time=head.time, cas=head.cas, rev_seqno=head.rev_seqno,
            extra=head.seqno | (DELETES if deletes else 0),
        )  # fmt: skip
        del self.pending[wire_key]
        return stored

    def _complete_replica(self, kind: RecordKind, key: bytes, collection_id: int, prepared: int, seqno: int) -> None:
        with self.shared.lock:
            self._require_replica()
            wire_key = self._wire_key(key, collection_id)
            if kind is RecordKind.ABORT and self.pending.get(wire_key) != prepared and self.snapshot_from_disk:
                self._apply(np.frombuffer(_bare_abort(wire_key, collection_id, prepared, seqno), np.uint8))
                self.pending.pop(wire_key, None)
                self._finish_snapshot()
                return
            head, value = self._prepared(wire_key, prepared)
            deletes = kind is RecordKind.COMMIT and head.extra & 1
            value = value if kind is RecordKind.COMMIT else b""
            record = pack(
                kind, wire_key, value, seqno=seqno, rev_seqno=head.rev_seqno, cas=head.cas, flags=head.flags,
                time=head.time, datatype=head.datatype if value else 0, collection_id=collection_id,
                extra=head.seqno | (DELETES if deletes else 0),
            )  # fmt: skip
            self._apply(np.frombuffer(record, np.uint8))
            self.pending.pop(wire_key, None)  # also when a later prepare was completed before this one
            self._finish_snapshot()

    def begin_snapshot(self, start: int, end: int, flags: int = 0x01, purge_seqno: int = 0) -> None:
        super().begin_snapshot(start, end, flags, purge_seqno)
        self._unsettled = self._unsettled or bool(flags & DISK_FLAG)

    def _finish_snapshot(self) -> None:
        super()._finish_snapshot()
        if self._unsettled and self.high_seqno == self.snap_end:
            self.drop_completed()
            self._unsettled = False

    def drop_completed(self) -> None:
        """Forget prepares whose key has a later version: a disk snapshot sends commits as plain documents (6.4).

        So are those that a dropped or flushed collection took with it.
        """
        born = {int(row[k.C_ID]): int(row[k.C_START]) for row in self.collections}
        for wire_key, prepared in list(self.pending.items()):
            begun = born.get(split_key(wire_key)[0], SEQNO_MAX)
            if prepared <= begun or self._lookup(wire_key).seqno > prepared:
                del self.pending[wire_key]

    def _apply(self, octets: Octets) -> None:
        before = (self.high_prepared_seqno, self.high_completed_seqno)
        super()._apply(octets)
        if before != (self.high_prepared_seqno, self.high_completed_seqno):
            self._note_pending(octets)

    def _note_pending(self, octets: Octets) -> None:
        offsets = np.empty(octets.size // HEADER_SIZE, np.int64)
        for at in offsets[: runs.specials(octets, 0, octets.size, offsets)]:
            head, wire_key, _ = unpack(octets.data, int(at))
            if head.kind & 0x7F == RecordKind.PREPARE:
                self.pending[wire_key] = head.seqno
            else:
                self.pending.pop(wire_key, None)


def _bare_abort(wire_key: bytes, collection_id: int, prepared: int, seqno: int) -> bytes:
    """A disk snapshot has the abort without its prepare, which the abort replaced."""
    return pack(RecordKind.ABORT, wire_key, b"", seqno=seqno, collection_id=collection_id, extra=prepared)
