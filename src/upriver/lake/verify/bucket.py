"""The bucket as a client of the protocol finds it: documents of some vbuckets, with the seqnos of their last changes.

Read from the beginning, in the order of the feed: a deletion ends a document, a drop or a flush of its collection all
of them. What is gone keeps the seqno at which it went, so that a reader who is not there yet can be told from one who
missed it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from upriver.client.blocking import Database
from upriver.client.positions import Positions
from upriver.errors import ConnectFailed, StatusError
from upriver.lake.verify.documents import Said, of_bucket, shown
from upriver.lake.verify.tables import Committed, Place
from upriver.model import SEQNO_MAX, Claim
from upriver.protocol.history import History, RollbackTo, decide
from upriver.records.schema import Event

TRIES = 5
PASSES = 20
_WIPES = (Event.COLLECTION_DROPPED, Event.COLLECTION_FLUSHED)
_COLUMNS = ["event", "vbucket", "seqno", "collection_id", "key", "value", "datatype", "cas", "timestamp", "expiry"]


@dataclass(frozen=True, slots=True)
class Last:
    """The last change of a key: what its document says now, or None where it is gone."""

    vbucket: int
    seqno: int
    said: Said | None


@dataclass
class Contents:
    """What some vbuckets hold, by collection id and vbucket, and then by key."""

    last: dict[tuple[int, int], dict[str, Last]] = field(default_factory=dict)
    wiped: dict[tuple[int, int], int] = field(default_factory=dict)  # (collection id, vbucket): when, as a seqno
    moving: frozenset[int] = frozenset()  # vbuckets that are written so often that a key may have escaped us

    def add(self, rows: pa.RecordBatch) -> bool:
        """Take rows in the order of the feed. False: history was lost under our eyes, and this is worth nothing."""
        for row in rows.select(_COLUMNS).to_pylist():
            event, vbucket, seqno = row["event"], row["vbucket"], row["seqno"]
            if event == Event.ROLLBACK:
                return False
            if event in _WIPES:
                self._wipe(row["collection_id"], vbucket, seqno)
            elif row["key"] is not None:
                said = of_bucket(row) if event == Event.MUTATION else None
                keys = self.last.setdefault((row["collection_id"], vbucket), {})
                keys[shown(row["key"])] = Last(vbucket, seqno, said)
        return True

    def _wipe(self, collection_id: int, vbucket: int, seqno: int) -> None:
        self.wiped[collection_id, vbucket] = seqno
        self.last.pop((collection_id, vbucket), None)

    def of(self, collection_id: int) -> dict[str, Last]:
        """The keys of a collection."""
        return {key: last for at, keys in self.last.items() if at[0] == collection_id for key, last in keys.items()}


def read(db: Database, vbuckets: Sequence[int]) -> Contents:
    """Everything that some vbuckets hold now, while others write."""
    for _ in range(TRIES):
        contents = Contents()
        if _filled(contents, db, vbuckets):
            return contents
    raise ConnectFailed("a vbucket lost history in every one of five reads: verify again when the cluster is quiet")


def _filled(contents: Contents, db: Database, vbuckets: Sequence[int]) -> bool:
    """Read up to the high seqnos, and again what came meanwhile: a document that is written while we read has moved
    behind the end of that read, and would seem to be gone."""
    done = dict.fromkeys(vbuckets, 0)
    positions: str | Positions = "beginning"
    for _ in range(PASSES):
        highs = db.high_seqnos()
        todo = {vbucket: highs.get(vbucket, 0) for vbucket in vbuckets if highs.get(vbucket, 0) > done[vbucket]}
        contents.moving = frozenset(todo)
        if not todo:
            return True
        with db.feed(start=positions, end=todo, vbuckets=sorted(todo)) as feed:
            if not all(contents.add(rows) for rows in feed.batches()):
                return False
            found = feed.positions()
        positions = found if isinstance(positions, str) else positions.merged(found)
        done |= todo
    return True


@dataclass(frozen=True, slots=True)
class Floor:
    """Up to where a vbucket must be in the tables."""

    seqno: int
    forked: bool = False  # what the tables have above it will be taken back

    def is_late(self, changed: int, row: int | None) -> bool:
        """Is it too early to judge a key that was changed at this seqno, and has a row of that?"""
        return changed > self.seqno or (self.forked and row is not None and row > self.seqno)


def floors(db: Database, committed: Committed, ids: Iterable[int] | None) -> list[Floor]:
    """By vbucket: the committed seqno; or, where the producer will roll the sync back (5.6), where it goes on from.

    ``ids`` are the collections that the sync is filtered by, None for all. To be asked after the bucket was read.
    """
    logs, highs = db.failover_logs(range(len(committed.places))), db.high_seqnos()
    purges = _purges(db)
    passed = any(place.seqno < purges.get(vbucket, 0) for vbucket, place in enumerate(committed.places))
    of_filter = [db.high_seqnos(number) for number in ids] if ids is not None and passed else None
    found = []
    for vbucket, place in enumerate(committed.places):
        high = None if of_filter is None else max((highs.get(vbucket, 0) for highs in of_filter), default=0)
        history = History(logs[vbucket], highs.get(vbucket, 0), purges.get(vbucket, 0), high)
        found.append(_floor(place, history))
    return found


def _floor(place: Place, history: History) -> Floor:
    complete = place.points[0] if place.points else 0
    if place.seqno == complete:
        end = place.seqno
    else:  # inside a snapshot, of which only a branch that is still on top can tell where it ends
        end = max(history.high_seqno, place.seqno) if history.log.uuid == place.vbuuid else SEQNO_MAX
    verdict = decide(history, Claim(place.vbuuid, place.seqno, complete, end))
    back = verdict.seqno if isinstance(verdict, RollbackTo) else place.seqno
    if place.unread is not None:
        back = min(back, place.unread)
    elif not isinstance(verdict, RollbackTo):
        return Floor(place.seqno)
    return Floor(next((point for point in place.points if point <= back), 0), forked=True)


def _purges(db: Database) -> dict[int, int]:
    """Up to where tombstones were purged; empty if the nodes do not say it to us."""
    try:
        found = db.stats("vbucket-seqno")
    except StatusError:
        return {}
    stats = ((name, text) for of_node in found.values() for name, text in of_node.items())
    return {int(name[3:].split(":")[0]): int(text) for name, text in stats if name.endswith(":purge_seqno")}
