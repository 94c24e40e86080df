"""What comes on a stream: snapshots, filters, versions of every message, ends; over real sockets."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import cramjam
import pytest
from node_thread import NodeThread
from raw import ALL, BASIC, Raw, frame, ready

from upriver.errors import Status
from upriver.model import Datatype, VbucketState
from upriver.node.options import Limits
from upriver.wire import Magic, Message, cluster, dcp, decode, events, kv
from upriver.wire.constants import MarkerFlag, OpenFlag, OsoFlag, StreamEndStatus, StreamFlag
from upriver.wire.message import Context
from upriver.wire.values import inflate, join_xattrs, split_xattrs

OK = Status.SUCCESS
_names = itertools.count()
XATTRS = join_xattrs({"_sys": b"1", "user": b"2"}, b'{"a":1}')


def manifest(uid: int, *collections: tuple[int, str]) -> bytes:
    shop = ",".join(f'{{"name":"{name}","uid":"{cid:x}"}}' for cid, name in collections)
    return (
        f'{{"uid":"{uid:x}","scopes":[{{"name":"_default","uid":"0","collections":[{{"name":"_default","uid":"0"}}]}},'
        f'{{"name":"shop","uid":"8","collections":[{shop}]}}]}}'
    ).encode()


def producer(node: NodeThread, *features: int, flags: int = 1, **controls: str) -> Raw:
    raw = ready(node.port, *(features or ALL))
    assert raw.ask(dcp.Open(0, flags | OpenFlag.PRODUCER, b"streams-%d" % next(_names))).specific == OK
    for key, value in {"enable_noop": "true", **controls}.items():
        assert raw.ask(dcp.Control(key.encode(), value.encode())).specific == OK
    raw.context = Context(collections=raw.context.collections)
    return raw


def take(raw: Raw, until: Callable[[Message], bool]) -> list[Message]:
    """Messages up to and with the first that ``until`` accepts."""
    found: list[Message] = []
    while True:
        got = raw.receive()
        if got.magic.is_response:
            assert got.specific == OK, got
            continue
        found.append(decode(got, raw.context))
        if until(found[-1]):
            return found


def is_end(message: Message) -> bool:
    return isinstance(message, dcp.StreamEnd)


def stream(raw: Raw, vbucket: int, until: Callable[[Message], bool] = is_end, **fields: int | bytes) -> list[Message]:
    raw.send(dcp.StreamRequest(vbucket=vbucket, **fields))  # type: ignore[arg-type]
    return take(raw, until)


def whole(node: NodeThread, raw: Raw, vbucket: int, **fields: int | bytes) -> list[Message]:
    """Everything up to now, with the end of the stream."""
    return stream(raw, vbucket, flags=StreamFlag.TO_LATEST, **fields)


def only(messages: list[Message], *kinds: type[Message]) -> list[Message]:
    return [m for m in messages if isinstance(m, kinds)]


@pytest.fixture(scope="module")
def node(make_node) -> NodeThread:  # type: ignore[no-untyped-def]
    return make_node(vbuckets=64)


_vbuckets = itertools.count()


@pytest.fixture
def vb(node: NodeThread) -> int:
    """A vbucket that no other test has touched."""
    return next(_vbuckets)


def write(node: NodeThread, vbucket: int, *keys: bytes, cid: int = 0, value: bytes = b"v", **how: int) -> None:
    for key in keys:
        node.call(lambda key=key: node.vbucket(vbucket).set(key, value, cid, **how))


def to_disk(node: NodeThread) -> None:
    """Everything on disk and nothing in memory, so that the next stream backfills."""
    store = node.node.buckets.get("default").store
    node.call(store.flush)
    node.call(store.trim_memory)


# ---------------------------------------------------------------------------------------------- snapshots


def test_a_new_stream_starts_with_a_marker_from_0_and_ends_where_it_was_told(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b", b"c")
    with producer(node) as raw:
        marker, *documents, end = stream(raw, vb, end_seqno=3)
        assert isinstance(marker, dcp.SnapshotMarker)
        assert (marker.start_seqno, marker.end_seqno, marker.flags) == (0, 3, MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT)
        assert [m.by_seqno for m in only(documents, dcp.Mutation)] == [1, 2, 3]
        assert end == dcp.StreamEnd(StreamEndStatus.OK, vbucket=vb)


def test_a_backfill_comes_from_disk_and_memory_goes_on_behind_it(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b", b"a")
    to_disk(node)
    with producer(node) as raw:
        got = stream(raw, vb, lambda m: isinstance(m, dcp.Mutation) and m.by_seqno == 3)
        marker = got[0]
        assert isinstance(marker, dcp.SnapshotMarker)
        assert (marker.start_seqno, marker.end_seqno, marker.flags) == (0, 3, MarkerFlag.DISK | MarkerFlag.CHECKPOINT)
        assert [(m.by_seqno, m.key) for m in only(got, dcp.Mutation)] == [(2, b"\0b"), (3, b"\0a")]
        write(node, vb, b"c")
        live = take(raw, lambda m: isinstance(m, dcp.Mutation))
        assert isinstance(live[0], dcp.SnapshotMarker)
        assert live[0].flags == MarkerFlag.MEMORY | MarkerFlag.CHECKPOINT


def test_writes_arrive_while_the_stream_is_open(node: NodeThread, vb: int):
    with producer(node) as raw, ready(node.port) as writer:
        raw.send(dcp.StreamRequest(vbucket=vb))
        raw.receive()
        for number in range(20):
            writer.ask(kv.Set(key=b"live%d" % number, value=b"v", vbucket=vb))
            got = take(raw, lambda m: isinstance(m, dcp.Mutation))
            assert got[-1].key == b"\0live%d" % number  # type: ignore[attr-defined]


def test_a_resumed_stream_sends_what_is_missing_and_repeats_the_snapshot_start(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b", b"c", b"d")
    uuid = node.vbucket(vb).failover_log.uuid
    with producer(node) as raw:
        got = stream(raw, vb, end_seqno=4, start_seqno=2, vbuuid=uuid, snap_start_seqno=1, snap_end_seqno=4)
        assert isinstance(got[0], dcp.SnapshotMarker)
        assert got[0].start_seqno == 1
        assert [m.by_seqno for m in only(got, dcp.Mutation)] == [3, 4]


def test_markers_of_version_2_2_only_for_disk_snapshots(node: NodeThread, vb: int):
    write(node, vb, b"a")
    to_disk(node)
    with producer(node, max_marker_version="2.2") as raw:
        got = stream(raw, vb, lambda m: isinstance(m, dcp.Mutation))
        assert isinstance(got[0], dcp.SnapshotMarkerV22)
        write(node, vb, b"b")
        assert isinstance(take(raw, lambda m: isinstance(m, dcp.Mutation))[0], dcp.SnapshotMarker)


def test_disk_only_ends_at_what_is_persisted(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")
    to_disk(node)
    with producer(node) as raw:
        got = stream(raw, vb, flags=StreamFlag.DISK_ONLY)
        assert [m.by_seqno for m in only(got, dcp.Mutation)] == [1, 2]


def test_from_latest_sends_only_what_comes_later(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")
    with producer(node) as raw:
        raw.send(dcp.StreamRequest(vbucket=vb, flags=StreamFlag.FROM_LATEST))
        assert raw.receive().specific == OK
        write(node, vb, b"c")
        got = take(raw, lambda m: isinstance(m, dcp.Mutation))
        assert [m.by_seqno for m in only(got, dcp.Mutation)] == [3]


# ---------------------------------------------------------------------------------------------- documents


def test_deletions_in_both_versions_and_expirations(node: NodeThread, vb: int):
    write(node, vb, b"gone")
    write(node, vb, b"old", expiry=int(time.time()) - 1)
    node.call(lambda: node.vbucket(vb).delete(b"gone"))

    def tombstones(raw: Raw) -> list[Message]:
        return only(whole(node, raw, vb), dcp.Deletion, dcp.DeletionV2, dcp.Expiration)

    with ready(node.port) as raw:
        assert raw.ask(kv.Get(b"old", vbucket=vb)).specific == Status.KEY_ENOENT
    with producer(node) as raw:
        assert [type(m) for m in tombstones(raw)] == [dcp.Deletion, dcp.Deletion]
    with producer(node, flags=OpenFlag.INCLUDE_DELETE_TIMES) as raw:
        assert [type(m) for m in tombstones(raw)] == [dcp.DeletionV2, dcp.DeletionV2]
    with producer(node, flags=OpenFlag.INCLUDE_DELETE_TIMES, enable_expiry_opcode="true") as raw:
        gone, expired = tombstones(raw)
        assert isinstance(gone, dcp.DeletionV2)
        assert isinstance(expired, dcp.Expiration)
        assert expired.delete_time > 0
    with producer(node, enable_expiry_opcode="true") as raw:
        kinds = [type(m) for m in tombstones(raw)]
        assert kinds == [dcp.Deletion, dcp.Deletion], "without delete times the control has no effect"


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
            {"plain": (1, b""), "snappy": (2, b""), "xattr": (5, b"")},
            id="no value, underlying datatype",
        ),
    ],
)
def test_values_are_cut_as_open_demands(node: NodeThread, vb: int, flags: int, expected: dict[str, tuple[int, bytes]]):
    for name, (_, value, datatype) in VALUES.items():
        write(node, vb, name.encode(), value=value, datatype=datatype)
    with producer(node, *[f for f in ALL if f != 0x0A], flags=flags) as raw:
        got = {m.key[1:].decode(): (m.datatype, m.value) for m in only(whole(node, raw, vb), dcp.Mutation)}
        assert {**got, "xattr": _by_meaning(*got["xattr"])} == {**expected, "xattr": _by_meaning(*expected["xattr"])}


def _by_meaning(datatype: int, value: bytes) -> tuple[int, object]:
    return datatype, split_xattrs(value) if datatype & Datatype.XATTR and value else value


def test_snappy_stays_where_it_was_agreed_on_and_can_be_forced(node: NodeThread, vb: int):
    write(node, vb, b"raw", value=b"y" * 200)
    write(node, vb, b"snappy", value=VALUES["snappy"][1], datatype=Datatype.SNAPPY)
    with producer(node) as raw:
        plain, compressed = only(whole(node, raw, vb), dcp.Mutation)
        assert (plain.datatype, compressed.datatype) == (0, Datatype.SNAPPY)
    with producer(node, force_value_compression="true") as raw:
        forced, compressed = only(whole(node, raw, vb), dcp.Mutation)
        assert (forced.datatype, compressed.datatype) == (Datatype.SNAPPY, Datatype.SNAPPY)
        assert inflate(forced.value) == b"y" * 200  # type: ignore[attr-defined]


def test_a_tombstone_keeps_system_xattrs_and_user_ones_only_on_request(node: NodeThread, vb: int):
    vbucket = node.vbucket(vb)
    node.call(
        lambda: vbucket.delete_with_meta(
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
            [deletion] = only(whole(node, raw, vb), dcp.Deletion)
            assert (split_xattrs(deletion.value)[0] if deletion.value else {}) == xattrs  # type: ignore[attr-defined]


def test_skipping_deletes_leaves_tombstones_out_of_the_first_backfill_only(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")
    node.call(lambda: node.vbucket(vb).delete(b"b"))
    to_disk(node)
    with producer(node, flags=OpenFlag.SKIP_DELETES_IN_INITIAL_BACKFILL) as raw:
        got = stream(raw, vb, lambda m: isinstance(m, dcp.SeqnoAdvanced))
        assert [type(m) for m in got] == [dcp.SnapshotMarker, dcp.Mutation, dcp.SeqnoAdvanced]
        node.call(lambda: node.vbucket(vb).delete(b"a"))
        assert isinstance(take(raw, lambda m: not isinstance(m, dcp.SnapshotMarker))[-1], dcp.Deletion)


def test_prepares_are_for_those_who_asked_and_others_learn_how_far_the_stream_is(node: NodeThread, vb: int):
    vbucket = node.vbucket(vb)
    prepared = node.call(lambda: vbucket.prepare(b"k", b"v", 0, level=1))
    node.call(lambda: vbucket.commit(b"k", 0, prepared.seqno))
    aborted = node.call(lambda: vbucket.prepare(b"x", b"v", 0, level=2))
    node.call(lambda: vbucket.abort(b"x", 0, aborted.seqno))
    with producer(node, enable_sync_writes="true", consumer_name="me") as raw:
        kinds = [type(m) for m in whole(node, raw, vb) if not isinstance(m, dcp.SnapshotMarkerV20)]
        assert kinds == [dcp.Prepare, dcp.Commit, dcp.Prepare, dcp.Abort, dcp.StreamEnd]
    with producer(node) as raw:
        got = [m for m in whole(node, raw, vb) if not isinstance(m, dcp.SnapshotMarker)]
        assert [type(m) for m in got[:1]] == [dcp.Mutation]
        advanced = only(got, dcp.SeqnoAdvanced)[-1]
        assert advanced.by_seqno == 4  # type: ignore[attr-defined]
    with producer(node, *BASIC) as raw:
        marker, mutation, _ = whole(node, raw, vb)
        assert (marker.end_seqno, mutation.by_seqno) == (2, 2)  # type: ignore[attr-defined]


# ---------------------------------------------------------------------------------------------- collections


@pytest.fixture(scope="module")
def shop(node: NodeThread) -> NodeThread:
    with ready(node.port, *ALL) as raw:
        assert raw.ask(cluster.SetManifest(manifest(2, (9, "cart"), (10, "user")))).specific == OK
    return node


def test_a_collection_filter_passes_its_documents_and_events_and_says_how_far_it_is(shop: NodeThread, vb: int):
    write(shop, vb, b"c1", cid=9)
    write(shop, vb, b"d1")
    high = shop.vbucket(vb).high_seqno
    with producer(shop) as raw:
        until = dcp.SeqnoAdvanced(high, vbucket=vb)
        got = stream(raw, vb, lambda m: m == until, value=b'{"collections":["9"]}')
        [begin] = only(got, events.SystemEvent)
        assert begin.content().collection_id == 9  # type: ignore[attr-defined]
        assert [m.key for m in only(got, dcp.Mutation)] == [b"\x09c1"]  # type: ignore[attr-defined]


def test_the_filtered_stream_is_silent_about_memory_batches_of_others(shop: NodeThread, vb: int):
    with producer(shop) as raw:
        stream(raw, vb, lambda m: isinstance(m, dcp.SeqnoAdvanced), value=b'{"collections":["9"]}')
        write(shop, vb, b"d1")
        write(shop, vb, b"c1", cid=9)
        marker, mutation = take(raw, lambda m: isinstance(m, dcp.Mutation))
        assert marker.start_seqno <= mutation.by_seqno <= marker.end_seqno  # type: ignore[attr-defined]


def test_a_legacy_stream_sees_the_default_collection_without_prefix_or_events(shop: NodeThread, vb: int):
    write(shop, vb, b"d1")
    write(shop, vb, b"c1", cid=9)
    with producer(shop, *BASIC) as raw:
        marker, mutation = stream(raw, vb, lambda m: isinstance(m, dcp.Mutation))
        assert (mutation.key, marker.end_seqno) == (b"d1", mutation.by_seqno)  # type: ignore[attr-defined]


def test_a_pass_through_stream_sees_every_collection_and_event(shop: NodeThread, vb: int):
    write(shop, vb, b"c1", cid=9)
    write(shop, vb, b"d1")
    with producer(shop) as raw:
        got = whole(shop, raw, vb)
        names = [m.key for m in only(got, events.SystemEvent)]  # type: ignore[attr-defined]
        assert names == [b"shop", b"cart", b"user"]
        assert [m.key for m in only(got, dcp.Mutation)] == [b"\x09c1", b"\0d1"]  # type: ignore[attr-defined]


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
        node.call(lambda: node.vbucket(0).set(b"k", b"v", 11))
        got = take(scope, lambda m: isinstance(m, dcp.Mutation))
        assert got[-1].key == b"\x0bk"  # type: ignore[attr-defined]
        admin.ask(cluster.SetManifest(manifest(4, (11, "more"))))
        end = take(listed, is_end)[-1]
        assert end.status == StreamEndStatus.FILTER_EMPTY  # type: ignore[attr-defined]
        admin.ask(cluster.SetManifest(b'{"uid":"5","scopes":[{"name":"_default","uid":"0","collections":[]}]}'))
        assert take(scope, is_end)[-1].status == StreamEndStatus.FILTER_EMPTY  # type: ignore[attr-defined]


def test_out_of_order_snapshots_of_a_small_collection(shop: NodeThread, vb: int):
    shop.call(lambda: shop.vbucket(vb).set_many([b"d%04d" % n for n in range(2000)], [b"v"] * 2000))
    write(shop, vb, b"c1", b"c2", cid=9)
    write(shop, vb, b"last")
    to_disk(shop)
    with producer(shop, enable_out_of_order_snapshots="true_with_seqno_advanced") as raw:
        got = stream(
            raw, vb, lambda m: isinstance(m, dcp.OsoSnapshot) and m.flags == OsoFlag.END, value=b'{"collections":["9"]}'
        )
        assert (type(got[0]), got[0].flags) == (dcp.OsoSnapshot, OsoFlag.START)  # type: ignore[attr-defined]
        assert {m.key for m in only(got, dcp.Mutation)} == {b"\x09c1", b"\x09c2"}  # type: ignore[attr-defined]
        assert got[-2] == dcp.SeqnoAdvanced(shop.vbucket(vb).high_seqno, vbucket=vb)
        assert not only(got, dcp.SnapshotMarker)


# ---------------------------------------------------------------------------------------------- ends


def test_a_change_of_state_ends_every_stream_of_the_vbucket(node: NodeThread, vb: int):
    with ready(node.port) as admin, producer(node) as one, producer(node) as two:
        for raw in (one, two):
            raw.send(dcp.StreamRequest(vbucket=vb))
            assert raw.receive().specific == OK
        assert admin.ask(cluster.SetVbucket(VbucketState.REPLICA, vbucket=vb)).specific == OK
        for raw in (one, two):
            assert take(raw, is_end)[-1].status == StreamEndStatus.STATE_CHANGED  # type: ignore[attr-defined]


def test_closing_is_silent_unless_the_end_was_asked_for(node: NodeThread, vb: int):
    with producer(node) as raw:
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == Status.KEY_ENOENT
        raw.ask(dcp.StreamRequest(vbucket=vb))
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == OK
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == Status.KEY_ENOENT
    with producer(node, send_stream_end_on_client_close_stream="true") as raw:
        raw.ask(dcp.StreamRequest(vbucket=vb))
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == OK
        assert take(raw, is_end)[-1].status == StreamEndStatus.CLOSED  # type: ignore[attr-defined]


def test_streams_with_ids_are_closed_by_their_id(node: NodeThread, vb: int):
    with producer(node, enable_stream_id="true") as raw:
        for sid in (1, 2):
            assert raw.ask(dcp.StreamRequest(vbucket=vb, value=b'{"sid":%d}' % sid)).specific == OK
        assert raw.ask(dcp.CloseStream(vbucket=vb)).specific == Status.DCP_STREAM_ID_INVALID
        assert raw.ask(frame(0x52, vbucket=vb, framing=b"\x22\0\3")).specific == Status.DCP_STREAM_ID_INVALID
        assert raw.ask(frame(0x52, vbucket=vb, framing=b"\x22\0\1")).specific == OK
        write(node, vb, b"k")
        got = take(raw, lambda m: isinstance(m, dcp.Mutation))
        assert {m.stream_id for m in got} == {2}


def test_a_vbucket_is_handed_over_without_losing_a_write(node: NodeThread, vb: int):
    write(node, vb, b"a", b"b")

    def confirm(raw: Raw, message: Message) -> None:
        raw.send(frame(message.opcode, magic=Magic.RESPONSE, opaque=message.opaque))

    with producer(node) as raw, ready(node.port) as client:
        raw.send(dcp.StreamRequest(vbucket=vb, opaque=5, flags=StreamFlag.TAKEOVER))
        seen = []
        for message in iter(lambda: take(raw, lambda m: True)[0], None):
            seen.append(message)
            if isinstance(message, dcp.SnapshotMarker) and message.flags & MarkerFlag.ACK:
                confirm(raw, message)
            elif isinstance(message, dcp.SetVbucketState):
                if message.state == VbucketState.PENDING:
                    assert client.ask(kv.Set(key=b"late", value=b"v", vbucket=vb)).specific == OK
                confirm(raw, message)
            elif isinstance(message, dcp.StreamEnd):
                break
        assert [m.state for m in only(seen, dcp.SetVbucketState)] == [VbucketState.PENDING, VbucketState.ACTIVE]  # type: ignore[attr-defined]
        assert [m.key for m in only(seen, dcp.Mutation)] == [b"\0a", b"\0b", b"\0late"]  # type: ignore[attr-defined]
        assert seen[-1].status == StreamEndStatus.OK  # type: ignore[attr-defined]
        assert client.ask(cluster.GetVbucket(vbucket=vb)).value == VbucketState.DEAD.to_bytes(4, "big")
        assert client.ask(kv.Set(key=b"x", value=b"v", vbucket=vb)).specific == Status.NOT_MY_VBUCKET


def test_writers_wait_for_a_takeover_that_does_not_catch_up(make_node):  # type: ignore[no-untyped-def]
    node = make_node(vbuckets=2, limits=Limits(takeover_s=0.2))
    write(node, 0, b"a")
    with producer(node) as raw, ready(node.port) as client:
        raw.send(dcp.StreamRequest(vbucket=0, opaque=5, flags=StreamFlag.TAKEOVER))
        take(raw, lambda m: isinstance(m, dcp.Mutation))
        deadline = time.monotonic() + 10
        while client.ask(kv.Set(key=b"k", value=b"v")).specific == OK:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert client.ask(kv.Set(key=b"k", value=b"v")).specific == Status.ETMPFAIL
        assert client.ask(kv.Get(b"k")).specific == OK
        assert client.ask(kv.Set(key=b"k", value=b"v", vbucket=1)).specific == OK
        raw.ask(dcp.CloseStream(vbucket=0))
        assert client.ask(kv.Set(key=b"k", value=b"v")).specific == OK


def test_many_vbuckets_come_complete_and_each_in_order(node: NodeThread):
    """Large backfills over several vbuckets on one connection, read back against the store."""
    numbers = range(40, 56)
    for number in numbers:
        keys = [b"%d-%d" % (number, n) for n in range(3000)]
        node.call(lambda number=number, keys=keys: node.vbucket(number).set_many(keys, [key * 30 for key in keys]))
    to_disk(node)
    with producer(node, connection_buffer_size="100000") as raw:
        for number in numbers:
            raw.send(dcp.StreamRequest(vbucket=number, end_seqno=node.vbucket(number).high_seqno))
        seqnos: dict[int, list[int]] = {number: [] for number in numbers}
        open_streams, unacked = len(numbers), 0
        while open_streams:
            got = raw.receive()
            if got.magic.is_response:
                continue
            unacked += got.size
            if unacked > 50_000:
                raw.send(dcp.BufferAck(unacked))
                unacked = 0
            if got.opcode == 0x57:
                assert got.value == got.key[1:] * 30, "the buffer was written over while it was being sent"
                seqnos[got.specific].append(int.from_bytes(got.extras[:8], "big"))
            open_streams -= got.opcode == 0x55
        for number in numbers:
            assert seqnos[number] == sorted(set(seqnos[number]))
            assert len(seqnos[number]) == 3000
