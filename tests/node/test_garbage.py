"""The node answers well-framed nonsense with a status or disconnects; it has no internal error."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.node import live_fuzz
from tests.node.front_node import serve
from tests.node.raw import ALL, Raw, frame, ready
from tests.support.examples import examples
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.wire import Magic, Opcode
from upriver.wire.messages import dcp, session

SIZES = [0, 1, 4, 8, 12, 16, 18, 20, 21, 24, 26, 28, 30, 31, 40, 48]


def any_frame(opcode: int, *, framing: bytes, magic: Magic | None, **fields: int | bytes) -> bytes:
    """Only two of the magics have framing extras."""
    return frame(opcode, framing=b"" if magic else framing, magic=magic, **fields)  # type: ignore[arg-type]


FRAMES = st.builds(
    any_frame,
    st.one_of(st.sampled_from(sorted(Opcode)), st.integers(0, 255)),
    extras=st.sampled_from(SIZES).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
    key=st.one_of(st.just(b""), st.just(b"\0key"), st.binary(max_size=20)),
    value=st.one_of(st.just(b""), st.just(b"{}"), st.just(b'{"sid":1}'), st.binary(max_size=40)),
    vbucket=st.one_of(st.integers(0, 3), st.integers(0, 65535)),
    cas=st.sampled_from([0, 0, 1, 2**64 - 1]),
    datatype=st.sampled_from([0, 0, 0, 1, 2, 4, 7, 255]),
    framing=st.one_of(st.just(b""), st.just(b""), st.binary(max_size=4)),
    magic=st.sampled_from([None, None, None, None, Magic.RESPONSE, Magic.SERVER_REQUEST, Magic.SERVER_RESPONSE]),
)
# Left out: administrators may send these, and the node would obey and have nothing left to test.
HARMFUL = {Opcode.QUIT, Opcode.QUITQ, Opcode.DISABLE_TRAFFIC}


@pytest.fixture
def failures() -> Iterator[list[str]]:
    """What the node logs as an unexpected exception."""
    seen: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR:
                seen.append(self.format(record))

    handler = Collect()
    logging.getLogger("upriver.node").addHandler(handler)
    yield seen
    logging.getLogger("upriver.node").removeHandler(handler)


def connect(node: NodeThread, as_producer: bool) -> Raw:
    raw = ready(node.port, *ALL)
    if as_producer:
        assert raw.ask(dcp.Open(0, 1, b"garbage")).specific == Status.SUCCESS
        raw.ask(dcp.DcpControl(b"enable_noop", b"true"))
    return raw


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(frames=st.lists(FRAMES, min_size=1, max_size=10), as_producer=st.booleans())
def test_nonsense_is_answered_or_refused_and_nothing_breaks(
    node: NodeThread, failures: list[str], frames: list[bytes], as_producer: bool
):
    with connect(node, as_producer) as raw, contextlib.suppress(ConnectionError, BrokenPipeError):
        raw.send(*[each for each in frames if each[1] not in HARMFUL])
        raw.send(session.Noop(opaque=0xFEED))
        while (got := raw.receive()).opaque != 0xFEED or got.opcode != Opcode.NOOP:
            assert not (got.magic.is_response and got.specific == Status.EINTERNAL), got
    assert failures == []
    with ready(node.port) as other:
        assert other.ask(session.Noop()).specific == Status.SUCCESS


def test_fuzzed_frames_over_live_sessions_leave_a_node_that_serves_and_ends_well(tmp_path: Path) -> None:
    """``make fuzz-live`` is the long run."""
    with serve(tmp_path / "data") as served:
        live_fuzz.run(served, served.pid, frames=20_000, seed=3)
