"""Consumer groups: several processes share a feed by ranges of vbuckets.

One JSON value holds the members, what each of them reads, and the positions; it is changed atomically. A member reads
a vbucket only after whoever read it before has let go of it or has gone silent, and saves positions only of what it
holds, so a member that was thought dead cannot overwrite its successor's work.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from upriver.client.checkpoints import parse
from upriver.client.positions import Positions
from upriver.errors import CheckpointError, CorruptCheckpoint, KeyExists, KeyNotFound

if TYPE_CHECKING:
    from upriver.client.blocking import Database
    from upriver.client.blocking_feed import BlockingFeed

Value = dict[str, Any]
Change = Callable[[Value], Value]


class SharedValue(Protocol):
    """A JSON object that several processes change, one at a time; empty at first."""

    def update(self, change: Change) -> Value: ...


def _loaded(text: str | bytes, where: str) -> Value:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise CorruptCheckpoint(f"{where} is not JSON ({error}); delete it to start the group again") from error
    if not isinstance(found, dict):
        raise CorruptCheckpoint(f"{where} is not a group of upriver; delete it to start the group again")
    return found


class SharedFile:
    """A file on a file system that all members see, guarded by a lock on a second one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def update(self, change: Change) -> Value:
        with self.path.with_name(self.path.name + ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            old = _loaded(self.path.read_bytes(), str(self.path)) if self.path.exists() else {}
            new = change(old)
            temporary = self.path.with_name(self.path.name + ".new")
            temporary.write_text(json.dumps(new))
            temporary.replace(self.path)
            return new


class SharedRow:
    """A row of the table ``upriver_groups`` of an SQLite database."""

    def __init__(self, path: str | Path, name: str = "default") -> None:
        self._path, self.name = str(path), name
        with closing(self._open()) as sql:
            sql.execute("CREATE TABLE IF NOT EXISTS upriver_groups (name TEXT PRIMARY KEY, value TEXT NOT NULL)")

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self._path, timeout=30, isolation_level=None)

    def update(self, change: Change) -> Value:
        with closing(self._open()) as sql:
            sql.execute("BEGIN IMMEDIATE")
            row = sql.execute("SELECT value FROM upriver_groups WHERE name = ?", (self.name,)).fetchone()
            new = change(_loaded(row[0], f"group {self.name!r}") if row else {})
            sql.execute("INSERT OR REPLACE INTO upriver_groups VALUES (?, ?)", (self.name, json.dumps(new)))
            sql.execute("COMMIT")
            return new


class SharedDocument:
    """A document of a bucket, changed with its CAS."""

    def __init__(self, database: Database, name: str = "default", collection_id: int = 0) -> None:
        self.key = f"_upriver:group:{name}"
        self._database, self._collection_id = database, collection_id

    def update(self, change: Change) -> Value:
        while True:
            try:
                found = self._database.get(self.key, self._collection_id)
                old, cas = _loaded(found.value, f"document {self.key!r}"), found.cas
            except KeyNotFound:
                old, cas = {}, 0
            new = change(old)
            try:
                self._write(json.dumps(new).encode(), cas)
            except (KeyExists, KeyNotFound):
                continue  # somebody else was quicker
            return new

    def _write(self, value: bytes, cas: int) -> None:
        if cas:
            self._database.set(self.key, value, self._collection_id, cas=cas)
        else:
            self._database.add(self.key, value, self._collection_id)


@dataclass(frozen=True, slots=True)
class Share:
    """What a member may read now."""

    vbuckets: tuple[int, ...]
    members: int


