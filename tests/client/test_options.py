"""Connection strings, the environment, TOML files, cluster maps."""

from __future__ import annotations

import json
import re
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import upriver
from upriver.client.options import ConnectOptions, has_password, parse_connection_string, redacted
from upriver.client.reading import Content, FeedOptions
from upriver.errors import ConfigError, RemoteProtocolError
from upriver.model import OnRollback
from upriver.protocol.topology import Address, parse_topology
from upriver.spark.options import ConnectionOptions as SparkOptions


def test_a_connection_string_names_hosts_ports_and_options() -> None:
    options = ConnectOptions.parse("couchbases://a,b:12000,[::1]:7?network=external&connect_timeout_s=2.5", bucket="x")
    assert options.seeds == (Address("a", 11207), Address("b", 12000), Address("::1", 7))
    assert (options.tls, options.network, options.connect_timeout_s, options.bucket) == (True, "external", 2.5, "x")


@pytest.mark.parametrize(
    "text",
    ["", "host", "http://host", "couchbase://", "couchbase://h:port", "couchbase://u:p@h", "couchbase://h?nope=1",
     "couchbase://h?network=mars", "couchbase://h?allow_plain=perhaps", "couchbase://h?window_bytes=-1"],
)  # fmt: skip
def test_what_cannot_work_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError):
        ConnectOptions.parse(text)


@pytest.mark.parametrize(
    "host",
    ["[::1", "::1", "1::2:3", "[::1]]", "[::1]x", "[::1]:x", "[zz]", "[]", "[127.0.0.1]", "[v1.x]", "a..b", "a" * 70,
     "a b", "a\0b"],
)  # fmt: skip
def test_a_host_that_cannot_be_is_a_config_error_that_names_it(host: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(repr(host))):
        parse_connection_string("couchbase://" + host)


@pytest.mark.parametrize("host", ["[::1]", "[::1]:7", "[fe80::1%eth0]:7", "a.b", "A.b:7", "büro.example", "127.0.0.1"])
def test_hosts_of_every_kind_are_understood(host: str) -> None:
    [seed] = parse_connection_string("couchbase://" + host).seeds
    assert str(seed).startswith(host.lower())


@given(st.text(max_size=30))
def test_any_text_is_options_or_a_config_error(text: str) -> None:
    try:
        parse_connection_string("couchbase://" + text)
    except ConfigError:
        return


def test_arguments_win_over_the_string_which_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_USERNAME", "from-environment")
    monkeypatch.setenv("UPRIVER_BUCKET", "from-environment")
    monkeypatch.setenv("UPRIVER_NETWORK", "external")
    found = ConnectOptions.parse("couchbase://h?bucket=from-string&network=default", network="auto")
    assert (found.username, found.bucket, found.network) == ("from-environment", "from-string", "auto")


def test_a_toml_file_has_a_connection_table(tmp_path: Path) -> None:
    path = tmp_path / "upriver.toml"
    path.write_text('[connection]\nconnection = "couchbase://h:1"\nbucket = "b"\nnoop_interval_s = 5\n')
    assert ConnectOptions.from_toml(path).noop_interval_s == 5.0
    assert ConnectOptions.from_toml(path, connection="couchbase://other:2").seeds == (Address("other", 2),)
    for wrong in ("[other]", "connection = 3", "[connection]", "[connection]\nconnection = 3", "not toml"):
        path.write_text(wrong)
        with pytest.raises(ConfigError, match=r"upriver\.toml: .*expected a \[connection\] table"):
            ConnectOptions.from_toml(path)
    with pytest.raises(ConfigError, match="nowhere"):
        ConnectOptions.from_toml(tmp_path / "nowhere")


