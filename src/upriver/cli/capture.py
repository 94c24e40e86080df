"""Reads a packet capture (pcap or pcapng): its TCP streams in order, and the frames that each connection carried.

Segments are read in the order of the file and delivered in the order of their sequence numbers, without duplicates and
with gaps marked. A missing segment is skipped when more than ``MAX_WAITING_BYTES`` wait behind it, or at the end of the
capture.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any, NamedTuple

from upriver.errors import ConfigError
from upriver.wire.constants import Magic
from upriver.wire.inspect.conversation import CapturedConversation, DumpReader
from upriver.wire.inspect.dump import FrameDump

MAX_WAITING_BYTES = 1 << 20
CAPTURE_MAGICS = tuple(bytes.fromhex(magic) for magic in ("a1b2c3d4", "d4c3b2a1", "a1b23c4d", "4d3cb2a1", "0a0d0d0a"))
_WRAP = 1 << 32
_SYN, _ACK = 0x02, 0x10
_IP_LINKS = (12, 14, 101, 228, 229)  # raw IP under the numbers that systems use for it


class Flow(NamedTuple):
    """One direction of a TCP connection."""

    source: str
    source_port: int
    target: str
    target_port: int

    @property
    def connection(self) -> frozenset[tuple[str, int]]:
        """The same for both directions."""
        return frozenset({(self.source, self.source_port), (self.target, self.target_port)})

    def __str__(self) -> str:
        return f"{self.source}:{self.source_port} > {self.target}:{self.target_port}"


class CaptureEvent(NamedTuple):
    """The next thing in one direction: ``data``, a gap of ``lost`` bytes, or that it was ``opened``."""

    flow: Flow
    time: float
    data: bytes = b""
    lost: int = 0
    opened: bool = False
    fresh: bool = False  # opened by the client: what these ports carried before is another connection
    from_start: bool = True  # the capture has the direction's first byte


@dataclass(slots=True)
class Direction:
    """The bytes of one direction that are out of order, and the sequence number that comes next."""

    expected: int | None = None
    from_start: bool = False
    waiting: dict[int, bytes] = field(default_factory=dict)
    waiting_bytes: int = 0

    def open(self, sequence: int) -> bool:
        """A SYN begins a new connection. False for a repeated SYN."""
        if self.expected is not None and self.from_start and _ahead(sequence + 1, self.expected) <= 0:
            return False
        self.expected, self.from_start = (sequence + 1) % _WRAP, True
        self.waiting.clear()
        self.waiting_bytes = 0
        return True

    def add(self, sequence: int, data: bytes) -> Iterator[bytes]:
        """Take one segment; yield the bytes that are in order now."""
        if self.expected is None:
            self.expected = sequence
        if len(data) > len(self.waiting.get(sequence, b"")):
            self.waiting_bytes += len(data) - len(self.waiting.get(sequence, b""))
            self.waiting[sequence] = data
        yield from self.in_order()

    def skip(self) -> int:
        """Skip the missing bytes before the first waiting segment; returns how many."""
        if not self.waiting or self.expected is None:
            return 0
        nearest = min(self.waiting, key=lambda sequence: _ahead(sequence, self.expected or 0))
        lost = _ahead(nearest, self.expected)
        self.expected = nearest
        return lost

    def in_order(self) -> Iterator[bytes]:
        """The waiting segments that come next, or overlap with the next byte."""
        assert self.expected is not None
        while ready := [each for each in self.waiting if _ahead(each, self.expected) <= 0]:
            sequence = max(ready, key=lambda each: _ahead(each, self.expected or 0))
            data = self.waiting.pop(sequence)
            self.waiting_bytes -= len(data)
            known = -_ahead(sequence, self.expected)
            if known < len(data):
                self.expected = (sequence + len(data)) % _WRAP
                yield data[known:]


def _ahead(sequence: int, expected: int) -> int:
    """How far a sequence number lies ahead of the expected one; negative if it is old."""
    return (sequence - expected + _WRAP // 2) % _WRAP - _WRAP // 2


def read_capture(raw: bytes, port: int | None = None) -> Iterator[CaptureEvent]:
    """Every TCP payload of a capture in order, direction by direction."""
    directions: dict[Flow, Direction] = {}
    last = 0.0
    for time, flow, segment in _segments(raw):
        if port is not None and port not in (flow.source_port, flow.target_port):
            continue
        last = time
        yield from _deliver(directions.setdefault(flow, Direction()), flow, time, segment)
    for flow, direction in directions.items():
        while direction.waiting:
            yield from _skip_gap(direction, flow, last)


def _deliver(direction: Direction, flow: Flow, time: float, segment: Any) -> Iterator[CaptureEvent]:
    sequence, data = segment.seq, bytes(segment.data)
    if segment.flags & _SYN:
        if direction.open(sequence):
            yield CaptureEvent(flow, time, opened=True, fresh=not segment.flags & _ACK)
        sequence += 1
    if data:
        for fresh in direction.add(sequence % _WRAP, data):
            yield CaptureEvent(flow, time, fresh, from_start=direction.from_start)
    while direction.waiting_bytes > MAX_WAITING_BYTES:
        yield from _skip_gap(direction, flow, time)


def _skip_gap(direction: Direction, flow: Flow, time: float) -> Iterator[CaptureEvent]:
    yield CaptureEvent(flow, time, lost=direction.skip())
    for fresh in direction.in_order():
        yield CaptureEvent(flow, time, fresh, from_start=direction.from_start)


def _segments(raw: bytes) -> Iterator[tuple[float, Flow, Any]]:
    try:
        import dpkt
    except ImportError as error:
        raise ConfigError("a packet capture is read with dpkt: pip install 'upriver[capture]'") from error
    try:
        reader = dpkt.pcap.UniversalReader(BytesIO(raw))
        link = reader.datalink()
        for time, packet in reader:
            found = _tcp_of(dpkt, link, packet)
            if found:
                yield float(time), *found
    except (dpkt.dpkt.Error, ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"the capture cannot be read any further: {error or type(error).__name__}") from error


def _tcp_of(dpkt: Any, link: int, packet: bytes) -> tuple[Flow, Any] | None:
    try:
        inner = _ip_of(dpkt, link, packet)
    except dpkt.dpkt.UnpackError:
        return None  # a packet cut short by the capture; its bytes show as a gap
    segment = getattr(inner, "data", None)
    if not isinstance(inner, dpkt.ip.IP | dpkt.ip6.IP6) or not isinstance(segment, dpkt.tcp.TCP):
        return None
    source, target = (str(ipaddress.ip_address(address)) for address in (inner.src, inner.dst))
    return Flow(source, segment.sport, target, segment.dport), segment


def _ip_of(dpkt: Any, link: int, packet: bytes) -> Any:
    if link in _IP_LINKS:
        version = packet[0] >> 4 if packet else 0
        return dpkt.ip6.IP6(packet) if version == 6 else dpkt.ip.IP(packet)
    links = {
        dpkt.pcap.DLT_EN10MB: dpkt.ethernet.Ethernet,
        dpkt.pcap.DLT_LINUX_SLL: dpkt.sll.SLL,
        dpkt.pcap.DLT_LINUX_SLL2: dpkt.sll2.SLL2,
        dpkt.pcap.DLT_NULL: dpkt.loopback.Loopback,
        dpkt.pcap.DLT_LOOP: dpkt.loopback.Loopback,
    }
    if link not in links:
        raise ValueError(f"link type {link} is not supported")
    return links[link](packet).data


# ---------------------------------------------------------------------------------------------- conversations


class Excerpt(NamedTuple):
    """Something to print: a frame, or a remark about a connection (``lost`` bytes, or ``skipped`` and why)."""

    dump: FrameDump | None
    flow: Flow | None = None
    time: float = 0.0
    lost: int = 0
    skipped: str = ""


class Follower:
    """Gives every connection a conversation and every direction a reader."""

    def __init__(self, conversation: Callable[[], CapturedConversation]) -> None:
        self._new = conversation
        self._conversations: dict[frozenset[tuple[str, int]], CapturedConversation] = {}
        self._readers: dict[Flow, DumpReader] = {}
        self._foreign: set[Flow] = set()
        self._last = 0.0

    def take(self, event: CaptureEvent) -> Iterator[Excerpt]:
        """What one event of the capture shows."""
        self._last = event.time
        reader = self._reader(event)
        if event.flow in self._foreign:
            return
        if event.lost:
            reader.gap()
            yield Excerpt(None, event.flow, event.time, lost=event.lost)
        if event.data and self._is_foreign(event, reader):
            self._foreign.add(event.flow)
            yield Excerpt(None, event.flow, event.time, skipped="it does not begin with a frame of this protocol")
        elif event.data:
            yield from (Excerpt(dump, event.flow, event.time) for dump in reader.receive(event.data))

    def end(self) -> Iterator[Excerpt]:
        """Frames whose end is not in the capture."""
        for flow, reader in self._readers.items():
            if flow not in self._foreign:
                yield from (Excerpt(dump, flow, self._last) for dump in reader.receive_eof())

    def _reader(self, event: CaptureEvent) -> DumpReader:
        flow = event.flow
        if event.fresh or flow.connection not in self._conversations:
            self._conversations[flow.connection] = self._new()
        if event.opened or flow not in self._readers:
            self._foreign.discard(flow)
            self._readers[flow] = DumpReader(self._conversations[flow.connection])
            if not event.opened and not event.from_start:
                self._readers[flow].gap()  # the capture began in the middle: look for a frame's start
        return self._readers[flow]

    def _is_foreign(self, event: CaptureEvent, reader: DumpReader) -> bool:
        untouched = reader.pristine and event.from_start
        return untouched and event.data[0] not in Magic._value2member_map_
