"""What users may do: roles per bucket on the KV port and the management port, and rights that change."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.front_node import UPRIVER, Served, serve
from tests.node.raw import ALL, Raw
from tests.support.node_thread import eventually
from upriver.errors import ConfigError, Status
from upriver.node.access import users
from upriver.node.access.roles import Access, Privilege
from upriver.protocol.scram import encode_plain
from upriver.wire import Message
from upriver.wire.constants import Opcode, OpenFlag
from upriver.wire.messages import cluster, dcp, kv, session
from upriver.wire.messages.session import SaslAuth

BUCKETS = "/pools/default/buckets"
ROLES = {
    "root": ["admin"],
    "reader": ["data_reader[default]"],
    "writer": ["data_writer[default]"],
    "streamer": ["data_dcp_reader[default]"],
    "monitor": ["data_monitoring[*]"],
    "keeper": ["bucket_admin[default]"],
    "app": ["bucket_full_access[default]"],
    "elsewhere": ["bucket_full_access[other]"],
    "nobody": [],
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    data = tmp_path_factory.mktemp("roles") / "data"
    data.mkdir()
    known = users.salt_password("pw", iterations=4096)
    users.write_file(data / "users.json", {n: users.User(known, Access.parse(roles)) for n, roles in ROLES.items()})
    with serve(data, "--enable-flush", username="boss", password="pw") as served:
        yield served


def log_in(node: Served, user: str, bucket: bytes | None = b"default") -> Raw:
    raw = Raw(node.kv_port)
    raw.hello(*ALL)
    assert raw.ask(SaslAuth(b"PLAIN", encode_plain(user, "pw"))).specific == Status.SUCCESS
    if bucket is not None:
        assert raw.ask(session.SelectBucket(bucket)).specific == Status.SUCCESS
    return raw


def refused(raw: Raw, message: Message | bytes) -> bool:
    return raw.ask(message).specific == Status.EACCESS


REQUESTS: dict[str, Message] = {
    "get": kv.Get(b"\0k"),
    "set": kv.Set(0, 0, b"\0k", b"v"),
    "stats": session.Stat(b"uuid"),
    "vbucket": cluster.GetVbucket(),
    "flush": session.Flush(),
}
MAY = {
    "reader": {"get", "vbucket"},
    "writer": {"set"},
    "streamer": {"get", "vbucket", "stats"},
    "monitor": {"stats"},
    "keeper": {"stats", "flush"},
    "app": {"get", "set", "vbucket", "stats"},
    "root": set(REQUESTS),
    "boss": set(REQUESTS),
}


@pytest.mark.parametrize("user", MAY)
def test_a_role_allows_its_commands_and_no_others(node: Served, user: str) -> None:
    with log_in(node, user) as raw:
        allowed = set()
        for name, request in REQUESTS.items():
            if not refused(raw, request):
                allowed.add(name)
                while name == "stats" and raw.receive().key:
                    pass
        assert allowed == MAY[user]


@pytest.mark.parametrize(("user", "flags", "allowed"), [
    ("streamer", OpenFlag.PRODUCER, True), ("streamer", 0, False), ("reader", OpenFlag.PRODUCER, False),
    ("app", OpenFlag.PRODUCER, True), ("app", 0, True), ("keeper", OpenFlag.PRODUCER, False),
])  # fmt: skip
def test_who_may_open_a_dcp_connection(node: Served, user: str, flags: int, allowed: bool) -> None:
    with log_in(node, user) as raw:
        assert refused(raw, dcp.Open(0, flags, f"{user}-{flags}".encode())) != allowed


@pytest.mark.parametrize("user", ["elsewhere", "nobody"])
def test_a_bucket_without_rights_cannot_be_selected_nor_seen(node: Served, user: str) -> None:
    with log_in(node, user, bucket=None) as raw:
        assert refused(raw, session.SelectBucket(b"default"))
        assert b"default" not in raw.ask(session.ListBuckets()).value
        assert raw.ask(kv.Get(b"\0k")).specific == Status.NO_BUCKET
    assert node.http(BUCKETS, auth=(user, "pw")) == (200, [])
    assert node.http(f"{BUCKETS}/default", auth=(user, "pw"))[0] == 403


@pytest.mark.parametrize(("user", "method", "path", "status"), [
    ("reader", "GET", f"{BUCKETS}/default", 200),
    ("reader", "POST", f"{BUCKETS}/default/scopes", 403),
    ("keeper", "POST", f"{BUCKETS}/default/scopes", 200),
    ("keeper", "POST", BUCKETS, 403),
    ("keeper", "DELETE", f"{BUCKETS}/default", 403),
    ("app", "POST", "/upriver/cluster/default", 403),
    ("keeper", "POST", "/upriver/faults/crash", 403),
    ("root", "POST", "/upriver/faults/crash", 404),
    ("nobody", "GET", "/pools/default", 200),
])  # fmt: skip
def test_the_management_port_asks_for_the_same_rights(
    node: Served, user: str, method: str, path: str, status: int
) -> None:
    form = {"name": "made"} if method == "POST" else None
    assert node.http(path, method, form, auth=(user, "pw"))[0] == status


def test_a_refusal_names_the_roles_that_would_allow_the_command(node: Served) -> None:
    told = node.http(f"{BUCKETS}/default", "DELETE", auth=("keeper", "pw"))[1]["errors"]["_"]
    assert told == "the user needs the role admin for this (NODE_ADMIN)"


def test_whoami_says_which_roles_a_user_has(node: Served) -> None:
    reader = {"role": "data_reader", "bucket_name": "default"}
    assert node.http("/whoami", auth=("reader", "pw"))[1]["roles"] == [reader]
    assert node.http("/whoami", auth=("root", "pw"))[1]["roles"] == [{"role": "admin"}]


def test_rights_that_change_hold_on_open_connections_too(tmp_path: Path) -> None:
    def upriver(*arguments: str, stdin: str = "pw\n") -> str:
        command = [*UPRIVER, "user", *arguments, "--data", str(tmp_path / "data")]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=True).stdout

    assert upriver("add", "eve", "--password-stdin", "--role", "data_reader[*]") == "added eve (data_reader[*])\n"
    with serve(tmp_path / "data") as served, log_in(served, "eve") as raw:
        assert refused(raw, kv.Set(0, 0, b"\0k", b"v"))
        upriver("grant", "eve", "--role", "data_reader[*]", "--role", "data_writer[default]")
        eventually(lambda: raw.ask(kv.Set(0, 0, b"\0k", b"v")).specific == Status.SUCCESS)
        with log_in(served, "eve") as feed:
            upriver("grant", "eve", "--role", "data_dcp_reader[*]")
            eventually(lambda: not refused(feed, dcp.Open(0, OpenFlag.PRODUCER, b"feed")))
            upriver("remove", "eve")
            assert feed.is_closed()
        eventually(lambda: refused(raw, kv.Get(b"\0k")))
    assert json.loads(upriver("list", "--json")) == {}


@pytest.mark.parametrize("role", ["king", "data_reader", "admin[travel]", "data_reader[", ""])
def test_an_unknown_role_is_refused_with_a_list_of_the_known_ones(tmp_path: Path, role: str) -> None:
    with pytest.raises(ConfigError, match="role"):
        users.add_user(tmp_path / "users.json", "ann", "x", iterations=10, roles=[role])
    assert not (tmp_path / "users.json").exists()


def test_users_of_a_file_without_roles_stay_administrators(tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    users.add_user(path, "ann", "x", iterations=10)
    old = json.loads(path.read_text())
    del old["roles"]
    path.write_text(json.dumps(old | {"version": 1}))
    assert users.Users(path).access("ann").outside & Privilege.NODE_ADMIN


def test_every_command_that_changes_something_needs_a_privilege() -> None:
    from upriver.node.access.roles import NEEDED
    from upriver.wire.constants import DURABLE_OPCODES, QUIET_OPCODES

    harmless = {Opcode.QUITQ}
    assert (QUIET_OPCODES | DURABLE_OPCODES) - harmless <= NEEDED.keys()
