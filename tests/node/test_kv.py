"""The key-value commands of docs/protocol/kv.md#commands over a real socket: results, quiet forms, order, errors."""

from __future__ import annotations

import contextlib
import itertools
import json
import struct
import threading
import time
from dataclasses import replace

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.support.node_thread import NodeThread, eventually
from upriver.errors import Status
from upriver.model import VbucketState
from upriver.node.options import Limits
from upriver.wire import Frame, Magic, Opcode
from upriver.wire.constants import Feature, MetaOption
from upriver.wire.messages import cluster, kv, session
from upriver.wire.values import join_xattrs

OK, MISSING, EXISTS, EINVAL = Status.SUCCESS, Status.KEY_ENOENT, Status.KEY_EEXISTS, Status.EINVAL
_keys = itertools.count()


@pytest.fixture
def raw(node: NodeThread):  # type: ignore[no-untyped-def]
    with ready(node.port) as made:
        yield made


@pytest.fixture
def key() -> bytes:
    return b"key-%d" % next(_keys)


def set_(key: bytes, value: bytes = b"v", **fields: int) -> kv.Set:
    return kv.Set(key=key, value=value, **fields)


def quiet(opcode: int, message: kv.Set | kv.Add | kv.Delete | kv.Counter | kv.Append | kv.Get | kv.Touch) -> bytes:
    made = message.frame()
    made.opcode = opcode
    return made.encode()


def test_what_is_set_can_be_got_with_flags_and_cas(raw: Raw, key: bytes):
    stored = raw.ask(set_(key, b"hello", flags=0xDEADBEEF))
    got = raw.ask(kv.Get(key))
    assert (got.specific, got.extras, got.value, got.cas) == (OK, b"\xde\xad\xbe\xef", b"hello", stored.cas)
    assert raw.ask(quiet(Opcode.GETK, kv.Get(key))).key == key


def test_the_server_decides_what_is_json(raw: Raw, key: bytes):
    raw.ask(set_(key, b'{"a":1}'))
    assert raw.ask(kv.Get(key)).datatype == 1
    raw.ask(frame(Opcode.SET, extras=bytes(8), key=key, value=b"not json", datatype=1))
    assert raw.ask(kv.Get(key)).datatype == 0


def test_cas_guards_set_replace_delete_and_append(raw: Raw, key: bytes):
    cas = raw.ask(set_(key)).cas
    assert raw.ask(set_(key, cas=cas + 1)).specific == EXISTS
    assert raw.ask(quiet(Opcode.REPLACE, set_(key, cas=cas + 1))).specific == EXISTS
    assert raw.ask(kv.Append(key, b"x", cas=cas + 1)).specific == EXISTS
    assert raw.ask(kv.Delete(key, cas=cas + 1)).specific == EXISTS
    assert raw.ask(set_(key, cas=cas)).specific == OK
    assert raw.ask(set_(b"absent", cas=5)).specific == MISSING


def test_add_replace_and_delete_say_whether_the_key_was_there(raw: Raw, key: bytes):
    assert raw.ask(quiet(Opcode.REPLACE, set_(key))).specific == MISSING
    assert raw.ask(kv.Delete(key)).specific == MISSING
    assert raw.ask(kv.Add(key=key, value=b"1")).specific == OK
    assert raw.ask(kv.Add(key=key, value=b"1")).specific == EXISTS
    deleted = raw.ask(kv.Delete(key))
    assert (deleted.specific, deleted.cas > 0) == (OK, True)
    assert raw.ask(kv.Get(key)).specific == MISSING


def test_mutation_tokens_are_sent_only_to_clients_that_asked_for_them(node: NodeThread, key: bytes):
    with ready(node.port, Feature.MUTATION_SEQNO) as with_tokens, ready(node.port, Feature.XERROR) as without:
        token = with_tokens.ask(set_(key)).extras
        uuid, seqno = struct.unpack(">QQ", token)
        assert (uuid, seqno) == (node.vbucket(0).failover_log.uuid, node.vbucket(0).high_seqno)
        assert without.ask(set_(key)).extras == b""


