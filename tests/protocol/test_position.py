"""What a reader may claim, step by step; ``test_no_document_is_lost`` checks the rules against a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upriver.model import SEQNO_MAX
from upriver.protocol.feed.positions import PositionTable
from upriver.protocol.position import POINTS_KEPT, Position


def table(position: Position | None = None) -> PositionTable:
    made = PositionTable(1)
    made.resume(0, position or Position())
    made.adopt(0, 7, opaque=1)
    return made


def snapshot(reader: PositionTable, start: int, end: int, reached: int) -> None:
    reader.begin_snapshot(0, start, end)
    assert reader.move(0, reached)


def test_a_complete_snapshot_is_a_point_and_an_incomplete_one_is_not() -> None:
    reader = table()
    snapshot(reader, 0, 10, 10)
    assert reader.position(0)[:4] == (7, 10, 10, 10)
    snapshot(reader, 11, 20, 15)
    assert reader.position(0)[:4] == (7, 15, 10, 20)
    assert reader.position(0).consistent_points == (0, 10)


def test_a_marker_inside_an_unfinished_snapshot_extends_the_claim() -> None:
    reader = table(Position(7, 15, 10, 20))
    snapshot(reader, 10, 17, 17)
    assert reader.position(0)[:4] == (7, 17, 10, 20)
    snapshot(reader, 18, 30, 25)
    assert reader.position(0)[:4] == (7, 25, 10, 30)
    assert reader.move(0, 30)
    assert reader.position(0).consistent_points == (0, 10, 30)


def test_an_end_that_was_not_reached_lies_behind_once_the_next_snapshot_starts_after_it() -> None:
    reader = table()
    snapshot(reader, 0, 10, 8)
    reader.begin_snapshot(0, 11, 20)
    assert reader.position(0)[:4] == (7, 8, 8, 20)


def test_nothing_received_of_a_snapshot_means_consistent_at_its_start() -> None:
    assert table(Position(7, 5, 5, SEQNO_MAX)).position(0) == Position(7, 5, 5, 5)


def test_rolling_back_goes_to_a_point_and_forgets_the_later_ones() -> None:
    reader = table()
    for end in (10, 20, 30):
        snapshot(reader, end - 9, end, end)
    assert reader.position(0).rollback_target(25) == 20
    reader.roll_back(0, 20)
    assert reader.position(0)[:4] == (7, 20, 20, 20)
    assert reader.position(0).rollback_target(99) == 20
    reader.roll_back(0, 0)
    assert reader.position(0)[:4] == (0, 0, 0, 0)


def test_an_out_of_order_snapshot_that_is_cut_short_never_happened() -> None:
    reader = table()
    reader.begin_out_of_order(0)
    assert reader.move(0, 50)
    assert reader.position(0) == reader.frozen().position(0) == Position(7, 0, 0, 50), "it holds something up to 50"
    reader.close(0)
    assert reader.seqno(0) == 0
    assert reader.interrupted == {0: (7, 50)}
    assert reader.position(0) == reader.frozen().position(0) == Position(7, 0, 0, 50)


def test_a_seqno_outside_the_snapshot_is_refused() -> None:
    reader = table()
    reader.begin_snapshot(0, 0, 10)
    assert not reader.move(0, 11)
    assert reader.move(0, 10)
    assert not reader.move(0, 9)


def test_frozen_positions_are_those_of_one_moment() -> None:
    reader = table()
    snapshot(reader, 0, 10, 4)
    then = reader.frozen()
    assert reader.move(0, 10)
    assert then.position(0) == Position(7, 4, 0, 10)
    assert then.position(0, 2) == Position(7, 2, 0, 10)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_points_are_few_rising_and_include_the_oldest_and_the_newest(steps: list[int]) -> None:
    reader, end = table(), 0
    for step in steps:
        snapshot(reader, end + 1, end + step, end + step)
        end += step
        points = reader.position(0).consistent_points
        assert points[0] == 0
        assert points[1] == steps[0]
        assert points[-1] == end
        assert list(points) == sorted(set(points))
        assert len(points) <= 1 + POINTS_KEPT
