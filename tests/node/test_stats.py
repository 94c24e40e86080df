"""STAT over a real socket: the groups and key names that tools read, and ``upriver stats``."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from struct import pack

import pytest

from tests.node.front_node import UPRIVER, Served, serve
from tests.node.raw import ALL, BASIC, Raw, frame, ready
from upriver.errors import Status
from upriver.model import Datatype, VbucketState
from upriver.wire import Opcode
from upriver.wire.constants import OpenFlag
from upriver.wire.messages import dcp, kv
from upriver.wire.messages.cluster import SetManifest, SetVbucket
from upriver.wire.messages.session import GetErrorMap, Stat

S = Status
MANIFEST = {
    "uid": "7",
    "scopes": [
        {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]},
        {"name": "shop", "uid": "8", "collections": [{"name": "orders", "uid": "9", "maxTTL": 60}]},
    ],
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(tmp_path_factory.mktemp("stats") / "data") as served:
        with ready(served.kv_port) as raw:
            assert raw.ask(SetManifest(json.dumps(MANIFEST).encode())).specific == S.SUCCESS
            for number in range(3):
                assert raw.ask(kv.Set(0, 0, b"k%d" % number, b"{}", vbucket=5)).specific == S.SUCCESS
        yield served


@pytest.fixture
def raw(node: Served) -> Iterator[Raw]:
    with ready(node.kv_port) as connection:
        yield connection


def stats(raw: Raw, group: str = "", options: object = None) -> dict[str, str]:
    """All figures of a group: one packet each, and an empty one at the end."""
    value = json.dumps(options).encode() if options is not None else b""
    raw.send(Stat(group.encode(), value, datatype=Datatype.JSON if value else 0))
    figures = {}
    while True:
        answer = raw.response()
        assert answer.specific == S.SUCCESS, (group, answer)
        if not answer.key:
            return figures
        assert answer.key.decode() not in figures
        figures[answer.key.decode()] = answer.value.decode()


def test_the_general_group_has_what_tools_look_for(raw: Raw) -> None:
    found = stats(raw)
    assert found["curr_items"] == "3"
    assert found["vb_active_num"] == "64"
    assert found["ep_flusher_state"] == "running"
    assert found["ep_dbname"].endswith("default")
    wanted = {"ep_queue_size", "ep_commit_num", "vb_active_expired", "mem_used", "ep_dcp_count", "uptime", "version"}
    assert wanted <= found.keys()


def test_vbucket_groups_cover_all_vbuckets_or_the_one_that_is_named(raw: Raw) -> None:
    assert stats(raw, "vbucket") == {f"vb_{number}": "active" for number in range(64)}
    one = stats(raw, "vbucket-seqno 5")
    assert set(one) == {
        f"vb_5:{name}" for name in (
            "high_seqno", "abs_high_seqno", "last_persisted_seqno", "uuid", "purge_seqno", "last_persisted_snap_start",
            "last_persisted_snap_end", "high_prepared_seqno", "high_completed_seqno", "max_visible_seqno",
        )
    }  # fmt: skip
    assert int(one["vb_5:high_seqno"]) >= 3
    assert len(stats(raw, "vbucket-seqno")) == 64 * 10
    details = stats(raw, "vbucket-details 5")
    assert details["vb_5"] == "active"
    assert details["vb_5:num_items"] == "3"
    for name in ("uuid", "purge_seqno", "max_cas", "persistence_seqno", "topology", "queue_size"):
        assert f"vb_5:{name}" in details


def test_a_replica_shows_its_state_and_the_end_of_its_snapshot(raw: Raw) -> None:
    for number in range(2):
        raw.ask(kv.Set(0, 0, b"r%d" % number, b"{}", vbucket=9))
    before = stats(raw, "vbucket-seqno 9")["vb_9:high_seqno"]
    assert raw.ask(SetVbucket(VbucketState.REPLICA, vbucket=9)).specific == S.SUCCESS
    assert stats(raw, "vbucket 9") == {"vb_9": "replica"}
    assert stats(raw, "vbucket-seqno 9")["vb_9:high_seqno"] == before != "0"
    assert stats(raw)["vb_replica_num"] == "1"
    assert raw.ask(SetVbucket(VbucketState.ACTIVE, vbucket=9)).specific == S.SUCCESS
    assert stats(raw, "failovers 9")["vb_9:num_entries"] == "2"
    raw.ask(kv.Delete(b"r0", vbucket=9))
    raw.ask(kv.Delete(b"r1", vbucket=9))


def test_the_failover_log_has_the_vbuckets_uuid_on_top(raw: Raw) -> None:
    log = stats(raw, "failovers 5")
    assert log["vb_5:num_entries"] == "1"
    assert log["vb_5:0:id"] == stats(raw, "vbucket-seqno 5")["vb_5:uuid"]
    assert log["vb_5:0:seq"] == "0"


@pytest.mark.parametrize(("group", "status"), [
    ("nonsense", S.KEY_ENOENT),
    ("vbucket-seqno x", S.EINVAL),
    ("vbucket-seqno -1", S.EINVAL),
    ("vbucket-details 70000", S.EINVAL),
    ("vbucket-seqno 64", S.NOT_MY_VBUCKET),
    ("failovers 999", S.NOT_MY_VBUCKET),
    ("dcp-vbtakeover", S.EINVAL),
    ("dcp-vbtakeover x name", S.EINVAL),
    ("collections shop.nothing", S.UNKNOWN_COLLECTION),
])  # fmt: skip
def test_a_missing_group_or_vbucket_has_its_status(raw: Raw, group: str, status: Status) -> None:
    assert raw.ask(Stat(group.encode())).specific == status
    assert stats(raw, "uuid")["uuid"]


def test_without_a_bucket_only_the_node_is_described(node: Served) -> None:
    with Raw(node.kv_port) as raw:
        raw.hello(*BASIC)
        assert "curr_items" not in stats(raw)
        assert raw.ask(Stat(b"vbucket")).specific == S.NO_BUCKET


def test_collections_are_counted(raw: Raw, node: Served) -> None:
    with ready(node.kv_port, *ALL) as named:
        assert named.ask(kv.Set(0, 0, b"\x09order", b"{}", vbucket=6)).specific == S.SUCCESS
    found = stats(raw, "collections")
    assert found["manifest_uid"] == "0x7"
    assert found["0x8:0x9:items"] == "1"
    assert found["0x8:0x9:name"] == "orders"
    assert found["0x8:0x9:maxTTL"] == "60"
    assert "0x0:0x0:items" not in stats(raw, "collections shop.orders")
    assert stats(raw, "scopes")["0x8:items"] == "1"
    assert stats(raw, "collections-details 6")["vb_6:0x9:items"] == "1"


def test_dcp_connections_and_their_streams_are_listed(raw: Raw, node: Served) -> None:
    with ready(node.kv_port) as reader:
        assert reader.ask(dcp.Open(0, OpenFlag.PRODUCER, b"agg:reader")).specific == S.SUCCESS
        assert reader.ask(dcp.DcpControl(b"connection_buffer_size", b"4096")).specific == S.SUCCESS
        reader.send(dcp.StreamRequest(0, 0, 0, 1 << 40, 0, 0, 0, vbucket=5))
        assert reader.response().specific == S.SUCCESS
        found = stats(raw, "dcp")
        prefix = "eq_dcpq:agg:reader:"
        assert found[prefix + "type"] == "producer"
        assert found[prefix + "max_buffer_bytes"] == "4096"
        for name in ("created", "unacked_bytes", "total_acked_bytes", "total_bytes_sent"):
            assert prefix + name in found
        assert found[prefix + "stream_5_start_seqno"] == "0"
        assert found[prefix + "stream_5_state"] in ("in-memory", "backfilling")
        assert found["ep_dcp_count"] == "1"
        assert not any("stream_5" in name for name in stats(raw, "dcp", {"stream_format": "skip"}))
        as_json = stats(raw, "dcp", {"stream_format": "json"})[prefix + "stream_5"]
        assert json.loads(as_json)["end_seqno"] == 1 << 40
        assert prefix + "type" not in stats(raw, "dcp", {"filter": {"user": "somebody"}})
        assert stats(raw, "dcpagg :")["agg:count"] == "1"
        assert stats(raw, "dcp-vbtakeover 5 agg:reader")["status"] in ("in-memory", "backfilling")
        assert stats(raw, "dcp-vbtakeover 6 agg:reader")["status"] == "stream_does_not_exist"
    assert stats(raw, "dcp-vbtakeover 5 nobody")["status"] == "connection_does_not_exist"


def test_a_consumer_and_what_it_receives_are_listed(raw: Raw, node: Served) -> None:
    with ready(node.kv_port) as admin, ready(node.kv_port) as peer:
        assert admin.ask(SetVbucket(VbucketState.REPLICA, vbucket=9)).specific == S.SUCCESS
        assert peer.ask(dcp.Open(0, 0, b"to-us")).specific == S.SUCCESS
        peer.send(dcp.AddStream(0, vbucket=9))
        peer.receive()
        found = stats(raw, "dcp")
        assert found["eq_dcpq:to-us:type"] == "consumer"
        assert found["eq_dcpq:to-us:num_streams"] == "1"
        assert found["eq_dcpq:to-us:stream_9_state"]
        assert admin.ask(SetVbucket(VbucketState.ACTIVE, vbucket=9)).specific == S.SUCCESS


def test_vbucket_details_say_what_waits_for_the_disk(raw: Raw) -> None:
    assert raw.ask(frame(Opcode.STOP_PERSISTENCE)).specific == S.SUCCESS
    try:
        raw.ask(kv.Set(key=b"waits", value=bytes(1000), vbucket=11))
        found = stats(raw, "vbucket-details 11")
        assert int(found["vb_11:queue_size"]) >= 1
        assert int(found["vb_11:ht_item_memory"]) >= 1000
    finally:
        assert raw.ask(frame(Opcode.START_PERSISTENCE)).specific == S.SUCCESS


def test_expired_documents_are_counted(raw: Raw) -> None:
    before = int(stats(raw)["vb_active_expired"])
    long_ago = 2_592_001  # an absolute time, not a duration
    assert raw.ask(kv.Set(expiry=long_ago, key=b"gone", value=b"v", vbucket=12)).specific == S.SUCCESS
    assert raw.ask(kv.Get(b"gone", vbucket=12)).specific == S.KEY_ENOENT
    assert int(stats(raw)["vb_active_expired"]) == before + 1


@pytest.mark.parametrize("value", [b"[]", b"not json", b'{"stream_format":"odd"}', b'{"filter":5}'])
def test_invalid_options_are_refused(raw: Raw, node: Served, value: bytes) -> None:
    with ready(node.kv_port) as reader:
        reader.ask(dcp.Open(0, OpenFlag.PRODUCER, b"options"))
        assert raw.ask(Stat(b"dcp", value, datatype=Datatype.JSON)).specific == S.EINVAL


def test_other_clients_are_served_while_a_long_group_is_sent(raw: Raw, node: Served) -> None:
    for _ in range(50):
        raw.send(Stat(b"vbucket-details"))
    with ready(node.kv_port) as other:
        assert other.ask(kv.Get(b"k0", vbucket=5)).specific == S.SUCCESS
    for _ in range(50):
        while raw.response().key:
            pass


def test_the_command_prints_a_table_or_json(node: Served) -> None:
    command = [*UPRIVER, "stats", f"127.0.0.1:{node.kv_port}", "vbucket-seqno", "5"]
    table = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "vb_5:high_seqno" in table.stdout, table.stderr
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=True).stdout
    [figures] = json.loads(printed).values()
    assert int(figures["vb_5:high_seqno"]) >= 3
    wrong = subprocess.run([*command[:-2], "nonsense"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == 1
    assert "nonsense" in wrong.stderr
    assert "Traceback" not in wrong.stderr


# ---------------------------------------------------------------------------------------------- the error map

ATTRIBUTES = {
    "success", "item-only", "item-deleted", "item-locked", "invalid-input", "fetch-config", "conn-state-invalidated",
    "auth", "special-handling", "support", "temp", "internal", "retry-now", "retry-later", "no-retry", "subdoc", "dcp",
    "rate-limit", "system-constraint",
}  # fmt: skip


@pytest.mark.parametrize(("asked", "served"), [(1, 1), (2, 2), (65535, 2)])
def test_the_error_map_explains_every_status_we_have(raw: Raw, asked: int, served: int) -> None:
    answer = raw.ask(GetErrorMap(asked))
    found = json.loads(answer.value)
    assert found["version"] == served
    assert {int(code, 16) for code in found["errors"]} == {int(status) for status in Status}
    for entry in found["errors"].values():
        assert entry["name"]
        assert entry["desc"]
        assert set(entry["attrs"]) <= ATTRIBUTES
        assert entry["attrs"]


def test_there_is_no_error_map_before_version_1(raw: Raw) -> None:
    request = GetErrorMap(1).frame()
    request.value = pack(">H", 0)
    assert raw.ask(request.encode()).specific == S.KEY_ENOENT


# ---------------------------------------------------------------------------------------------- one of many


def refused(raw: Raw, group: str) -> Status:
    return Status(raw.ask(Stat(group.encode())).specific)


def test_scopes_and_collections_can_be_asked_for_by_name_and_by_id(raw: Raw) -> None:
    every = stats(raw, "scopes")
    assert {name for name in every if name.endswith(":name")} == {"0x0:name", "0x8:name"}
    one = {name: value for name, value in every.items() if not name.startswith("0x0:")}
    assert stats(raw, "scopes shop") == stats(raw, "scopes-byid 0x8") == stats(raw, "scopes-byid 8") == one
    assert stats(raw, "collections shop.orders") == stats(raw, "collections-byid 0x9")
    assert stats(raw, "collections-byid 9")["0x8:0x9:name"] == "orders"


@pytest.mark.parametrize(
    ("group", "status"),
    [
        ("scopes nowhere", S.UNKNOWN_SCOPE), ("scopes-byid 77", S.UNKNOWN_SCOPE), ("scopes-byid", S.EINVAL),
        ("collections shop.nothing", S.UNKNOWN_COLLECTION), ("collections-byid 77", S.UNKNOWN_COLLECTION),
        ("collections-byid shop", S.EINVAL), ("key", S.EINVAL), ("key k0", S.EINVAL), ("key k0 five", S.EINVAL),
        ("key k0 4000", S.NOT_MY_VBUCKET), ("key nothing 5", S.KEY_ENOENT), ("key k0 5 shop.orders", S.KEY_ENOENT),
    ],
)  # fmt: skip
def test_a_statistic_of_something_missing_is_an_error(node: Served, group: str, status: Status) -> None:
    with ready(node.kv_port, *ALL) as raw:
        assert refused(raw, group) == status


def test_a_key_has_statistics(raw: Raw) -> None:
    stored = raw.ask(kv.Set(0xABCD, 0, b"figure", b"{}", vbucket=5))
    found = stats(raw, "key figure 5")
    assert found | {"key_is_dirty": ""} == {
        "key_is_dirty": "", "key_exptime": "0", "key_flags": str(0xABCD), "key_cas": str(stored.cas),
        "key_vb_state": "active", "key_is_resident": "true",
    }  # fmt: skip
    assert stats(raw, "key figure 5 _default._default").keys() == stats(raw, "key-byid figure 5 0").keys()
    assert stats(raw, "vkey figure 5")["key_valid"] in ("dirty", "valid")


def test_responses_are_counted_by_status(raw: Raw) -> None:
    def counted() -> dict[str, int]:
        found: dict[str, int] = json.loads(stats(raw, "responses")["responses"])
        return found

    before = counted()
    for _ in range(3):
        raw.ask(kv.Get(b"not there", vbucket=5))
    raw.ask(kv.Get(b"k0", vbucket=5))
    raw.ask(kv.Set(0, 0, b"counted", b"{}", vbucket=5))
    after = counted()
    assert after["1"] - before.get("1", 0) == 3
    assert after["0"] - before["0"] == 4  # two for the statistics themselves
