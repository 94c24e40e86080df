"""Ranges of vbuckets packed into few tasks: a task costs Spark more than a stream costs us.

Each task reads from as few nodes as possible (one connection each), and all tasks have about the same to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from upriver.spark.reader.planning import Range

ROWS_WORTH_A_TASK = 2_000
STREAM_COST = 20  # opening a stream costs about as much as so many rows

N = TypeVar("N", bound=Hashable)


def tasks_for(ranges: Sequence[Range], most: int) -> int:
    """How many tasks are worth while: one for a trickle, ``most`` for a flood."""
    work = sum(weight(one) for one in ranges)
    return max(1, min(most, len(ranges), -(-work // ROWS_WORTH_A_TASK)))


def weight(one: Range) -> int:
    return one.backlog + STREAM_COST


def pack(ranges: Sequence[Range], owners: Mapping[int, N], most: int) -> list[list[Range]]:
    """At most ``most`` groups of equal weight; ranges of one node (``owners`` by vbucket) stay together."""
    if not ranges:
        return []
    tasks = tasks_for(ranges, most)
    by_node: dict[N | None, list[Range]] = {}
    for one in ranges:
        by_node.setdefault(owners.get(one.vbucket), []).append(one)
    if tasks <= len(by_node):
        return _spread(list(by_node.values()), tasks)
    return [group for node, count in _divide(by_node, tasks) for group in _spread([[one] for one in node], count)]


def _divide(by_node: Mapping[N | None, list[Range]], tasks: int) -> list[tuple[list[Range], int]]:
    """How many of the tasks each node gets: one, and the rest where a task has most to do."""
    counts = dict.fromkeys(by_node, 1)
    work = {node: sum(map(weight, members)) for node, members in by_node.items()}
    for _ in range(tasks - len(by_node)):
        open_nodes = [node for node, members in by_node.items() if counts[node] < len(members)]
        counts[max(open_nodes, key=lambda node: work[node] / counts[node])] += 1
    return [(by_node[node], count) for node, count in counts.items()]


def _spread(lumps: Sequence[Sequence[Range]], tasks: int) -> list[list[Range]]:
    """The heaviest lump first, each into the lightest group."""
    heap = [(0, index) for index in range(min(tasks, len(lumps)))]
    groups: list[list[Range]] = [[] for _ in heap]
    for lump in sorted(lumps, key=lambda lump: -sum(map(weight, lump))):
        load, index = heapq.heappop(heap)
        groups[index].extend(lump)
        heapq.heappush(heap, (load + sum(map(weight, lump)), index))
    return [sorted(group, key=lambda one: one.vbucket) for group in groups]
