"""Who should own what: cluster state as a value, and the maps that follow from it; pure.

A plan changes as little as possible: a failover promotes what is there, a rebalance moves only the surplus.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from upriver.errors import ConfigError

NOBODY = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster, by the addresses that everybody reaches it under."""

    host: str
    kv: int
    mgmt: int

    def __str__(self) -> str:
        return f"{self.host}:{self.kv}"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One revision of everything that the cluster agrees on."""

    bucket: str
    replicas: int
    members: tuple[Member, ...]
    owners: tuple[tuple[int, ...], ...]
    revision: int = 1
    epoch: int = 1

    def to_json(self) -> dict[str, Any]:
        """What is pushed to every node, and kept on disk."""
        nodes = [{"host": m.host, "kv": m.kv, "mgmt": m.mgmt} for m in self.members]
        kept = {name: value for name, value in asdict(self).items() if name != "members"}
        return {**kept, "nodes": nodes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterState:
        try:
            members = tuple(Member(n["host"], n["kv"], n["mgmt"]) for n in data["nodes"])
            owners = tuple(tuple(row) for row in data["owners"])
            return cls(data["bucket"], data["replicas"], members, owners, data["revision"], data["epoch"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the cluster's state cannot be read: {error!r} is missing") from error

    def index(self, name: str) -> int:
        """A member by its number or ``host:port``."""
        for number, member in enumerate(self.members):
            if name in (str(number), str(member)):
                return number
        raise ConfigError(f"no node {name!r}; there are {', '.join(map(str, self.members))}")

    def with_owners(self, owners: list[tuple[int, ...]]) -> ClusterState:
        return replace(self, owners=tuple(owners), revision=self.revision + 1)


def first_owners(members: int, vbuckets: int, replicas: int) -> tuple[tuple[int, ...], ...]:
    """A new cluster: actives in even ranges, each replica on the next nodes round the ring.

    >>> first_owners(3, 3, 1)
    ((0, 1), (1, 2), (2, 0))
    """
    if replicas >= members:
        raise ConfigError(f"{replicas} replicas need at least {replicas + 1} nodes, not {members}")
    chains = []
    for vb in range(vbuckets):
        active = vb * members // vbuckets
        chains.append(tuple((active + n) % members for n in range(replicas + 1)))
    return tuple(chains)


def fail_over(state: ClusterState, lost: int, seqnos: Mapping[tuple[int, int], int]) -> ClusterState:
    """Without a node: of each vbucket's replicas, the one with the highest seqno (``(member, vb)``) takes over."""
    chains = []
    for vb, chain in enumerate(state.owners):
        left = [member for member in chain if member not in (lost, NOBODY)]
        if chain[0] == lost and left:
            best = max(left, key=lambda member, vb=vb: (seqnos.get((member, vb), -1), -left.index(member)))  # type: ignore[misc]
            left = [best, *(member for member in left if member != best)]
        chains.append(tuple(left + [NOBODY] * (len(chain) - len(left))))
    return state.with_owners(chains)


@dataclass(frozen=True, slots=True)
class Move:
    """One vbucket changes its active node."""

    vbucket: int
    source: int
    target: int


def balanced_moves(state: ClusterState, members: list[int]) -> list[Move]:
    """The fewest moves after which actives are spread evenly over ``members`` and no one else has any."""
    counts = Counter(dict.fromkeys(members, 0))
    homeless = []
    for vb, chain in enumerate(state.owners):
        if chain[0] in members:
            counts[chain[0]] += 1
        elif chain[0] != NOBODY:
            homeless.append(vb)
    low, extra = divmod(len(state.owners), len(members))
    room = {m: low + (n < extra) for n, m in enumerate(sorted(members, key=lambda m: -counts[m]))}
    moves = [Move(vb, state.owners[vb][0], _roomiest(room, counts)) for vb in _note(homeless, room, counts)]
    for vb, chain in enumerate(state.owners):
        source = chain[0]
        if source in room and counts[source] > room[source]:
            target = _roomiest(room, counts)
            counts[source] -= 1
            counts[target] += 1
            moves.append(Move(vb, source, target))
    return moves


def _roomiest(room: Mapping[int, int], counts: Counter[int]) -> int:
    return max(room, key=lambda member: room[member] - counts[member])


def _note(homeless: list[int], room: Mapping[int, int], counts: Counter[int]) -> Any:
    for vb in homeless:
        yield vb
        counts[_roomiest(room, counts)] += 1


def moved(state: ClusterState, move: Move) -> ClusterState:
    """The map after a takeover: the target leads, the source follows where a replica is wanted."""
    chains = list(state.owners)
    others = [m for m in chains[move.vbucket] if m not in (move.target, move.source, NOBODY)]
    followers = [*others, move.source][: state.replicas]
    chains[move.vbucket] = (move.target, *followers, *[NOBODY] * (state.replicas - len(followers)))
    return state.with_owners(chains)


def with_replicas(state: ClusterState, members: list[int]) -> ClusterState:
    """Every chain filled up with replicas on members that have few, never two copies on one node."""
    counts = Counter(dict.fromkeys(members, 0))
    for chain in state.owners:
        counts.update(member for member in chain[1:] if member in members)
    chains = []
    for chain in state.owners:
        kept = [m for n, m in enumerate(chain) if (n == 0 and m != NOBODY) or m in members]
        while kept and len(kept) < min(state.replicas + 1, len(members)):
            candidates = [m for m in members if m not in kept]
            best = min(candidates, key=lambda member: counts[member])
            counts[best] += 1
            kept.append(best)
        chains.append(tuple(kept[: state.replicas + 1] + [NOBODY] * (state.replicas + 1 - len(kept))))
    return state.with_owners(chains)
