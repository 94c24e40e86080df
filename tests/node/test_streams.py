"""What a stream sends over real sockets: snapshots, documents in every version, collections and their filters."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import cramjam
import pytest

from tests.node.raw import ALL, BASIC, Raw, ready
from tests.node.streaming import OK, is_end, manifest, only, producer, stream, take, to_disk, whole, write
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import Datatype
from upriver.wire import Message
from upriver.wire.constants import MarkerFlag, OpenFlag, OsoFlag, StreamEndStatus, StreamFlag
from upriver.wire.messages import cluster, dcp, events, kv
from upriver.wire.values import inflate, join_xattrs, split_xattrs

XATTRS = join_xattrs({"_sys": b"1", "user": b"2"}, b'{"a":1}')


@pytest.fixture(scope="module")
def node(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    return make_node(vbuckets=64)


_vbuckets = itertools.count()


@pytest.fixture
def vb(node: NodeThread) -> int:
    """A vbucket that no other test has touched."""
    return next(_vbuckets)


# ---------------------------------------------------------------------------------------------- snapshots


def test_a_new_stream_starts_with_a_marker_from_0_and_ends_where_it_was_told(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b", b"c")
    with producer(node) as raw:
        marker, *documents, end = stream(raw, vb, end_seqno=3)
        assert isinstance(marker, dcp.SnapshotMarker)
        assert (marker.start_seqno, marker.end_seqno, marker.flags) == (0, 3, MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT)
        assert [m.by_seqno for m in only(documents, dcp.DcpMutation)] == [1, 2, 3]
        assert end == dcp.StreamEnd(StreamEndStatus.OK, vbucket=vb)


def test_a_backfill_comes_from_disk_and_continues_from_memory(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b", b"a")
    to_disk(node)
    with producer(node) as raw:
        got = stream(raw, vb, lambda m: isinstance(m, dcp.DcpMutation) and m.by_seqno == 3)
        marker = got[0]
        assert isinstance(marker, dcp.SnapshotMarker)
        assert (marker.start_seqno, marker.end_seqno, marker.flags) == (0, 3, MarkerFlag.DISK | MarkerFlag.CHECKPOINT)
        assert [(m.by_seqno, m.key) for m in only(got, dcp.DcpMutation)] == [(2, b"\0b"), (3, b"\0a")]
        write(node, vb, b"c")
        live = take(raw, lambda m: isinstance(m, dcp.DcpMutation))
        assert isinstance(live[0], dcp.SnapshotMarker)
        assert live[0].flags == MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT


def test_writes_arrive_while_the_stream_is_open(node: NodeThread, vb: int):
    with producer(node) as raw, ready(node.port) as writer:
        raw.send(dcp.StreamRequest(vbucket=vb))
        raw.receive()
        for number in range(20):
            writer.ask(kv.Set(key=b"live%d" % number, value=b"v", vbucket=vb))
            got = take(raw, lambda m: isinstance(m, dcp.DcpMutation))
            assert got[-1].key == b"\0live%d" % number  # type: ignore[attr-defined]


def test_a_resumed_stream_sends_what_is_missing_and_repeats_the_snapshot_start(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b", b"c", b"d")
    uuid = node.vbucket(vb).failover_log.uuid
    with producer(node) as raw:
        got = stream(raw, vb, end_seqno=4, start_seqno=2, vbuuid=uuid, snap_start_seqno=1, snap_end_seqno=4)
        assert isinstance(got[0], dcp.SnapshotMarker)
        assert got[0].start_seqno == 1
        assert [m.by_seqno for m in only(got, dcp.DcpMutation)] == [3, 4]


def test_markers_of_version_2_2_only_for_disk_snapshots(node: NodeThread, vb: int):
    write(node, vb, b"a")
    to_disk(node)
    with producer(node, max_marker_version="2.2") as raw:
        got = stream(raw, vb, lambda m: isinstance(m, dcp.DcpMutation))
        assert isinstance(got[0], dcp.SnapshotMarkerV22)
        write(node, vb, b"b")
        assert isinstance(take(raw, lambda m: isinstance(m, dcp.DcpMutation))[0], dcp.SnapshotMarker)


def test_disk_only_ends_at_what_is_persisted(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")
    to_disk(node)
    with producer(node) as raw:
        got = stream(raw, vb, flags=StreamFlag.DISK_ONLY)
        assert [m.by_seqno for m in only(got, dcp.DcpMutation)] == [1, 2]


def test_from_latest_sends_only_what_comes_later(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")
    with producer(node) as raw:
        raw.send(dcp.StreamRequest(vbucket=vb, flags=StreamFlag.FROM_LATEST))
        assert raw.receive().specific == OK
        write(node, vb, b"c")
        got = take(raw, lambda m: isinstance(m, dcp.DcpMutation))
        assert [m.by_seqno for m in only(got, dcp.DcpMutation)] == [3]


# ---------------------------------------------------------------------------------------------- documents


def test_deletions_in_both_versions_and_expirations(node: NodeThread, vb: int):
    write(node, vb, b"gone")
    write(node, vb, b"old", expiry=int(time.time()) - 1)
    node.call(lambda: node.vbucket(vb).documents.delete(b"gone"))

    def tombstones(raw: Raw) -> list[Message]:
        return only(whole(node, raw, vb), dcp.DcpDeletion, dcp.DeletionV2, dcp.Expiration)

    with ready(node.port) as raw:
        assert raw.ask(kv.Get(b"old", vbucket=vb)).specific == Status.KEY_ENOENT
    with producer(node) as raw:
        assert [type(m) for m in tombstones(raw)] == [dcp.DcpDeletion, dcp.DcpDeletion]
    with producer(node, flags=OpenFlag.INCLUDE_DELETE_TIMES) as raw:
        assert [type(m) for m in tombstones(raw)] == [dcp.DeletionV2, dcp.DeletionV2]
    with producer(node, flags=OpenFlag.INCLUDE_DELETE_TIMES, enable_expiry_opcode="true") as raw:
        gone, expired = tombstones(raw)
        assert isinstance(gone, dcp.DeletionV2)
        assert isinstance(expired, dcp.Expiration)
        assert expired.delete_time > 0
    with producer(node, enable_expiry_opcode="true") as raw:
        kinds = [type(m) for m in tombstones(raw)]
        assert kinds == [dcp.DcpDeletion, dcp.DcpDeletion], "without delete times the control has no effect"


VALUES = {
    "plain": (0, b'{"a":1}', Datatype.JSON),
    "snappy": (2, bytes(cramjam.snappy.compress_raw(b"x" * 100)), Datatype.SNAPPY),
    "xattr": (4, XATTRS, Datatype.XATTR | Datatype.JSON),
}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        pytest.param(0, {"plain": (1, b'{"a":1}'), "snappy": (0, b"x" * 100), "xattr": (1, b'{"a":1}')}, id="plain"),
        pytest.param(
            OpenFlag.INCLUDE_XATTRS,
            {"plain": (1, b'{"a":1}'), "snappy": (0, b"x" * 100), "xattr": (5, XATTRS)},
            id="xattrs",
        ),
        pytest.param(OpenFlag.NO_VALUE, {"plain": (0, b""), "snappy": (0, b""), "xattr": (0, b"")}, id="no value"),
        pytest.param(
            OpenFlag.NO_VALUE | OpenFlag.INCLUDE_XATTRS,
            {"plain": (0, b""), "snappy": (0, b""), "xattr": (4, join_xattrs({"_sys": b"1", "user": b"2"}))},
            id="no value, xattrs",
        ),
        pytest.param(
            OpenFlag.NO_VALUE_WITH_UNDERLYING_DATATYPE,
            {
                "plain": (1, b""),
                "snappy": (0, b""),
                "xattr": (5, b""),
            },  # without Snappy the reader does not see it
            id="no value, underlying datatype",
        ),
    ],
)
def test_values_are_cut_as_open_asks(node: NodeThread, vb: int, flags: int, expected: dict[str, tuple[int, bytes]]):
    for name, (_, value, datatype) in VALUES.items():
        write(node, vb, name.encode(), value=value, datatype=datatype)
    with producer(node, *[f for f in ALL if f != 0x0A], flags=flags) as raw:
        got = {m.key[1:].decode(): (m.datatype, m.value) for m in only(whole(node, raw, vb), dcp.DcpMutation)}
        assert {**got, "xattr": _by_meaning(*got["xattr"])} == {**expected, "xattr": _by_meaning(*expected["xattr"])}


def _by_meaning(datatype: int, value: bytes) -> tuple[int, object]:
    return datatype, split_xattrs(value) if datatype & Datatype.XATTR and value else value


def test_snappy_stays_where_it_was_agreed_on_and_can_be_forced(node: NodeThread, vb: int):
    write(node, vb, b"raw", value=b"y" * 200)
    write(node, vb, b"snappy", value=VALUES["snappy"][1], datatype=Datatype.SNAPPY)
    with producer(node) as raw:
        plain, compressed = only(whole(node, raw, vb), dcp.DcpMutation)
        assert (plain.datatype, compressed.datatype) == (0, Datatype.SNAPPY)
    with producer(node, force_value_compression="true") as raw:
        forced, compressed = only(whole(node, raw, vb), dcp.DcpMutation)
        assert (forced.datatype, compressed.datatype) == (Datatype.SNAPPY, Datatype.SNAPPY)
        assert inflate(forced.value) == b"y" * 200  # type: ignore[attr-defined]


def test_a_tombstone_keeps_system_xattrs_and_user_ones_only_on_request(node: NodeThread, vb: int):
    vbucket = node.vbucket(vb)
    node.call(
        lambda: vbucket.with_meta.delete(
            b"t", 0, rev_seqno=5, meta_cas=77, flags=0, delete_time=1, value=join_xattrs({"_sys": b"1", "user": b"2"}),
            datatype=Datatype.XATTR,
        )
    )  # fmt: skip
    wanted = {
        0: {},
        OpenFlag.INCLUDE_XATTRS: {"_sys": b"1"},
        OpenFlag.INCLUDE_XATTRS | OpenFlag.INCLUDE_DELETED_USER_XATTRS: {"_sys": b"1", "user": b"2"},
    }
    for flags, xattrs in wanted.items():
        with producer(node, flags=flags) as raw:
            [deletion] = only(whole(node, raw, vb), dcp.DcpDeletion)
            assert (split_xattrs(deletion.value)[0] if deletion.value else {}) == xattrs  # type: ignore[attr-defined]


def test_skipping_deletes_leaves_tombstones_out_of_the_first_backfill_only(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")
    node.call(lambda: node.vbucket(vb).documents.delete(b"b"))
    to_disk(node)
    with producer(node, flags=OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL) as raw:
        got = stream(raw, vb, lambda m: isinstance(m, dcp.SeqnoAdvanced))
        assert [type(m) for m in got] == [dcp.SnapshotMarker, dcp.DcpMutation, dcp.SeqnoAdvanced]
        node.call(lambda: node.vbucket(vb).documents.delete(b"a"))
        assert isinstance(take(raw, lambda m: not isinstance(m, dcp.SnapshotMarker))[-1], dcp.DcpDeletion)


def _durable_history(node: NodeThread, vb: int, on_disk: int) -> None:
    """Commit one durable write and abort another: 4 seqnos, the first ``on_disk`` of them only on disk."""
    vbucket = node.vbucket(vb)
    steps = [
        lambda: vbucket.durable.prepare(b"k", b"v", 0, level=1),
        lambda: vbucket.durable.commit(b"k", 0, 1),
        lambda: vbucket.durable.prepare(b"x", b"v", 0, level=2),
        lambda: vbucket.durable.abort(b"x", 0, 3),
    ]
    for step in steps[:on_disk]:
        node.call(step)
    to_disk(node)
    assert node.call(node.node.buckets.get("default").store.stop_persistence)
    for step in steps[on_disk:]:
        node.call(step)


@pytest.fixture(params=range(5), ids=lambda count: f"{count} of 4 on disk")
def durable(request: pytest.FixtureRequest, node: NodeThread, vb: int) -> Iterator[int]:
    """How much of the vbucket's history is on disk; the rest stays in memory while the test runs."""
    _durable_history(node, vb, request.param)
    yield request.param
    node.call(node.node.buckets.get("default").store.start_persistence)


