"""``spark.readStream.format("dcp")``: limits, starts, restarts, rollbacks."""

from __future__ import annotations

import json
import time

import pytest

from tests.spark.spark_world import (
    PATIENCE_S,
    ClusterWorld,
    Collected,
    World,
    drain,
    fold,
    forget_commits,
    start,
    stream,
    wait_until,
)
from tests.support.by_id import ById
from upriver.cluster.local import local_cluster
from upriver.model import vbucket_of
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position

pytestmark = pytest.mark.spark


def progress(query):
    return [p for p in query.recentProgress if p["batchId"] >= 0]


def test_available_now_reads_everything_in_batches_of_limited_size(spark, world: World, tmp_path):
    world.put(1000)
    rows = Collected()
    query = drain(stream(spark, world, maxRowsPerTrigger=300), rows, tmp_path)
    assert [len(batch) for batch in rows.batches.values()] == [300, 300, 300, 100, 0]  # the last one only closes
    assert rows.state() == world.state()
    source = progress(query)[0]["sources"][0]
    assert json.loads(source["latestOffset"])["lag"] == 700
    assert Offset.from_json(json.loads(source["endOffset"])).vbuckets == 4


def test_a_byte_limit_is_kept_by_what_rows_weighed_before(spark, world: World, tmp_path):
    world.put(600, value="x" * 1000)
    rows = Collected()
    drain(stream(spark, world, maxBytesPerTrigger=200_000), rows, tmp_path)
    sizes = [sum(len(row["value"]) for row in batch) for batch in rows.batches.values()]
    assert len(sizes) >= 3
    assert max(sizes) <= 260_000
    assert rows.state() == world.state()


def test_an_idle_query_makes_one_last_empty_batch_and_a_change_arrives(spark, world: World, tmp_path):
    """Offsets that are equal but look different would make a batch every few milliseconds."""
    world.put(100)
    rows = Collected()
    query = start(stream(spark, world, pollMilliseconds=50), rows, tmp_path)
    wait_until(lambda: len(rows.rows) == 100)
    wait_until(lambda: 1 in rows.batches)
    time.sleep(2)  # forty polls, or fewer; there is nothing to find in any of them
    world.db.set(b"new", b"1")
    wait_until(lambda: len(rows.rows) == 101)
    query.stop()
    assert [len(rows.batches[number]) for number in (0, 1, 2)] == [100, 0, 1]


def test_latest_is_fixed_once_even_if_the_first_batch_is_replayed_after_a_crash(spark, world: World, tmp_path):
    """The start of a query is not persisted by Spark; the empty first batch does that (ARCHITECTURE.md#spark)."""
    world.put(100, "old")
    frame = stream(spark, world, startingOffsets="latest")
    rows = Collected()
    drain(frame, rows, tmp_path)
    assert rows.rows == []
    world.put(10, "new")
    forget_commits(tmp_path)
    world.put(10, "newer")
    drain(frame, rows, tmp_path)
    assert {bytes(row["key"])[:3] for row in rows.rows} == {b"new"}
    assert len(rows.state()) == 20


def test_a_start_per_vbucket(spark, world: World, tmp_path):
    world.put(400)
    highs = world.db.high_seqnos()
    rows = Collected()
    drain(stream(spark, world, startingOffsets=json.dumps({"0": "latest", "1": highs[1] - 5})), rows, tmp_path)
    read = {vb: sum(row["vbucket"] == vb for row in rows.rows) for vb in highs}
    assert read == {0: 0, 1: 5, 2: highs[2], 3: highs[3]}


def test_trigger_once_takes_all_whatever_the_limit_says(spark, world: World, tmp_path):
    world.put(500)
    rows = Collected()
    query = start(stream(spark, world, maxRowsPerTrigger=100), rows, tmp_path, once=True)
    assert query.awaitTermination(PATIENCE_S)
    assert [len(batch) for batch in rows.batches.values()] == [500]


def test_a_restart_continues_from_the_checkpoint(spark, world: World, tmp_path):
    rows = Collected()
    frame = stream(spark, world)
    for prefix in ("a", "b", "c"):
        world.put(200, prefix)
        drain(frame, rows, tmp_path)
    assert len(rows.rows) == 600
    assert rows.state() == world.state()


def test_a_batch_without_commit_is_replayed_to_the_same_state(spark, world: World, tmp_path):
    world.put(300)
    rows, frame = Collected(), stream(spark, world)
    drain(frame, rows, tmp_path)
    for name in ("1", ".1.crc"):
        (tmp_path / "offsets" / name).unlink()  # the batch that closed it
    forget_commits(tmp_path)
    world.put(100)  # rewritten: the replay finds some of its rows deduplicated
    rows.batches.clear()
    drain(frame, rows, tmp_path)
    assert rows.state() == world.state()


def test_a_failover_that_loses_history_is_a_rollback_row_and_then_the_new_branch(spark, world: World, tmp_path):
    world.put(400)
    rows, frame = Collected(), stream(spark, world)
    drain(frame, rows, tmp_path)
    key = world.key_of(2)
    world.db.set(key, b"lost")
    drain(frame, rows, tmp_path)
    assert rows.state()[key] == b"lost"
    lost_branch = world.db.failover_logs([2])[2].uuid
    world.fault("failover", vbucket=2, lose=1)
    drain(frame, rows, tmp_path)
    assert rows.state() == world.state()
    assert key not in rows.state() or rows.state()[key] != b"lost"
    told = [row for row in rows.rows if row["event"] == "rollback"]
    assert [(row["vbucket"], row["epoch"], row["vbuuid"]) for row in told] == [(2, 1, lost_branch)]
    world.db.set(key, b"new")
    drain(frame, rows, tmp_path)
    assert rows.state() == world.state()
    assert rows.rows[-1]["epoch"] == 1


