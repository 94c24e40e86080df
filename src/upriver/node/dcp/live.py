"""The shell around a bucket's live streams: gives them their turns in the loop, and has what they encode sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from upriver.node.dcp.soon import Soon
from upriver.node.dcp.streamed_bucket import StreamedBucket
from upriver.protocol.producer.live import LiveStreams
from upriver.protocol.producer.machine import Producer

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.dcp.producer import ProducerRole


class LiveTurns:
    """The live streams of one bucket, and the connections that they are on."""

    def __init__(self, bucket: NodeBucket, loop: asyncio.AbstractEventLoop) -> None:
        self.store = StreamedBucket(bucket)
        self.streams = LiveStreams(self.store, Soon(loop, self._turn))
        self.roles: dict[Producer, ProducerRole] = {}

    def _turn(self) -> None:
        for producer in self.streams.turn():
            if (role := self.roles.get(producer)) is not None:
                role.send_encoded()
