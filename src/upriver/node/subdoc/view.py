"""A document as attributes and a body, read and changed path by path; pure."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field

from upriver.errors import Status
from upriver.model import Datatype, Document
from upriver.node.commands.values import parts_of
from upriver.node.subdoc import paths, specs, xattrs
from upriver.node.subdoc.specs import Spec, text_of
from upriver.node.subdoc.xattrs import Stamp
from upriver.wire.constants import Opcode, PathFlag
from upriver.wire.values import MAX_XATTR_BYTES, MAX_XATTRS, join_xattrs


@dataclass(slots=True)
class DocumentView:
    """A document as lookups read it and mutations change it. An empty body becomes what the first path needs."""

    document: Document
    vbuuid: int
    deleted: bool
    body: bytes = b""
    attributes: dict[str, bytes] = field(default_factory=dict)
    _checked: str | None = None  # the body, once it is known to be JSON
    _replaced: bool = False  # whether the body is no longer the document's

    @classmethod
    def of(cls, document: Document, vbuuid: int) -> DocumentView:
        attributes, body = parts_of(document.datatype, document.value)
        return cls(document, vbuuid, document.deleted, body, attributes)

    @property
    def text(self) -> str:
        """The body as JSON text; ``SUBDOC_DOC_NOT_JSON`` if it is not JSON."""
        if self._checked is None:
            try:
                text = self.body.decode()
            except UnicodeDecodeError:
                paths.fail(Status.SUBDOC_DOC_NOT_JSON, "the document is not JSON")
            # The store checks that plain values are JSON; for others there is only the word of the writer.
            paths.check_document(text, known_json=self.document.datatype == Datatype.JSON and not self._replaced)
            self._checked = text
        return self._checked

    def set_text(self, text: str) -> None:
        self._checked, self.body = text, text.encode()

    def set_body(self, body: bytes) -> None:
        self._checked, self.body, self._replaced = None, body, True

    def attribute_text(self, spec: Spec) -> str:
        """The attribute that a path is in, as an object with that one member, so that the path applies as it is."""
        if spec.name in xattrs.VIRTUAL:
            value = json.dumps(self._virtual(spec))
        elif spec.name in self.attributes:
            value = self.attributes[spec.name].decode()
        else:
            return "{}"
        return "{" + json.dumps(spec.name) + ":" + value + "}"

    def set_attribute_text(self, name: str, text: str) -> None:
        """Set an attribute from the text that ``attribute_text`` returned, after a change."""
        if text == "{}":
            self.attributes.pop(name, None)
        else:
            self.attributes[name] = paths.get(text, (name,)).encode()

    def _virtual(self, spec: Spec) -> object:
        if spec.name == "$XTOC":
            return list(self.attributes)
        if spec.name == "$vbucket":
            return {"HLC": {"now": str(int(time.time())), "mode": "real"}}
        checksum = len(spec.path) == 1 or spec.path[1] == "value_crc32c"
        return xattrs.document_attribute(self.document, self.vbuuid, self.body, checksum=checksum)

    def joined(self) -> tuple[bytes, int]:
        """The value to store, and its datatype."""
        datatype = Datatype.JSON if self._checked is not None or _is_json(self.body) else Datatype.RAW
        if not self.attributes:
            return self.body, datatype
        value = join_xattrs(self.attributes, self.body)
        if len(value) - len(self.body) > 4 + MAX_XATTR_BYTES or len(self.attributes) > MAX_XATTRS:
            paths.fail(Status.E2BIG, f"a document has at most {MAX_XATTRS} xattrs, of {MAX_XATTR_BYTES} bytes in all")
        return value, datatype | Datatype.XATTR


def _is_json(body: bytes) -> bool:
    try:
        return paths.is_json(body.decode())
    except UnicodeDecodeError:
        return False


# ---------------------------------------------------------------------------------------------- one path


def look(view: DocumentView, spec: Spec) -> bytes:
    """The value at a path; empty for EXISTS."""
    if view.deleted and not spec.is_xattr:
        paths.fail(Status.SUBDOC_PATH_ENOENT, "a deleted document has no body")
    if spec.is_whole:
        return view.body
    text = view.attribute_text(spec) if spec.is_xattr else view.text
    if spec.opcode == Opcode.SUBDOC_GET_COUNT:
        return paths.count(text, spec.path).encode()
    found = paths.get(text, spec.path)
    if spec.opcode == Opcode.SUBDOC_EXISTS:
        return b""
    return xattrs.decode_binary(found) if spec.flags & PathFlag.BINARY else found.encode()


def change(view: DocumentView, spec: Spec, stamp: Stamp, *, create: bool) -> bytes:
    """Apply a spec; returns the new value of a counter, or nothing. ``create`` also makes missing parents."""
    if spec.is_whole:
        _change_whole(view, spec)
        return b""
    if spec.opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
        view.set_body(look(view, Spec(Opcode.SUBDOC_GET, spec.flags, spec.path)))
        return b""
    if not spec.is_xattr and not view.body:
        view.set_text("{}" if spec.path and isinstance(spec.path[0], str) else "[]")
    do = specs.MUTATIONS[spec.opcode].change
    assert do is not None, spec
    before = view.attribute_text(spec) if spec.is_xattr else view.text
    after, result = do(before, spec.path, _value(spec, stamp), create or bool(spec.flags & PathFlag.MKDIR_P))
    if spec.is_xattr:
        view.set_attribute_text(spec.name, after)
    else:
        view.set_text(after)
    return result.encode()


def _change_whole(view: DocumentView, spec: Spec) -> None:
    if spec.opcode == Opcode.SET:
        view.set_body(spec.value)
        return
    view.set_body(b"")
    view.deleted = True
    # A deleted document keeps only its system attributes.
    view.attributes = {name: value for name, value in view.attributes.items() if name.startswith("_")}


def _value(spec: Spec, stamp: Stamp) -> str:
    if spec.flags & PathFlag.BINARY:
        return xattrs.encode_binary(spec.value)
    text = text_of(spec.value)
    return xattrs.expand_macro(text, stamp) if spec.flags & PathFlag.EXPAND_MACROS else text
