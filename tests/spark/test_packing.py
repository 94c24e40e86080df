"""Packing: few tasks of equal weight, each on as few nodes as possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from upriver.protocol.position import Position
from upriver.spark.reader.planning import Range, pack, weight


def ranges_of(backlogs):
    return [Range(vb, Position(), backlog, 1) for vb, backlog in enumerate(backlogs)]


@given(st.lists(st.integers(0, 10**6), max_size=200), st.integers(1, 16), st.integers(1, 5))
def test_every_range_is_in_exactly_one_task(backlogs, most, nodes):
    todo = ranges_of(backlogs)
    groups = pack(todo, {vb: vb % nodes for vb in range(len(todo))}, most)
    assert sorted(one.vbucket for group in groups for one in group) == list(range(len(todo)))
    assert len(groups) <= most
    assert all(groups)


def test_a_trickle_is_one_task_and_a_flood_uses_all():
    assert len(pack(ranges_of([1] * 50), {}, 8)) == 1
    assert len(pack(ranges_of([10_000] * 50), {}, 8)) == 8


def test_tasks_have_about_the_same_to_do():
    groups = pack(ranges_of([50_000, *[1000] * 100]), {}, 4)
    loads = sorted(sum(map(weight, group)) for group in groups)
    assert loads[-1] <= 1.6 * loads[0]


def test_a_task_reads_from_one_node_where_there_are_enough_tasks():
    owners = {vb: f"node{vb % 3}" for vb in range(60)}
    groups = pack(ranges_of([5000] * 60), owners, 6)
    assert [len({owners[one.vbucket] for one in group}) for group in groups] == [1] * 6


def test_whole_nodes_are_joined_where_there_are_fewer_tasks_than_nodes():
    owners = {vb: f"node{vb % 4}" for vb in range(40)}
    groups = pack(ranges_of([5000] * 40), owners, 2)
    assert [len({owners[one.vbucket] for one in group}) for group in groups] == [2, 2]
