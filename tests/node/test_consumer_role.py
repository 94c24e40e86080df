"""The consumer role over real sockets: commands for each role, the older Add Stream 0xB3, and a third party."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

import pytest

from tests.node.raw import ALL, Raw, frame, ready
from tests.support.node_thread import NodeThread
from upriver.client.options import ConnectOptions
from upriver.cluster.connection import ReplicationConnection
from upriver.cluster.relay import Side
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.protocol.topology import Address
from upriver.wire import Magic, Opcode
from upriver.wire.constants import OpenFlag
from upriver.wire.messages.cluster import SetVbucket
from upriver.wire.messages.dcp import (
    AddStream,
    CloseStream,
    DcpControl,
    DcpMutation,
    Open,
    SnapshotMarker,
    StreamRequest,
)
from upriver.wire.messages.upr import UprAddStreamsResponse

MakeNode = Callable[..., NodeThread]


@pytest.fixture(scope="module")
def target(make_node: MakeNode) -> NodeThread:
    """A node whose vbuckets 0 to 3 are replicas."""
    node = make_node()
    with ready(node.port) as raw:
        for vb in range(4):
            assert raw.ask(SetVbucket(VbucketState.REPLICA, vbucket=vb)).specific == 0
    return node


def opened(node: NodeThread, name: bytes, flags: int = 0, uuid: int = 0) -> Raw:
    raw = ready(node.port, *ALL)
    assert raw.ask(Open(uuid, flags, name)).specific == 0
    return raw


# ---------------------------------------------------------------------------------------------- roles


@pytest.mark.parametrize(
    "message", [StreamRequest(vbucket=0), DcpControl(b"enable_noop", b"true")], ids=lambda each: type(each).__name__
)
def test_a_command_for_producers_ends_a_consumer_connection(target: NodeThread, message: object) -> None:
    with opened(target, b"role-1") as raw:
        raw.send(message)  # type: ignore[arg-type]
        assert raw.is_closed()


@pytest.mark.parametrize(
    "message",
    [AddStream(vbucket=0), SnapshotMarker(0, 1, 1, vbucket=0), DcpMutation(1, 1, key=b"\0k", vbucket=0)],
    ids=lambda each: type(each).__name__,
)
def test_a_command_for_consumers_ends_a_producer_connection(target: NodeThread, message: object) -> None:
    with opened(target, b"role-2", OpenFlag.PRODUCER) as raw:
        raw.send(message)  # type: ignore[arg-type]
        assert raw.is_closed()


@pytest.mark.parametrize("flags", [0, OpenFlag.PRODUCER], ids=["consumer", "producer"])
def test_a_name_belongs_to_the_connection_that_opened_it_last(target: NodeThread, flags: int) -> None:
    with opened(target, b"twin") as old, opened(target, b"twin", flags):
        assert old.is_closed()


def test_the_streams_of_a_superseded_connection_are_free_again(target: NodeThread) -> None:
    with opened(target, b"heir") as old:
        old.send(AddStream(vbucket=0, opaque=1))
        assert old.receive().opcode == Opcode.DCP_CONTROL
        with opened(target, b"heir") as new:
            new.send(AddStream(vbucket=0, opaque=2))
            assert new.receive().opcode == Opcode.DCP_CONTROL


def test_key_value_commands_still_work_on_a_consumer_connection(target: NodeThread) -> None:
    with opened(target, b"both") as raw:
        assert raw.ask(SetVbucket(VbucketState.REPLICA, vbucket=0)).specific == 0


def test_an_administrators_promotion_ends_the_passive_stream(make_node: MakeNode) -> None:
    source, target = make_node(), make_node(vbuckets=8)

    async def scenario() -> int:
        options = ConnectOptions.parse(f"couchbase://127.0.0.1:{source.port}")
        ends = Address("127.0.0.1", source.port), Address("127.0.0.1", target.port)
        connection = await ReplicationConnection.open(*ends, options, "promotion")
        await connection.set_vbucket(Side.CONSUMER, 0, VbucketState.REPLICA)
        await connection.add_stream(0)
        await connection.set_vbucket(Side.CONSUMER, 0, VbucketState.ACTIVE)
        closed = await connection.request(Side.CONSUMER, CloseStream(vbucket=0))
        await connection.close()
        return closed.status

    assert asyncio.run(scenario()) in (Status.DCP_STREAM_NOT_FOUND, Status.KEY_ENOENT)


# ------------------------------------------------------------------------------- 0xB3 (docs/protocol/upr.md#add-stream)


def add_streams(name: bytes, uuid: int, *vbuckets: int, opaque: int = 9) -> bytes:
    extras = struct.pack(">Q", uuid) + struct.pack(f">{len(vbuckets)}H", *vbuckets)
    return frame(Opcode.COMPACT_DB, extras=extras, value=name, opaque=opaque)


def statuses(raw: Raw) -> dict[int, int]:
    message = raw.message()
    assert isinstance(message, UprAddStreamsResponse)
    assert (message.status, message.opaque) == (0, 9)
    return {each.vbucket: each.status for each in message.statuses}


def play_producer(raw: Raw, refused: dict[int, int]) -> None:
    """Answer controls and stream requests, refusing some vbuckets with a status, until all are asked for."""
    waiting = 3
    while waiting:
        got = raw.receive()
        if got.opcode == Opcode.DCP_CONTROL:
            raw.send(frame(Opcode.DCP_CONTROL, opaque=got.opaque, magic=Magic.RESPONSE))
        elif got.opcode == Opcode.DCP_STREAM_REQ:
            waiting -= 1
            status = refused.get(got.specific, 0)
            log = struct.pack(">QQ", 0xABCD, 0) if not status else b""
            raw.send(frame(Opcode.DCP_STREAM_REQ, opaque=got.opaque, vbucket=status, value=log, magic=Magic.RESPONSE))


def test_several_vbuckets_are_added_by_one_command_on_another_connection_with_a_status_each(target: NodeThread) -> None:
    with opened(target, b"elder", uuid=77) as consumer, ready(target.port) as admin:
        admin.send(add_streams(b"elder", 77, 1, 2, 3, 5, 900))
        play_producer(consumer, {2: Status.ERANGE})
        assert statuses(admin) == {
            1: Status.SUCCESS, 2: Status.EINTERNAL, 3: Status.SUCCESS,
            5: Status.NOT_MY_VBUCKET,  # active here
            900: Status.NOT_MY_VBUCKET,  # not here at all
        }  # fmt: skip
        admin.send(add_streams(b"elder", 77, 1))
        assert statuses(admin) == {1: Status.KEY_EEXISTS}


def test_the_answer_waits_for_every_handshake(target: NodeThread) -> None:
    with opened(target, b"patient", uuid=1) as consumer, ready(target.port) as admin:
        admin.send(add_streams(b"patient", 1, 0))
        assert consumer.receive().opcode == Opcode.DCP_CONTROL
        assert admin.is_silent()
        consumer.socket.close()  # ends the consumer's connection, and with it the handshake
        assert statuses(admin) == {0: Status.EINTERNAL}


@pytest.mark.parametrize(
    ("name", "uuid", "vbuckets"),
    [
        pytest.param(b"nobody", 5, (0,), id="no such connection"),
        pytest.param(b"strict", 6, (0,), id="another uuid"),
        pytest.param(b"strict", 5, tuple(range(64)), id="more than an answer can hold"),
        pytest.param(b"strict", 5, (), id="no vbucket"),
    ],
)
def test_an_invalid_older_add_stream_is_refused(
    target: NodeThread, name: bytes, uuid: int, vbuckets: tuple[int, ...]
) -> None:
    with opened(target, b"strict", uuid=5), ready(target.port) as admin:
        assert admin.ask(add_streams(name, uuid, *vbuckets)).specific == Status.EINVAL


def test_a_modern_compaction_of_the_same_number_is_told_apart(target: NodeThread) -> None:
    with ready(target.port) as admin:
        compact = frame(Opcode.COMPACT_DB, extras=bytes(24), vbucket=5)
        assert admin.ask(compact).specific == 0
