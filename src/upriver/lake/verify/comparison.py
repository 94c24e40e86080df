"""What verify found: the differences of each collection."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

MAX_KEYS = 20
KINDS = ("missing", "extra", "different", "duplicate")


class TableView(StrEnum):
    """Which rows are judged."""

    FRESH = "fresh"
    """``current`` with its tail on top: what `upriver.lake.read` and the documented SQL view give."""
    CURRENT = "current"
    """The plain Delta table alone."""


@dataclass
class Comparison:
    """What was found for one collection."""

    name: str
    view: TableView = TableView.FRESH
    has_table: bool = True
    bucket_rows: int = 0
    table_rows: int = 0
    missing: list[str] = field(default_factory=list)  # keys in the bucket, not in the table
    extra: list[str] = field(default_factory=list)  # keys in the table, not in the bucket
    different: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)  # keys with more than one row
    lost_files: list[str] = field(default_factory=list)  # data files of the table that are gone or unreadable
    late: int = 0  # keys that changed after the committed offsets: not wrong, only not there yet
    waiting: int = 0  # wrong keys that have a row in the tail, so the fresh view may be right
    differing_vbuckets: list[int] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> int:
        return sum(len(self.keys(kind)) for kind in KINDS) + len(self.lost_files)

    def keys(self, kind: str) -> list[str]:
        """The keys that are wrong in this way (one of `KINDS`)."""
        found: list[str] = getattr(self, kind)
        return found

    def to_json(self) -> dict[str, object]:
        """For ``--json``: counts, and the first keys of each kind."""
        lists = {name: self.keys(name)[:MAX_KEYS] for name in (*KINDS, "lost_files")}
        return {
            "collection": self.name, "view": self.view.value, "equal": self.equal, "has_table": self.has_table,
            "bucket_rows": self.bucket_rows, "table_rows": self.table_rows, "late": self.late,
            "waiting": self.waiting, "differences": self.differences,
            "differing_vbuckets": self.differing_vbuckets, **lists,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """How a key differs, and the seqno of its last change in the bucket."""

    kind: str  # one of `KINDS`
    vbucket: int
    changed: int


@dataclass
class Differences:
    """What one look at a collection found."""

    bucket_rows: int = 0
    table_rows: int = 0
    wrong: dict[str, Difference] = field(default_factory=dict)  # by key
    late: set[str] = field(default_factory=set)
    broken: set[str] = field(default_factory=set)  # data files
