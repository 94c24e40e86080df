"""SET_VBUCKET's topology on a node alone: durable writes wait for the replicas that it names."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.node.raw import ALL, Raw, ready
from tests.node.streaming import producer, take
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import SEQNO_MAX, VbucketState
from upriver.wire import Message
from upriver.wire.constants import RequestFrameId
from upriver.wire.framing import FrameInfo
from upriver.wire.messages import dcp, kv
from upriver.wire.messages.cluster import SetVbucket

OK = Status.SUCCESS


def durable(key: bytes, vbucket: int, level: int = 1, timeout_ms: int = 60_000) -> kv.Set:
    asked = FrameInfo(RequestFrameId.DURABILITY, bytes((level,)) + timeout_ms.to_bytes(2, "big"))
    return kv.Set(0, 0, b"\0" + key, b"[1]", vbucket=vbucket, frame_infos=(asked,))


def set_topology(raw: Raw, vbucket: int, *chains: list[str | None]) -> int:
    value = json.dumps({"topology": chains}).encode()
    return int(raw.ask(SetVbucket(VbucketState.ACTIVE, value, vbucket=vbucket, datatype=1)).specific)


def replica(node: NodeThread, name: str, vbucket: int) -> Raw:
    raw = producer(node, enable_sync_writes="true", consumer_name=name)
    raw.send(dcp.StreamRequest(end_seqno=SEQNO_MAX, vbucket=vbucket))
    return raw


def is_a(kind: type[Message]) -> Callable[[Message], bool]:
    return lambda message: isinstance(message, kind)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_durable_write_is_answered_when_the_replicas_of_the_topology_have_it(node: NodeThread, level: int) -> None:
    vb = level
    with ready(node.port, *ALL) as writer, replica(node, "b", vb) as b, replica(node, "other", vb) as other:
        assert set_topology(writer, vb, ["a", "b"]) == OK
        writer.send(durable(b"k", vb, level))
        for each in (other, b):
            prepare = take(each, is_a(dcp.Prepare))[-1]
            assert isinstance(prepare, dcp.Prepare)
            assert writer.is_silent()
            each.send(dcp.SeqnoAcknowledged(prepare.by_seqno, vbucket=vb))
        assert writer.response().specific == OK
        take(b, is_a(dcp.Commit))


def test_during_a_move_both_chains_need_a_majority_and_a_new_topology_is_evaluated_again(
    node: NodeThread,
) -> None:
    with ready(node.port, *ALL) as writer, ready(node.port, *ALL) as admin, replica(node, "b", 4) as b:
        assert set_topology(admin, 4, ["a", "b"], ["c", "d"]) == OK
        writer.send(durable(b"k", 4))
        prepare = take(b, is_a(dcp.Prepare))[-1]
        assert isinstance(prepare, dcp.Prepare)
        b.send(dcp.SeqnoAcknowledged(prepare.by_seqno, vbucket=4))
        assert writer.is_silent()
        assert set_topology(admin, 4, ["a", "b"]) == OK
        assert writer.response().specific == OK


def test_a_topology_without_a_majority_makes_durable_writes_impossible_and_nothing_else(node: NodeThread) -> None:
    with ready(node.port, *ALL) as raw:
        assert set_topology(raw, 5, ["a", None, None]) == OK
        assert raw.ask(durable(b"k", 5)).specific == Status.DURABILITY_IMPOSSIBLE
        assert raw.ask(kv.Set(0, 0, b"\0k", b"[1]", vbucket=5)).specific == OK
        assert set_topology(raw, 5, ["a"]) == OK
        assert raw.ask(durable(b"k", 5)).specific == OK
