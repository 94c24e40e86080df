"""The consumer role of a connection: the pure ``Consumer`` between this connection's bytes and the bucket's store.

Also handles the older Add Stream 0xB3, which may come on any connection and names a consumer by name and uuid.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from upriver.errors import FramingError, InvalidArguments, RemoteProtocolError, Status, UpriverError
from upriver.model import VbucketState
from upriver.node import log, tracing
from upriver.node.dispatch import command
from upriver.protocol.consumer.machine import Consumer, StateSet, StreamClosed
from upriver.protocol.consumer.negotiation import ConsumerOptions
from upriver.protocol.roles import Foreign
from upriver.wire.constants import DurabilityLevel
from upriver.wire.messages import dcp, upr

if TYPE_CHECKING:
    from collections.abc import Mapping

    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket


class BucketStore:
    """The bucket as a consumer sees it: state changes also wake the operations that wait for them.

    See docs/protocol/vbuckets.md#states.
    """

    def __init__(self, bucket: NodeBucket) -> None:
        self._bucket = bucket

    @property
    def under_pressure(self) -> bool:
        """Whether too many of the received bytes wait for the disk."""
        store = self._bucket.store
        return store.dirty_bytes > store.options.dirty_bytes

    def vbucket(self, number: int) -> VBucket:
        return self._bucket.store.vbucket(number)

    def set_state(self, number: int, state: VbucketState, *, takeover: bool = False) -> VBucket:
        """Set a state without waiting for the disk: it is there no later than what clients write to the new owner."""
        return self._bucket.set_state(number, state, takeover=takeover, durable=False)

    def expect_xattrs(self) -> None:
        """Note that documents with extended attributes arrive: once this node is active, a SET has to keep them."""
        self._bucket.expect_xattrs()


class ConsumerRole:
    """What ``ClientConnection.dcp`` is after an OPEN without the producer flag."""

    def __init__(self, conn: ClientConnection, bucket: NodeBucket, request: dcp.Open, consumer_name: str) -> None:
        self.conn, self.bucket = conn, bucket
        self.name = request.name.decode("utf-8", "backslashreplace")
        self.uuid = request.reserved  # UPR calls the first word of OPEN the connection's sequence number
        self.created = time.time()
        options = ConsumerOptions(
            consumer_name=consumer_name, collections=conn.context.collections, datatypes=conn.context.datatypes
        )
        self.machine = Consumer(BucketStore(bucket), bucket.passive_streams, options)
        self._prepares = PrepareAcks(self.machine, bucket, self.flush)

    def receive(self, data: bytes | memoryview) -> None:
        """Every byte of the connection goes through the machine; commands that are not DCP's go back to dispatch."""
        try:
            for event in self.machine.receive(data, time.monotonic()):
                self._handle_event(event)
        except (FramingError, RemoteProtocolError) as error:
            self.flush()
            self.conn.close(f"consumer: {error}")
            return
        except UpriverError as error:  # the store has failed: a full disk, a damaged file
            log.failure("consumer_failed", connection=self.conn.id, name=self.name)
            self.conn.abort(f"consumer: {error}")
            return
        self._prepares.send()
        self.flush()

    def _handle_event(self, event: Foreign | StateSet | StreamClosed) -> None:
        if isinstance(event, Foreign):
            tracing.begin()
            self.conn.handle(event.frame)
        elif isinstance(event, StateSet):
            log.info("vbucket_state", vbucket=event.vbucket, state=event.state.name.lower(), by="takeover")
        else:
            log.info("passive_stream_end", vbucket=event.vbucket, status=event.status, name=self.name)

    def flush(self) -> None:
        data = self.machine.data_to_send()
        if data:
            self.conn.write(data)

    def tick(self, now: float) -> None:
        """Acknowledge what was received; called by the housekeeping round."""
        self.machine.wake(now)
        self.flush()

    def on_response(self, response: object) -> bool:
        """Refuse it: every response that answers something goes through ``receive``."""
        return False

    def schedule(self) -> None:
        """Do nothing: answers are small, and the producer stops when nothing is acknowledged."""

    def close(self) -> None:
        self.machine.receive_eof()
        self._prepares.close()  # breaks a reference cycle, so the large columns are freed now
        if self.bucket.dcp_connections.get(self.name) is self.conn:
            del self.bucket.dcp_connections[self.name]

    def stats(self) -> Mapping[str, object]:
        streams = self.machine.streams.values()
        return {
            "type": "consumer",
            "created": int(self.created),
            "num_streams": len(streams),
            "total_bytes_received": self.machine.received_bytes,
            "total_backoffs": self.machine.backoffs,
        }

    def stream_stats(self) -> Iterator[tuple[int, dict[str, object]]]:
        """What is known of each passive stream, with its vbucket."""
        for stream in list(self.machine.streams.values()):
            yield (
                stream.vbucket,
                {
                    "flags": stream.flags,
                    "opaque": stream.opaque,
                    "state": stream.phase.name.lower(),
                    "cur_snapshot_start": stream.snapshot_start,
                    "cur_snapshot_end": stream.snapshot_end,
                },
            )


