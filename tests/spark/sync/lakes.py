"""A world with a lake: run the sync, and hold its tables against the node document by document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
from deltalake import DeltaTable

import upriver.spark
from tests.spark.spark_application import kill_session
from tests.spark.spark_world import World
from upriver.lake import Comparison, compare, read_documents
from upriver.lake.options import SyncOptions

DEFAULT = "_default._default"


def normal(value: bytes) -> object:
    """A document as the tables have it."""
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return {k: v for k, v in document.items() if v is not None} if isinstance(document, dict) else value


class LakeWorld:
    """A node and the lake that follows it."""

    def __init__(self, world: World, lake: Path) -> None:
        self.world, self.lake = world, str(lake)

    def options(self, **more: Any) -> dict[str, Any]:
        return {"connection": self.world.node.connection_string, "to": self.lake, "once": True, **more}

    def sync(self, spark: Any, **more: Any) -> Any:
        return upriver.spark.sync(spark, **self.options(**more))

    def truth(self) -> dict[str, object]:
        return {key.decode(): normal(value) for key, value in self.world.state().items()}

    def assert_equal(self) -> None:
        """The fresh table, the log and a checksum comparison all say what the node says."""
        truth = self.truth()
        for table, said in (("current", self.fresh()), ("changes", self.replayed())):
            wrong = {key for key in {*said, *truth} if said.get(key) != truth.get(key)}
            assert not wrong, (table, [(key, said.get(key), truth.get(key)) for key in sorted(wrong)[:5]])
        assert self.verify()[0].equal

    def fresh(self) -> dict[str, object]:
        return dict(read_documents(self.lake, DEFAULT))

    def replayed(self) -> dict[str, object]:
        """What a plain reader gets from the log: everything that is not voided, by vbucket and seqno."""
        documents: dict[str, object] = {}
        names = ["vbucket", "seqno", "event", "key", "value", "voided"]
        rows = DeltaTable(f"{self.lake}/changes/{DEFAULT}").to_pyarrow_table(columns=names)
        for row in rows.sort_by([("vbucket", "ascending"), ("seqno", "ascending")]).to_pylist():
            if row["event"] == "mutation" and not row["voided"]:
                documents[row["key"].decode()] = normal(row["value"])
            elif row["event"] in ("deletion", "expiration") and not row["voided"]:
                documents.pop(row["key"].decode(), None)
        return documents

    def verify(self) -> list[Comparison]:
        return compare(SyncOptions.parse(self.options()), [DEFAULT], rounds=1)

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        """``upriver sync`` as a session of its own, to be killed as one."""
        command = [sys.executable, "-c", "from upriver.cli import main; main()", "sync"]
        command += [self.world.node.connection_string, "--to", self.lake, "--master", "local[2]", *arguments]
        log = (Path(self.lake).parent / "sync.log").open("ab")
        with log:
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    """``kill -9`` for the sync, its JVM and its workers, at once."""
    kill_session(process)
    if process.stdout:
        process.stdout.close()
