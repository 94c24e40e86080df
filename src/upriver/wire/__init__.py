"""Turns bytes into frames, frames into messages, and back, for DCP and for the older UPR dialect; pure, no sockets.

``FrameSplitter`` cuts a byte stream into frames, ``decode`` turns a frame into a message, and every message encodes
itself. ``upriver.wire.bulk.decode`` reads document messages in bulk, as columns; it loads numba.
"""

from upriver.wire.checks import Context
from upriver.wire.constants import Dialect, Magic, Opcode
from upriver.wire.framing import Frame, FrameInfo, FrameSplitter
from upriver.wire.message import Message, OtherResponse, Response, decode
from upriver.wire.messages import cluster, dcp, events, kv, session, subdoc, upr

__all__ = [
    "Context", "Dialect", "Frame", "FrameInfo", "FrameSplitter", "Magic", "Message", "Opcode", "OtherResponse",
    "Response", "cluster", "dcp", "decode", "events", "kv", "session", "subdoc", "upr",
]  # fmt: skip
