"""The fuzz targets: functions that take any bytes and raise only if the code is wrong.

``make fuzz`` drives them with atheris; ``tests/wire/test_fuzz.py`` runs the same functions for a moment in CI.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from upriver.errors import InvalidMessage, LocalProtocolError, RemoteProtocolError
from upriver.wire import Context, Dialect, Frame, FrameSplitter, Message, decode
from upriver.wire.inspect.conversation import CapturedConversation, DumpReader
from upriver.wire.inspect.dump import as_json, rows
from upriver.wire.messages.stream_value import StreamValue
from upriver.wire.values import inflate, split_xattrs

ROOT = Path(__file__).resolve().parent.parent


def fuzz_frames(data: bytes) -> None:
    """Splitter, decoder and dump raise only ``RemoteProtocolError``, find the same frames in any pieces, round-trip.

    The first two bytes choose the negotiated features and the size of the pieces.
    """
    if len(data) < 2:
        return
    dialect = Dialect.UPR if data[0] & 2 else Dialect.DCP
    context = Context(dialect, bool(data[0] & 1), (data[0] >> 2) & 7, bool(data[0] & 32))
    step, stream = data[1] or len(data), data[2:]
    frames = _split(stream, len(stream) or 1)
    assert frames == _split(stream, step)
    for frame in frames:
        _decode(frame, context)
    _dump(stream, step, dialect, context.collections if data[0] & 128 else None)


def _split(stream: bytes, step: int) -> list[Frame]:
    splitter, found = FrameSplitter(4096), []
    with contextlib.suppress(RemoteProtocolError):
        for at in range(0, len(stream), step):
            found.extend(splitter.receive(stream[at : at + step]))
    return found


def _decode(frame: Frame, context: Context) -> None:
    message, error = _outcome(frame, context)
    if error:
        assert error.field
        assert 0 <= error.offset <= frame.size
    elif message and (frame.framing or not frame.magic.is_flexible):
        assert message.encode() == frame.encode()


def _outcome(frame: Frame, context: Context) -> tuple[Message | None, RemoteProtocolError | None]:
    try:
        return decode(frame, context), None
    except RemoteProtocolError as error:
        return None, error


def _dump(stream: bytes, step: int, dialect: Dialect, collections: bool | None) -> None:
    reader = DumpReader(CapturedConversation(dialect, collections), 4096)
    for at in range(0, len(stream), step):
        if at and stream[at] == 0xFF:
            reader.gap()
        for dump in reader.receive(stream[at : at + step]):
            assert rows(dump)
            assert ("error" in as_json(dump)) == (dump.error is not None)
    list(reader.receive_eof())


def fuzz_value(data: bytes) -> None:
    """The JSON of a stream request, snappy and extended attributes."""
    with contextlib.suppress(InvalidMessage):
        _parse(data)
    for read in (inflate, split_xattrs):
        with contextlib.suppress(InvalidMessage):
            read(data)


def _parse(data: bytes) -> None:
    value = StreamValue.parse(data)
    try:
        assert StreamValue.parse(value.encode()) == value
    except LocalProtocolError as error:
        raise AssertionError(f"parsed but cannot be sent: {value}") from error


def fuzz_bulk(data: bytes) -> None:
    """The bulk decoder and the object decoder agree on every byte stream."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from tests.wire.bulk_oracle import fuzz_bulk as agree

    agree(data)


TARGETS = {"frames": fuzz_frames, "value": fuzz_value, "bulk": fuzz_bulk}


def seeds(target: str) -> list[bytes]:
    """Inputs to begin with: the specification's examples."""
    if target == "value":
        return [b'{"uid":"a2","sid":7,"collections":["8","1c"]}', b'{"scope":"8","purge_seqno":"900"}', b'{"cts":{}}']
    sys.path.insert(0, str(ROOT))
    from tests.wire.wire_vectors import MODERN, SEED

    return [bytes([choice, 0]) + vector.raw for vector in (*SEED, *MODERN) for choice in (0, 2, 1)]
