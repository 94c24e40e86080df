"""The manager of a cluster: pushes maps, promotes replicas, moves vbuckets, and keeps the state in one file.

Nodes do the rest by themselves: the newest map tells a node what to serve and what to replicate. Every step is safe to
repeat, so if a manager dies in the middle, the next one repeats the step. A lock beside the file keeps two managers
apart.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from upriver.cluster.catch_up import CatchUp
from upriver.cluster.collections import decided
from upriver.cluster.nodes import TIMEOUT_S, NodeRefused, NodeReport, Nodes, at_once
from upriver.cluster.plan import (
    ClusterState,
    Member,
    Move,
    Reports,
    VbucketReport,
    balanced_moves,
    by_pair,
    fail_over,
    interleaved,
    moved,
    new_state,
    newly_synced,
    not_moved,
    reconciled,
    recover,
    unsafe_without,
    with_followers,
    with_replicas,
    without_member,
)
from upriver.cluster.state_file import STATE_FILE, StateFile
from upriver.errors import ConfigError, UpriverError
from upriver.model import VbucketState

__all__ = ["STATE_FILE", "Manager", "StaleState", "UnsafeFailover"]

STREAMED = 128  # vbuckets that are replicated to their new owners in parallel
DECISIONS_KEPT = 1000
BATCH = 8  # how many of those are handed over between two maps


class UnsafeFailover(ConfigError):
    """A failover now could lose durable writes."""


class StaleState(UpriverError):
    """Nodes know a newer state than the manager's file, and not all of them could be asked for it."""


