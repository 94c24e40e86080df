"""Reports from executors to the driver that plans: which vbuckets a batch left complete or unread, and its size.

Spark has no way back from ``read()`` to the reader that plans, so tasks connect to a socket of the driver. Each attempt
sends ``begin`` before it reads and ``end`` after; an attempt that cannot send ``end`` fails. So the attempt whose rows
Spark keeps is among those that ended, and what all of them report holds: a vbucket is complete if every attempt found
it complete, and unread if any attempt did not read it.

A firewall may keep tasks from the driver. Then no report arrives, nothing is complete, and only a task that cannot read
a vbucket fails. Once a report has arrived, a task that cannot send its ``begin`` fails, and Spark retries it.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from upriver.errors import UpriverError
from upriver.spark.reader.planning import Known

TIMEOUT_S = 3.0
TRIES = 3
_LONGEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Channel:
    """How a task reaches the driver; part of the partition."""

    host: str
    port: int
    plan: str  # a secret of this batch: reports without it are ignored
    task: int
    required: bool  # a report has arrived before, so a failure to report is an error


@dataclass(slots=True)
class TaskSummary:
    """What one task reports."""

    complete: list[tuple[int, int, int]] = field(default_factory=list)  # vbucket, vbuuid, seqno
    unread: list[tuple[int, int]] = field(default_factory=list)  # vbucket, and a seqno to go back to, or below
    rows: int = 0
    size_bytes: int = 0


class DriverUnreachable(UpriverError):
    """A task cannot report to the driver what it must know; Spark retries the task."""


class Reporter:
    """Sends the reports of one task."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel
        self._attempt = secrets.token_hex(8)
        self._begun = False

    def begin(self) -> None:
        channel = self._channel
        if channel is None:
            return
        self._begun = self._send("begin", {}, TRIES)
        if channel.required and not self._begun:
            raise DriverUnreachable(
                f"cannot report to the driver at {channel.host}:{channel.port} that this task begins"
            )

    def end(self, summary: TaskSummary) -> None:
        """Send the summary; ``DriverUnreachable`` if the driver must know it and cannot be reached."""
        channel = self._channel
        if channel is None:
            return
        content = {"complete": summary.complete, "unread": summary.unread}
        sent = self._begun and self._send("end", {**content, "rows": summary.rows, "bytes": summary.size_bytes}, TRIES)
        if sent or not (self._begun or summary.unread):
            return
        what = f"that vbucket {summary.unread[0][0]} could not be read" if summary.unread else "what this task has read"
        raise DriverUnreachable(
            f"cannot report to the driver at {channel.host}:{channel.port} {what}; "
            "executors must be able to connect to it"
        )

    def _send(self, what: str, content: dict[str, Any], tries: int) -> bool:
        assert self._channel is not None
        message = {"plan": self._channel.plan, "task": self._channel.task, "attempt": self._attempt, "what": what}
        line = json.dumps(message | content).encode() + b"\n"
        return any(_deliver(self._channel.host, self._channel.port, line) for _ in range(tries))


def _deliver(host: str, port: int, line: bytes) -> bool:
    try:
        with socket.create_connection((host, port), TIMEOUT_S) as sock:
            sock.sendall(line)
            return sock.recv(2) == b"ok"
    except OSError:
        return False


class ReportServer:
    """Receives the reports in the driver, in a thread of its own."""

    def __init__(self, host: str) -> None:
        self._server = socket.create_server((host, 0))
        self.host, self.port = self._server.getsockname()[:2]
        self._lock = threading.Lock()
        self._plan = ""
        self._begun: dict[int, list[str]] = {}
        self._ended: dict[tuple[int, str], dict[str, Any]] = {}
        self._any_report = False
        self._required = False  # whether an attempt without a report cannot have ended
        self.row_bytes = 0.0  # the size of a row; 0 until the first reports
        self.rows = 0  # of the last batch
        threading.Thread(target=self._listen, name="dcp-reports", daemon=True).start()

    def open_plan(self, tasks: int) -> list[Channel]:
        """Begin a new batch; reports on older ones are ignored from now on."""
        with self._lock:
            self._plan = secrets.token_urlsafe(16)
            self._begun, self._ended, self._required = {}, {}, self._any_report
            return [Channel(self.host, self.port, self._plan, task, self._any_report) for task in range(tasks)]

    def learn(self, known: Known) -> None:
        """Add what tasks reported about the batch that has just ended."""
        with self._lock:
            ended: dict[int, list[dict[str, Any]]] = {}
            for (task, _), report in self._ended.items():
                ended.setdefault(task, []).append(report)
            alone = {task for task, attempts in self._begun.items() if len(attempts) == 1}
            surely = self._required
        for task, reports in ended.items():
            if surely or task in alone:
                found = [{(vb, (vbuuid, seqno)) for vb, vbuuid, seqno in report["complete"]} for report in reports]
                known.complete.update(set.intersection(*found))
            for vb, seqno in (left for report in reports for left in report["unread"]):
                known.unread[vb] = min(seqno, known.unread.get(vb, seqno))
        self._weigh(report for reports in ended.values() for report in reports)

    def _weigh(self, reports: Iterable[dict[str, Any]]) -> None:
        """Update the size of a row: at once when rows are larger, slowly when smaller, so a limit of bytes holds."""
        rows, size = 0, 0
        for report in reports:
            rows, size = rows + report["rows"], size + report["bytes"]
        self.rows = rows
        if not rows:
            return
        weight = size / rows
        if weight > self.row_bytes:
            trust = 1.0 if self.row_bytes == 0 else min(1.0, rows / 100)
        else:
            trust = 0.5 * min(1.0, rows / 100)
        self.row_bytes += trust * (weight - self.row_bytes)

    def close(self) -> None:
        self._server.close()

    def _listen(self) -> None:
        while True:
            try:
                sock, _ = self._server.accept()
            except OSError:
                return  # closed
            with sock, suppress(OSError, ValueError, KeyError, TypeError):
                sock.settimeout(TIMEOUT_S)
                if self._receive(json.loads(_line(sock))):
                    sock.sendall(b"ok")

    def _receive(self, message: dict[str, Any]) -> bool:
        with self._lock:
            if not secrets.compare_digest(str(message["plan"]), self._plan):
                return False
            self._any_report = True
            if message["what"] == "begin":
                attempts = self._begun.setdefault(int(message["task"]), [])
                attempts.extend(a for a in (str(message["attempt"]),) if a not in attempts)
            else:
                self._ended[int(message["task"]), str(message["attempt"])] = message
            return True


def _line(sock: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST:
        more = sock.recv(65_536)
        if not more:
            break
        data += more
    return data


def own_address(peer: str, port: int) -> str:
    """The address of this host as hosts near ``peer`` see it; nothing is sent."""
    try:
        family = socket.getaddrinfo(peer, port, type=socket.SOCK_DGRAM)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, port))
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