def _from_a_disk_of(count: int) -> list[type[Message]]:
    """On disk, a commit is its document, and an aborted prepare is gone."""
    kinds = [dcp.Prepare, dcp.DcpMutation if count >= 2 else dcp.Commit, dcp.Prepare, dcp.Abort]
    return kinds[:2] + kinds[3:] if count == 4 else kinds


def test_prepares_are_sent_to_readers_that_asked_for_them(node: NodeThread, vb: int, durable: int):
    with producer(node, enable_sync_writes="true", consumer_name="me") as raw:
        kinds = [type(m) for m in whole(node, raw, vb) if not isinstance(m, dcp.SnapshotMarkerV20)]
        assert kinds == [*_from_a_disk_of(durable), dcp.StreamEnd]


def test_readers_that_did_not_ask_for_prepares_are_told_how_far_the_stream_is(node: NodeThread, vb: int, durable: int):
    with producer(node) as raw:
        *got, _ = whole(node, raw, vb)
        assert {type(m) for m in got} == {dcp.SnapshotMarker, dcp.DcpMutation, dcp.SeqnoAdvanced}
        assert [(m.by_seqno, m.key) for m in only(got, dcp.DcpMutation)] == [(2, b"\0k")]  # type: ignore[attr-defined]
        told = [m.by_seqno for m in only(got, dcp.DcpMutation, dcp.SeqnoAdvanced)]  # type: ignore[attr-defined]
        assert told == sorted(set(told))
        assert told[-1] == 4
        last_of_each = [m for m, after in itertools.pairwise([*got, got[0]]) if isinstance(after, dcp.SnapshotMarker)]
        ends = [m.end_seqno for m in only(got, dcp.SnapshotMarker)]  # type: ignore[attr-defined]
        assert [m.by_seqno for m in last_of_each] == ends  # type: ignore[attr-defined]


