"""A sub-document mutation, from reading the document to writing it back; deleted documents included.

No other write can come between the two: both happen on the event loop's thread, or, if a large document is changed in
another thread, a write in between is noticed and the mutation starts again. Most documents are then stored with a
plain set. With macros, and for a tombstone with attributes, the CAS is fixed beforehand and the write has metadata.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import google_crc32c

from upriver.errors import KeyExists, KeyNotFound, Status, StatusError
from upriver.model import Datatype, Document
from upriver.node.subdoc import paths, xattrs
from upriver.node.subdoc.specs import Spec
from upriver.node.subdoc.view import DocumentView, change
from upriver.node.subdoc.xattrs import Stamp
from upriver.wire.constants import DocFlag, MetaOption, Opcode, PathFlag

if TYPE_CHECKING:
    from upriver.store import Stored, VBucket

_CLOCK_MASK = ~0xFFFF  # CAS is the clock in ns without its low 16 bits (docs/protocol/kv.md#clocks)
_RELATIVE_EXPIRY_S = 30 * 86400


@dataclass(frozen=True, slots=True)
class Target:
    """The document that a mutation changes, and the conditions for it."""

    vb: VBucket
    collection_id: int
    key: bytes
    flags: DocFlag
    cas: int = 0
    expiry: int = 0
    preserve_ttl: bool = False
    lww: bool = False  # the bucket resolves conflicts by CAS
    user_flags: int | None = None  # new user flags of the document; None keeps the old ones

    @property
    def may_create(self) -> bool:
        return bool(self.flags & (DocFlag.MKDOC | DocFlag.ADD))


class MetaOfWrite(TypedDict):
    """What both with-meta commands of the store take."""

    rev_seqno: int
    meta_cas: int
    flags: int
    cas: int
    options: MetaOption


@dataclass(frozen=True, slots=True)
class MutationOutcome:
    """The result of a mutation; ``deleted`` if the document was and stays deleted."""

    stored: Stored
    values: list[bytes]
    deleted: bool


@dataclass(frozen=True, slots=True)
class PathFailure:
    """The first path that failed; nothing was written. Not the exception, which would keep stack frames alive."""

    index: int
    status: Status
    context: str
    deleted: bool


def read(vb: VBucket, key: bytes, collection_id: int, *, deleted_too: bool) -> Document:
    """The document, or with ``deleted_too`` its tombstone."""
    try:
        return vb.documents.get(key, collection_id)
    except KeyNotFound:
        if not deleted_too:
            raise
    return vb.documents.get_meta(key, collection_id)


@dataclass(slots=True)
class Draft:
    """A mutation between reading the document and writing it back."""

    target: Target
    wanted: Sequence[Spec]
    existing: Document | None
    stamp: Stamp
    view: DocumentView
    result: list[bytes] | PathFailure

    @classmethod
    def begin(cls, target: Target, wanted: Sequence[Spec]) -> Draft:
        """Read the document and make all checks that do not need its body."""
        existing = _existing(target)
        _check_body_allowed(target, existing, wanted)
        return cls(target, wanted, existing, _stamp(target, existing, wanted), _fresh(target, existing), [])

    def apply(self) -> None:
        """Change the draft, path by path. This is the slow part, and may run in another thread."""
        self.result = _apply(self.target, self.view, self.wanted, self.stamp)
        checksum = xattrs.MACRO_CRC32C.encode()
        if any(spec.value.strip() == checksum for spec in self.wanted) and not isinstance(self.result, PathFailure):
            # The checksum covers the body after all paths, so it is only known now: apply the paths again with it.
            self.stamp = replace(self.stamp, value_crc32c=google_crc32c.value(self.view.body))
            self.view = _fresh(self.target, self.existing)
            self.result = _apply(self.target, self.view, self.wanted, self.stamp)

    @property
    def is_current(self) -> bool:
        """Whether the document has not changed since the draft began, and what macros say of the write still holds."""
        now = _existing(self.target)
        if now is None or self.existing is None:
            unchanged = now is self.existing
        else:
            unchanged = (now.cas, now.deleted) == (self.existing.cas, self.existing.deleted)
        vb = self.target.vb
        stamped = self.stamp.seqno == vb.high_seqno + 1 and self.stamp.cas > vb.max_cas
        return unchanged and (stamped or not self._macros)

    @property
    def _macros(self) -> bool:
        return any(spec.flags & PathFlag.EXPAND_MACROS for spec in self.wanted)

    def store(self) -> MutationOutcome | PathFailure:
        """Write it, unless a path failed."""
        if isinstance(self.result, PathFailure):
            return self.result
        stored = _store(self.target, self.existing, self.view, self.stamp, self._macros)
        deleted = self.view.deleted and (self.existing is None or self.existing.deleted)
        return MutationOutcome(stored, self.result, deleted)


def _existing(target: Target) -> Document | None:
    """The document before the mutation; checks every condition that depends on whether it exists."""
    flags = target.flags
    try:
        found = read(
            target.vb, target.key, target.collection_id,
            deleted_too=bool(flags & (DocFlag.ACCESS_DELETED | DocFlag.REVIVE)),
        )  # fmt: skip
    except KeyNotFound:
        if not target.may_create or target.cas:
            raise
        return None
    if flags & DocFlag.ADD:
        raise KeyExists("the document exists")
    if flags & DocFlag.REVIVE and not found.deleted:
        paths.fail(Status.SUBDOC_CAN_ONLY_REVIVE_DELETED_DOCUMENTS, "the document is not deleted")
    locked = not found.deleted and target.vb.documents.is_locked(target.key, target.collection_id)
    if target.cas and target.cas != found.cas and not locked:  # the store checks locks
        raise KeyExists("the CAS has changed")
    return found


def _stays_deleted(target: Target, existing: Document | None) -> bool:
    if existing is None:
        return bool(target.flags & DocFlag.CREATE_AS_DELETED)
    return existing.deleted and not target.flags & DocFlag.REVIVE


def _check_body_allowed(target: Target, existing: Document | None, wanted: Sequence[Spec]) -> None:
    if not _stays_deleted(target, existing):
        return
    if any(not spec.is_xattr or spec.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR for spec in wanted):
        paths.fail(Status.SUBDOC_DELETED_DOCUMENT_CANT_HAVE_VALUE, "a deleted document has only attributes")


def _fresh(target: Target, existing: Document | None) -> DocumentView:
    document = existing or Document(target.key, collection_id=target.collection_id)
    view = DocumentView.of(document, target.vb.uuid)
    view.deleted = _stays_deleted(target, existing)
    return view


def _apply(target: Target, view: DocumentView, wanted: Sequence[Spec], stamp: Stamp) -> list[bytes] | PathFailure:
    was_deleted = view.deleted
    values = []
    for index, spec in enumerate(wanted):
        try:
            values.append(change(view, spec, stamp, create=target.may_create))
        except StatusError as error:
            return PathFailure(index, error.status, error.context, was_deleted)
    if not view.body and not view.deleted and not any(spec.opcode == Opcode.SET for spec in wanted):
        view.set_text("{}")  # a new document with nothing but attributes
    return values


def _stamp(target: Target, existing: Document | None, wanted: Sequence[Spec]) -> Stamp:
    """The next CAS and seqno, fixed now because macros write them into the document."""
    vb = target.vb
    cas = max(time.time_ns() & _CLOCK_MASK, vb.max_cas + 1)
    macros = [spec.value for spec in wanted if spec.flags & PathFlag.EXPAND_MACROS]
    if existing is None or not any(value.strip().startswith(b'"${$document') for value in macros):
        return Stamp(cas, vb.high_seqno + 1)
    body = DocumentView.of(existing, vb.uuid).body
    checksum = any(b"crc32c" in value or b"document}" in value for value in macros)
    return Stamp(cas, vb.high_seqno + 1, 0, xattrs.document_attribute(existing, vb.uuid, body, checksum=checksum))


def _store(target: Target, existing: Document | None, view: DocumentView, stamp: Stamp, macros: bool) -> Stored:
    value, datatype = view.joined()
    flags = target.user_flags
    if flags is None:
        flags = existing.flags if existing else 0
    cas = 0 if existing is None or existing.deleted else target.cas
    if not view.deleted and not macros:
        return target.vb.documents.set(
            target.key, value, target.collection_id, flags=flags, expiry=target.expiry, datatype=datatype, cas=cas,
            preserve_ttl=target.preserve_ttl,
        )  # fmt: skip
    options = MetaOption.SKIP_CONFLICT_RESOLUTION | (MetaOption.FORCE_ACCEPT if target.lww else 0)
    meta = MetaOfWrite(rev_seqno=_revision(target), meta_cas=stamp.cas, flags=flags, cas=cas, options=options)
    if view.deleted:
        kept = datatype & Datatype.XATTR
        deleted_at = int(time.time())
        return target.vb.with_meta.delete(
            target.key, target.collection_id, delete_time=deleted_at, value=value, datatype=kept, **meta
        )
    expiry = _expiry(target, existing)
    return target.vb.with_meta.set(target.key, value, target.collection_id, expiry=expiry, datatype=datatype, **meta)


def _revision(target: Target) -> int:
    """The revision after that of the last version, which may be a tombstone."""
    try:
        return target.vb.documents.get_meta(target.key, target.collection_id).rev_seqno + 1
    except KeyNotFound:
        return 1


def _expiry(target: Target, existing: Document | None) -> int:
    """When the document expires, as an absolute time. A mutation removes the expiry unless told to preserve it."""
    if target.preserve_ttl and existing is not None and not existing.deleted:
        return existing.expiry
    relative = 0 < target.expiry <= _RELATIVE_EXPIRY_S
    return target.expiry + int(time.time()) if relative else target.expiry
