"""Checks a frame against the rules that every message obeys, in the order of docs/protocol/messages.md#checks.

The first broken rule decides the status.
"""

from __future__ import annotations

from dataclasses import dataclass

from upriver.errors import InvalidMessage, Status
from upriver.model import Datatype
from upriver.wire import keys, values
from upriver.wire.constants import DURABLE_OPCODES, TTL_OPCODES, Dialect, RequestFrameId
from upriver.wire.framing import HEADER_SIZE, Frame, check_request_frame_infos, decode_frame_infos
from upriver.wire.layout import Bytes, Declaration, Presence, Repeated


@dataclass(frozen=True, slots=True)
class Context:
    """What the two ends agreed on, as far as it changes how bytes are read."""

    dialect: Dialect = Dialect.DCP
    collections: bool = False
    datatypes: int = int(Datatype.JSON | Datatype.SNAPPY | Datatype.XATTR)
    check_values: bool = False  # as a server must: inflate snappy, check xattrs, refuse what HELLO did not turn on

    @property
    def max_key(self) -> int:
        return keys.MAX_WIRE_KEY if self.collections else keys.MAX_KEY


DEFAULT_CONTEXT = Context()


def check_frame(declared: Declaration, frame: Frame, context: Context, max_key: int) -> None:
    """Apply steps 1 to 11; step 12, about the message's own fields, is ``Message.rules``."""
    if frame.datatype > 7:
        raise InvalidMessage(f"datatype 0x{frame.datatype:02x} has unknown bits", "datatype", 5)
    check_sizes(declared, frame, max_key)
    if declared.cas is not Presence.OPTIONAL:
        _check_cas(declared, frame)
    if frame.datatype:
        _check_datatype(declared, frame, context)
    if frame.framing:
        _check_framing(declared, frame)
    if context.collections and declared.key.document and frame.key:
        keys.split_key(frame.key, frame.key_at)


def check_sizes(declared: Declaration, frame: Frame, max_key: int) -> None:
    """Apply steps 2 to 4; every declared field of a frame that passes can be read."""
    if declared.repeated or len(frame.extras) not in declared.shapes:
        _check_extras_size(declared, frame)
    _check_key(declared, frame, max_key)
    _check_value(declared, frame)


def _check_extras_size(declared: Declaration, frame: Frame) -> None:
    size = len(frame.extras)
    layout = declared.repeated.layout if declared.repeated else None
    if isinstance(layout, Repeated):
        each, fixed = layout.struct.size, next(iter(declared.shapes))
        if size < fixed + layout.at_least * each or (size - fixed) % each:
            raise InvalidMessage(f"extras are {size} bytes, not {fixed} + n * {each}", "extras length", 4)
    else:
        allowed = " or ".join(str(each) for each in sorted(declared.shapes))
        raise InvalidMessage(f"extras are {size} bytes, not {allowed}", "extras length", 4)


def _check_key(declared: Declaration, frame: Frame, max_key: int) -> None:
    presence, size = declared.key.presence, len(frame.key)
    if size and presence is Presence.FORBIDDEN:
        raise InvalidMessage("a key is not allowed here", "key length", 2)
    if not size and presence is Presence.REQUIRED:
        raise InvalidMessage("the key is missing", "key length", 2)
    if size > max_key and not frame.magic.is_response:
        raise InvalidMessage(f"key is {size} bytes, the limit is {max_key}", "key length", 2)


def _check_value(declared: Declaration, frame: Frame) -> None:
    size, numbers = len(frame.value), declared.value_size
    rest = declared.rest.layout if declared.rest else None
    if rest is None and size != numbers:
        raise InvalidMessage(f"value is {size} bytes, not {numbers}", "body length", 8)
    if size < numbers:
        raise InvalidMessage(f"value is {size} bytes, less than {numbers}", "body length", 8)
    if size == numbers and isinstance(rest, Bytes) and rest.presence is Presence.REQUIRED:
        raise InvalidMessage("the value is missing", "body length", 8)
    if isinstance(rest, Repeated):
        each = rest.struct.size
        if (size - numbers) % each:
            raise InvalidMessage(f"value is {size} bytes, not a multiple of {each}", "body length", 8)
        if size - numbers < each * rest.at_least:
            raise InvalidMessage(f"value has no entry, at least {rest.at_least} is needed", "body length", 8)


def _check_cas(declared: Declaration, frame: Frame) -> None:
    if declared.cas is Presence.FORBIDDEN and frame.cas:
        raise InvalidMessage("CAS must be 0", "cas", 16)
    if declared.cas is Presence.REQUIRED and not frame.cas:
        raise InvalidMessage("CAS must not be 0", "cas", 16)


def _check_datatype(declared: Declaration, frame: Frame, context: Context) -> None:
    if frame.datatype not in declared.datatypes:
        raise InvalidMessage(f"datatype 0x{frame.datatype:02x} is not allowed here", "datatype", 5)
    if frame.datatype & ~context.datatypes and not frame.magic.is_response:
        raise InvalidMessage(f"datatype 0x{frame.datatype:02x} was not agreed on in HELLO", "datatype", 5)
    if context.check_values and not frame.magic.is_response:
        values.check_value(frame.value, frame.datatype, frame.value_at)


def _check_framing(declared: Declaration, frame: Frame) -> None:
    infos = decode_frame_infos(frame.framing)
    if frame.magic.is_response:
        return
    check_request_frame_infos(infos)
    present = {info.id for info in infos}
    if RequestFrameId.STREAM_ID in present and not declared.stream_id:
        raise InvalidMessage("this message cannot carry a stream-id", "framing extras", HEADER_SIZE)
    if RequestFrameId.DURABILITY in present and frame.opcode not in DURABLE_OPCODES:
        raise InvalidMessage("this command has no durability", "framing extras", HEADER_SIZE)
    if RequestFrameId.PRESERVE_TTL in present and frame.opcode not in TTL_OPCODES:
        raise InvalidMessage(
            "this command has no expiry to preserve", "framing extras", HEADER_SIZE, Status.NOT_SUPPORTED
        )
