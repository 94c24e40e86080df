"""The sync in other places: under ``spark-submit``, and in the server of Spark Connect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.spark_servers import HOME, connect_server
from tests.spark.sync.lakes import DEFAULT, LakeWorld
from upriver.spark.sessions import prepare

pytestmark = [pytest.mark.spark, pytest.mark.slow]

JOB = """
import sys
from pyspark.sql import SparkSession
import upriver.spark

builder = SparkSession.builder.remote(sys.argv[3]) if len(sys.argv) > 3 else SparkSession.builder
spark = upriver.spark.register(builder.getOrCreate())
live = upriver.spark.sync(spark, connection=sys.argv[1], to=sys.argv[2], once=True)
print("rows", live.rows, "fresh", upriver.spark.read_table(spark, sys.argv[2], "_default._default").count())
spark.stop()
"""


@pytest.fixture
def job(tmp_path) -> str:
    (tmp_path / "job.py").write_text(JOB)
    return str(tmp_path / "job.py")


def environment() -> dict[str, str]:
    prepare()
    return {**os.environ, "SPARK_HOME": str(HOME), "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}


def run(*command: str) -> str:
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def check_two_runs(lake: LakeWorld, *command: str) -> None:
    """Run a load, then a second run after changes and lost history."""
    lake.world.put(2000)
    assert "rows 2000 fresh 2000" in run(*command)
    lake.assert_equal()
    lake.world.put(100, value='{"n": %d, "twice": true}')
    lake.world.db.delete("k7")
    run(*command)
    lake.world.fault("failover", vbucket=1, lose=5)
    assert f"fresh {len(lake.world.state())}" in run(*command)
    lake.assert_equal()


def test_spark_submit(lake: LakeWorld, job: str) -> None:
    submit = [str(HOME / "bin" / "spark-submit"), "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
    check_two_runs(lake, *submit, job, lake.world.connection_string, lake.lake)


def test_spark_connect(lake: LakeWorld, job: str, tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="needs pip install pyspark[connect]")
    with connect_server(environment(), tmp_path / "log") as address:
        check_two_runs(lake, sys.executable, job, lake.world.connection_string, lake.lake, address)
    assert Path(lake.lake, "changes", DEFAULT).is_dir()
