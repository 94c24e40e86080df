"""A cluster of processes: its commands, its failovers, and clients that follow the map."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.cluster.chaos_clients import Client, Reader
from tests.support.by_id import ById
from upriver.cli import cli
from upriver.client.blocking import connect
from upriver.client.changes import Mutation
from upriver.cluster import LocalCluster, local_cluster
from upriver.cluster.manager import STATE_FILE, UnsafeFailover
from upriver.cluster.plan import ClusterState, Move
from upriver.errors import UpriverError
from upriver.model import VbucketState, vbucket_of
from upriver.wire.constants import Opcode
from upriver.wire.messages.session import Persistence

VBUCKETS = 16


@pytest.fixture(scope="module")
def pair() -> Iterator[LocalCluster]:
    """Two nodes for the tests that leave them as they found them."""
    with local_cluster(2, 1, VBUCKETS, lazy=True) as cluster:
        yield cluster


def actives(state: ClusterState) -> Counter[int]:
    return Counter(chain[0] for chain in state.owners)


def test_a_failover_promotes_replicas_and_the_node_that_comes_back_follows_the_new_branch() -> None:
    """The replica missed the last writes: readers are rolled back, and so is the node that had them."""
    with local_cluster(2, 1, VBUCKETS, lazy=True, enable_faults=True) as cluster:
        reader = Reader(cluster.connection_string)
        reader.start()
        with connect(cluster.connection_string) as database:
            database.set_many({b"k%d" % n: b"[1]" for n in range(500)})
            cluster.sync()
            wait_until(lambda: sum(map(len, reader.changes.values())) >= 500)
            stall(cluster, 0)
            database.set_many({b"k%d" % n: b"[2]" for n in range(500)})
            wait_until(lambda: sum(map(len, reader.changes.values())) >= 1000)
            cluster.nodes[0].kill()
            cluster.fail_over(0)
            database.refresh()
            led = [vb for vb, chain in enumerate(cluster.state.owners) if chain[0] == 1]
            assert len(led) == VBUCKETS
            lost = [key for key in (b"k%d" % n for n in range(500)) if database.get(key).value == b"[1]"]
            assert lost
            database.set_many({b"new%d" % n: b"[3]" for n in range(100)})
            cluster.nodes[0].restart()
            cluster.sync()
        reports = cluster.manager.reports()
        for vb in range(VBUCKETS):
            assert reports[0][vb].branches == reports[1][vb].branches
            assert reports[0][vb].consistent == reports[1][vb].high_seqno
            assert reports[0][vb].state == VbucketState.REPLICA
        reader.catch_up()
        assert reader.failure is None
        assert reader.rollbacks > 0
        table = {key: row.value for (_, key), row in reader.table().items()}
        with connect(cluster.connection_string) as database:
            assert {key: database.get(key).value for key in table} == table


def stall(cluster: LocalCluster, number: int) -> None:
    """Replication from a node hears nothing; readers still do."""
    nodes = cluster.nodes
    source = nodes[number].member
    for other in nodes:
        name = f"replication:{source}->{other.member}:default"
        arguments = ["fault", "stall", str(source), "--name", name, "--seconds", "25"]
        assert CliRunner().invoke(cli, arguments).exit_code == 0


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_failover_that_could_lose_durable_writes_is_refused_unless_forced(pair: LocalCluster) -> None:
    pair.sync()
    pair.nodes[1].pause()
    with pytest.raises(UnsafeFailover):
        pair.fail_over(0)
    pair.nodes[1].resume()


def test_a_node_that_crashed_leads_again_only_where_no_replica_has_more() -> None:
    with local_cluster(3, 1, VBUCKETS, lazy=True) as cluster:
        cluster.sync()
        led = [vb for vb, chain in enumerate(cluster.state.owners) if chain[0] == 0]
        forgotten = next(key for key in (b"k%d" % n for n in range(100)) if vbucket_of(key, VBUCKETS) in led)
        client = Client(cluster.connection_string)
        lead = client._connection(forgotten)
        assert lead is not None
        assert lead.ask([Persistence.under(Opcode.STOP_PERSISTENCE)()])[0].status == 0
        client.close()
        with connect(cluster.connection_string) as database:
            database.set(forgotten, b"[1]")
        cluster.sync()
        cluster.nodes[0].kill()
        cluster.nodes[0].restart()
        assert actives(cluster.state)[0] == len(led) - 1
        with connect(cluster.connection_string) as database:
            assert database.get(forgotten).value == b"[1]"
        cluster.sync()
        cluster.rebalance()
        assert sorted(actives(cluster.state).values()) == [5, 5, 6]


def test_a_node_that_was_stopped_in_good_order_goes_on_as_it_was(pair: LocalCluster) -> None:
    with connect(pair.connection_string) as database:
        database.set_many({b"k%d" % n: b"[1]" for n in range(50)})
    pair.sync()
    before = pair.manager.reports()[0]
    pair.nodes[0].restart()
    after = pair.manager.reports()[0]
    assert {vb: row.branches for vb, row in after.items()} == {vb: row.branches for vb, row in before.items()}
    assert actives(pair.state) == {0: 8, 1: 8}


def test_a_reader_resumes_with_its_positions_at_whichever_node_it_asks_first(pair: LocalCluster) -> None:
    """The bucket has one uuid, so its checkpoints are good everywhere."""
    addresses = [f"couchbase://{node.member}" for node in pair.nodes]
    with connect(addresses[0]) as database, database.changes(end="now") as feed:
        before = [change for change in feed if isinstance(change, Mutation)]
        positions = feed.positions()
    with connect(addresses[1]) as database:
        database.set(b"later", b"[1]")
        with database.changes(start=positions, end="now") as feed:
            after = [change.key for change in feed if isinstance(change, Mutation)]
    assert after == [b"later"]
    assert b"later" not in {change.key for change in before}


def test_a_move_to_a_node_that_does_not_answer_leaves_everything_where_it_was(pair: LocalCluster) -> None:
    pair.sync()
    pair.nodes[1].pause()
    with pytest.raises(UpriverError):
        pair.manager.move_all([Move(0, 0, 1)], timeout_s=0.5)
    pair.nodes[1].resume()
    assert pair.state.owners[0] == (0, 1)
    with connect(pair.connection_string) as database:
        database.set_many({b"k%d" % n: b"[2]" for n in range(50)})
    pair.sync()


def test_an_old_copy_of_the_managers_state_does_not_make_a_second_active(pair: LocalCluster, tmp_path: Path) -> None:
    """Somebody restores the manager's file from a backup, after a failover, and starts the node again."""
    pair.sync()
    file, copy = pair.directory / STATE_FILE, tmp_path / "backup"
    copy.write_text(file.read_text())
    pair.nodes[0].stop()
    pair.fail_over(0)
    with connect(pair.connection_string) as database:
        database.set_many({b"after%d" % n: b"[1]" for n in range(50)})
    file.write_text(copy.read_text())
    pair.nodes[0].restart()
    reports = pair.manager.reports()
    led = Counter(vb for rows in reports.values() for vb, row in rows.items() if row.state == VbucketState.ACTIVE)
    assert led == dict.fromkeys(range(VBUCKETS), 1)
    assert actives(pair.state) == {1: VBUCKETS}
    with connect(pair.connection_string) as database:
        assert database.get(b"after7").value == b"[1]"
    pair.sync()
    pair.rebalance()
    pair.sync()


