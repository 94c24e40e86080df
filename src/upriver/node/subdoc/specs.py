"""The rules of sub-document requests, checked before any document is read (docs/protocol/subdoc.md).

One table says what every opcode allows; a request that breaks it fails as a whole. A spec is one path with its
opcode, flags and value; a single-path command is a request with one spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from upriver.errors import InvalidArguments, Status
from upriver.node.subdoc import paths
from upriver.node.subdoc.paths import Change, Path, fail
from upriver.node.subdoc.xattrs import VIRTUAL, Stamp, expand_macro
from upriver.wire.constants import DocFlag, Opcode, PathFlag
from upriver.wire.values import MAX_XATTR_KEY

_MKDIR, _XATTR, _MACROS, _BINARY = PathFlag.MKDIR_P, PathFlag.XATTR, PathFlag.EXPAND_MACROS, PathFlag.BINARY
LOOKUP_DOC_FLAGS = DocFlag.ACCESS_DELETED | DocFlag.REPLICA_READ
MUTATION_DOC_FLAGS = DocFlag.MKDOC | DocFlag.ADD | DocFlag.ACCESS_DELETED | DocFlag.CREATE_AS_DELETED | DocFlag.REVIVE


@dataclass(frozen=True, slots=True)
class Rule:
    """What an opcode allows: path flags, an empty path, and whether it has a value."""

    flags: int
    empty_path: bool = False
    has_value: bool = False
    change: Change | None = None


LOOKUPS = {
    Opcode.SUBDOC_GET: Rule(_XATTR | _BINARY),
    Opcode.SUBDOC_EXISTS: Rule(_XATTR),
    Opcode.SUBDOC_GET_COUNT: Rule(_XATTR, empty_path=True),
}
_WRITES = _XATTR | _MACROS | _BINARY
MUTATIONS = {
    Opcode.SUBDOC_DICT_ADD: Rule(_MKDIR | _WRITES, has_value=True, change=paths.dict_add),
    Opcode.SUBDOC_DICT_UPSERT: Rule(_MKDIR | _WRITES, has_value=True, change=paths.dict_upsert),
    Opcode.SUBDOC_DELETE: Rule(_XATTR, change=paths.remove),
    Opcode.SUBDOC_REPLACE: Rule(_WRITES, has_value=True, change=paths.replace),
    Opcode.SUBDOC_ARRAY_PUSH_LAST: Rule(_MKDIR | _WRITES, True, True, paths.push_last),
    Opcode.SUBDOC_ARRAY_PUSH_FIRST: Rule(_MKDIR | _WRITES, True, True, paths.push_first),
    Opcode.SUBDOC_ARRAY_INSERT: Rule(_WRITES, has_value=True, change=paths.insert),
    Opcode.SUBDOC_ARRAY_ADD_UNIQUE: Rule(_MKDIR | _XATTR, True, True, paths.add_unique),
    Opcode.SUBDOC_COUNTER: Rule(_MKDIR | _XATTR, has_value=True, change=paths.counter),
    Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR: Rule(_XATTR | _BINARY),
}
# Inside multi commands the plain opcodes mean the whole body.
WHOLE_LOOKUPS = {Opcode.GET: Rule(0, empty_path=True)}
WHOLE_MUTATIONS = {
    Opcode.SET: Rule(0, empty_path=True, has_value=True),
    Opcode.DELETE: Rule(0, empty_path=True),
}
WHOLE = frozenset({*WHOLE_LOOKUPS, *WHOLE_MUTATIONS})


@dataclass(frozen=True, slots=True)
class Spec:
    """One path of a request, parsed."""

    opcode: Opcode
    flags: int
    path: Path
    value: bytes = b""

    @property
    def is_xattr(self) -> bool:
        return bool(self.flags & _XATTR)

    @property
    def is_whole(self) -> bool:
        return self.opcode in WHOLE

    @property
    def name(self) -> str:
        """The extended attribute that this path is in."""
        return str(self.path[0])


def parse_spec(opcode: int, flags: int, path: bytes, value: bytes, rules: dict[Opcode, Rule]) -> Spec:
    """Parse a spec and check it against the rules of its opcode; an error fails the whole request."""
    rule = rules.get(Opcode(opcode)) if opcode in Opcode._value2member_map_ else None
    if rule is None:
        fail(Status.SUBDOC_INVALID_COMBO, f"opcode 0x{opcode:02x} cannot be part of this request")
    _check_flags(flags, rule)
    if not path and (not rule.empty_path or flags & _XATTR):
        raise InvalidArguments(f"{Opcode(opcode).name} needs a path")
    if opcode in WHOLE and path:
        raise InvalidArguments(f"{Opcode(opcode).name} means the whole document and has no path")
    if bool(value) != rule.has_value:
        raise InvalidArguments(f"{Opcode(opcode).name} {'needs a' if rule.has_value else 'must have no'} value")
    spec = Spec(Opcode(opcode), flags, paths.parse_path(path), value)
    if spec.is_xattr:
        _check_xattr(spec)
    elif opcode == Opcode.SUBDOC_REPLACE_BODY_WITH_XATTR:
        fail(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "the path must be that of an extended attribute")
    return spec


def _check_flags(flags: int, rule: Rule) -> None:
    if flags & (_MACROS | _BINARY) and not flags & _XATTR:
        fail(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "macros and binary values are for extended attributes only")
    if flags & _MACROS and flags & _BINARY:
        fail(Status.SUBDOC_XATTR_INVALID_FLAG_COMBO, "a macro is not a binary value")
    refused = flags & ~int(rule.flags)  # int: the complement of an IntFlag has only the bits that it names
    if refused:
        raise InvalidArguments(f"path flags 0x{refused:02x} are not allowed here")


def _check_xattr(spec: Spec) -> None:
    if not isinstance(spec.path[0], str) or len(spec.name.encode()) > MAX_XATTR_KEY:
        fail(Status.XATTR_EINVAL, f"the name of an extended attribute has 1 to {MAX_XATTR_KEY} bytes")
    if spec.name.startswith("$"):
        if spec.name not in VIRTUAL:
            fail(Status.SUBDOC_XATTR_UNKNOWN_VATTR, f"there is no virtual attribute {spec.name}")
        if spec.opcode not in LOOKUPS:
            fail(Status.SUBDOC_XATTR_CANT_MODIFY_VATTR, f"{spec.name} cannot be changed")
    if spec.flags & _MACROS and not spec.value.startswith(b'"${$document'):
        expand_macro(text_of(spec.value), Stamp())  # an unknown one fails the whole request


def text_of(value: bytes) -> str:
    """A value as text; what is not UTF-8 is not JSON either."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        fail(Status.SUBDOC_VALUE_CANTINSERT, "the value is not UTF-8")