def test_readers_that_cannot_be_told_get_no_snapshot_that_nothing_reaches(node: NodeThread, vb: int, durable: int):
    with producer(node, *BASIC) as raw:
        marker, mutation, end = whole(node, raw, vb)
        assert isinstance(marker, dcp.SnapshotMarker)
        assert isinstance(mutation, dcp.DcpMutation)
        assert (marker.end_seqno, mutation.by_seqno, type(end)) == (2, 2, dcp.StreamEnd)


def test_durable_writes_arrive_live_as_plain_documents_and_an_abort_as_progress(node: NodeThread, vb: int):
    vbucket = node.vbucket(vb)
    with producer(node) as raw, producer(node, *BASIC) as legacy:
        for each in (raw, legacy):
            each.send(dcp.StreamRequest(vbucket=vb))
            assert each.response().specific == OK
        write(node, vb, b"first")
        for level in range(1, 4):
            prepared = node.call(lambda level=level: vbucket.durable.prepare(b"k", b"%d" % level, 0, level=level))
            node.call(lambda prepared=prepared: vbucket.durable.commit(b"k", 0, prepared.seqno))
        gone = node.call(lambda: vbucket.durable.prepare(b"x", b"v", 0, level=1))
        node.call(lambda: vbucket.durable.abort(b"x", 0, gone.seqno))
        write(node, vb, b"last")
        high = vbucket.high_seqno
        for each, prefix in ((raw, b"\0"), (legacy, b"")):
            got = take(each, lambda m: getattr(m, "by_seqno", 0) == high)
            seen = {m.key: m.value for m in only(got, dcp.DcpMutation)}  # type: ignore[attr-defined]
            assert seen == {prefix + b"first": b"v", prefix + b"k": b"3", prefix + b"last": b"v"}
            seqnos = [m.by_seqno for m in only(got, dcp.DcpMutation, dcp.SeqnoAdvanced)]  # type: ignore[attr-defined]
            assert seqnos == sorted(set(seqnos))


