"""The management port: what clients ask for, buckets and collections, limits, log-in, and the commands on top."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.node.front_node import UPRIVER, Served, serve
from tests.node.raw import ALL, Raw, ready
from upriver.errors import Status
from upriver.wire.messages import kv
from upriver.wire.messages.cluster import GetClusterConfig, GetCollectionId, GetCollectionIdResponse
from upriver.wire.messages.session import SelectBucket

BUCKETS = "/pools/default/buckets"
POST = b"POST /pools/default/buckets HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("http") / "data") as served:
        yield served


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("guarded") / "data", username="ann", password="secret") as served:
        yield served


def get(node: Served, path: str) -> Any:
    status, content = node.http(path)
    assert status == 200, content
    return content


# ---------------------------------------------------------------------------------------------- bootstrap


def test_clients_find_their_way_from_pools_to_the_bucket(node: Served) -> None:
    assert get(node, "/pools")["implementationVersion"][0].isdigit()
    pool = get(node, get(node, "/pools")["pools"][0]["uri"])
    assert pool["nodes"][0]["ports"]["direct"] == node.kv_port
    [bucket] = get(node, pool["buckets"]["uri"])
    assert bucket["name"] == "default"
    assert bucket["numVBuckets"] == 64
    assert get(node, "/whoami")["domain"] == "local"
    assert "implementationVersion" in get(node, "/versions")


def test_the_terse_config_is_the_one_that_the_kv_port_gives(node: Served) -> None:
    config = get(node, "/pools/default/b/default")
    with ready(node.kv_port) as raw:
        assert json.loads(raw.ask(GetClusterConfig()).value) == config
    services = config["nodesExt"][0]["services"]
    assert services["kv"] == node.kv_port
    assert services["mgmt"] == node.http_port
    assert len(config["vBucketServerMap"]["vBucketMap"]) == 64
    assert get(node, "/pools/default/nodeServices")["nodesExt"][0]["services"] == services


def test_the_config_names_the_manifest_that_the_bucket_has(node: Served) -> None:
    assert node.http(BUCKETS, "POST", {"name": "scoped", "numVBuckets": 4})[0] == 202
    for expected in ("0", "1", "2"):
        with ready(node.kv_port) as raw:
            raw.bucket(b"scoped")
            assert json.loads(raw.ask(GetClusterConfig()).value)["collectionsManifestUid"] == expected
        assert get(node, f"{BUCKETS}/scoped")["collectionsManifestUid"] == expected
        assert node.http(f"{BUCKETS}/scoped/scopes", "POST", {"name": f"s{expected}"})[0] == 200
    assert node.http(f"{BUCKETS}/scoped", "DELETE")[0] == 200


def test_the_streaming_config_comes_at_once_and_ends_with_its_bucket(node: Served) -> None:
    assert node.http(BUCKETS, "POST", {"name": "short-lived", "numVBuckets": 4})[0] == 202
    connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=60)
    connection.request("GET", "/pools/default/bs/short-lived")
    response = connection.getresponse()
    assert response.headers["Transfer-Encoding"] == "chunked"
    assert json.loads(piece(response))["name"] == "short-lived"
    assert node.http(f"{BUCKETS}/short-lived", "DELETE")[0] == 200
    assert response.read() == b""
    connection.close()


def test_the_streaming_config_brings_a_new_map_when_there_is_one(node: Served) -> None:
    assert node.http(BUCKETS, "POST", {"name": "moving", "numVBuckets": 4})[0] == 202
    connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=60)
    connection.request("GET", "/pools/default/bs/moving")
    response = connection.getresponse()
    assert json.loads(piece(response))["rev"] == 1
    me = {"host": "127.0.0.1", "kv": node.kv_port, "mgmt": node.http_port}
    new = {"nodes": [me], "owners": [[0]] * 4, "revision": 7, "epoch": 1, "replicas": 0}
    pushed = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=60)
    pushed.request("POST", "/upriver/cluster/moving", json.dumps(new), {"Content-Type": "application/json"})
    assert pushed.getresponse().status == 200
    pushed.close()
    assert json.loads(piece(response))["rev"] == 7
    connection.close()
    assert node.http(f"{BUCKETS}/moving", "DELETE")[0] == 200


def piece(response: http.client.HTTPResponse) -> bytes:
    """One configuration of a stream."""
    found = b""
    while not found.endswith(b"\n\n\n\n"):
        found += response.read1()
    return found


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/nothing", 404), ("GET", "/pools/default/b/nothing", 404), ("GET", "/pools/default/bs/nothing", 404),
    ("GET", f"{BUCKETS}/nothing", 404), ("GET", f"{BUCKETS}/nothing/scopes", 404), ("PUT", "/pools", 405),
    ("DELETE", f"{BUCKETS}/nothing", 404), ("POST", "/upriver/faults/crash", 404),
])  # fmt: skip
def test_a_missing_path_is_answered_in_json(node: Served, method: str, path: str, status: int) -> None:
    found, content = node.http(path, method)
    assert found == status
    assert content["errors"]


def test_head_has_no_body(node: Served) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", node.http_port, timeout=60)
    for _ in range(2):  # one connection serves several requests
        connection.request("HEAD", "/pools")
        response = connection.getresponse()
        assert response.status == 200
        assert response.read() == b""
    connection.close()


# ---------------------------------------------------------------------------------------------- buckets


def test_a_bucket_is_created_used_and_dropped(node: Served) -> None:
    assert node.http(BUCKETS, "POST", {"name": "extra", "numVBuckets": "16", "ramQuotaMB": "100"})[0] == 202
    assert get(node, f"{BUCKETS}/extra")["numVBuckets"] == 16
    status, content = node.http(BUCKETS, "POST", {"name": "extra"})
    assert status == 400
    assert "already exists" in content["errors"]["name"]
    with Raw(node.kv_port) as raw:
        raw.hello(*ALL)
        raw.bucket(b"extra")
        assert raw.ask(kv.Set(0, 0, b"\0k", b"1")).specific == Status.SUCCESS
        assert get(node, f"{BUCKETS}/extra")["basicStats"]["itemCount"] == 1
        assert node.http(f"{BUCKETS}/extra", "DELETE")[0] == 200
        assert raw.is_closed()
    with Raw(node.kv_port) as raw:
        raw.hello(*ALL)
        assert raw.ask(SelectBucket(b"extra")).specific == Status.EACCESS


def test_the_pool_names_nodes_and_buckets_as_sdks_need_it(node: Served) -> None:
    pool = get(node, "/pools/default")
    assert len({each["otpNode"] for each in pool["nodes"]}) == len(pool["nodes"]) == 1
    with ready(node.kv_port) as raw:
        uuid = json.loads(raw.ask(GetClusterConfig()).value)["uuid"]
    assert pool["bucketNames"] == [{"bucketName": "default", "uuid": uuid}]
    assert get(node, f"{BUCKETS}/default")["uuid"] == uuid


def test_a_bucket_that_is_created_again_has_another_uuid(node: Served) -> None:
    uuids = []
    for _ in range(2):
        assert node.http(BUCKETS, "POST", {"name": "again", "numVBuckets": 4})[0] == 202
        uuids.append(get(node, "/pools/default/b/again")["uuid"])
        assert get(node, f"{BUCKETS}/again")["uuid"] == uuids[-1]
        assert node.http(f"{BUCKETS}/again", "DELETE")[0] == 200
    assert uuids[0] != uuids[1]


def test_the_settings_of_a_bucket_are_kept_and_can_be_changed(tmp_path: Path) -> None:
    settings = {"ramQuotaMB": 100, "maxTTL": 50, "conflictResolutionType": "lww", "flushEnabled": 1}
    with serve(tmp_path / "data") as node:
        assert node.http(BUCKETS, "POST", {"name": "own", "numVBuckets": 4, **settings})[0] == 202
        assert shown(node) == (100 << 20, 50, "lww", True)
        assert node.http(f"{BUCKETS}/own/controller/doFlush", "POST")[0] == 200
        assert node.http(f"{BUCKETS}/own", "POST", {"maxTTL": 3600, "flushEnabled": 0})[0] == 200
        assert node.http(f"{BUCKETS}/own/controller/doFlush", "POST")[0] == 400
        with Raw(node.kv_port) as raw:
            raw.hello(*ALL)
            raw.bucket(b"own")
            assert raw.ask(kv.Set(0, 0, b"\0k", b"1")).specific == Status.SUCCESS
            expiry = int.from_bytes(raw.ask(kv.GetMeta(key=b"\0k")).extras[8:12], "big")
        assert expiry > time.time() + 1800  # the bucket's limit, and the new one
        assert node.http(f"{BUCKETS}/own", "POST", {"conflictResolutionType": "seqno"})[0] == 400
        assert node.http(f"{BUCKETS}/own", "POST", {"numVBuckets": 8})[0] == 400
    with serve(tmp_path / "data") as node:
        assert shown(node) == (100 << 20, 3600, "lww", False)


def shown(node: Served) -> tuple[int, int, str, bool]:
    found = get(node, f"{BUCKETS}/own")
    return found["quota"]["ram"], found["maxTTL"], found["conflictResolutionType"], "flush" in found["controllers"]


@pytest.mark.parametrize(("name", "value"), [
    ("durabilityMinLevel", "majority"), ("replicaNumber", "1"), ("bucketType", "ephemeral"),
    ("evictionPolicy", "nruEviction"), ("storageBackend", "magma"), ("compressionMode", "active"),
    ("historyRetentionSeconds", "60"), ("maxTTL", "-1"), ("threadsNumber", "8"), ("flushEnabled", "maybe"),
])  # fmt: skip
def test_a_setting_that_a_node_cannot_keep_is_refused_by_name(node: Served, name: str, value: str) -> None:
    for path, form in ((BUCKETS, {"name": "n", name: value}), (f"{BUCKETS}/default", {name: value})):
        status, content = node.http(path, "POST", form)
        assert status == 400
        assert list(content["errors"]) == [name]
    assert [bucket["name"] for bucket in get(node, BUCKETS)] == ["default"]


@pytest.mark.parametrize("form", [
    {}, {"name": ""}, {"name": "../up"}, {"name": "a/b"}, {"name": "x" * 101}, {"name": "n", "numVBuckets": "0"},
    {"name": "n", "numVBuckets": "many"}, {"name": "n", "numVBuckets": "70000"},
    {"name": "n", "numVBuckets": "0000000000012000000"}, {"name": "n", "numVBuckets": "1" * 5000},
])  # fmt: skip
def test_an_invalid_bucket_is_refused(node: Served, form: dict[str, str]) -> None:
    status, content = node.http(BUCKETS, "POST", form)
    assert status == 400
    assert content["errors"]
    assert [bucket["name"] for bucket in get(node, BUCKETS)] == ["default"]


# ---------------------------------------------------------------------------------------------- collections


def collection_id(node: Served, path: bytes) -> int | Status:
    with ready(node.kv_port, *ALL) as raw:
        answer = raw.ask(GetCollectionId(b"", path))
        if answer.specific:
            return Status(answer.specific)
        return GetCollectionIdResponse.from_frame(answer).id


def test_scopes_and_collections_come_and_go_with_new_ids(node: Served) -> None:
    scopes = f"{BUCKETS}/default/scopes"
    assert node.http(scopes, "POST", {"name": "shop"})[0] == 200
    status, content = node.http(f"{scopes}/shop/collections", "POST", {"name": "orders", "maxTTL": "60"})
    assert status == 200
    assert node.http(f"{scopes}/@ensureManifest/{content['uid']}", "POST", {})[0] == 200
    assert node.http(f"{scopes}/@ensureManifest/ffff", "POST", {})[0] == 504
    first = collection_id(node, b"shop.orders")
    manifest = get(node, scopes)
    assert manifest["uid"] == content["uid"]
    assert manifest["scopes"][1]["collections"][0]["maxTTL"] == 60
    assert node.http(f"{scopes}/shop/collections/orders", "PATCH", {"maxTTL": "90"})[0] == 200
    assert get(node, scopes)["scopes"][1]["collections"][0]["maxTTL"] == 90
    assert node.http(f"{scopes}/shop/collections/orders", "DELETE")[0] == 200
    assert collection_id(node, b"shop.orders") == Status.UNKNOWN_COLLECTION
    assert node.http(f"{scopes}/shop/collections", "POST", {"name": "orders"})[0] == 200
    assert collection_id(node, b"shop.orders") != first
    assert node.http(f"{scopes}/shop", "DELETE")[0] == 200
    assert collection_id(node, b"shop.orders") == Status.UNKNOWN_SCOPE


def test_what_was_switched_on_for_a_collection_can_be_switched_off(node: Served) -> None:
    scopes = f"{BUCKETS}/default/scopes"
    collection = f"{scopes}/_default/collections/altered"
    assert node.http(f"{scopes}/_default/collections", "POST", {"name": "altered", "maxTTL": 60, "history": "true"})
    assert altered(node) == {"maxTTL": 60, "history": True}
    assert node.http(collection, "PATCH", {"history": "false"})[0] == 200
    assert altered(node) == {"maxTTL": 60}
    assert node.http(collection, "PATCH", {"maxTTL": "0"})[0] == 200
    assert altered(node) == {}
    assert node.http(collection, "PATCH", {"maxTTL": "-1"})[0] == 200  # never, even if the bucket has a limit
    assert altered(node) == {"maxTTL": -1}
    assert node.http(collection, "PATCH", {"history": "perhaps"})[0] == 400
    assert node.http(collection, "DELETE")[0] == 200


def altered(node: Served) -> dict[str, Any]:
    [default, *_] = get(node, f"{BUCKETS}/default/scopes")["scopes"]
    [found] = [each for each in default["collections"] if each["name"] == "altered"]
    return {name: value for name, value in found.items() if name not in ("name", "uid")}


@pytest.mark.parametrize(("method", "path", "form", "status", "text"), [
    ("POST", "", {"name": "_default"}, 400, "already exists"),
    ("POST", "", {"name": "bad name"}, 400, "name"),
    ("POST", "", {}, 400, "name"),
    ("DELETE", "/nothing", None, 404, "is not found"),
    ("POST", "/nothing/collections", {"name": "x"}, 404, "is not found"),
    ("POST", "/_default/collections", {"name": "_default"}, 400, "already exists"),
    ("POST", "/_default/collections", {"name": "x", "maxTTL": "-5"}, 400, "maxTTL"),
    ("DELETE", "/_default/collections/nothing", None, 404, "is not found"),
    ("DELETE", "/_default", None, 400, "default"),
])  # fmt: skip
def test_a_refused_change_says_why_and_changes_nothing(
    node: Served, method: str, path: str, form: dict[str, str] | None, status: int, text: str
) -> None:
    before = get(node, f"{BUCKETS}/default/scopes")
    found, content = node.http(f"{BUCKETS}/default/scopes{path}", method, form)
    assert found == status, content
    assert text in json.dumps(content)
    assert get(node, f"{BUCKETS}/default/scopes") == before


# ---------------------------------------------------------------------------------------------- login and limits


def test_with_users_only_they_are_served(guarded: Served) -> None:
    assert guarded.http(BUCKETS)[0] == 200
    assert get(guarded, "/whoami")["id"] == "ann"
    for auth in (("ann", "wrong"), ("nobody", "secret"), ("", "x")):
        status, content = Served(guarded.kv_port, guarded.http_port, guarded.data).http(BUCKETS, auth=auth)
        assert status == 401
        assert content["errors"]
    assert guarded.http("/pools", auth=("", "x"))[0] == 200


def test_a_web_page_of_another_site_cannot_use_the_port(node: Served) -> None:
    foreign = {"Origin": "https://evil.example"}
    assert node.http(f"{BUCKETS}/default", "DELETE", headers=foreign)[0] == 403
    own = {"Origin": f"http://127.0.0.1:{node.http_port}"}
    assert node.http(BUCKETS, headers=own)[0] == 200


@pytest.mark.parametrize(("sent", "status"), [
    (b"GARBAGE\r\n\r\n", b"400"),
    (b"GET pools HTTP/1.1\r\nHost: localhost\r\n\r\n", b"400"),
    (b"GET /pools HTTP/1.1\r\n\r\n", b"400"),
    (b"GET /pools HTTP/1.1\r\nHost: localhost\r\nno colon\r\n\r\n", b"400"),
    (POST + b"Content-Length: x\r\n\r\n", b"400"),
    (POST + b"Content-Length: 99999999\r\n\r\n", b"413"),
    (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"411"),
    (POST + b"Origin: http://localhost\r\nOrigin: http://evil.example\r\n\r\n", b"400"),
    (b"GET /pools HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n", b"431"),
    (b"GET /pools HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 17_000 + b"\r\n\r\n", b"431"),
    (b"GET /pools HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 70_000 + b"\r\n\r\n", b"431"),
    (POST + b"Content-Type: application/json\r\nContent-Length: 1\r\n\r\n?", b"400"),
])  # fmt: skip
def test_a_request_that_breaks_the_rules_is_refused(node: Served, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", node.http_port), timeout=60) as connection:
        connection.sendall(sent)
        assert connection.recv(4096).split(b" ")[1] == status
    assert get(node, "/pools")


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_pipelined_requests_are_answered_in_order_however_they_are_cut(node: Served, size: int) -> None:
    head = b" HTTP/1.1\r\nHost: localhost\r\n"
    sent = b"HEAD /pools" + head + b"\r\n" + b"GET /nothing" + head + b"\r\n"
    sent += b"GET /versions" + head + b"Connection: close\r\n\r\n" + b"GET /pools" + head + b"\r\n"
    with socket.create_connection(("127.0.0.1", node.http_port), timeout=60) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # the node may close before the last request is sent
            for at in range(0, len(sent), size):
                connection.sendall(sent[at : at + size])
        answer = received(connection)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]


def test_garbage_behind_a_good_request_is_refused(node: Served) -> None:
    with socket.create_connection(("127.0.0.1", node.http_port), timeout=60) as connection:
        connection.sendall(b"HEAD /pools HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"GARBAGE\r\n\r\n")
        answer = received(connection)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400"]
    assert b'"errors"' in answer


def test_a_client_that_expects_100_continue_is_told_to_send_its_body(node: Served) -> None:
    with socket.create_connection(("127.0.0.1", node.http_port), timeout=60) as connection:
        connection.sendall(POST + b"Expect: 100-continue\r\nContent-Length: 6\r\nConnection: close\r\n\r\n")
        assert connection.recv(4096).split(b" ")[1] == b"100"
        connection.sendall(b"name=?")
        assert received(connection).split(b" ")[1] == b"400"


def received(connection: socket.socket) -> bytes:
    """Everything until the node closes the connection."""
    found = b""
    while data := connection.recv(4096):
        found += data
    return found


# ---------------------------------------------------------------------------------------------- commands


def upriver(node: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*UPRIVER, *arguments[:2], node.connection, *arguments[2:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_commands_manage_buckets_and_collections(node: Served) -> None:
    assert upriver(node, "buckets", "create", "cli", "--vbuckets", "4").returncode == 0
    listed = json.loads(upriver(node, "buckets", "list", "--json").stdout)
    assert {each["name"]: each["vbuckets"] for each in listed} == {"default": 64, "cli": 4}
    assert "cli" in upriver(node, "buckets", "list").stdout
    created = upriver(node, "collections", "create", "farm.cows", "--bucket", "cli", "--max-ttl", "30")
    assert created.returncode == 0, created.stderr
    assert "farm.cows" in upriver(node, "collections", "list", "--bucket", "cli").stdout
    assert "max TTL 30 s" in upriver(node, "collections", "list", "--bucket", "cli").stdout
    assert upriver(node, "collections", "alter", "farm.cows", "--bucket", "cli", "--max-ttl", "-1").returncode == 0
    assert "no max TTL" in upriver(node, "collections", "list", "--bucket", "cli").stdout
    assert upriver(node, "collections", "drop", "farm.cows", "--bucket", "cli", "--yes").returncode == 0
    assert upriver(node, "collections", "drop", "farm", "--bucket", "cli", "--yes").returncode == 0
    assert upriver(node, "buckets", "drop", "cli", "--yes").returncode == 0
    assert [each["name"] for each in get(node, BUCKETS)] == ["default"]


@pytest.mark.parametrize(("arguments", "text"), [
    (("buckets", "drop", "nothing", "--yes"), "no bucket 'nothing'"),
    (("collections", "create", "a.b.c"), "SCOPE.COLLECTION"),
    (("collections", "alter", "a.b"), "--max-ttl"),
    (("collections", "list", "--bucket", "nothing"), "no bucket 'nothing'"),
    (("collections", "drop", "_default", "--yes"), "_default is part of every bucket"),
    (("fault", "crash"), "--enable-faults"),
])  # fmt: skip
def test_a_command_that_fails_says_why_in_one_line(node: Served, arguments: tuple[str, ...], text: str) -> None:
    failed = upriver(node, *arguments)
    assert failed.returncode == 1
    assert text in failed.stderr
    assert failed.stderr.count("\n") == 1


def test_a_command_without_a_node_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [*UPRIVER, "buckets", "list", f"127.0.0.1:{port}"]
    failed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "cannot connect" in failed.stderr