class PrepareAcks:
    """Tells the producer which prepares are safe here: at once, or when they are on disk if their level says so.

    An acknowledgement covers every prepare before it, so prepares behind one that waits for the disk wait too.
    """

    def __init__(self, machine: Consumer, bucket: NodeBucket, flush: Callable[[], None]) -> None:
        self._machine, self._bucket, self._flush = machine, bucket, flush
        self._waiting: Counter[int] = Counter()

    def close(self) -> None:
        """Acknowledge nothing more: the connection is gone."""
        self._flush = lambda: None

    def send(self) -> None:
        for vb, seqno, level in self._machine.take_prepared():
            if level < DurabilityLevel.PERSIST_TO_MAJORITY and not self._waiting[vb]:
                self._machine.acknowledge_prepares(vb, seqno)
                continue
            self._waiting[vb] += 1
            self._bucket.waits.until(vb, seqno).add_done_callback(partial(self._on_disk, vb, seqno))

    def _on_disk(self, vb: int, seqno: int, done: asyncio.Future[None]) -> None:
        self._waiting[vb] -= 1
        if not done.cancelled():
            self._machine.acknowledge_prepares(vb, seqno)
            self._flush()


async def add_streams(conn: ClientConnection, request: upr.UprAddStreams) -> None:
    """Answer when every handshake has ended, with one status per vbucket (docs/protocol/upr.md#add-stream)."""
    name = request.name.decode("utf-8", "backslashreplace")
    found = conn.require_bucket().dcp_connections.get(name)
    role = found.dcp if found is not None else None
    if not isinstance(role, ConsumerRole) or role.uuid != request.connection_uuid:
        raise InvalidArguments(f"no consumer connection {name!r} with uuid {request.connection_uuid}")
    statuses = await _handshakes(role, request.vbuckets)
    answer = upr.UprAddStreamsResponse(statuses, opaque=request.opaque)
    conn.write(answer.encode())


async def _handshakes(role: ConsumerRole, vbuckets: tuple[int, ...]) -> tuple[upr.VbucketStatus, ...]:
    loop = asyncio.get_running_loop()
    waits: dict[int, asyncio.Future[int]] = {vb: loop.create_future() for vb in dict.fromkeys(vbuckets)}

    def done(vb: int, status: int) -> None:
        if not waits[vb].done():
            waits[vb].set_result(status)

    role.machine.add_streams(list(waits), done)
    role.flush()
    await asyncio.gather(*waits.values())
    return tuple(upr.VbucketStatus(vb, _upr_status(waits[vb].result())) for vb in vbuckets)


def _upr_status(status: int) -> int:
    """The older command has five outcomes; any other status becomes EINTERNAL (docs/protocol/upr.md#add-stream)."""
    return status if status in upr.UPR_STREAM_STATUSES else Status.EINTERNAL


COMMANDS = (command(upr.UprAddStreams, add_streams),)
