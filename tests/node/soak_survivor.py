"""A reader that runs for the whole soak: it loses its connection now and then, resumes, and must miss nothing."""

from __future__ import annotations

import random
import threading
import time
import traceback
from dataclasses import dataclass, field

from tests.node.raw import ALL, Raw, ready
from tests.node.soak_clients import VBUCKETS, expect, next_message, open_producer
from upriver.model import Datatype
from upriver.wire.constants import OpenFlag
from upriver.wire.messages import cluster, dcp, events
from upriver.wire.messages.dcp import SnapshotMarker
from upriver.wire.values import inflate, split_xattrs

Contents = dict[int, dict[bytes, bytes]]


@dataclass
class Place:
    """Where one vbucket's stream is, as a resume point."""

    vbuuid: int = 0
    seqno: int = 0
    snap_start: int = 0
    snap_end: int = 0

    def request(self, vbucket: int) -> dcp.StreamRequest:
        # Between two snapshots, or before the first change of the new one, there is no partial snapshot to claim.
        inside = self.snap_start <= self.seqno < self.snap_end
        start, end = (self.snap_start, self.snap_end) if inside else (self.seqno, self.seqno)
        return dcp.StreamRequest(
            vbucket=vbucket, start_seqno=self.seqno, vbuuid=self.vbuuid, snap_start_seqno=start, snap_end_seqno=end
        )


@dataclass
class Survivor(threading.Thread):
    """Keeps the documents of the streams; ``reconnects`` counts how often it had to resume."""

    port: int
    seed: int
    lives_s: float  # average time between disconnects; 0: none
    controls: dict[str, bytes] = field(default_factory=dict)
    contents: Contents = field(default_factory=lambda: {vbucket: {} for vbucket in range(VBUCKETS)})
    places: dict[int, Place] = field(default_factory=lambda: {vbucket: Place() for vbucket in range(VBUCKETS)})
    reconnects: int = 0
    changes: int = 0
    failure: str = ""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self.finish_at: dict[int, int] | None = None  # the seqnos to reach, once writing has stopped
        self._chance = random.Random(self.seed)

    __hash__ = threading.Thread.__hash__

    def run(self) -> None:
        try:
            while not self._is_finished:
                self._live()
        except Exception as error:
            self.failure = f"survivor {self.seed}: {error!r}\n{traceback.format_exc(limit=-3)}"

    @property
    def _is_finished(self) -> bool:
        goal = self.finish_at
        return goal is not None and all(self.places[vbucket].seqno >= seqno for vbucket, seqno in goal.items())

    def _live(self) -> None:
        until = time.monotonic() + (self._chance.expovariate(1 / self.lives_s) if self.lives_s else 1e9)
        with ready(self.port, *ALL) as raw:
            self._learn_branches(raw)
            open_producer(raw, OpenFlag.INCLUDE_XATTRS, set_noop_interval=b"0.2", **self.controls)
            raw.send(*[place.request(vbucket) for vbucket, place in self.places.items()])
            while not self._is_finished and time.monotonic() < until:
                self._take(next_message(raw))  # noops come often enough to check the clock
        self.reconnects += 1

    def _learn_branches(self, raw: Raw) -> None:
        for vbucket, place in self.places.items():
            value = raw.ask(cluster.GetFailoverLog(vbucket=vbucket)).value
            uuid = int.from_bytes(value[:8], "big")
            expect(place.vbuuid in (0, uuid), "the branch changed although nothing failed over")
            place.vbuuid = uuid

    def _take(self, message: object) -> None:
        if isinstance(message, SnapshotMarker):
            place = self.places[message.vbucket]
            place.snap_start, place.snap_end = message.start_seqno, message.end_seqno
        elif isinstance(message, dcp.DcpMutation | dcp.DcpDeletion | events.SystemEvent | dcp.SeqnoAdvanced):
            place = self.places[message.vbucket]
            expect(place.seqno < message.by_seqno <= place.snap_end, f"{message.by_seqno} does not follow {place}")
            place.seqno = message.by_seqno
            self._keep(message)
        elif message is not None:
            expect(False, f"unexpected {message!r:.100}")

    def _keep(self, message: object) -> None:
        self.changes += 1
        if isinstance(message, dcp.DcpMutation):
            self.contents[message.vbucket][message.key] = body_of(message.datatype, message.value)
        elif isinstance(message, dcp.DcpDeletion):
            self.contents[message.vbucket].pop(message.key, None)


def body_of(datatype: int, value: bytes) -> bytes:
    value = inflate(value) if datatype & Datatype.SNAPPY else value
    return split_xattrs(value)[1] if datatype & Datatype.XATTR else value
