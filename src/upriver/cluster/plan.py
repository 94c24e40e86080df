"""Which member owns which vbucket: the cluster state as a value, and the states that follow from it. Pure.

A plan changes as little as possible: a failover promotes replicas, a rebalance moves only the surplus.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import zip_longest
from typing import Any

from upriver.errors import ConfigError
from upriver.model import FailoverEntry, VbucketState
from upriver.node.cluster.cluster_map import Lineage, Version

NOBODY = -1
MOST_ANCESTORS = 200
Chain = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Member:
    """A node of the cluster, by the addresses under which clients and other nodes reach it."""

    host: str
    kv: int
    mgmt: int

    def __str__(self) -> str:
        return f"{self.host}:{self.kv}"


@dataclass(frozen=True, slots=True)
class VbucketReport:
    """What a node reports of one vbucket; ``consistent`` is the end of the last snapshot that it has completely."""

    state: int
    high_seqno: int
    persisted_seqno: int
    consistent: int
    branches: tuple[FailoverEntry, ...]  # newest first

    @property
    def uuid(self) -> int:
        return self.branches[0].uuid

    def _branches_in_use(self) -> list[int]:
        """Branches that hold changes. One that begins at the high seqno, as after a crash, holds none."""
        return [entry.uuid for entry in self.branches if entry.seqno < self.high_seqno]

    def lacks(self, other: VbucketReport) -> bool:
        """Whether the other report has changes of the newest branch that are missing here.

        A higher seqno alone does not tell: a node that was away may have more of a branch that was abandoned since.
        """
        ours, theirs = self._branches_in_use(), other._branches_in_use()
        if not ours or not theirs:
            return bool(theirs)
        if ours[0] == theirs[0]:
            return (other.consistent, other.high_seqno) > (self.consistent, self.high_seqno)
        return ours[0] in theirs


@dataclass(frozen=True, slots=True)
class ClusterState:
    """One revision of everything that the cluster agrees on.

    ``owners[vb]`` is the active member and its replicas; ``synced[vb]`` are the replicas that were complete at some
    time, and so have every durable write since.
    """

    bucket: str
    replicas: int
    members: tuple[Member, ...]
    owners: tuple[Chain, ...]
    revision: int = 1
    epoch: int = 1
    synced: tuple[Chain, ...] = ()
    uuid: str = ""  # of the bucket: tells readers that it is still the same one
    manifest: Mapping[str, Any] | None = None  # scopes and collections; None for the default collection only
    branch: str = ""  # of the manager process that wrote it, see ``Version``
    ancestors: Mapping[str, int] = field(default_factory=dict)  # the last revision of each branch before it

    @property
    def manifest_uid(self) -> int:
        return int(self.manifest["uid"], 16) if self.manifest else 0

    @property
    def lineage(self) -> Lineage:
        return Lineage(Version(self.epoch, self.revision, self.branch), self.ancestors)

    def on_branch(self, branch: str, before: ClusterState | None) -> ClusterState:
        """This state, written on a branch after another state."""
        ancestors = dict(self.ancestors)
        if before is not None and before.branch and before.branch != branch:
            ancestors[before.branch] = max(before.revision, ancestors.get(before.branch, 0))
        newest = sorted(ancestors.items(), key=lambda entry: entry[1])[-MOST_ANCESTORS:]
        return replace(self, branch=branch, ancestors=dict(newest))

    def to_json(self) -> dict[str, Any]:
        """What is pushed to every node, and saved on disk."""
        nodes = [{"host": m.host, "kv": m.kv, "mgmt": m.mgmt} for m in self.members]
        kept = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "members"}
        return {**kept, "nodes": nodes}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClusterState:
        try:
            members = tuple(Member(n["host"], n["kv"], n["mgmt"]) for n in data["nodes"])
            owners, synced = (tuple(tuple(row) for row in data[name]) for name in ("owners", "synced"))
            kept = {name: data[name] for name in ("bucket", "replicas", "revision", "epoch")}
            kept |= {name: data[name] for name in ("uuid", "branch", "ancestors", "manifest") if name in data}
            return cls(members=members, owners=owners, synced=synced, **kept)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"the cluster's state cannot be read: {error!r} is missing") from error

    def index(self, name: str) -> int:
        """A member by its number or ``host:port``."""
        for number, member in enumerate(self.members):
            if name in (str(number), str(member)):
                return number
        raise ConfigError(f"no node {name!r}; there are {', '.join(map(str, self.members))}")

    def with_owners(self, owners: list[Chain]) -> ClusterState:
        """The next revision. A vbucket that gets a new active or loses a replica has its replicas checked again."""
        synced = [self._still_synced(vb, chain) for vb, chain in enumerate(owners)]
        return replace(self, owners=tuple(owners), synced=tuple(synced), revision=self.revision + 1)

    def _still_synced(self, vb: int, chain: Chain) -> Chain:
        """The replicas that still count as synced: none once a replica left that alone may have had a write."""
        before = self.owners[vb]
        stays = chain[0] == before[0] and {*before} <= {*chain, NOBODY}
        return self.synced[vb] if stays and vb < len(self.synced) else ()

    def without_sync(self, member: int) -> ClusterState:
        """The state after a member lost what was not on its disk."""
        rows = zip(self.owners, self.synced, strict=True)
        synced = (() if chain[0] == member else tuple(each for each in row if each != member) for chain, row in rows)
        return replace(self, synced=tuple(synced))

    def used(self) -> list[int]:
        """Members that own or replicate anything."""
        return sorted({member for chain in self.owners for member in chain if member != NOBODY})


def new_state(bucket: str, members: list[Member], vbuckets: int, replicas: int, uuid: str = "") -> ClusterState:
    """A new cluster: empty, so all replicas are complete."""
    owners = first_owners(len(members), vbuckets, replicas)
    synced = tuple(chain[1:] for chain in owners)
    return ClusterState(bucket, replicas, tuple(members), owners, synced=synced, uuid=uuid)


def first_owners(members: int, vbuckets: int, replicas: int) -> tuple[Chain, ...]:
    """Actives in even ranges, replicas on the nodes that follow in the ring.

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


