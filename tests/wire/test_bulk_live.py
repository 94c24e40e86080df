"""New snapshots of many vbuckets for all live streams at once: the object encoder's frames, all or none."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.wire.test_bulk_encode import by_objects, cut, mutations, options, runs
from upriver.wire.bulk.decode import address_of
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, SendBuffer
from upriver.wire.bulk.live import LiveBatch, LiveProgress, LiveSnapshot, LiveTable
from upriver.wire.messages import dcp
from upriver.wire.packed import SUPERSEDED

VBUCKETS = 8
MARKER, ADVANCED = 44, 32  # sizes of the frames around the documents


class Snapshot(NamedTuple):
    """A new snapshot of one vbucket, and the live stream that gets it."""

    run: bytes
    begins: bool
    options: FrameOptions | None  # None: no live stream
    advance: bool
    ends_here: bool
    replica: bool

    @property
    def last(self) -> int:
        return max((head.seqno for _, head, _, _ in cut(self.run)), default=1)

    def frames(self, window: int, room: int) -> list[bytes] | str:
        """The frames by objects, with the marker; or "full" if the room is too small, or "left out"."""
        assert self.options is not None
        found, size = by_objects(self.run, self.options, 0, self.last), MARKER + 17 * self.replica
        for frame in found:
            if isinstance(frame, int) or size >= window:
                return "left out"
            if size + len(frame) + ADVANCED > room:  # room for a SEQNO_ADVANCED is always reserved
                return "full"
            size += len(frame)
        documents = [frame for frame in found if isinstance(frame, bytes)]
        if not documents:
            return "left out" if self.advance and self.options.collection_ids is None else []
        sent = int.from_bytes(documents[-1][24:32], "big")
        end = self.last if self.advance else sent
        if end != sent and size >= window:
            return "left out"
        alive = [head.seqno for _, head, _, _ in cut(self.run) if not head.kind & SUPERSEDED]
        names = {"vbucket": self.options.vbucket, "opaque": self.options.opaque}
        start = min(1 if self.begins else alive[0], end)
        span = start, end, 5 if self.begins else 1
        made = dcp.SnapshotMarker(*span, **names).encode()
        if self.replica:
            made = dcp.SnapshotMarkerV20(0, *span, self.last, 0, **names).encode()
        return [made, *documents, *([dcp.SeqnoAdvanced(end, **names).encode()] if end != sent else [])]


plain = st.integers(1, 4).map(mutations)  # the usual case
snapshots = st.builds(
    Snapshot, st.one_of(plain, plain, runs()), st.booleans(),
    st.one_of(st.none(), st.just(FrameOptions()), options.map(lambda each: replace(each, stream_id=0))), st.booleans(),
    st.booleans(), st.booleans(),
)  # fmt: skip


def expected(given: list[Snapshot], window: int, room: int) -> tuple[bytes, int, list[int], list[int]]:
    """(bytes, rows done, left out, finished), by the rules, row by row."""
    out, left_out, finished = b"", [], []
    for row, snapshot in enumerate(given):
        if snapshot.options is None:
            continue
        if window <= 0:
            return out, row, left_out, finished
        frames = snapshot.frames(window, room - len(out))
        if frames == "full" and out:
            return out, row, left_out, finished
        if isinstance(frames, str):
            left_out.append(row)
            continue
        out += b"".join(frames)
        window -= sum(map(len, frames))
        if snapshot.ends_here:
            finished.append(row)
    return out, len(given), left_out, finished


@settings(deadline=None, max_examples=examples(300))
@given(
    given=st.lists(snapshots, min_size=1, max_size=VBUCKETS), window=st.one_of(st.just(10**9), st.integers(1, 3000)),
    room=st.one_of(st.just(1 << 17), st.integers(200, 3000)),
)  # fmt: skip
def test_each_live_stream_gets_its_whole_snapshot_or_nothing(given: list[Snapshot], window: int, room: int):
    given = [
        snapshot._replace(options=snapshot.options and replace(snapshot.options, vbucket=row))
        for row, snapshot in enumerate(given)
    ]
    followers, out, kept = LiveTable(VBUCKETS), SendBuffer(room), []
    rows = []
    for row, snapshot in enumerate(given):
        memory = np.frombuffer(snapshot.run or b"\0", np.uint8)
        encoder = PackedEncoder(snapshot.options) if snapshot.options else None
        kept.append((memory, encoder))
        start, flags = (1, 5) if snapshot.begins else (0, 1)
        rows.append(LiveSnapshot(row, 1, snapshot.last, start, flags, address_of(memory), len(snapshot.run)))
        if encoder is not None and snapshot.options is not None:
            followers.add(
                row, encoder, snapshot.last if snapshot.ends_here else 2**64 - 1, can_advance=snapshot.advance,
                is_filtered=snapshot.options.collection_ids is not None, is_replica=snapshot.replica,
            )  # fmt: skip
    news = LiveBatch(rows)
    done, records = followers.encode(news, 0, out, window)
    wanted, wanted_done, left_out, finished = expected(given, window, room)
    assert bytes(out.view()) == wanted
    assert done == wanted_done
    assert followers.left_out(news, done) == (left_out, finished)
    documents = [frame for frame in cut_frames(wanted) if frame[1] in (0x57, 0x58, 0x59)]
    assert records == len(documents)
    for row in range(len(given)):
        own = [frame for frame in documents if int.from_bytes(frame[6:8], "big") == row]
        last = int.from_bytes(own[-1][24:32], "big") if own else 0
        advanced = given[row].last if own and given[row].advance and last != given[row].last else 0
        assert followers.progress(row) == LiveProgress(len(own), last, advanced)
        assert followers.progress(row) == LiveProgress(
            len(own), last, advanced
        )  # reading the progress does not change it


def cut_frames(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        size = 24 + int.from_bytes(data[at + 8 : at + 12], "big")
        found.append(data[at : at + size])
        at += size
    return found


def test_a_muted_stream_gets_nothing_more():
    run = np.frombuffer(mutations(1), np.uint8)
    news = LiveBatch([LiveSnapshot(1, 1, 1, 0, 1, address_of(run), len(run))])
    followers, out, encoder = LiveTable(2), SendBuffer(), PackedEncoder(FrameOptions(vbucket=1))
    followers.add(1, encoder, 2**64 - 1, can_advance=False, is_filtered=False)
    assert followers.encode(news, 0, out, 10**9) == (1, 1)
    used = out.used
    followers.mute(1)
    assert followers.encode(news, 0, out, 10**9) == (1, 0)
    assert out.used == used > 0