def test_counters_create_wrap_and_floor(raw: Raw, key: bytes):
    def count(opcode: int, **fields: int) -> Frame:
        return raw.ask(quiet(opcode, kv.Counter(key=key, **fields)))

    assert count(Opcode.INCREMENT, expiry=0xFFFFFFFF).specific == MISSING
    assert count(Opcode.INCREMENT, initial=10).value == (10).to_bytes(8, "big")
    assert count(Opcode.INCREMENT, delta=5).value == (15).to_bytes(8, "big")
    assert count(Opcode.DECREMENT, delta=100).value == bytes(8)
    assert count(Opcode.INCREMENT, delta=2**64 - 1).value == b"\xff" * 8
    assert count(Opcode.INCREMENT, delta=2).value == (1).to_bytes(8, "big")
    assert raw.ask(kv.Get(key)).value == b"1"
    raw.ask(set_(key, b"no number"))
    assert count(Opcode.INCREMENT).specific == Status.DELTA_BADVAL


def test_append_and_prepend(raw: Raw, key: bytes):
    assert raw.ask(kv.Append(key, b"x")).specific == Status.NOT_STORED
    raw.ask(set_(key, b"b"))
    raw.ask(kv.Append(key, b"c"))
    raw.ask(quiet(Opcode.PREPEND, kv.Append(key, b"a")))
    assert raw.ask(kv.Get(key)).value == b"abc"


def test_touch_and_get_and_touch_set_the_expiry(raw: Raw, key: bytes):
    raw.ask(set_(key))
    assert raw.ask(kv.Touch(3000, key)).specific == OK
    meta = raw.ask(kv.GetMeta(key=key))
    deleted, _, expiry, _ = struct.unpack(">IIIQ", meta.extras)
    assert (deleted, abs(expiry - time.time() - 3000) < 300) == (0, True)
    assert raw.ask(quiet(Opcode.GAT, kv.Touch(0, key))).value == b"v"
    assert struct.unpack(">IIIQ", raw.ask(kv.GetMeta(key=key)).extras)[2] == 0
    assert raw.ask(kv.Touch(0, b"absent")).specific == MISSING


def test_a_locked_document_is_only_written_by_its_holder_until_it_is_unlocked(raw: Raw, key: bytes):
    raw.ask(set_(key))
    locked = raw.ask(kv.GetLocked(10, key))
    assert raw.ask(set_(key)).specific == Status.LOCKED
    assert raw.ask(kv.GetLocked(key=key)).specific in (Status.LOCKED, Status.ETMPFAIL)
    assert raw.ask(kv.Get(key)).cas == 0xFFFF_FFFF_FFFF_FFFF
    assert raw.ask(kv.Unlock(key, cas=locked.cas + 1)).specific in (Status.LOCKED, Status.ETMPFAIL, EXISTS)
    assert raw.ask(kv.Unlock(key, cas=locked.cas)).specific == OK
    assert raw.ask(set_(key)).specific == OK
    assert raw.ask(kv.Unlock(key, cas=5)).specific == Status.NOT_LOCKED


def test_quiet_commands_are_answered_only_where_the_rule_says_so(raw: Raw, key: bytes):
    """A NOOP at the end shows that nothing more comes: answers are in order."""
    raw.send(
        quiet(Opcode.SETQ, set_(key, b"1")),
        quiet(Opcode.GETQ, kv.Get(b"absent")),
        quiet(Opcode.GETKQ, kv.Get(b"absent")),
        quiet(Opcode.INCREMENTQ, kv.Counter(key=key)),
        quiet(Opcode.APPENDQ, kv.Append(key, b"0")),
        quiet(Opcode.PREPENDQ, kv.Append(key, b"1")),
        quiet(Opcode.GATQ, kv.Touch(0, b"absent")),
        quiet(Opcode.ADDQ, kv.Add(key=key, value=b"x", opaque=1)),
        quiet(Opcode.GETKQ, kv.Get(key, opaque=2)),
        quiet(Opcode.DELETEQ, kv.Delete(key)),
        quiet(Opcode.REPLACEQ, set_(key, opaque=3)),
        session.Noop(opaque=4),
    )
    answers = [raw.receive() for _ in range(4)]
    assert [(a.opaque, a.specific) for a in answers] == [(1, EXISTS), (2, OK), (3, MISSING), (4, OK)]
    assert (answers[1].key, answers[1].value) == (key, b"120")