def check_order(specs: Sequence[Spec]) -> None:
    """Paths of attributes come first, and an operation on the whole body excludes other paths of it."""
    kinds = [spec.is_xattr for spec in specs]
    if kinds != sorted(kinds, reverse=True):
        fail(Status.SUBDOC_INVALID_XATTR_ORDER, "paths of extended attributes must come before those of the body")
    body = [spec for spec in specs if not spec.is_xattr]
    if len(body) > 1 and any(spec.opcode in WHOLE_MUTATIONS for spec in body):
        fail(Status.SUBDOC_INVALID_COMBO, "an operation on the whole body excludes other paths of the body")


def check_doc_flags(flags: int, allowed: int, cas: int, *, is_multi: bool = False) -> DocFlag:
    """Check the flags of a whole request; with several paths, create-as-deleted needs no other flag."""
    refused = flags & ~int(allowed)
    if refused:
        raise InvalidArguments(f"document flags 0x{refused:02x} are not allowed here")
    if flags & DocFlag.ADD and (flags & DocFlag.MKDOC or cas):
        raise InvalidArguments("a document that must not exist has no CAS, and excludes the make-document flag")
    if flags & DocFlag.CREATE_AS_DELETED and not is_multi and not flags & (DocFlag.ADD | DocFlag.MKDOC):
        raise InvalidArguments("create-as-deleted needs add or make-document")
    if flags & DocFlag.REVIVE and flags & DocFlag.CREATE_AS_DELETED:
        raise InvalidArguments("a document cannot be revived and created as deleted at once")
    return DocFlag(flags)
