"""What clients do to documents: the KV operations of one active vbucket (``protocol.md`` 7.4, 10.2, 10.5).

Every operation either changes the memory log and returns, or raises and has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import orjson

from upriver.errors import (
    BadDelta,
    InvalidArguments,
    KeyExists,
    KeyNotFound,
    Locked,
    NotLocked,
    NotMyVbucket,
    NotStored,
    SyncWriteInProgress,
    TooBig,
)
from upriver.model import SEQNO_MAX, Datatype, Document, VbucketState
from upriver.store import kernels as k
from upriver.store.core import Core, Found
from upriver.wire.keys import MAX_COLLECTION_KEY, MAX_KEY, encode_leb128
from upriver.wire.packed import HEADER_SIZE, Kind, Packed, pack

RELATIVE_EXPIRY_S = 30 * 86400
LOCK_S = 15
LONGEST_LOCK_S = 30
PRIVILEGED_BYTES = 1 << 20  # system xattrs may exceed the value limit by this much
CLOCK_MASK = ~0xFFFF
BULK_BYTES = 4 << 20
_JSON_STARTS = frozenset(b'{["-0123456789tfn \t\r\n')

prefix_of = lru_cache(maxsize=4096)(encode_leb128)


class Stored(NamedTuple):
    """A change that was taken: what a mutation response carries."""

    cas: int
    seqno: int
    vbuuid: int


def is_json(value: bytes) -> bool:
    """Whether the value is JSON text, by the first byte where that is enough."""
    if not value or value[0] not in _JSON_STARTS:
        return False
    try:
        orjson.loads(value)
    except orjson.JSONDecodeError:
        return False
    return True


class Documents(Core):
    """The operations. ``cas`` 0 means any."""

    # ---- reading ----

    def get(self, key: bytes, collection_id: int = 0) -> Document:
        """The live document; an expired one is turned into a tombstone on the way."""
        with self.shared.lock:
            self._require_active()
            return self._live(self._wire_key(key, collection_id), key, collection_id)

    def get_replica(self, key: bytes, collection_id: int = 0) -> Document:
        """The document as this replica has it."""
        with self.shared.lock:
            if self.state is not VbucketState.REPLICA:
                raise NotMyVbucket(f"vbucket {self.id} is not a replica")
            document = self._version(self._wire_key(key, collection_id), key, collection_id)
            if document is None or document.deleted or self._is_expired(document):
                raise KeyNotFound
            return document

    def get_meta(self, key: bytes, collection_id: int = 0) -> Document:
        """The newest version, which may be a tombstone."""
        with self.shared.lock:
            self._require_active()
            document = self._version(self._wire_key(key, collection_id), key, collection_id)
            if document is None:
                raise KeyNotFound
            return document

    def _live(self, wire_key: bytes, key: bytes, collection_id: int) -> Document:
        document = self._version(wire_key, key, collection_id)
        if document is None or document.deleted:
            raise KeyNotFound
        if self._is_expired(document):
            self._expire(wire_key, document)
            raise KeyNotFound
        return document

    def _version(self, wire_key: bytes, key: bytes, collection_id: int) -> Document | None:
        row = self.collection_row(collection_id)
        found = self._lookup(wire_key)
        if found.seqno <= int(row[k.C_START]):
            return None
        head, stored_key, value = self._record(found)
        if stored_key != wire_key:
            return None  # another key with the same 64-bit hash
        return self._document(head, key, value)

    def _document(self, head: Packed, key: bytes, value: bytes) -> Document:
        gone = self.is_tombstone(head)
        return Document(
            key, value, head.collection_id, head.cas, head.seqno, head.rev_seqno, head.flags,
            0 if gone else head.time, head.datatype, gone, head.kind & 0x7F == Kind.EXPIRATION, head.time if gone else 0,
        )  # fmt: skip

    def _is_expired(self, document: Document) -> bool:
        return 0 < document.expiry <= self.shared.now_s

    def _expire(self, wire_key: bytes, document: Document) -> Stored:
        """Write the tombstone of a document whose time has come."""
        return self._write(
            Kind.EXPIRATION, wire_key, *surviving_xattrs(document), document.collection_id, time=self.shared.now_s
        )

    # ---- writing ----

    def set(
        self, key: bytes, value: bytes, collection_id: int = 0, *, flags: int = 0, expiry: int = 0, datatype: int = 0,
        cas: int = 0, preserve_ttl: bool = False,
    ) -> Stored:  # fmt: skip
        """Store the document, whatever was there (or only over the version ``cas``)."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, value)
            time = self._absolute_expiry(expiry, collection_id)
            if cas or preserve_ttl or self.locks:
                current = self._current_for_write(wire_key, key, collection_id, cas)
                if cas and current is None:
                    raise KeyNotFound
                if preserve_ttl and current is not None:
                    time = current.expiry
            return self._store(wire_key, value, collection_id, flags, time, datatype)

    def add(
        self, key: bytes, value: bytes, collection_id: int = 0, *, flags: int = 0, expiry: int = 0, datatype: int = 0
    ) -> Stored:
        """Store the document only if there is none."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, value)
            found = self._lookup(wire_key)
            if found.seqno and not found.deleted and self._current_for_write(wire_key, key, collection_id, 0) is not None:
                raise KeyExists("the key exists")
            return self._store(
                wire_key, value, collection_id, flags, self._absolute_expiry(expiry, collection_id), datatype
            )

    def replace(
        self, key: bytes, value: bytes, collection_id: int = 0, *, flags: int = 0, expiry: int = 0, datatype: int = 0,
        cas: int = 0, preserve_ttl: bool = False,
    ) -> Stored:  # fmt: skip
        """Store the document only if there is one."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, value)
            current = self._required(wire_key, key, collection_id, cas)
            time = current.expiry if preserve_ttl else self._absolute_expiry(expiry, collection_id)
            return self._store(wire_key, value, collection_id, flags, time, datatype)

    def delete(self, key: bytes, collection_id: int = 0, *, cas: int = 0) -> Stored:
        """Replace the document by a tombstone; system xattrs stay."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, b"")
            current = self._required(wire_key, key, collection_id, cas)
            self.locks.pop(wire_key, None)
            return self._write(
                Kind.DELETION, wire_key, *surviving_xattrs(current), collection_id, time=self.shared.now_s
            )

    def append(self, key: bytes, value: bytes, collection_id: int = 0, *, cas: int = 0) -> Stored:
        return self._extend(key, collection_id, cas, b"", value)

    def prepend(self, key: bytes, value: bytes, collection_id: int = 0, *, cas: int = 0) -> Stored:
        return self._extend(key, collection_id, cas, value, b"")

    def _extend(self, key: bytes, collection_id: int, cas: int, before: bytes, after: bytes) -> Stored:
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, before + after)
            current = self._current_for_write(wire_key, key, collection_id, cas)
            if current is None:
                raise NotStored("nothing to append to")
            blob, body = split_value(current)
            value = blob + before + body + after
            self._check_size(value)
            kept = current.datatype & Datatype.XATTR
            return self._store(wire_key, value, collection_id, current.flags, current.expiry, kept)

    def counter(
        self, key: bytes, delta: int, collection_id: int = 0, *, initial: int = 0, expiry: int = 0, create: bool = True,
        decrement: bool = False,
    ) -> tuple[int, Stored]:  # fmt: skip
        """Count a decimal document up (wrapping at 64 bits) or down (not below 0)."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, b"")
            current = self._current_for_write(wire_key, key, collection_id, 0)
            if current is None:
                if not create:
                    raise KeyNotFound
                time = self._absolute_expiry(expiry, collection_id)
                return initial, self._store(wire_key, b"%d" % initial, collection_id, 0, time, 0)
            blob, body = split_value(current)
            number = _decimal(body)
            number = max(0, number - delta) if decrement else (number + delta) & SEQNO_MAX
            kept = current.datatype & Datatype.XATTR
            value = blob + b"%d" % number
            return number, self._store(wire_key, value, collection_id, current.flags, current.expiry, kept)

    def touch(self, key: bytes, expiry: int, collection_id: int = 0) -> Stored:
        """Give the document a new expiry; a change like any other."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, b"")
            return self._touch(wire_key, self._required(wire_key, key, collection_id, 0), expiry)

    def get_and_touch(self, key: bytes, expiry: int, collection_id: int = 0) -> Document:
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, b"")
            self._touch(wire_key, self._required(wire_key, key, collection_id, 0), expiry)
            return self._live(wire_key, key, collection_id)

    def _touch(self, wire_key: bytes, current: Document, expiry: int) -> Stored:
        time = self._absolute_expiry(expiry, current.collection_id)
        if time == current.expiry:
            return Stored(current.cas, current.seqno, self.uuid)
        return self._write(
            Kind.MUTATION, wire_key, current.value, current.datatype, current.collection_id, flags=current.flags, time=time
        )

    # ---- locks ----

    def lock(self, key: bytes, collection_id: int = 0, seconds: int = 0) -> Document:
        """The document under a new CAS that only its holder knows; 15 s unless told, 30 s at most."""
        with self.shared.lock:
            wire_key = self._prepare_write(key, collection_id, b"")
            current = self._current_for_write(wire_key, key, collection_id, 0)
            if current is None:
                raise KeyNotFound
            held = seconds if 0 < seconds <= LONGEST_LOCK_S else LOCK_S
            cas = self._next_cas()
            self.registers[k.CAS] = cas
            self.locks[wire_key] = (cas, self.shared.now_s + held)
            return Document(
                key, current.value, collection_id, cas, current.seqno, current.rev_seqno, current.flags, current.expiry,
                current.datatype,
            )  # fmt: skip

    def unlock(self, key: bytes, cas: int, collection_id: int = 0) -> None:
        with self.shared.lock:
            self._require_active()
            wire_key = self._wire_key(key, collection_id)
            self._live(wire_key, key, collection_id)
            held = self._lock_of(wire_key)
            if held is None:
                raise NotLocked
            if held != cas:
                raise Locked("the lock is held under another CAS")
            del self.locks[wire_key]

    def is_locked(self, key: bytes, collection_id: int = 0) -> bool:
        """Whether others see this document with the CAS of a locked one."""
        return self._lock_of(self._wire_key(key, collection_id)) is not None

    def _lock_of(self, wire_key: bytes) -> int | None:
        held = self.locks.get(wire_key)
        if held is None:
            return None
        if held[1] <= self.shared.now_s:
            del self.locks[wire_key]
            return None
        return held[0]

    # ---- many at once ----

    def set_many(
        self, keys: Sequence[bytes], values: Sequence[bytes], collection_id: int = 0, *, flags: int = 0, expiry: int = 0,
        datatype: int | None = None,
    ) -> int:  # fmt: skip
        """Store many documents; returns the high seqno. ``datatype`` None: JSON is detected value by value."""
        if datatype is None:
            datatypes = np.fromiter((is_json(value) for value in values), np.uint8, len(values))
        else:
            datatypes = np.full(len(values), datatype, np.uint8)
        time = self._absolute_expiry(expiry, collection_id)
        return self._write_many(Kind.MUTATION, keys, values, datatypes, collection_id, flags, time)

    def delete_many(self, keys: Sequence[bytes], collection_id: int = 0) -> int:
        """Write a tombstone for every key, whether it was there or not."""
        none = np.zeros(len(keys), np.uint8)
        return self._write_many(Kind.DELETION, keys, [b""] * len(keys), none, collection_id, 0, self.shared.now_s)

    def _write_many(
        self, kind: Kind, keys: Sequence[bytes], values: Sequence[bytes], datatypes: np.ndarray[tuple[int], np.dtype[np.uint8]],
        collection_id: int, flags: int, time: int,
    ) -> int:  # fmt: skip
        if len(keys) != len(values):
            raise InvalidArguments(f"{len(keys)} keys but {len(values)} values")
        prefix = prefix_of(collection_id)
        key_ends = np.fromiter(accumulate(map(len, keys)), np.int64, len(keys))
        value_ends = np.fromiter(accumulate(map(len, values)), np.int64, len(values))
        self._check_lengths(key_ends, value_ends, collection_id)
        with self.shared.lock:
            self._require_active()
            self.shared.check_room()
            self.collection_row(collection_id)
            total = (HEADER_SIZE + len(prefix)) * len(keys)
            total += int(key_ends[-1]) + int(value_ends[-1]) if len(keys) else 0
            run = np.empty(total, np.uint8)
            k.build(
                np.frombuffer(b"".join(keys), np.uint8), key_ends, np.frombuffer(b"".join(values), np.uint8), value_ends,
                datatypes, np.frombuffer(prefix, np.uint8), int(kind), collection_id, flags, time, run,
            )  # fmt: skip
            self.registers[k.CAS] = self._next_cas()
            run.flags.writeable = False  # one kind of array, one compiled kernel
            self._append(run, assign=True)
            return self.high_seqno

    def _check_lengths(self, key_ends: np.ndarray, value_ends: np.ndarray, collection_id: int) -> None:  # type: ignore[type-arg]
        if not len(key_ends):
            return
        lengths = np.diff(key_ends, prepend=0)
        if lengths.min() < 1 or lengths.max() > (MAX_COLLECTION_KEY if collection_id else MAX_KEY):
            raise InvalidArguments(f"a key of {lengths.min()} or {lengths.max()} bytes is not allowed")
        if np.diff(value_ends, prepend=0).max() > self.shared.options.max_value_bytes:
            raise TooBig("a value is larger than the bucket allows")

    # ---- shared steps ----

    def _require_active(self) -> None:
        if self.state is not VbucketState.ACTIVE:
            raise NotMyVbucket(f"vbucket {self.id} is {self.state.name.lower()} here")

    def _wire_key(self, key: bytes, collection_id: int) -> bytes:
        if not 1 <= len(key) <= (MAX_COLLECTION_KEY if collection_id else MAX_KEY):
            raise InvalidArguments(f"a key of {len(key)} bytes is not allowed")
        return prefix_of(collection_id) + key

    def _prepare_write(self, key: bytes, collection_id: int, value: bytes) -> bytes:
        self._require_active()
        self.shared.check_room()
        self._check_size(value)
        self.collection_row(collection_id)
        return self._wire_key(key, collection_id)

    def _check_size(self, value: bytes) -> None:
        if len(value) > self.shared.options.max_value_bytes + PRIVILEGED_BYTES:
            raise TooBig(f"{len(value)} bytes")

    def _current_for_write(self, wire_key: bytes, key: bytes, collection_id: int, cas: int) -> Document | None:
        """The live version that a write would replace, after checking its lock and ``cas``."""
        try:
            current = self._live(wire_key, key, collection_id)
        except KeyNotFound:
            return None
        held = self._lock_of(wire_key)
        if held is not None:
            if cas != held:
                raise Locked
            del self.locks[wire_key]
        elif cas and cas != current.cas:
            raise KeyExists("the CAS has changed")
        return current

    def _required(self, wire_key: bytes, key: bytes, collection_id: int, cas: int) -> Document:
        current = self._current_for_write(wire_key, key, collection_id, cas)
        if current is None:
            raise KeyNotFound
        return current

    def _absolute_expiry(self, expiry: int, collection_id: int) -> int:
        """KV's expiry field as unix seconds, capped by the collection's or the bucket's max TTL."""
        now = self.shared.now_s
        time = expiry if expiry == 0 or expiry > RELATIVE_EXPIRY_S else now + expiry
        entry = self.shared.manifest.collections.get(collection_id)
        longest = self.shared.options.max_ttl_s
        if entry is not None and entry.max_ttl is not None:
            longest = entry.max_ttl
        if longest and (time == 0 or time > now + longest):
            time = now + longest
        return time

    def _store(
        self, wire_key: bytes, value: bytes, collection_id: int, flags: int, time: int, datatype: int
    ) -> Stored:
        if not datatype & (Datatype.SNAPPY | Datatype.XATTR):
            if len(value) > self.shared.options.max_value_bytes:
                raise TooBig(f"{len(value)} bytes")
            datatype = Datatype.JSON if is_json(value) else 0
        return self._write(Kind.MUTATION, wire_key, value, int(datatype), collection_id, flags=flags, time=time)

    def _write(
        self, kind: Kind, wire_key: bytes, value: bytes, datatype: int, collection_id: int, *, flags: int = 0,
        time: int = 0, cas: int = 0, rev_seqno: int = 0, extra: int = 0,
    ) -> Stored:  # fmt: skip
        self._refuse_pending(wire_key, kind)
        cas = cas or self._next_cas()
        record = pack(
            kind, wire_key, value, seqno=0, rev_seqno=rev_seqno, cas=cas, flags=flags, time=time, datatype=datatype,
            collection_id=collection_id, extra=extra,
        )  # fmt: skip
        self._append(np.frombuffer(record, np.uint8), assign=True)
        return Stored(cas, self.high_seqno, self.uuid)

    def _next_cas(self) -> int:
        """Hybrid logical clock (10.5)."""
        return max(self.shared.now_ns() & CLOCK_MASK, int(self.registers[k.CAS]) + 1)

    def _refuse_pending(self, wire_key: bytes, kind: Kind) -> None:
        """A key with a pending prepare takes no other write."""
        if self.high_prepared_seqno <= self.high_completed_seqno or kind in (Kind.COMMIT, Kind.ABORT):
            return
        pending = self._lookup(wire_key, int(k.PREPARE_SALT))
        if pending.seqno > 0 and self._is_pending(pending):
            raise SyncWriteInProgress

    def _is_pending(self, found: Found) -> bool:
        return not found.deleted and found.seqno > self.high_completed_seqno


def split_value(document: Document) -> tuple[bytes, bytes]:
    """(xattr blob with its length, body) of a value; the blob is empty without xattrs."""
    if not document.datatype & Datatype.XATTR:
        return b"", document.value
    size = 4 + int.from_bytes(document.value[:4], "big")
    return document.value[:size], document.value[size:]


def surviving_xattrs(document: Document) -> tuple[bytes, int]:
    """(value, datatype) that a tombstone keeps: the system xattrs, whose names begin with ``_``."""
    if not document.datatype & Datatype.XATTR or document.datatype & Datatype.SNAPPY:
        return b"", 0
    blob, _ = split_value(document)
    kept, at = b"", 4
    while at + 4 <= len(blob):
        size = 4 + int.from_bytes(blob[at : at + 4], "big")
        if blob[at + 4 : at + 5] == b"_":
            kept += blob[at : at + size]
        at += size
    return (len(kept).to_bytes(4, "big") + kept, int(Datatype.XATTR)) if kept else (b"", 0)


def _decimal(body: bytes) -> int:
    text = body.strip()
    if not text.isdigit() or len(text) > 20 or int(text) > SEQNO_MAX:
        raise BadDelta("the document is not a decimal number")
    return int(text)