def test_ten_thousand_pipelined_requests_are_answered_in_order(raw: Raw):
    count = 10_000
    frames = [set_(b"p%d" % (n % 100), b"%d" % n, opaque=n).frame().encode() for n in range(count)]
    writer = threading.Thread(target=raw.send, args=frames)
    writer.start()
    assert [raw.receive().opaque for _ in range(count)] == list(range(count))
    writer.join()


def test_a_waiting_request_holds_back_later_answers(node: NodeThread, key: bytes):
    with ready(node.port) as raw:
        raw.ask(set_(key))
        seqno = node.vbucket(0).high_seqno
        raw.send(cluster.SeqnoPersistence(seqno, opaque=1), session.Noop(opaque=2), kv.Get(key, opaque=3))
        assert [raw.receive().opaque for _ in range(3)] == [1, 2, 3]
        assert node.vbucket(0).persisted_seqno >= seqno


def test_waiting_for_a_seqno_that_is_never_persisted_times_out(make_node, key: bytes):  # type: ignore[no-untyped-def]
    other = make_node(limits=Limits(persistence_wait_s=0.2))
    with ready(other.port) as raw:
        assert raw.ask(cluster.SeqnoPersistence(10**9)).specific == Status.ETMPFAIL


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        pytest.param(frame(Opcode.GET, key=b"k", cas=1), EINVAL, id="GET with CAS"),
        pytest.param(frame(Opcode.GET, key=b"k", extras=b"x"), EINVAL, id="GET with extras"),
        pytest.param(frame(Opcode.GET, key=b"k", value=b"v"), EINVAL, id="GET with a value"),
        pytest.param(frame(Opcode.GET), EINVAL, id="GET without a key"),
        pytest.param(frame(Opcode.GET, key=b"x" * 251), EINVAL, id="key too long"),
        pytest.param(frame(Opcode.SET, key=b"k", value=b"v"), EINVAL, id="SET without extras"),
        pytest.param(frame(Opcode.SET, extras=bytes(8), value=b"v"), EINVAL, id="SET without a key"),
        pytest.param(frame(Opcode.SET, extras=bytes(8), key=b"k", datatype=8), EINVAL, id="datatype unknown"),
        pytest.param(frame(Opcode.SET, extras=bytes(8), key=b"k", datatype=2), EINVAL, id="datatype not agreed on"),
        pytest.param(
            frame(Opcode.SET, extras=bytes(8), key=b"k", value=b"xx", datatype=4), Status.XATTR_EINVAL, id="bad xattrs"
        ),
        pytest.param(frame(Opcode.ADD, extras=bytes(8), key=b"k", cas=1), EINVAL, id="ADD with CAS"),
        pytest.param(frame(Opcode.UNLOCK_KEY, key=b"k"), EINVAL, id="UNLOCK without CAS"),
        pytest.param(frame(Opcode.GET, key=b"k", vbucket=999), Status.NOT_MY_VBUCKET, id="vbucket that is not here"),
        pytest.param(frame(Opcode.SET, extras=bytes(8), key=b"k", vbucket=999), Status.NOT_MY_VBUCKET, id="SET there"),
        pytest.param(frame(0xF7), Status.UNKNOWN_COMMAND, id="unknown opcode"),
        pytest.param(frame(0x40), Status.NOT_SUPPORTED, id="TAP"),
        pytest.param(frame(Opcode.DCP_FLUSH), Status.NOT_SUPPORTED, id="DCP flush"),
        pytest.param(frame(Opcode.FLUSH), Status.NOT_SUPPORTED, id="flush, not enabled"),
        pytest.param(frame(0x01, magic=Magic.SERVER_REQUEST), Status.NOT_SUPPORTED, id="a server's request"),
        pytest.param(frame(0x77, magic=Magic.SERVER_REQUEST), Status.UNKNOWN_COMMAND, id="an unknown server request"),
        pytest.param(frame(Opcode.GET, key=b"k", framing=b"\x90"), Status.UNKNOWN_FRAME_INFO, id="framing extra 9"),
        pytest.param(
            frame(Opcode.SET, extras=bytes(8), key=b"k", framing=b"\x11\x07"), Status.DURABILITY_INVALID_LEVEL, id="7"
        ),
        pytest.param(frame(Opcode.GET, key=b"k", framing=b"\x11\1"), EINVAL, id="a durable GET"),
        pytest.param(frame(Opcode.DELETE, key=b"k", framing=b"\x50"), Status.NOT_SUPPORTED, id="DELETE keeps expiry"),
        pytest.param(frame(Opcode.GET, key=b"k", framing=b"\x41x"), Status.EACCESS, id="acting for somebody else"),
        pytest.param(frame(Opcode.GET_META, key=b"k", extras=b"\3"), EINVAL, id="GET_META version 3"),
        pytest.param(frame(Opcode.HELLO, value=b"\0"), EINVAL, id="HELLO with half a feature"),
        pytest.param(frame(Opcode.HELLO, value=b"\0\x0d"), EINVAL, id="HELLO feature without what it needs"),
        pytest.param(frame(Opcode.SELECT_BUCKET, key=b"nope"), Status.EACCESS, id="no such bucket"),
        pytest.param(frame(Opcode.GET_ALL_VB_SEQNOS, extras=b"\0\0\0\5"), EINVAL, id="no such state"),
        pytest.param(frame(Opcode.SET_VBUCKET, extras=b"\0\1"), EINVAL, id="SET_VBUCKET with two bytes"),
        pytest.param(frame(Opcode.SET_VBUCKET, extras=b"\5"), EINVAL, id="SET_VBUCKET to nothing"),
        pytest.param(frame(Opcode.SET_VBUCKET, extras=b"\1", vbucket=4000), Status.ERANGE, id="SET_VBUCKET too high"),
        pytest.param(
            frame(Opcode.SET_VBUCKET, extras=b"\2", value=b'{"topology":[["a"]]}', datatype=1), EINVAL, id="topology"
        ),
        pytest.param(frame(Opcode.DEL_VBUCKET, value=b"async=1"), EINVAL, id="DEL_VBUCKET value"),
        pytest.param(frame(Opcode.DEL_VBUCKET, vbucket=999), Status.NOT_MY_VBUCKET, id="DEL_VBUCKET of nothing"),
        pytest.param(frame(Opcode.OBSERVE_SEQNO, value=b"1234"), EINVAL, id="OBSERVE_SEQNO of four bytes"),
        pytest.param(frame(Opcode.OBSERVE_SEQNO, value=bytes(8)), MISSING, id="OBSERVE_SEQNO of an unknown branch"),
    ],
)
def test_a_request_that_breaks_a_rule_is_answered_with_its_status(raw: Raw, request_bytes: bytes, status: int):
    assert raw.ask(request_bytes).specific == status
    assert raw.ask(session.Noop()).specific == OK


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x55" + bytes(23), id="no magic"),
        pytest.param(frame(Opcode.GET, key=b"key")[:8] + bytes(16) + b"key", id="body shorter than the key"),
        pytest.param(frame(Opcode.SET)[:8] + b"\x01\xe0\0\0" + bytes(12), id="larger than 30 MiB"),
        pytest.param(b"get key\r\n" + bytes(30), id="the text protocol"),
    ],
)
def test_a_broken_frame_ends_the_connection_without_an_answer(raw: Raw, data: bytes):
    raw.send(data)
    assert raw.is_closed()


