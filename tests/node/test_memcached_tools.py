"""Plain memcached clients, which never select a bucket: Debian's libmemcached-tools and python-binary-memcached."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.front_node import Served, serve


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("memcached") / "data", "--default-bucket", "default") as served:
        yield served


def tool(name: str) -> str:
    """Debian calls ``memcat`` ``memccat``, and so on."""
    found = shutil.which(name.replace("mem", "memc", 1)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: apt-get install libmemcached-tools")
    return found


def run(node: Served, name: str, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    servers = f"--servers=127.0.0.1:{node.kv_port}"
    command = [tool(name), "--binary", servers, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=cwd)


def test_libmemcached_tools_write_read_and_remove(node: Served, tmp_path: Path) -> None:
    (tmp_path / "greeting").write_text("hello from memcp\n")
    written = run(node, "memcp", "greeting", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    assert run(node, "memcat", "greeting").stdout.strip() == "hello from memcp"
    assert run(node, "memrm", "greeting").returncode == 0
    assert run(node, "memcat", "greeting").stdout.strip() == ""


def test_libmemcached_tools_read_statistics(node: Served) -> None:
    read = run(node, "memstat")
    assert "curr_items" in read.stdout, read


def test_python_binary_memcached_reads_and_writes(node: Served) -> None:
    bmemcached = pytest.importorskip("bmemcached", reason="python-binary-memcached is not installed")
    client = bmemcached.Client([f"127.0.0.1:{node.kv_port}"])
    assert client.set("text", "value")
    assert client.get("text") == "value"
    assert client.add("text", "again") is False
    assert client.set_multi({f"many{n}": f"value {n}" for n in range(20)}) == []
    assert client.get_multi([f"many{n}" for n in range(20)]) == {f"many{n}": f"value {n}" for n in range(20)}
    assert client.set("count", "41")
    assert client.incr("count", 1) == 42
    assert client.decr("count", 100) == 0
    _, cas = client.gets("text")
    assert client.cas("text", "changed", cas)
    assert not client.cas("text", "too late", cas)
    assert client.delete("text")
    assert client.get("text") is None
    assert "curr_items" in next(iter(client.stats().values()))
    client.disconnect_all()


def test_python_binary_memcached_may_log_in_where_no_login_is_needed(node: Served) -> None:
    bmemcached = pytest.importorskip("bmemcached", reason="python-binary-memcached is not installed")
    client = bmemcached.Client([f"127.0.0.1:{node.kv_port}"], "anyone", "anything")
    assert client.set("logged-in", "yes")
    assert client.get("logged-in") == "yes"
    client.disconnect_all()
