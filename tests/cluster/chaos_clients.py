"""The clients of the chaos test: writers that remember what they were told, and a reader that follows the feed."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, NamedTuple

from upriver.client._requests.connections import converse
from upriver.client.blocking import Database, connect
from upriver.client.changes import Deletion, Mutation, RolledBack
from upriver.errors import ConnectFailed, Status, StatusError, UpriverError
from upriver.model import vbucket_of
from upriver.net.conversation import Conversation
from upriver.protocol.position import Position
from upriver.protocol.topology import Address
from upriver.wire.constants import RequestFrameId
from upriver.wire.framing import FrameInfo
from upriver.wire.message import Message, Response
from upriver.wire.messages import kv

GIVE_UP_S = 2.5
REST_S = 0.004  # longest pause of a writer between two writes, so that nodes can do other work
KEYS = 60
_AGAIN = (Status.NOT_MY_VBUCKET, Status.ETMPFAIL, Status.SYNC_WRITE_IN_PROGRESS, Status.DURABILITY_IMPOSSIBLE)


class Outcome(Enum):
    ACKNOWLEDGED = auto()
    NOT_DONE = auto()  # refused, without any effect
    UNKNOWN = auto()


class Write(NamedTuple):
    """One write of a key; ``value`` None deletes. Level 0 is not durable."""

    value: bytes | None
    level: int
    outcome: Outcome
    flags: int = 0
    expiry: int = 0


class Client:
    """Connections to the nodes; retries until it finds the owner of a key."""

    def __init__(self, connection_string: str, timeout_s: float = 2.0) -> None:
        self._database: Database = connect(connection_string, connect_timeout_s=1.0, request_timeout_s=timeout_s)
        self._connections: dict[Address, Conversation] = {}

    def send(self, key: bytes, message: Message) -> tuple[Outcome, Response | None]:
        """The outcome of a request; it is unknown if the connection breaks before the answer."""
        deadline = time.monotonic() + GIVE_UP_S
        while time.monotonic() < deadline:
            connection = self._connection(key)
            if connection is None:
                continue
            try:
                response = connection.ask([message])[0]
            except UpriverError:
                self._drop(connection)
                return Outcome.UNKNOWN, None
            if response.status in _AGAIN:
                self._look_again()
            elif response.status == Status.SYNC_WRITE_AMBIGUOUS:
                return Outcome.UNKNOWN, response
            else:
                return Outcome.ACKNOWLEDGED, response
        return Outcome.NOT_DONE, None

    def _connection(self, key: bytes) -> Conversation | None:
        topology = self._database.topology
        address = topology.active(vbucket_of(key, topology.vbuckets))
        try:
            if address is not None and address not in self._connections:
                self._connections[address] = converse(address, self._database.options)
        except ConnectFailed:
            address = None
        if address is None:
            self._look_again()
            return None
        return self._connections[address]

    def _drop(self, connection: Conversation) -> None:
        self._connections.pop(connection.address, None)
        connection.close()

    def _look_again(self) -> None:
        time.sleep(0.02)
        try:
            self._database.refresh()
        except UpriverError:
            time.sleep(0.05)

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._database.close()


class Writer(threading.Thread):
    """Writes its own keys, one at a time, and retires a key whose value it no longer knows."""

    def __init__(self, connection_string: str, seed: int, number: int) -> None:
        super().__init__(daemon=True)
        self._client = Client(connection_string)
        self._random = random.Random(f"{seed}/{number}")
        self._number = number
        self._stopping = threading.Event()
        self._serial = 0
        self.writes: dict[bytes, list[Write]] = {}
        self.counts: dict[bytes, Counter[Outcome]] = {}
        self.outcomes: Counter[tuple[int, str]] = Counter()
        self.longest_s = 0.0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                self._step()
                self.longest_s = max(self.longest_s, time.monotonic() - began)
        except BaseException as error:
            self.failure = error
        finally:
            self._client.close()

    def stop(self) -> None:
        self._stopping.set()
        self.join(30)

    def _step(self) -> None:
        time.sleep(self._random.uniform(0, REST_S))
        level = self._random.choice((0, 0, 0, 0, 1, 1, 2, 3))
        if self._random.random() < 0.15:
            self._count(level or 1)
            return
        key = self._a_key()
        history = self.writes[key]
        exists = bool(history) and history[-1].value is not None
        if exists and self._random.random() < 0.2:
            self._write(key, None, level)
        else:
            self._serial += 1
            self._write(key, b'{"w":%d,"n":%d,"pad":"%s"}' % (self._number, self._serial, b"x" * 40), level)

    def _a_key(self) -> bytes:
        """A key whose last write has a known outcome; a new key replaces each retired one."""
        known = [key for key, done in self.writes.items() if not done or done[-1].outcome is not Outcome.UNKNOWN]
        if len(known) < KEYS:
            key = b"w%d-%d" % (self._number, len(self.writes))
            self.writes[key] = []
            return key
        return self._random.choice(known)

    def _write(self, key: bytes, value: bytes | None, level: int) -> None:
        infos = _durability(level)
        wire_key = b"\0" + key
        flags = expiry = 0
        message: Message
        if value is None:
            message = kv.Delete(wire_key, frame_infos=infos)
        else:
            flags, expiry = self._random.getrandbits(32), self._random.choice((0, 3_000_000_000 + self._serial))
            message = kv.Set(flags, expiry, wire_key, value, frame_infos=infos)
        message.vbucket = self._vbucket(key)  # type: ignore[misc]
        outcome, response = self._client.send(key, message)
        if response is not None and response.status == Status.KEY_ENOENT and value is None:
            outcome = Outcome.ACKNOWLEDGED  # an earlier write that was not durable was lost; the key is gone, as wanted
        elif outcome is Outcome.ACKNOWLEDGED and response is not None and response.status != Status.SUCCESS:
            raise AssertionError(f"{key!r}: status 0x{response.status:02x}")
        self.outcomes[level, outcome.name] += 1
        if outcome is not Outcome.NOT_DONE:
            self.writes[key].append(Write(value, level, outcome, flags, expiry))

    def _count(self, level: int) -> None:
        key = b"c%d-%d" % (self._number, self._random.randrange(4))
        message = kv.Counter(1, 1, 0, b"\0" + key, frame_infos=_durability(level))
        message.vbucket = self._vbucket(key)  # type: ignore[misc]
        outcome, response = self._client.send(key, message)
        if outcome is Outcome.ACKNOWLEDGED and response is not None and response.status != Status.SUCCESS:
            raise AssertionError(f"{key!r}: status 0x{response.status:02x}")
        self.counts.setdefault(key, Counter())[outcome] += 1

    def _vbucket(self, key: bytes) -> int:
        return vbucket_of(key, self._client._database.topology.vbuckets)


def _durability(level: int) -> tuple[FrameInfo, ...]:
    return (FrameInfo(RequestFrameId.DURABILITY, bytes((level, 0x04, 0xB0))),) if level else ()  # 1,200 ms


class Row(NamedTuple):
    """A version of a document; ``time`` is when it expires, or when it was deleted."""

    value: bytes | None
    cas: int
    rev_seqno: int
    flags: int
    time: int
    seqno: int


class Reader(threading.Thread):
    """Follows the change feed as a table would: a rollback undoes the changes above its seqno.

    With ``stays_s`` it leaves again and again after so long, and comes back with the positions that it had.
    """

    def __init__(self, connection_string: str, stays_s: float = float("inf")) -> None:
        super().__init__(daemon=True)
        self._connection_string, self._stays_s = connection_string, stays_s
        self._stopping = threading.Event()
        self.changes: dict[int, list[tuple[bytes, Row]]] = {}
        self.rollbacks = 0
        self.visits = 0
        self.failure: BaseException | None = None
        self.highs: dict[int, int] = {}
        self.behind: dict[int, int] = {}

    def run(self) -> None:
        try:
            with connect(
                self._connection_string, connect_timeout_s=1.0, request_timeout_s=3.0, noop_interval_s=1.0
            ) as database:
                positions: Any = "beginning"
                while not self._stopping.is_set() or self.behind:
                    positions = self._visit(database, positions)
        except BaseException as error:
            self.failure = error

    def _visit(self, database: Database, positions: Any) -> Any:
        """Read the feed once; returns the position reached."""
        try:
            feed = database.changes(start=positions).__enter__()
        except (ConnectFailed, StatusError):  # no node can be read from just now
            time.sleep(0.05)
            return positions
        until = time.monotonic() + self._stays_s
        self.visits += 1
        with feed:
            while not self._done(feed.positions()) and time.monotonic() < until:
                for change in feed.items(idle_s=0.1):
                    self._take(change)
                    if time.monotonic() > until:
                        break
            return feed.positions()

    def _take(self, change: object) -> None:
        if isinstance(change, RolledBack):
            self.rollbacks += 1
            kept = self.changes.get(change.vbucket, [])
            self.changes[change.vbucket] = [each for each in kept if each[1].seqno <= change.to_seqno]
        elif isinstance(change, Mutation):
            row = Row(change.value, change.cas, change.rev_seqno, change.flags, change.expiry, change.seqno)
            self.changes.setdefault(change.vbucket, []).append((change.key, row))
        elif isinstance(change, Deletion):
            row = Row(None, change.cas, change.rev_seqno, 0, change.delete_time, change.seqno)
            self.changes.setdefault(change.vbucket, []).append((change.key, row))

    def _done(self, positions: Mapping[int, Position]) -> bool:
        self.behind = {vb: high for vb, high in self.highs.items() if positions[vb].seqno < high}
        return self._stopping.is_set() and not self.behind

    def catch_up(self, timeout_s: float = 30.0) -> None:
        """Read up to the cluster's current high seqnos, then stop."""
        with connect(self._connection_string) as database:
            self.highs = {vb: high for vb, high in database.high_seqnos().items() if high}
        self.behind = dict(self.highs)
        self._stopping.set()
        self.join(timeout_s)

    def table(self) -> dict[tuple[int, bytes], Row]:
        """The newest version of every key, by vbucket and key."""
        return {(vb, key): row for vb, changes in self.changes.items() for key, row in changes}
