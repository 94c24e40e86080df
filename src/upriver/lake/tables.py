"""All tables of a lake: a batch is committed to every change log, then every collection advances."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from upriver.errors import UpriverError
from upriver.lake.apply.merge import run_inline
from upriver.lake.apply.policy import TableOptions
from upriver.lake.apply.reconcile import end_all_documents, has_duplicates
from upriver.lake.apply.reread import Branches, Reread, find_lost
from upriver.lake.apply.rollbacks import add_voided_column
from upriver.lake.change_log import LogMark, WrittenFiles, read_changes, read_marks, table_name, write_marks
from upriver.lake.collection import AdvanceResult, CollectionTables, RunMerges
from upriver.lake.layout import Lake
from upriver.records.schema import Event

ASK_EVERY_S = 10.0  # how often, while no batch comes, to ask whether the bucket still has what was read again
logger = logging.getLogger("upriver.sync")


class Tables:
    """All collections of a lake.

    ``run`` does merge tasks, ``reread`` reads vbuckets again that the log cannot repair, ``branches`` asks the bucket
    for failover logs.
    """

    def __init__(
        self,
        lake: Lake,
        app_id: str,
        options: TableOptions,
        *,
        run: RunMerges = run_inline,
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
            self._open[name] = CollectionTables(self.lake, name, self.options, run=self.run, reread=self.reread)
        return self._open[name]

    def names(self) -> list[str]:
        return sorted({*self.lake.names(), *self._open})

    def prepare(self) -> None:
        """Take over what an earlier run left: logs of earlier versions, and epochs from before a crash."""
        marks: list[LogMark] = []
        for name in self.names():
            log = self.collection(name).changes
            if log.exists:
                known = read_marks(log.uri, self.collection(name).log())
                add_voided_column(log, known)
                marks += known
        self._note_epochs(marks)
        self._rewrite_duplicates()

    def apply(self, batch: int, written: WrittenFiles, lag: int = 0) -> list[AdvanceResult]:
        """Commit a batch, whose rows ``write_log`` has written, to every table. A replayed batch changes nothing."""
        for name, ids in sorted(written.ids.items()):
            self._note_collection(name, max(ids), written.marks)
        for name in sorted({*self.names(), *written.files}):
            files, marks = list(written.files.get(name, [])), self._marks_for(name, written)
            if marks:
                files.append(write_marks(self.lake.root, name, marks, batch))
            if files and not self.collection(name).commit_log(self.app_id, batch, files, marks):
                logger.info("%s: batch %d was committed before", name, batch)
        self._note_epochs(written.marks)
        self._reread_lost(batch)
        return [self.collection(name).advance(batch, lag) for name in self.names()]

    def freshen(self) -> list[AdvanceResult]:
        """Between two batches: merge what has waited too long, or was held back for batches that did not come."""
        batch = self.last_batch()
        if time.monotonic() >= self._ask_at:
            self._reread_lost(batch + 1)
            self._ask_at = time.monotonic() + ASK_EVERY_S
        return [self.collection(name).advance(batch) for name in self.names()]

    def drain(self) -> list[AdvanceResult]:
        """Leave nothing in the tails that ``current`` lacks."""
        batch = self.last_batch()
        return [self.collection(name).advance(batch, drain=True) for name in self.names()]

    def last_batch(self) -> int:
        """The newest batch in any log, -1 for none."""
        versions = [self.collection(name).changes.version(self.app_id) for name in self.names()]
        return max((version for version in versions if version is not None), default=-1)

    def _reread_lost(self, batch: int) -> None:
        """Read vbuckets again whose branch ended before the point that an earlier reread had reached (`find_lost`)."""
        if self.branches is None:
            return
        try:
            lost = find_lost(self.lake, self.branches)
        except (UpriverError, OSError) as error:  # the next batch asks again
            logger.warning("the bucket does not say whether it still has what was read again: %s", error)
            return
        for name, vbuckets in lost.items():
            self.collection(name).reread_lost(vbuckets, batch)

    def _rewrite_duplicates(self) -> None:
        """Check once for keys with two rows in ``current``: earlier versions left some when another tool rewrote it."""
        if self.lake.checked():
            return
        for name in self.names():
            collection = self.collection(name)
            if has_duplicates(collection):
                logger.warning("%s: a key has more than one row, so the table is rewritten", name)
                collection.advance(self.last_batch(), force=True)
        self.lake.note_checked(time.time())

    def _note_epochs(self, marks: Iterable[LogMark]) -> None:
        rollbacks = [mark for mark in marks if mark.event == Event.ROLLBACK]
        if not rollbacks:
            return
        known = self.lake.epochs()
        for mark in rollbacks:
            known[mark.vbucket] = max(mark.epoch, known.get(mark.vbucket, 0))
        self.lake.write_epochs(known)

    def _marks_for(self, name: str, written: WrittenFiles) -> list[LogMark]:
        """Rollbacks concern every collection, collection events their own."""
        found = [mark for mark in written.marks if mark.event == Event.ROLLBACK]
        for mark in written.marks:
            if mark.event == Event.ROLLBACK or mark.collection_id is None:
                continue
            named = table_name(mark.scope, mark.collection, mark.collection_id)
            if named == name or mark.collection_id in self.collection_ids(name):
                found.append(mark)
        return found

    def collection_ids(self, name: str) -> list[int]:
        """The ids, newest last, that the collection of this name has had and its tables may hold documents of."""
        if self._ids is None:
            self._ids = self.lake.collections()
        if name not in self._ids:  # a lake of an earlier version: its log has them
            log = self.collection(name).changes
            files = [file for file in log.files() if not file.marks]
            ids = read_changes(log.uri, files[-64:], ["collection_id"]).column("collection_id")
            self._ids[name] = sorted(set(ids.unique().to_pylist()))
        return self._ids[name]

    def note_ids(self, name: str, ids: list[int]) -> None:
        """Store the ids of a collection, before anything is committed that has them."""
        if self.collection_ids(name) != ids or name not in self.lake.collections():
            known = {**(self._ids or {}), name: ids}
            self.lake.write_collections(known)
            self._ids = known

    def _note_collection(self, name: str, newest: int, marks: Iterable[LogMark]) -> None:
        """Note the id of a collection that a batch has changes of.

        If it is a new collection of an old name, the documents of the old one end: at the drop in each vbucket, or
        here, if the filter hid the drop from all vbuckets.
        """
        known = self.collection_ids(name)
        if known and newest > known[-1]:
            log = self.collection(name).changes
            dropped = {mark.collection_id for mark in [*marks, *read_marks(log.uri, log.files())]}
            if known[-1] not in dropped:
                end_all_documents(self.collection(name), self.last_batch())
                known = []
        if not known or newest > known[-1]:
            self.note_ids(name, [*known, newest])
