"""Packing the ranges of a batch into few tasks, because a task costs Spark more than a stream costs us.

Each task reads from as few nodes as possible (one connection each), and all tasks have about the same work.
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
    """How many tasks the ranges are worth: one for few rows, up to ``most`` for many."""
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
    """How many tasks each node gets: one, and the rest where a task has most work."""
    counts = dict.fromkeys(by_node, 1)
    work = {node: sum(map(weight, members)) for node, members in by_node.items()}
    for _ in range(tasks - len(by_node)):
        open_nodes = [node for node, members in by_node.items() if counts[node] < len(members)]
        counts[max(open_nodes, key=lambda node: work[node] / counts[node])] += 1
    return [(by_node[node], count) for node, count in counts.items()]


def _spread(parts: Sequence[Sequence[Range]], tasks: int) -> list[list[Range]]:
    """Put the heaviest part first, each into the lightest group."""
    heap = [(0, index) for index in range(min(tasks, len(parts)))]
    groups: list[list[Range]] = [[] for _ in heap]
    for part in sorted(parts, key=lambda part: -sum(map(weight, part))):
        load, index = heapq.heappop(heap)
        groups[index].extend(part)
        heapq.heappush(heap, (load + sum(map(weight, part)), index))
    return [sorted(group, key=lambda one: one.vbucket) for group in groups]
