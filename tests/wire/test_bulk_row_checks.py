"""``StreamTable`` checks rows against their marker, stamps them, and drops the unwanted ones."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.model import SEQNO_MAX
from upriver.wire.bulk.decode import BulkDecoder, Columns
from upriver.wire.bulk.row_checks import SlotState, StreamTable
from upriver.wire.messages import dcp


def rows(*changes: tuple[int, int], opaque: int = 7) -> Columns:
    """Columns with one mutation per (vbucket, seqno)."""
    decoder = BulkDecoder()
    for vbucket, seqno in changes:
        list(decoder.feed(dcp.DcpMutation(seqno, 1, key=b"k", vbucket=vbucket, opaque=opaque).encode()))
    return decoder.take()


def table(vbucket: int = 3, start: int = 0, end: int = 10, **how: int) -> StreamTable:
    streams = StreamTable(16)
    streams.open(vbucket, **({"opaque": 7} | how))
    streams.snapshot(vbucket, start, end)
    return streams


def test_rows_are_stamped_with_their_snapshot_and_branch() -> None:
    streams = table(vbuuid=2**63 + 5, epoch=4)
    columns = rows((3, 1), (3, 2), (3, 11), (3, 12))
    assert streams.advance(columns, 0, 2) == -1
    streams.snapshot(3, 11, 20)
    assert streams.advance(columns, 2, 4) == -1
    assert columns["snapshot_start"].tolist() == [0, 0, 11, 11]
    assert columns["snapshot_end"].tolist() == [10, 10, 20, 20]
    assert columns["epoch"].tolist() == [4] * 4
    assert columns["vbuuid"].view("uint64").tolist() == [2**63 + 5] * 4
    assert streams.seqno(3) == 12
    assert streams.snapshot_of(3) == (11, 20)


def test_a_row_before_any_marker_is_bad() -> None:
    streams = StreamTable(16)
    streams.open(3, opaque=7)
    assert streams.advance(rows((3, 1)), 0, 1) == 0


def test_a_row_without_a_stream_is_bad() -> None:
    assert table().advance(rows((3, 1), (4, 1)), 0, 2) == 1
    assert table().advance(rows((3, 1), (99, 1)), 0, 2) == 1
    assert table().advance(rows((3, 1), opaque=8), 0, 1) == 0
    closed = table()
    closed.set_state(3, SlotState.CLOSED)
    assert closed.advance(rows((3, 1)), 0, 1) == 0


def test_rows_of_an_ended_stream_are_dropped() -> None:
    streams = table()
    streams.set_state(3, SlotState.IGNORED)
    columns = rows((3, 5), (3, 4))
    assert streams.advance(columns, 0, 2) == -1
    assert columns["event"].tolist() == [0, 0]
    assert columns.dropped == 2
    assert streams.seqno(3) == 0


def test_rows_beyond_the_wanted_end_advance_the_stream_but_are_dropped() -> None:
    streams = table(upto=2)
    columns = rows((3, 1), (3, 2), (3, 3))
    assert streams.advance(columns, 0, 3) == -1
    assert columns["event"].tolist() == [0x57, 0x57, 0]
    assert streams.seqno(3) == 3


def test_out_of_order_snapshots_may_go_back() -> None:
    streams = table()
    streams.set_state(3, SlotState.OUT_OF_ORDER)
    assert streams.advance(rows((3, 9), (3, 2), (3, 30)), 0, 3) == -1
    assert streams.seqno(3) == 30
    streams.set_state(3, SlotState.OPEN)
    assert streams.state(3) is SlotState.OPEN


def test_streams_with_stream_ids_are_found_by_opaque() -> None:
    streams = StreamTable(10, by_opaque=True)
    for opaque in (1, 2):
        streams.open(opaque, opaque=opaque)
        streams.snapshot(opaque, 0, SEQNO_MAX)
    first, second = rows((3, 1), (3, 2), opaque=1), rows((3, 1), opaque=2)
    assert streams.advance(first, 0, 2) == streams.advance(second, 0, 1) == -1
    assert (streams.seqno(1), streams.seqno(2)) == (2, 1)


def test_seqno_advanced_only_moves_forward() -> None:
    streams = table()
    streams.seqno_advanced(3, 5)
    streams.seqno_advanced(3, 4)
    assert streams.seqno(3) == 5
    assert streams.advance(rows((3, 5)), 0, 1) == 0


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), max_size=20),
    st.integers(0, 4), st.integers(4, 12),
)  # fmt: skip
def test_the_first_bad_row_is_the_one_a_loop_would_find(changes: list[tuple[int, int]], start: int, end: int) -> None:
    streams, last, expected = StreamTable(3), {0: 0, 1: 0, 2: 0}, -1
    for vbucket in last:
        streams.open(vbucket, opaque=7)
        streams.snapshot(vbucket, start, end)
    for at, (vbucket, seqno) in enumerate(changes):
        if vbucket not in last or not (last[vbucket] < seqno and start <= seqno <= end):
            expected = at
            break
        last[vbucket] = seqno
    assert streams.advance(rows(*changes), 0, len(changes)) == expected
    assert {vbucket: streams.seqno(vbucket) for vbucket in last} == last
