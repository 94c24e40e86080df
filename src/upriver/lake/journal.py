"""The journal of a lake: one line of JSON per batch beside the tables, for the progress line and the report."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

NAME = "_upriver/progress.jsonl"
KEEP_BYTES = 16 << 20


@dataclass(frozen=True)
class Batch:
    """What one micro-batch did."""

    batch: int
    at: float
    rows: int = 0
    value_bytes: int = 0
    log_bytes: int = 0
    table_bytes: int = 0
    read_s: float = 0.0
    total_s: float = 0.0
    behind_s: float = 0.0
    rollbacks: int = 0
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


def _rotate(path: Path) -> None:
    if path.is_file() and path.stat().st_size > KEEP_BYTES:
        path.replace(path.with_suffix(".old.jsonl"))


@dataclass(frozen=True)
class Lag:
    """How many changes the tables were behind the bucket at a moment."""

    at: float
    lag: int


class Journal:
    """The journal of a lake in a local directory; on object stores, nothing is kept."""

    def __init__(self, lake: str) -> None:
        self.path = Path(lake) / NAME if "://" not in lake else Path(os.devnull)
        self._offset = 0
        self.lag_at = 0.0  # when a lag was last added

    def skip(self) -> None:
        """Make ``new_batches`` begin after the batches that are there now."""
        self._offset = self.path.stat().st_size if self.path.is_file() else 0

    def new_batches(self) -> list[Batch]:
        """Batches that were added since the last call."""
        if not self.path.is_file():
            return []
        if self.path.stat().st_size < self._offset:  # the file was rotated
            self._offset = 0
        with self.path.open("rb") as source:
            source.seek(self._offset)
            whole = [line for line in source.read().splitlines(keepends=True) if line.endswith(b"\n")]
        self._offset += sum(map(len, whole))
        return [_batch(json.loads(line)) for line in whole]

    def add_lag(self, lag: Lag) -> None:
        self.lag_at = lag.at
        if self._lags.parent.is_dir():
            _rotate(self._lags)
            with self._lags.open("a") as out:
                out.write(json.dumps(asdict(lag)) + "\n")

    def lags(self, since: float = 0.0) -> list[Lag]:
        if not self._lags.is_file():
            return []
        whole = [line for line in self._lags.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [lag for lag in (Lag(**json.loads(line)) for line in whole) if lag.at >= since]

    @property
    def _lags(self) -> Path:
        return self.path.with_name("lag.jsonl")

    def add(self, batch: Batch) -> None:
        """Append a batch; a file that has grown large is rotated first."""
        _rotate(self.path)
        if str(self.path) != os.devnull:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as out:
            out.write(json.dumps(asdict(batch)) + "\n")

    def read(self, since: float = 0.0) -> Iterator[Batch]:
        """All batches, or those since a moment; a last line that a crash cut off is left out."""
        if not self.path.is_file():
            return
        with self.path.open() as source:
            for line in source:
                if not line.endswith("\n"):
                    return
                found = json.loads(line)
                if found["at"] >= since:
                    yield _batch(found)


def _batch(found: dict[str, Any]) -> Batch:
    known = {known.name for known in fields(Batch)}
    return Batch(**{name: value for name, value in found.items() if name in known})
