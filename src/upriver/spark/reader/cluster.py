"""What the driver asks the cluster: high seqnos, failover logs, the cluster map; retried until it answers.

Spark does not retry a reader that raises. So network errors, restarts and failovers are waited out here, up to
``timeoutSeconds``; then one error says what was tried and why it failed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from upriver.client._requests.operations import Ask, Operation
from upriver.client.blocking import Database
from upriver.client.options import redacted
from upriver.errors import ConnectFailed, RemoteProtocolError, StatusError, UpriverError, is_retryable
from upriver.model import FailoverLog, VbucketState
from upriver.protocol.topology import Address, Topology
from upriver.spark.options import ConnectionOptions
from upriver.wire.messages.cluster import GetAllVbSeqnos, GetAllVbSeqnosResponse

T = TypeVar("T")
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0


def patiently(attempt: Callable[[], T], what: str, timeout_s: float, close: Callable[[], None] = lambda: None) -> T:
    """The result of ``attempt``, retried while the cluster is in trouble; ``close`` drops its connections."""
    deadline = time.monotonic() + timeout_s
    pause = FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except (UpriverError, OSError) as error:
            close()
            if not (is_retryable(error) or isinstance(error, RemoteProtocolError)):
                raise
            if time.monotonic() + pause > deadline:
                waited = f"gave up after {timeout_s:.0f} s (timeoutSeconds)"
                raise ConnectFailed(f"cannot {what}: {error}; {waited}") from error
        time.sleep(pause)
        pause = min(LONGEST_PAUSE_S, pause * 2)


class Cluster:
    """Questions to one bucket, for as long as a reader lives; connects at the first one."""

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self._database: Database | None = None
        self._complete_at = time.monotonic()
        self._was_connected = False  # a bucket that is missing later belongs to a node that restarts

    def ask(self, question: Callable[[Database], T], what: str) -> T:
        """The answer to a question, asked again on a new connection while the cluster is in trouble."""
        options = self.options
        return patiently(
            lambda: question(self._connected()), f"{what} of {redacted(options.connection)}",
            options.timeout_seconds, self.close,
        )  # fmt: skip

    def _connected(self) -> Database:
        if self._database is None:
            self._database = Database(self.options.connect_options(), again=self._was_connected)
            self._was_connected = True
        return self._database

    def close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def topology(self) -> Topology:
        return self.ask(lambda db: db.topology, "read the cluster map")

    def highs(self) -> dict[int, int]:
        """The high seqno of every active vbucket."""
        return self.ask(lambda db: db.high_seqnos(), "read the high seqnos")

    def reachable_highs(self) -> dict[int, int]:
        """The high seqnos of the nodes that answer: while one is down, a stream continues with the others.

        A node that is down for longer than ``timeoutSeconds`` without being failed over is an error.
        """
        return self.ask(self._reachable_highs, "read the high seqnos")

    def _reachable_highs(self, database: Database) -> dict[int, int]:
        topology, found, trouble = database.topology, {}, None
        for address in topology.serving:
            try:
                found.update(database.run(_highs_at(address)))
            except ConnectFailed as error:
                trouble = error
        now = time.monotonic()
        if trouble is None:
            self._complete_at = now
            if topology.owned() - found.keys():
                self._refresh_map(database)  # vbuckets moved: nodes report only those that they own
            return found
        if not found or now - self._complete_at > self.options.timeout_seconds:
            raise trouble
        self._refresh_map(database)
        return found

    def _refresh_map(self, database: Database) -> None:
        try:
            database.refresh()
        except ConnectFailed:
            self.close()

    def matching(self, collections: Iterable[int]) -> dict[int, int] | None:
        """The high seqno of these collections in each vbucket; None if the nodes do not say."""
        found: dict[int, int] = {}
        try:
            for number in collections:
                db = self._connected()
                for vb, seqno in db.run(db.operations.high_seqnos(number, complete=False)).items():
                    found[vb] = max(seqno, found.get(vb, 0))
        except (StatusError, ConnectFailed, RemoteProtocolError, OSError):
            return None
        return found

    def logs(self, vbuckets: Iterable[int]) -> dict[int, FailoverLog]:
        wanted = list(vbuckets)
        return self.ask(lambda db: db.failover_logs(wanted), "read the failover logs") if wanted else {}

    def manifest(self) -> dict[str, Any]:
        """The scopes and collections."""
        return self.ask(lambda db: db.manifest(), "read the collections")

    def _stats(self, group: str) -> list[dict[str, str]]:
        """Statistics of every node; none if they do not say."""
        try:
            return list(self._connected().stats(group).values())
        except (StatusError, ConnectFailed, RemoteProtocolError, OSError):
            self.close()
            return []

    def row_bytes(self) -> float:
        """About how many bytes a document has, by what all of them take on disk or in memory; 0 if unknown."""
        items, size = 0, 0
        for found in self._stats(""):
            with suppress(KeyError, ValueError):
                items += int(found["curr_items_tot"])
                # Recent writes are not on disk yet, and old ones are not in memory.
                size += max(int(found.get("ep_db_data_size") or found["ep_db_file_size"]), int(found["mem_used"]))
        return size / items if items else 0.0

    def purges(self) -> dict[int, int]:
        """The purge seqno of each vbucket; empty if the nodes do not say, which only costs time."""
        texts = {name: text for of_node in self._stats("vbucket-seqno") for name, text in of_node.items()}
        return {int(name[3:].split(":")[0]): int(text) for name, text in texts.items() if name.endswith(":purge_seqno")}


def _highs_at(address: Address) -> Operation[dict[int, int]]:
    answers = yield Ask(address, [GetAllVbSeqnos(VbucketState.ACTIVE)])
    if not isinstance(answers[0], GetAllVbSeqnosResponse):
        raise StatusError.of(answers[0].status, f"high seqnos at {address}")
    return {entry.vbucket: entry.seqno for entry in answers[0].seqnos}