def reconciled(state: ClusterState, given: Collection[ClusterState]) -> ClusterState:
    """The state to continue with if nodes have maps that the manager's state does not know: the newest of theirs.

    The manager's own revision may be higher although no node took it. Where maps have forked, a new epoch puts the
    result above all of them. Which replicas are in sync is determined again.
    """
    known = [state, *given]
    newest = max(given, key=lambda each: (each.epoch, each.revision))
    forked = not all(newest.lineage.includes(each.lineage.version) for each in known)
    ancestors: dict[str, int] = {}
    for each in known:
        for branch, revision in [*each.ancestors.items(), (each.branch, each.revision)]:
            ancestors[branch] = max(revision, ancestors.get(branch, 0))
    return replace(
        newest, epoch=max(each.epoch for each in known) + forked, revision=max(each.revision for each in known) + 1,
        ancestors=ancestors, synced=((),) * len(newest.owners),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------- failover

Reports = Mapping[int, Mapping[int, VbucketReport]]
"""By member, then by vbucket."""


def best_replica(candidates: Mapping[int, VbucketReport]) -> int:
    """The member to promote: the first with the longest consistent history on the newest branch."""
    best, *others = candidates
    for member in others:
        best = member if candidates[best].lacks(candidates[member]) else best
    return best


def fail_over(state: ClusterState, lost: int, reports: Reports) -> ClusterState:
    """The state without a node: the best replica that answers becomes active.

    A vbucket without such a replica stays with the lost node, and is unavailable until that node comes back.
    """
    chains = []
    for vb, chain in enumerate(state.owners):
        left = [member for member in chain if member not in (lost, NOBODY)]
        candidates = _candidates(state, vb, left, reports)
        if lost not in chain or (chain[0] == lost and not candidates):
            chains.append(chain)
            continue
        if chain[0] == lost:
            best = best_replica(candidates)
            left = [best, *(member for member in left if member != best)]
        chains.append(tuple(left + [NOBODY] * (len(chain) - len(left))))
    return state.with_owners(chains)


def _copies(vb: int, members: Iterable[int], reports: Reports) -> dict[int, VbucketReport]:
    return {member: reports[member][vb] for member in members if vb in reports.get(member, {})}


def _candidates(state: ClusterState, vb: int, members: Iterable[int], reports: Reports) -> dict[int, VbucketReport]:
    """Members that may be promoted: those in sync, if these suffice. Others may have more of an abandoned branch."""
    found = _copies(vb, members, reports)
    if _every_majority_is_among(state, vb, found):
        return {member: report for member, report in found.items() if member in state.synced[vb]}
    return found


def unsafe_without(state: ClusterState, lost: int, reachable: Collection[int]) -> list[int]:
    """Vbuckets of which a failover could lose a durable write, because it may be on none of the remaining nodes.

    These are not only the active vbuckets of the lost node: where the active is away too, the lost replica may have the
    most.
    """
    left = {*reachable} - {lost}
    return [
        vb
        for vb, chain in enumerate(state.owners)
        if lost in chain and chain[0] not in left and not _every_majority_is_among(state, vb, left)
    ]


def _every_majority_is_among(state: ClusterState, vb: int, asked: Collection[int]) -> bool:
    """Whether the synced members that can be asked include a member of every majority of the chain.

    A write is durable when a majority has it, so the best of those members has all durable writes.
    """
    chain = state.owners[vb]
    return sum(member in asked for member in state.synced[vb]) >= len(chain) - len(chain) // 2


def recover(state: ClusterState, crashed: int, reports: Reports) -> tuple[ClusterState, list[int]]:
    """The state after a node comes back from a crash, and the replicas that must answer before it is valid.

    The node may lack writes that its replicas have acknowledged: where a replica has more, it becomes active.
    """
    chains, silent = [], set()
    for vb, chain in enumerate(state.owners):
        if chain[0] == crashed:
            silent |= {*chain[1:]} - {*reports, NOBODY}
            chain = _led_by_the_best(chain, reports[crashed].get(vb), _copies(vb, chain[1:], reports))
        chains.append(chain)
    return state.without_sync(crashed).with_owners(chains), sorted(silent)


def _led_by_the_best(chain: Chain, own: VbucketReport | None, others: Mapping[int, VbucketReport]) -> Chain:
    better = {member: report for member, report in others.items() if own is None or own.lacks(report)}
    best = best_replica(better) if better else chain[0]
    return (best, *(member for member in chain if member != best))


def newly_synced(state: ClusterState, actives: Reports, followers: Reports) -> ClusterState:
    """Note which replicas have everything that their active had in an earlier report, made under this map."""
    rows = []
    for vb, chain in enumerate(state.owners):
        lead = actives.get(chain[0], {}).get(vb)
        found = list(state.synced[vb])
        for member in chain[1:]:
            report = followers.get(member, {}).get(vb)
            if lead and report and lead.state == VbucketState.ACTIVE and report.uuid == lead.uuid:
                found += [member] if report.consistent >= lead.high_seqno else []
        rows.append(tuple(dict.fromkeys(found)))
    return replace(state, synced=tuple(rows))


# ---------------------------------------------------------------------------------------------- moves


@dataclass(frozen=True, slots=True)
class Move:
    """One vbucket changes its active node."""

    vbucket: int
    source: int
    target: int


def balanced_moves(state: ClusterState, members: list[int]) -> list[Move]:
    """The fewest moves after which actives are spread evenly over ``members``, and no other member has any."""
    counts = Counter(dict.fromkeys(members, 0))
    counts.update(chain[0] for chain in state.owners if chain[0] in members)
    low, extra = divmod(len(state.owners), len(members))
    room = {m: low + (n < extra) for n, m in enumerate(sorted(members, key=lambda m: -counts[m]))}
    moves = []
    for vb, chain in enumerate(state.owners):
        source = chain[0]
        if source == NOBODY or (source in room and counts[source] <= room[source]):
            continue
        target = max(members, key=lambda m, chain=chain: (room[m] > counts[m], m in chain, room[m] - counts[m]))  # type: ignore[misc]
        counts[source] -= 1
        counts[target] += 1
        moves.append(Move(vb, source, target))
    return moves


def by_pair(moves: Iterable[Move]) -> dict[tuple[int, int], list[Move]]:
    """Moves by their source and target."""
    found: defaultdict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in moves:
        found[move.source, move.target].append(move)
    return found


def interleaved(moves: Iterable[Move]) -> list[Move]:
    """Moves ordered so that all pairs of nodes work at the same time: one of each pair in turn."""
    rows = zip_longest(*by_pair(moves).values())
    return [move for row in rows for move in row if move is not None]


def with_followers(state: ClusterState, moves: Collection[Move]) -> ClusterState:
    """The state while vbuckets move: each target replicates its vbucket too."""
    chains = list(state.owners)
    for move in moves:
        chain = [member for member in chains[move.vbucket] if member != NOBODY]
        if move.target not in chain:
            chain.append(move.target)
        chains[move.vbucket] = tuple(chain)
    return state.with_owners(chains)


def moved(state: ClusterState, moves: Collection[Move]) -> ClusterState:
    """The state after takeovers: the targets are active, the sources are replicas where one is wanted."""
    chains = list(state.owners)
    for move in moves:
        others = [m for m in chains[move.vbucket] if m not in (move.target, move.source, NOBODY)]
        chains[move.vbucket] = _chain([move.target, *others, move.source], state.replicas)
    return state.with_owners(chains)


def not_moved(state: ClusterState, moves: Collection[Move]) -> ClusterState:
    """The state after takeovers that failed: the targets are replicas only where they were before."""
    chains = list(state.owners)
    for move in moves:
        chains[move.vbucket] = _chain(list(chains[move.vbucket]), state.replicas)
    return state.with_owners(chains)


def _chain(members: list[int], replicas: int) -> Chain:
    kept = members[: replicas + 1]
    return tuple(kept + [NOBODY] * (replicas + 1 - len(kept)))


def with_replicas(state: ClusterState, members: Collection[int]) -> ClusterState:
    """The state with missing replicas added on members that have few; never two copies on one node."""
    counts = Counter(dict.fromkeys(members, 0))
    for chain in state.owners:
        counts.update(member for member in chain[1:] if member in members)
    chains = []
    for chain in state.owners:
        kept = [m for n, m in enumerate(chain) if m != NOBODY and (n == 0 or m in members)]
        while chain[0] != NOBODY and len(kept) < min(state.replicas + 1, len(members)):
            best = min((m for m in members if m not in kept), key=lambda member: counts[member])
            counts[best] += 1
            kept.append(best)
        chains.append(_chain(kept if chain[0] != NOBODY else [NOBODY, *kept], state.replicas))
    return state.with_owners(chains)


def without_member(state: ClusterState, gone: int) -> ClusterState:
    """The cluster without a member that owns nothing any more; the numbers of later members shift down by one."""
    if gone in state.used():
        raise ConfigError(f"{state.members[gone]} still owns or replicates vbuckets: rebalance without it first")

    def renumbered(chain: Chain) -> Chain:
        return tuple(member - (member > gone) for member in chain)

    members = tuple(member for number, member in enumerate(state.members) if number != gone)
    owners, synced = (tuple(renumbered(row) for row in rows) for rows in (state.owners, state.synced))
    return replace(state, members=members, owners=owners, synced=synced, revision=state.revision + 1)