class Manager:
    """Commands on one cluster, whose state is in ``directory``."""

    def __init__(self, directory: Path, username: str = "", password: str = "", timeout_s: float = TIMEOUT_S) -> None:
        self._file = StateFile(directory)
        self._nodes = Nodes(username, password, timeout_s)
        self.waits: dict[int, list[int]] = {}  # which node waits for which, as of the last ``watch``; see ``waiting``
        self._decided: dict[str, Any] = {}  # the outcomes of the last proposals, by name
        self.notes: list[str] = []  # for the operator; the caller that shows a note removes it

    # ---------------------------------------------------------------------------------------------- state

    @property
    def state(self) -> ClusterState:
        return self._file.load()

    def create(self, bucket: str, members: list[Member], vbuckets: int, replicas: int) -> ClusterState:
        """A new cluster of nodes that were started as members."""
        with self._file.alone():
            state = self._file.save(new_state(bucket, members, vbuckets, replicas, uuid=secrets.token_hex(16)))
            for outcome in self._push(state, range(len(members))):
                if isinstance(outcome, NodeRefused):
                    self._file.remove()
                    raise outcome
            return state

    def _commit(self, state: ClusterState, welcome: int = -1) -> ClusterState:
        """Save the state and push it to every reachable node; ``welcome`` is a node that comes back from a crash."""
        state = self._file.save(state)
        self._push(state, range(len(state.members)), welcome)
        return state

    def _push(self, state: ClusterState, members: Sequence[int], welcome: int = -1) -> list[UpriverError | None]:
        """Push a state; nodes that cannot be reached get it from ``watch``."""
        data = state.to_json()
        work = [partial(self._nodes.push, state.members[n], state.bucket, data, welcome=n == welcome) for n in members]
        return at_once(work)

    # ---------------------------------------------------------------------------------------------- reports

    def node_reports(self) -> dict[int, NodeReport]:
        """The reports of all members that can be reached."""
        state = self.state
        found = at_once([partial(self._nodes.report, member, state.bucket) for member in state.members])
        return {number: report for number, report in enumerate(found) if isinstance(report, NodeReport)}

    def reports(self) -> dict[int, dict[int, VbucketReport]]:
        """The vbuckets of all members that can be reached."""
        return {number: report.vbuckets for number, report in self.node_reports().items()}

    # ---------------------------------------------------------------------------------------------- upkeep

    def watch(self) -> ClusterState:
        """One round: push maps to nodes that came back, correct nodes that differ from it, note complete replicas."""
        with self._file.alone():
            try:
                reports = self._caught_up()
            except StaleState as error:
                if str(error) not in self.notes:
                    self.notes.append(str(error))
                return self.state
            away = [number for number, report in reports.items() if not report.is_member]
            self.waits = {number: silent for number in away if (silent := self._welcome(number, reports))}
            self._mend(reports)
            return self._note_synced(reports, self.reports())

    def catch_up(self) -> ClusterState:
        """The state to plan with, after it has caught up with what the nodes know."""
        with self._file.alone():
            self._caught_up()
            return self.state

    def _caught_up(self) -> dict[int, NodeReport]:
        """The reports of all members that can be reached, after the state has caught up with what they know."""
        reports = self.node_reports()
        return self.node_reports() if self._catch_up(reports) else reports

    def _catch_up(self, reports: dict[int, NodeReport]) -> bool:
        """If the state's file is an old copy, adopt the newer maps that nodes have; True if there were any.

        Pushing an old state would give vbuckets two actives, and the writes that one of them acknowledged would be
        lost.
        """
        state = self.state
        known = {n: each for n, each in reports.items() if each.uuid == state.uuid}
        if all(state.lineage.includes(each.version) for each in known.values()):
            return False
        found = at_once([partial(self._nodes.newest_map, state.members[n], state.bucket) for n in known])
        maps = [each for each in found if isinstance(each, ClusterState)]
        if len(maps) < len(known):
            raise StaleState(f"nodes know a newer map than {self._file.path}, but not all could be asked: try again")
        new = self._commit(reconciled(state, maps))
        self.notes.append(
            f"the state in {self._file.path} (revision {state.revision}) was not what the nodes had been given: "
            f"the cluster continues from their map with revision {new.revision}"
        )
        return True

    def _note_synced(self, before: dict[int, NodeReport], after: Reports) -> ClusterState:
        """Save which replicas are complete. Only actives that already have this map can tell."""
        state = newly_synced(self.state, self._current(before), after)
        if state != self.state:
            self._file.save(state)
        return state

    def _current(self, reports: dict[int, NodeReport]) -> Reports:
        version = self.state.lineage.version
        return {n: report.vbuckets for n, report in reports.items() if report.is_member and report.version == version}

    def _welcome(self, number: int, reports: dict[int, NodeReport]) -> list[int]:
        """Push the map to a node that was away; returns the nodes that must answer first.

        After a crash, those are the replicas that may have more than the node.
        """
        state = self.state
        if not reports[number].clean:
            state, silent = recover(state, number, _rows(reports))
            if silent:
                return silent
            members = {n for n, each in reports.items() if each.is_member}
            state = with_replicas(state, sorted({*members, number, *state.used()}))
        self._commit(replace(state, revision=state.revision + 1), welcome=number)
        return []

    def waiting(self, reports: dict[int, NodeReport]) -> dict[int, list[int]]:
        """Members that wait after a crash, each with the nodes that must answer or be failed over before it serves."""
        state, rows = self.state, _rows(reports)
        crashed = [number for number, report in reports.items() if not report.is_member and not report.clean]
        return {number: silent for number in crashed if (silent := recover(state, number, rows)[1])}

    def _mend(self, reports: dict[int, NodeReport]) -> None:
        """Push the map to nodes that missed it, and a new map if a node does not do what its map says."""
        state = self.state
        version = state.lineage.version
        behind = [n for n, report in reports.items() if report.is_member and report.version != version]
        current = {n: r for n, r in reports.items() if r.is_member and r.version == version}
        if any(report.fenced or _leads_others(state, n, report) for n, report in current.items()):
            self._commit(replace(state, revision=state.revision + 1))
        elif behind:
            self._push(state, behind)
        self._mend_manifests({n: report.manifest_uid for n, report in current.items()})

    def _mend_manifests(self, uids: dict[int, int]) -> None:
        """Push the manifest to nodes that lack it. If there is none, adopt one that a node already had."""
        state = self.state
        if state.manifest is not None:
            late = [state.members[n] for n, uid in uids.items() if uid < state.manifest_uid]
            at_once([partial(self._nodes.push_manifest, each, state.bucket, state.manifest) for each in late])
        elif any(uids.values()):
            best = max(uids, key=lambda number: uids[number])
            manifest = self._nodes.manifest(state.members[best], state.bucket)
            self._commit(replace(state, manifest=manifest, revision=state.revision + 1))

    def answer_proposals(self) -> None:
        """Decide on the changes of the manifest that members propose; answer once all reachable nodes have the new one.

        A lost answer is repeated; otherwise a retry would be told that the collection already exists.
        """
        state = self.state
        found = at_once([partial(self._nodes.proposals, member, state.bucket) for member in state.members])
        asked = {m: each for m, each in zip(state.members, found, strict=True) if isinstance(each, dict) and each}
        if not asked:
            return
        with self._file.alone():
            try:
                self._caught_up()
            except StaleState:
                return
            self._decide({name: edit for each in asked.values() for name, edit in each.items()})
        outcomes = self._decided
        at_once(
            [
                partial(self._nodes.decide, member, state.bucket, {name: outcomes[name] for name in each})
                for member, each in asked.items()
            ]
        )

    def _decide(self, edits: dict[str, Any]) -> None:
        state = self.state
        new = {name: edit for name, edit in edits.items() if name not in self._decided}
        manifest, outcomes = decided(state.manifest, new)
        self._decided = {**dict(list(self._decided.items())[-DECISIONS_KEPT:]), **outcomes}
        if manifest != state.manifest:
            self._commit(replace(state, manifest=manifest, revision=state.revision + 1))

    def sync(self, timeout_s: float = 60.0) -> None:
        """Wait until every replica has everything that its active has now."""
        deadline = time.monotonic() + timeout_s
        while True:
            behind = self._behind()
            if not behind:
                return
            if time.monotonic() > deadline:
                raise UpriverError(f"the replicas of {len(behind)} vbuckets (first {behind[0]}) are behind")
            time.sleep(0.05)

    def _behind(self) -> list[int]:
        """Vbuckets whose replicas are behind, after a round of ``watch``."""
        with self._file.alone():
            state = self.watch()
            actives, followers = self.node_reports(), self.reports()
            self._note_synced(actives, followers)
            seen = newly_synced(replace(state, synced=((),) * len(state.owners)), self._current(actives), followers)
            return [vb for vb, chain in enumerate(state.owners) if len(seen.synced[vb]) < _replicas_in(chain)]

    # ---------------------------------------------------------------------------------------------- commands

    def fail_over(self, name: str, *, force: bool = False) -> ClusterState:
        """Promote the replicas of a node that is gone; refused where that could lose durable writes."""
        with self._file.alone():
            member = self.state.members[self.state.index(name)]
            fenced = self._fence(member)
            if self._catch_up(fenced):
                fenced = self._fence(member)
            state, reports = self.state, {n: each.vbuckets for n, each in fenced.items() if each.is_member}
            lost = state.index(str(member))
            unsafe = unsafe_without(state, lost, reports)
            if unsafe and not force:
                self._lift_fence(state, list(reports))
                raise UnsafeFailover(
                    f"{len(unsafe)} vbuckets of {state.members[lost]} (first {unsafe[0]}) have no replica known "
                    f"to be complete; bring the node back, or fail over with --force and lose what is missing"
                )
            new = fail_over(state, lost, reports)
            return self._commit(with_replicas(new, sorted(reports)) if len(reports) > 1 else new)

    def _fence(self, lost: Member) -> dict[int, NodeReport]:
        """Stop all other nodes from consuming from a node, which may only be slow; returns their reports."""
        state = self.state
        others = [number for number, member in enumerate(state.members) if member != lost]
        found = at_once([partial(self._nodes.fence, state.members[n], state.bucket, lost) for n in others])
        return {n: each for n, each in zip(others, found, strict=True) if isinstance(each, NodeReport)}

    def _lift_fence(self, state: ClusterState, members: list[int]) -> None:
        """Push a new map, which makes nodes consume from the fenced node again."""
        again = self._file.save(replace(state, revision=state.revision + 1))
        self._push(again, members)

    def add(self, member: Member) -> ClusterState:
        """Make a node a member. It owns nothing until a rebalance."""
        with self._file.alone():
            self._caught_up()
            state = self.state
            if member in state.members:
                raise ConfigError(f"{member} is already a member")
            if self._nodes.report(member, state.bucket).manifest_uid > state.manifest_uid:
                raise ConfigError(f"{member} has its own collections: erase its data before you add it")
            new = self._file.save(replace(state, members=(*state.members, member), revision=state.revision + 1))
            *_, outcome = self._push(new, range(len(new.members)))
            if isinstance(outcome, NodeRefused):
                self._commit(replace(state, revision=new.revision + 1))
                raise outcome
            return new

    def remove(self, name: str, on_move: Callable[[int, int, Move], None] | None = None) -> ClusterState:
        """Move everything off a node and forget it."""
        with self._file.alone():
            self._caught_up()
            gone = self.state.index(name)
            self.rebalance([n for n in range(len(self.state.members)) if n != gone], on_move)
            before = self.state
            after = self._commit(without_member(before, gone))
            at_once([partial(self._nodes.push, before.members[gone], after.bucket, after.to_json())])
            return after

    def rebalance(
        self, members: list[int] | None = None, on_move: Callable[[int, int, Move], None] | None = None
    ) -> int:
        """Spread actives evenly over ``members`` (all that answer) and add missing replicas; returns how many moved."""
        with self._file.alone():
            if members is None:
                members = sorted(n for n, report in self._caught_up().items() if report.is_member)
            if not members:
                raise ConfigError("no node answers")
            moves = balanced_moves(self.state, members)
            self.move_all(moves, on_move)
            self._commit(with_replicas(self.state, members))
            return len(moves)

    def move_all(
        self, moves: list[Move], on_move: Callable[[int, int, Move], None] | None = None, timeout_s: float = 120.0
    ) -> None:
        """Hand vbuckets over: replicate, wait for the disk, take over, and verify.

        Many are replicated in parallel, but few change their owner between two maps: clients cannot write to those
        until they have the next map.

        See docs/protocol/consumer.md#third-party.
        """
        with self._file.alone():
            ordered, done = interleaved(moves), 0
            for first in range(0, len(ordered), STREAMED):
                for batch in self._move_group(ordered[first : first + STREAMED], timeout_s):
                    for move in batch:
                        done += 1
                        if on_move is not None:
                            on_move(done, len(ordered), move)

    def _move_group(self, moves: list[Move], timeout_s: float) -> Iterator[list[Move]]:
        state = self._commit(with_followers(self.state, moves))
        left = moves
        try:
            self._wait_until_caught_up(state, moves, time.monotonic() + timeout_s)
            while left:
                batch, left = left[:BATCH], left[BATCH:]
                state = self._hand_over(state, batch, timeout_s)
                yield batch
        except UpriverError:
            if left:
                self._commit(not_moved(self.state, left))
            raise

    def _wait_until_caught_up(self, state: ClusterState, moves: list[Move], deadline: float) -> None:
        """Return once little is left to stream and the targets have everything else on disk."""
        work = []
        for (source, target), pair in by_pair(moves).items():
            ends = state.members[source], state.members[target]
            name = f"replication:{ends[0]}->{ends[1]}:{state.bucket}"
            here, there = (self._nodes.kv_options(end, state.bucket) for end in ends)
            catch_up = CatchUp(here, there, name, deadline)
            work.append(partial(catch_up.wait, [move.vbucket for move in pair]))
        for outcome in at_once(work):
            if isinstance(outcome, UpriverError):
                raise outcome

    def _hand_over(self, state: ClusterState, moves: list[Move], timeout_s: float) -> ClusterState:
        """Take all of them over in parallel, then push the new map; raises if a takeover failed."""
        by_target: defaultdict[int, list[int]] = defaultdict(list)
        for move in moves:
            by_target[move.target].append(move.vbucket)
        order = self._nodes.take_over
        outcomes = at_once(
            [
                partial(order, state.members[target], state.bucket, vbuckets, state.lineage.version, timeout_s)
                for target, vbuckets in by_target.items()
            ]
        )
        failures = [outcome for outcome in outcomes if outcome]
        state = self._settle(moves) if failures else self._commit(moved(state, moves))
        for failure in failures:
            if isinstance(failure, UpriverError):
                raise failure
            raise UpriverError("; ".join(f"vbucket {vb}: {reason}" for vb, reason in failure.items()))
        return state

    def _settle(self, moves: list[Move]) -> ClusterState:
        """After a failed takeover: targets that are active now own their vbuckets, the others go back to their sources.

        Only targets that have this map count: any other is active by an older map, or was so before it crashed.
        """
        reports = self._current(self.node_reports())
        done = [m for m in moves if _state_of(reports, m.target, m.vbucket) == VbucketState.ACTIVE]
        undone = [m for m in moves if m not in done]
        state = moved(self.state, done)
        return self._commit(not_moved(state, undone) if undone else state)


def _rows(reports: dict[int, NodeReport]) -> Reports:
    return {number: report.vbuckets for number, report in reports.items()}


def _replicas_in(chain: tuple[int, ...]) -> int:
    return sum(member >= 0 for member in chain[1:])


def _state_of(reports: Reports, member: int, vbucket: int) -> int:
    report = reports.get(member, {}).get(vbucket)
    return report.state if report is not None else 0


def _leads_others(state: ClusterState, number: int, report: NodeReport) -> bool:
    """Whether a node's active vbuckets differ from those that the map gives it."""
    return any(
        (chain[0] == number) != (_state_of({number: report.vbuckets}, number, vb) == VbucketState.ACTIVE)
        for vb, chain in enumerate(state.owners)
    )
