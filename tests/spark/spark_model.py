"""A model of a micro-batch query, small enough to try planning on thousands of histories.

A vbucket may have two owners for a while, when its old owner is cut off from the cluster but not from its clients;
driver and executors may then disagree about which of them is the owner.
"""

from __future__ import annotations

import copy
import json
import random
from typing import Any

from tests.support.model_vbucket import ModelTable, RandomVbucket
from upriver.protocol.filters import Filter, Wanted
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.spark.reader.planning import Known, Range, View, behind, look, plan, ranges


def at(vbuuid: int = 0, seqno: int = 0, points: tuple[int, ...] = (), epoch: int = 0) -> Position:
    """A position in an offset; points newest first."""
    return Position.of_points(vbuuid, seqno, points[::-1], epoch)


COLLECTIONS = {f"k{number}": 8 + number % 2 for number in range(12)}
SCOPE_OF = {8: 1, 9: 1}
FILTERS = [Filter(), Filter(scope=1), *(Filter(collections=frozenset(ids)) for ids in ((8,), (9,), (8, 9)))]


def lets_through(one: Range, key: str) -> bool:
    """Whether a range wants the changes of a key."""
    value = json.loads(one.filter or "{}")
    ids = [int(number, 16) for number in value.get("collections", [])] or list(SCOPE_OF)
    return COLLECTIONS[key] in ids and COLLECTIONS[key] not in one.without


class Cluster:
    """The owners of one vbucket: all but the last are former ones, and do not know it."""

    def __init__(self, rng: random.Random, keys: int = 4) -> None:
        self.rng = rng
        self.owners = [RandomVbucket(rng, keys)]

    @property
    def truth(self) -> RandomVbucket:
        return self.owners[-1]

    def tear(self) -> None:
        """Promote a replica; the old owner still serves clients with an old map."""
        promoted = copy.copy(self.truth)
        promoted.writes = list(promoted.writes)
        promoted.fail_over()
        self.owners.append(promoted)

    def heal(self) -> None:
        del self.owners[:-1]

    def disturb(self, *, tears: bool) -> None:
        rng = self.rng
        for _ in range(rng.randrange(4)):
            rng.choice(self.owners).write()
        if rng.random() < 0.15:
            rng.choice(self.owners).fail_over()
        if tears and rng.random() < 0.1:
            self.tear()
        if rng.random() < 0.2:
            self.heal()


Rows = list[tuple[str, int, str, int | None]]