def test_every_node_tells_of_all_nodes_and_the_same_bucket(pair: LocalCluster) -> None:
    pair.nodes[1].restart()
    pools = [asked(pair, number, "/pools/default") for number in range(2)]
    assert named(pools[0]) == named(pools[1])
    assert len(named(pools[0])) == 2
    assert [[each.get("thisNode", False) for each in pool["nodes"]] for pool in pools] == [[True, False], [False, True]]
    buckets = [asked(pair, number, "/pools/default/buckets/default") for number in range(2)]
    assert {each["uuid"] for each in buckets} == {pair.state.uuid}
    assert {each["replicaNumber"] for each in buckets} == {1}
    assert {len(each["nodes"]) for each in buckets} == {2}


def named(pool: Any) -> set[str]:
    return {each["otpNode"] for each in pool["nodes"]}


def asked(cluster: LocalCluster, number: int, path: str) -> Any:
    with urllib.request.urlopen(url(cluster, number) + path, timeout=30) as answer:
        return json.loads(answer.read())


def test_a_collection_made_at_one_node_is_there_at_all_and_at_those_that_were_away(pair: LocalCluster) -> None:
    pair.nodes[1].stop()
    collections(pair, 0, "create", "shop.orders", "--max-ttl", "3600")
    pair.nodes[1].restart()
    assert names(pair, 1) == names(pair, 0) == ["_default._default", "shop.orders"]
    pair.sync()
    [orders] = [int(line.split()[1], 16) for line in listed(pair, 0) if line.startswith("shop.orders")]
    with connect(pair.connection_string) as database:
        ById(database, orders).set_many({b"order%d" % n: b"[1]" for n in range(50)})
    collections(pair, 1, "create", "shop.returns")
    assert names(pair, 0) == ["_default._default", "shop.orders", "shop.returns"]
    refused = CliRunner().invoke(cli, ["collections", "create", str(pair.nodes[0].member), "shop.returns"])
    assert "already exists" in refused.output
    pair.sync()
    pair.nodes[0].kill()
    pair.fail_over(0)
    with connect(pair.connection_string) as database:
        assert {ById(database, orders).get(b"order%d" % n).value for n in range(50)} == {b"[1]"}
    collections(pair, 1, "drop", "shop", "--yes")
    pair.nodes[0].restart()
    assert names(pair, 0) == ["_default._default"]
    pair.sync()
    pair.rebalance()
    pair.sync()


