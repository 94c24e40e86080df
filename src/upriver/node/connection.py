"""One client connection: bytes in, requests to their handlers, answers out in order (an asyncio protocol).

All requests of one receive are answered with one send. A handler that has to wait holds back the requests behind it,
so that answers keep the order of requests; on a DCP connection only its own answer waits. The node stops reading from
a client that does not read its answers.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol, cast

from upriver.errors import FramingError, InvalidMessage, NoBucket, Status, StatusError
from upriver.node import dispatch, log, tracing
from upriver.node.access.roles import Access, Privilege
from upriver.node.commands import answers, kv_fast
from upriver.wire import Context
from upriver.wire.constants import Feature
from upriver.wire.framing import HEADER, HEADER_SIZE, MAX_FRAME, MAX_UNAUTHENTICATED_FRAME, Frame, cut_frame, frame_size
from upriver.wire.keys import split_key

if TYPE_CHECKING:
    from upriver.node.access.auth import PendingLogin
    from upriver.node.buckets import NodeBucket
    from upriver.node.dcp.consumer import ConsumerRole
    from upriver.node.dcp.producer import ProducerRole
    from upriver.node.server import Node
    from upriver.store import Stored, VBucket

DCP_OUTPUT = 32  # in units of the output limit: room for a turn of the producer and one large document
TURN_S = 0.003  # how long one connection's requests are handled before the other connections get a turn
LARGE_REQUEST = 1 << 17  # a request of this size or more needs a share of the memory for unfinished requests
MOST_INPUT = 1 << 20  # bytes of requests kept for a connection that only waits for its next turn
_numbers = itertools.count(1)
_RESPONSE = 0x81
_REQUEST = 0x80


class Answerable(Protocol):
    """What an answer needs from a request: a message, or a frame that could not be decoded."""

    @property
    def opcode(self) -> int: ...
    @property
    def opaque(self) -> int: ...


class ClientConnection(asyncio.Protocol):
    """The state of one client's connection, and what handlers use of it."""

    def __init__(self, node: Node, tls: bool = False) -> None:
        self.node = node
        self.tls = tls
        self.id = next(_numbers)
        self.peer = self.host = ""
        self.has_spoken = False
        self.agent = ""
        self.user = ""
        self.authenticated = False
        self.access = Access()  # of the user
        self.privileges = 0  # of the user in the selected bucket
        self.sasl: PendingLogin | None = None
        self.features: frozenset[int] = frozenset()
        self.tracing = False  # whether every answer says how long it took
        self.context = Context(datatypes=0, check_values=True)
        self.bucket: NodeBucket | None = None
        self.dcp: ProducerRole | ConsumerRole | None = None
        self.receive_raw: Callable[[bytes | memoryview], None] | None = None  # a consumer takes its bytes in bulk
        self.map_revision_sent = (0, 0)  # of the cluster map that the last NOT_MY_VBUCKET carried
        self.created = self.last_received = self.last_progress = time.monotonic()
        self.closed = False
        self._limit = MAX_UNAUTHENTICATED_FRAME
        self._input: bytes | bytearray = b""
        self._output: list[bytes] = []
        self._output_bytes = 0
        self._yielded = False
        self._handling = False  # inside _handle_frames
        self._write_paused = False
        self._unsent = 0  # bytes in the write buffer when ``note_progress`` last looked
        self._starved = False  # no memory for the rest of a large request yet
        self._share = False  # whether it holds a share of the memory for large requests
        self._waiting = 0  # handlers that have not answered yet
        self._waiting_bytes = 0  # of their requests, which stay in memory until then
        self._tasks: set[asyncio.Task[None]] = set()

    # ------------------------------------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # With a limit of 0, write() sends at once. If bytes are left over, writing pauses until the last one is sent;
        # only then may the producer reuse its buffer. With TLS, 0 would pause a connection that has nothing to send.
        self.transport.set_write_buffer_limits(high=1 if self.tls else 0)
        self.host, port, *_ = self.transport.get_extra_info("peername") or ("?", 0)
        self.peer = f"{self.host}:{port}"
        self.node.connected(self)

    def data_received(self, data: bytes) -> None:
        self.last_received = time.monotonic()
        if not self.has_spoken:
            self.has_spoken = True
            if self.authenticated:
                self.node.connection_limits.logged_in(self)
        if self.receive_raw is not None and not self._handling:
            self.receive_raw(data)
            return
        if self._input:
            if isinstance(self._input, bytes):
                self._input = bytearray(self._input)
            self._input += data
        else:
            self._input = data
        self._handle_frames()

    def pause_writing(self) -> None:
        self._write_paused = True
        self.last_progress = time.monotonic()
        if self.dcp is None:  # a DCP connection has a window of its own
            self.node.memory.unread(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._write_paused = False
        self.last_progress = time.monotonic()
        self.node.memory.read(self)
        if self.dcp is not None:
            self.dcp.schedule()
        self._resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.node.memory.forget(self)
        for task in self._tasks:
            task.cancel()
        if self.dcp is not None:
            self.dcp.close()
            self.dcp = self.receive_raw = None  # breaks the reference cycle, so all is freed now
        self.node.disconnected(self, str(exc) if exc else "end of stream")

    # ------------------------------------------------------------------------------------------ requests

    @property
    def _held(self) -> bool:
        """Whether requests have to wait: for an answer that is under way, or for the client to read."""
        if self.closed or self._yielded:
            return True
        if self.dcp is None:
            return self._waiting > 0 or self._write_paused
        limits = self.node.options.limits
        if self._waiting >= limits.parked_ops or self._waiting_bytes > DCP_OUTPUT * limits.output_bytes:
            return True
        # Acknowledgements must be read while data waits to be sent, but not a flood of other requests.
        return self._write_paused and self.transport.get_write_buffer_size() > DCP_OUTPUT * limits.output_bytes

    def _handle_frames(self) -> None:
        """Handle every complete frame of the input, in order, until the turn is over or requests have to wait."""
        if self._handling:
            return
        self._handling = True
        data, at, end, clock = self._input, 0, len(self._input), time.monotonic
        deadline = clock() + TURN_S
        try:
            while end - at >= HEADER_SIZE and not self._held:
                size = frame_size(data, at, self._limit)
                if end - at < size:
                    if size > LARGE_REQUEST and not self._share:
                        self._ask_for_memory(size)
                    break
                if self._share:
                    self._give_memory_back()
                if self.tracing:
                    tracing.begin()
                fast = kv_fast.HANDLERS.get(data[at + 1]) if data[at] == _REQUEST else None
                try:
                    if fast is None or not fast(self, data, at, size):
                        self.handle(cut_frame(data, at))
                except Exception:  # such as a damaged file of the store: the client stays connected
                    self._fail_unexpectedly(cut_frame(data, at))
                at += size
                if self.receive_raw is not None:
                    rest, at = bytes(memoryview(data)[at:]), end
                    self.receive_raw(rest)
                    break
                if clock() > deadline:
                    self._yield()
                if self._output_bytes > self.node.options.limits.output_bytes:
                    self.flush()
        except FramingError as error:
            self.close(f"broken frame: {error}")
        finally:
            self._handling = False
            if at == end or self.closed:
                self._input = b""
            elif isinstance(data, bytes):
                self._input = data[at:]
            else:
                del data[:at]
            self.flush()
        self._throttle()

    def _ask_for_memory(self, size: int) -> None:
        self._share = self.node.memory.ask(self, size)
        self._starved = not self._share

    def memory_granted(self) -> None:
        """Read on: there is memory now for the rest of a large request."""
        self._share, self._starved = True, False
        self._throttle()

    def _give_memory_back(self) -> None:
        self._share = False
        self.node.memory.release(self)

    def _yield(self) -> None:
        """Give the other connections a turn before the rest of the requests."""
        self._yielded = True
        self.node.loop.call_soon(self._after_yield)

    def _after_yield(self) -> None:
        self._yielded = False
        self._resume()

    def _throttle(self) -> None:
        """Stop reading while requests have to wait, so that TCP slows the client down."""
        if self.closed:
            return
        if self._starved or (self._held and (len(self._input) > MOST_INPUT if self._yielded else self._input)):
            self.transport.pause_reading()
        elif not self.transport.is_reading():
            self.transport.resume_reading()

    def _resume(self) -> None:
        if not self.closed and not self._held:
            self._handle_frames()

    def handle(self, frame: Frame) -> None:
        """Answer one request, now or when its handler is done."""
        try:
            pending = dispatch.dispatch(self, frame)
        except (StatusError, InvalidMessage) as error:
            answers.fail_with(self, frame, error)
        except Exception:  # a bug here must not break other connections
            self._fail_unexpectedly(frame)
        else:
            if pending is not None:
                self._wait_for(frame, pending)

    def _fail_unexpectedly(self, frame: Frame) -> None:
        log.failure("request_failed", connection=self.id, opcode=f"0x{frame.opcode:02x}")
        answers.fail(self, frame, Status.EINTERNAL, "internal error")

    def _wait_for(self, frame: Frame, pending: Awaitable[None]) -> None:
        self._waiting += 1
        self._waiting_bytes += frame.size
        task = self.node.loop.create_task(self._finish(frame, pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, frame: Frame, pending: Awaitable[None]) -> None:
        try:
            await pending
        except (StatusError, InvalidMessage) as error:
            answers.fail_with(self, frame, error)
        except asyncio.CancelledError:
            if not self.closed:
                answers.fail(self, frame, Status.ETMPFAIL, "the bucket is closing")
        except Exception:
            self._fail_unexpectedly(frame)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= frame.size
            self._resume()

    # ------------------------------------------------------------------------------------------ answers

    def write(self, data: bytes) -> None:
        """Send bytes to the client, after everything written before."""
        self._output.append(data)
        self._output_bytes += len(data)
        if not self._handling:
            self.flush()

    def flush(self) -> None:
        """Send what was written so far."""
        if self._output and not self.closed:
            data = b"".join(self._output) if len(self._output) > 1 else self._output[0]
            self._output.clear()
            self._output_bytes = 0
            self.transport.write(data)

    def reply(
        self, request: Answerable, *, extras: bytes = b"", key: bytes = b"", value: bytes = b"", cas: int = 0,
        datatype: int = 0, status: int = 0,
    ) -> None:  # fmt: skip
        """Answer a request; the default status is success."""
        if self.bucket is not None:
            self.bucket.responses[status] += 1
        body = len(extras) + len(key) + len(value)
        if self.tracing and len(key) <= tracing.LONGEST_KEY:
            head = tracing.traced_head(request, len(extras), len(key), body, datatype, status, cas)
        else:
            head = HEADER.pack(
                _RESPONSE, request.opcode, len(key), len(extras), datatype, status, body, request.opaque, cas
            )
        self.write(b"".join((head, extras, key, value)) if body else head)

    def close(self, reason: str) -> None:
        """Send what is queued, then disconnect."""
        if self.closed:
            return
        self.flush()
        self.closed = True
        log.info("connection_closing", connection=self.id, peer=self.peer, reason=reason)
        self.transport.close()

    def abort(self, reason: str) -> None:
        """Disconnect at once; what was not sent is lost."""
        log.info("connection_aborted", connection=self.id, peer=self.peer, reason=reason)
        self.closed = True
        self.transport.abort()

    def note_progress(self, now: float) -> None:
        """Check whether the client has read anything: a slow reader is not idle."""
        unsent = self.transport.get_write_buffer_size()
        if unsent < self._unsent:
            self.last_progress = now
        self._unsent = unsent

    @property
    def can_write(self) -> bool:
        return not self._write_paused and not self.closed

    # ------------------------------------------------------------------------------------------ for handlers

    def authenticate(self, user: str, access: Access) -> None:
        """Log the client in; its frames may be large from now on."""
        self.authenticated, self.user = True, user
        self._limit = MAX_FRAME
        self.grant(access)
        self.node.connection_limits.logged_in(self)

    def forget_user(self) -> None:
        """Log the client out; the limits of a new connection apply again."""
        self.authenticated, self.user = False, ""
        self._limit = MAX_UNAUTHENTICATED_FRAME
        self.grant(Access())

    def grant(self, access: Access) -> None:
        """Set what the user may do. A DCP connection whose user may no longer use DCP is closed."""
        self.access = access
        self._update_privileges()
        if self.dcp is not None and not self.privileges & (Privilege.DCP_PRODUCER | Privilege.DCP_CONSUMER):
            self.abort("its user may no longer use DCP here")

    def select(self, bucket: NodeBucket | None) -> None:
        """Set the bucket that the following requests refer to."""
        self.bucket = bucket
        self._update_privileges()

    def _update_privileges(self) -> None:
        found = self.access.outside if self.bucket is None else self.access.inside(self.bucket.name)
        self.privileges = int(found)

    def require_bucket(self) -> NodeBucket:
        if self.bucket is None:
            raise NoBucket
        return self.bucket

    def vbucket(self, vbucket_id: int) -> VBucket:
        return self.require_bucket().store.vbucket(vbucket_id)

    def split(self, key: bytes) -> tuple[int, bytes]:
        """Collection id and logical key of a document key."""
        return split_key(key) if self.context.collections else (0, key)

    def mutation_token(self, stored: Stored) -> bytes:
        """The extras of a write's answer: its vbuuid and seqno, if the client asked HELLO for them."""
        if Feature.MUTATION_SEQNO not in self.features:
            return b""
        return stored.vbuuid.to_bytes(8, "big") + stored.seqno.to_bytes(8, "big")