class Query:
    """A query over one vbucket: plan, read, commit, crash, replay.

    ``mistake`` is what a planner might do wrong: "naive" always claims to be complete, "onlooker" claims it where the
    driver sees no change since, and "optimist" assumes that a batch without reports was read.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, *, mistake: str = "", tears: bool = True) -> None:
        self.cluster, self.rng, self.mistake, self.tears = cluster, rng, mistake, tears
        self.table = ModelTable()
        self.offset = Offset.earliest(1)
        self.known = Known(reported=True)
        self.map = 0  # a driver that lives never goes back to an older map
        self.rollbacks = 0
        self.last = (0, 0)
        self.asked: RandomVbucket | None = None  # stands for the revision of the driver's map
        self.wanted = Wanted(Filter(), SCOPE_OF)

    def refilter(self) -> None:
        """The query is stopped, and started again with another filter; mostly, what it knew was kept."""
        if self.rng.random() < 0.2:
            self.die()
        self.wanted = Wanted(self.rng.choice(FILTERS), SCOPE_OF)

    def expected(self, state: dict[str, int]) -> dict[str, int]:
        """The part of a state that the query reads."""
        return {key: value for key, value in state.items() if self.wanted.has(self.wanted.filter, COLLECTIONS[key])}

    def owner(self) -> RandomVbucket:
        """The vbucket's owner, as the driver sees it now."""
        self.map = self.rng.randrange(min(self.map, len(self.cluster.owners) - 1), len(self.cluster.owners))
        found = self.cluster.owners[self.map]
        self.asked = found
        return found

    def view(self, *, quiet: bool = False) -> View:
        """What the driver sees, while things happen between its requests."""

        def ask(answer: Any) -> Any:
            if not quiet and self.rng.random() < 0.2:
                self.disturb()
            return {0: answer(self.owner())}

        everything = quiet or self.rng.random() < 0.5
        read = (lambda: ask(lambda node: node.high), lambda vbs: ask(lambda node: node.log) if vbs else {})
        also = [*self.known.left(self.offset), *behind(self.offset, self.wanted)]
        return look(self.offset, *read, everything=everything, also=also, revision=lambda: self.asked)

    def disturb(self) -> None:
        """Let things happen between two steps."""
        self.cluster.disturb(tears=self.tears)

    def step(self, *, quiet: bool = False, most: int | None = None) -> bool:
        """One trigger; false if there was nothing to do."""
        start, view = self.offset, self.view(quiet=quiet)
        self.err(start, view)
        close = quiet or self.rng.random() < 0.3
        end = plan(start, view, self.known, most=most, close=close, wanted=self.wanted)
        if end is start:
            return False
        results = self.run(start, end, view, quiet)
        self.table.apply(self.rng.choice(results)[0])
        self.rollbacks += len(end.rollbacks)
        self.offset = Offset.from_json(end.to_json())
        self.learn([told for _, told in results], quiet)
        return True

    def run(self, start: Offset, end: Offset, view: View, quiet: bool) -> list[tuple[Rows, Known]]:
        """All attempts to read a batch; any one may be the one whose rows are kept."""
        results = []
        for _ in range(1 if quiet else self.rng.choice((1, 1, 1, 2))):
            todo = ranges(start, end, view, self.known, self.wanted)
            if not quiet:
                self.disturb()
            results.append(self.read(todo))
            if not quiet and self.rng.random() < 0.2:  # the driver dies and plans the same batch again
                self.die()
                view = self.view()
                end = Offset.from_json(end.to_json())
                if self.rng.random() < 0.5:
                    results.clear()  # nothing of the batch was kept
                    results.append(self.read(ranges(start, end, view, self.known, self.wanted)))
        return results

    def die(self) -> None:
        self.known, self.map, self.asked = Known(), 0, None

    def learn(self, told: list[Known], quiet: bool) -> None:
        """What the driver knows when the batch is over, unless it died or a report was lost."""
        if not quiet and self.rng.random() < 0.15:
            self.die()
            return
        self.known = Known(reported=True)
        for one in told:
            self.known.unread.update(one.unread)
        if self.rng.random() < 0.8 and all(one.complete == told[0].complete for one in told):
            self.known.complete.update(told[0].complete)

    def err(self, start: Offset, view: View) -> None:
        at = (start.positions[0].vbuuid, start.positions[0].seqno)
        looks_quiet = view.highs.get(0) == at[1] and 0 in view.logs and view.logs[0].uuid == at[0]
        if self.mistake == "naive" or (self.mistake == "onlooker" and looks_quiet):
            self.known.complete[0] = at
        if self.mistake in ("onlooker", "optimist"):
            self.known.reported = True
        if self.mistake == "onlooker":
            self.known.unread.clear()

    def read(self, todo: list[Range]) -> tuple[Rows, Known]:
        rows: Rows = []
        told = Known()
        for one in todo:
            at, producer = one.start, self.rng.choice(self.cluster.owners)
            if one.rolled_back:
                rows.append(("rollback", at.seqno, "", None))
                self.note(at.epoch, at.seqno)
            snapshots = producer.stream(at.claim, one.end)
            if one.end > at.seqno and (snapshots is None or producer.log.uuid != one.vbuuid):
                told.unread[0] = one.end
                continue
            reached = at.resume().snap_end
            for last, writes in snapshots or []:
                wanted = [w for w in writes if w.seqno <= one.end and lets_through(one, w.key)]
                rows.extend(("mutation", w.seqno, w.key, w.value) for w in wanted)
                reached = last if last > reached else reached
            if reached <= one.end and not one.addition:
                told.complete[0] = (one.vbuuid, one.end)
        return rows, told

    def note(self, epoch: int, seqno: int) -> None:
        """Epochs never go back, whichever process dies."""
        assert epoch >= self.last[0], (epoch, self.last)
        self.last = (epoch, seqno)
