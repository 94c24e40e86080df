"""One declaration per message: field order is byte order, the annotation is the encoding.

``@message(Opcode.X)`` and ``@response(Opcode.X)`` read a class's annotations once and make a slotted dataclass that
encodes itself, decodes frames, and checks the rules of ``protocol.md`` 2.18 in their order. Several classes may
share an opcode; the size of the extras, or ``when``, tells them apart. The dump and the tests read the same
declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import combinations
from struct import Struct
from typing import (
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from upriver.errors import PAYLOAD_STATUSES, InvalidMessage, LocalProtocolError, RemoteProtocolError, Status
from upriver.model import Datatype
from upriver.wire import keys, values
from upriver.wire.constants import REMOVED_OPCODES, Dialect, Magic, Opcode, RequestFrameId, ServerOpcode
from upriver.wire.framing import (
    Frame,
    FrameInfo,
    check_request_frame_infos,
    decode_frame_infos,
    encode_frame_infos,
)


class Section(Enum):
    EXTRAS = auto()
    KEY = auto()
    VALUE = auto()


class Presence(Enum):
    FORBIDDEN = auto()
    OPTIONAL = auto()
    REQUIRED = auto()


class Number(NamedTuple):
    """A number in the extras (or at the start of the value): its struct code."""

    code: str
    section: Section = Section.EXTRAS
    optional: bool = False


class Bytes(NamedTuple):
    """The key or the value as a whole."""

    section: Section
    presence: Presence
    document: bool = False  # a document key: has a collection prefix on a collections connection


class Repeated(NamedTuple):
    """Fixed-size entries until the section ends; each becomes ``make(*numbers)``."""

    codes: str
    make: Callable[..., Any]
    section: Section = Section.VALUE
    at_least: int = 0


class Packed(NamedTuple):
    """The rest of the value in a codec of its own; ``decode`` gets the bytes and their offset in the frame."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, int], Any]


Layout = Number | Bytes | Repeated | Packed

U8 = Annotated[int, Number("B")]
U16 = Annotated[int, Number("H")]
U32 = Annotated[int, Number("I")]
U64 = Annotated[int, Number("Q")]
OptU8 = Annotated[int | None, Number("B", optional=True)]
OptU16 = Annotated[int | None, Number("H", optional=True)]
OptU32 = Annotated[int | None, Number("I", optional=True)]
OptU64 = Annotated[int | None, Number("Q", optional=True)]
OptI64 = Annotated[int | None, Number("q", optional=True)]
ValueU8 = Annotated[int, Number("B", Section.VALUE)]
ValueU16 = Annotated[int, Number("H", Section.VALUE)]
ValueU32 = Annotated[int, Number("I", Section.VALUE)]
ValueU64 = Annotated[int, Number("Q", Section.VALUE)]
DocKey = Annotated[bytes, Bytes(Section.KEY, Presence.REQUIRED, document=True)]
Key = Annotated[bytes, Bytes(Section.KEY, Presence.REQUIRED)]
OptKey = Annotated[bytes, Bytes(Section.KEY, Presence.OPTIONAL)]
Value = Annotated[bytes, Bytes(Section.VALUE, Presence.REQUIRED)]
OptValue = Annotated[bytes, Bytes(Section.VALUE, Presence.OPTIONAL)]


@dataclass(frozen=True, slots=True)
class Context:
    """What the two ends agreed on, as far as it changes how bytes are read."""

    dialect: Dialect = Dialect.DCP
    collections: bool = False
    datatypes: int = int(Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR)
    check_values: bool = False  # inflate snappy and walk xattrs: servers must, readers of a feed need not


DEFAULT_CONTEXT = Context()
UPR_CONTEXT = Context(dialect=Dialect.UPR)


class Broken(NamedTuple):
    """A rule that a message breaks: the field, what is wrong, and the status a server answers."""

    field: str
    reason: str
    status: Status = Status.EINVAL


class FieldInfo(NamedTuple):
    """One declared field: its layout, and the enum whose names it shows, if any."""

    name: str
    layout: Layout
    enum: type[Enum] | None


class Shape(NamedTuple):
    """One allowed form of the extras: which numbers are present, and their struct."""

    struct: Struct
    names: tuple[str, ...]


