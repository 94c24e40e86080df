"""A node that answers clients as a server of version 6.0 does, where such servers were seen to differ.

It refuses the OPEN flag 0x100 and SET_VBUCKET with a state of one byte, and it reverses the bytes of the stream's
opaque in the answer to ADD_STREAM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.cluster.unruly_proxy import CHUNK, ProxyLoop
from upriver.errors import Status
from upriver.wire import FrameSplitter, Opcode
from upriver.wire.framing import Frame
from upriver.wire.message import OtherResponse

DELETED_USER_XATTRS = 0x100


class OldServer:
    """Listens on ``port``, in front of the node at ``target``."""

    def __init__(self, loop: ProxyLoop) -> None:
        self.target = 0
        self.refused: list[Opcode] = []
        server = loop.call(lambda: asyncio.start_server(self._connected, "127.0.0.1", 0))
        self.port: int = server.sockets[0].getsockname()[1]

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        node_reader, node_writer = await asyncio.open_connection("127.0.0.1", self.target)

        def ask(frame: Frame) -> None:
            if self._is_new(frame):
                self.refused.append(Opcode(frame.opcode))
                answer = OtherResponse(to=frame.opcode, opaque=frame.opaque, status=Status.EINVAL)
                writer.write(answer.encode())
            else:
                node_writer.write(frame.encode())

        def answer(frame: Frame) -> None:
            if frame.magic.is_response and frame.opcode == Opcode.DCP_ADD_STREAM:
                frame.extras = bytes(frame.extras)[::-1]
            writer.write(frame.encode())

        await asyncio.gather(_carry(reader, node_writer, ask), _carry(node_reader, writer, answer))

    @staticmethod
    def _is_new(frame: Frame) -> bool:
        if frame.magic.is_response:
            return False
        if frame.opcode == Opcode.DCP_OPEN:
            return bool(int.from_bytes(frame.extras[4:8], "big") & DELETED_USER_XATTRS)
        return frame.opcode == Opcode.SET_VBUCKET and len(frame.extras) == 1


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pass_on: Callable[[Frame], None]) -> None:
    splitter = FrameSplitter()
    try:
        while data := await reader.read(CHUNK):
            for frame in splitter.receive(data):
                pass_on(frame)
            await writer.drain()
    except (ConnectionError, OSError):
        pass  # both users of the connection see it close
    finally:
        writer.close()
