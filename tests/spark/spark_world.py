"""A node with a client, and the helpers of the tests about Spark."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

from upriver.client.blocking import Database, connect
from upriver.cluster.local import LocalCluster
from upriver.model import vbucket_of
from upriver.testing import RunningNode

PATIENCE_S = 600  # reached only if something is broken or the machine is overloaded
DOCUMENT = ("mutation", "deletion", "expiration")


class World:
    """A running node and its bucket."""

    def __init__(self, running: RunningNode) -> None:
        self.node = running
        self.db: Database = connect(running.connection_string, "default")

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc: object) -> None:
        self.db.close()

    @property
    def connection_string(self) -> str:
        return self.node.connection_string

    @property
    def vbuckets(self) -> int:
        return self.db.topology.vbuckets

    def options(self, **more: Any) -> dict[str, str]:
        return {"connection": self.connection_string, **{name: str(value) for name, value in more.items()}}

    def put(self, count: int, prefix: str = "k", value: str = '{"n": %d}') -> None:
        made = (value % n if "%d" in value else value for n in range(count))
        self.db.set_many({f"{prefix}{n}".encode(): text.encode() for n, text in enumerate(made)})

    def key_of(self, vbucket: int, prefix: str = "key") -> bytes:
        """A key that lives in this vbucket."""
        return next(k for n in range(100_000) if vbucket_of(k := f"{prefix}{n}".encode(), self.vbuckets) == vbucket)

    def http_port(self, vbucket: int | None) -> int:
        """The management port of the node to ask about this vbucket."""
        return self.node.http_port

    def fault(self, name: str, **arguments: Any) -> dict[str, Any]:
        url = f"http://127.0.0.1:{self.http_port(arguments.get('vbucket'))}/upriver/faults/{name}"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(arguments).encode(), headers, method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return dict(json.loads(answer.read()))

    def set_manifest(self, manifest: dict[str, Any]) -> None:
        from upriver.client._requests.operations import Ask
        from upriver.wire.messages.cluster import SetManifest

        def conversation():
            answers = yield Ask(self.db.topology.nodes[0], [SetManifest(json.dumps(manifest).encode())])
            assert answers[0].status == 0

        self.db.run(conversation())

    def state(self) -> dict[bytes, bytes]:
        """All live documents of the default collection, by a feed from the beginning."""
        found: dict[bytes, bytes] = {}
        for batch in self.db.change_batches(end="now"):
            for event, key, value in zip(*(batch[name].to_pylist() for name in ("event", "key", "value")), strict=True):
                if event == "mutation":
                    found[key] = value
                elif event in DOCUMENT:
                    found.pop(key, None)
        return found

    def read(self, **options: Any) -> list[dict[str, Any]]:
        return [row for batch in self.db.change_batches(**options) for row in batch.to_pylist()]

    def rows(self) -> list[dict[str, Any]]:
        return [row for batch in self.db.change_batches(end="now") for row in batch.to_pylist()]


class ClusterWorld(World):
    """The same on several nodes."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.db = connect(cluster.connection_string, "default")

    @property
    def connection_string(self) -> str:
        return self.cluster.connection_string

    def http_port(self, vbucket: int | None) -> int:
        running = [one.member for one in self.cluster.nodes if one.is_running]
        owner = self.db.refresh().active(vbucket or 0)
        return next((m.mgmt for m in running if owner and m.kv == owner.port), running[0].mgmt)


def read(spark: Any, world: World, **options: Any) -> Any:
    return spark.read.format("dcp").options(**world.options(**options)).load()


def stream(spark: Any, world: World, **options: Any) -> Any:
    return spark.readStream.format("dcp").options(**world.options(**options)).load()


class Collected:
    """The rows of a query, batch by batch, through ``foreachBatch``; a replayed batch replaces itself."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Any]] = {}

    def __call__(self, frame: Any, batch_id: int) -> None:
        self.batches[batch_id] = frame.collect()

    @property
    def rows(self) -> list[Any]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]

    def state(self) -> dict[bytes, bytes]:
        return fold(self.rows)


def fold(rows: list[Any]) -> dict[bytes, bytes]:
    """The table that the rows make: a rollback forgets what its vbucket did above its seqno."""
    changes: dict[int, list[Any]] = {}
    for row in rows:
        mine = changes.setdefault(row["vbucket"], [])
        if row["event"] == "rollback":
            mine[:] = [old for old in mine if old["seqno"] <= row["seqno"]]
        elif row["event"] in DOCUMENT:
            mine.append(row)
    found: dict[bytes, bytes] = {}
    for row in (row for mine in changes.values() for row in mine):
        if row["event"] == "mutation":
            found[bytes(row["key"])] = None if row["value"] is None else bytes(row["value"])
        else:
            found.pop(bytes(row["key"]), None)
    return found


def start(frame: Any, sink: Any, checkpoint: Any, **trigger: Any) -> Any:
    writer = frame.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    return writer.trigger(**trigger).start() if trigger else writer.start()


def drain(frame: Any, sink: Any, checkpoint: Any) -> Any:
    """Run until everything that is there now has been read."""
    query = start(frame, sink, checkpoint, availableNow=True)
    assert query.awaitTermination(PATIENCE_S)
    return query


def wait_until(true: Any, seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.1)


def forget_commits(checkpoint: Any) -> None:
    """Delete the commits of a checkpoint, as if the driver had died before its last one."""
    for name in (checkpoint / "commits").iterdir():
        name.unlink()
