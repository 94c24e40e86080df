"""What clients do to documents: the KV operations of one active vbucket (``protocol.md`` 7.4, 10.2, 10.5).

Every operation either changes the memory log and returns, or raises and has changed nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

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
from upriver.store.core import Core
from upriver.store.values import MOST_XATTR_BYTES, checked_body, is_json, split_value, surviving_xattrs
from upriver.wire.keys import MAX_COLLECTION_KEY, MAX_KEY, encode_leb128
from upriver.wire.packed import RecordHead, RecordKind, pack

RELATIVE_EXPIRY_S = 30 * 86400
LOCK_S = 15
LONGEST_LOCK_S = 30
CLOCK_MASK = ~0xFFFF
JSON, WRAPPED = int(Datatype.JSON), int(Datatype.SNAPPY | Datatype.XATTR)  # plain numbers: flags are slow

prefix_of = lru_cache(maxsize=4096)(encode_leb128)


class Stored(NamedTuple):
    """A change that was taken: what a mutation response carries."""

    cas: int
    seqno: int
    vbuuid: int


class Documents(Core):
    """The operations. ``cas`` 0 means any."""

    _preparing = 0  # the durability level of the writes that are made now

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

    def _document(self, head: RecordHead, key: bytes, value: bytes) -> Document:
        gone = self.is_tombstone(head)
        return Document(
            key, value, head.collection_id, head.cas, head.seqno, head.rev_seqno, head.flags, 0 if gone else head.time,
            head.datatype, gone, head.kind & 0x7F == RecordKind.EXPIRATION, head.time if gone else 0,
        )  # fmt: skip

    def _is_expired(self, document: Document) -> bool:
        return 0 < document.expiry <= self.shared.now_s

    def _expire(self, wire_key: bytes, document: Document) -> Stored:
        """Write the tombstone of a document whose time has come."""
        stored = self._write(
            RecordKind.EXPIRATION, wire_key, *surviving_xattrs(document), document.collection_id, time=self.shared.now_s
        )
        self.expired_count += 1
        return stored

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
            maybe_live = found.seqno and not found.deleted
            if maybe_live and self._current_for_write(wire_key, key, collection_id, 0) is not None:
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
                RecordKind.DELETION, wire_key, *surviving_xattrs(current), collection_id, time=self.shared.now_s
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
            RecordKind.MUTATION, wire_key, current.value, current.datatype, current.collection_id, flags=current.flags,
            time=time,
        )  # fmt: skip

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
        if len(value) > self.shared.options.max_value_bytes + MOST_XATTR_BYTES:
            raise TooBig(f"{len(value)} bytes")

    def _checked_body(self, value: bytes, datatype: int) -> bytes:
        return checked_body(value, datatype, self.shared.options.max_value_bytes)

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
        """KV's expiry field as unix seconds."""
        relative = 0 < expiry <= RELATIVE_EXPIRY_S
        return self._capped(self.shared.now_s + expiry if relative else expiry, collection_id)

    def _capped(self, time: int, collection_id: int) -> int:
        """Not later than the collection's, or else the bucket's, max TTL allows."""
        entry = self.shared.manifest.collections.get(collection_id)
        longest = self.shared.options.max_ttl_s
        if entry is not None and entry.max_ttl is not None:
            longest = entry.max_ttl
        if not longest:
            return time
        latest = self.shared.now_s + longest
        return latest if time == 0 or time > latest else time

    @staticmethod
    def detected(value: bytes) -> int:
        """The datatype of a plain value."""
        return JSON if is_json(value) else 0

    def _store(self, wire_key: bytes, value: bytes, collection_id: int, flags: int, time: int, datatype: int) -> Stored:
        if datatype & WRAPPED:  # JSON is never believed, but seen: behind xattrs and compression too
            datatype = datatype & WRAPPED | self.detected(self._checked_body(value, datatype))
        elif len(value) > self.shared.options.max_value_bytes:
            raise TooBig(f"{len(value)} bytes")
        else:
            datatype = self.detected(value)
        if self._preparing:
            return self._write(RecordKind.MUTATION, wire_key, value, datatype, collection_id, flags=flags, time=time)
        return self._write_now(RecordKind.MUTATION, wire_key, value, datatype, collection_id, flags, time)

    def _write(
        self, kind: RecordKind, wire_key: bytes, value: bytes, datatype: int, collection_id: int, *, flags: int = 0,
        time: int = 0, cas: int = 0, rev_seqno: int = 0, extra: int = 0,
    ) -> Stored:  # fmt: skip
        """A change of a document, or only its announcement."""
        return self._write_now(kind, wire_key, value, datatype, collection_id, flags, time, cas, rev_seqno, extra)

    def _write_now(
        self, kind: RecordKind, wire_key: bytes, value: bytes, datatype: int, collection_id: int, flags: int = 0,
        time: int = 0, cas: int = 0, rev_seqno: int = 0, extra: int = 0,
    ) -> Stored:  # fmt: skip
        if self.pending and wire_key in self.pending and kind not in (RecordKind.COMMIT, RecordKind.ABORT):
            raise SyncWriteInProgress
        cas = cas or self._next_cas()
        record = pack(
            kind, wire_key, value, seqno=0, rev_seqno=rev_seqno, cas=cas, flags=flags, time=time, datatype=datatype,
            collection_id=collection_id, extra=extra,
        )  # fmt: skip
        self._append(np.frombuffer(record, np.uint8), assign=True)
        return Stored(cas, self.numbers[k.HIGH], self.failover_log.uuid)

    def _next_cas(self) -> int:
        """Hybrid logical clock (10.5)."""
        return max(self.shared.now_ns() & CLOCK_MASK, self.numbers[k.CAS] + 1)


def _decimal(body: bytes) -> int:
    text = body.strip()
    if not text.isdigit() or len(text) > 20 or int(text) > SEQNO_MAX:
        raise BadDelta("the document is not a decimal number")
    return int(text)
