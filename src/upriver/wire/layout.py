"""Declares messages: the annotations of their fields, and the layout that follows from them.

An annotation such as ``U64`` says how a field is encoded; field order is byte order. ``declaration_of`` makes one
``Declaration`` from an annotated class, and the encoder, decoder, checks, dump and tests all read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import combinations
from struct import Struct
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin, get_type_hints

from upriver.errors import Status
from upriver.model import Datatype

T = TypeVar("T")


class Section(Enum):
    EXTRAS = auto()
    KEY = auto()
    VALUE = auto()


class Presence(Enum):
    FORBIDDEN = auto()
    OPTIONAL = auto()
    REQUIRED = auto()


class Number(NamedTuple):
    """A number in the extras, or at the start of the value, with its struct code."""

    code: str
    section: Section = Section.EXTRAS
    optional: bool = False


class Bytes(NamedTuple):
    """The key or the value as a whole."""

    section: Section
    presence: Presence
    document: bool = False  # a document key: has a prefix on a connection with collections


class Repeated(NamedTuple):
    """Fixed-size entries until the section ends; each becomes ``make(*numbers)``."""

    codes: str
    make: Callable[..., Any]
    section: Section = Section.VALUE
    at_least: int = 0

    @property
    def struct(self) -> Struct:
        return Struct(">" + self.codes)


class ValueCodec(NamedTuple):
    """The rest of the value, with its own codec; ``decode`` gets the bytes and their offset in the frame."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes, int], Any]


Layout = Number | Bytes | Repeated | ValueCodec

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
ValueU64 = Annotated[int, Number("Q", Section.VALUE)]
DocKey = Annotated[bytes, Bytes(Section.KEY, Presence.REQUIRED, document=True)]
Key = Annotated[bytes, Bytes(Section.KEY, Presence.REQUIRED)]
OptKey = Annotated[bytes, Bytes(Section.KEY, Presence.OPTIONAL)]
Value = Annotated[bytes, Bytes(Section.VALUE, Presence.REQUIRED)]
OptValue = Annotated[bytes, Bytes(Section.VALUE, Presence.OPTIONAL)]

NO_KEY = Bytes(Section.KEY, Presence.FORBIDDEN)
RAW_ONLY = frozenset({0})
ANY_DATATYPE = frozenset(range(8))
JSON_OR_RAW = frozenset({0, int(Datatype.JSON)})


class Broken(NamedTuple):
    """A rule that a message breaks: the field, the reason, and the status that a server answers."""

    field: str
    reason: str
    status: Status = Status.EINVAL


class FieldInfo(NamedTuple):
    """One declared field: its layout, and the enum of its values, if it has one."""

    name: str
    layout: Layout
    enum: type[Enum] | None


class NumberLayout(NamedTuple):
    """One allowed form of the extras, or of the numbers in a value: which fields are present, and their struct."""

    struct: Struct
    names: tuple[str, ...]

    def offset_of(self, name: str) -> int:
        """How many bytes come before a number."""
        return Struct(">" + self.struct.format[1 : 1 + self.names.index(name)]).size


@dataclass(frozen=True, slots=True)
class Declaration:
    """Everything that a class's annotations say about its bytes."""

    fields: tuple[FieldInfo, ...] = ()
    # Keyed by the size of the extras.
    shapes: dict[int, NumberLayout] = field(default_factory=lambda: {0: NumberLayout(Struct(">"), ())})
    key: Bytes = NO_KEY
    key_name: str = ""
    value_numbers: NumberLayout | None = None
    rest: FieldInfo | None = None  # what fills the value after its numbers
    repeated: FieldInfo | None = None  # entries that fill the extras after their numbers
    cas: Presence = Presence.OPTIONAL
    datatypes: frozenset[int] = RAW_ONLY
    stream_id: bool = True  # may carry the stream-id framing extra

    @property
    def value_size(self) -> int:
        """How many bytes the numbers at the start of the value take."""
        return self.value_numbers.struct.size if self.value_numbers else 0

    def shape_of(self, extras: bytes) -> NumberLayout:
        if self.repeated:
            return next(iter(self.shapes.values()))
        return self.shapes[len(extras)]

    def fits(self, extras: bytes) -> bool:
        """Whether this message can have extras of this size."""
        return self.repeated is not None or len(extras) in self.shapes


def declaration_of(
    cls: type,
    cas: Presence,
    datatypes: frozenset[int],
    extras: tuple[int, ...] | None,
    stream_id: bool,
) -> Declaration:
    """Read a class's annotations. ``extras`` lists the allowed sizes if not every subset of optional numbers is."""
    fields = tuple(_fields(cls))
    key = next((f for f in fields if isinstance(f.layout, Bytes) and f.layout.section is Section.KEY), None)
    return Declaration(
        fields=fields,
        shapes=_shapes(fields, extras),
        key=key.layout if key and isinstance(key.layout, Bytes) else NO_KEY,
        key_name=key.name if key else "",
        value_numbers=_value_numbers(fields),
        rest=next((f for f in fields if _fills(f.layout, Section.VALUE)), None),
        repeated=next((f for f in fields if _fills(f.layout, Section.EXTRAS)), None),
        cas=cas,
        datatypes=datatypes,
        stream_id=stream_id,
    )


def _fields(cls: type) -> Iterator[FieldInfo]:
    hints = get_type_hints(cls, include_extras=True)
    for name in cls.__annotations__:  # only this class's fields, in the order written: byte order
        hint = hints[name]
        if get_origin(hint) is not Annotated:
            continue
        metadata = get_args(hint)[1:]
        layout = next(item for item in metadata if isinstance(item, Number | Bytes | Repeated | ValueCodec))
        enum = next((item for item in metadata if isinstance(item, type) and issubclass(item, Enum)), None)
        yield FieldInfo(name, layout, enum)


def _fills(layout: Layout, section: Section) -> bool:
    if isinstance(layout, ValueCodec):
        return section is Section.VALUE
    return isinstance(layout, Bytes | Repeated) and layout.section is section


def _numbers(fields: tuple[FieldInfo, ...], section: Section) -> list[tuple[str, Number]]:
    return [(f.name, f.layout) for f in fields if isinstance(f.layout, Number) and f.layout.section is section]


def _shapes(fields: tuple[FieldInfo, ...], allowed: tuple[int, ...] | None) -> dict[int, NumberLayout]:
    """Every size that the extras may have; of two subsets with the same size, the one with the earlier fields wins."""
    numbers = _numbers(fields, Section.EXTRAS)
    optional = [name for name, number in numbers if number.optional]
    shapes: dict[int, NumberLayout] = {}
    for count in range(len(optional) + 1):
        for subset in combinations(optional, count):
            present = [(n, number) for n, number in numbers if not number.optional or n in subset]
            struct = Struct(">" + "".join(number.code for _, number in present))
            if allowed is None or struct.size in allowed:
                shapes.setdefault(struct.size, NumberLayout(struct, tuple(n for n, _ in present)))
    return shapes


def _value_numbers(fields: tuple[FieldInfo, ...]) -> NumberLayout | None:
    numbers = _numbers(fields, Section.VALUE)
    if not numbers:
        return None
    return NumberLayout(Struct(">" + "".join(n.code for _, n in numbers)), tuple(name for name, _ in numbers))


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def plain(cls: type[T]) -> type[T]:
    """Frozen to the type checker, a plain slotted dataclass at run time: creating a frozen one costs 2 to 4 us."""
    return dataclass(slots=True)(cls)
