"""The bucket as a client of the protocol finds it: documents of some vbuckets, with the seqnos of their last changes.

They are read from the beginning, in the order of the feed. A deletion ends a document; a drop or flush of its
collection ends all of them. A deleted key keeps the seqno of its deletion, which tells a late table from a wrong one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from upriver.client.blocking import Database
from upriver.client.positions import Positions
from upriver.errors import ConnectFailed, StatusError
from upriver.lake.verify.documents import Fingerprint, of_bucket, shown
from upriver.lake.verify.tables import Committed, CommittedPosition
from upriver.model import SEQNO_MAX, Claim
from upriver.protocol.history import History, RollbackTo, decide
from upriver.records.schema import Event

TRIES = 5
PASSES = 20
_WIPES = (Event.COLLECTION_DROPPED, Event.COLLECTION_FLUSHED)
_COLUMNS = ["event", "vbucket", "seqno", "collection_id", "key", "value", "datatype", "cas", "timestamp", "expiry"]


@dataclass(frozen=True, slots=True)
class LastChange:
    """The last change of a key."""

    vbucket: int
    seqno: int
    document: Fingerprint | None  # None: deleted


@dataclass
class BucketContents:
    """The documents of some vbuckets, by (collection id, vbucket) and key."""

    last: dict[tuple[int, int], dict[str, LastChange]] = field(default_factory=dict)
    # The seqno of the last drop or flush, by (collection id, vbucket).
    wiped: dict[tuple[int, int], int] = field(default_factory=dict)
    moving: frozenset[int] = frozenset()  # vbuckets that are written so often that a key may have been missed

    def add(self, rows: pa.RecordBatch) -> bool:
        """Apply rows in the order of the feed. False: a vbucket rolled back, so the contents are not valid."""
        for row in rows.select(_COLUMNS).to_pylist():
            event, vbucket, seqno = row["event"], row["vbucket"], row["seqno"]
            if event == Event.ROLLBACK:
                return False
            if event in _WIPES:
                self._wipe(row["collection_id"], vbucket, seqno)
            elif row["key"] is not None:
                document = of_bucket(row) if event == Event.MUTATION else None
                keys = self.last.setdefault((row["collection_id"], vbucket), {})
                keys[shown(row["key"])] = LastChange(vbucket, seqno, document)
        return True

    def _wipe(self, collection_id: int, vbucket: int, seqno: int) -> None:
        self.wiped[collection_id, vbucket] = seqno
        self.last.pop((collection_id, vbucket), None)

    def of(self, collection_id: int) -> dict[str, LastChange]:
        """The keys of a collection."""
        return {key: last for at, keys in self.last.items() if at[0] == collection_id for key, last in keys.items()}


def read(db: Database, vbuckets: Sequence[int]) -> BucketContents:
    """All documents that some vbuckets have now, while others write."""
    for _ in range(TRIES):
        contents = BucketContents()
        if _read_all(contents, db, vbuckets):
            return contents
    raise ConnectFailed("a vbucket lost history in every one of five reads: verify again when the cluster is quiet")


def _read_all(contents: BucketContents, db: Database, vbuckets: Sequence[int]) -> bool:
    """Read up to the high seqnos, then what came meanwhile, until nothing is left; False after a rollback.

    A document that is written during a read moves beyond the end of the read, and would seem to be gone.
    """
    done = dict.fromkeys(vbuckets, 0)
    positions: Literal["beginning"] | Positions = "beginning"
    for _ in range(PASSES):
        highs = db.high_seqnos()
        todo = {vbucket: highs.get(vbucket, 0) for vbucket in vbuckets if highs.get(vbucket, 0) > done[vbucket]}
        contents.moving = frozenset(todo)
        if not todo:
            return True
        with db.change_batches(start=positions, end=todo, vbuckets=todo) as feed:
            if not all(contents.add(rows) for rows in feed):
                return False
            found = feed.positions()
        positions = found if isinstance(positions, str) else positions.merged(found)
        done |= todo
    return True


@dataclass(frozen=True, slots=True)
class Floor:
    """The seqno up to which the tables must have a vbucket."""

    seqno: int
    forked: bool = False  # what the tables have above it will be taken back

    def is_late(self, changed: int, row: int | None) -> bool:
        """Whether it is too early to judge a key whose last change and row have these seqnos."""
        return changed > self.seqno or (self.forked and row is not None and row > self.seqno)


def floors(db: Database, committed: Committed, ids: Iterable[int] | None) -> list[Floor]:
    """By vbucket: the committed seqno or, where the producer will roll the sync back, the seqno it continues from.

    ``ids`` are the collections that the sync reads, None for all. Call it after reading the bucket.

    See docs/protocol/rollback.md#decision.
    """
    logs, highs = db.failover_logs(range(len(committed.positions))), db.high_seqnos()
    purges = _purges(db)
    passed = any(at.seqno < purges.get(vbucket, 0) for vbucket, at in enumerate(committed.positions))
    of_filter = [db.run(db.operations.high_seqnos(number)) for number in ids] if ids is not None and passed else None
    found = []
    for vbucket, at in enumerate(committed.positions):
        high = None if of_filter is None else max((highs.get(vbucket, 0) for highs in of_filter), default=0)
        history = History(logs[vbucket], highs.get(vbucket, 0), purges.get(vbucket, 0), high)
        found.append(_floor(at, history))
    return found


def _floor(at: CommittedPosition, history: History) -> Floor:
    complete = at.points[0] if at.points else 0
    if at.seqno == complete:
        end = at.seqno
    else:  # inside a snapshot, whose end is known only on the newest branch
        end = max(history.high_seqno, at.seqno) if history.log.uuid == at.vbuuid else SEQNO_MAX
    verdict = decide(history, Claim(at.vbuuid, at.seqno, complete, end))
    back = verdict.seqno if isinstance(verdict, RollbackTo) else at.seqno
    if at.unread is not None:
        back = min(back, at.unread)
    elif not isinstance(verdict, RollbackTo):
        return Floor(at.seqno)
    return Floor(next((point for point in at.points if point <= back), 0), forked=True)


def _purges(db: Database) -> dict[int, int]:
    """The purge seqno of each vbucket; empty if the nodes do not say."""
    try:
        found = db.stats("vbucket-seqno")
    except StatusError:
        return {}
    stats = ((name, text) for of_node in found.values() for name, text in of_node.items())
    return {int(name[3:].split(":")[0]): int(text) for name, text in stats if name.endswith(":purge_seqno")}