def test_without_extended_errors_statuses_are_plain(node: NodeThread, key: bytes):
    with ready(node.port, Feature.JSON) as raw, ready(node.port) as other:
        raw.ask(set_(key))
        other.ask(kv.GetLocked(10, key))
        assert raw.ask(set_(key)).specific == EXISTS
        assert raw.ask(kv.Unlock(b"absent", cas=5)).specific == MISSING


def test_collections_and_their_ids(make_node):  # type: ignore[no-untyped-def]
    node = make_node()
    manifest = b"""{"uid":"5","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]},
        {"name":"shop","uid":"8","collections":[{"name":"cart","uid":"9"}]}]}"""
    with ready(node.port, *ALL) as raw, ready(node.port, *BASIC) as legacy:
        assert raw.ask(cluster.SetManifest(b"{")).specific == EINVAL
        assert raw.ask(cluster.SetManifest(manifest)).specific == OK
        assert raw.ask(cluster.SetManifest(manifest.replace(b'"5"', b'"4"'))).specific == 0x8A
        assert json.loads(raw.ask(cluster.GetManifest()).value)["uid"] == "5"
        found = raw.ask(frame(Opcode.COLLECTIONS_GET_ID, value=b"shop.cart"))
        assert struct.unpack(">QI", found.extras) == (5, 9)
        assert raw.ask(frame(Opcode.COLLECTIONS_GET_ID, key=b"shop.cart")).extras == found.extras
        assert raw.ask(frame(Opcode.COLLECTIONS_GET_ID, value=b"shop.nope")).specific == Status.UNKNOWN_COLLECTION
        assert raw.ask(frame(Opcode.COLLECTIONS_GET_ID, value=b"nope.cart")).specific == Status.UNKNOWN_SCOPE
        assert raw.ask(frame(Opcode.COLLECTIONS_GET_ID, value=b"nope")).specific == EINVAL
        assert struct.unpack(">QI", raw.ask(frame(Opcode.COLLECTIONS_GET_SCOPE_ID, value=b"shop")).extras) == (5, 8)
        assert raw.ask(set_(b"\x09k", b"in cart")).specific == OK
        assert raw.ask(kv.Get(b"\x09k")).value == b"in cart"
        assert raw.ask(kv.Get(b"\0k")).specific == MISSING
        unknown = raw.ask(set_(b"\x33k"))
        assert (unknown.specific, json.loads(unknown.value)["manifest_uid"]) == (Status.UNKNOWN_COLLECTION, "5")
        assert raw.ask(set_(b"\x03k")).specific == EINVAL, "ids 1 to 7 are reserved"
        assert legacy.ask(kv.Get(b"k")).specific == MISSING
        assert raw.ask(cluster.GetAllVbSeqnos(0, 9)).value[2:10] == (3).to_bytes(8, "big")
        assert legacy.ask(cluster.GetAllVbSeqnos(0, 9)).specific == EINVAL