# ---------------------------------------------------------------------------------------------- collections


@pytest.fixture(scope="module")
def shop(node: NodeThread) -> NodeThread:
    with ready(node.port, *ALL) as raw:
        assert raw.ask(cluster.SetManifest(manifest(2, (9, "cart"), (10, "user")))).specific == OK
    return node


def test_a_collection_filter_passes_its_documents_and_events_and_says_how_far_it_is(shop: NodeThread, vb: int):
    write(shop, vb, b"c1", cid=9)
    write(shop, vb, b"d1")
    to_disk(shop)  # otherwise there may be two snapshots, and one from memory without visible changes is not sent
    high = shop.vbucket(vb).high_seqno
    with producer(shop) as raw:
        until = dcp.SeqnoAdvanced(high, vbucket=vb)
        got = stream(raw, vb, lambda m: m == until, value=b'{"collections":["9"]}')
        [begin] = only(got, events.SystemEvent)
        assert begin.content().collection_id == 9  # type: ignore[attr-defined]
        assert [m.key for m in only(got, dcp.DcpMutation)] == [b"\x09c1"]  # type: ignore[attr-defined]


def test_a_filtered_stream_is_silent_about_memory_snapshots_of_other_collections(shop: NodeThread, vb: int):
    with producer(shop) as raw:
        stream(raw, vb, lambda m: isinstance(m, dcp.SeqnoAdvanced), value=b'{"collections":["9"]}')
        write(shop, vb, b"d1")
        write(shop, vb, b"c1", cid=9)
        marker, mutation = take(raw, lambda m: isinstance(m, dcp.DcpMutation))
        assert marker.start_seqno <= mutation.by_seqno <= marker.end_seqno  # type: ignore[attr-defined]


