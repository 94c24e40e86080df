"""STREAM_REQ over a real socket: the checks of docs/protocol/stream-request.md#checks in their order, each with the
status that it answers.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import SEQNO_MAX, VbucketState
from upriver.wire import Opcode
from upriver.wire.constants import Feature, OpenFlag, StreamEndStatus, StreamFlag
from upriver.wire.messages import cluster, dcp, kv, upr

OK, EINVAL, NO, NMVB, ERANGE = (
    Status.SUCCESS, Status.EINVAL, Status.NOT_SUPPORTED, Status.NOT_MY_VBUCKET, Status.ERANGE,
)  # fmt: skip
ROLLBACK, EEXISTS, BAD_SID = Status.ROLLBACK, Status.KEY_EEXISTS, Status.DCP_STREAM_ID_INVALID
NO_COLLECTION, NO_SCOPE = Status.UNKNOWN_COLLECTION, Status.UNKNOWN_SCOPE

MANIFEST = b"""{"uid":"2","scopes":[
    {"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]},
    {"name":"shop","uid":"8","collections":[{"name":"cart","uid":"9"},{"name":"user","uid":"a"}]}]}"""
ACTIVE, REPLICA, PENDING, DEAD, MISSING = 0, 1, 2, 3, 99


@pytest.fixture(scope="module", autouse=True)
def content(node: NodeThread) -> None:
    """Vbucket 0 has ten documents and two collections; others are in the other states."""
    with ready(node.port, *ALL) as raw:
        assert raw.ask(cluster.SetManifest(MANIFEST)).specific == OK
        for number in range(10):
            assert raw.ask(kv.Set(key=b"\0key%d" % number, value=b"v", vbucket=ACTIVE)).specific == OK
        states = {REPLICA: VbucketState.REPLICA, PENDING: VbucketState.PENDING, DEAD: VbucketState.DEAD}
        for vbucket, state in states.items():
            assert raw.ask(cluster.SetVbucket(state, vbucket=vbucket)).specific == OK


def open_producer(port: int, *features: int, controls: dict[bytes, bytes] | None = None, flags: int = 1) -> Raw:
    raw = ready(port, *(features or ALL))
    assert raw.ask(dcp.Open(0, flags, b"requests")).specific == OK
    for key, value in {b"enable_noop": b"true", **(controls or {})}.items():
        assert raw.ask(dcp.DcpControl(key, value)).specific == OK
    return raw


@pytest.fixture
def raw(node: NodeThread) -> Iterator[Raw]:
    """A producer connection with collections and noop."""
    with open_producer(node.port) as made:
        yield made


def request(**fields: int | bytes) -> dcp.StreamRequest:
    return dcp.StreamRequest(**fields)  # type: ignore[arg-type]


def uuid_of(node: NodeThread, vbucket: int = ACTIVE) -> int:
    return int(node.vbucket(vbucket).failover_log.uuid)


def high(node: NodeThread) -> int:
    return int(node.vbucket(ACTIVE).high_seqno)


INF = b"\xff" * 8
PLAIN = bytes(16) + INF + bytes(24)


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(frame(0x53, extras=PLAIN[:44]), EINVAL, id="extras of 44 bytes"),
        pytest.param(frame(0x53, extras=PLAIN, key=b"k"), EINVAL, id="a key"),
        pytest.param(frame(0x53, extras=PLAIN, datatype=1), EINVAL, id="datatype JSON"),
        pytest.param(frame(0x53, extras=PLAIN, framing=b"\x10"), EINVAL, id="durability without a level"),
        pytest.param(frame(0x53, extras=PLAIN, framing=b"\x90"), Status.UNKNOWN_FRAME_INFO, id="unknown framing extra"),
        pytest.param(frame(0x53, extras=b"\0\0\0\x08" + PLAIN[4:]), EINVAL, id="flag no value"),
        pytest.param(frame(0x53, extras=b"\0\0\x02\0" + PLAIN[4:]), EINVAL, id="flag that does not exist"),
        pytest.param(frame(0x53, extras=b"\0\0\x01\x02" + PLAIN[4:]), EINVAL, id="cache transfer with disk only"),
        pytest.param(frame(0x53, extras=b"\0\0\x01\0" + PLAIN[4:]), EINVAL, id="cache transfer, not supported"),
    ],
)
def test_a_malformed_request_is_refused_first(raw: Raw, request_bytes: bytes, status: Status):
    assert raw.ask(request_bytes).specific == status


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        pytest.param({"vbucket": MISSING}, NMVB, id="missing vbucket"),
        pytest.param({"vbucket": PENDING}, NMVB, id="pending vbucket"),
        pytest.param({"vbucket": DEAD}, NMVB, id="dead vbucket"),
        pytest.param({"vbucket": REPLICA}, OK, id="replica vbucket"),
        pytest.param({"vbucket": REPLICA, "flags": StreamFlag.ACTIVE_VB_ONLY}, NMVB, id="replica, active only"),
        pytest.param({"vbucket": MISSING, "start_seqno": 5, "end_seqno": 1}, NMVB, id="vbucket before range"),
        pytest.param({"start_seqno": 5, "end_seqno": 4, "snap_end_seqno": 9}, ERANGE, id="start beyond end"),
        pytest.param({"start_seqno": 5, "snap_start_seqno": 6, "snap_end_seqno": 9}, ERANGE, id="start before range"),
        pytest.param({"start_seqno": 5, "snap_end_seqno": 4}, ERANGE, id="start after snapshot"),
        pytest.param({"start_seqno": 5, "snap_end_seqno": 4, "value": b"{"}, ERANGE, id="range before filter"),
        pytest.param({"value": b"{"}, EINVAL, id="filter is not JSON"),
        pytest.param({"value": b"[]"}, EINVAL, id="filter is not an object"),
        pytest.param({"value": b"{}"}, EINVAL, id="filter is empty"),
        pytest.param({"value": b'{"x":1}'}, EINVAL, id="filter without a known key"),
        pytest.param({"value": b'{"uid":"0","x":1}'}, OK, id="unknown keys beside a known one"),
        pytest.param({"value": b'{"uid":7}'}, OK, id="uid of any type"),
        pytest.param({"value": b'{"sid":0}'}, BAD_SID, id="stream-id 0"),
        pytest.param({"value": b'{"sid":"1"}'}, EINVAL, id="stream-id as text"),
        pytest.param({"value": b'{"sid":65536}'}, EINVAL, id="stream-id too large"),
        pytest.param({"value": b'{"collections":["8"],"scope":"8"}'}, EINVAL, id="scope and collections"),
        pytest.param({"value": b'{"collections":"9"}'}, EINVAL, id="collections not a list"),
        pytest.param({"value": b'{"collections":[9]}'}, EINVAL, id="collection id not text"),
        pytest.param({"value": b'{"collections":["9","9"]}'}, EINVAL, id="collection twice"),
        pytest.param({"value": b'{"collections":["77"]}'}, NO_COLLECTION, id="unknown collection"),
        pytest.param({"value": b'{"scope":"77"}'}, NO_SCOPE, id="unknown scope"),
        pytest.param({"value": b'{"purge_seqno":1}'}, EINVAL, id="purge seqno not text"),
        pytest.param({"value": b'{"collections":["9"]}'}, OK, id="a known collection"),
        pytest.param({"value": b'{"scope":"8"}'}, OK, id="a known scope"),
        pytest.param({"value": b'{"sid":1}'}, BAD_SID, id="stream-id without the feature"),
        pytest.param({"vbuuid": 0xDEAD}, OK, id="unknown uuid at 0"),
        pytest.param({"vbuuid": 0xDEAD, "flags": StreamFlag.STRICT_VB_UUID}, ROLLBACK, id="unknown uuid at 0, strict"),
        pytest.param({"flags": StreamFlag.STRICT_VB_UUID}, OK, id="uuid 0 at 0, strict"),
        pytest.param(
            {"start_seqno": 5, "vbuuid": 0xDEAD, "snap_start_seqno": 5, "snap_end_seqno": 5}, ROLLBACK, id="other uuid"
        ),
        pytest.param({"start_seqno": 5, "snap_start_seqno": 5, "snap_end_seqno": 5}, ROLLBACK, id="uuid 0 above 0"),
        pytest.param({"flags": StreamFlag.FROM_LATEST}, OK, id="from latest"),
        pytest.param({"flags": StreamFlag.FROM_LATEST, "vbuuid": 0xDEAD}, ROLLBACK, id="from latest, unknown uuid"),
        pytest.param({"flags": StreamFlag.FROM_LATEST, "end_seqno": 3}, ERANGE, id="from latest, beyond end"),
        pytest.param({"flags": StreamFlag.TO_LATEST}, OK, id="to latest"),
        pytest.param({"flags": StreamFlag.DISK_ONLY}, OK, id="disk only"),
        pytest.param({"end_seqno": 0}, OK, id="nothing asked for"),
    ],
)  # fmt: skip
def test_the_first_check_that_fails_gives_the_status(raw: Raw, fields: dict[str, int | bytes], status: Status):
    assert raw.ask(request(**fields)).specific == status


def test_the_map_comes_with_not_my_vbucket(raw: Raw):
    answer = raw.ask(request(vbucket=MISSING))
    assert b"vBucketServerMap" in answer.value


def test_a_success_carries_the_failover_log_and_precedes_the_data(raw: Raw, node: NodeThread):
    raw.send(request(opaque=0xABCD))
    answer = raw.receive()
    assert (answer.specific, answer.opaque) == (OK, 0xABCD)
    assert answer.value[:8] == uuid_of(node).to_bytes(8, "big")
    assert isinstance(raw.message(), dcp.SnapshotMarker)


def test_noop_is_needed_for_collections_and_for_xattrs(node: NodeThread):
    with ready(node.port, *ALL) as raw:
        raw.ask(dcp.Open(0, 1, b"no-noop"))
        assert raw.ask(request(start_seqno=5, end_seqno=1)).specific == NO, "checked before the range"
    with ready(node.port, *BASIC) as raw:
        raw.ask(dcp.Open(0, OpenFlag.PRODUCER | OpenFlag.INCLUDE_XATTRS, b"no-noop"))
        assert raw.ask(request()).specific == NO
    with ready(node.port, *BASIC) as raw:
        raw.ask(dcp.Open(0, 1, b"no-noop"))
        assert raw.ask(request()).specific == OK


def test_a_value_without_collections_is_refused(node: NodeThread):
    with open_producer(node.port, *BASIC) as raw:
        assert raw.ask(request(value=b'{"uid":"0"}')).specific == EINVAL


def test_stream_ids_must_be_given_once_they_are_enabled(node: NodeThread):
    with open_producer(node.port, controls={b"enable_stream_id": b"true"}) as raw:
        assert raw.ask(request()).specific == BAD_SID
        assert raw.ask(request(value=b'{"sid":7}')).specific == OK
        assert raw.ask(request(value=b'{"sid":8}')).specific == OK
        assert raw.ask(request(value=b'{"sid":7}')).specific == EEXISTS


def test_a_filter_does_not_go_with_sync_writes(node: NodeThread):
    with open_producer(node.port, controls={b"enable_sync_writes": b"true"}) as raw:
        assert raw.ask(request(value=b'{"collections":["9"]}')).specific == NO


def test_a_second_stream_for_a_vbucket_exists_already_before_history_is_looked_at(raw: Raw):
    assert raw.ask(request()).specific == OK
    assert raw.ask(request(start_seqno=5, vbuuid=1, snap_start_seqno=5, snap_end_seqno=5)).specific == EEXISTS


def test_an_ended_stream_makes_room_for_another(raw: Raw):
    assert raw.ask(request(end_seqno=0)).specific == OK
    assert raw.ask(request(end_seqno=0)).specific == OK


@pytest.mark.parametrize(
    ("start", "snap_start", "snap_end", "expected"),
    [(1000, 1000, 1000, "high"), (5, 5, 1000, None), (5, 3, 1000, 3), (5, 3, 9, None)],
)
def test_the_rollback_point_is_in_the_value(
    raw: Raw, node: NodeThread, start: int, snap_start: int, snap_end: int, expected: int | str | None
):
    answer = raw.ask(
        request(start_seqno=start, snap_start_seqno=snap_start, snap_end_seqno=snap_end, vbuuid=uuid_of(node))
    )
    wanted = high(node) if expected == "high" else expected
    got = int.from_bytes(answer.value, "big") if answer.specific == ROLLBACK else None
    assert (got, len(answer.extras)) == (wanted, 0)


def test_start_equal_to_end_is_a_success_and_ends_at_once(raw: Raw, node: NodeThread):
    seqno = high(node)
    raw.send(
        request(start_seqno=seqno, end_seqno=seqno, snap_start_seqno=seqno, snap_end_seqno=seqno, vbuuid=uuid_of(node))
    )
    assert raw.receive().specific == OK
    assert raw.message() == dcp.StreamEnd(StreamEndStatus.OK)


def test_without_collections_a_dropped_default_collection_refuses_the_stream(make_node):  # type: ignore[no-untyped-def]
    other = make_node()
    with ready(other.port, *ALL) as admin:
        manifest = b'{"uid":"1","scopes":[{"name":"_default","uid":"0","collections":[]}]}'
        assert admin.ask(cluster.SetManifest(manifest)).specific == OK
    with open_producer(other.port, *BASIC) as raw:
        assert raw.ask(request()).specific == NO_COLLECTION
    with open_producer(other.port, Feature.JSON) as raw:
        assert raw.ask(request()).specific == EINVAL, "without extended errors there is no such status"


def test_too_many_streams_are_refused(make_node):  # type: ignore[no-untyped-def]
    from upriver.node.options import Limits

    other = make_node(limits=Limits(max_streams=3))
    with open_producer(other.port, controls={b"enable_stream_id": b"true"}) as raw:
        answers = [raw.ask(request(value=b'{"sid":%d}' % sid)).specific for sid in range(1, 5)]
        assert answers == [OK, OK, OK, Status.ENOMEM]


@pytest.mark.parametrize(("vbucket", "flags", "status"), [(4, 0x02, Status.ETMPFAIL), (5, 0x01, OK)])
def test_a_replica_without_its_first_disk_snapshot_refuses_streams(
    raw: Raw, node: NodeThread, vbucket: int, flags: int, status: Status
):
    assert raw.ask(cluster.DeleteVbucket(vbucket=vbucket)).specific == OK
    assert raw.ask(cluster.SetVbucket(VbucketState.REPLICA, vbucket=vbucket)).specific == OK
    node.call(lambda: node.vbucket(vbucket).replication.begin_snapshot(0, 100, flags))
    assert raw.ask(request(vbucket=vbucket)).specific == status
    assert raw.ask(request(vbucket=vbucket, start_seqno=9, end_seqno=1)).specific == ERANGE, "range comes first"


class TestUpr:
    """The 40-byte request of the older dialect."""

    @pytest.fixture
    def upr_raw(self, node: NodeThread) -> Iterator[Raw]:
        with ready(node.port, *BASIC) as made:
            assert made.ask(dcp.Open(0, 1, b"upr")).specific == OK
            yield made

    @pytest.mark.parametrize(
        ("fields", "status"),
        [
            pytest.param({"vbucket": MISSING}, NMVB, id="missing vbucket"),
            pytest.param({"start_seqno": 5, "end_seqno": 5, "vbuuid": 1}, ERANGE, id="start at end"),
            pytest.param({"start_seqno": 5, "vbuuid": 0xDEAD}, Status.KEY_ENOENT, id="unknown uuid"),
            pytest.param({}, OK, id="everything"),
        ],
    )
    def test_its_own_statuses(self, upr_raw: Raw, fields: dict[str, int], status: Status):
        assert upr_raw.ask(upr.UprStreamRequest(**fields)).specific == status

    def test_the_rollback_point_is_in_the_extras(self, upr_raw: Raw, node: NodeThread):
        answer = upr_raw.ask(upr.UprStreamRequest(start_seqno=10**6, vbuuid=uuid_of(node)))
        assert (answer.specific, answer.extras, answer.value) == (ROLLBACK, high(node).to_bytes(8, "big"), b"")

    def test_a_stream_in_its_layouts(self, upr_raw: Raw, node: NodeThread):
        upr_raw.send(upr.UprStreamRequest(end_seqno=SEQNO_MAX))
        upr_raw.receive()
        first, second = upr_raw.receive(), upr_raw.receive()
        assert (first.opcode, first.extras) == (Opcode.DCP_SNAPSHOT_MARKER, b"")
        assert (second.opcode, len(second.extras), second.key) == (Opcode.DCP_MUTATION, 30, b"key0")

    def test_documents_with_attributes_come_without_them(self, upr_raw: Raw, node: NodeThread):
        with ready(node.port, *ALL) as writer:
            writer.ask(kv.Set(key=b"\0doc", value=b'{"a":1}', vbucket=6))
            extras = b"\0\4\4"  # a path of four bytes, an attribute
            written = frame(Opcode.SUBDOC_DICT_UPSERT, extras=extras, key=b"\0doc", value=b"name1", vbucket=6)
            assert writer.ask(written).specific == OK
        upr_raw.send(upr.UprStreamRequest(end_seqno=int(node.vbucket(6).high_seqno), vbucket=6))
        while (got := upr_raw.receive()).opcode != Opcode.DCP_MUTATION:
            pass
        assert (got.key, got.value, got.datatype) == (b"doc", b'{"a":1}', 1)

    def test_it_ends_exactly_at_its_end(self, upr_raw: Raw, node: NodeThread):
        end = high(node) - 4
        upr_raw.send(upr.UprStreamRequest(end_seqno=end))
        upr_raw.receive()
        seqnos = []
        while (got := upr_raw.receive()).opcode != Opcode.DCP_STREAM_END:
            if got.opcode == Opcode.DCP_MUTATION:
                seqnos.append(int.from_bytes(got.extras[:8], "big"))
        assert seqnos[-1] == end
