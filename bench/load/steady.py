"""A writer with a fixed pace: documents are due at fixed times, even if earlier ones are late.

One process, one connection per node, everything pipelined. A write that a node refuses because it does not own
the vbucket goes to the owner in the newest cluster map, until it is accepted. Latency counts from the moment the write
was due, so that a pause delays every write that falls into it.
"""

from __future__ import annotations

import asyncio
import json
import time
from multiprocessing.connection import Connection
from struct import Struct
from typing import NamedTuple

from upriver.client._requests.connections import make_session
from upriver.client.blocking import connect
from upriver.client.options import ConnectOptions
from upriver.errors import Status
from upriver.model import vbucket_of
from upriver.net.aio_conversation import AsyncConversation
from upriver.protocol.topology import Address, Topology
from upriver.wire.constants import Magic, Opcode

TICK_S = 0.002
AGAIN_S = 0.005  # until a refused write is sent again, while no newer map is known
KEYS = 100_000
VALUE = b'{"pad":"' + b"y" * 200 + b'"}'
_SET = Struct(">BBHBBHIIQII")
_RESPONSE = Struct(">BBHBBHIIQ")


class Outcome(NamedTuple):
    """What a writer saw; times in seconds."""

    written: int
    seconds: float
    cpu_s: float
    median_s: float
    p99_s: float
    longest_s: float
    refused: int


class Pipe(AsyncConversation):
    """A connection on which answers come to ``writer``, one call each, once its handshake is over."""

    writer: SteadyWriter | None = None
    _rest = b""

    def data_received(self, data: bytes) -> None:
        if self.writer is None:
            super().data_received(data)
            return
        data, at = self._rest + data, 0
        while len(data) - at >= _RESPONSE.size:
            _, _, _, _, _, status, body, opaque, _ = _RESPONSE.unpack_from(data, at)
            if len(data) - at - _RESPONSE.size < body:
                break
            at += _RESPONSE.size + body
            self.writer.answered(opaque, status, data[at - body : at] if status else b"", self.address)
        self._rest = data[at:]

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


class SteadyWriter:
    """``rate`` documents a second until told to stop."""

    def __init__(self, connection: str, rate: float, prefix: bytes) -> None:
        self._options = ConnectOptions.parse(connection)
        with connect(connection) as database:
            self._topology: Topology = database.topology
        self._rate, self._prefix = rate, prefix
        self._pipes: dict[Address, Pipe] = {}
        self._due: dict[int, float] = {}  # when each unacknowledged write was due, by opaque
        self._again: list[tuple[float, int]] = []
        self._late: list[float] = []
        self._refused = 0

    async def run(self, told: Connection) -> Outcome:
        for address in self._topology.nodes:
            pipe = self._pipes[address] = Pipe(
                address, make_session(self._options), connect_timeout_s=10.0, request_timeout_s=60.0
            )
            await pipe.open()
            pipe.writer = self
        began, cpu, count = time.monotonic(), time.process_time(), 0
        while not told.poll():
            now = time.monotonic()
            upto = int((now - began) * self._rate)
            for serial in range(count, upto):
                self._due[serial] = began + serial / self._rate
            self._send([*range(count, upto), *self._repetitions(now)])
            count = upto
            await asyncio.sleep(TICK_S)
        seconds = time.monotonic() - began
        await self._drain()
        return self._outcome(seconds, time.process_time() - cpu)

    async def _drain(self) -> None:
        while self._due:
            self._send(self._repetitions(time.monotonic()))
            await asyncio.sleep(TICK_S)
        for pipe in self._pipes.values():
            pipe.close()

    def _outcome(self, seconds: float, cpu_s: float) -> Outcome:
        late = sorted(self._late)
        at = [late[int(part * (len(late) - 1))] for part in (0.5, 0.99, 1.0)]
        return Outcome(len(late), seconds, cpu_s, *at, self._refused)

    def _repetitions(self, now: float) -> list[int]:
        ready = [serial for when, serial in self._again if when <= now]
        if ready:
            self._again = [(when, serial) for when, serial in self._again if when > now]
        return ready

    def _send(self, serials: list[int]) -> None:
        chains, nodes = self._topology.chains, self._topology.nodes
        out: dict[int, list[bytes]] = {}
        for serial in serials:
            key = b"%s%d" % (self._prefix, serial % KEYS)
            vb = vbucket_of(key, len(chains))
            head = _SET.pack(
                Magic.REQUEST, Opcode.SET, 1 + len(key), 8, 0, vb, 9 + len(key) + len(VALUE), serial, 0, 0, 0
            )
            out.setdefault(chains[vb][0], []).extend((head, b"\0", key, VALUE))
        for node, parts in out.items():
            self._pipes[nodes[node]].send(b"".join(parts))

    def answered(self, serial: int, status: int, body: bytes, address: Address) -> None:
        now = time.monotonic()
        if status == Status.SUCCESS:
            self._late.append(now - self._due.pop(serial))
            return
        if status not in (Status.NOT_MY_VBUCKET, Status.ETMPFAIL):
            raise RuntimeError(f"a write was answered with status 0x{status:02x}")
        self._refused += 1
        newer = self._adopt(body, address) if status == Status.NOT_MY_VBUCKET else False
        self._again.append((now if newer else now + AGAIN_S, serial))

    def _adopt(self, body: bytes, address: Address) -> bool:
        """Whether the map in a refusal is newer than ours."""
        before = self._topology.revision
        if not body.startswith(b'{"rev":%d,' % before[1]):
            found = self._options.parse_map(json.loads(body), address.host)
            self._topology = found if found.revision > before else self._topology
        return self._topology.revision > before


def write_steadily(connection: str, rate: float, prefix: bytes, told: Connection) -> None:
    """The main function of a separate process: write until the pipe gets a message, then send the ``Outcome``."""
    told.send(asyncio.run(SteadyWriter(connection, rate, prefix).run(told)))