class Group:
    """One member's view of its group. ``now`` is Unix time: members compare each other's."""

    def __init__(
        self, value: SharedValue, *, member: str = "", ttl_s: float = 15.0, now: Callable[[], float] = time.time
    ) -> None:
        self.member = member or secrets.token_hex(8)
        self.ttl_s = ttl_s
        self._value, self._now = value, now
        self._held: tuple[int, ...] = ()

    def beat(self, vbuckets: int) -> Share:
        """Say that we are alive; the answer is what we may read. Call it at least every third of ``ttl_s``.

        What was held before and is not in the answer must be let go of: stop reading it, then beat again.
        """
        value = self._value.update(lambda old: self._beaten(old, vbuckets))
        self._held = tuple(value["members"][self.member]["held"])
        return Share(self._held, len(value["members"]))

    def _beaten(self, old: Value, vbuckets: int) -> Value:
        now = self._now()
        members = {
            name: dict(entry)
            for name, entry in old.get("members", {}).items()
            if name == self.member or now - entry["seen"] < self.ttl_s
        }
        members.setdefault(self.member, {"held": []})["seen"] = now
        wanted = share_of(sorted(members), self.member, vbuckets)
        taken = {vb for name, entry in members.items() if name != self.member for vb in entry["held"]}
        members[self.member]["held"] = [vb for vb in wanted if vb not in taken]
        return {**old, "members": members}

    def load(self) -> Positions | None:
        """The positions of the whole group."""
        stored = self._value.update(lambda old: old).get("positions")
        return parse(json.dumps(stored), "the group's checkpoint") if stored else None

    def save(self, positions: Positions) -> None:
        """Save the positions of what we hold; ``CheckpointError`` if the group has given it to somebody else."""
        self._value.update(lambda old: self._saved(old, positions))

    def _saved(self, old: Value, positions: Positions) -> Value:
        entry = old.get("members", {}).get(self.member)
        if entry is None:
            raise CheckpointError(f"member {self.member} was silent too long and lost its vbuckets; beat() again")
        ours = positions.only(set(entry["held"]))
        stored = parse(json.dumps(old["positions"]), "the group's checkpoint") if old.get("positions") else ours
        return {**old, "positions": stored.merged(ours).to_json()}

    def delete(self) -> None:
        """Forget the positions; the group reads from the beginning."""
        self._value.update(lambda old: {name: entry for name, entry in old.items() if name != "positions"})

    def leave(self) -> None:
        """Let go of everything at once, instead of by silence."""
        self._value.update(lambda old: {**old, "members": _without(old.get("members", {}), self.member)})
        self._held = ()


def _without(members: Value, name: str) -> Value:
    return {other: entry for other, entry in members.items() if other != name}


def share_of(members: list[str], member: str, vbuckets: int) -> range:
    """A contiguous range of vbuckets for each member, as even as can be.

    >>> [share_of(["a", "b", "c"], m, 8) for m in "abc"]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    index, count = members.index(member), len(members)
    return range(vbuckets * index // count, vbuckets * (index + 1) // count)


def read_as_member(db: Database, group: Group, **read: Any) -> Iterator[tuple[BlockingFeed, Any]]:
    """Batches of our share of the feed, for ever; call ``feed.confirm()`` when done with what was given.

    When the shares change, the feed is closed after its position was saved as far as it was confirmed, and another is
    opened; the caller only sees a different ``feed`` object.
    """
    total, idle_s = db.topology.vbuckets, group.ttl_s / 3
    try:
        while True:
            share = group.beat(total)
            if not share.vbuckets:
                time.sleep(idle_s / 4)
                continue
            with db.feed(checkpoint=group, vbuckets=share.vbuckets, **read) as feed:
                yield from _until_changed(feed, group, share, total, idle_s)
    finally:
        group.leave()


def _until_changed(
    feed: BlockingFeed, group: Group, share: Share, total: int, every_s: float
) -> Iterator[tuple[BlockingFeed, Any]]:
    beat_at = time.monotonic() + every_s
    while True:
        for batch in feed.batches(idle_s=every_s):
            yield feed, batch
            if time.monotonic() >= beat_at:
                break
        if time.monotonic() >= beat_at:
            beat_at = time.monotonic() + every_s
            if group.beat(total).vbuckets != share.vbuckets:
                return
