"""The bulk reader agrees with the object reader on every byte stream, however it is cut, and releases its memory."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.wire.bulk_oracle import by_objects, fuzz_bulk, in_bulk
from upriver.errors import FramingError, LocalProtocolError
from upriver.wire import Context, Dialect, Frame, FrameInfo, Magic, Message
from upriver.wire.bulk.decode import BulkDecoder, ColumnSizes
from upriver.wire.framing import encode_frame_infos
from upriver.wire.keys import encode_leb128
from upriver.wire.messages import dcp, upr

u8, u16, u32, u64 = (st.integers(0, 2**bits - 1) for bits in (8, 16, 32, 64))
near = st.sampled_from  # for values at the edge of a rule

LAYOUTS = [(0x57, 31), (0x57, 31), (0x57, 30), (0x58, 18), (0x58, 21), (0x59, 18), (0x59, 20)]
good_keys = st.builds(lambda cid, key: encode_leb128(cid) + key, near([0, 8, 127, 128, 2**32 - 1]), st.just(b"key"))
odd_keys = st.one_of(
    st.builds(lambda cid, key: encode_leb128(cid) + key, near([1, 7, 0, 8]), near([b"", b"k", b"k" * 246, b"k" * 247])),
    st.builds(lambda size: b"\0" * size, st.integers(245, 253)),
    near([b"", b"\0", b"\x80", b"\x80\x00k", b"\xff\xff\xff\xff\x1fk", b"\x80\x80\x80\x80\x80\x01k"]),
    st.binary(max_size=260),
)
values = st.one_of(st.binary(max_size=70), st.integers(0, 700).map(lambda n: b"v" * n))
stream_ids = st.builds(lambda sid: encode_frame_infos((FrameInfo(2, sid.to_bytes(2, "big")),)), st.integers(1, 65535))
odd_framings = st.one_of(near([b"", b"\x22\0\0", b"\x22\0\1\0", b"\x21\0\1", b"\x15\0\0"]), st.binary(max_size=6))
ODDITIES = ["none", "none", "seqno", "size", "extras", "extras", "key", "framing", "forgotten", "datatype", "magic"]


def clean_extras(op: int, size: int, seqno: int, numbers: bytes) -> bytes:
    """Extras with random numbers; reserved fields are 0."""
    body = bytearray(seqno.to_bytes(8, "big") + numbers)[:size]
    if op == 0x57:
        body[28:30] = b"\0\0"
    elif size == 18:
        body[16:18] = b"\0\0"
    elif size == 21:
        body[20] = 0
    return bytes(body)


@st.composite
def document_frames(draw: st.DrawFn) -> bytes:
    """A document message of any layout, valid or with exactly one fault."""
    odd = draw(st.sampled_from(ODDITIES))
    op, size = draw(st.sampled_from(LAYOUTS))
    size += draw(st.sampled_from([-1, 1])) if odd == "size" else 0
    seqno = draw(near([0, 2**63 - 1, 2**63, 2**64 - 1]) if odd == "seqno" else st.integers(1, 2**63 - 1))
    body = clean_extras(op, size, seqno, draw(st.binary(min_size=24, max_size=24)))
    if odd == "extras":
        at = draw(st.integers(16, size - 1))
        body = body[:at] + draw(st.binary(min_size=1, max_size=1)) + body[at + 1 :]
    flexible = odd == "framing" or draw(st.booleans())
    framing = draw(odd_framings if odd == "framing" else stream_ids) if flexible else b""
    datatype = draw(st.integers(0, 9)) if odd == "datatype" else draw(near([0, 0, 4] if size < 30 else [0, 0, 1, 7]))
    magic = Magic.ALT_REQUEST if flexible else Magic.REQUEST
    if odd == "magic":
        magic = draw(st.sampled_from([m for m in Magic if m.is_flexible == flexible]))
    key = draw(odd_keys if odd == "key" else good_keys)[: 255 if flexible else None]
    made = Frame(magic, op, draw(u16), draw(u32), draw(u64), datatype, framing, body, key, draw(values)).encode()
    # The framing's length (docs/protocol/pitfalls.md#forgotten-framing-length)
    return made[:2] + b"\0" + made[3:] if odd == "forgotten" and flexible else made


plain_frames = st.one_of(
    st.builds(
        dcp.DcpMutation, st.integers(1, 2**63), u64, u32, u32, key=st.just(b"\x08key"), value=values, vbucket=u16
    ),
    st.builds(dcp.DeletionV2, st.integers(1, 99), u64, u32, key=st.just(b"\0k"), opaque=u32),
    st.builds(dcp.Expiration, st.integers(1, 99), u64, u32, key=st.just(b"\0k"), cas=u64),
    st.builds(upr.UprMutation, st.integers(1, 99), u64, u32, u32, key=st.just(b"\0k"), value=values),
).map(lambda message: message.encode())
control_frames = st.one_of(
    st.builds(dcp.DcpNoop, opaque=u32),
    st.builds(dcp.SeqnoAdvanced, u64, vbucket=u16),
    st.just(dcp.SnapshotMarker(1, 9, 1)),
    st.just(upr.UprSnapshotMarker()),
    st.builds(dcp.Prepare, st.integers(1, 9), u64, key=st.just(b"\0key"), cas=st.just(1)),
).map(lambda message: message.encode())
broken_headers = st.binary(min_size=24, max_size=24)
pieces = st.one_of(plain_frames, document_frames(), document_frames(), control_frames)
streams = st.one_of(
    st.lists(pieces, max_size=14).map(b"".join),
    st.lists(st.one_of(pieces, broken_headers, st.binary(max_size=30)), max_size=14).map(b"".join),
    st.binary(max_size=300),
)
datatypes = st.one_of(st.just(7), st.integers(0, 7))
contexts = st.builds(Context, st.sampled_from(Dialect), st.booleans(), datatypes, st.booleans())


@st.composite
def chopped(draw: st.DrawFn) -> list[bytes]:
    data = draw(streams)
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=examples(400), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chopped(), contexts)
def test_columns_agree_with_objects_on_every_buffer(chunks: list[bytes], context: Context) -> None:
    expected = by_objects(chunks, context)
    assert in_bulk(chunks, context) == expected
    assert in_bulk(chunks, context, receive=True) == expected


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(pieces, max_size=4).map(b"".join), contexts)
def test_one_byte_at_a_time_makes_no_difference(data: bytes, context: Context) -> None:
    expected = by_objects([data], context)
    single = [data[at : at + 1] for at in range(len(data))]
    assert in_bulk(single, context) == expected
    assert in_bulk(single, context, receive=True) == expected


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=400))
@example(b"")
@example(b"\x00\x00" + bytes.fromhex("805700051f0002100000002900001210") * 3)
def test_the_fuzz_entry_accepts_any_bytes(data: bytes) -> None:
    fuzz_bulk(data)


SID = b"\x22\0\x47"
PREFIXES = [b"", *map(encode_leb128, [0, 1, 7, 8, 127, 128, 16383, 16384, 2**32 - 1]), b"\x80", b"\x80\0", b"\x88\0",
            b"\xff\xff\xff\xff\x1f", b"\x80\x80\x80\x80\x80\1"]  # fmt: skip
ODD = {
    "key": [prefix + b"k" * size for prefix in PREFIXES for size in (0, 1, 245, 246, 247, 249, 250, 251)],
    "framing": [b"", b"\x22\0\0", b"\x22\1", SID + b"\0", SID + SID, b"\x15\1\1", b"\x21\1\1", b"\xf2\1\1"],
    "datatype": list(range(10)),
    "seqno": [0, 1, 2**63 - 1, 2**63, 2**64 - 1],
    "extras": [(at, byte) for at in range(31) for byte in (1, 255)],
    "size": [-1, 1, -8],
    "magic": list(Magic),
}


def one_odd_frame(op: int, size: int, what: str, odd: Any, framing: bytes) -> bytes:
    key, datatype, seqno, magic = b"\0key", 0, 7, Magic.ALT_REQUEST if framing else Magic.REQUEST
    if what == "key":
        key = odd[:255]
    elif what == "framing":
        framing, magic = odd, Magic.ALT_REQUEST
    elif what == "datatype":
        datatype = odd
    elif what == "seqno":
        seqno = odd
    elif what == "size":
        size += odd
    elif what == "magic":
        magic = odd
    body = bytearray(clean_extras(op, size, seqno, bytes(range(24))) if what != "size" else seqno.to_bytes(size, "big"))
    if what == "extras" and odd[0] < size:
        body[odd[0]] = odd[1]
    framing = framing if magic.is_flexible else b""
    return Frame(magic, op, 5, 6, 7, datatype, framing, bytes(body), key, b"value").encode()


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("context", [Context(dialect, coll) for dialect in Dialect for coll in (False, True)])
def test_one_unusual_thing_at_a_time(what: str, context: Context) -> None:
    """Both readers agree on every layout, with and without stream-id, for every value at the edge of a rule."""
    frames = [one_odd_frame(op, size, what, odd, framing)
              for op, size in LAYOUTS for odd in ODD[what] for framing in (b"", SID)]  # fmt: skip
    assert in_bulk(frames, context) == by_objects(frames, context)


@pytest.mark.parametrize("frame", [
    pytest.param(dcp.DeletionV2(1, 1, unused=1, key=b"k"), id="an unused byte that is used"),
    pytest.param(dcp.DcpMutation(2**63, 1, key=b"k"), id="a seqno that no signed column holds"),
    pytest.param(dcp.DcpMutation(1, 1, key=b"k", frame_infos=(FrameInfo(2, b"\0\0"),)), id="stream-id 0"),
    pytest.param(dcp.DcpMutation(1, 1, key=b"k", frame_infos=(FrameInfo(0),)), id="another framing extra"),
    pytest.param(upr.UprMutation(1, 1, nmeta=2, key=b"k", value=b"vmm"), id="extended metadata"),
])  # fmt: skip
def test_messages_that_do_not_fit_a_row_are_left_to_the_object_reader(frame: Message) -> None:
    [part] = BulkDecoder().feed(frame.encode())
    assert (part.last, len(part.controls)) == (0, 1)


def mutation(seqno: int, value: bytes = b"value", **header: int) -> bytes:
    return dcp.DcpMutation(seqno, 1, key=b"key%d" % seqno, value=value, **header).encode()


def test_controls_keep_their_place_among_the_rows() -> None:
    noop = dcp.DcpNoop(opaque=9).encode()
    [part] = BulkDecoder().feed(noop + mutation(1) + mutation(2) + noop + noop + mutation(3))
    assert [control.row for control in part.controls] == [0, 2, 2]
    assert all(bytes(control.frame) == noop for control in part.controls)
    assert (part.first, part.last) == (0, 3)
    assert part.row_bytes == sum(len(mutation(n)) for n in (1, 2, 3))


def test_more_controls_than_one_step_reports_all_arrive() -> None:
    noops = b"".join(dcp.DcpNoop(opaque=n).encode() for n in range(3000))
    parts = list(BulkDecoder().feed(noops + mutation(1)))
    opaques = [int.from_bytes(control.frame[12:16], "big") for part in parts for control in part.controls]
    assert opaques == list(range(3000))
    assert parts[-1].last == 1


def test_nothing_of_cleared_rows_remains_in_later_ones() -> None:
    decoder = BulkDecoder(Context(collections=True))
    sid = (FrameInfo(2, b"\0\7"),)
    rich = dcp.DcpMutation(1, 1, 5, 6, 7, nru=8, key=b"\x09k", frame_infos=sid).encode()
    plain = dcp.DcpMutation(2, 1, key=b"\0k").encode()
    tombstone = dcp.Expiration(3, 1, 99, key=b"\0k").encode()
    names = ("collection_id", "flags", "expiry", "lock_time", "delete_time", "stream_id", "nru")
    found = []
    for data in (rich, plain, tombstone, plain, plain + rich + plain):
        list(decoder.feed(data))
        found.append([[int(decoder.columns[name][row]) for name in names] for row in range(decoder.columns.rows)])
        decoder.clear()
    full, nothing = [9, 5, 6, 7, 0, 7, 8], [0] * 7
    assert found == [[full], [nothing], [[0, 0, 0, 0, 99, 0, 0]], [nothing], [nothing, full, nothing]]


def test_rows_accumulate_until_they_are_taken() -> None:
    decoder = BulkDecoder()
    for seqno in range(1, 6):
        list(decoder.feed(mutation(seqno)))
    taken = decoder.take()
    list(decoder.feed(mutation(6)))
    assert taken["seqno"].tolist() == [1, 2, 3, 4, 5]
    assert decoder.columns["seqno"].tolist() == [6]


def test_taken_columns_are_never_overwritten() -> None:
    decoder = BulkDecoder()
    kept = []
    for seqno in range(1, 40):
        list(decoder.feed(mutation(seqno)))
        kept.append(decoder.take()["seqno"])  # the view keeps the memory; the columns themselves are dropped
    assert [int(view[0]) for view in kept] == list(range(1, 40))


def test_memory_is_reused_when_its_last_view_is_gone() -> None:
    decoder = BulkDecoder()
    addresses = set()
    for seqno in range(1, 40):
        list(decoder.feed(mutation(seqno)))
        addresses.add(int(decoder.take().table[0]))
    assert len(addresses) <= 3


def test_full_columns_must_be_taken_before_the_next_step() -> None:
    decoder = BulkDecoder(sizes=ColumnSizes(rows=2, key_bytes=300, value_bytes=100))
    parts = decoder.feed(b"".join(mutation(n) for n in (1, 2, 3)))
    assert next(parts).full
    with pytest.raises(LocalProtocolError, match="take"):
        next(parts)


def test_a_document_larger_than_the_columns_still_arrives() -> None:
    decoder = BulkDecoder(sizes=ColumnSizes(rows=4, key_bytes=300, value_bytes=100), receive_bytes=100)
    big = bytes(range(256)) * 4096
    for value in (big, b"small", big, b""):
        for data in (mutation(1, value), mutation(1, value)[:50], mutation(1, value)[50:]):
            found = [part.columns.value(0) for part in decoder.feed(data)]
            assert found == ([value] if len(data) != 50 else [])
            decoder.clear()
    assert len(decoder.buffer()) == 100  # a buffer that grew for one document shrinks again


@pytest.mark.parametrize(
    "sizes", [ColumnSizes(0), ColumnSizes(key_bytes=10), ColumnSizes(value_bytes=0), ColumnSizes(value_bytes=2**31)]
)
def test_columns_that_cannot_work_are_refused(sizes: ColumnSizes) -> None:
    with pytest.raises(ValueError, match="needs room for one row and one key"):
        BulkDecoder(sizes=sizes)


def test_a_frame_over_the_limit_is_refused_by_its_header_alone() -> None:
    decoder = BulkDecoder()
    header = mutation(1)[:8] + (30 * 1024 * 1024).to_bytes(4, "big") + bytes(12)
    with pytest.raises(FramingError, match="limit"):
        list(decoder.feed(mutation(1) + header))
    assert decoder.columns.rows == 1
    with pytest.raises(FramingError):
        list(decoder.feed(mutation(2)))


def test_the_end_of_the_stream_inside_a_frame_is_an_error() -> None:
    decoder = BulkDecoder()
    list(decoder.feed(mutation(1)))
    decoder.receive_eof()
    list(decoder.feed(mutation(2)[:30]))
    with pytest.raises(FramingError, match="30 bytes"):
        decoder.receive_eof()


GUARDED = """
import ctypes, mmap, sys
import numpy as np
from upriver.wire import dcp, packed
from upriver.wire.bulk.decode import BulkDecoder
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 4 * page)
start = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.mprotect(ctypes.c_void_p(start + 3 * page), ctypes.c_size_t(page), 0) == 0