def test_observing_a_key_and_a_branch(node: NodeThread, raw: Raw, key: bytes):
    raw.ask(set_(key))
    seqno = node.vbucket(0).high_seqno
    raw.ask(cluster.SeqnoPersistence(seqno))
    observed = raw.ask(cluster.Observe((cluster.ObservedKey(0, key), cluster.ObservedKey(0, b"absent"))))
    states = cluster.ObserveResponse.from_frame(observed).states
    assert [each.state for each in states] == [1, 0x80]
    uuid = node.vbucket(0).failover_log.uuid
    answer = raw.ask(cluster.ObserveSeqno(uuid))
    assert struct.unpack(">BHQQQ", answer.value)[2:] == (uuid, node.vbucket(0).persisted_seqno, seqno)


def test_an_older_branch_is_observed_with_its_end(make_node):  # type: ignore[no-untyped-def]
    node = make_node()
    with ready(node.port) as raw:
        raw.ask(set_(b"k"))
        old = node.vbucket(0).failover_log.uuid
        for state in (VbucketState.REPLICA, VbucketState.ACTIVE):
            assert raw.ask(cluster.SetVbucket(state)).specific == OK
        fields = struct.unpack(">BHQQQQQ", raw.ask(cluster.ObserveSeqno(old)).value)
        assert (fields[0], fields[5], fields[6]) == (1, old, 1)