@dataclass(slots=True)
class Message:
    """What every message carries in its header; keyword-only in all subclasses."""

    opcode: ClassVar[int]
    magic: ClassVar[Magic]
    dialect: ClassVar[Dialect | None] = None
    fields: ClassVar[tuple[FieldInfo, ...]] = ()
    shapes: ClassVar[dict[int, Shape]] = {}
    key_layout: ClassVar[Bytes] = Bytes(Section.KEY, Presence.FORBIDDEN)
    value_numbers: ClassVar[Shape | None] = None
    cas_rule: ClassVar[Presence] = Presence.OPTIONAL
    datatypes: ClassVar[frozenset[int]] = frozenset({0})
    unmistakable: ClassVar[bool] = False  # one dialect's bytes that cannot mean anything in the other

    vbucket: int = field(default=0, kw_only=True)
    opaque: int = field(default=0, kw_only=True)
    cas: int = field(default=0, kw_only=True)
    datatype: int = field(default=0, kw_only=True)
    frame_infos: tuple[FrameInfo, ...] = field(default=(), kw_only=True)

    @property
    def stream_id(self) -> int | None:
        """The stream-id framing extra, if there is one."""
        for info in self.frame_infos:
            if info.id == RequestFrameId.STREAM_ID:
                return int.from_bytes(info.data, "big")
        return None

    def rules(self) -> Iterator[Broken]:
        """The rules of its own that this message breaks (2.18 step 12); the first one counts."""
        return iter(())

    def frame(self) -> Frame:
        """The frame for this message; ``LocalProtocolError`` if it would break a rule."""
        frame = self._frame()
        try:
            _check_header(type(self), frame, DEFAULT_CONTEXT)
            for broken in self.rules():
                raise InvalidMessage(broken.reason, broken.field)
        except InvalidMessage as error:
            raise LocalProtocolError(f"{type(self).__name__}: {error}") from error
        return frame

    def encode(self) -> bytes:
        return self.frame().encode()

    def _frame(self) -> Frame:
        extras, key, value = _encode_sections(self)
        magic = self.magic
        if self.frame_infos:
            magic = Magic.ALT_RESPONSE if magic.is_response else Magic.ALT_REQUEST
        return Frame(
            magic, self.opcode, self.vbucket, self.opaque, self.cas, self.datatype,
            encode_frame_infos(self.frame_infos), extras, key, value,
        )  # fmt: skip

    @classmethod
    def offset_of(cls, name: str, frame: Frame) -> int:
        """Where a field starts in the frame, for error messages and dumps."""
        return _offset_of(cls, name, frame)

    @classmethod
    def from_frame(cls, frame: Frame, context: Context = DEFAULT_CONTEXT) -> Self:
        """Decode and check; ``InvalidMessage`` names the first rule that is broken."""
        _check_header(cls, frame, context)
        message = cls(**_decode_sections(cls, frame), **cls._header_fields(frame))
        for broken in message.rules():
            raise InvalidMessage(broken.reason, broken.field, _offset_of(cls, broken.field, frame), broken.status)
        return message

    @classmethod
    def _header_fields(cls, frame: Frame) -> dict[str, Any]:
        infos = decode_frame_infos(frame.framing) if frame.framing else ()
        return {
            "vbucket": frame.specific, "opaque": frame.opaque, "cas": frame.cas,
            "datatype": frame.datatype, "frame_infos": infos,
        }  # fmt: skip


@dataclass(slots=True)
class Response(Message):
    """What every response carries; the header's vbucket word is the status here."""

    status: int = field(default=0, kw_only=True)

    def _frame(self) -> Frame:
        frame = Message._frame(self)
        frame.specific = self.status
        return frame

    @classmethod
    def _header_fields(cls, frame: Frame) -> dict[str, Any]:
        found = super(Response, cls)._header_fields(frame)
        found["status"] = found.pop("vbucket")
        return found


