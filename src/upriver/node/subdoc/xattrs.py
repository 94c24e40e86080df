"""What is special about paths in extended attributes: virtual attributes, macros, binary values.

A virtual attribute is computed when it is read. A macro is a value that is only known when the document is written,
so the writer fixes CAS and seqno first and passes them on as a ``Stamp``.

See docs/protocol/subdoc.md.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

from upriver.errors import Status
from upriver.model import Datatype, Document
from upriver.node.subdoc.paths import fail

VIRTUAL = frozenset({"$document", "$vbucket", "$XTOC"})
_BINARY_PREFIX = "cb-content-base64-encoded:"
_DOCUMENT_MACRO = "${$document"
MACRO_CRC32C = '"${Mutation.value_crc32c}"'


@dataclass(frozen=True, slots=True)
class Stamp:
    """What macros stand for: facts about the version that is being written, and about the one before."""

    cas: int = 0
    seqno: int = 0
    value_crc32c: int = 0
    document: Mapping[str, object] = field(default_factory=dict)


def expand_macro(value: str, stamp: Stamp) -> str:
    """The text that a macro stands for; CAS is little-endian, as Couchbase writes it there, and only there."""
    macro = value.strip()
    if macro.startswith(f'"{_DOCUMENT_MACRO}'):
        return _expand_document_macro(macro, stamp)
    known = {
        '"${Mutation.CAS}"': f'"0x{stamp.cas.to_bytes(8, "little").hex()}"',
        '"${Mutation.seqno}"': f'"0x{stamp.seqno:016x}"',
        MACRO_CRC32C: f'"0x{stamp.value_crc32c:08x}"',
    }
    if macro not in known:
        fail(Status.SUBDOC_XATTR_UNKNOWN_MACRO, f"there is no macro {macro[:40]}")
    return known[macro]


def _expand_document_macro(macro: str, stamp: Stamp) -> str:
    found: Any = stamp.document
    path = macro[len(_DOCUMENT_MACRO) + 1 :].removesuffix('}"')
    if path:
        found = found.get(path.removeprefix(".")) if path.startswith(".") else None
    if found is None or not macro.endswith('}"'):
        fail(Status.SUBDOC_XATTR_UNKNOWN_VATTR_MACRO, f"there is no macro {macro[:40]}")
    return json.dumps(found)


def document_attribute(document: Document, vbuuid: int, body: bytes, *, checksum: bool) -> dict[str, object]:
    """``$document``: the metadata of a document. The checksum is slow, so it is optional."""
    found = {
        "CAS": f"0x{document.cas:016x}",
        "vbucket_uuid": f"0x{vbuuid:016x}",
        "seqno": f"0x{document.seqno:016x}",
        "revid": str(document.rev_seqno),
        "exptime": document.expiry,
        "flags": document.flags,
        "value_bytes": len(body),
        "datatype": datatype_names(document.datatype),
        "deleted": document.deleted,
        "last_modified": str(document.cas // 1_000_000_000),
    }
    if checksum:
        found["value_crc32c"] = f"0x{google_crc32c.value(body):08x}"
    return found


def datatype_names(datatype: int) -> list[str]:
    names = [(Datatype.JSON, "json"), (Datatype.SNAPPY, "snappy"), (Datatype.XATTR, "xattr")]
    return [name for bit, name in names if datatype & bit] or ["raw"]


def encode_binary(value: bytes) -> str:
    """Bytes as the JSON string that stores them."""
    return f'"{_BINARY_PREFIX}{base64.b64encode(value).decode()}"'


def decode_binary(text: str) -> bytes:
    """Undo ``encode_binary``; ``SUBDOC_FIELD_NOT_BINARY_VALUE`` if the field holds something else."""
    # Only a string is parsed: an object may be nested too deeply for the parser.
    value = json.loads(text) if text.startswith('"') else None
    if isinstance(value, str) and value.startswith(_BINARY_PREFIX):
        try:
            return base64.b64decode(value.removeprefix(_BINARY_PREFIX), validate=True)
        except binascii.Error:
            fail(Status.SUBDOC_FIELD_NOT_BINARY_VALUE, "the field does not hold base64")
    return fail(Status.SUBDOC_FIELD_NOT_BINARY_VALUE, "the field was not stored with the binary flag")
