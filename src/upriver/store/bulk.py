"""Writes of many documents in one call, for loaders and benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from upriver.errors import InvalidArguments, Locked, SyncWriteInProgress, TooBig
from upriver.store import registers as r
from upriver.store.disk.file import Octets
from upriver.store.documents import WRAPPED, prefix_of
from upriver.store.log.kernels import runs
from upriver.store.values import is_json
from upriver.wire.keys import MAX_COLLECTION_KEY, MAX_KEY
from upriver.wire.packed import HEADER_SIZE, RecordKind

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

Sizes = npt.NDArray[np.int64]


class BulkWrites:
    """Bulk writes of one vbucket. All or nothing: an error changes nothing."""

    __slots__ = ("_vb",)

    def __init__(self, vbucket: VBucket) -> None:
        self._vb = vbucket

    def set_many(
        self, keys: Sequence[bytes], values: Sequence[bytes], collection_id: int = 0, *, flags: int = 0,
        expiry: int = 0, datatype: int | None = None,
    ) -> int:  # fmt: skip
        """Store many documents; returns the high seqno. With ``datatype`` None, JSON is detected for each value."""
        if datatype is None:
            datatypes = np.fromiter((is_json(value) for value in values), np.uint8, len(values))
        else:
            datatypes = np.full(len(values), datatype, np.uint8)
            if datatype & WRAPPED:
                for value in values:
                    self._vb.documents.checked_body(value, datatype)
        time = self._vb.documents.absolute_expiry(expiry, collection_id)
        return self._write_many(RecordKind.MUTATION, keys, values, datatypes, collection_id, flags, time)

    def delete_many(self, keys: Sequence[bytes], collection_id: int = 0) -> int:
        """Write a tombstone for every key, whether it exists or not."""
        none, now = np.zeros(len(keys), np.uint8), self._vb.shared.now_s
        return self._write_many(RecordKind.DELETION, keys, [b""] * len(keys), none, collection_id, 0, now)

    def _write_many(
        self, kind: RecordKind, keys: Sequence[bytes], values: Sequence[bytes], datatypes: Octets, collection_id: int,
        flags: int, time: int,
    ) -> int:  # fmt: skip
        if len(keys) != len(values):
            raise InvalidArguments(f"{len(keys)} keys but {len(values)} values")
        key_sizes = np.fromiter(map(len, keys), np.int64, len(keys))
        value_sizes = np.fromiter(map(len, values), np.int64, len(values))
        self._check_sizes(key_sizes, value_sizes, collection_id)
        vb = self._vb
        with vb.shared.lock:
            vb.require_active()
            vb.shared.check_room()
            vb.collection_row(collection_id)
            run = _lay_out(kind, keys, key_sizes, values, value_sizes, datatypes, collection_id, flags, time)
            self._refuse_held(keys, collection_id)
            vb.registers[r.CAS] = vb.next_cas()
            vb.append_records(run, assign=True)
            return vb.high_seqno

    def _refuse_held(self, keys: Sequence[bytes], collection_id: int) -> None:
        """Raise if a key is locked or has a pending durable write; rarely are there any at all."""
        vb = self._vb
        if vb.locks or vb.pending:
            prefix = prefix_of(collection_id)
            for key in keys:
                if vb.documents.lock_cas(prefix + key) is not None:
                    raise Locked
                if prefix + key in vb.pending:
                    raise SyncWriteInProgress

    def _check_sizes(self, key_sizes: Sizes, value_sizes: Sizes, collection_id: int) -> None:
        if not len(key_sizes):
            return
        if key_sizes.min() < 1 or key_sizes.max() > (MAX_COLLECTION_KEY if collection_id else MAX_KEY):
            raise InvalidArguments(f"a key of {key_sizes.min()} or {key_sizes.max()} bytes is not allowed")
        if value_sizes.max() > self._vb.shared.options.max_value_bytes:
            raise TooBig("a value is larger than the bucket allows")


def _lay_out(
    kind: RecordKind, keys: Sequence[bytes], key_sizes: Sizes, values: Sequence[bytes], value_sizes: Sizes,
    datatypes: Octets, collection_id: int, flags: int, time: int,
) -> Octets:  # fmt: skip
    """The documents as packed records without seqnos."""
    prefix = np.frombuffer(prefix_of(collection_id), np.uint8)
    total = (HEADER_SIZE + prefix.size) * len(keys) + int(key_sizes.sum()) + int(value_sizes.sum())
    run = np.empty(total, np.uint8)
    runs.build(
        np.frombuffer(b"".join(keys), np.uint8), key_sizes, np.frombuffer(b"".join(values), np.uint8), value_sizes,
        datatypes, prefix, int(kind), collection_id, flags, time, run,
    )  # fmt: skip
    run.flags.writeable = False  # kernels are compiled for read-only input
    return run