def test_everything_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "upriver.toml"
    lines = ["[connection]", 'connection = "couchbase://h:1?network=external"', 'password = "old"', 'username = "file"']
    path.write_text("\n".join([*lines, 'bucket = "file"', 'network = "default"']))
    monkeypatch.setenv("UPRIVER_PASSWORD", "new")
    found = ConnectOptions.from_toml(path, bucket="argument", username=None)
    assert (found.bucket, found.username, found.password, found.network) == ("argument", "file", "new", "external")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("colour = 1", "unknown option 'colour'; valid are allow_plain, bucket"),
        ("tls = false", "unknown option 'tls'"),
        ("bucket = 5", "bucket: this is a int, not a str"),
        ("window_bytes = 1.5", "window_bytes: this is a float"),
        ("allow_plain = 1", "allow_plain: this is a int"),
        ("noop_interval_s = true", "noop_interval_s: this is a bool"),
        ('connect_timeout_s = "soon"', "connect_timeout_s: 'soon' is not a number"),
        ("connect_timeout_s = 0", "connect_timeout_s: 0.0 is not"),
        ("request_timeout_s = nan", "request_timeout_s: nan"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_file_names_file_and_option(tmp_path: Path, line: str, what: str) -> None:
    path = tmp_path / "upriver.toml"
    path.write_text(f'[connection]\nconnection = "couchbase://h"\n{line}\n')
    with pytest.raises(ConfigError, match=re.escape(f"upriver.toml: {what}")):
        ConnectOptions.from_toml(path)


def test_connect_takes_the_bucket_from_wherever_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert upriver.aio.connect("couchbase://h?bucket=x").options.bucket == "x"
    assert upriver.aio.connect("couchbase://h").options.bucket == "default"
    monkeypatch.setenv("UPRIVER_BUCKET", "y")
    assert upriver.aio.connect("couchbase://h").options.bucket == "y"
    assert upriver.aio.connect("couchbase://h", "z").options.bucket == "z"
    options = ConnectOptions.parse("couchbase://h", ca_file=Path("some") / "ca.pem")
    assert upriver.aio.connect(options).options.ca_file == "some/ca.pem"
    with pytest.raises(ConfigError, match="bucket"):
        upriver.aio.connect(options, "z")


def test_tls_cannot_be_talked_out_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPRIVER_TLS", "false")
    assert ConnectOptions.parse("couchbases://h").tls
    for wrong in ({"tls": False}, {"seeds": ()}):
        with pytest.raises(ConfigError, match="unknown option"):
            ConnectOptions.parse("couchbases://h", **wrong)


def test_secrets_do_not_show() -> None:
    secret = {"username": "u", "password": "hunter2", "client_cert": "c", "client_key": "k9"}
    options = ConnectOptions.parse("couchbase://h", **secret)
    for shown in (repr(options), str(options), f"{upriver.aio.connect(options)!r}"):
        assert "hunter2" not in shown
        assert "k9" not in shown


@pytest.mark.parametrize(
    "text",
    ["couchbase://u:hunter2@h", "couchbase://u:hunter2@h:x", "http://u:hunter2@h", "couchbase://?password=hunter2",
     "http://h?password=hunter2", "h?password=hunter2", "couchbase://h?password=hunter2&nope=1",
     "couchbase://h:x?password=hunter2", "couchbase://h?password=hunter2&network=mars",
     "couchbase://h?password=hunter2&window_bytes=x"],
)  # fmt: skip
def test_no_error_repeats_a_password(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        ConnectOptions.parse(text)
    assert "hunter2" not in str(error.value)
    assert "hunter2" not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    "text",
    ["couchbase://h?password=hunter2", "couchbase://h?network=auto&password=hunter2&bucket=b", "h?pass%77ord=hunter2",
     "couchbase://ann:hunter2@h", "couchbase://ann:hunter2@h?password=hunter2"],
)  # fmt: skip
def test_a_connection_string_can_be_shown_without_its_password(text: str) -> None:
    assert has_password(text)
    assert "hunter2" not in redacted(text)
    assert "h" in redacted(text)
    assert redacted(redacted(text)) == redacted(text)


def test_a_connection_string_without_a_password_is_shown_as_it_is() -> None:
    text = "couchbases://a,b:7?network=auto&bucket=password"
    assert redacted(text) == text
    assert not has_password(text)


def test_spark_gets_no_password_in_a_connection_string_where_it_would_show_it() -> None:
    with pytest.raises(ConfigError, match="passwordFile") as error:
        SparkOptions.parse({"connection": "couchbase://h?password=hunter2"})
    assert "hunter2" not in str(error.value)


def test_the_way_to_a_node_takes_no_longer_than_sparks_timeout() -> None:
    options = SparkOptions.parse({"connection": "couchbase://h", "timeoutSeconds": "5"}).connect_options()
    assert (options.connect_timeout_s, options.request_timeout_s) == (5.0, 5.0)
    options = SparkOptions.parse({"connection": "couchbase://h?connect_timeout_s=2"}).connect_options()
    assert (options.connect_timeout_s, options.request_timeout_s) == (2.0, 30.0)


def test_reading_options_take_words_for_enums() -> None:
    read = FeedOptions.of(content="keys", on_rollback="fail", collections="shop.orders")
    assert (read.content, read.on_rollback, read.paths) == (Content.KEYS, OnRollback.FAIL, {("shop", "orders")})
    both = {"scope": "s", "collections": "a.b"}
    for wrong in ({"start": "yesterday"}, {"end": "never"}, {"content": "x"}, {"nope": 1}, both):
        with pytest.raises(ConfigError):
            FeedOptions.of(**wrong)


def _config(**node: object) -> dict[str, object]:
    server_map = {"serverList": ["$HOST:11210"], "vBucketMap": [[0, -1], [-1]]}
    return {"rev": 3, "nodesExt": [{"services": {"kv": 11210, "kvSSL": 11207}, **node}], "vBucketServerMap": server_map}


def test_a_map_without_host_names_means_the_host_that_we_asked() -> None:
    topology = parse_topology(_config(), "seed")
    assert topology.active(0) == Address("seed", 11210)
    assert topology.active(1) is None
    assert parse_topology(_config(), "seed", tls=True).active(0) == Address("seed", 11207)


def test_alternate_addresses_are_used_when_we_came_by_one() -> None:
    alternate = {"external": {"hostname": "public", "ports": {"kv": 30001}}}
    config = _config(hostname="10.1.1.1", alternateAddresses=alternate)
    assert parse_topology(config, "public").active(0) == Address("public", 30001)
    assert parse_topology(config, "10.1.1.1").active(0) == Address("10.1.1.1", 11210)
    assert parse_topology(config, "10.1.1.1", network="external").active(0) == Address("public", 30001)


NAMES = st.sampled_from(["vBucketServerMap", "nodesExt", "serverList", "vBucketMap", "rev"])
LEAVES = st.none() | st.integers() | st.text(max_size=5)


@given(st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4)))
def test_a_map_that_makes_no_sense_is_the_servers_fault(config: object) -> None:
    try:
        parse_topology(json.loads(json.dumps(config)), "h")
    except RemoteProtocolError:
        return
