"""Tracing: every answer says how long the node took, if the client asked HELLO for it.

See docs/protocol/framing.md#framing-extras and docs/protocol/session.md#hello.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import TYPE_CHECKING

from upriver.wire.constants import ResponseFrameId
from upriver.wire.framing import HEADER, encode_duration

if TYPE_CHECKING:
    from upriver.node.connection import Answerable

_ALT_RESPONSE = 0x18
_FRAME_SIZE = 3
LONGEST_KEY = 0xFF  # the alternative header has one byte for it

# A context variable: a request that has to wait is finished in its own task, while other requests begin.
_began: ContextVar[float] = ContextVar("began")


def begin() -> None:
    """Start the clock of a request."""
    _began.set(time.monotonic())


def duration_frame() -> bytes:
    """Framing extra 0 of an answer: the time since ``begin``."""
    began = _began.get(None)
    spent_us = (time.monotonic() - began) * 1e6 if began is not None else 0.0
    return bytes((ResponseFrameId.SERVER_DURATION << 4 | 2,)) + encode_duration(spent_us).to_bytes(2, "big")


def traced_head(
    request: Answerable, extras_len: int, key_len: int, body: int, datatype: int, status: int, cas: int
) -> bytes:
    """Header and framing extras of an answer; ``body`` does not count the extras."""
    head = HEADER.pack(
        _ALT_RESPONSE, request.opcode, _FRAME_SIZE << 8 | key_len, extras_len, datatype, status, body + _FRAME_SIZE,
        request.opaque, cas,
    )  # fmt: skip
    return head + duration_frame()
