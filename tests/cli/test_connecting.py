"""Every command takes the same CONNECTION and options, from the command line, the environment or a file."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.node.front_node import make_certificates
from upriver import testing
from upriver.cli import COMMANDS, cli
from upriver.cli.connecting import connect_options
from upriver.errors import ConfigError, RemoteProtocolError
from upriver.protocol.topology import management_port


@pytest.fixture(scope="module")
def node() -> Iterator[testing.RunningNode]:
    with testing.node(vbuckets=2, lazy=True, username="ann", password="secret", enable_faults=True) as running:
        yield running


@pytest.fixture
def config(node: testing.RunningNode, tmp_path: Path) -> str:
    """A file with what every command needs, and with options that only a sync has."""
    (tmp_path / "password").write_text("secret\n")
    path = tmp_path / "upriver.toml"
    path.write_text(
        f'connection = "{node.connection_string}"\nusername = "ann"\npassword_file = "{tmp_path / "password"}"\n'
        f'to = "{tmp_path / "lake"}"\nevery = "5s"\n'
    )
    return str(path)


def run(*arguments: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == exit_code, result.output
    return result


def test_a_dry_run_says_which_collection_is_missing_also_when_another_ends_like_it(config: str):
    planned = run("sync", "--config", config, "--collections", "default", "--dry-run").output
    assert "the bucket has no collection default" in " ".join(planned.split())


def test_a_config_file_is_enough_for_every_kind_of_command(node: testing.RunningNode, config: str, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"id": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"id": "b"}\n')
    assert "2 written" in run("load", "--config", config, str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")).output
    assert "mutation" in run("tail", "--config", config).output
    assert json.loads(run("dump", "--config", config, "--out", str(tmp_path / "out"), "--json").output)["rows"] == 2
    assert json.loads(run("inspect", "--config", config, "--json").output)["high_seqno_sum"] == 2
    assert "vb_0" in run("stats", "--config", config, "vbucket-seqno", "0", "--json").output
    assert "created orders" in run("buckets", "create", "orders", "--config", config, "--vbuckets", "2").output
    assert "created shop.carts" in run("collections", "create", "--config", config, "shop.carts").output
    assert "shop.carts" in run("collections", "list", "--config", config).output
    assert "dropped orders" in run("buckets", "drop", "--config", config, "orders", "--yes").output
    assert json.loads(run("fault", "drop-connection", "--config", config).output) == {"dropped": 0}
    assert "bucket 'default': 2 vbuckets, " in run("sync", "--config", config, "--dry-run").output
    same = f"127.0.0.1:{node.kv_port}"
    assert (
        "vbucket 0 could not be moved"
        in run("move", "--config", config, "--vbucket", "0", "--to", same, exit_code=1).output
    )


def test_a_connection_on_the_command_line_wins_over_the_file(node: testing.RunningNode, config: str) -> None:
    wrong = Path(config).with_name("wrong.toml")
    wrong.write_text(Path(config).read_text().replace(str(node.kv_port), "1"))
    assert "cannot connect" in run("stats", "--config", str(wrong), exit_code=1).output
    assert "uptime" in run("stats", node.connection_string, "--config", str(wrong)).output
    assert "uptime" in run("stats", node.connection_string, "", "--config", str(wrong)).output
    assert "default" in run("buckets", "list", f"127.0.0.1:{node.kv_port}", "--config", str(wrong)).output


def test_the_command_line_wins_over_the_query_that_over_the_environment_and_that_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "upriver.toml"
    path.write_text('[connection]\nconnection = "db"\nbucket = "file"\nusername = "file"\nnetwork = "external"\n')
    assert connect_options({"config": str(path)}).bucket == "file"
    monkeypatch.setenv("UPRIVER_BUCKET", "environment")
    monkeypatch.setenv("UPRIVER_USERNAME", "environment")
    asked = {"config": str(path), "connection": "couchbase://db?bucket=query"}
    found = connect_options(asked)
    assert (found.bucket, found.username, found.network) == ("query", "environment", "external")
    assert connect_options({**asked, "bucket": "typed"}).bucket == "typed"


def test_a_password_of_the_command_line_or_the_environment_wins_over_every_password_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "password").write_text("from-file\n")
    path = tmp_path / "upriver.toml"
    path.write_text(f'connection = "db"\nusername = "ann"\npassword_file = "{tmp_path / "password"}"\n')
    assert connect_options({"config": str(path)}).password == "from-file"
    monkeypatch.setenv("UPRIVER_PASSWORD", "from-environment")
    assert connect_options({"config": str(path)}).password == "from-environment"
    assert connect_options({"config": str(path), "password": "typed"}).password == "typed"
    typed_file = {"config": str(path), "password_file": str(tmp_path / "password")}
    assert connect_options(typed_file).password == "from-file"


@pytest.mark.parametrize(("text", "reason"), [
    ("connection = 7", "connection is not a text"), ("connection = ", "Invalid value"),
    ('[connection]\nconnection = "db"\nusernmae = "ann"', "unknown option 'usernmae'"),
])  # fmt: skip
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "upriver.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"upriver.toml: .*{reason}"):
        connect_options({"config": str(path)})


@pytest.mark.parametrize("arguments", [("tail",), ("stats",), ("buckets", "list"), ("fault", "crash"), ("sync",)])
def test_a_command_without_a_connection_is_called_wrongly(arguments: tuple[str, ...]) -> None:
    assert "CONNECTION" in run(*arguments, exit_code=2).output


def test_a_user_that_does_not_log_in_is_told_how(node: testing.RunningNode) -> None:
    assert "give --username" in run("buckets", "list", node.connection_string, exit_code=1).output


def test_over_tls_a_management_port_without_it_is_not_used(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    options = {"certificate": files / "server.pem", "private_key": files / "server.key", "tls_port": 0}
    with testing.node(vbuckets=2, lazy=True, **options) as node:  # type: ignore[arg-type]
        connection = f"couchbases://127.0.0.1:{tls_port(node)}"
        said = run("buckets", "list", connection, "--ca-file", str(files / "ca.pem"), exit_code=1).output
    assert "no management port with TLS" in said


def tls_port(node: testing.RunningNode) -> int:
    """As the map of the other port says."""
    with urllib.request.urlopen(f"http://127.0.0.1:{node.http_port}/pools/default/nodeServices") as answer:
        return int(json.loads(answer.read())["nodesExt"][0]["services"]["kvSSL"])


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_help_fits_a_terminal_of_80_columns(name: str) -> None:
    shown = CliRunner().invoke(cli, [name, "--help"], terminal_width=80).output
    assert max(map(len, shown.splitlines())) <= 80


INSIDE = {"hostname": "10.0.0.1", "services": {"kv": 11210, "mgmt": 8091, "mgmtSSL": 18091}}
OUTSIDE = {"external": {"hostname": "db.example", "ports": {"kv": 31210, "mgmt": 38091}}}


@pytest.mark.parametrize(("came_by", "network", "tls", "port"), [
    ("10.0.0.1", "auto", False, 8091), ("10.0.0.1", "auto", True, 18091), ("db.example", "auto", False, 38091),
    ("db.example", "default", False, 8091), ("proxy.example", "external", False, 38091),
    ("db.example", "auto", True, None),
])  # fmt: skip
def test_the_management_port_is_that_of_the_network_in_use(
    came_by: str, network: str, tls: bool, port: int | None
) -> None:
    other = {"hostname": "10.0.0.2", "services": {"kv": 1, "mgmt": 2}}
    config = {"nodesExt": [other, {**INSIDE, "alternateAddresses": OUTSIDE, "thisNode": True}]}
    assert management_port(config, came_by, network=network, tls=tls) == port


@pytest.mark.parametrize("config", [[], {"nodesExt": 7}, {"nodesExt": [7]}, {"nodesExt": [{"services": []}]}])
def test_a_map_that_makes_no_sense_is_the_servers_fault(config: object) -> None:
    with pytest.raises(RemoteProtocolError, match="the cluster config is not usable"):
        management_port(config, "db")
