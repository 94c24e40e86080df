"""Messages: the base classes, the decorators that declare them, and ``decode``, which finds the class for a frame.

``@message(Opcode.X)`` and ``@response(Opcode.X)`` read a class's annotations once and make a slotted dataclass that
encodes itself, decodes frames, and checks the rules of docs/protocol/messages.md#checks in their order. Several classes
may share an opcode; the size of the extras, or ``when``, tells them apart. The dump and the tests read the same
declarations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, dataclass_transform

from upriver.errors import PAYLOAD_STATUSES, InvalidMessage, LocalProtocolError, RemoteProtocolError, Status
from upriver.wire import keys
from upriver.wire.checks import DEFAULT_CONTEXT, Context, check_frame
from upriver.wire.constants import REMOVED_OPCODES, Dialect, Magic, Opcode, RequestFrameId, ServerOpcode
from upriver.wire.framing import Frame, FrameInfo, decode_frame_infos, encode_frame_infos, mend_stream_id
from upriver.wire.layout import (
    ANY_DATATYPE,
    RAW_ONLY,
    Broken,
    Declaration,
    Presence,
    declaration_of,
    plain,
)
from upriver.wire.sections import decode_sections, encode_sections, offset_of

When = Callable[[Frame], bool]


class RequestedDurability(NamedTuple):
    """The durability framing extra of a write; timeout 0 means the server's default."""

    level: int
    timeout_ms: int


@plain
class Message:
    """The header fields of every message; keyword-only in all subclasses."""

    opcode: ClassVar[int]
    magic: ClassVar[Magic]
    dialect: ClassVar[Dialect | None] = None
    declared: ClassVar[Declaration] = Declaration()
    variants: ClassVar[dict[int, type[Message]]] = {}
    when: ClassVar[When | None] = None
    unmistakable: ClassVar[bool] = False  # its bytes are not valid in the other dialect

    vbucket: int = field(default=0, kw_only=True)
    opaque: int = field(default=0, kw_only=True)
    cas: int = field(default=0, kw_only=True)
    datatype: int = field(default=0, kw_only=True)
    frame_infos: tuple[FrameInfo, ...] = field(default=(), kw_only=True)

    def _frame_info(self, wanted: RequestFrameId) -> bytes | None:
        return next((info.data for info in self.frame_infos if info.id == wanted), None)

    @property
    def stream_id(self) -> int | None:
        """The stream-id framing extra, if there is one."""
        data = self._frame_info(RequestFrameId.STREAM_ID) if self.frame_infos else None
        return None if data is None else int.from_bytes(data, "big")

    @property
    def durability(self) -> RequestedDurability | None:
        """How durable a write must be before it is answered; None if the request does not say."""
        data = self._frame_info(RequestFrameId.DURABILITY) if self.frame_infos else None
        return RequestedDurability(data[0], int.from_bytes(data[1:], "big")) if data else None

    @property
    def preserve_ttl(self) -> bool:
        """Whether a write keeps the expiry of the document that it replaces."""
        return bool(self.frame_infos) and self._frame_info(RequestFrameId.PRESERVE_TTL) is not None

    @classmethod
    def under(cls, opcode: int) -> type[Self]:
        """The same layout with another of its opcodes: ``Get.under(Opcode.GETQ)`` is the quiet form."""
        try:
            return cls.variants[opcode]  # type: ignore[return-value]
        except KeyError:
            raise LocalProtocolError(f"{cls.__name__} does not exist as opcode 0x{opcode:02x}") from None

    def rules(self) -> Iterator[Broken]:
        """The rules about its own fields that this message breaks; the first one counts.

        See docs/protocol/messages.md#checks, step 12.
        """
        return iter(())

    def agreed_rules(self, context: Context) -> Iterator[Broken]:
        """The broken rules about what the two ends agreed on; checked if ``context.check_values`` is on."""
        return iter(())

    def frame(self) -> Frame:
        """The frame for this message; ``LocalProtocolError`` if it would break a rule."""
        frame = self._frame()
        try:
            check_frame(self.declared, frame, DEFAULT_CONTEXT, keys.MAX_WIRE_KEY)
        except InvalidMessage as error:
            raise LocalProtocolError(f"{type(self).__name__}: {error}") from error
        for broken in self.rules():
            raise LocalProtocolError(f"{type(self).__name__}.{broken.field}: {broken.reason}")
        if not _claims(type(self), frame):
            raise LocalProtocolError(f"{type(self).__name__}: the peer would read these bytes as another message")
        return frame

    def encode(self) -> bytes:
        return self.frame().encode()

    def _frame(self) -> Frame:
        extras, key, value = encode_sections(self.declared, self)
        if not self.frame_infos:
            return Frame(
                self.magic, self.opcode, self.vbucket, self.opaque, self.cas, self.datatype, b"", extras, key, value
            )
        magic = Magic.ALT_RESPONSE if self.magic.is_response else Magic.ALT_REQUEST
        infos = encode_frame_infos(self.frame_infos)
        return Frame(magic, self.opcode, self.vbucket, self.opaque, self.cas, self.datatype, infos, extras, key, value)

    @classmethod
    def from_frame(cls, frame: Frame, context: Context = DEFAULT_CONTEXT) -> Self:
        """Decode and check a frame; ``InvalidMessage`` names the first broken rule."""
        check_frame(cls.declared, frame, context, context.max_key)
        found = decode_sections(cls.declared, frame)
        message = cls._build(frame, found)
        for broken in message.rules():
            raise cls._invalid(broken, frame)
        if context.check_values:
            for broken in message.agreed_rules(context):
                raise cls._invalid(broken, frame)
        return message

    @classmethod
    def _invalid(cls, broken: Broken, frame: Frame) -> InvalidMessage:
        offset = offset_of(cls.declared, broken.field, frame)
        return InvalidMessage(broken.reason, broken.field, offset, broken.status)

    @classmethod
    def _build(cls, frame: Frame, found: dict[str, Any]) -> Self:
        return cls(
            **found, vbucket=frame.specific, opaque=frame.opaque, cas=frame.cas, datatype=frame.datatype,
            frame_infos=decode_frame_infos(frame.framing) if frame.framing else (),
        )  # fmt: skip


