"""Messages that read and change paths in a JSON document or its extended attributes (docs/protocol/subdoc.md)."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Annotated, NamedTuple

from upriver.errors import Status
from upriver.wire.constants import DocFlag, Opcode, PathFlag
from upriver.wire.layout import JSON_OR_RAW, U16, Broken, DocKey, Number, OptU32, OptU64, OptValue, Presence, ValueCodec
from upriver.wire.message import Message, Response, message, response
from upriver.wire.sections import cut_bytes, cut_struct

_NO_CAS = Presence.FORBIDDEN

_LOOKUPS = (Opcode.SUBDOC_GET, Opcode.SUBDOC_EXISTS, Opcode.SUBDOC_GET_COUNT)
_CHANGES = (
    Opcode.SUBDOC_DICT_ADD, Opcode.SUBDOC_DICT_UPSERT, Opcode.SUBDOC_DELETE, Opcode.SUBDOC_REPLACE,
    Opcode.SUBDOC_ARRAY_PUSH_LAST, Opcode.SUBDOC_ARRAY_PUSH_FIRST, Opcode.SUBDOC_ARRAY_INSERT,
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE, Opcode.SUBDOC_COUNTER, Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR,
)  # fmt: skip


def _path_rules(path_len: int, value: bytes) -> Iterator[Broken]:
    if path_len > len(value):
        yield Broken("path_len", f"path of {path_len} bytes in a body of {len(value)}")


@message(*_LOOKUPS, cas=_NO_CAS)
class SubdocLookup(Message):
    """Reads one path of a document."""

    path_len: U16
    path_flags: Annotated[int, Number("B"), PathFlag] = 0
    doc_flags: Annotated[int | None, Number("B", optional=True), DocFlag] = None
    key: DocKey = b""
    path: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        if self.path_len != len(self.path):
            yield Broken("path_len", f"says {self.path_len}, the path has {len(self.path)} bytes")


@message(*_CHANGES, datatypes=JSON_OR_RAW)
class SubdocMutation(Message):
    """Changes one path of a document; the value is the path, then the fragment to put there."""

    path_len: U16
    path_flags: Annotated[int, Number("B"), PathFlag] = 0
    expiry: OptU32 = None
    user_flags: OptU32 = None  # of the document; newer clients put the encoding of its body here
    doc_flags: Annotated[int | None, Number("B", optional=True), DocFlag] = None
    key: DocKey = b""
    value: OptValue = b""

    @property
    def path(self) -> bytes:
        return self.value[: self.path_len]

    @property
    def fragment(self) -> bytes:
        return self.value[self.path_len :]

    def rules(self) -> Iterator[Broken]:
        yield from _path_rules(self.path_len, self.value)


class LookupSpec(NamedTuple):
    opcode: int
    flags: int
    path: bytes


class MutationSpec(NamedTuple):
    opcode: int
    flags: int
    path: bytes
    value: bytes


_LOOKUP_SPEC = Struct(">BBH")
_MUTATION_SPEC = Struct(">BBHI")


def _encode_lookups(specs: tuple[LookupSpec, ...]) -> bytes:
    return b"".join(_LOOKUP_SPEC.pack(s.opcode, s.flags, len(s.path)) + s.path for s in specs)


def _encode_mutations(specs: tuple[MutationSpec, ...]) -> bytes:
    return b"".join(_MUTATION_SPEC.pack(s.opcode, s.flags, len(s.path), len(s.value)) + s.path + s.value for s in specs)


def _decode_lookups(data: bytes, offset: int) -> tuple[LookupSpec, ...]:
    specs = []
    at = 0
    while at < len(data):
        (opcode, flags, size), at = cut_struct(_LOOKUP_SPEC, data, at, offset)
        path, at = cut_bytes(data, at, size, offset)
        specs.append(LookupSpec(opcode, flags, path))
    return tuple(specs)


def _decode_mutations(data: bytes, offset: int) -> tuple[MutationSpec, ...]:
    specs = []
    at = 0
    while at < len(data):
        (opcode, flags, path_size, value_size), at = cut_struct(_MUTATION_SPEC, data, at, offset)
        path, at = cut_bytes(data, at, path_size, offset)
        value, at = cut_bytes(data, at, value_size, offset)
        specs.append(MutationSpec(opcode, flags, path, value))
    return tuple(specs)


MAX_PATHS = 16


def _count_rules(count: int) -> Iterator[Broken]:
    if not 1 <= count <= MAX_PATHS:
        yield Broken("specs", f"{count} paths, not 1 to {MAX_PATHS}", Status.SUBDOC_INVALID_COMBO)


@message(Opcode.SUBDOC_MULTI_LOOKUP, cas=_NO_CAS)
class SubdocMultiLookup(Message):
    """Reads up to 16 paths of a document."""

    doc_flags: Annotated[int | None, Number("B", optional=True), DocFlag] = None
    key: DocKey = b""
    specs: Annotated[tuple[LookupSpec, ...], ValueCodec(_encode_lookups, _decode_lookups)] = ()

    def rules(self) -> Iterator[Broken]:
        yield from _count_rules(len(self.specs))


@message(Opcode.SUBDOC_MULTI_MUTATION, datatypes=JSON_OR_RAW)
class SubdocMultiMutation(Message):
    """Changes up to 16 paths of a document, all or none."""

    expiry: OptU32 = None
    user_flags: OptU32 = None  # of the document; newer clients put the encoding of its body here
    doc_flags: Annotated[int | None, Number("B", optional=True), DocFlag] = None
    key: DocKey = b""
    specs: Annotated[tuple[MutationSpec, ...], ValueCodec(_encode_mutations, _decode_mutations)] = ()

    def rules(self) -> Iterator[Broken]:
        yield from _count_rules(len(self.specs))


class LookupResult(NamedTuple):
    status: int
    value: bytes


_LOOKUP_RESULT = Struct(">HI")


def _encode_lookup_results(results: tuple[LookupResult, ...]) -> bytes:
    return b"".join(_LOOKUP_RESULT.pack(r.status, len(r.value)) + r.value for r in results)


def _decode_lookup_results(data: bytes, offset: int) -> tuple[LookupResult, ...]:
    results = []
    at = 0
    while at < len(data):
        (status, size), at = cut_struct(_LOOKUP_RESULT, data, at, offset)
        value, at = cut_bytes(data, at, size, offset)
        results.append(LookupResult(status, value))
    return tuple(results)


@response(*_LOOKUPS)
class SubdocLookupResponse(Response):
    """The value at the path."""

    value: OptValue = b""


@response(*_CHANGES, extras=(0, 16))
class SubdocMutationResponse(Response):
    """The change succeeded; with its vbuuid and seqno if asked for in HELLO, and a counter's new value."""

    vbuuid: OptU64 = None
    seqno: OptU64 = None
    value: OptValue = b""