def test_a_legacy_stream_sees_the_default_collection_without_prefix_or_events(shop: NodeThread, vb: int):
    write(shop, vb, b"d1")
    write(shop, vb, b"c1", cid=9)
    with producer(shop, *BASIC) as raw:
        marker, mutation = stream(raw, vb, lambda m: isinstance(m, dcp.DcpMutation))
        assert (mutation.key, marker.end_seqno) == (b"d1", mutation.by_seqno)  # type: ignore[attr-defined]


def test_a_pass_through_stream_sees_every_collection_and_event(shop: NodeThread, vb: int):
    write(shop, vb, b"c1", cid=9)
    write(shop, vb, b"d1")
    with producer(shop) as raw:
        got = whole(shop, raw, vb)
        names = [m.key for m in only(got, events.SystemEvent)]  # type: ignore[attr-defined]
        assert names == [b"shop", b"cart", b"user"]
        assert [m.key for m in only(got, dcp.DcpMutation)] == [b"\x09c1", b"\0d1"]  # type: ignore[attr-defined]


def test_flatbuffers_events_say_the_same(shop: NodeThread, vb: int):
    with producer(shop) as plain, producer(shop, flatbuffers_system_events="true") as flat:
        old = only(whole(shop, plain, vb), events.SystemEvent)
        new = only(whole(shop, flat, vb), events.SystemEvent)
        assert {m.version for m in new} == {2}  # type: ignore[attr-defined]
        assert [m.content() for m in new] == [m.content() for m in old]  # type: ignore[attr-defined]


def test_a_scope_grows_with_its_collections_and_a_dropped_one_empties_the_list(make_node):  # type: ignore[no-untyped-def]
    node = make_node(vbuckets=2)
    with ready(node.port, *ALL) as admin, producer(node) as scope, producer(node) as listed:
        admin.ask(cluster.SetManifest(manifest(2, (9, "cart"))))
        stream(scope, 0, lambda m: isinstance(m, events.SystemEvent) and m.key == b"cart", value=b'{"scope":"8"}')
        stream(listed, 0, lambda m: isinstance(m, events.SystemEvent), value=b'{"collections":["9"]}')
        admin.ask(cluster.SetManifest(manifest(3, (9, "cart"), (11, "more"))))
        node.call(lambda: node.vbucket(0).documents.set(b"k", b"v", 11))
        got = take(scope, lambda m: isinstance(m, dcp.DcpMutation))
        assert got[-1].key == b"\x0bk"  # type: ignore[attr-defined]
        admin.ask(cluster.SetManifest(manifest(4, (11, "more"))))
        end = take(listed, is_end)[-1]
        assert end.status == StreamEndStatus.FILTER_EMPTY  # type: ignore[attr-defined]
        admin.ask(cluster.SetManifest(b'{"uid":"5","scopes":[{"name":"_default","uid":"0","collections":[]}]}'))
        assert take(scope, is_end)[-1].status == StreamEndStatus.FILTER_EMPTY  # type: ignore[attr-defined]


def test_out_of_order_snapshots_of_a_small_collection(shop: NodeThread, vb: int):
    shop.call(lambda: shop.vbucket(vb).bulk.set_many([b"d%04d" % n for n in range(2000)], [b"v"] * 2000))
    write(shop, vb, b"c1", b"c2", cid=9)
    write(shop, vb, b"last")
    to_disk(shop)
    with producer(shop, enable_out_of_order_snapshots="true_with_seqno_advanced") as raw:
        got = stream(
            raw, vb, lambda m: isinstance(m, dcp.OsoSnapshot) and m.flags == OsoFlag.END, value=b'{"collections":["9"]}'
        )
        assert (type(got[0]), got[0].flags) == (dcp.OsoSnapshot, OsoFlag.START)  # type: ignore[attr-defined]
        assert {m.key for m in only(got, dcp.DcpMutation)} == {b"\x09c1", b"\x09c2"}  # type: ignore[attr-defined]
        assert got[-2] == dcp.SeqnoAdvanced(shop.vbucket(vb).high_seqno, vbucket=vb)
        assert not only(got, dcp.SnapshotMarker)
