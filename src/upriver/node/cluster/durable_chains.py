"""Whose copies make a write durable: the cluster map says so to members, SET_VBUCKET's topology to all others (7.2).

A chain is the active node and its replicas by name, None where one is missing. During a move a vbucket has two, and a
write needs a majority of each. A vbucket that was never told of any needs nobody else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from upriver.errors import DurabilityImpossible, NotMyVbucket

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.server import Node


@dataclass(frozen=True, slots=True)
class Chain:
    """The names that replicas acknowledge under, without the active node's."""

    replicas: tuple[str | None, ...]

    @property
    def names(self) -> set[str]:
        return {name for name in self.replicas if name is not None}

    @property
    def needed(self) -> int:
        """How many replicas make a majority together with the active; ``DurabilityImpossible`` if too few are there."""
        count = len(self.replicas) + 1
        majority = count // 2 + 1
        if len(self.names) + 1 < majority:
            raise DurabilityImpossible(f"{majority} nodes of {count} are needed")
        return majority - 1


def chains_of(node: Node, bucket: NodeBucket, vbucket_id: int) -> list[Chain]:
    """The chains of a vbucket that is active here."""
    if bucket.member:
        current = node.cluster_map(bucket)
        replicas = current.owners[vbucket_id][1:]
        return [Chain(tuple(str(current.nodes[member]) if member >= 0 else None for member in replicas))]
    try:
        topology = bucket.store.vbucket(vbucket_id).topology
    except NotMyVbucket:
        return []
    return [Chain(tuple(chain[1:])) for chain in topology or ()]
