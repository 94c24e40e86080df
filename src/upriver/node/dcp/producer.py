"""The producer role of a connection: the pure ``Producer`` between this connection's socket and the bucket's store.

A turn of a connection makes sends of at most 256 KiB for some milliseconds; then the loop serves the others.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from upriver.node import log
from upriver.node.dcp.soon import Soon
from upriver.protocol.producer.controls import ProducerOptions
from upriver.protocol.producer.machine import (
    SEND_BYTES,
    BackfillFailed,
    Producer,
    ProducerLimits,
    StreamChange,
    StreamGranted,
)
from upriver.protocol.roles import WrongRole
from upriver.wire import Message, OtherResponse

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.protocol.producer.stream import ProducerStream

TURN_S = 0.005
_CLUSTER_MANAGER = "@ns_server"


class ProducerRole:
    """What ``ClientConnection.dcp`` is after an OPEN as producer."""

    def __init__(self, conn: ClientConnection, bucket: NodeBucket, options: ProducerOptions) -> None:
        self.conn, self.bucket, self.name = conn, bucket, options.name
        self.created = time.time()
        self.stalled_until = 0.0  # a fault: nothing is sent before then, no noop either
        self.slow_bytes_per_s = 0  # a fault: no faster than this
        self._resume_at = 0.0
        self.schedule = Soon(conn.node.loop, self._turn)
        node = conn.node.options
        limits = ProducerLimits(
            max_streams=node.limits.max_streams, takeover_s=node.limits.takeover_s,
            upr_expirations=node.upr_expirations, ignores_pressure=conn.user == _CLUSTER_MANAGER,
        )  # fmt: skip
        live = bucket.live
        self.machine = Producer(
            live.store, live.streams, options, conn.node.producer_memory, self.schedule, self._takes_live, limits
        )
        live.roles[self.machine] = self

    @property
    def streams(self) -> dict[tuple[int, int], ProducerStream]:
        return self.machine.streams

    def receive(self, request: Message) -> None:
        """A request that the dispatcher has decoded and let through; ``StatusError`` refuses it."""
        try:
            answer = self.machine.handle(request, time.monotonic())
        except WrongRole as error:
            self.conn.close(str(error))
            return
        if answer is not None:
            self.conn.reply(request, status=answer.status, extras=answer.extras, value=answer.value)
        self._log_changes()
        if self.machine.is_ready:
            self.schedule()

    def on_response(self, response: OtherResponse) -> bool:
        """Whether the peer's answer can stand; False ends the connection."""
        return self.machine.answered(response)

    def tick(self, now: float) -> None:
        """Noops and takeovers; called by the housekeeping round, ten times a second."""
        if self.machine.wake_at <= now:
            self.machine.wake(now)
            if self.machine.is_ready:
                self.schedule()

    def close(self) -> None:
        """The connection is gone."""
        self.machine.receive_eof()
        self.schedule.cancel()
        self.bucket.live.roles.pop(self.machine, None)
        if self.bucket.dcp_connections.get(self.name) is self.conn:
            del self.bucket.dcp_connections[self.name]

    # ------------------------------------------------------------------------------------------ turns

    def _turn(self) -> None:
        now = time.monotonic()
        self.machine.wake(now)
        if self.conn.can_write and not self._must_wait(now):
            self._send(now + TURN_S, self.machine.options.priority * SEND_BYTES)

    def send_encoded(self) -> None:
        """Send what live streams have just encoded, at once; for anything else there are turns."""
        conn, machine = self.conn, self.machine
        try:
            data = machine.data_to_send()
            conn.transport.write(bytes(data) if conn.tls else data)
            if conn.can_write:
                machine.sent()
        except Exception:
            self._fail()

    def _send(self, deadline: float, budget: int) -> None:
        """Send until the time is over or so many bytes are gone."""
        conn, machine = self.conn, self.machine
        most = min(SEND_BYTES, self.slow_bytes_per_s // 10 or SEND_BYTES)
        try:
            while machine.is_ready and conn.can_write:
                data = machine.data_to_send(most)
                if data:
                    conn.transport.write(bytes(data) if conn.tls else data)  # TLS may keep what it has not encrypted
                    budget -= len(data)
                    if self.slow_bytes_per_s:
                        self._resume_at = time.monotonic() + len(data) / self.slow_bytes_per_s
                if budget <= 0 or self._resume_at or time.monotonic() > deadline:
                    break
            if conn.can_write:  # else the transport still reads it
                machine.sent()
        except Exception:
            self._fail()
            return
        self._log_changes()
        if machine.is_ready and conn.can_write:
            self.schedule()

    def _fail(self) -> None:
        """A bug of ours must not take the other connections down."""
        log.failure("producer_failed", connection=self.conn.id, name=self.name)
        self.conn.abort("internal error")

    def _takes_live(self) -> bool:
        """Whether what is encoded now can be sent at once."""
        return self.conn.can_write and not (self.stalled_until or self.slow_bytes_per_s or self._resume_at)

    def _must_wait(self, now: float) -> bool:
        """Faults: a stalled connection sends nothing, a slow one only so much."""
        until = max(self.stalled_until, self._resume_at)
        if not until:
            return False
        left = until - now
        if left <= 0:
            self.stalled_until = self._resume_at = 0.0
            return False
        self.conn.node.loop.call_later(min(left, 1.0), self.schedule)
        return True

    def _log_changes(self) -> None:
        for change in self.machine.changes():
            self._log(change)

    def _log(self, change: StreamChange) -> None:
        if isinstance(change, StreamGranted):
            log.info(
                "stream_open", connection=self.conn.id, vbucket=change.vbucket, start=change.start, end=change.end,
                flags=f"0x{change.flags:x}", sid=change.stream_id,
            )  # fmt: skip
        elif isinstance(change, BackfillFailed):
            log.warning("backfill_failed", name=self.name, vbucket=change.vbucket, reason=change.error)
        else:
            log.info("stream_closed", connection=self.conn.id, vbucket=change.vbucket, sid=change.stream_id)