for size in [*range(0, 140), 255, 256, 257, 1000, 2047, 2048, 2049, 5000]:
    frames = dcp.DcpMutation(1, 1, key=b"k", value=b"v" * size).encode() * 2
    at = 3 * page - len(frames)
    memory[at : 3 * page] = frames
    decoder = BulkDecoder()
    list(decoder.feed(memoryview(memory)[at : 3 * page]))
    assert decoder.columns.value(1) == b"v" * size
    run = packed.pack(0, b"\\0k", b"v" * size, seqno=1)
    memory[3 * page - len(run) : 3 * page] = run
    out = SendBuffer()
    PackedEncoder(FrameOptions()).encode(memoryview(memory)[3 * page - len(run) : 3 * page], out)
    assert bytes(out.view()).endswith(b"v" * size)
print("within bounds")
"""


def test_nothing_past_the_end_of_the_input_is_ever_read() -> None:
    """The page behind the input is protected: reading one byte too far kills the process."""
    done = subprocess.run([sys.executable, "-c", GUARDED], capture_output=True, text=True, check=False)
    assert done.stdout == "within bounds\n", done.stderr


def test_importing_the_messages_loads_neither_numpy_nor_numba() -> None:
    code = (
        "import sys, upriver.wire; heavy = {'numba', 'numpy', 'pyarrow'} & set(sys.modules); "
        "import upriver.wire.bulk.decode, upriver.wire.bulk.encode, upriver.wire.bulk.row_checks; "
        "print(sorted(heavy), 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"


def test_numpy_views_are_of_the_declared_width() -> None:
    decoder = BulkDecoder(Context(collections=True))
    list(
        decoder.feed(dcp.DcpMutation(7, 2**64 - 1, key=b"\x8d\xe0\xfb\xd7\x0cx", cas=2**64 - 1, vbucket=1023).encode())
    )
    columns = decoder.columns
    assert columns["cas"].dtype == np.uint64
    assert int(columns["cas"][0]) == int(columns["rev_seqno"][0]) == 2**64 - 1
    assert int(columns["collection_id"][0]) == 0xCAFEF00D
