"""Writes that carry their own metadata: conflict resolution between clusters (docs/protocol/kv.md#with-meta)."""

from __future__ import annotations

from enum import IntFlag
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments, InvalidCas, KeyExists, KeyNotFound, Locked
from upriver.model import SEQNO_MAX, Datatype, Document
from upriver.store.documents import JSON, Stored
from upriver.store.values import is_json
from upriver.wire.packed import RecordKind

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

MOST_AHEAD_NS = 3_900 * 10**9  # a clock may be wrong by a time zone, no more
MAX_REV = (1 << 48) - 1


class WithMetaOption(IntFlag):
    """Option bits of the with-meta commands."""

    NONE = 0
    FORCE = 0x01
    FORCE_ACCEPT = 0x02  # required on buckets that resolve by CAS, refused on others
    REGENERATE_CAS = 0x04  # needs SKIP_CONFLICT_RESOLUTION
    SKIP_CONFLICT_RESOLUTION = 0x08
    IS_EXPIRATION = 0x10


class WithMetaWrites:
    """Set, add and delete with metadata, for one vbucket."""

    __slots__ = ("_shared", "_vb")

    def __init__(self, vbucket: VBucket) -> None:
        self._vb = vbucket
        self._shared = vbucket.shared

    def set(
        self, key: bytes, value: bytes, collection_id: int = 0, *, rev_seqno: int, meta_cas: int, flags: int = 0,
        expiry: int = 0, datatype: int = 0, cas: int = 0, options: int = 0, add: bool = False,
    ) -> Stored:  # fmt: skip
        """Store the document if it wins over the current version, else raise ``KeyExists``; ``expiry`` is absolute."""
        incoming = Document(key, value, collection_id, meta_cas, 0, rev_seqno, flags, expiry, datatype & ~Datatype.JSON)
        return self._resolve(incoming, RecordKind.MUTATION, cas, WithMetaOption(options), add)

    def delete(
        self, key: bytes, collection_id: int = 0, *, rev_seqno: int, meta_cas: int, flags: int = 0,
        delete_time: int = 0, value: bytes = b"", datatype: int = 0, cas: int = 0, options: int = 0,
    ) -> Stored:  # fmt: skip
        """Store a tombstone if it wins over the current version; the key need not exist."""
        incoming = Document(
            key, value, collection_id, meta_cas, 0, rev_seqno, flags, 0, datatype, deleted=True, delete_time=delete_time
        )
        kind = RecordKind.EXPIRATION if options & WithMetaOption.IS_EXPIRATION else RecordKind.DELETION
        return self._resolve(incoming, kind, cas, WithMetaOption(options), add=False)

    def _resolve(self, incoming: Document, kind: RecordKind, cas: int, options: WithMetaOption, add: bool) -> Stored:
        documents = self._vb.documents
        with self._shared.lock:
            self._check_options(options, incoming)
            wire_key = documents.key_for_write(incoming.key, incoming.collection_id, incoming.value)
            current = documents.version(wire_key, incoming.key, incoming.collection_id)
            self._check_header_cas(wire_key, current, cas)
            if add and current is not None and not current.deleted:
                raise KeyExists("the key exists")
            skip = options & WithMetaOption.SKIP_CONFLICT_RESOLUTION
            if current is not None and not skip and not wins(incoming, current, lww=self._shared.options.lww):
                raise KeyExists("the version that is here wins")
            return self._write(wire_key, incoming, kind, options)

    def _write(self, wire_key: bytes, incoming: Document, kind: RecordKind, options: WithMetaOption) -> Stored:
        time = incoming.expiry
        if kind is not RecordKind.MUTATION:
            time = incoming.delete_time or self._shared.now_s
        elif time or self._shared.options.max_ttl_s or incoming.collection_id:
            time = self._vb.documents.absolute_expiry(time, incoming.collection_id, relative=False)
        datatype = int(incoming.datatype)
        body = self._vb.documents.checked_body(incoming.value, datatype)
        if kind is RecordKind.MUTATION:  # the JSON flag is never trusted: look at the body
            datatype |= JSON if is_json(body) else 0
        return self._vb.documents.write(
            kind, wire_key, incoming.value, datatype, incoming.collection_id, flags=incoming.flags, time=time,
            cas=0 if options & WithMetaOption.REGENERATE_CAS else incoming.cas, rev_seqno=incoming.rev_seqno,
        )  # fmt: skip

    def _check_options(self, options: WithMetaOption, incoming: Document) -> None:
        if bool(options & WithMetaOption.FORCE_ACCEPT) != self._shared.options.lww:
            raise InvalidArguments("force-accept is for buckets that resolve conflicts by CAS, and needed there")
        regenerate = options & WithMetaOption.REGENERATE_CAS
        if regenerate and not options & WithMetaOption.SKIP_CONFLICT_RESOLUTION:
            raise InvalidArguments("a CAS can be regenerated only when conflict resolution is skipped")
        if incoming.cas in (0, SEQNO_MAX) and not regenerate:
            raise InvalidArguments(f"{incoming.cas:#x} is not a CAS that a document can have")
        if incoming.cas > self._shared.now_ns() + MOST_AHEAD_NS and not regenerate:
            raise InvalidCas(f"the CAS {incoming.cas:#x} is more than {MOST_AHEAD_NS // 10**9} s in the future")
        if incoming.rev_seqno > MAX_REV:
            raise InvalidArguments(f"{incoming.rev_seqno:#x} is more than the 48 bits that a revision can have")

    def _check_header_cas(self, wire_key: bytes, current: Document | None, cas: int) -> None:
        held = self._vb.documents.lock_cas(wire_key)
        if held is not None:
            if cas != held:
                raise Locked
            del self._vb.locks[wire_key]
        elif cas and (current is None or current.deleted):
            raise KeyNotFound
        elif cas and current is not None and current.cas != cas:
            raise KeyExists("the CAS has changed")


def wins(incoming: Document, current: Document, *, lww: bool) -> bool:
    """Whether ``incoming`` replaces ``current``; a full tie loses."""
    mine, theirs = (incoming.rev_seqno, incoming.cas), (current.rev_seqno, current.cas)
    if lww:
        mine, theirs = mine[::-1], theirs[::-1]
    if mine != theirs:
        return mine > theirs
    if incoming.deleted:
        return False  # deletes compare only the first two
    if incoming.expiry != current.expiry:
        return incoming.expiry > current.expiry
    if incoming.flags != current.flags:
        return incoming.flags < current.flags
    return lww and bool(incoming.datatype & Datatype.XATTR) and not current.datatype & Datatype.XATTR
