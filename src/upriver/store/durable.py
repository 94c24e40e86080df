"""Durable writes as records: prepare, commit, abort. The node decides when enough replicas have the prepare.

A prepare is kept beside the committed version of its key. A COMMIT record carries the whole document, so that a stream
without sync writes can send it as an ordinary change; bit 63 of ``extra`` says that it deletes. The time of a deletion
is that of its prepare, which is the same on the active and its replicas.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.model import SEQNO_MAX, Document
from upriver.store import registers as r
from upriver.store.disk.file import Octets
from upriver.store.documents import JSON, Stored, document_of
from upriver.store.index import kernels as key_kernels
from upriver.store.log.kernels import runs
from upriver.store.values import is_json
from upriver.wire.keys import split_key
from upriver.wire.packed import HEADER_SIZE, RecordHead, RecordKind, pack, unpack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

DELETES = 1 << 63
LEVELS = range(1, 4)


class DurableWrites:
    """Durable writes on the active vbucket, which decides their outcome; a replica gets it through ``Replication``."""

    __slots__ = ("_shared", "_vb")

    def __init__(self, vbucket: VBucket) -> None:
        self._vb = vbucket
        self._shared = vbucket.shared

    @contextmanager
    def preparing(self, level: int) -> Iterator[None]:
        """Inside the ``with``, every write of a document is only prepared, whichever command makes it."""
        _check_level(level)
        with self._shared.lock:  # no other thread may write meanwhile
            self._vb.preparing_level = level
            try:
                yield
            finally:
                self._vb.preparing_level = 0

    def prepare(
        self, key: bytes, value: bytes, collection_id: int = 0, *, level: int, deleted: bool = False, flags: int = 0,
        expiry: int = 0, datatype: int = 0, cas: int = 0,
    ) -> Stored:  # fmt: skip
        """Prepare a write; the key accepts no other write until ``commit`` or ``abort``."""
        _check_level(level)
        vb, documents = self._vb, self._vb.documents
        with self._shared.lock:
            wire_key = documents.key_for_write(key, collection_id, value)
            documents.checked_body(value, datatype)
            current = documents.current_for_write(wire_key, key, collection_id, cas)
            if current is None and (cas or deleted):
                raise KeyNotFound
            time = self._shared.now_s if deleted else documents.absolute_expiry(expiry, collection_id)
            datatype = datatype or (JSON if is_json(value) else 0)
            stored = documents.write(
                RecordKind.PREPARE, wire_key, value, datatype, collection_id, flags=flags, time=time,
                rev_seqno=vb.lookup(wire_key).rev_seqno + 1, extra=level << 8 | deleted,
            )  # fmt: skip
            vb.pending[wire_key] = stored.seqno
            return stored

    def write_prepare(
        self, kind: RecordKind, wire_key: bytes, value: bytes, datatype: int, collection_id: int, flags: int, time: int,
        cas: int, rev_seqno: int,
    ) -> Stored:  # fmt: skip
        """Write the prepare of a mutation or a deletion; ``Documents.write`` calls this inside ``preparing``."""
        vb = self._vb
        stored = vb.documents.write(
            RecordKind.PREPARE, wire_key, value, datatype, collection_id, flags, time, cas,
            rev_seqno or vb.lookup(wire_key).rev_seqno + 1, vb.preparing_level << 8 | (kind is RecordKind.DELETION),
        )  # fmt: skip
        vb.pending[wire_key] = stored.seqno
        return stored

    def commit(self, key: bytes, collection_id: int = 0, prepared_seqno: int = 0) -> Stored:
        """Make the prepared document current."""
        return self._complete(RecordKind.COMMIT, key, collection_id, prepared_seqno)

    def abort(self, key: bytes, collection_id: int = 0, prepared_seqno: int = 0) -> Stored:
        """Discard the prepared document."""
        return self._complete(RecordKind.ABORT, key, collection_id, prepared_seqno)

    def _complete(self, kind: RecordKind, key: bytes, collection_id: int, prepared_seqno: int) -> Stored:
        vb, documents = self._vb, self._vb.documents
        with self._shared.lock:
            vb.require_active()
            wire_key = documents.wire_key(key, collection_id)
            head, value = self._prepared(wire_key, prepared_seqno)
            value = value if kind is RecordKind.COMMIT else b""
            stored = documents.write(
                kind, wire_key, value, head.datatype if value else 0, head.collection_id, flags=head.flags,
                time=head.time, cas=head.cas, rev_seqno=head.rev_seqno, extra=_outcome(kind, head),
            )  # fmt: skip
            del vb.pending[wire_key]
            return stored

    def completion(self, kind: RecordKind, wire_key: bytes, prepared_seqno: int, seqno: int) -> bytes:
        """The COMMIT or ABORT record at ``seqno`` for a prepare on this replica."""
        head, value = self._prepared(wire_key, prepared_seqno)
        value = value if kind is RecordKind.COMMIT else b""
        return pack(
            kind, wire_key, value, seqno=seqno, rev_seqno=head.rev_seqno, cas=head.cas, flags=head.flags,
            time=head.time, datatype=head.datatype if value else 0, collection_id=head.collection_id,
            extra=_outcome(kind, head),
        )  # fmt: skip

    def get_prepared(self, key: bytes, collection_id: int = 0) -> Document:
        """The pending durable write of a key."""
        with self._shared.lock:
            head, value = self._prepared(self._vb.documents.wire_key(key, collection_id), 0)
            return document_of(head, key, value)

    def is_prepared(self, key: bytes, collection_id: int, seqno: int) -> bool:
        """Whether the write with this seqno is still pending."""
        return self._vb.pending.get(self._vb.documents.wire_key(key, collection_id)) == seqno

    def _prepared(self, wire_key: bytes, seqno: int) -> tuple[RecordHead, bytes]:
        vb = self._vb
        entry = vb.lookup(wire_key, int(key_kernels.PREPARE_SALT))
        if wire_key not in vb.pending or (seqno and vb.pending[wire_key] != seqno) or not entry.seqno:
            raise KeyNotFound("no such durable write is pending")
        head, _, value = vb.record(entry)
        return head, value

    def drop_completed(self) -> None:
        """Forget prepares whose key has a later version: a disk snapshot sends commits as plain documents.

        Also forget the prepares of collections that were dropped or flushed.

        See docs/protocol/snapshots.md#seqnos.
        """
        vb = self._vb
        starts = {int(row[r.C_ID]): int(row[r.C_START]) for row in vb.collection_table}
        for wire_key, prepared in list(vb.pending.items()):
            start = starts.get(split_key(wire_key)[0], SEQNO_MAX)
            if prepared <= start or vb.lookup(wire_key).seqno > prepared:
                del vb.pending[wire_key]

    def note_received(self, records: Octets) -> None:
        """Update ``pending`` from a producer's records: add their prepares, remove what they commit or abort."""
        pending = self._vb.pending
        offsets = np.empty(records.size // HEADER_SIZE, np.int64)
        for at in offsets[: runs.specials(records, 0, records.size, offsets)]:
            head, wire_key, _ = unpack(records.data, int(at))
            if head.kind & 0x7F == RecordKind.PREPARE:
                pending[wire_key] = head.seqno
            else:
                pending.pop(wire_key, None)


def _check_level(level: int) -> None:
    if level not in LEVELS:
        raise InvalidArguments(f"durability level {level} is not one of 1, 2, 3")


def _outcome(kind: RecordKind, prepared: RecordHead) -> int:
    """``extra`` of the record that completes a prepare."""
    return prepared.seqno | (DELETES if kind is RecordKind.COMMIT and prepared.extra & 1 else 0)
