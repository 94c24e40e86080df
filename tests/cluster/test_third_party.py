"""``upriver replicate`` and ``upriver move`` between two real nodes, with writers that do not stop for it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from tests.cluster.chaos_clients import Client
from tests.cluster.old_server import OldServer
from tests.cluster.unruly_proxy import ProxyLoop
from upriver.cli import cli
from upriver.client.blocking import connect
from upriver.client.options import ConnectOptions
from upriver.cluster.connection import ReplicationConnection
from upriver.cluster.mover import MoveOutcome, Mover
from upriver.cluster.relay import Side
from upriver.errors import Status
from upriver.model import VbucketState, vbucket_of
from upriver.protocol.topology import Address
from upriver.testing import RunningNode, node
from upriver.wire import Opcode
from upriver.wire.messages import kv

VBUCKETS = 8


@pytest.fixture
def nodes() -> Iterator[tuple[RunningNode, RunningNode]]:
    with node(vbuckets=VBUCKETS, lazy=True) as source, node(vbuckets=VBUCKETS, lazy=True) as target:
        yield source, target


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def options(running: RunningNode) -> ConnectOptions:
    return ConnectOptions.parse(running.connection_string)


def test_everything_is_carried_over_and_the_lag_of_each_vbucket_is_reported(
    nodes: tuple[RunningNode, RunningNode],
) -> None:
    source, target = nodes
    documents = {b"k%d" % n: b'{"n":%d}' % n for n in range(3000)}
    with connect(source.connection_string) as database:
        database.set_many(documents)
        highs = database.high_seqnos()
    refused = CliRunner().invoke(cli, ["replicate", source.connection_string, target.connection_string, "--once"])
    assert refused.exit_code == 1
    assert "--demote" in refused.output
    ends = source.connection_string, target.connection_string
    arguments = ("replicate", *ends, "--once", "--demote", "--json", "--lag")
    last = json.loads(run(*arguments).splitlines()[-1])
    assert last["lag_of"] == {str(vb): 0 for vb in range(VBUCKETS)}
    assert (last["streaming"], last["seqnos"]) == (VBUCKETS, sum(highs.values()))
    again = json.loads(run(*arguments).splitlines()[-1])
    assert again["bytes"] < last["bytes"] / 2  # the replicas go on where they were
    asyncio.run(promote(source, target))
    with connect(target.connection_string) as database:
        assert {key: database.get(key).value for key in list(documents)[:100]} == dict(list(documents.items())[:100])
        assert database.high_seqnos() == highs


async def promote(source: RunningNode, target: RunningNode) -> None:
    connection = await third_party(source, target, "promote")
    for vb in range(VBUCKETS):
        await connection.set_vbucket(Side.CONSUMER, vb, VbucketState.ACTIVE)
    await connection.close()


class Ping(threading.Thread):
    """Counts a document up for as long as it runs, at whichever of two nodes takes it."""

    def __init__(self, running: tuple[RunningNode, ...], key: bytes) -> None:
        super().__init__(daemon=True)
        self._running, self._key = running, key
        self.acknowledged = 0
        self.stopping = False
        self.longest_s = 0.0

    def run(self) -> None:
        clients = [Client(each.connection_string, timeout_s=60.0) for each in self._running]
        message = kv.Counter(1, 1, 0, b"\0" + self._key, vbucket=vbucket_of(self._key, VBUCKETS))
        while not self.stopping:
            began = time.monotonic()
            self._count(clients, message)
            self.longest_s = max(self.longest_s, time.monotonic() - began)
        for client in clients:
            client.close()

    def _count(self, clients: list[Client], message: kv.Counter) -> None:
        for client in clients * 1000:
            connection = client._connection(self._key)
            assert connection is not None
            status = connection.ask([message])[0].status
            if status == Status.SUCCESS:
                self.acknowledged += 1
                return
            assert status in (Status.NOT_MY_VBUCKET, Status.ETMPFAIL), hex(status)


def test_no_write_is_lost_or_done_twice_while_vbuckets_move_there_and_back(
    nodes: tuple[RunningNode, RunningNode],
) -> None:
    source, target = nodes
    asyncio.run(clear(source, target))
    keys = {vbucket_of(b"p%d" % n, VBUCKETS): b"p%d" % n for n in range(100)}
    pings = [Ping(nodes, keys[vb]) for vb in (0, 3)]
    for ping in pings:
        ping.start()
    try:
        for _ in range(2):
            move_all(source, target)
            move_all(target, source)
    finally:
        for ping in pings:
            ping.stopping = True
            ping.join(30)
    with connect(source.connection_string) as database:
        for ping in pings:
            assert int(database.get(ping._key).value) == ping.acknowledged
            assert ping.acknowledged > 50


def move_all(source: RunningNode, target: RunningNode) -> None:
    ends = source.connection_string, "--to", target.connection_string
    assert json.loads(run("move", *ends, "--vbucket", "0-7", "--json")) == {"moved": 8, "map_updated": False}


async def third_party(source: RunningNode, target: RunningNode, name: str) -> ReplicationConnection:
    addresses = Address("127.0.0.1", source.kv_port), Address("127.0.0.1", target.kv_port)
    return await ReplicationConnection.open(addresses[0], addresses[1], options(source), name)


async def clear(source: RunningNode, target: RunningNode) -> None:
    """The target gives its vbuckets up: there must be one active."""
    connection = await third_party(source, target, "clear")
    for vb in range(VBUCKETS):
        await connection.set_vbucket(Side.CONSUMER, vb, VbucketState.DEAD)
    await connection.close()


def test_a_move_that_was_interrupted_is_repaired_by_the_next(nodes: tuple[RunningNode, RunningNode]) -> None:
    """The worst moment: the source has given the vbucket up, and the target has not become active."""
    source, target = nodes

    async def interrupt_and_repair() -> list[MoveOutcome]:
        await clear(source, target)
        connection = await third_party(source, target, "interrupted")
        await connection.set_vbucket(Side.CONSUMER, 0, VbucketState.PENDING)
        await connection.set_vbucket(Side.PRODUCER, 0, VbucketState.DEAD)
        await connection.close()
        outcomes: list[MoveOutcome] = []
        mover = Mover(options(source), options(target))
        for _ in range(2):
            await mover.move_all([0], lambda vb, outcome: outcomes.append(outcome))
        return outcomes

    with connect(source.connection_string) as database:
        database.set_many({b"k%d" % n: b"{}" for n in range(200)})
        high = database.high_seqnos()[0]
    assert asyncio.run(interrupt_and_repair()) == [MoveOutcome.MOVED, MoveOutcome.ALREADY_THERE]
    with connect(target.connection_string) as database:
        assert database.high_seqnos(complete=False) == {0: high}


@pytest.mark.parametrize("killed", ["source", "target"])
def test_a_crash_right_after_a_move_leaves_one_owner_and_every_document(
    nodes: tuple[RunningNode, RunningNode], killed: str
) -> None:
    """The source has forgotten nothing; the target may have to take the vbuckets over once more."""
    source, target = nodes
    asyncio.run(clear(source, target))
    with connect(source.connection_string) as database:
        database.set_many({b"k%d" % n: b"{}" for n in range(500)})
    move_all(source, target)
    (source if killed == "source" else target).restart(kill=True)
    assert set(asyncio.run(states(source, target, Side.PRODUCER))) == {VbucketState.DEAD}
    run("move", source.connection_string, "--to", target.connection_string, "--vbucket", "0-7", "--json")
    assert set(asyncio.run(states(source, target, Side.PRODUCER))) == {VbucketState.DEAD}
    with connect(target.connection_string) as database:
        assert {database.get(b"k%d" % n).value for n in range(500)} == {b"{}"}


async def states(source: RunningNode, target: RunningNode, side: Side) -> list[VbucketState | None]:
    connection = await third_party(source, target, "states")
    found = [await connection.vbucket_state(side, vb) for vb in range(VBUCKETS)]
    await connection.close()
    return found


def test_a_move_between_nodes_of_no_cluster_says_that_their_maps_do_not_change(
    nodes: tuple[RunningNode, RunningNode],
) -> None:
    source, target = nodes
    asyncio.run(clear(source, target))
    result = CliRunner().invoke(
        cli, ["move", source.connection_string, "--to", target.connection_string, "--vbucket", "0-3"]
    )
    assert result.exit_code == 0
    assert "moved 4 of 4" in result.stdout
    assert "cluster maps do not change" in result.stderr
    for each in nodes:
        with connect(each.connection_string) as database:
            assert {database.topology.active(vb) for vb in range(VBUCKETS)} == {Address("127.0.0.1", each.kv_port)}


def test_a_vbucket_that_is_active_at_both_ends_is_not_touched(nodes: tuple[RunningNode, RunningNode]) -> None:
    source, target = nodes
    result = CliRunner().invoke(
        cli, ["move", source.connection_string, "--to", target.connection_string, "--vbucket", "0"]
    )
    assert result.exit_code == 1
    assert "active at both ends" in result.output


@pytest.fixture
def old_nodes() -> Iterator[tuple[RunningNode, RunningNode, OldServer, OldServer]]:
    """Two nodes that speak as servers of version 6.0 do."""
    loop = ProxyLoop()
    servers = OldServer(loop), OldServer(loop)
    ports = [server.port for server in servers]
    with (
        node(vbuckets=VBUCKETS, lazy=True, advertised_kv_port=ports[0]) as source,
        node(vbuckets=VBUCKETS, lazy=True, advertised_kv_port=ports[1]) as target,
    ):
        servers[0].target, servers[1].target = source.kv_port, target.kv_port
        yield source, target, *servers
    loop.close()


def test_vbuckets_are_moved_and_replicated_between_servers_that_know_less(
    old_nodes: tuple[RunningNode, RunningNode, OldServer, OldServer],
) -> None:
    source, target, *old = old_nodes
    ends = [f"couchbase://127.0.0.1:{server.port}" for server in old]
    asyncio.run(clear(source, target))
    with connect(source.connection_string) as database:
        database.set_many({b"k%d" % n: b"{}" for n in range(500)})
        highs = database.high_seqnos()
    moved = run("move", ends[0], "--to", ends[1], "--vbucket", "0-3", "--json")
    assert json.loads(moved) == {"moved": 4, "map_updated": False}
    assert {Opcode.DCP_OPEN, Opcode.SET_VBUCKET} == {*old[1].refused}  # the old forms were really needed
    last = json.loads(run("replicate", *ends, "--vbuckets", "4-7", "--once", "--json").splitlines()[-1])
    assert (last["streaming"], last["lag"]) == (4, 0)
    with connect(target.connection_string) as database:
        assert database.high_seqnos(complete=False) == {vb: highs[vb] for vb in range(4)}


def test_replicating_some_vbuckets_does_not_fail_because_others_are_elsewhere(
    nodes: tuple[RunningNode, RunningNode],
) -> None:
    source, target = nodes
    asyncio.run(clear(source, target))
    with connect(source.connection_string) as database:
        database.set_many({b"k%d" % n: b"{}" for n in range(500)})
    asyncio.run(give_up(source, target, 0))
    ends = source.connection_string, target.connection_string
    last = json.loads(run("replicate", *ends, "--vbuckets", "4-7", "--once", "--json", "--lag").splitlines()[-1])
    assert last["lag_of"] == {str(vb): 0 for vb in range(4, 8)}


async def give_up(source: RunningNode, target: RunningNode, vb: int) -> None:
    connection = await third_party(source, target, "give up")
    await connection.set_vbucket(Side.PRODUCER, vb, VbucketState.DEAD)
    await connection.close()
