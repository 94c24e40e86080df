"""The small manager of a cluster: pushes maps, promotes replicas, moves vbuckets, and keeps the state in one file.

Nodes do the rest by themselves: whoever has the newest map knows what to serve and what to replicate. Every step is
safe to repeat, so a manager that died in the middle is followed by another that does the same again.
"""

from __future__ import annotations

import base64
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from upriver.errors import ConfigError, UpriverError
from upriver.model import VbucketState
from upriver.replicate.plan import (
    NOBODY,
    ClusterState,
    Member,
    Move,
    balanced_moves,
    fail_over,
    first_owners,
    moved,
    with_replicas,
)

STATE_FILE = "cluster.json"
TIMEOUT_S = 10.0


class NodeUnreachable(UpriverError):
    """A node does not answer its management port."""


class NodeRefused(UpriverError):
    """A node answered with an error; the message is its own."""


@dataclass(frozen=True, slots=True)
class VbucketReport:
    """What a node says of one vbucket."""

    state: int
    high_seqno: int
    persisted_seqno: int
    uuid: int
    complete: int


class Manager:
    """Commands on one cluster, whose state lies in ``directory``."""

    def __init__(self, directory: Path, username: str = "", password: str = "") -> None:
        self._path = directory / STATE_FILE
        self._credentials = (username, password)

    # ---------------------------------------------------------------------------------------------- state

    @property
    def state(self) -> ClusterState:
        try:
            return ClusterState.from_json(json.loads(self._path.read_text()))
        except FileNotFoundError as error:
            raise ConfigError(f"no cluster in {self._path.parent}: run `upriver cluster start` first") from error

    def _save(self, state: ClusterState) -> None:
        """Atomic, and before any node hears of it: a revision is never used twice."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".new")
        with temporary.open("w") as file:
            json.dump(state.to_json(), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)

    def create(self, bucket: str, members: list[Member], vbuckets: int, replicas: int) -> ClusterState:
        """A new cluster of nodes that were started as members."""
        state = ClusterState(bucket, replicas, tuple(members), first_owners(len(members), vbuckets, replicas))
        self._save(state)
        self.push()
        return state

    def push(self) -> list[Member]:
        """Give every reachable node the current map; those that could not be reached."""
        state = self.state
        return [member for member in state.members if not self._push_to(member, state)]

    def _push_to(self, member: Member, state: ClusterState) -> bool:
        try:
            self._call(member, "POST", f"/upriver/cluster/{state.bucket}", state.to_json())
        except NodeUnreachable:
            return False
        except NodeRefused:
            report = self._call(member, "GET", f"/upriver/cluster/{state.bucket}")
            return bool(report["revision"] >= state.revision and report["member"])
        return True

    def _commit(self, state: ClusterState) -> None:
        self._save(state)
        self.push()

    # ---------------------------------------------------------------------------------------------- commands

    def report(self, member: Member) -> dict[int, VbucketReport]:
        """Every vbucket of a node; ``NodeUnreachable`` if it does not answer."""
        found = self._call(member, "GET", f"/upriver/cluster/{self.state.bucket}")
        return {int(vb): VbucketReport(*row) for vb, row in found["vbuckets"].items()}

    def reports(self) -> dict[int, dict[int, VbucketReport]]:
        """What every reachable member says."""
        found = {}
        for number, member in enumerate(self.state.members):
            try:
                found[number] = self.report(member)
            except NodeUnreachable:
                continue
        return found

    def fail_over(self, name: str) -> ClusterState:
        """Promote the replicas of a node that is gone."""
        state = self.state
        lost = state.index(name)
        reports = {number: rows for number, rows in self.reports().items() if number != lost}
        seqnos = {(n, vb): row.high_seqno for n, rows in reports.items() for vb, row in rows.items()}
        reachable = [n for n in range(len(state.members)) if n in reports]
        new = fail_over(state, lost, seqnos)
        self._commit(with_replicas(new, reachable) if len(reachable) > 1 else new)
        return self.state

    def add(self, member: Member) -> ClusterState:
        """Make a node a member; a rebalance gives it something to do."""
        state = self.state
        if member in state.members:
            raise ConfigError(f"{member} is a member already")
        self._commit(replace(state, members=(*state.members, member), revision=state.revision + 1))
        return self.state

    def rebalance(self, members: list[int], on_move: Callable[[int, int, Move], None] | None = None) -> int:
        """Spread actives evenly over ``members`` and fill up replicas; how many vbuckets moved."""
        moves = balanced_moves(self.state, members)
        for number, move in enumerate(moves):
            if on_move is not None:
                on_move(number, len(moves), move)
            self.move(move)
        self._commit(with_replicas(self.state, members))
        return len(moves)

    def move(self, move: Move, timeout_s: float = 120.0) -> None:
        """Replicate to the target, wait until it has everything on disk, and let it take over (15.4)."""
        state = self.state
        self._commit(_with_follower(state, move))
        self._wait_until_close(move, time.monotonic() + timeout_s)
        target = self.state.members[move.target]
        body = {"vbucket": move.vbucket, "timeout_s": timeout_s}
        try:
            self._call(target, "POST", f"/upriver/takeover/{state.bucket}", body, timeout_s + 5)
        except UpriverError:
            self._repair(move)
            raise
        self._commit(moved(self.state, move))

    def _repair(self, move: Move) -> None:
        """A takeover was interrupted: whoever is active now stays it; if nobody is, the source is again (7.1)."""
        target = self.reports().get(move.target, {}).get(move.vbucket)
        if target is not None and target.state == VbucketState.ACTIVE:
            self._commit(moved(self.state, move))
        else:
            state = self.state
            self._commit(state.with_owners(list(state.owners)))

    def _wait_until_close(self, move: Move, deadline: float) -> None:
        """Until little is left to stream and the target has it on disk."""
        state = self.state
        source, target = state.members[move.source], state.members[move.target]
        while True:
            ours, theirs = self.report(source)[move.vbucket], self.report(target).get(move.vbucket)
            if theirs is not None and _is_close(ours, theirs):
                return
            if time.monotonic() > deadline:
                raise UpriverError(f"{target} does not catch up with vbucket {move.vbucket} of {source}")
            time.sleep(0.02)

    # ---------------------------------------------------------------------------------------------- talking to nodes

    def _call(self, member: Member, method: str, path: str, body: Any = None, timeout_s: float = TIMEOUT_S) -> Any:
        data = json.dumps(body).encode() if body is not None else None
        request = urllib.request.Request(f"http://{member.host}:{member.mgmt}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if self._credentials[0]:
            token = base64.b64encode(":".join(self._credentials).encode()).decode()
            request.add_header("Authorization", f"Basic {token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            raise NodeRefused(f"{member}: {error.read().decode('utf-8', 'replace')[:300]}") from error
        except (OSError, ValueError) as error:
            raise NodeUnreachable(f"{member} (management port {member.mgmt}): {error}") from error


def _with_follower(state: ClusterState, move: Move) -> ClusterState:
    """The map while a vbucket moves: the target replicates it too."""
    chains = list(state.owners)
    chain = [member for member in chains[move.vbucket] if member != NOBODY]
    if move.target not in chain:
        chain.append(move.target)
    chains[move.vbucket] = tuple(chain)
    return state.with_owners(chains)


def _is_close(source: VbucketReport, target: VbucketReport) -> bool:
    same = target.uuid == source.uuid
    return same and source.high_seqno - target.high_seqno < 100 and source.high_seqno - target.persisted_seqno < 1000


def members_in_use(state: ClusterState) -> Iterator[int]:
    """Members that own or replicate anything."""
    used = {member for chain in state.owners for member in chain if member != NOBODY}
    return iter(sorted(used))
