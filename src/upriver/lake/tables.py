"""All tables of a lake: a batch is committed to every log, then every collection is brought forward."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from upriver.errors import UpriverError
from upriver.lake.apply import ahead
from upriver.lake.apply.ahead import Branches
from upriver.lake.apply.merge import run_inline
from upriver.lake.apply.reconcile import forget, has_duplicates
from upriver.lake.apply.voiding import catch_up
from upriver.lake.change_log import Mark, Written, read_changes, read_marks, table_name, write_marks
from upriver.lake.collection import CollectionTables, Reread, Runner, Step, TableOptions
from upriver.lake.layout import Lake
from upriver.records.schema import Event

__all__ = ["CollectionTables", "Reread", "Runner", "Step", "TableOptions", "Tables"]
ASK_EVERY_S = 10.0  # whether the bucket still has what was read again, while no batch comes
logger = logging.getLogger("upriver.sync")


class Tables:
    """All collections of a lake; the whole of a batch, after its rows were written by ``write_log``."""

    def __init__(
        self,
        lake: Lake,
        app_id: str,
        options: TableOptions,
        *,
        run: Runner = run_inline,
        reread: Reread | None = None,
        branches: Branches | None = None,
    ) -> None:
        self.lake, self.app_id, self.options = lake, app_id, options
        self.run, self.reread, self.branches = run, reread, branches
        self._open: dict[str, CollectionTables] = {}
        self._ask_at = 0.0
        self._ids: dict[str, list[int]] | None = None

    def collection(self, name: str) -> CollectionTables:
        if name not in self._open:
            self._open[name] = CollectionTables(self.lake, name, self.options)
        return self._open[name]

    def names(self) -> list[str]:
        return sorted({*self.lake.names(), *self._open})

    def apply(self, batch: int, written: Written, lag: int = 0) -> list[Step]:
        """Commit a batch to every table. The same batch again changes nothing."""
        for name, ids in sorted(written.ids.items()):
            self._hear_of(name, max(ids), written.marks)
        for name in sorted({*self.names(), *written.pieces}):
            pieces, marks = list(written.pieces.get(name, [])), self._marks_for(name, written)
            if marks:
                pieces.append(write_marks(self.lake.root, name, marks, batch))
            if pieces and not self.collection(name).commit_log(self.app_id, batch, pieces, marks):
                logger.info("%s: batch %d was committed before", name, batch)
        self._note_epochs(written.marks)
        self._make_up_for_what_is_lost(batch)
        return [self.collection(name).advance(batch, lag, self.run, self.reread) for name in self.names()]

    def freshen(self) -> list[Step]:
        """Between two batches: do what has waited for too long, or was held back for a batch that does not come."""
        batch = self.last_batch()
        if time.monotonic() >= self._ask_at:
            self._make_up_for_what_is_lost(batch + 1)
            self._ask_at = time.monotonic() + ASK_EVERY_S
        return [self.collection(name).advance(batch, 0, self.run, self.reread) for name in self.names()]

    def settle(self) -> list[Step]:
        """Leave nothing in the tails that ``current`` does not have."""
        batch = self.last_batch()
        return [self.collection(name).advance(batch, 0, self.run, self.reread, settle=True) for name in self.names()]

    def _make_up_for_what_is_lost(self, batch: int) -> None:
        if self.branches is None:
            return
        try:
            lost = ahead.lost(self.lake, self.branches)
        except (UpriverError, OSError) as error:  # the next batch asks again
            logger.warning("the bucket does not say whether it still has what was read again: %s", error)
            return
        for name, vbuckets in lost.items():
            self.collection(name).read_again(vbuckets, self.reread, batch)

    def prepare(self) -> None:
        """Take over what an earlier run left: a log without marks of an earlier version, epochs from before a crash."""
        marks: list[Mark] = []
        for name in self.names():
            log = self.collection(name).changes
            if log.exists:
                known = read_marks(log.uri, self.collection(name).log())
                catch_up(log, known)
                marks += known
        self._note_epochs(marks)
        self._look_for_duplicates()

    def _look_for_duplicates(self) -> None:
        """Earlier versions could leave a key twice in ``current`` when another tool rewrote it: looked for once."""
        if self.lake.checked():
            return
        for name in self.names():
            collection = self.collection(name)
            if has_duplicates(collection):
                logger.warning("%s: a key is there more than once, so the table is written again", name)
                collection.advance(self.last_batch(), 0, self.run, self.reread, force=True)
        self.lake.note_checked(time.time())

    def _note_epochs(self, marks: Iterable[Mark]) -> None:
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
        if not rollbacks:
            return
        known = self.lake.epochs()
        for mark in rollbacks:
            known[mark.vbucket] = max(mark.epoch, known.get(mark.vbucket, 0))
        self.lake.write_epochs(known)

    def last_batch(self) -> int:
        """The newest batch in any log, -1 for none."""
        versions = [self.collection(name).changes.version(self.app_id) for name in self.names()]
        return max((version for version in versions if version is not None), default=-1)

    def _marks_for(self, name: str, written: Written) -> list[Mark]:
        """Rollbacks concern every collection, collection events their own."""
        found = [mark for mark in written.marks if mark.event == Event.ROLLBACK]
        for mark in written.marks:
            if mark.event == Event.ROLLBACK or mark.collection_id is None:
                continue
            named = table_name(mark.scope, mark.collection, mark.collection_id)
            if named == name or self._owns(name, mark.collection_id):
                found.append(mark)
        return found

    def _owns(self, name: str, collection_id: int) -> bool:
        """Does this table hold documents of a collection with that id? Asked only when one was dropped."""
        return collection_id in self.collection_ids(name)

    def collection_ids(self, name: str) -> list[int]:
        """The ids that the collection of this name has had, as far as its tables may hold documents of them."""
        if self._ids is None:
            self._ids = self.lake.collections()
        if name not in self._ids:  # a lake that an earlier version made: its log knows
            log = self.collection(name).changes
            pieces = [piece for piece in log.pieces() if not piece.marks]
            ids = read_changes(log.uri, pieces[-64:], ["collection_id"]).column("collection_id")
            self._ids[name] = sorted(set(ids.unique().to_pylist()))
        return self._ids[name]

    def note_ids(self, name: str, ids: list[int]) -> None:
        """Remember them, before anything is committed that has them."""
        if self.collection_ids(name) != ids or name not in self.lake.collections():
            known = {**(self._ids or {}), name: ids}
            self.lake.write_collections(known)
            self._ids = known

    def _hear_of(self, name: str, newest: int, marks: Iterable[Mark]) -> None:
        """A batch has changes of a collection. If it is a new one of an old name, the documents of the old one end.

        They do so where their vbucket says it. If no vbucket did, because the filter hides it, they end here.
        """
        known = self.collection_ids(name)
        if known and newest > known[-1]:
            log = self.collection(name).changes
            heard = {mark.collection_id for mark in [*marks, *read_marks(log.uri, log.pieces())]}
            if known[-1] not in heard:
                forget(self.collection(name), self.last_batch(), self.run, self.reread)
                known = []
        if not known or newest > known[-1]:
            self.note_ids(name, [*known, newest])
