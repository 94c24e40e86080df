"""Where it runs: a machine without Java, a session without registration, a standalone cluster, Spark Connect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.spark_servers import HOME, connect_server, standalone_cluster
from tests.spark.spark_world import World

pytestmark = pytest.mark.spark

PLAIN = """
import sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master(sys.argv[2]).config("spark.ui.enabled", "false").getOrCreate()
print("rows", spark.read.format("dcp").option("connection", sys.argv[1]).load().count())
spark.stop()
"""
WITHOUT_JAVA = """
import sys, upriver.spark
spark = upriver.spark.session("local[1]")
print("java", spark._jvm.System.getProperty("java.version"))
print("rows", spark.read.format("dcp").option("connection", sys.argv[1]).load().count())
spark.stop()
"""


def run(code: str, *arguments: str, env: dict[str, str]) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    names = ("PATH", "HOME", "PYTHONPATH", "NUMBA_CACHE_DIR")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "SPARK_LOCAL_IP": "127.0.0.1", **more}


def test_a_machine_without_java_runs_on_the_one_from_pip(world: World, tmp_path):
    """No JAVA_HOME, and a PATH with everything but Java."""
    world.put(100)
    tools = {tool.name: tool for folder in ("/usr/bin", "/bin") for tool in Path(folder).iterdir()}
    for name, tool in tools.items():
        if not name.startswith("java"):
            (tmp_path / name).symlink_to(tool)
    said = run(WITHOUT_JAVA, world.connection_string, env=environment(PATH=str(tmp_path)))
    assert "java 21." in said
    assert "rows 100" in said


def test_the_format_is_found_without_registration(world: World):
    world.put(100)
    said = run(PLAIN, world.connection_string, "local[1]", env=environment(PYSPARK_PYTHON=sys.executable))
    assert "rows 100" in said


def test_the_module_that_spark_looks_for_is_cheap_to_import():
    """Spark imports it at the first format that it does not know, whichever that is."""
    heavy = "{'numba', 'numpy', 'pyarrow', 'pandas', 'deltalake', 'lmdb'}"
    said = run(f"import sys, pyspark_dcp; print(sorted({heavy} & set(sys.modules)))", env=environment())
    assert said.strip() == "[]"


@pytest.mark.slow
def test_a_standalone_cluster(world: World, tmp_path):
    world.put(100)
    env = environment(SPARK_HOME=str(HOME), PYSPARK_PYTHON=sys.executable, SPARK_WORKER_DIR=str(tmp_path))
    with standalone_cluster(env, tmp_path / "log") as address:
        assert "rows 100" in run(PLAIN, world.connection_string, address, env=env)


CONNECT = """
import sys, time
from pyspark.sql import SparkSession
import upriver.spark
spark = upriver.spark.register(SparkSession.builder.remote(sys.argv[2]).getOrCreate())
changes = spark.read.format("dcp").option("connection", sys.argv[1]).load()
print("rows", changes.count())
stream = spark.readStream.format("dcp").option("connection", sys.argv[1]).load()
query = stream.writeStream.format("parquet").option("path", sys.argv[3] + "/out")
query = query.option("checkpointLocation", sys.argv[3] + "/c").trigger(availableNow=True).start()
query.awaitTermination()
print("streamed", spark.read.parquet(sys.argv[3] + "/out").count())
"""


@pytest.mark.slow
def test_spark_connect(world: World, tmp_path):
    world.put(100)
    env = environment(SPARK_HOME=str(HOME), PYSPARK_PYTHON=sys.executable)
    with connect_server(env, tmp_path / "log") as address:
        said = run(CONNECT, world.connection_string, address, str(tmp_path), env=env)
    assert "rows 100" in said
    assert "streamed 100" in said