def test_rollback_can_be_made_to_fail_the_query(spark, world: World, tmp_path):
    world.put(100)
    frame = stream(spark, world, onRollback="fail")
    drain(frame, Collected(), tmp_path)
    world.fault("failover", vbucket=1, lose=5)
    world.put(100, "more")
    query = start(frame, Collected(), tmp_path, availableNow=True)
    with pytest.raises(Exception, match="vbucket 1 lost history"):
        query.awaitTermination(PATIENCE_S)


class SilentLoss:
    """docs/protocol/rollback.md#positions: a document is written early and again late; a reader stops in between,
    inside the snapshot.

    The replica has everything but the late write. Then the active dies, and the early version is alive again.
    """

    def __init__(self, world: ClusterWorld) -> None:
        self.world, self.cluster = world, world.cluster
        first = self.cluster.nodes[0].member.kv
        self.vbucket = next(vb for vb in range(world.vbuckets) if world.db.topology.active(vb).port == first)
        keys = [key for n in range(300) if vbucket_of(key := f"s{n}".encode(), world.vbuckets) == self.vbucket]
        self.document = keys[0]
        world.db.set(self.document, b"early")
        for key in keys[1:21]:
            world.db.set(key, b"x")
        wait_until(lambda: self._on_the_replica() == 21)
        self.cluster.nodes[1].stop()
        world.db.set(self.document, b"late")
        self.cluster.nodes[0].restart()  # from disk there is only the newest version of a document
        world.db.refresh()

    def _on_the_replica(self) -> int:
        return self.cluster.manager.reports()[1][self.vbucket].persisted_seqno

    def fail_over(self) -> None:
        self.cluster.nodes[0].kill()
        self.cluster.nodes[1].restart()
        self.cluster.fail_over(0, force=True)
        self.world.db.refresh()
        assert self.world.state()[self.document] == b"early"


@pytest.fixture
def history():
    with local_cluster(nodes=2, replicas=1, vbuckets=4, lazy=True) as cluster, ClusterWorld(cluster) as world:
        yield SilentLoss(world)


def test_a_failover_inside_a_snapshot_brings_the_hidden_version_back(spark, history, tmp_path):
    rows, frame = Collected(), stream(spark, history.world, maxRowsPerTrigger=10, timeoutSeconds=PATIENCE_S)
    query = start(frame, DiesAfter(rows, batches=1), tmp_path)  # half of the vbuckets are on a node that is down
    with pytest.raises(Exception, match="the driver died"):
        query.awaitTermination(PATIENCE_S)
    assert [row["seqno"] for row in rows.rows] == list(range(2, 11))
    history.fail_over()
    drain(frame, rows, tmp_path)
    assert rows.state() == history.world.state()


def test_the_naive_claim_loses_that_version_for_ever(history):
    """The same history, resumed as "I have everything up to 10": the node lets the reader in, and is right to."""
    world, vb = history.world, history.vbucket
    first = world.read(vbuckets=[vb], end={vb: 10})
    branch = world.db.failover_logs([vb])[vb].uuid
    history.fail_over()
    rest = world.read(vbuckets=[vb], start={vb: Position(branch, 10, 10, 10)}, end={vb: 21})
    assert [row["seqno"] for row in rest] == list(range(11, 22))  # no rollback, no complaint
    assert history.document not in fold(first + rest)


class DiesAfter:
    """A sink that takes some batches and then fails, as a driver that dies in the middle of the next."""

    def __init__(self, rows: Collected, batches: int) -> None:
        self.rows, self.left = rows, batches

    def __call__(self, frame, batch_id):
        if self.left == 0:
            raise RuntimeError("the driver died")
        self.left -= 1
        self.rows(frame, batch_id)


def test_a_query_outlives_a_restart_of_its_node(spark, world: World, tmp_path):
    world.put(200)
    rows = Collected()
    query = start(stream(spark, world), rows, tmp_path)
    wait_until(lambda: len(rows.state()) == 200)
    world.node.restart(kill=True)
    world.db.refresh()
    world.put(50, "after")
    wait_until(lambda: rows.state() == world.state())
    assert query.isActive
    query.stop()


def test_purged_tombstones_mean_reading_again_from_the_beginning(spark, world: World, tmp_path):
    world.put(100)
    rows, frame = Collected(), stream(spark, world)
    drain(frame, rows, tmp_path)
    gone = world.key_of(3, "k")
    world.db.delete(gone)
    world.put(100, "other")
    for vb in range(world.vbuckets):
        world.fault("purge", vbucket=vb)
    drain(frame, rows, tmp_path)
    assert gone not in fold(rows.rows)
    assert rows.state() == world.state()


def test_a_collection_filter_delivers_only_that_collection(spark, world: World, tmp_path):
    manifest = {
        "uid": "1",
        "scopes": [
            {
                "name": "_default",
                "uid": "0",
                "collections": [{"name": "_default", "uid": "0"}, {"name": "wanted", "uid": "8"}],
            }
        ],
    }
    world.set_manifest(manifest)
    world.put(50)
    ById(world.db, 8).set_many({f"w{n}".encode(): b"1" for n in range(30)})
    rows = Collected()
    drain(stream(spark, world, collections="wanted"), rows, tmp_path)
    documents = [row for row in rows.rows if row["event"] == "mutation"]
    assert {row["collection"] for row in documents} == {"wanted"}
    assert len(documents) == 30
    with pytest.raises(Exception, match=r"no collection _default.typo; there are _default._default, _default.wanted"):
        drain(stream(spark, world, collections="typo"), rows, tmp_path / "typo")
