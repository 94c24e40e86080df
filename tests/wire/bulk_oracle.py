"""Compares the bulk reader with the object reader: both turn any byte stream into the same list of outcomes.

``fuzz_bulk`` is the entry point for a fuzzer: for any bytes, the two lists are equal and nothing is raised.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from upriver.errors import FramingError, RemoteProtocolError
from upriver.wire import Context, Dialect, Frame, FrameSplitter, Message, decode
from upriver.wire.bulk.decode import BulkDecoder, Columns, ColumnSizes, Decoded
from upriver.wire.framing import cut_frame
from upriver.wire.keys import split_key

DOCUMENTS = (0x57, 0x58, 0x59)
ROW_FIELDS = (
    "event", "vbucket", "datatype", "seqno", "rev_seqno", "cas", "flags", "expiry", "delete_time", "lock_time",
    "opaque", "nru",
)  # fmt: skip
SMALL = ColumnSizes(rows=5, key_bytes=600, value_bytes=300)


def document(message: Message, context: Context) -> tuple[Any, ...]:
    """The row that a document message must become."""
    get = lambda name: getattr(message, name, 0)  # noqa: E731
    collection, key = split_key(message.key) if context.collections else (0, message.key)  # type: ignore[attr-defined]
    numbers = (
        message.opcode, message.vbucket, message.datatype, get("by_seqno"), get("rev_seqno"), message.cas, get("flags"),
        get("expiry"), get("delete_time"), get("lock_time"), message.opaque, get("nru"),
    )  # fmt: skip
    return (*numbers, message.stream_id or 0, collection, key, get("value"))


def row(columns: Columns, at: int) -> tuple[Any, ...]:
    numbers = tuple(int(columns[name][at]) for name in ROW_FIELDS)
    extra = int(columns["stream_id"][at]), int(columns["collection_id"][at])
    return (*numbers, *extra, columns.key(at), columns.value(at))


def outcome(frame: Frame, context: Context) -> Any:
    """The message, the row, or the error for a frame."""
    try:
        message = decode(frame, context)
    except RemoteProtocolError as error:
        return type(error), error.args
    is_row = frame.opcode in DOCUMENTS and not frame.magic.is_response and not getattr(message, "nmeta", 0)
    # Rows do not show an unusual framing extra or an unused byte, which do not change the document.
    return document(message, context) if is_row else message


def by_objects(chunks: Iterable[bytes], context: Context, limit: int = 4096) -> list[Any]:
    splitter, found = FrameSplitter(limit), []
    try:
        for chunk in chunks:
            found.extend(outcome(frame, context) for frame in splitter.receive(chunk))
    except FramingError as error:
        found.append((FramingError, error.args))
    return [*found, splitter.pending] if not splitter._error else found


def in_bulk(chunks: Iterable[bytes], context: Context, limit: int = 4096, receive: bool = False) -> list[Any]:
    """Like ``by_objects``. Rows are taken and cleared in turn, to see that neither disturbs what follows."""
    decoder, found = BulkDecoder(context, SMALL, limit=limit, receive_bytes=64), []
    try:
        for chunk in chunks:
            for part in received(decoder, chunk) if receive else decoder.feed(chunk):
                found.extend(in_order(part, context))
                if part.full or len(found) % 5 == 0:
                    decoder.clear() if len(found) % 2 else decoder.take()
    except FramingError as error:
        return [*found, (FramingError, error.args)]
    return [*found, decoder.pending]


def received(decoder: BulkDecoder, chunk: bytes) -> Iterator[Decoded]:
    """Feed the decoder as a socket does: never more than there is room for."""
    while chunk:
        room = decoder.buffer()
        size = min(len(room), len(chunk))
        room[:size] = chunk[:size]
        chunk = chunk[size:]
        yield from decoder.received(size)


def in_order(part: Decoded, context: Context) -> Iterator[Any]:
    at = part.first
    for control in part.controls:
        for each in range(at, control.row):
            yield row(part.columns, each)
        at = control.row
        yield outcome(cut_frame(control.frame), context)
    for each in range(at, part.last):
        yield row(part.columns, each)


def fuzz_bulk(data: bytes) -> None:
    """Run one fuzzer input: the first two bytes choose the connection and the chunk size."""
    if len(data) < 2:
        return
    dialect = Dialect.UPR if data[0] & 2 else Dialect.DCP
    context = Context(dialect, bool(data[0] & 1), (data[0] >> 2) & 7, bool(data[0] & 32))
    step, stream = data[1] or len(data), data[2:]
    chunks = [stream[at : at + step] for at in range(0, len(stream), step)]
    expected = by_objects(chunks, context)
    assert in_bulk(chunks, context) == expected
    assert in_bulk(chunks, context, receive=True) == expected
