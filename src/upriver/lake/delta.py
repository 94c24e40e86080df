"""One Delta table through delta-rs: its files, and commits that can be repeated without harm.

Every commit names its writer and a version (`Transaction`), so a replayed batch finds itself already committed. It is
made on top of exactly the version that was read: delta-rs would accept a commit that removes files which another tool's
``OPTIMIZE`` has already removed, and the rows would be there twice. Tables use no deletion vectors and no other feature
that plain readers lack.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from upriver.lake.files import DataFile, discard, filesystem, now_ms, parse_file_name

# Every commit and every refresh of a table lists the directory of its log, so the log must not grow for ever. Removing
# old entries after each commit costs more than the commit, so `vacuum` does it now and then.
LOG_HOURS = 6
_REMEMBERED = "delta.deletedFileRetentionDuration"
_NO_CLEANUP = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
TRIES = 20  # while other writers commit to the same table


class CommitConflict(Exception):
    """Another writer removed files that a step wanted to replace: the step must start again."""


class Table:
    """A Delta table that may not exist yet; the first commit creates it."""

    def __init__(self, uri: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = uri
        self._storage = storage_options
        self._delta: DeltaTable | None = None
        self._checkpoint = 0, 0
        self._known: tuple[int, list[DataFile] | None, dict[str, int | None]] = -1, None, {}  # of a version

    @property
    def delta(self) -> DeltaTable:
        """delta-rs's own handle, opened once and kept up to date by our commits."""
        if self._delta is None:
            self._delta = DeltaTable(self.uri, storage_options=self._storage)
        return self._delta

    @property
    def exists(self) -> bool:
        if self._delta is None:
            try:
                self._delta = DeltaTable(self.uri, storage_options=self._storage)
            except TableNotFoundError:
                return False
        return True

    def refresh(self) -> None:
        """See what other writers have committed."""
        if self.exists and self._may_be_behind():
            try:
                self.delta.update_incremental()
            except DeltaError:  # entries of the log in between may be gone: open the table anew
                self._delta = None
                _ = self.exists

    def _may_be_behind(self) -> bool:
        """Whether the log has a next entry or a new checkpoint; a refresh costs a hundred times as much as this look.

        A new checkpoint is the only trace of entries that came and were cleaned up since the last refresh.
        """
        if "://" in self.uri:
            return True
        log = f"{self.uri}/_delta_log"
        try:
            found = os.stat(f"{log}/_last_checkpoint")
            stamp = found.st_mtime_ns, found.st_size
        except FileNotFoundError:
            stamp = 0, 0
        behind = stamp != self._checkpoint or os.path.exists(f"{log}/{self.delta.version() + 1:020d}.json")
        self._checkpoint = stamp
        return behind

    def create(self, schema: pa.Schema, description: str) -> None:
        """Create the table unless it exists."""
        if not self.exists:
            if "://" not in self.uri:
                fs, base = filesystem(self.uri)
                fs.create_dir(base, recursive=True)
            config = {"delta.logRetentionDuration": f"interval {LOG_HOURS} hours", "delta.checkpointInterval": "50"}
            self._delta = DeltaTable.create(
                self.uri,
                schema,
                mode="ignore",
                description=description,
                configuration=config,
                storage_options=self._storage,
            )

    def schema(self) -> pa.Schema:
        return pa.schema(self.delta.schema().to_arrow())

    def version(self, app_id: str) -> int | None:
        """The last version that this writer committed, None for none."""
        if not self.exists:
            return None
        known = self._cached()[2]
        if app_id not in known:
            known[app_id] = self.delta.transaction_version(app_id)
        return known[app_id]

    def next_version(self, app_id: str) -> int:
        """The version of this writer's next commit, for a writer that only counts its commits."""
        seen = self.version(app_id)
        return 0 if seen is None else seen + 1

    def _cached(self) -> tuple[int, list[DataFile] | None, dict[str, int | None]]:
        """What is cached of the current version: a batch asks a dozen times, and delta-rs answers slowly."""
        version = self.delta.version()
        if self._known[0] != version:
            self._known = version, None, {}
        return self._known

    def files(self) -> list[DataFile]:
        """The data files, oldest batches first."""
        if not self.exists:
            return []
        version, found, writers = self._cached()
        if found is None:
            found = sorted(self._files(), key=lambda file: (file.last_batch, file.first_batch, file.path))
            self._known = version, found, writers
        return list(found)

    def _files(self) -> list[DataFile]:
        adds = pa.table(self.delta.get_add_actions())
        made = adds.column("modification_time").cast(pa.timestamp("ms")).cast(pa.int64())
        columns = (adds.column("path"), adds.column("num_records"), adds.column("size_bytes"), made)
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        return [parse_file_name(path, rows=count or 0, size=size, made_ms=when) for path, count, size, when in rows]

    def commit(
        self,
        app_id: str,
        version: int,
        adds: Iterable[DataFile],
        removes: Iterable[DataFile] = (),
        *,
        rearrange: bool = False,
    ) -> bool:
        """Add and remove files in one commit; False, with the new files deleted, if this version was committed before.

        `CommitConflict`, with nothing changed, when a file to remove is no longer in the table.
        """
        adds, removes = list(adds), list(removes)
        actions = [_add(file, not rearrange) for file in adds] + [_remove(file, not rearrange) for file in removes]
        while True:
            seen = self.version(app_id)
            if seen is not None and seen >= version:
                self.drop_uncommitted(adds)
                return False
            if removes and not {file.path for file in removes} <= {file.path for file in self.files()}:
                raise CommitConflict(self.uri)
            if self._attempt(actions, "append", self.delta.schema(), app_id, version):
                return True

    def replace(
        self, app_id: str, version: int, adds: Sequence[DataFile], schema: pa.Schema, removes: Sequence[DataFile]
    ) -> None:
        """Replace all files and change the types of columns, in one commit.

        `CommitConflict`, with nothing changed, when the files of the table are not those in ``removes``.
        """
        while True:
            if {file.path for file in removes} != {file.path for file in self.files()}:
                raise CommitConflict(self.uri)
            if self._attempt([_add(file, True) for file in adds], "overwrite", schema, app_id, version):
                return

    def _attempt(
        self, actions: list[AddAction | RemoveAction], mode: str, schema: Schema | pa.Schema, app_id: str, version: int
    ) -> bool:
        """Commit on top of the current version; False, after a refresh, when another writer was first."""
        before = self.delta.version()
        try:
            self._write(actions, mode, schema, app_id, version)
        except CommitFailedError:
            self.refresh()
            if self.delta.version() == before:
                raise
            return False
        return True

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Add columns; readers see null in older files."""
        if fields:
            self.delta.alter.add_columns([Field.from_arrow(field) for field in fields])
            self.delta.update_incremental()

    def vacuum(self, retention_hours: int) -> int:
        """Delete files that left the table longer ago than that, and entries of its log that are no longer needed.

        Delta must remember removed files for that long: of a file that it has forgotten, only the age is known.
        """
        self.refresh()
        wanted = f"interval {max(retention_hours, 1)} hours"
        if self.delta.metadata().configuration.get(_REMEMBERED) != wanted:
            self.delta.alter.set_table_properties({_REMEMBERED: wanted})
            self.delta.update_incremental()
        gone = self.delta.vacuum(
            retention_hours=retention_hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        self.delta.cleanup_metadata()
        self.refresh()
        return len(gone)

    def drop_uncommitted(self, adds: Iterable[DataFile]) -> None:
        """Delete files of a commit that failed, unless the table has them: a commit that raised may have landed."""
        self.refresh()
        live = {file.path for file in self.files()}
        discard(self.uri, [file.path for file in adds if file.path not in live])

    def _write(
        self, actions: list[AddAction | RemoveAction], mode: str, schema: Schema | pa.Schema, app_id: str, version: int
    ) -> None:
        properties = CommitProperties(app_transactions=[Transaction(app_id, version)], max_commit_retries=0)
        self.delta.create_write_transaction(
            actions,
            mode=mode,
            schema=schema,
            partition_by=[],
            commit_properties=properties,
            post_commithook_properties=_NO_CLEANUP,
        )
        was, _, writers = self._known
        self.delta.update_incremental()
        if was >= 0 and self.delta.version() == was + 1:  # no other writer came in between
            self._known = was + 1, None, {**writers, app_id: version}


def _add(file: DataFile, change: bool) -> AddAction:
    stats = file.stats if file.stats != "{}" else json.dumps({"numRecords": file.rows})
    return AddAction(file.path, file.size, {}, file.made_ms or now_ms(), change, stats)


def _remove(file: DataFile, change: bool) -> RemoveAction:
    return RemoveAction(file.path, change, now_ms())