@dataclass(slots=True)
class OtherResponse(Response):
    """A response without a layout of its own: an error, or a bare success. ``to`` is the opcode it answers."""

    to: int = 0
    extras: bytes = b""
    key: bytes = b""
    value: bytes = b""
    answer_magic: int = Magic.RESPONSE

    magic: ClassVar[Magic] = Magic.RESPONSE

    def frame(self) -> Frame:
        infos = encode_frame_infos(self.frame_infos)
        magic = Magic.ALT_RESPONSE if infos else Magic(self.answer_magic)
        return Frame(
            magic, self.to, self.status, self.opaque, self.cas, self.datatype, infos, self.extras, self.key, self.value
        )

    @classmethod
    def from_frame(cls, frame: Frame, context: Context = DEFAULT_CONTEXT) -> Self:
        magic = Magic.RESPONSE if frame.magic is Magic.ALT_RESPONSE else frame.magic
        header = cls._header_fields(frame)
        return cls(frame.opcode, frame.extras, frame.key, frame.value, answer_magic=magic, **header)


# ---------------------------------------------------------------------------------------------- declaring

M = TypeVar("M", bound=Message)
When = Callable[[Frame], bool]
ANY_DATATYPE = frozenset(range(8))
JSON_OR_RAW = frozenset({0, int(Datatype.JSON)})


class _Registered(NamedTuple):
    cls: type[Message]
    when: When | None


_registry: dict[tuple[bool, bool, int], list[_Registered]] = {}


@dataclass_transform(frozen_default=True)
def message(
    *opcodes: int,
    cas: Presence = Presence.OPTIONAL,
    datatypes: frozenset[int] = frozenset({0}),
    dialect: Dialect | None = None,
    extras: tuple[int, ...] | None = None,
    when: When | None = None,
    server: bool = False,
) -> Callable[[type[M]], type[M]]:
    """Declare a request. ``extras`` lists the allowed sizes when not every subset of the optional fields is one."""
    magic = Magic.SERVER_REQUEST if server else Magic.REQUEST
    return _declare(opcodes, magic, cas, datatypes, dialect, extras, when)


@dataclass_transform(frozen_default=True)
def response(
    *opcodes: int,
    cas: Presence = Presence.OPTIONAL,
    datatypes: frozenset[int] = ANY_DATATYPE,
    dialect: Dialect | None = None,
    extras: tuple[int, ...] | None = None,
    when: When | None = None,
) -> Callable[[type[M]], type[M]]:
    """Declare a successful response, or one told apart by ``when``."""
    return _declare(opcodes, Magic.RESPONSE, cas, datatypes, dialect, extras, when)


def _declare(
    opcodes: tuple[int, ...],
    magic: Magic,
    cas: Presence,
    datatypes: frozenset[int],
    dialect: Dialect | None,
    extras: tuple[int, ...] | None,
    when: When | None,
) -> Callable[[type[M]], type[M]]:
    def decorate(cls: type[M]) -> type[M]:
        made = dataclass(slots=True)(cls)
        made.magic, made.dialect, made.cas_rule, made.datatypes = magic, dialect, cas, datatypes
        made.opcode = opcodes[0]
        made.fields = tuple(_declared_fields(made))
        made.shapes = _shapes(made.fields, extras)
        made.value_numbers = _value_numbers(made.fields)
        for info in made.fields:
            if isinstance(info.layout, Bytes) and info.layout.section is Section.KEY:
                made.key_layout = info.layout
        for opcode in opcodes:
            variant = made if opcode == opcodes[0] else _variant(made, opcode)
            _registry.setdefault((magic.is_response, magic.is_server, opcode), []).append(_Registered(variant, when))
        return made

    return decorate


def _variant(made: type[M], opcode: int) -> type[M]:
    """The same layout under another opcode, such as the quiet form of a command."""
    name = f"{made.__name__}_{opcode:02x}"
    return type(name, (made,), {"opcode": opcode, "__slots__": (), "__doc__": made.__doc__, "__module__": made.__module__})


def _declared_fields(cls: type[Message]) -> Iterator[FieldInfo]:
    hints = get_type_hints(cls, include_extras=True)
    for name in cls.__annotations__:  # the class's own, in the order written: byte order
        hint = hints[name]
        if get_origin(hint) is not Annotated:
            continue
        metadata = get_args(hint)[1:]
        layout = next(item for item in metadata if isinstance(item, Number | Bytes | Repeated | Packed))
        enum = next((item for item in metadata if isinstance(item, type) and issubclass(item, Enum)), None)
        yield FieldInfo(name, layout, enum)


