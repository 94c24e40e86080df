"""Values are stripped, inflated and compressed in bulk as they are one by one, whatever the buffer sizes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.model import Datatype
from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.frames import StreamFrames
from upriver.wire import FrameSplitter
from upriver.wire.bulk.encode import FrameOptions, SendBuffer, Stop
from upriver.wire.bulk.shape import ScratchMemory, ShapingEncoder, ValueShape
from upriver.wire.constants import Dialect, OpenFlag
from upriver.wire.messages import dcp
from upriver.wire.packed import SUPERSEDED, RecordKind, pack, unpack
from upriver.wire.values import deflate, inflate, join_xattrs

NO_VALUE = OpenFlag.NO_VALUE | OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE
SCRATCH = ScratchMemory()
FLAGS = [
    0, 0x04, 0x104, 0x08, 0x0C, 0x40, 0x44, 0x10C, 0x24,
]  # fmt: skip

NAMES = st.sampled_from(["_sync", "_a", "user", "b", "_long_name_here"])
ATTRIBUTES = st.dictionaries(NAMES, st.sampled_from([b"1", b'{"x":[1,2]}', b'"' + b"y" * 40 + b'"']), max_size=3)
BODIES = st.one_of(
    st.binary(max_size=80),
    st.sampled_from([b"", b"{}", b'{"a":"' + b"z" * 200 + b'"}']),
    st.tuples(st.binary(min_size=1, max_size=9), st.integers(1, 60)).map(lambda pair: pair[0] * pair[1]),
)


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from([RecordKind.MUTATION, RecordKind.MUTATION, RecordKind.DELETION, RecordKind.EXPIRATION]))
    attributes = draw(ATTRIBUTES)
    body = draw(BODIES) if kind == RecordKind.MUTATION else b""
    value, datatype = body, 0
    if attributes or draw(st.booleans()):
        value, datatype = join_xattrs(attributes, body), Datatype.XATTR
    if body:  # an empty body is not JSON
        datatype |= draw(st.sampled_from([0, Datatype.JSON]))
    if value and draw(st.booleans()):
        value, datatype = deflate(value), datatype | Datatype.SNAPPY
    key = b"\0" + draw(st.binary(min_size=1, max_size=20))
    superseded = draw(st.sampled_from([0, 0, 0, SUPERSEDED]))
    return {"kind": kind | superseded, "key": key, "value": value, "datatype": datatype}


def run_of(made: list[dict[str, Any]]) -> bytes:
    return b"".join(pack(seqno=seqno, cas=seqno + 7, rev_seqno=seqno, **each) for seqno, each in enumerate(made, 1))


def options_of(flags: int, *, snappy: bool, force: bool) -> ProducerOptions:
    made = ProducerOptions.opened(dcp.Open(0, flags | 1, b"n"), collections=True, snappy=snappy, now=0.0)
    made.force_value_compression = force
    return made


def encoder_of(options: ProducerOptions) -> tuple[ShapingEncoder, StreamFrames]:
    frames, flags = StreamFrames(options, Dialect.DCP, 3, 9, 0), options.flags
    shape = ValueShape(
        frames.stop_datatypes, OpenFlag.INCLUDE_XATTRS in flags, OpenFlag.INCLUDE_DELETED_USER_XATTRS in flags,
        bool(flags & NO_VALUE), options.force_value_compression,
        OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in flags, options.snappy,
    )  # fmt: skip
    plain = FrameOptions(
        opaque=9, vbucket=3, delete_times=OpenFlag.INCLUDE_DELETE_TIMES in flags, no_value=bool(flags & NO_VALUE),
        keep_datatype=OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in flags, stop_datatypes=frames.stop_datatypes,
    )  # fmt: skip
    return ShapingEncoder(plain, shape, SCRATCH), frames


def plain(frame_bytes: bytes, keeps_datatype: bool) -> tuple[Any, ...]:
    """A frame with its value inflated: two compressors may give different bytes."""
    (frame,) = FrameSplitter().receive(frame_bytes)
    value, datatype = bytes(frame.value), frame.datatype
    if datatype & Datatype.SNAPPY and value and not keeps_datatype:
        value, datatype = inflate(value), datatype & ~Datatype.SNAPPY
    return frame.opcode, bytes(frame.key), bytes(frame.extras), frame.cas, datatype, value


def encode_all(encoder: ShapingEncoder, run: bytes, room: int, budget: int, frames: StreamFrames) -> list[bytes]:
    """Every frame, with small send buffers and windows; the caller encodes special records one by one."""
    out, offset, sent = SendBuffer(room), 0, bytearray()
    for _ in range(10_000):
        done = encoder.encode(run, out, offset=offset, budget=budget)
        sent += out.view()
        out.clear()
        offset = done.next_offset
        if done.stop is Stop.SPECIAL:
            head, key, value = unpack(run, offset)
            sent += frames.document(head, key, value)
            offset += head.size
        elif done.stop in (Stop.END, Stop.PAST):
            assert offset == len(run)
            return [frame.encode() for frame in FrameSplitter().receive(bytes(sent))]
    raise AssertionError("it does not get on")


@settings(max_examples=examples(300), deadline=None)
@given(
    made=st.lists(documents(), max_size=8), flags=st.sampled_from(FLAGS), snappy=st.booleans(), force=st.booleans(),
    room=st.sampled_from([64, 500, 1 << 16]), budget=st.sampled_from([1, 300, 1 << 40]),
)  # fmt: skip
@example(
    made=[{"kind": 0, "key": b"\0k", "value": join_xattrs({}, b"x" * 100), "datatype": 4}], flags=4, snappy=True,
    force=True, room=64, budget=1,
)  # fmt: skip
def test_a_run_encoded_in_bulk_equals_its_documents_one_by_one(
    made: list[dict[str, Any]], flags: int, snappy: bool, force: bool, room: int, budget: int
):
    options = options_of(flags, snappy=snappy, force=force and snappy)
    encoder, frames = encoder_of(options)
    run = run_of(made)
    wanted, at = [], 0
    while at < len(run):
        head, key, value = unpack(run, at)
        at += head.size
        if not head.kind & SUPERSEDED:
            wanted.append(frames.document(head, key, value))
    got = encode_all(encoder, run, room, budget, frames)
    keeps = OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE in options.flags
    assert [plain(each, keeps) for each in got] == [plain(each, keeps) for each in wanted]


def test_only_records_that_are_not_documents_are_left_to_the_caller():
    made = [
        {"kind": RecordKind.MUTATION, "key": b"\0a", "value": join_xattrs({"x": b"1"}, b"body"), "datatype": 4},
        {"kind": RecordKind.SYSTEM_EVENT, "key": b"name", "value": b"", "datatype": 0},
        {"kind": RecordKind.MUTATION, "key": b"\0b", "value": join_xattrs({"x": b"1"}, b"body"), "datatype": 4},
    ]
    run = run_of(made)
    encoder, _ = encoder_of(options_of(0, snappy=False, force=False))
    out = SendBuffer()
    done = encoder.encode(run, out)
    assert (done.stop, done.records_sent, done.last_seqno) == (Stop.SPECIAL, 1, 1)
    rest = encoder.encode(run, out, offset=done.next_offset + unpack(run, done.next_offset)[0].size)
    assert (rest.stop, rest.records_sent, rest.last_seqno, rest.next_offset) == (Stop.END, 1, 3, len(run))


@pytest.mark.parametrize(
    ("value", "datatype"),
    [
        pytest.param(b"\0\0", Datatype.XATTR, id="attributes cut short"),
        pytest.param(b"\0\0\0\x09abc", Datatype.XATTR, id="attributes longer than the value"),
        pytest.param(b"\0\0\0\x06\0\0\0\x02ab", Datatype.XATTR, id="a pair without ends"),
        pytest.param(b"\xff\xff\xff\xff\xff", Datatype.SNAPPY, id="a size without an end"),
        pytest.param(b"\x0a\x10ab", Datatype.SNAPPY, id="compressed bytes that are cut off"),
        pytest.param(b"\x08\x01\x09", Datatype.SNAPPY, id="a copy of what is not there"),
        pytest.param(b"\xff\xff\xff\xff\x0f", Datatype.SNAPPY, id="four gigabytes"),
    ],
)
def test_a_value_that_contradicts_its_datatype_is_left_to_the_caller(value: bytes, datatype: int):
    run = run_of([{"kind": RecordKind.MUTATION, "key": b"\0a", "value": value, "datatype": datatype}])
    encoder, _ = encoder_of(options_of(0, snappy=False, force=False))
    done = encoder.encode(run, SendBuffer())
    assert (done.stop, done.next_offset, done.records_sent) == (Stop.SPECIAL, 0, 0)


@pytest.mark.parametrize("shape", [ValueShape(force_compression=True, snappy=True), ValueShape(stop_datatypes=4)])
def test_a_reader_without_sync_writes_sees_commits_as_documents(shape: ValueShape):
    with_xattrs = join_xattrs({"x": b"1"}, b"body")
    records = [
        pack(RecordKind.PREPARE, b"\0a", with_xattrs, seqno=1, datatype=4, extra=0x100),
        pack(RecordKind.COMMIT, b"\0a", with_xattrs, seqno=2, datatype=4, cas=9, extra=1),
        pack(RecordKind.COMMIT, b"\0b", b"", seqno=3, cas=9, extra=1 << 63 | 1),
        pack(RecordKind.PREPARE, b"\0c", b"", seqno=4, extra=0x100),
        pack(RecordKind.ABORT, b"\0c", b"", seqno=5, extra=4),
    ]
    run = b"".join(records)
    options = FrameOptions(plain_commits=True, stop_datatypes=shape.stop_datatypes)
    out = SendBuffer()
    done = ShapingEncoder(options, shape, SCRATCH).encode(run, out)
    got = [(frame.opcode, bytes(frame.key)) for frame in FrameSplitter().receive(bytes(out.view()))]
    assert got == [(0x57, b"\0a"), (0x58, b"\0b")]
    assert (done.stop, done.records_sent, done.last_seqno, done.invisible) == (Stop.END, 2, 3, 5)
    replica = ShapingEncoder(replace(options, plain_commits=False), shape, SCRATCH)
    assert replica.encode(run, out)[1:3] == (0, 0), "a reader with sync writes gets each record from the caller"


def test_records_that_a_filter_hides_are_skipped():
    keys = (b"\x09a", b"\0b", b"\x09c")
    run = b"".join(
        pack(RecordKind.MUTATION, key, b"v" * 100, seqno=seqno, collection_id=key[0])
        for seqno, key in enumerate(keys, 1)
    )
    shape = ValueShape(force_compression=True, snappy=True)
    encoder = ShapingEncoder(FrameOptions(collection_ids=(9,)), shape, SCRATCH)
    out = SendBuffer()
    done = encoder.encode(run, out)
    assert [bytes(frame.key) for frame in FrameSplitter().receive(bytes(out.view()))] == [b"\x09a", b"\x09c"]
    assert (done.stop, done.last_scanned_seqno) == (Stop.END, 3)


def test_a_document_of_many_megabytes_is_encoded_and_its_memory_released():
    shop = ScratchMemory()
    usual = len(shop.out)
    body = bytes(itertools.islice(itertools.cycle(range(251)), 3 << 20))
    small = {"kind": RecordKind.MUTATION, "key": b"\0s", "value": b"abc" * 100, "datatype": 0}
    run = run_of([{"kind": RecordKind.MUTATION, "key": b"\0b", "value": deflate(body), "datatype": 2}, small])
    encoder = ShapingEncoder(FrameOptions(stop_datatypes=2), ValueShape(stop_datatypes=2), shop)
    out = SendBuffer(1 << 16)
    done = encoder.encode(run, out)
    first, *_ = FrameSplitter().receive(bytes(out.view()))
    assert (first.value, first.datatype, done.records_sent) == (body, 0, 2)
    compressing = ShapingEncoder(FrameOptions(), ValueShape(force_compression=True, snappy=True), shop)
    compressing.encode(run_of([small]), out)
    assert len(shop.out) == usual


@settings(deadline=None)
@given(value=BODIES, repeated=st.integers(1, 40))
def test_any_snappy_library_inflates_what_the_kernel_compresses(value: bytes, repeated: int):
    value = (value * repeated)[:4000]
    run = run_of([{"kind": RecordKind.MUTATION, "key": b"\0k", "value": value, "datatype": 0}])
    encoder = ShapingEncoder(FrameOptions(), ValueShape(force_compression=True, snappy=True), SCRATCH)
    out = SendBuffer()
    encoder.encode(run, out)
    (frame,) = FrameSplitter().receive(bytes(out.view()))
    assert (inflate(frame.value) if frame.datatype else frame.value) == value
    assert len(frame.value) <= len(value)