def url(cluster: LocalCluster, number: int) -> str:
    return f"http://127.0.0.1:{cluster.nodes[number].member.mgmt}"


def collections(cluster: LocalCluster, number: int, command: str, *arguments: str) -> None:
    result = CliRunner().invoke(cli, ["collections", command, str(cluster.nodes[number].member), *arguments])
    assert result.exit_code == 0, result.output


def listed(cluster: LocalCluster, number: int) -> list[str]:
    return CliRunner().invoke(cli, ["collections", "list", str(cluster.nodes[number].member)]).output.splitlines()


def names(cluster: LocalCluster, number: int) -> list[str]:
    return sorted(line.split()[0] for line in listed(cluster, number))


def test_writers_keep_writing_while_nodes_join_and_leave() -> None:
    with local_cluster(2, 1, VBUCKETS, lazy=True) as cluster:
        written: dict[bytes, bytes] = {}
        stopping = threading.Event()

        def write() -> None:
            with connect(cluster.connection_string) as database:
                for n in range(1_000_000):
                    if stopping.is_set():
                        return
                    key, value = b"k%d" % (n % 200), b"[%d]" % n
                    database.set(key, value)
                    written[key] = value

        writer = threading.Thread(target=write)
        writer.start()
        try:
            cluster.add()
            assert cluster.rebalance() == 5
            cluster.manager.remove("0")
            assert len(cluster.state.members) == 2
            assert actives(cluster.state) == {0: 8, 1: 8}
        finally:
            stopping.set()
            writer.join(30)
        with connect(cluster.connection_string) as database:
            assert {key: database.get(key).value for key in written} == written


def test_the_commands(tmp_path: Path) -> None:
    """As an operator does it: start in the foreground, look, fail over, come back, stop with Ctrl-C."""
    upriver = [sys.executable, "-m", "upriver"]
    data = ["--data", str(tmp_path)]
    start = [*upriver, "cluster", "start", *data, "--nodes", "2", "--replicas", "1", "--vbuckets", "8", "--lazy"]
    process = subprocess.Popen(start, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        word, connection = process.stdout.readline().split()
        assert word == "ready"
        with connect(connection) as database:
            database.set_many({b"k%d" % n: b"{}" for n in range(100)})
        status = run_json("cluster", "status", *data, "--json")
        assert [row["active"] for row in status["nodes"]] == [4, 4]
        assert [row["status"] for row in status["nodes"]] == ["ok", "ok"]
        assert run_json("move", *data, "--vbucket", "0", "--to", "1", "--json") == {"moved": 1, "map_updated": True}
        assert run_json("cluster", "rebalance", *data, "--json")["moved"] == 1
        wait_until(lambda: all_complete(data))
        assert run_json("cluster", "failover", "0", *data, "--json")["promoted"] == 4
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        process.stdout.close()
    with local_cluster(data=tmp_path, lazy=True) as again:
        again.manager.watch()
        assert again.connection_string == connection
        with connect(connection) as database:
            assert database.get(b"k7").value == b"{}"


def all_complete(data: list[str]) -> bool:
    nodes = run_json("cluster", "status", *data, "--json")["nodes"]
    return all(row["replica"] == row["replica_complete"] for row in nodes)


def run_json(*arguments: str) -> Any:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)
