"""Durable writes in a cluster of real processes: which nodes must have a write, and what happens if they do not."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.cluster.chaos_clients import Client
from upriver.cli import cli
from upriver.cluster.local import LocalCluster, local_cluster
from upriver.cluster.manager import Manager, UnsafeFailover
from upriver.cluster.nodes import Nodes
from upriver.errors import Status
from upriver.model import vbucket_of
from upriver.wire import Message
from upriver.wire.constants import Opcode, RequestFrameId
from upriver.wire.framing import FrameInfo
from upriver.wire.messages import kv
from upriver.wire.messages.session import Persistence

VBUCKETS = 4


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with local_cluster(2, 1, VBUCKETS, lazy=True, enable_faults=True) as made:
        yield made


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    cluster.sync()
    made = Client(cluster.connection_string)
    yield made
    made.close()


def durability(level: int, timeout_ms: int = 5000) -> tuple[FrameInfo, ...]:
    return (FrameInfo(RequestFrameId.DURABILITY, bytes((level,)) + timeout_ms.to_bytes(2, "big")),)


def ask(client: Client, key: bytes, message: Message) -> int:
    """The status of the first try; nothing is retried."""
    message.vbucket = vbucket_of(key, VBUCKETS)  # type: ignore[misc]
    connection = client._connection(key)
    assert connection is not None
    return int(connection.ask([message])[0].status)


def put(client: Client, key: bytes, value: bytes, level: int = 1, timeout_ms: int = 5000) -> int:
    return ask(client, key, kv.Set(key=b"\0" + key, value=value, frame_infos=durability(level, timeout_ms)))


def key_led_by(cluster: LocalCluster, member: int, prefix: str) -> bytes:
    owners = cluster.state.owners
    keys = (f"{prefix}{n}".encode() for n in range(1000))
    return next(key for key in keys if owners[vbucket_of(key, VBUCKETS)][0] == member)


def value_of(client: Client, key: bytes) -> bytes:
    return client._database.get(key).value


@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_durable_write_is_there_when_its_node_is_gone(cluster: LocalCluster, client: Client, level: int) -> None:
    key = key_led_by(cluster, 0, f"gone-{level}-")
    assert put(client, key, b"[%d]" % level, level) == Status.SUCCESS
    cluster.nodes[0].kill()
    cluster.fail_over(0)
    client._database.refresh()
    assert value_of(client, key) == b"[%d]" % level
    cluster.nodes[0].restart()
    cluster.rebalance()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_every_kind_of_write_can_be_durable(cluster: LocalCluster, client: Client, level: int) -> None:
    key, infos = b"kinds-%d" % level, durability(level)
    wire_key = b"\0" + key
    assert ask(client, key, kv.Add(key=wire_key, value=b"1", frame_infos=infos)) == 0
    assert ask(client, key, kv.Add(key=wire_key, value=b"1", frame_infos=infos)) == Status.KEY_EEXISTS
    assert ask(client, key, kv.Counter(4, 0, 0, wire_key, frame_infos=infos)) == 0
    assert ask(client, key, kv.Append(wire_key, b"0", frame_infos=infos)) == 0
    assert ask(client, key, kv.Append.under(Opcode.PREPEND)(wire_key, b"2", frame_infos=infos)) == 0
    assert value_of(client, key) == b"250"
    assert ask(client, key, kv.Set.under(Opcode.REPLACE)(key=wire_key, value=b"r", frame_infos=infos)) == 0
    assert value_of(client, key) == b"r"
    assert ask(client, key, kv.Delete(wire_key, frame_infos=infos)) == 0
    assert ask(client, key, kv.Delete(wire_key, frame_infos=infos)) == Status.KEY_ENOENT


def test_while_the_replica_is_silent_the_outcome_is_ambiguous_the_key_busy_and_the_old_value_stays(
    cluster: LocalCluster, client: Client
) -> None:
    key = key_led_by(cluster, 0, "slow-")
    assert put(client, key, b"[1]") == 0
    other = Client(cluster.connection_string)
    cluster.nodes[1].pause()
    try:
        began = time.monotonic()
        connection = client._connection(key)
        assert connection is not None
        message = kv.Set(key=b"\0" + key, value=b"[2]", frame_infos=durability(1, 1500))
        message.vbucket = vbucket_of(key, VBUCKETS)  # type: ignore[misc]
        connection._send(message.encode())
        deadline = time.monotonic() + 1.0
        busy = 0
        while busy != Status.SYNC_WRITE_IN_PROGRESS and time.monotonic() < deadline:
            busy = ask(other, key, kv.Set(key=b"\0" + key, value=b"[3]"))
        assert busy == Status.SYNC_WRITE_IN_PROGRESS
        connection._deadline = time.monotonic() + 60
        assert connection._next().status == Status.SYNC_WRITE_AMBIGUOUS
        assert time.monotonic() - began >= 1.4
        assert value_of(other, key) != b"[2]"
        assert ask(other, key, kv.Set(key=b"\0" + key, value=b"[4]")) == 0  # it was aborted: the key is free again
    finally:
        cluster.nodes[1].resume()
        other.close()


def test_without_enough_replicas_in_the_map_a_durable_write_is_impossible(
    cluster: LocalCluster, client: Client
) -> None:
    key = key_led_by(cluster, 0, "alone-")
    cluster.nodes[1].kill()
    cluster.fail_over(1)
    client._database.refresh()
    assert put(client, key, b"[1]") == Status.DURABILITY_IMPOSSIBLE
    assert ask(client, key, kv.Set(key=b"\0" + key, value=b"[1]")) == 0
    cluster.nodes[1].restart()
    cluster.rebalance()
    cluster.sync()
    client._database.refresh()
    assert put(client, key, b"[2]") == 0


def test_a_prepare_that_was_under_way_when_its_node_crashed_is_resolved(cluster: LocalCluster, client: Client) -> None:
    """The client never hears of it again; but the key is not busy for ever, and both nodes agree."""
    key = key_led_by(cluster, 0, "crash-")
    assert put(client, key, b"[1]", level=3) == 0
    cluster.nodes[1].pause()
    connection = client._connection(key)
    assert connection is not None
    message = kv.Set(key=b"\0" + key, value=b"[2]", frame_infos=durability(3, 60_000))
    message.vbucket = vbucket_of(key, VBUCKETS)  # type: ignore[misc]
    connection._send(message.encode())
    time.sleep(0.3)  # it is prepared, and on disk
    cluster.nodes[0].kill()
    cluster.nodes[1].resume()
    cluster.nodes[0].restart()
    cluster.sync()
    fresh = Client(cluster.connection_string)
    deadline = time.monotonic() + 10
    status = -1
    while status != 0 and time.monotonic() < deadline:
        status = put(fresh, key, b"[3]")
    assert status == 0
    assert value_of(fresh, key) == b"[3]"
    fresh.close()
    cluster.rebalance()


@pytest.fixture
def three() -> Iterator[LocalCluster]:
    with local_cluster(3, 2, VBUCKETS, lazy=True, enable_faults=True) as made:
        yield made


def put_in_memory_only(cluster: LocalCluster, key: bytes) -> None:
    """A write that the active acknowledges to the client and loses in a crash."""
    client = Client(cluster.connection_string)
    assert ask(client, key, Persistence.under(Opcode.STOP_PERSISTENCE)()) == 0
    assert put(client, key, b"[1]") == Status.SUCCESS
    client.close()


def read_when_possible(cluster: LocalCluster, key: bytes) -> bytes:
    client = Client(cluster.connection_string)
    _, response = client.send(key, get(key))
    client.close()
    assert response is not None
    return response.value


def get(key: bytes) -> Message:
    message = kv.Get(b"\0" + key)
    message.vbucket = vbucket_of(key, VBUCKETS)  # type: ignore[misc]
    return message


def test_a_node_that_crashed_does_not_lead_again_while_a_replica_has_what_it_forgot(three: LocalCluster) -> None:
    """Nobody had noted that the other replicas were complete: one had just crashed, too."""
    key = key_led_by(three, 0, "forgotten-")
    three.nodes[2].kill()
    put_in_memory_only(three, key)
    three.nodes[0].kill()
    three.nodes[2].start()
    three.nodes[0].restart()
    assert read_when_possible(three, key) == b"[1]"
    three.sync()


def test_a_node_that_crashed_waits_until_the_nodes_that_may_have_more_are_asked(three: LocalCluster) -> None:
    key = key_led_by(three, 0, "waits-")
    three.nodes[1].kill()
    put_in_memory_only(three, key)  # on 0, which forgets it, and on 2
    three.nodes[2].pause()
    three.nodes[0].kill()
    three.nodes[0].start()
    three.nodes[1].start()
    three.manager = Manager(three.directory, timeout_s=1.0)
    three.manager.watch()
    assert three.manager.waiting(three.manager.node_reports()) == {0: [2], 1: [2]}
    command = ["cluster", "status", "--json", "--data", str(three.directory)]
    shown = json.loads(CliRunner().invoke(cli, command, catch_exceptions=False).stdout)
    assert [node["status"] for node in shown["nodes"]] == ["waiting for node 2", "waiting for node 2", "away"]
    with pytest.raises(UnsafeFailover):
        three.fail_over(2)  # active for nothing here, but perhaps the only one that has the write
    three.nodes[2].resume()
    three.manager.watch()
    assert read_when_possible(three, key) == b"[1]"
    three.sync()


def test_a_fenced_replica_acknowledges_nothing_until_the_next_map(cluster: LocalCluster, client: Client) -> None:
    """Otherwise a node that only seems to be gone could be told that a write is durable, and then be replaced."""
    key = key_led_by(cluster, 0, "fenced-")
    assert put(client, key, b"[1]") == 0
    state = cluster.state
    report = Nodes().fence(state.members[1], state.bucket, state.members[0])
    assert report.fenced
    assert put(client, key, b"[2]", timeout_ms=500) == Status.SYNC_WRITE_AMBIGUOUS
    after = cluster.manager.node_reports()[1]
    vb = vbucket_of(key, VBUCKETS)
    assert after.vbuckets[vb].high_seqno == report.vbuckets[vb].high_seqno
    cluster.manager.watch()  # the manager that fenced it has died: all nodes continue with a new map
    cluster.sync()
    assert put(client, key, b"[3]") == 0


def test_a_failover_that_is_refused_leaves_everybody_following_as_before(three: LocalCluster) -> None:
    key = key_led_by(three, 0, "refused-")
    three.nodes[2].kill()
    with pytest.raises(UnsafeFailover):
        three.fail_over(0)
    client = Client(three.connection_string)
    assert put(client, key, b"[1]") == 0
    client.close()
