"""The KV operations that clients run on the documents of one active vbucket.

Every operation either changes the memory log and returns, or raises and changes nothing.

See docs/protocol/vbuckets.md#states and docs/protocol/kv.md.
"""

from __future__ import annotations

import random
from contextlib import closing
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

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
from upriver.store import registers as r
from upriver.store.values import MOST_XATTR_BYTES, checked_body, is_json, split_value, surviving_xattrs
from upriver.wire.keys import MAX_COLLECTION_KEY, MAX_KEY, encode_leb128
from upriver.wire.packed import RecordHead, RecordKind, Run, pack, unpack

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

RELATIVE_EXPIRY_S = 30 * 86400
LOCK_S = 15
LONGEST_LOCK_S = 30
JSON, WRAPPED = int(Datatype.JSON), int(Datatype.SNAPPY | Datatype.XATTR)  # plain numbers: flags are slow

prefix_of = lru_cache(maxsize=4096)(encode_leb128)


class Stored(NamedTuple):
    """An accepted change: what a mutation response carries."""

    cas: int
    seqno: int
    vbuuid: int


class Documents:
    """The KV operations of one vbucket. ``cas`` 0 means any version."""

    __slots__ = ("_shared", "_vb")

    def __init__(self, vbucket: VBucket) -> None:
        self._vb = vbucket
        self._shared = vbucket.shared

    # ---- reading ----

    def get(self, key: bytes, collection_id: int = 0) -> Document:
        """The live document; reading an expired one turns it into a tombstone."""
        with self._shared.lock:
            self._vb.require_active()
            return self._live(self.wire_key(key, collection_id), key, collection_id)

    def get_replica(self, key: bytes, collection_id: int = 0) -> Document:
        """The document as this replica has it."""
        with self._shared.lock:
            if self._vb.state is not VbucketState.REPLICA:
                raise NotMyVbucket(f"vbucket {self._vb.id} is not a replica")
            document = self.version(self.wire_key(key, collection_id), key, collection_id)
            if document is None or document.deleted or self._is_expired(document):
                raise KeyNotFound
            return document

    def get_meta(self, key: bytes, collection_id: int = 0) -> Document:
        """The newest version, which may be a tombstone."""
        with self._shared.lock:
            self._vb.require_active()
            document = self.version(self.wire_key(key, collection_id), key, collection_id)
            if document is None:
                raise KeyNotFound
            return document

    def get_random(self, collection_id: int = 0) -> Document:
        """A live document of the collection, chosen at random."""
        vb = self._vb
        with self._shared.lock:
            vb.require_active()
            if not vb.collection_item_count(collection_id):
                raise KeyNotFound
            begin = vb.collection_start_seqno(collection_id)
            middle = random.randrange(begin, vb.collection_high_seqno(collection_id) + 1)
            for start in (middle, begin):
                document = self._first_live_after(start, collection_id)
                if document is not None:
                    return document
        raise KeyNotFound

    def _first_live_after(self, start: int, collection_id: int) -> Document | None:
        vb = self._vb
        prefix = len(prefix_of(collection_id))
        with closing(vb.stream(start, vb.high_seqno)) as source:
            while (event := source.poll()) is not None:
                at = 0
                while isinstance(event, Run) and at < len(event.data):
                    head, wire_key, _ = unpack(event.data, at)
                    at += head.size
                    if head.collection_id == collection_id and vb.lookup(wire_key).seqno == head.seqno:
                        document = self.version(wire_key, wire_key[prefix:], collection_id)
                        if document is not None and not document.deleted and not self._is_expired(document):
                            return document
        return None

    def _live(self, wire_key: bytes, key: bytes, collection_id: int) -> Document:
        document = self.version(wire_key, key, collection_id)
        if document is None or document.deleted:
            raise KeyNotFound
        if self._is_expired(document):
            self._expire(wire_key, document)
            raise KeyNotFound
        return document

    def version(self, wire_key: bytes, key: bytes, collection_id: int) -> Document | None:
        """The newest version of a key, live or not; None if there is none. The caller holds the lock."""
        vb = self._vb
        start = vb.collection_start_seqno(collection_id)
        entry = vb.lookup(wire_key)
        if entry.seqno <= start:
            return None
        head, stored_key, value = vb.record(entry)
        if stored_key != wire_key:
            return None  # another key with the same 64-bit hash
        return document_of(head, key, value)

    def _is_expired(self, document: Document) -> bool:
        return 0 < document.expiry <= self._shared.now_s

    def _expire(self, wire_key: bytes, document: Document) -> None:
        """Write the tombstone of an expired document."""
        kept, now = surviving_xattrs(document), self._shared.now_s
        self.write(RecordKind.EXPIRATION, wire_key, *kept, document.collection_id, time=now)
        self._vb.expired_count += 1

    # ---- writing ----

    def set(
        self, key: bytes, value: bytes, collection_id: int = 0, *, flags: int = 0, expiry: int = 0, datatype: int = 0,
        cas: int = 0, preserve_ttl: bool = False,
    ) -> Stored:  # fmt: skip
        """Store the document, over any version or only over the version ``cas``."""
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, value)
            time = self.absolute_expiry(expiry, collection_id)
            if cas or preserve_ttl or self._vb.locks:
                current = self.current_for_write(wire_key, key, collection_id, cas)
                if cas and current is None:
                    raise KeyNotFound
                if preserve_ttl and current is not None:
                    time = current.expiry
            return self._store(wire_key, value, collection_id, flags, time, datatype)

    def add(
        self, key: bytes, value: bytes, collection_id: int = 0, *, flags: int = 0, expiry: int = 0, datatype: int = 0
    ) -> Stored:
        """Store the document only if the key does not exist."""
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, value)
            known = self._vb.lookup(wire_key)
            maybe_live = known.seqno and not known.deleted
            if maybe_live and self.current_for_write(wire_key, key, collection_id, 0) is not None:
                raise KeyExists("the key exists")
            time = self.absolute_expiry(expiry, collection_id)
            return self._store(wire_key, value, collection_id, flags, time, datatype)

    def replace(
        self, key: bytes, value: bytes, collection_id: int = 0, *, flags: int = 0, expiry: int = 0, datatype: int = 0,
        cas: int = 0, preserve_ttl: bool = False,
    ) -> Stored:  # fmt: skip
        """Store the document only if the key exists."""
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, value)
            current = self._required(wire_key, key, collection_id, cas)
            time = current.expiry if preserve_ttl else self.absolute_expiry(expiry, collection_id)
            return self._store(wire_key, value, collection_id, flags, time, datatype)

    def delete(self, key: bytes, collection_id: int = 0, *, cas: int = 0) -> Stored:
        """Replace the document with a tombstone, which keeps the system xattrs."""
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, b"")
            current = self._required(wire_key, key, collection_id, cas)
            self._vb.locks.pop(wire_key, None)
            return self.write(
                RecordKind.DELETION, wire_key, *surviving_xattrs(current), collection_id, time=self._shared.now_s
            )

    def append(self, key: bytes, value: bytes, collection_id: int = 0, *, cas: int = 0) -> Stored:
        return self._extend(key, collection_id, cas, b"", value)

    def prepend(self, key: bytes, value: bytes, collection_id: int = 0, *, cas: int = 0) -> Stored:
        return self._extend(key, collection_id, cas, value, b"")

    def _extend(self, key: bytes, collection_id: int, cas: int, before: bytes, after: bytes) -> Stored:
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, before + after)
            current = self.current_for_write(wire_key, key, collection_id, cas)
            if current is None:
                raise NotStored("nothing to append to")
            blob, body = split_value(current)
            value = blob + before + body + after
            kept = current.datatype & Datatype.XATTR
            return self._store(wire_key, value, collection_id, current.flags, current.expiry, kept)

    def counter(
        self, key: bytes, delta: int, collection_id: int = 0, *, initial: int = 0, expiry: int = 0, create: bool = True,
        decrement: bool = False,
    ) -> tuple[int, Stored]:  # fmt: skip
        """Add to a decimal document (wraps at 64 bits) or subtract from it (stops at 0)."""
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, b"")
            current = self.current_for_write(wire_key, key, collection_id, 0)
            if current is None:
                if not create:
                    raise KeyNotFound
                time = self.absolute_expiry(expiry, collection_id)
                return initial, self._store(wire_key, b"%d" % initial, collection_id, 0, time, 0)
            blob, body = split_value(current)
            number = _decimal(body)
            number = max(0, number - delta) if decrement else (number + delta) & SEQNO_MAX
            kept = current.datatype & Datatype.XATTR
            value = blob + b"%d" % number
            return number, self._store(wire_key, value, collection_id, current.flags, current.expiry, kept)

    def touch(self, key: bytes, expiry: int, collection_id: int = 0) -> Stored:
        """Give the document a new expiry, which is a change like any other."""
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, b"")
            return self._touch(wire_key, self._required(wire_key, key, collection_id, 0), expiry)

    def get_and_touch(self, key: bytes, expiry: int, collection_id: int = 0) -> Document:
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, b"")
            self._touch(wire_key, self._required(wire_key, key, collection_id, 0), expiry)
            return self._live(wire_key, key, collection_id)

    def _touch(self, wire_key: bytes, current: Document, expiry: int) -> Stored:
        time = self.absolute_expiry(expiry, current.collection_id)
        if time == current.expiry:
            return Stored(current.cas, current.seqno, self._vb.uuid)
        return self.write(
            RecordKind.MUTATION, wire_key, current.value, current.datatype, current.collection_id, flags=current.flags,
            time=time,
        )  # fmt: skip

    # ---- document locks ----

    def lock(self, key: bytes, collection_id: int = 0, seconds: int = 0) -> Document:
        """Lock the document under a new CAS that only the caller knows, for 15 s by default and 30 s at most."""
        vb = self._vb
        with self._shared.lock:
            wire_key = self.key_for_write(key, collection_id, b"")
            current = self.current_for_write(wire_key, key, collection_id, 0)
            if current is None:
                raise KeyNotFound
            held = seconds if 0 < seconds <= LONGEST_LOCK_S else LOCK_S
            cas = vb.next_cas()
            vb.registers[r.CAS] = cas
            vb.locks[wire_key] = (cas, self._shared.now_s + held)
            return Document(
                key, current.value, collection_id, cas, current.seqno, current.rev_seqno, current.flags, current.expiry,
                current.datatype,
            )  # fmt: skip

    def unlock(self, key: bytes, cas: int, collection_id: int = 0) -> None:
        with self._shared.lock:
            self._vb.require_active()
            wire_key = self.wire_key(key, collection_id)
            self._live(wire_key, key, collection_id)
            held = self.lock_cas(wire_key)
            if held is None:
                raise NotLocked
            if held != cas:
                raise Locked("the lock is held under another CAS")
            del self._vb.locks[wire_key]

    def is_locked(self, key: bytes, collection_id: int = 0) -> bool:
        """Whether other clients see this document as locked."""
        return self.lock_cas(self.wire_key(key, collection_id)) is not None

    def lock_cas(self, wire_key: bytes) -> int | None:
        """The CAS that a key is locked under; None if it is not locked."""
        locks = self._vb.locks
        held = locks.get(wire_key)
        if held is None:
            return None
        if held[1] <= self._shared.now_s:
            del locks[wire_key]
            return None
        return held[0]

    # ---- steps that all writes share; the caller holds the lock ----

    def wire_key(self, key: bytes, collection_id: int) -> bytes:
        """The key with its collection prefix, as in records."""
        if not 1 <= len(key) <= (MAX_COLLECTION_KEY if collection_id else MAX_KEY):
            raise InvalidArguments(f"a key of {len(key)} bytes is not allowed")
        return prefix_of(collection_id) + key

    def key_for_write(self, key: bytes, collection_id: int, value: bytes) -> bytes:
        """The prefixed key, after the checks that every write must pass."""
        vb, shared = self._vb, self._shared
        vb.require_active()
        shared.check_room()
        if len(value) > shared.options.max_value_bytes + MOST_XATTR_BYTES:
            raise TooBig(f"{len(value)} bytes")
        vb.collection_row(collection_id)
        return self.wire_key(key, collection_id)

    def checked_body(self, value: bytes, datatype: int) -> bytes:
        """The body without compression and xattrs; raises if readers could not open the value."""
        return checked_body(value, datatype, self._shared.options.max_value_bytes)

    def current_for_write(self, wire_key: bytes, key: bytes, collection_id: int, cas: int) -> Document | None:
        """The live version that a write would replace, after checking its lock and ``cas``."""
        try:
            current = self._live(wire_key, key, collection_id)
        except KeyNotFound:
            return None
        held = self.lock_cas(wire_key)
        if held is not None:
            if cas != held:
                raise Locked
            del self._vb.locks[wire_key]
        elif cas and cas != current.cas:
            raise KeyExists("the CAS has changed")
        return current

    def _required(self, wire_key: bytes, key: bytes, collection_id: int, cas: int) -> Document:
        current = self.current_for_write(wire_key, key, collection_id, cas)
        if current is None:
            raise KeyNotFound
        return current

    def absolute_expiry(self, expiry: int, collection_id: int, *, relative: bool = True) -> int:
        """An expiry as unix seconds, capped by the max TTL of the collection, or of the bucket if that has none.

        ``relative``: small numbers are seconds from now, as in KV's expiry field.
        """
        shared = self._shared
        if relative and 0 < expiry <= RELATIVE_EXPIRY_S:
            expiry += shared.now_s
        entry = shared.manifest.collections.get(collection_id)
        longest = shared.options.max_ttl_s
        if entry is not None and entry.max_ttl is not None:
            longest = entry.max_ttl
        if not longest:
            return expiry
        latest = shared.now_s + longest
        return latest if expiry == 0 or expiry > latest else expiry

    def _store(self, wire_key: bytes, value: bytes, collection_id: int, flags: int, time: int, datatype: int) -> Stored:
        if datatype & WRAPPED:  # the JSON flag is never trusted: look at the body
            datatype = datatype & WRAPPED | (JSON if is_json(self.checked_body(value, datatype)) else 0)
        elif len(value) > self._shared.options.max_value_bytes:
            raise TooBig(f"{len(value)} bytes")
        else:
            datatype = JSON if is_json(value) else 0
        return self.write(RecordKind.MUTATION, wire_key, value, datatype, collection_id, flags, time)

    def write(
        self, kind: RecordKind, wire_key: bytes, value: bytes, datatype: int, collection_id: int, flags: int = 0,
        time: int = 0, cas: int = 0, rev_seqno: int = 0, extra: int = 0,
    ) -> Stored:  # fmt: skip
        """Append a change of a document, or its prepare inside ``preparing``; raises if the key has a pending one."""
        vb = self._vb
        if vb.preparing_level and kind in (RecordKind.MUTATION, RecordKind.DELETION):
            return vb.durable.write_prepare(kind, wire_key, value, datatype, collection_id, flags, time, cas, rev_seqno)
        if vb.pending and wire_key in vb.pending and kind not in (RecordKind.COMMIT, RecordKind.ABORT):
            raise SyncWriteInProgress
        cas = cas or vb.next_cas()
        record = pack(
            kind, wire_key, value, seqno=0, rev_seqno=rev_seqno, cas=cas, flags=flags, time=time, datatype=datatype,
            collection_id=collection_id, extra=extra,
        )  # fmt: skip
        vb.append_records(np.frombuffer(record, np.uint8), assign=True)
        return Stored(cas, vb.numbers[r.HIGH], vb.failover_log.uuid)


def document_of(head: RecordHead, key: bytes, value: bytes) -> Document:
    """The document that a record describes."""
    kind = head.kind & 0x7F
    commit_deletes = kind == RecordKind.COMMIT and bool(head.extra >> 63)
    gone = commit_deletes or kind in (RecordKind.DELETION, RecordKind.EXPIRATION)
    return Document(
        key, value, head.collection_id, head.cas, head.seqno, head.rev_seqno, head.flags, 0 if gone else head.time,
        head.datatype, gone, kind == RecordKind.EXPIRATION, head.time if gone else 0,
    )  # fmt: skip


def _decimal(body: bytes) -> int:
    text = body.strip()
    if not text.isdigit() or len(text) > 20 or int(text) > SEQNO_MAX:
        raise BadDelta("the document is not a decimal number")
    return int(text)