@plain
class Response(Message):
    """The header fields of every response; it has a status where a request has its vbucket."""

    status: int = field(default=0, kw_only=True)

    def _frame(self) -> Frame:
        frame = Message._frame(self)
        frame.specific = self.status
        return frame

    @classmethod
    def _build(cls, frame: Frame, found: dict[str, Any]) -> Self:
        return cls(
            **found, status=frame.specific, opaque=frame.opaque, cas=frame.cas, datatype=frame.datatype,
            frame_infos=decode_frame_infos(frame.framing) if frame.framing else (),
        )  # fmt: skip


@plain
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
        sections = {"extras": frame.extras, "key": frame.key, "value": frame.value}
        return cls._build(frame, {"to": frame.opcode, "answer_magic": magic, **sections})

    def context(self) -> str:
        """The text of an error response, from its ``{"error": {"context": ...}}``; empty if there is none."""
        error = self._json().get("error")
        context = error.get("context") if isinstance(error, dict) else None
        return context if isinstance(context, str) else ""

    def manifest_uid(self) -> int | None:
        """The uid of the manifest in which an unknown collection or scope was looked up."""
        uid = self._json().get("manifest_uid")
        try:
            return int(uid, 16) if isinstance(uid, str) else None
        except ValueError:
            return None

    def _json(self) -> dict[str, Any]:
        import orjson

        if self.status in PAYLOAD_STATUSES or self.status == Status.NOT_MY_VBUCKET:
            return {}  # a payload, or the cluster map: never an error text (docs/protocol/framing.md#error-answers)
        try:
            found = orjson.loads(self.value)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}


# ---------------------------------------------------------------------------------------------- declaring

M = TypeVar("M", bound=Message)


class _Options(NamedTuple):
    magic: Magic
    cas: Presence
    datatypes: frozenset[int]
    dialect: Dialect | None
    extras: tuple[int, ...] | None
    when: When | None
    stream_id: bool


