"""Consumer groups: several processes share a feed by ranges of vbuckets.

One ``SharedValue`` holds the members, the vbuckets of each, and the positions. A member reads a vbucket only after its
previous reader has released it or has been silent for too long. It saves positions only of vbuckets that it still
holds, so a member that was taken for dead cannot overwrite its successor's work. Clocks of two machines are never
compared.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Unpack

from upriver.client.checkpoints import parse
from upriver.client.positions import Positions
from upriver.client.shared_values import SharedDocument, SharedFile, SharedRow, SharedValue, Value
from upriver.errors import CheckpointError, ForeignCheckpoint

if TYPE_CHECKING:
    import pyarrow as pa

    from upriver.client._feed.blocking_feed import ChangeFeed
    from upriver.client.blocking import Database
    from upriver.client.reading import FeedKeywords

__all__ = ["Group", "Share", "SharedDocument", "SharedFile", "SharedRow", "SharedValue", "read_as_member", "share_of"]


@dataclass(frozen=True, slots=True)
class Share:
    """The vbuckets that a member may read now.

    If ``term`` changes, the group has expelled the member in between: it must continue from the saved positions.
    """

    vbuckets: tuple[int, ...]
    members: int
    term: str = ""


class Group:
    """One member of a group of readers, and the store of their positions: a ``CheckpointStore``.

    A member is alive while its count of beats grows; every other member measures that with its own clock. A member
    that is silent for ``ttl_s`` loses its vbuckets. Without a ``member`` name it gets a unique one.
    """

    def __init__(
        self, value: SharedValue, *, member: str = "", ttl_s: float = 15.0, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.member = member or secrets.token_hex(8)
        self.ttl_s = ttl_s
        self._value, self._now = value, now
        self._term = ""  # of our entry; an entry with another term is not ours
        self._held: tuple[int, ...] = ()
        self._heard: dict[str, tuple[Any, float]] = {}  # the last beat of each other member, and when we saw it

    @property
    def expelled(self) -> bool:
        """Whether the group has given our vbuckets to others, as far as we know; ``beat`` joins again."""
        return not self._term

    def beat(self, vbuckets: int) -> Share:
        """Tell the group that we are alive; returns what we may read. Call it at least every third of ``ttl_s``.

        Stop reading vbuckets that are no longer in the share, then beat again: only then do others get them.
        """
        term = secrets.token_hex(8)
        value = self._value.update(lambda old: self._beaten(old, vbuckets, term))
        entry = value["members"][self.member]
        self._term, self._held = entry["term"], tuple(entry["share"])
        return Share(self._held, len(value["members"]), self._term)

    def _beaten(self, old: Value, vbuckets: int, new_term: str) -> Value:
        now = self._now()
        members = {
            name: dict(entry)
            for name, entry in old.get("members", {}).items()
            if name == self.member or self._is_alive(name, entry, now)
        }
        mine = members[self.member] = self._entry(members.get(self.member), new_term)
        taken = {vb for name, entry in members.items() if name != self.member for vb in entry["held"]}
        share = [vb for vb in share_of(sorted(members), self.member, vbuckets) if vb not in taken]
        still_read = [vb for vb in mine["held"] if vb in self._held and vb not in share]
        members[self.member] = {**mine, "beats": mine["beats"] + 1, "share": share, "held": share + still_read}
        return {**old, "members": members}

    def _entry(self, mine: Value | None, new_term: str) -> Value:
        """Our entry, or a new one if we were expelled or take over the name of a dead process."""
        if mine is not None and mine["term"] == self._term:
            return mine
        if mine is not None and self._term:
            raise CheckpointError(f"another process has joined the group as {self.member!r}; give each its own name")
        return {"term": new_term, "beats": 0, "ttl_s": self.ttl_s, "held": []}

    def _is_alive(self, name: str, entry: Value, now: float) -> bool:
        beat = entry["term"], entry["beats"]
        if self._heard.get(name, (None, 0.0))[0] != beat:
            self._heard[name] = beat, now
        return bool(now - self._heard[name][1] < entry["ttl_s"])

    def load(self) -> Positions | None:
        """The positions of the whole group."""
        stored = self._value.update(lambda old: old).get("positions")
        return parse(json.dumps(stored), "the group's checkpoint") if stored else None

    def save(self, positions: Positions) -> None:
        """Save the positions of our vbuckets; ``CheckpointError`` if the group has given them to another member."""
        try:
            self._value.update(lambda old: self._saved(old, positions))
        except _Expelled:
            self._term, self._held = "", ()
            raise

    def _saved(self, old: Value, positions: Positions) -> Value:
        members = old.get("members", {})
        entry = members.get(self.member)
        if entry is None or entry["term"] != self._term:
            raise _Expelled(f"member {self.member} was silent too long and lost its vbuckets; beat() again")
        ours = positions.only(set(entry["held"]))
        stored = parse(json.dumps(old["positions"]), "the group's checkpoint") if old.get("positions") else ours
        if stored.bucket_uuid != ours.bucket_uuid:
            raise ForeignCheckpoint("the group reads another bucket; give this one a group of its own")
        alive = {**members, self.member: {**entry, "beats": entry["beats"] + 1}}
        return {**old, "members": alive, "positions": stored.merged(ours).to_json()}

    def delete(self) -> None:
        """Forget the positions; the group reads from the beginning."""
        self._value.update(lambda old: {name: entry for name, entry in old.items() if name != "positions"})

    def leave(self) -> None:
        """Leave the group and release our vbuckets now, instead of after ``ttl_s``."""
        self._value.update(self._left)
        self._term, self._held = "", ()

    def _left(self, old: Value) -> Value:
        members = old.get("members", {})
        return {**old, "members": {n: e for n, e in members.items() if n != self.member or e["term"] != self._term}}


class _Expelled(CheckpointError):
    """The group has given our vbuckets to others."""


def share_of(members: list[str], member: str, vbuckets: int) -> range:
    """The member's range of vbuckets; all ranges are contiguous and about equal.

    >>> [share_of(["a", "b", "c"], m, 8) for m in "abc"]
    [range(0, 2), range(2, 5), range(5, 8)]
    """
    index, count = members.index(member), len(members)
    return range(vbuckets * index // count, vbuckets * (index + 1) // count)


def read_as_member(
    db: Database, group: Group, **options: Unpack[FeedKeywords]
) -> Iterator[tuple[ChangeFeed[pa.RecordBatch], pa.RecordBatch]]:
    """Batches of our share of the bucket, for ever, each with its feed; call ``feed.confirm()`` when done with one.

    When the shares change, the feed is closed and a new one is opened at the confirmed positions; the caller only sees
    a different ``feed`` object. A caller that takes longer than ``ttl_s`` for a batch loses its vbuckets, and
    ``confirm`` raises ``CheckpointError``; it may continue with the next batch, from a new feed. Leaving the loop
    leaves the group. The options are those of ``change_batches``, without ``checkpoint`` and ``vbuckets``.
    """
    total, idle_s = db.topology.vbuckets, group.ttl_s / 3
    try:
        while True:
            share = group.beat(total)
            if not share.vbuckets:
                time.sleep(idle_s / 4)
                continue
            mine: FeedKeywords = {**options, "checkpoint": group, "vbuckets": share.vbuckets}
            with db.change_batches(**mine) as feed:
                yield from _until_changed(feed, group, share, total, idle_s)
    finally:
        group.leave()


def _until_changed(
    feed: ChangeFeed[pa.RecordBatch], group: Group, share: Share, total: int, every_s: float
) -> Iterator[tuple[ChangeFeed[pa.RecordBatch], pa.RecordBatch]]:
    beat_at = time.monotonic() + every_s
    while True:
        for batch in feed.items(idle_s=every_s):
            yield feed, batch
            if group.expelled or time.monotonic() >= beat_at:
                break
        if group.expelled:
            return
        if time.monotonic() >= beat_at:
            beat_at = time.monotonic() + every_s
            now = group.beat(total)
            if (now.vbuckets, now.term) != (share.vbuckets, share.term):
                return