def _numbers(fields: tuple[FieldInfo, ...], section: Section) -> list[tuple[str, Number]]:
    return [(f.name, f.layout) for f in fields if isinstance(f.layout, Number) and f.layout.section is section]


def _shapes(fields: tuple[FieldInfo, ...], allowed: tuple[int, ...] | None) -> dict[int, Shape]:
    """Every size the extras may have; of two subsets with one size, the one with the earlier fields wins."""
    numbers = _numbers(fields, Section.EXTRAS)
    optional = [name for name, number in numbers if number.optional]
    shapes: dict[int, Shape] = {}
    for count in range(len(optional) + 1):
        for subset in combinations(optional, count):
            present = [(n, number) for n, number in numbers if not number.optional or n in subset]
            struct = Struct(">" + "".join(number.code for _, number in present))
            if allowed is None or struct.size in allowed:
                shapes.setdefault(struct.size, Shape(struct, tuple(n for n, _ in present)))
    return shapes


def _value_numbers(fields: tuple[FieldInfo, ...]) -> Shape | None:
    numbers = _numbers(fields, Section.VALUE)
    if not numbers:
        return None
    return Shape(Struct(">" + "".join(n.code for _, n in numbers)), tuple(name for name, _ in numbers))


def declared_messages() -> list[type[Message]]:
    """Every message class there is, for tests, dumps and documentation."""
    return [entry.cls for entries in _registry.values() for entry in entries]


# ---------------------------------------------------------------------------------------------- sections


def _encode_sections(message: Message) -> tuple[bytes, bytes, bytes]:
    extras = _encode_extras(message)
    key = b""
    value = _pack(message.value_numbers, message) if message.value_numbers else b""
    for name, layout, _ in message.fields:
        content = getattr(message, name)
        if isinstance(layout, Bytes) and layout.section is Section.KEY:
            key = content
        elif isinstance(layout, Bytes):
            value += content
        elif isinstance(layout, Packed):
            value += layout.encode(content)
        elif isinstance(layout, Repeated):
            packed = _encode_repeated(layout, content)
            extras, value = (extras + packed, value) if layout.section is Section.EXTRAS else (extras, value + packed)
    return extras, key, value


def _encode_extras(message: Message) -> bytes:
    present = {n for n, number in _numbers(message.fields, Section.EXTRAS) if getattr(message, n) is not None}
    for shape in message.shapes.values():
        if set(shape.names) == present:
            return _pack(shape, message)
    raise LocalProtocolError(f"{type(message).__name__}: these optional fields cannot be sent together: {sorted(present)}")


def _pack(shape: Shape, message: Message) -> bytes:
    try:
        return shape.struct.pack(*(getattr(message, name) for name in shape.names))
    except Exception as error:  # struct.error names neither the field nor its limits
        culprit = next(name for name in shape.names if not isinstance(getattr(message, name), int)
                       or not _fits(message, name))  # fmt: skip
        raise LocalProtocolError(f"{type(message).__name__}.{culprit}: {getattr(message, culprit)!r} does not fit") from error


def _fits(message: Message, name: str) -> bool:
    layout = next(f.layout for f in message.fields if f.name == name)
    assert isinstance(layout, Number)
    bits = 8 * Struct(">" + layout.code).size
    low, high = (-(1 << (bits - 1)), 1 << (bits - 1)) if layout.code.islower() else (0, 1 << bits)
    return low <= getattr(message, name) < high


def _encode_repeated(layout: Repeated, entries: tuple[Any, ...]) -> bytes:
    struct = Struct(">" + layout.codes)
    return b"".join(struct.pack(*(entry if isinstance(entry, tuple) else (entry,))) for entry in entries)


def _decode_sections(cls: type[Message], frame: Frame) -> dict[str, Any]:
    shape = _shape_of(cls, frame)
    found: dict[str, Any] = dict(zip(shape.names, shape.struct.unpack_from(frame.extras), strict=True))
    rest = frame.value
    if cls.value_numbers:
        numbers = cls.value_numbers
        found.update(zip(numbers.names, numbers.struct.unpack_from(frame.value), strict=True))
        rest = frame.value[numbers.struct.size :]
    for name, layout, _ in cls.fields:
        if isinstance(layout, Bytes):
            found[name] = frame.key if layout.section is Section.KEY else rest
        elif isinstance(layout, Packed):
            found[name] = layout.decode(rest, frame.value_at + len(frame.value) - len(rest))
        elif isinstance(layout, Repeated):
            data = frame.extras[shape.struct.size :] if layout.section is Section.EXTRAS else rest
            found[name] = tuple(layout.make(*entry) for entry in Struct(">" + layout.codes).iter_unpack(data))
    return found