def test_a_write_with_metadata_wins_or_loses_the_conflict(raw: Raw, key: bytes):
    def with_meta(opcode: int, rev: int, **fields: int) -> int:
        message = kv.WithMeta(rev_seqno=rev, new_cas=1000 + rev, key=key, value=b"x", **fields)
        return raw.ask(quiet(opcode, message)).specific  # type: ignore[arg-type]

    assert with_meta(Opcode.SET_WITH_META, 5) == OK
    assert with_meta(Opcode.SET_WITH_META, 5) == EXISTS
    assert with_meta(Opcode.SET_WITH_META, 4) == EXISTS
    assert with_meta(Opcode.ADD_WITH_META, 9) == EXISTS
    regenerate = struct.pack(">IIQQI", 0, 0, 6, 1006, MetaOption.REGENERATE_CAS)
    assert raw.ask(frame(Opcode.SET_WITH_META, extras=regenerate, key=key)).specific == EINVAL
    deleted = kv.WithMeta(rev_seqno=7, new_cas=5000, key=key)
    assert raw.ask(quiet(Opcode.DEL_WITH_META, deleted)).specific == OK  # type: ignore[arg-type]
    meta = raw.ask(kv.GetMeta(2, key))
    assert (struct.unpack(">IIIQB", meta.extras)[0], struct.unpack(">IIIQB", meta.extras)[3]) == (1, 7)


def test_a_plain_set_keeps_the_extended_attributes(raw: Raw, key: bytes):
    xattrs = {"_sync": b"1", "mine": b"2"}
    raw.ask(frame(Opcode.SET, extras=bytes(8), key=key, value=join_xattrs(xattrs, b'{"a":1}'), datatype=5))
    assert raw.ask(kv.Get(key)).value == b'{"a":1}', "a plain GET never shows them"
    raw.ask(set_(key, b'{"a":2}'))
    assert raw.ask(kv.Get(key)).value == b'{"a":2}'
    assert struct.unpack(">IIIQB", raw.ask(kv.GetMeta(2, key)).extras)[4] & 4


def test_an_operation_on_a_pending_vbucket_waits_until_it_is_active(node: NodeThread, key: bytes):
    with ready(node.port) as raw, ready(node.port) as admin:
        admin.ask(cluster.SetVbucket(VbucketState.PENDING, vbucket=3))
        raw.send(set_(key, vbucket=3), session.Noop(opaque=9))
        assert raw.is_silent()
        admin.ask(cluster.SetVbucket(VbucketState.ACTIVE, vbucket=3))
        assert [raw.receive().specific for _ in range(2)] == [OK, OK]


def test_vbuckets_are_deleted_and_created_again(node: NodeThread, raw: Raw, key: bytes):
    raw.ask(set_(key, vbucket=4))
    assert raw.ask(cluster.DeleteVbucket(b"async=0", vbucket=4)).specific == OK
    assert raw.ask(cluster.GetVbucket(vbucket=4)).specific == Status.NOT_MY_VBUCKET
    assert raw.ask(cluster.SetVbucket(VbucketState.ACTIVE, vbucket=4)).specific == OK
    assert raw.ask(kv.Get(key, vbucket=4)).specific == MISSING


def test_compaction_and_random_keys(raw: Raw, key: bytes):
    raw.ask(set_(key))
    assert raw.ask(cluster.CompactDb()).specific == OK
    assert raw.ask(kv.GetRandomKey()).specific == OK


def test_a_durable_write_is_acknowledged_when_it_is_on_disk(node: NodeThread, key: bytes):
    with ready(node.port, *ALL) as raw:
        durable = b"\x11\x03"  # one byte: persist to majority
        answer = raw.ask(frame(Opcode.SET, extras=bytes(8), key=b"\0" + key, value=b"v", framing=durable))
        assert answer.specific == OK
        assert raw.ask(kv.Get(b"\0" + key)).value == b"v"


