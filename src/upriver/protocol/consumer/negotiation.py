"""What a consumer asks of a producer before its first stream: one control at a time, in a fixed order.

See docs/protocol/consumer.md#negotiation.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from upriver.errors import Status
from upriver.protocol.roles import WrongRole
from upriver.protocol.session import KV_FEATURES
from upriver.wire.constants import Feature
from upriver.wire.messages.session import Hello


def replication_hello(agent: str) -> Hello:
    """HELLO for both ends of a replication connection. Values stay compressed, so replicas are equal to the byte."""
    return Hello(f'{{"a":"{agent}"}}'.encode(), (*KV_FEATURES, Feature.SNAPPY))


@dataclass(frozen=True, slots=True)
class ConsumerOptions:
    """How a node consumes."""

    window: int = 10 * 1024 * 1024
    consumer_name: str = ""  # if set, durable writes are replicated and acknowledged
    noop_interval_s: float = 1.0
    collections: bool = True
    datatypes: int = 7

    def controls(self) -> list[tuple[str, str]]:
        """The controls to ask for, in the order of docs/protocol/consumer.md#negotiation."""
        durable = [("enable_sync_writes", "true"), ("consumer_name", self.consumer_name)] if self.consumer_name else []
        return [
            ("enable_noop", "true"),
            ("set_noop_interval", f"{self.noop_interval_s:f}"),
            ("set_priority", "high"),
            ("supports_cursor_dropping_vulcan", "true"),
            ("supports_hifi_MFU", "true"),
            ("send_stream_end_on_client_close_stream", "true"),
            ("enable_expiry_opcode", "true"),
            *durable,
            ("include_deleted_user_xattrs", "true"),
            ("v7_dcp_status_codes", "true"),
            ("flatbuffers_system_events", "true"),
            ("max_marker_version", "2.2"),
            ("connection_buffer_size", str(self.window)),
        ]


class Negotiation:
    """The controls still to send, and those that the producer has agreed to."""

    def __init__(self, options: ConsumerOptions) -> None:
        self._options = options
        self._left = deque(options.controls())
        self._sent: tuple[str, str] | None = None
        self.opaque = 0  # of the control that waits for its answer
        self.agreed: set[str] = set()
        self.started = False

    @property
    def is_done(self) -> bool:
        return self.started and self._sent is None and not self._left

    @property
    def v7_statuses(self) -> bool:
        return "v7_dcp_status_codes" in self.agreed

    @property
    def flow_control(self) -> bool:
        return "connection_buffer_size" in self.agreed

    @property
    def sync_writes(self) -> bool:
        return "enable_sync_writes" in self.agreed and "consumer_name" in self.agreed

    def next(self, opaque: int) -> tuple[str, str] | None:
        """The next control, to be sent with this opaque; None if none is left."""
        self.started = True
        self._sent = self._left.popleft() if self._left else None
        self.opaque = opaque
        return self._sent

    def answered(self, opaque: int, status: int) -> None:
        """Take the answer to a control; ``WrongRole`` if the connection cannot go on."""
        if self._sent is None or opaque != self.opaque:
            raise WrongRole("the answer to a control that was not sent", "opaque", 12)
        (name, value), self._sent = self._sent, None
        if status == Status.SUCCESS:
            self.agreed.add(name)
        elif status == Status.UNKNOWN_COMMAND:
            # A UPR producer has no controls at all (docs/protocol/upr.md#differences)
            self._left.clear()
        elif name == "set_noop_interval" and "." in value:
            self._left.appendleft((name, str(max(1, round(self._options.noop_interval_s)))))
        elif name in ("set_noop_interval", "connection_buffer_size"):
            raise WrongRole(f"the producer refuses {name}", "status", 6)
