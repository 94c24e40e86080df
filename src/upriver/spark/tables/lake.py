"""A directory of tables: where each is, what is remembered between runs, and that only one writer is at work."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from upriver.errors import ConfigError
from upriver.spark.tables.deltas import Table
from upriver.spark.tables.pieces import filesystem

TABLES = ("changes", "tail", "current")
APPLIED = "upriver.applied"  # the writer of ``tail``; its version is the last batch that tail and current have
REPAIRS = "upriver.reread"
TRIMMED = "upriver.trimmed"


@dataclass(frozen=True)
class Lake:
    """The root of a sync: ``<root>/changes|tail|current/<scope>.<collection>`` and ``<root>/_upriver``."""

    root: str

    def table(self, kind: str, name: str) -> Table:
        return Table(f"{self.root}/{kind}/{name}")

    def names(self) -> list[str]:
        """Collections that have tables here."""
        fs, base = filesystem(self.root)
        found = fs.get_file_info(pafs.FileSelector(f"{base}/changes", allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == pafs.FileType.Directory)

    @property
    def checkpoint(self) -> str:
        return f"{self.root}/_upriver/checkpoint"

    def settings(self) -> dict[str, Any]:
        """What this lake was made with: its id, vbuckets, bucket."""
        return self.load("lake.json")

    def load(self, name: str) -> dict[str, Any]:
        """A small file of the lake's own, ``{}`` if it was never stored."""
        fs, base = filesystem(self.root)
        path = f"{base}/_upriver/{name}"
        if fs.get_file_info(path).type != pafs.FileType.File:
            return {}
        with fs.open_input_stream(path) as source:
            loaded: dict[str, Any] = json.loads(source.read())
        return loaded

    def store(self, name: str, content: dict[str, Any]) -> None:
        """Whole or not at all, also when the disk fills up half way."""
        fs, base = filesystem(self.root)
        fs.create_dir(f"{base}/_upriver", recursive=True)
        with fs.open_output_stream(f"{base}/_upriver/{name}.new") as out:
            out.write(json.dumps(content).encode())
        fs.move(f"{base}/_upriver/{name}.new", f"{base}/_upriver/{name}")

    def epochs(self) -> dict[int, int]:
        """The newest epoch of every vbucket that ever rolled back."""
        return {int(vbucket): epoch for vbucket, epoch in self.load("epochs.json").items()}

    def write_epochs(self, epochs: dict[int, int]) -> None:
        self.store("epochs.json", {str(vbucket): epoch for vbucket, epoch in sorted(epochs.items())})

    def cleaned(self) -> float:
        """When old files were last deleted, 0 for never."""
        return float(self.load("cleaned.json").get("at", 0.0))

    def note_cleaned(self, at: float) -> None:
        self.store("cleaned.json", {"at": at})

    def settle(self, bucket: str, vbuckets: int, uuid: str = "", *, adopt: bool = False) -> dict[str, Any]:
        """Make the lake, or check that it is of the same bucket; with ``adopt``, of one with the same name."""
        known = self.settings()
        if not known:
            made = {"id": secrets.token_hex(8), "bucket": bucket, "vbuckets": vbuckets, "made_at": int(time.time())}
            self.store("lake.json", {**made, "uuid": uuid})
            return made
        if (known["bucket"], known["vbuckets"]) != (bucket, vbuckets):
            raise ConfigError(
                f"{self.root} holds tables of bucket '{known['bucket']}' with {known['vbuckets']} vbuckets, "
                f"not of '{bucket}' with {vbuckets}: choose another directory"
            )
        self._recognize(known, uuid, adopt)
        return known

    def _recognize(self, known: dict[str, Any], uuid: str, adopt: bool) -> None:
        """A lake of an earlier version takes the first bucket that it meets for its own."""
        before = known.get("uuid", "")
        if uuid and before and uuid != before and not adopt:
            raise ConfigError(
                f"{self.root} holds tables of bucket '{known['bucket']}' with uuid {before}; this one has uuid {uuid}: "
                "it was deleted and created again, or it is of another cluster. --adopt makes the tables equal to this "
                "one; what they hold is then taken back"
            )
        if uuid and uuid != before:
            self.store("lake.json", {**known, "uuid": uuid})

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Hold the lake; a second sync of the same directory says so instead of fighting over commits."""
        if "://" in self.root:
            yield  # no locks there: Delta's own commit protocol refuses the second writer, batch by batch
            return
        path = Path(self.root) / "_upriver" / "lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(handle)
            raise ConfigError(f"another sync is writing to {self.root}") from error
        try:
            yield
        finally:
            os.close(handle)
