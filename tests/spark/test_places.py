"""Where it runs: a machine without Java, a session without registration, a standalone cluster, Spark Connect."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pyspark
import pytest
from spark_world import World, wait_until

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
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=env, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def environment(**more: str) -> dict[str, str]:
    names = ("PATH", "HOME", "PYTHONPATH", "NUMBA_CACHE_DIR")
    kept = {name: os.environ[name] for name in names if name in os.environ}
    return {**kept, "SPARK_LOCAL_IP": "127.0.0.1", **more}


def test_a_machine_without_java_runs_on_the_one_from_pip(world: World, tmp_path):
    """No JAVA_HOME, and a PATH on which everything is but Java."""
    world.put(100)
    tools = {tool.name: tool for folder in ("/usr/bin", "/bin") for tool in Path(folder).iterdir()}
    for name, tool in tools.items():
        if not name.startswith("java"):
            (tmp_path / name).symlink_to(tool)
    said = run(WITHOUT_JAVA, world.connection_string, env=environment(PATH=str(tmp_path)))
    assert "java 21." in said
    assert "rows 100" in said


def test_the_format_is_found_without_any_code_of_ours(world: World):
    world.put(100)
    said = run(PLAIN, world.connection_string, "local[1]", env=environment(PYSPARK_PYTHON=sys.executable))
    assert "rows 100" in said


def test_the_module_that_spark_looks_for_is_cheap_to_import():
    """Spark imports it at the first format that it does not know, whichever that is."""
    heavy = "{'numba', 'numpy', 'pyarrow', 'pandas', 'deltalake', 'lmdb'}"
    said = run(f"import sys, pyspark_dcp; print(sorted({heavy} & set(sys.modules)))", env=environment())
    assert said.strip() == "[]"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.mark.slow
def test_a_standalone_cluster(world: World, tmp_path):
    world.put(100)
    home = Path(pyspark.__file__).parent
    env = environment(SPARK_HOME=str(home), PYSPARK_PYTHON=sys.executable, SPARK_WORKER_DIR=str(tmp_path))
    port = free_port()
    launch = [str(home / "bin" / "spark-class")]
    master = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", "--webui-port", "0",
              f"spark://127.0.0.1:{port}"]  # fmt: skip
    quiet = {"env": env, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
    started = [subprocess.Popen([*launch, *command], **quiet) for command in (master, worker)]
    try:
        wait_until(lambda: _listens(port))
        assert "rows 100" in run(PLAIN, world.connection_string, f"spark://127.0.0.1:{port}", env=env)
    finally:
        for process in started:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


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
query.awaitTermination(120)
print("streamed", spark.read.parquet(sys.argv[3] + "/out").count())
"""


@pytest.mark.slow
def test_spark_connect(world: World, tmp_path):
    world.put(100)
    home, port = Path(pyspark.__file__).parent, free_port()
    env = environment(SPARK_HOME=str(home), PYSPARK_PYTHON=sys.executable)
    command = [str(home / "bin" / "spark-submit"), "--class", "org.apache.spark.sql.connect.service.SparkConnectServer",
               "--master", "local[2]", "--conf", f"spark.connect.grpc.binding.port={port}", "--conf",
               "spark.ui.enabled=false", "spark-internal"]  # fmt: skip
    server = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until(lambda: _listens(port), 120)
        time.sleep(1)
        said = run(CONNECT, world.connection_string, f"sc://127.0.0.1:{port}", str(tmp_path), env=env)
        assert "rows 100" in said
        assert "streamed 100" in said
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(30)