def _shape_of(cls: type[Message], frame: Frame) -> Shape:
    if _repeats_in_extras(cls):
        return next(iter(cls.shapes.values()))
    return cls.shapes[len(frame.extras)]


def _repeats_in_extras(cls: type[Message]) -> Repeated | None:
    for info in cls.fields:
        if isinstance(info.layout, Repeated) and info.layout.section is Section.EXTRAS:
            return info.layout
    return None


def _offset_of(cls: type[Message], name: str, frame: Frame) -> int:
    header = {"vbucket": 6, "status": 6, "opaque": 12, "cas": 16, "datatype": 5, "frame_infos": 24, "stream_id": 24}
    if name in header:
        return header[name]
    for start, shape in ((frame.extras_at, _shape_of(cls, frame)), (frame.value_at, cls.value_numbers)):
        if shape and name in shape.names:
            codes = shape.struct.format[1:]
            return start + Struct(">" + codes[: shape.names.index(name)]).size
    layout = next((f.layout for f in cls.fields if f.name == name), None)
    if isinstance(layout, Bytes) and layout.section is Section.KEY:
        return frame.key_at
    if isinstance(layout, Repeated) and layout.section is Section.EXTRAS:
        return frame.extras_at + next(iter(cls.shapes))
    return frame.value_at + (cls.value_numbers.struct.size if cls.value_numbers else 0)


# ---------------------------------------------------------------------------------------------- checking (2.18)


def _check_header(cls: type[Message], frame: Frame, context: Context) -> None:
    if frame.datatype > 7:
        raise InvalidMessage(f"datatype 0x{frame.datatype:02x} has unknown bits", "datatype", 5)
    _check_extras_size(cls, frame)
    _check_key_presence(cls, frame, context)
    _check_value_presence(cls, frame)
    _check_cas(cls, frame)
    _check_datatype(cls, frame, context)
    if frame.framing:
        infos = decode_frame_infos(frame.framing)
        if not frame.magic.is_response:
            check_request_frame_infos(infos)
    if cls.key_layout.document and context.collections:
        keys.split_key(frame.key, frame.key_at)


def _check_extras_size(cls: type[Message], frame: Frame) -> None:
    size = len(frame.extras)
    repeated = _repeats_in_extras(cls)
    if repeated:
        each, fixed = Struct(">" + repeated.codes).size, next(iter(cls.shapes))
        if size < fixed + repeated.at_least * each or (size - fixed) % each:
            raise InvalidMessage(f"extras are {size} bytes, not {fixed} + n * {each}", "extras length", 4)
    elif size not in cls.shapes:
        allowed = " or ".join(str(each) for each in sorted(cls.shapes))
        raise InvalidMessage(f"extras are {size} bytes, not {allowed}", "extras length", 4)


def _check_key_presence(cls: type[Message], frame: Frame, context: Context) -> None:
    presence = cls.key_layout.presence
    if presence is Presence.FORBIDDEN and frame.key:
        raise InvalidMessage("there must be no key", "key length", 2)
    if presence is Presence.REQUIRED and not frame.key:
        raise InvalidMessage("the key is missing", "key length", 2)
    limit = keys.MAX_WIRE_KEY if context.collections or not cls.key_layout.document else keys.MAX_KEY
    if cls.key_layout.document and len(frame.key) > limit and not frame.magic.is_response:
        raise InvalidMessage(f"key is {len(frame.key)} bytes, the limit is {limit}", "key length", 2)


