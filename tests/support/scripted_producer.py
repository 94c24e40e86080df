"""A producer without a socket that answers the handshake and leaves the streams to the test.

``Wire`` carries bytes between it and a ``ClusterFeed``, cut into pieces of any size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from upriver.client._requests.connections import make_session
from upriver.client.options import ConnectOptions
from upriver.model import FailoverEntry
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedEvent, FeedRequest, FeedRows
from upriver.protocol.position import Position
from upriver.protocol.session import FeedSettings
from upriver.protocol.topology import Address, parse_topology
from upriver.wire import Context, FrameSplitter, Message, Opcode, OtherResponse, decode
from upriver.wire.keys import join_key
from upriver.wire.messages.cluster import GetClusterConfig
from upriver.wire.messages.dcp import (
    BufferAck,
    DcpDeletion,
    DcpMutation,
    FailoverLogResponse,
    SnapshotMarker,
    StreamRequest,
)
from upriver.wire.messages.session import Hello, HelloResponse, ValueResponse

HOME = Address("10.0.0.1", 11210)
ELSEWHERE = Address("10.0.0.2", 11210)
BRANCH = 0xABCD
COLLECTIONS = Context(collections=True)


def config_json(vbuckets: int = 4, rev: int = 1, owners: dict[int, int] | None = None) -> bytes:
    """A map of two nodes; the first owns everything unless ``owners`` says otherwise."""
    servers = [str(HOME), str(ELSEWHERE)]
    nodes = [{"hostname": a.host, "services": {"kv": a.port}} for a in (HOME, ELSEWHERE)]
    chains = [[(owners or {}).get(vb, 0)] for vb in range(vbuckets)]
    server_map = {"serverList": servers, "vBucketMap": chains}
    return json.dumps({"rev": rev, "name": "default", "nodesExt": nodes, "vBucketServerMap": server_map}).encode()


class ScriptedProducer:
    """Answers everything up to the stream requests, which it keeps in ``requests`` for the script to answer."""

    def __init__(self, config: bytes | None = None) -> None:
        self.config = config or config_json()
        self.requests: list[StreamRequest] = []
        self.seen: list[Message] = []
        self.acknowledged = 0
        self._splitter = FrameSplitter()

    def receive(self, data: bytes) -> bytes:
        answers = bytearray()
        for frame in self._splitter.receive(data):
            for answer in self.take(decode(frame, COLLECTIONS)):
                answers += answer.encode()
        return bytes(answers)

    def take(self, message: Message) -> list[Message]:
        """Remember a message; the answers to it."""
        self.seen.append(message)
        return list(self._answer(message))

    def _answer(self, message: Message) -> Iterator[Message]:
        if isinstance(message, StreamRequest):
            self.requests.append(message)
        elif isinstance(message, BufferAck):
            self.acknowledged += message.bytes
        elif isinstance(message, Hello):
            yield HelloResponse(message.features, opaque=message.opaque)
        elif isinstance(message, GetClusterConfig):
            yield ValueResponse.under(Opcode.GET_CLUSTER_CONFIG)(self.config, opaque=message.opaque)
        elif not isinstance(message, OtherResponse) and message.opcode != Opcode.DCP_CLOSE_STREAM:
            yield OtherResponse(message.opcode, opaque=message.opaque)

    def seen_of(self, opcode: int) -> list[Message]:
        """Requests with this opcode, and answers to it."""
        return [m for m in self.seen if (m.to if isinstance(m, OtherResponse) else m.opcode) == opcode]

    def accepts(self, request: StreamRequest, *log: tuple[int, int]) -> bytes:
        entries = tuple(FailoverEntry(*entry) for entry in log or ((BRANCH, 0),))
        return FailoverLogResponse(entries, opaque=request.opaque).encode()


def marker(request: StreamRequest, start: int, end: int, flags: int = 1) -> bytes:
    return SnapshotMarker(start, end, flags, vbucket=request.vbucket, opaque=request.opaque).encode()


def mutation(request: StreamRequest, seqno: int, key: bytes = b"k", value: bytes = b"{}", cid: int = 0) -> bytes:
    wire_key = join_key(cid, key)
    at: dict[str, Any] = {"vbucket": request.vbucket, "opaque": request.opaque, "cas": seqno << 16}
    return DcpMutation(seqno, 1, key=wire_key, value=value, **at).encode()


def deletion(request: StreamRequest, seqno: int, key: bytes = b"k") -> bytes:
    at: dict[str, Any] = {"vbucket": request.vbucket, "opaque": request.opaque, "cas": seqno << 16}
    return DcpDeletion(seqno, 1, key=join_key(0, key), **at).encode()


class Wire:
    """A feed and its scripted producers, joined without sockets."""

    def __init__(
        self, request: FeedRequest | None = None, *, vbuckets: int = 4, window: int = 1000, chop: int = 0, **more: Any
    ) -> None:
        request = request or FeedRequest({0: Position()})
        options = ConnectOptions((HOME,))
        topology = parse_topology(json.loads(config_json(vbuckets)), HOME.host)
        settings = FeedSettings("test", buffer_bytes=window)
        self.feed = ClusterFeed(request, topology, lambda: make_session(options, settings), window, **more)
        self.producers: dict[Address, ScriptedProducer] = {}
        self.chop, self.now = chop, 0.0
        self.rows: list[tuple[int, int, bytes]] = []  # vbucket, seqno, key
        self.told: list[FeedEvent] = []

    def connect(self, address: Address = HOME, config: bytes | None = None) -> ScriptedProducer:
        """A connection whose handshake is over."""
        producer = self.producers[address] = ScriptedProducer(config)
        self.feed.connected(address, self.now)
        self.settle(address)
        return producer

    def settle(self, address: Address = HOME) -> None:
        """Move bytes both ways until neither end has any."""
        while data := self.feed.links[address].data_to_send():
            if answer := self.producers[address].receive(data):
                self.says(answer, address)

    def says(self, data: bytes, address: Address = HOME) -> None:
        """The producer sends these bytes, in pieces of ``chop`` bytes."""
        for at in range(0, len(data), self.chop or len(data) or 1):
            piece = data[at : at + (self.chop or len(data))]
            while piece:
                buffer = self.feed.links[address].buffer()
                step = min(len(buffer), len(piece))
                buffer[:step] = piece[:step]
                piece = piece[step:]
                for event in self.feed.received(address, step, self.now):
                    self._take(event)
        if address in self.feed.links:
            self.settle(address)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        for event in self.feed.tick(self.now):
            self._take(event)
        for address in list(self.feed.links):
            self.settle(address)

    def _take(self, event: FeedEvent) -> None:
        if not isinstance(event, FeedRows):
            self.told.append(event)
            return
        columns = event.rows.columns
        for row in range(event.rows.first, event.rows.last):
            if columns["event"][row]:
                self.rows.append((int(columns["vbucket"][row]), int(columns["seqno"][row]), columns.key(row)))
        link = self.feed.links[event.link]
        if link.decoder.columns is columns and event.rows.last == columns.rows:
            link.decoder.clear()
        self.feed.taken(event)

    @property
    def seqnos(self) -> list[int]:
        return [seqno for _, seqno, _ in self.rows]
