"""One Delta table through delta-rs: what is in it, and commits that can be repeated without harm.

Every commit names its writer and version (`Transaction`), so that a replayed batch finds itself already there. It is
made on top of the very version that was looked at, because delta-rs would take a commit that removes files which
somebody else's ``OPTIMIZE`` has removed already, and the rows would be there twice. No deletion vectors and no other
feature that would keep plain readers out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, PostCommitHookProperties, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from upriver.lake.files import Piece, discard, filesystem, now_ms, piece_of

# Every commit and every look at a table lists the directory of its log, so the log must not grow for ever. Taking old
# entries away after each commit costs more than the commit: `vacuum` does it now and then.
LOG_HOURS = 6
_REMEMBERED = "delta.deletedFileRetentionDuration"
_NO_CLEANUP = PostCommitHookProperties(create_checkpoint=True, cleanup_expired_logs=False)
TRIES = 20  # against others who commit to the same table


class Moved(Exception):
    """Files that a step wanted to replace are no longer in the table: look again, and redo the step."""


class Table:
    """A Delta table that may not exist yet; the first commit creates it."""

    def __init__(self, uri: str, storage_options: dict[str, str] | None = None) -> None:
        self.uri = uri
        self._storage = storage_options
        self._delta: DeltaTable | None = None
        self._checkpoint = 0, 0
        self._known: tuple[int, list[Piece] | None, dict[str, int | None]] = -1, None, {}  # of a version

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
        """See what others committed."""
        if self.exists and self._may_be_behind():
            try:
                self.delta.update_incremental()
            except DeltaError:  # entries of the log that lie between may be gone: open it anew
                self._delta = None
                _ = self.exists

    def _may_be_behind(self) -> bool:
        """Is there a next entry in the log, or another checkpoint? A real look costs a hundred times as much.

        The checkpoint tells when the next entries came and were cleaned up while nobody looked.
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
        """Make the table unless it is there."""
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
        """The last version that this writer committed; 0 is one, None is none."""
        if not self.exists:
            return None
        known = self._at()[2]
        if app_id not in known:
            known[app_id] = self.delta.transaction_version(app_id)
        return known[app_id]

    def _at(self) -> tuple[int, list[Piece] | None, dict[str, int | None]]:
        """What was asked about the version at hand: delta-rs answers slowly, and a batch asks a dozen times."""
        version = self.delta.version()
        if self._known[0] != version:
            self._known = version, None, {}
        return self._known

    def pieces(self) -> list[Piece]:
        """The files of the snapshot, oldest batches first."""
        if not self.exists:
            return []
        version, found, writers = self._at()
        if found is None:
            found = sorted(self._files(), key=lambda piece: (piece.last, piece.first, piece.path))
            self._known = version, found, writers
        return list(found)

    def _files(self) -> list[Piece]:
        adds = pa.table(self.delta.get_add_actions())
        made = adds.column("modification_time").cast(pa.timestamp("ms")).cast(pa.int64())
        columns = (adds.column("path"), adds.column("num_records"), adds.column("size_bytes"), made)
        rows = zip(*(column.to_pylist() for column in columns), strict=True)
        return [piece_of(path, rows=count or 0, size=size, made_ms=when) for path, count, size, when in rows]

    def commit(
        self,
        app_id: str,
        version: int,
        adds: Iterable[Piece],
        removes: Iterable[Piece] = (),
        *,
        note: dict[str, str] | None = None,
        rearrange: bool = False,
    ) -> bool:
        """Add and remove files in one commit. False, and the new files deleted, when that version was there before.

        `Moved`, with nothing changed, when a file to remove is not in the table.
        """
        adds, removes = list(adds), list(removes)
        actions = [_add(piece, not rearrange) for piece in adds] + [_remove(piece, not rearrange) for piece in removes]
        while True:
            seen = self.version(app_id)
            if seen is not None and seen >= version:
                self.drop_uncommitted(adds)
                return False
            if removes and not {piece.path for piece in removes} <= {piece.path for piece in self.pieces()}:
                raise Moved(self.uri)
            if self._attempt(actions, "append", self.delta.schema(), app_id, version, note):
                return True

    def replace(
        self, app_id: str, version: int, adds: Sequence[Piece], schema: pa.Schema, removes: Sequence[Piece]
    ) -> None:
        """Put these files in the place of all others and change the types of columns, in one commit.

        `Moved`, with nothing changed, when the others are not those in ``removes``.
        """
        while True:
            if {piece.path for piece in removes} != {piece.path for piece in self.pieces()}:
                raise Moved(self.uri)
            if self._attempt([_add(piece, True) for piece in adds], "overwrite", schema, app_id, version, None):
                return

    def _attempt(
        self, actions: list[Any], mode: str, schema: Any, app_id: str, version: int, note: dict[str, str] | None
    ) -> bool:
        """Commit on top of the version at hand; False when somebody else was first, after a look at what they did."""
        before = self.delta.version()
        try:
            self._write(actions, mode, schema, app_id, version, note)
        except CommitFailedError:
            self.refresh()
            if self.delta.version() == before:
                raise
            return False
        return True

    def add_columns(self, fields: Sequence[pa.Field]) -> None:
        """Columns that older files do not have; readers see null there."""
        if fields:
            self.delta.alter.add_columns([Field.from_arrow(field) for field in fields])
            self.delta.update_incremental()

    def vacuum(self, retention_hours: int) -> int:
        """Delete files that left the table longer ago than that, and entries of its log that nobody needs.

        Delta must remember for as long which files left it: of one that it forgot, only the age is known.
        """
        self.refresh()
        remember = f"interval {max(retention_hours, 1)} hours"
        if self.delta.metadata().configuration.get(_REMEMBERED) != remember:
            self.delta.alter.set_table_properties({_REMEMBERED: remember})
            self.delta.update_incremental()
        gone = self.delta.vacuum(
            retention_hours=retention_hours, dry_run=False, enforce_retention_duration=False, full=True
        )
        self.delta.cleanup_metadata()
        self.refresh()
        return len(gone)

    def drop_uncommitted(self, adds: Iterable[Piece]) -> None:
        """Delete files of a commit that did not happen, after looking: a commit that raised may have landed."""
        self.refresh()
        live = {piece.path for piece in self.pieces()}
        discard(self.uri, [piece.path for piece in adds if piece.path not in live])

    def _write(
        self, actions: list[Any], mode: str, schema: Any, app_id: str, version: int, note: dict[str, str] | None
    ) -> None:
        properties = CommitProperties(
            app_transactions=[Transaction(app_id, version)], custom_metadata=note, max_commit_retries=0
        )
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
        if was >= 0 and self.delta.version() == was + 1:  # nobody else came in between
            self._known = was + 1, None, {**writers, app_id: version}


def _add(piece: Piece, change: bool) -> AddAction:
    stats = piece.stats if piece.stats != "{}" else json.dumps({"numRecords": piece.rows})
    return AddAction(piece.path, piece.size, {}, piece.made_ms or now_ms(), change, stats)


def _remove(piece: Piece, change: bool) -> RemoveAction:
    return RemoveAction(piece.path, change, now_ms())