def _check_value_presence(cls: type[Message], frame: Frame) -> None:
    numbers = cls.value_numbers.struct.size if cls.value_numbers else 0
    rest = next((f.layout for f in cls.fields if _fills_value(f.layout)), None)
    if rest is None and len(frame.value) != numbers:
        raise InvalidMessage(f"value is {len(frame.value)} bytes, not {numbers}", "body length", 8)
    if len(frame.value) < numbers:
        raise InvalidMessage(f"value is {len(frame.value)} bytes, less than {numbers}", "body length", 8)
    if isinstance(rest, Bytes) and rest.presence is Presence.REQUIRED and len(frame.value) == numbers:
        raise InvalidMessage("the value is missing", "body length", 8)
    if isinstance(rest, Repeated):
        each = Struct(">" + rest.codes).size
        if (len(frame.value) - numbers) % each or len(frame.value) - numbers < each * rest.at_least:
            raise InvalidMessage(f"value is {len(frame.value)} bytes, not a multiple of {each}", "body length", 8)


def _fills_value(layout: Layout) -> bool:
    if isinstance(layout, Packed):
        return True
    return isinstance(layout, Bytes | Repeated) and layout.section is Section.VALUE


def _check_cas(cls: type[Message], frame: Frame) -> None:
    if cls.cas_rule is Presence.FORBIDDEN and frame.cas:
        raise InvalidMessage("CAS must be 0", "cas", 16)
    if cls.cas_rule is Presence.REQUIRED and not frame.cas:
        raise InvalidMessage("CAS must not be 0", "cas", 16)


def _check_datatype(cls: type[Message], frame: Frame, context: Context) -> None:
    if frame.datatype not in cls.datatypes:
        raise InvalidMessage(f"datatype 0x{frame.datatype:02x} is not allowed here", "datatype", 5)
    if frame.datatype & ~context.datatypes and not frame.magic.is_response:
        raise InvalidMessage(f"datatype 0x{frame.datatype:02x} was not agreed on in HELLO", "datatype", 5)
    if context.check_values and frame.datatype and frame.value:
        values.check_value(frame.value, frame.datatype, frame.value_at)


# ---------------------------------------------------------------------------------------------- choosing the class


def decode(frame: Frame, context: Context = DEFAULT_CONTEXT) -> Message:
    """The message in a frame; ``InvalidMessage`` carries the status a server would answer.

    >>> from upriver.wire import FrameSplitter
    >>> [frame] = FrameSplitter().receive(bytes.fromhex("805d0000040000000000000400000005000000000000000000001000"))
    >>> decode(frame).bytes
    4096
    """
    found = message_class(frame, context)
    if found is None and frame.magic.is_response:
        return OtherResponse.from_frame(frame, context)
    if found is None:
        raise _unknown(frame)
    return found.from_frame(frame, context)


def message_class(frame: Frame, context: Context = DEFAULT_CONTEXT) -> type[Message] | None:
    """The class for a frame: of those with its opcode, the one that fits dialect, ``when`` and extras size."""
    entries = _registry.get((frame.magic.is_response, frame.magic.is_server, frame.opcode), [])
    fitting = [e for e in entries if e.cls.dialect in (None, context.dialect) or _only_by_size(e.cls)]
    fitting = [e for e in fitting if (e.when(frame) if e.when else _is_payload(frame))]
    fitting.sort(key=lambda e: (not _size_fits(e.cls, frame), e.cls.dialect is not context.dialect))
    return fitting[0].cls if fitting else None


def _is_payload(frame: Frame) -> bool:
    return not frame.magic.is_response or frame.specific in PAYLOAD_STATUSES


def _only_by_size(cls: type[Message]) -> bool:
    """A dialect's class whose bytes nobody can mistake is read under either dialect (12.3: accept by extlen)."""
    return cls.unmistakable


def _size_fits(cls: type[Message], frame: Frame) -> bool:
    return _repeats_in_extras(cls) is not None or len(frame.extras) in cls.shapes


def _unknown(frame: Frame) -> RemoteProtocolError:
    if frame.magic.is_server:
        known = frame.opcode in ServerOpcode._value2member_map_
        status = Status.NOT_SUPPORTED if known else Status.UNKNOWN_COMMAND
        return InvalidMessage(f"server opcode 0x{frame.opcode:02x} is not for us", "opcode", 1, status)
    if frame.opcode in REMOVED_OPCODES or frame.opcode in Opcode._value2member_map_:
        return InvalidMessage(
            f"opcode 0x{frame.opcode:02x} is not supported any more", "opcode", 1, Status.NOT_SUPPORTED
        )
    return InvalidMessage(f"opcode 0x{frame.opcode:02x} is unknown", "opcode", 1, Status.UNKNOWN_COMMAND)
