"""Bulk encoding gives the same bytes as the objects, for every combination of stream options."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.errors import CorruptStore, LocalProtocolError
from upriver.model import SEQNO_MAX
from upriver.wire import Context, Dialect, FrameInfo, Message, packed
from upriver.wire.bulk.decode import BulkDecoder, Columns
from upriver.wire.bulk.encode import (
    Encoded,
    FrameOptions,
    PackedEncoder,
    SendBuffer,
    Stop,
    pack_columns,
    rows_by_vbucket,
)
from upriver.wire.keys import join_key, split_key
from upriver.wire.messages import dcp, upr
from upriver.wire.packed import SUPERSEDED, RecordHead, RecordKind

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
collections = st.sampled_from([0, 8, 9, 127, 128, 0xCAFEF00D])
values = st.one_of(st.binary(max_size=60), st.integers(0, 3000).map(lambda n: b"v" * n))
KINDS = [
    *[RecordKind.MUTATION] * 4,
    RecordKind.DELETION,
    RecordKind.EXPIRATION,
    RecordKind.PREPARE,
    RecordKind.SYSTEM_EVENT,
]
MARKED = st.sampled_from([0, 0, 0, SUPERSEDED])


@st.composite
def records(draw: st.DrawFn) -> bytes:
    """One record of a run; ``seqno`` is put in by the run."""
    kind = draw(st.sampled_from(KINDS))
    collection = draw(collections)
    tombstone = kind in (RecordKind.DELETION, RecordKind.EXPIRATION)
    return packed.pack(
        kind | draw(MARKED), join_key(collection, draw(st.binary(min_size=1, max_size=200))), draw(values), seqno=1,
        rev_seqno=draw(u64), cas=draw(u64), flags=0 if tombstone else draw(u32), time=draw(u32),
        datatype=draw(st.sampled_from([0, 4, 6] if tombstone else range(8))), prev_seqno=0, collection_id=collection,
        extra=0 if tombstone else draw(u8),
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> bytes:
    seqno, out = draw(st.integers(0, 3)), bytearray()
    for record in draw(st.lists(records(), max_size=12)):
        seqno += draw(st.integers(1, 3))
        out += record[:8] + seqno.to_bytes(8, "little") + record[16:]
    return bytes(out)


options = st.builds(
    FrameOptions, u32, u16, st.sampled_from([0, 0, 1, 71, 65535]), st.booleans(),
    st.one_of(st.none(), st.sets(collections, max_size=3)), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from([0, 2, 4, 6]),
)  # fmt: skip


def cut(run: bytes) -> Iterator[tuple[int, RecordHead, bytes, bytes]]:
    at = 0
    while at < len(run):
        head, key, value = packed.unpack(run, at)
        yield at, head, key, value
        at += head.size


def is_wanted(head: RecordHead, options: FrameOptions, after: int) -> bool:
    if head.kind & SUPERSEDED or head.seqno <= after:
        return False
    if head.kind > RecordKind.EXPIRATION:
        return True
    if head.kind and options.skip_deletes:
        return False
    if not options.collections:
        return head.collection_id == 0
    return options.collection_ids is None or head.collection_id in set(options.collection_ids)


def message(head: RecordHead, key: bytes, value: bytes, options: FrameOptions) -> Message:
    """The record as an object, by the words of the specification.

    See docs/protocol/messages.md and docs/protocol/upr.md#differences.
    """
    if not options.collections:
        key = split_key(key)[1]
    datatype = head.datatype
    if options.no_value:
        value, datatype = b"", datatype if options.keep_datatype else 0
    infos = (FrameInfo(2, options.stream_id.to_bytes(2, "big")),) if options.stream_id else ()
    rest = {"key": key, "value": value, "vbucket": options.vbucket, "opaque": options.opaque, "cas": head.cas,
            "datatype": datatype, "frame_infos": infos}  # fmt: skip
    first = head.seqno, head.rev_seqno
    if head.kind == RecordKind.MUTATION:
        if options.upr:
            return upr.UprMutation(*first, head.flags, head.time, **rest)
        nru = head.extra if options.hifi_mfu else min(head.extra, 3)
        return dcp.DcpMutation(*first, head.flags, head.time, nru=nru, **rest)
    if head.kind == RecordKind.EXPIRATION and options.expiry_opcode:
        return upr.UprExpiration(*first, **rest) if options.upr else dcp.Expiration(*first, head.time, **rest)
    if options.delete_times and not options.upr:
        return dcp.DeletionV2(*first, head.time, **rest)
    return dcp.DcpDeletion(*first, **rest)


def frame_of(head: RecordHead, key: bytes, value: bytes, options: FrameOptions) -> bytes:
    """Encode without checks: UPR has no datatypes, so the checks refuse what the bulk encoder may send."""
    return message(head, key, value, options)._frame().encode()


def is_special(head: RecordHead, options: FrameOptions) -> bool:
    return head.kind > RecordKind.EXPIRATION or bool(head.datatype & options.stop_datatypes)


def by_objects(run: bytes, options: FrameOptions, after: int, upto: int) -> list[bytes | int]:
    """Frames, and the offsets of the records that the producer encodes itself."""
    found: list[bytes | int] = []
    for at, head, key, value in cut(run):
        if head.seqno > upto:
            break
        if is_wanted(head, options, after):
            found.append(at if is_special(head, options) else frame_of(head, key, value, options))
    return found


def in_bulk(run: bytes, options: FrameOptions, after: int, upto: int, room: int, window: int) -> list[bytes | int]:
    """Encode as a producer does: send full buffers, wait for the window, encode special records itself."""
    encoder, out, found, offset = PackedEncoder(options), SendBuffer(room), [], 0
    while True:
        done = encoder.encode(run, out, offset=offset, after=after, upto=upto, budget=window)
        assert done.bytes_written == out.used
        found.extend(frames(bytes(out.view())))
        out.clear()
        offset = done.next_offset
        if done.stop in (Stop.END, Stop.PAST):
            return found
        if done.stop is Stop.SPECIAL:
            found.append(offset)
            offset += packed.unpack(run, offset)[0].size
        window = max(window, 1)  # the consumer acknowledged something


def frames(data: bytes) -> Iterator[bytes]:
    while data:
        size = 24 + int.from_bytes(data[8:12], "big")
        yield data[:size]
        data = data[size:]


@settings(max_examples=examples(400), deadline=None)
@given(runs(), options, st.integers(0, 6), st.one_of(st.just(SEQNO_MAX), st.integers(0, 40)), st.integers(1, 5000))
def test_bulk_frames_equal_the_frames_of_the_objects(
    run: bytes, options: FrameOptions, after: int, upto: int, room: int
) -> None:
    expected = by_objects(run, options, after, upto)
    assert in_bulk(run, options, after, upto, room, window=2**40) == expected
    assert in_bulk(run, options, after, upto, room, window=1) == expected


@settings(max_examples=examples(150), deadline=None)
@given(runs(), st.integers(1, 1023))
def test_packed_to_frames_to_columns_to_packed_is_the_identity(run: bytes, vbucket: int) -> None:
    documents = b"".join(run[at : at + head.size] for at, head, _, _ in cut(run) if head.kind <= RecordKind.EXPIRATION)
    out = SendBuffer()
    options = FrameOptions(7, vbucket, delete_times=True, expiry_opcode=True, hifi_mfu=True)
    PackedEncoder(options).encode(documents, out)
    columns = columns_of(out, collections=True)
    packed_again = pack_columns(columns)
    assert bytes(packed_again.data) == documents
    assert packed_again.starts.tolist() == [at for at, *_ in cut(documents)]
    assert set(columns["vbucket"].tolist()) <= {vbucket}


def columns_of(out: SendBuffer, collections: bool, upr: bool = False) -> Columns:
    dialect = Dialect.UPR if upr else Dialect.DCP
    decoder = BulkDecoder(Context(dialect, collections))
    for part in decoder.feed(out.view()):
        assert not part.controls
    return decoder.take()


def mutations(count: int, value: bytes = b"v" * 100) -> bytes:
    return b"".join(packed.pack(RecordKind.MUTATION, b"\0key%d" % n, value, seqno=n) for n in range(1, count + 1))


def encode(run: bytes, **how: int) -> Encoded:
    return PackedEncoder(FrameOptions()).encode(run, SendBuffer(), **how)


def test_the_frame_that_uses_up_the_window_is_still_sent() -> None:
    size = 55 + len(b"\0key1") + 100
    assert encode(mutations(5), budget=0).stop is Stop.WINDOW
    assert encode(mutations(5), budget=1).records_sent == 1
    assert encode(mutations(5), budget=size).records_sent == 1
    assert encode(mutations(5), budget=size + 1).records_sent == 2


def test_an_encoder_reports_the_last_scanned_seqno_even_if_the_filter_passes_nothing() -> None:
    run = b"".join(packed.pack(0, b"\x08k", seqno=n, collection_id=8) for n in (3, 5, 9))
    done = PackedEncoder(FrameOptions(collection_ids=[9])).encode(run, SendBuffer(), upto=6)
    assert (done.records_sent, done.last_seqno, done.last_scanned_seqno, done.stop) == (0, 0, 5, Stop.PAST)


def test_a_document_larger_than_the_send_buffer_makes_it_grow() -> None:
    run = packed.pack(0, b"\0k", bytes(range(256)) * 400, seqno=1)
    out = SendBuffer(100)
    assert PackedEncoder(FrameOptions()).encode(run, out).records_sent == 1
    assert bytes(out.view()).endswith(bytes(range(256)))


def test_bytes_taken_to_be_sent_do_not_change() -> None:
    out, sent = SendBuffer(100), []
    for n in range(1, 20):
        PackedEncoder(FrameOptions()).encode(packed.pack(0, b"\0k", b"%d" % n * n * 20, seqno=n), out)
        sent.append(out.take())
    assert all(bytes(view).endswith(b"%d" % n * n * 20) for n, view in enumerate(sent, 1))
    assert out.used == 0


def test_memory_taken_to_be_sent_returns_to_the_pool() -> None:
    out, addresses = SendBuffer(), set()
    for _ in range(20):
        out.append(b"frame")
        addresses.add(out.address)
        out.take()
    assert len(addresses) <= 2


def test_control_frames_go_between_the_bulk_ones() -> None:
    out = SendBuffer()
    marker = dcp.SnapshotMarker(1, 9, 1).encode()
    out.append(marker)
    PackedEncoder(FrameOptions()).encode(mutations(1), out)
    out.append(marker)
    assert [frame[1] for frame in frames(bytes(out.view()))] == [0x56, 0x57, 0x56]


@pytest.mark.parametrize("damage", [
    pytest.param(lambda run: run[:-1], id="cut short"),
    pytest.param(lambda run: run[:70], id="cut in a header"),
    pytest.param(lambda run: b"\xff\xff\xff\xff" + run[4:], id="a size that lies"),
    pytest.param(lambda run: bytes(64) + run, id="zeros"),
    pytest.param(lambda run: run[:48] + b"\xff\xff\xff\xff" + run[52:], id="a value length that lies"),
])  # fmt: skip
def test_a_damaged_run_is_corrupt_and_not_read_past_its_end(damage) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CorruptStore, match="byte"):
        encode(damage(mutations(1)))


def test_a_stream_id_that_does_not_fit_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        PackedEncoder(FrameOptions(stream_id=65536))


def test_rows_are_grouped_by_vbucket_in_the_order_of_arrival() -> None:
    out = SendBuffer()
    for seqno, vbucket in enumerate([5, 3, 5, 1000, 3, 5], 1):
        out.append(dcp.DcpMutation(seqno, 1, key=b"k", vbucket=vbucket).encode())
    columns = columns_of(out, collections=False)
    groups = {vbucket: columns["seqno"][rows].tolist() for vbucket, rows in rows_by_vbucket(columns)}
    assert groups == {3: [2, 5], 5: [1, 3, 6], 1000: [4]}
    run = pack_columns(columns, dict(rows_by_vbucket(columns))[5])
    assert [packed.unpack(run.data, int(at))[0].seqno for at in run.starts] == [1, 3, 6]
    assert packed.unpack(run.data)[1] == b"\0k"