class MutationResult(NamedTuple):
    """The result of one path of a multi-mutation; has a value only if it succeeded."""

    path_index: int
    status: int
    value: bytes


_MUTATION_RESULT = Struct(">BH")
_VALUE_SIZE = Struct(">I")


def _encode_mutation_results(results: tuple[MutationResult, ...]) -> bytes:
    out = bytearray()
    for result in results:
        out += _MUTATION_RESULT.pack(result.path_index, result.status)
        if result.status == Status.SUCCESS:
            out += _VALUE_SIZE.pack(len(result.value)) + result.value
    return bytes(out)


def _decode_mutation_results(data: bytes, offset: int) -> tuple[MutationResult, ...]:
    results = []
    at = 0
    while at < len(data):
        (index, status), at = cut_struct(_MUTATION_RESULT, data, at, offset)
        value = b""
        if status == Status.SUCCESS:
            (size,), at = cut_struct(_VALUE_SIZE, data, at, offset)
            value, at = cut_bytes(data, at, size, offset)
        results.append(MutationResult(index, status, value))
    return tuple(results)


@response(Opcode.SUBDOC_MULTI_MUTATION, extras=(0, 16))
class SubdocMultiMutationResponse(Response):
    """The results of paths that have a value; with a failure status, the first path that failed and its status."""

    vbuuid: OptU64 = None
    seqno: OptU64 = None
    results: Annotated[tuple[MutationResult, ...], ValueCodec(_encode_mutation_results, _decode_mutation_results)] = ()


@response(Opcode.SUBDOC_MULTI_LOOKUP)
class SubdocMultiLookupResponse(Response):
    """One status and value per path."""

    results: Annotated[tuple[LookupResult, ...], ValueCodec(_encode_lookup_results, _decode_lookup_results)]