def test_the_error_map_and_config_come_before_and_after_a_bucket(node: NodeThread):
    with Raw(node.port) as raw:
        raw.hello(*ALL)
        assert raw.ask(session.GetErrorMap(2)).specific == OK
        raw.bucket()
        config = json.loads(raw.ask(cluster.GetClusterConfig()).value)
        assert len(config["vBucketServerMap"]["vBucketMap"]) == 8
        assert config["nodesExt"][0]["services"]["kv"] == node.port
        assert raw.ask(cluster.GetClusterConfig(config["revEpoch"], config["rev"])).value == b""


@pytest.mark.parametrize("brief", [False, True])
def test_a_new_map_is_pushed_to_clients_that_asked_for_it(node: NodeThread, brief: bool):
    kind = Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF if brief else Feature.CLUSTERMAP_CHANGE_NOTIFICATION
    with ready(node.port, *BASIC, Feature.DUPLEX, kind) as raw, ready(node.port) as other:
        bucket = node.node.buckets.get("default")
        new = replace(node.node.cluster_map(bucket), revision=node.node.cluster_map(bucket).revision + 1)
        node.call(lambda: node.node.set_cluster_map(bucket, new))
        pushed = raw.receive()
        assert (pushed.magic, pushed.opcode, pushed.key) == (Magic.SERVER_REQUEST, 1, b"default")
        assert struct.unpack(">qq", pushed.extras) == (new.epoch, new.revision)
        assert bool(pushed.value) is not brief
        raw.send(frame(1, magic=Magic.SERVER_RESPONSE, opaque=pushed.opaque))
        assert raw.ask(session.Noop()).specific == OK
        assert other.ask(session.Noop()).specific == OK, "and nothing came before"


class TestLimits:
    """One client cannot take much from the others."""

    def test_large_frames_before_login_and_silent_connections_are_disconnected(self, make_node):  # type: ignore[no-untyped-def]
        node = make_node(username="u", password="p")
        with Raw(node.port) as raw:
            raw.hello(*BASIC)
            assert raw.ask(kv.Get(b"k")).specific == Status.EACCESS
            raw.send(frame(Opcode.SET, extras=bytes(8), key=b"k", value=bytes(17_000)))
            assert raw.is_closed()
        impatient = make_node(username="u", password="p", limits=Limits(handshake_s=0.5))
        with Raw(impatient.port) as raw:
            assert raw.is_closed(), "silent"

    def test_an_idle_connection_is_disconnected(self, make_node):  # type: ignore[no-untyped-def]
        node = make_node(limits=Limits(idle_s=0.3))
        with Raw(node.port) as raw:
            with contextlib.suppress(ConnectionError):  # on a busy machine even this much can take too long
                raw.hello(*BASIC)
                raw.bucket()
            assert raw.is_closed()

    def test_more_connections_than_allowed_are_refused_and_the_others_served(self, make_node):  # type: ignore[no-untyped-def]
        node = make_node(limits=Limits(max_connections=3))
        taken = [ready(node.port) for _ in range(3)]
        with Raw(node.port) as extra:
            extra.send(session.Noop())
            assert extra.is_closed()
        assert all(each.ask(session.Noop()).specific == OK for each in taken)
        taken.pop().socket.close()
        eventually(lambda: node.call(lambda: len(node.node.connections)) == 2)
        with ready(node.port) as again:
            assert again.ask(session.Noop()).specific == OK
        for each in taken:
            each.socket.close()

    def test_a_client_that_does_not_read_its_answers_is_not_read_from(self, make_node):  # type: ignore[no-untyped-def]
        node = make_node()
        with ready(node.port) as raw, ready(node.port) as other:
            raw.ask(set_(b"big", bytes(1_000_000)))
            raw.socket.settimeout(1.0)
            request = kv.Get(b"big").frame().encode() * 10_000
            with pytest.raises(TimeoutError):
                raw.socket.sendall(request * 100)
            assert other.ask(kv.Get(b"big")).specific == OK
            [stuck] = eventually(lambda: node.call(lambda: [c for c in node.node.connections if not c.can_write]))
            waiting = node.call(lambda: stuck.transport.get_write_buffer_size())
            assert waiting < 8_000_000
