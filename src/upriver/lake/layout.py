"""The directory of a lake: where its tables are, what is stored between runs, and a lock for its one writer."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs

from upriver.errors import ConfigError
from upriver.lake.delta import Table
from upriver.lake.files import filesystem

APPLIED = "upriver.applied"  # the writer of ``tail``; its version is the last batch that tail and current have
REPAIRS = "upriver.reread"
TRIMMED = "upriver.trimmed"
_PLAIN = re.compile(r"[A-Za-z0-9_$-]")
_LONGEST = 200  # file systems take 255 bytes; a scope and a collection may have 251 each
_CUT = "!!"


def directory(name: str) -> str:
    """The directory name of a collection (``scope.collection``): no two collections share one.

    Characters other than letters, digits, ``_``, ``-`` and ``$`` are escaped, so no name leads out of the lake and all
    readers see the same path (some decode ``%``). A long name is cut and ends in its checksum.

    >>> directory("shop.orders"), directory("shop.50%"), directory("../../etc.x")
    ('shop.orders', 'shop.50!25', '!2e!2e!2f!2e!2e!2fetc.x')
    """
    scope, _, collection = name.rpartition(".")
    whole = f"{_escaped(scope)}.{_escaped(collection)}" if scope and collection else _escaped(name)
    if len(whole) <= _LONGEST:
        return whole
    return f"{whole[: _LONGEST - 34]}{_CUT}{hashlib.sha256(name.encode()).hexdigest()[:32]}"


def _escaped(part: str) -> str:
    return "".join(c if _PLAIN.match(c) else "".join(f"!{byte:02x}" for byte in c.encode()) for c in part)


def collection_of(directory_name: str) -> str | None:
    """The collection that a directory was named after; None if the name was cut."""
    if _CUT in directory_name:
        return None
    raw = re.sub(r"!([0-9a-f]{2})", lambda found: chr(int(found[1], 16)), directory_name)
    return raw.encode("latin-1", errors="ignore").decode(errors="replace")


@dataclass(frozen=True)
class Lake:
    """The root of a sync: ``<root>/changes|tail|current/<scope>.<collection>`` and ``<root>/_upriver``."""

    root: str
    checkpoint_at: str = ""  # Spark's checkpoint, if it is not in the lake

    def table(self, kind: str, name: str) -> Table:
        return Table(self.path(kind, name))

    def path(self, kind: str, name: str) -> str:
        """Where a table of a collection is."""
        return f"{self.root}/{kind}/{directory(name)}"

    def names(self) -> list[str]:
        """Collections that have tables here."""
        fs, base = filesystem(self.root)
        found = fs.get_file_info(pafs.FileSelector(f"{base}/changes", allow_not_found=True))
        directories = [info.base_name for info in found if info.type == pafs.FileType.Directory]
        is_cut = any(_CUT in one for one in directories)
        cut = {directory(name): name for name in self.collections()} if is_cut else {}
        return sorted(name for one in directories if (name := collection_of(one) or cut.get(one)) is not None)

    def collections(self) -> dict[str, list[int]]:
        """The ids that each collection has had, newest last; none if it was dropped while the sync was away."""
        return self.load("collections.json")

    def write_collections(self, known: dict[str, list[int]]) -> None:
        self.store("collections.json", known)

    @property
    def checkpoint(self) -> str:
        return self.checkpoint_at or f"{self.root}/_upriver/checkpoint"

    def settings(self) -> dict[str, Any]:
        """What this lake was created with: its id, bucket and vbuckets; empty if there is no lake yet."""
        return self.load("lake.json")

    def load(self, name: str) -> dict[str, Any]:
        """A JSON file under ``_upriver``, ``{}`` if there is none."""
        fs, base = filesystem(self.root)
        path = f"{base}/_upriver/{name}"
        if fs.get_file_info(path).type != pafs.FileType.File:
            return {}
        with fs.open_input_stream(path) as source:
            text = source.read()
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"{path} is damaged ({error}): restore it from a backup of the lake, or sync to a new directory"
            ) from error

    def store(self, name: str, content: dict[str, Any]) -> None:
        """Replace a JSON file under ``_upriver``, whole or not at all, even if the disk is full."""
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

    def floors(self, name: str) -> dict[int, int] | None:
        """The seqno up to which the log of a collection was trimmed, by vbucket; None if nothing was noted yet."""
        found = self.load("trimmed.json").get(name)
        return None if found is None else {int(vbucket): seqno for vbucket, seqno in found.items()}

    def write_floors(self, name: str, floors: dict[int, int]) -> None:
        noted = {str(vbucket): seqno for vbucket, seqno in sorted(floors.items())}
        self.store("trimmed.json", {**self.load("trimmed.json"), name: noted})

    def cleaned(self) -> float:
        """When old files were last deleted; 0 for never."""
        return float(self.load("cleaned.json").get("at", 0.0))

    def note_cleaned(self, at: float) -> None:
        self.store("cleaned.json", {"at": at})

    def checked(self) -> bool:
        """Whether the tables were checked for duplicates that earlier versions may have left."""
        return "at" in self.load("checked.json")

    def note_checked(self, at: float) -> None:
        self.store("checked.json", {"at": at})

    def create_or_check(self, bucket: str, vbuckets: int, uuid: str = "", *, adopt: bool = False) -> dict[str, Any]:
        """Create the lake, or check that it belongs to this bucket; its settings.

        ``adopt`` accepts another bucket of the same name. A lake of an earlier version adopts the first one it meets.
        """
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
        before = known.get("uuid", "")
        if uuid and before and uuid != before and not adopt:
            raise ConfigError(
                f"{self.root} holds tables of bucket '{known['bucket']}' with uuid {before}; this one has uuid {uuid}: "
                "it was deleted and created again, or it is of another cluster. --adopt makes the tables equal to this "
                "one; what they hold is then taken back"
            )
        if uuid and uuid != before:
            self.store("lake.json", {**known, "uuid": uuid})
        return known

    @contextmanager
    def only_writer(self) -> Iterator[None]:
        """Lock the lake; ``ConfigError`` if another sync holds it."""
        if "://" in self.root:
            yield  # no locks on object stores: Delta's commit protocol refuses the second writer, batch by batch
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
