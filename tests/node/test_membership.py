"""Which maps a member accepts: none older than the newest it was given, and none of another cluster."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.node.front_node import Served
from tests.node.raw import ALL, ready
from tests.node.streaming import manifest
from tests.support.node_thread import FAST_STORE, NodeThread, eventually
from upriver.cluster.collections import decided
from upriver.errors import Status
from upriver.node.options import NodeOptions
from upriver.wire.messages.cluster import GetManifest, SetManifest


class Member:
    """A node that keeps its data and ports when it is started again."""

    def __init__(self, data: Path) -> None:
        self._options: dict[str, Any] = {"data": data, "kv_port": 0, "http_port": 0}
        self.start()

    def start(self) -> None:
        self.thread = NodeThread(NodeOptions(vbuckets=2, member=True, store=FAST_STORE, **self._options))
        node = self.thread.node
        self._options |= {"kv_port": node.kv_port, "http_port": node.http_port}
        self.served = Served(node.kv_port, node.http_port, self._options["data"])

    def restart(self) -> None:
        self.thread.stop()
        self.start()

    def push(self, revision: int, branch: str, ancestors: dict[str, int] | None = None, **fields: Any) -> int:
        """Push a map in which this node has everything; the HTTP status."""
        me = {"host": "127.0.0.1", "kv": self.served.kv_port, "mgmt": self.served.http_port}
        data = {"nodes": [me], "owners": [[0], [0]], "revision": revision, "epoch": 1, "replicas": 0, "uuid": "u",
                "branch": branch, "ancestors": ancestors or {}, **fields}  # fmt: skip
        return self.call("POST", "/upriver/cluster/default", data)[0]

    def report(self) -> Any:
        return self.call("GET", "/upriver/cluster/default")[1]

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.served.http_port, timeout=60)
        connection.request(method, path, json.dumps(body) if body is not None else None)
        answer = connection.getresponse()
        found = answer.status, json.loads(answer.read() or b"null")
        connection.close()
        return found


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    made = Member(tmp_path / "data")
    yield made
    made.thread.stop()


def test_a_member_refuses_an_older_map_after_a_restart_too(member: Member) -> None:
    assert member.push(7, "a") == 200
    member.restart()
    assert (member.report()["member"], member.report()["revision"]) == (False, 7)
    assert member.push(6, "a") == 400
    assert member.push(7, "a") == 400
    assert member.push(9, "b", {"a": 5}) == 400  # a higher revision, but its writer did not know the map of this node
    assert member.push(9, "b", {"a": 8}) == 200
    assert member.report()["member"]


def test_a_member_takes_no_map_of_another_cluster(member: Member) -> None:
    assert member.push(3, "a") == 200
    assert member.push(4, "b", {"a": 3}, uuid="another") == 400
    other = {"host": "127.0.0.1", "kv": 1, "mgmt": 2}
    assert member.push(4, "a", nodes=[other]) == 200  # removed from the cluster, it is free to join another
    assert member.push(1, "b", uuid="another") == 200


def test_a_member_whose_newest_map_is_damaged_takes_none(member: Member) -> None:
    assert member.push(3, "a") == 200
    (member.served.data / "default" / "upriver.map").write_text("{")
    member.restart()
    assert member.push(4, "a") == 400
    assert "upriver.map is damaged" in member.report()["errors"]["_"]


WRONG_MAPS = [
    {"nodes": [{"host": 5, "kv": 1}]}, {"nodes": [{"host": "h", "kv": "1"}]}, {"nodes": [{"host": "h", "kv": 1 << 16}]},
    {"nodes": [5]}, {"owners": [[1], [0]]}, {"owners": 5}, {"ancestors": [1]},
    {"manifest": {"uid": "zz"}}, {"manifest": 5}, {"manifest": [1]}, {"manifest": {"uid": "9", "scopes": 3}},
]  # fmt: skip


def test_an_invalid_map_is_refused_and_not_kept(member: Member) -> None:
    assert member.push(3, "a") == 200
    for wrong in WRONG_MAPS:
        assert member.push(4, "a", **wrong) == 400, wrong
        assert member.report()["revision"] == 3
    assert member.push(4, "a") == 200


def test_a_bucket_of_a_cluster_is_not_deleted_on_one_of_its_members(member: Member) -> None:
    path = "/pools/default/buckets/default"
    other = {"host": "127.0.0.1", "kv": 1, "mgmt": 2}
    me = {"host": "127.0.0.1", "kv": member.served.kv_port, "mgmt": member.served.http_port}
    assert member.push(3, "a", nodes=[me, other]) == 200
    for _ in range(2):
        status, content = member.call("DELETE", path)
        assert status == 400
        assert "remove this node from the cluster first" in content["errors"]["_"]
        member.restart()  # now without a map in this run
    assert member.push(4, "a", nodes=[other]) == 200  # it was removed
    assert member.call("DELETE", path)[0] == 200
    assert member.call("GET", path)[0] == 404


def test_a_proposal_without_a_manager_fails_and_says_what_must_run(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("upriver.node.cluster.manifest_changes.DECIDED_S", 0.05)
    assert member.push(3, "a") == 200
    status, content = member.served.http("/pools/default/buckets/default/scopes", "POST", {"name": "shop"})
    assert status == 503
    assert "upriver cluster start" in content["errors"]["_"]


def test_a_member_takes_manifests_from_the_manager_and_learns_the_outcome_of_a_proposal(member: Member) -> None:
    """Do as the manager does: read the proposal, push the manifest, report the outcome."""
    assert member.push(3, "a") == 200
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(member.served.http, "/pools/default/buckets/default/scopes", "POST", {"name": "shop"})
        proposals = eventually(lambda: member.call("GET", "/upriver/proposals/default")[1])
        new, outcomes = decided(None, proposals)
        assert member.push(4, "a", manifest=new) == 200
        assert member.call("POST", "/upriver/proposals/default", outcomes)[0] == 200
        assert asked.result(60) == (200, {"uid": "1"})
    scopes = member.call("GET", "/pools/default/buckets/default/scopes")[1]["scopes"]
    assert [scope["name"] for scope in scopes] == ["_default", "shop"]


def test_a_manifest_set_through_the_kv_port_of_a_member_is_proposed_to_the_manager(member: Member) -> None:
    assert member.push(3, "a") == 200
    wanted = manifest(1, (9, "orders"))
    with ThreadPoolExecutor(1) as pool, ready(member.served.kv_port, *ALL) as raw:
        asked = pool.submit(raw.ask, SetManifest(wanted))
        proposals = eventually(lambda: member.call("GET", "/upriver/proposals/default")[1])
        new, outcomes = decided(None, proposals)
        assert member.push(4, "a", manifest=new) == 200
        assert member.call("POST", "/upriver/proposals/default", outcomes)[0] == 200
        assert asked.result(60).specific == Status.SUCCESS
        assert json.loads(raw.ask(GetManifest()).value) == json.loads(wanted)