_registry: dict[tuple[bool, bool, int], list[type[Message]]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def message(
    *opcodes: int,
    cas: Presence = Presence.OPTIONAL,
    datatypes: frozenset[int] = RAW_ONLY,
    dialect: Dialect | None = None,
    extras: tuple[int, ...] | None = None,
    when: When | None = None,
    server: bool = False,
    stream_id: bool = True,
) -> Callable[[type[M]], type[M]]:
    """Declare a request. ``extras`` lists the allowed sizes if some subsets of the optional fields are not allowed."""
    magic = Magic.SERVER_REQUEST if server else Magic.REQUEST
    return _declare(opcodes, _Options(magic, cas, datatypes, dialect, extras, when, stream_id))


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def response(
    *opcodes: int,
    cas: Presence = Presence.OPTIONAL,
    datatypes: frozenset[int] = ANY_DATATYPE,
    dialect: Dialect | None = None,
    extras: tuple[int, ...] | None = None,
    when: When | None = None,
) -> Callable[[type[M]], type[M]]:
    """Declare a successful response, or one that ``when`` recognizes."""
    return _declare(opcodes, _Options(Magic.RESPONSE, cas, datatypes, dialect, extras, when, True))


def _declare(opcodes: tuple[int, ...], options: _Options) -> Callable[[type[M]], type[M]]:
    def decorate(cls: type[M]) -> type[M]:
        made = dataclass(slots=True)(cls)
        made.magic, made.dialect, made.opcode = options.magic, options.dialect, opcodes[0]
        made.when = staticmethod(options.when) if options.when else None
        made.declared = declaration_of(made, options.cas, options.datatypes, options.extras, options.stream_id)
        made.variants = {opcode: made if opcode == opcodes[0] else _variant(made, opcode) for opcode in opcodes}
        for opcode, variant in made.variants.items():
            place = options.magic.is_response, options.magic.is_server, opcode
            _registry.setdefault(place, []).append(variant)
        return made

    return decorate


def _variant(made: type[M], opcode: int) -> type[M]:
    """The same layout with another opcode, such as the quiet form of a command: ``Get.GETQ``."""
    name = Opcode(opcode).name
    own = {"opcode": opcode, "__slots__": (), "__doc__": made.__doc__, "__module__": made.__module__}
    variant = type(name, (made,), {**own, "__qualname__": f"{made.__qualname__}.{name}"})
    setattr(made, name, variant)  # where pickle looks for it
    return variant


def declared_messages() -> list[type[Message]]:
    """Every declared message class, for tests that cover them all."""
    return [cls for classes in _registry.values() for cls in classes]


# ---------------------------------------------------------------------------------------------- choosing the class


def decode(frame: Frame, context: Context = DEFAULT_CONTEXT) -> Message:
    """The message in a frame; ``InvalidMessage`` carries the status that a server answers.

    >>> from upriver.wire import FrameSplitter
    >>> [frame] = FrameSplitter().receive(bytes.fromhex("805d0000040000000000000400000005000000000000000000001000"))
    >>> decode(frame).bytes
    4096
    """
    if frame.magic is Magic.ALT_REQUEST:
        frame = mend_stream_id(frame)
    found = message_class(frame, context)
    if found is not None:
        return found.from_frame(frame, context)
    if frame.magic.is_response:
        return OtherResponse.from_frame(frame, context)
    raise _unknown(frame)


# Classes that follow from these numbers alone; bounded, because only sizes that some class declares get in.
_known: dict[tuple[int, int, int, bool, Dialect], type[Message]] = {}


def message_class(frame: Frame, context: Context = DEFAULT_CONTEXT) -> type[Message] | None:
    """The class for a frame: of those with its opcode, the one that fits its dialect, ``when`` and extras size."""
    magic = frame.magic
    place = magic, frame.opcode, len(frame.extras), _is_payload(frame), context.dialect
    if place in _known:
        return _known[place]
    classes = _registry.get((magic.is_response, magic.is_server, frame.opcode), [])
    fitting = [c for c in classes if (c.unmistakable or c.dialect in (None, context.dialect)) and _claims(c, frame)]
    if not fitting:
        return None
    best = min(fitting, key=lambda c: (not c.declared.fits(frame.extras), c.dialect is not context.dialect))
    if all(c.when is None for c in classes) and len(frame.extras) in best.declared.shapes:
        _known[place] = best
    return best


def _claims(cls: type[Message], frame: Frame) -> bool:
    """Whether a frame can be this message: by ``when``, or for a response by a status with a payload."""
    return cls.when(frame) if cls.when else _is_payload(frame)


def _is_payload(frame: Frame) -> bool:
    return not frame.magic.is_response or frame.specific in PAYLOAD_STATUSES


def _unknown(frame: Frame) -> RemoteProtocolError:
    if frame.magic.is_server:
        known = frame.opcode in ServerOpcode._value2member_map_
        status = Status.NOT_SUPPORTED if known else Status.UNKNOWN_COMMAND
        return InvalidMessage(f"server opcode 0x{frame.opcode:02x} is not served here", "opcode", 1, status)
    if frame.opcode in REMOVED_OPCODES or frame.opcode in Opcode._value2member_map_:
        return InvalidMessage(
            f"opcode 0x{frame.opcode:02x} is not supported any more", "opcode", 1, Status.NOT_SUPPORTED
        )
    return InvalidMessage(f"opcode 0x{frame.opcode:02x} is unknown", "opcode", 1, Status.UNKNOWN_COMMAND)
