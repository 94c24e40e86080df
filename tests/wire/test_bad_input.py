"""Every way to break a rule raises a typed error that names the field and the offset."""

import pickle
from dataclasses import replace

import cramjam
import pytest

from upriver import errors
from upriver.errors import FramingError, InvalidMessage, LocalProtocolError, RemoteProtocolError, Status
from upriver.model import Datatype
from upriver.wire import Context, Dialect, Frame, FrameInfo, FrameSplitter, Magic, Opcode, decode
from upriver.wire.bulk.decode import BulkDecoder
from upriver.wire.constants import RequestFrameId
from upriver.wire.framing import MAX_UNAUTHENTICATED_FRAME, encode_duration
from upriver.wire.keys import encode_leb128, join_key, split_key
from upriver.wire.messages import cluster, dcp, kv, upr
from upriver.wire.values import MAX_INFLATED, deflate, inflate, join_xattrs, split_xattrs

HELLO = dcp.DcpMutation(4, 1, key=b"hello", value=b"world", vbucket=7)
MUTATION = HELLO.encode()


def splitting(raw: bytes, **options: int) -> FramingError:
    with pytest.raises(FramingError) as caught:
        list(FrameSplitter(**options).receive(raw))
    return caught.value


def decoding(raw: bytes, context: Context | None = None) -> InvalidMessage:
    [frame] = FrameSplitter().receive(raw)
    with pytest.raises(InvalidMessage) as caught:
        decode(frame, context or Context())
    return caught.value


def patched(raw: bytes, at: int, new: str) -> bytes:
    new_bytes = bytes.fromhex(new)
    return raw[:at] + new_bytes + raw[at + len(new_bytes) :]


def test_a_first_byte_that_is_not_a_magic():
    error = splitting(patched(MUTATION, 0, "7f"))

    assert (error.field, error.offset) == ("magic", 0)


def test_a_length_that_does_not_fit_the_body():
    error = splitting(patched(MUTATION, 8, "00000005"))

    assert (error.field, error.offset) == ("body length", 8)
    assert "exceed the body of 5" in str(error)


def test_a_body_over_the_limit_is_refused_before_it_arrives():
    error = splitting(patched(MUTATION, 8, "7fffffff")[:24])

    assert (error.field, error.offset) == ("body length", 8)


def test_a_peer_that_is_not_authenticated_has_a_smaller_limit():
    large = kv.Set(key=b"k", value=bytes(MAX_UNAUTHENTICATED_FRAME)).encode()

    assert "the limit is 16384" in str(splitting(large, limit=MAX_UNAUTHENTICATED_FRAME))


def test_a_broken_stream_yields_nothing_more():
    splitter = FrameSplitter()
    with pytest.raises(FramingError):
        list(splitter.receive(b"\xff" * 24))

    with pytest.raises(FramingError):
        list(splitter.receive(MUTATION))


def test_frames_before_the_broken_one_are_delivered():
    frames = FrameSplitter().receive(MUTATION + b"\xff" * 24)

    assert next(frames).key == b"hello"
    with pytest.raises(FramingError):
        next(frames)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        pytest.param("8800", "shortest", id="not canonical"),
        pytest.param("ffffffffff0f6b", "no stop byte", id="too long"),
        pytest.param("ffffffff1f6b", "32 bits", id="above 32 bits"),
        pytest.param("016b", "reserved", id="reserved id 1"),
        pytest.param("076b", "reserved", id="reserved id 7"),
        pytest.param("08", "nothing follows", id="prefix without a key"),
    ],
)
def test_a_collection_prefix_that_breaks_a_rule(key, reason):
    raw = dcp.DcpMutation(4, 1, key=bytes.fromhex(key)).encode()

    error = decoding(raw, Context(collections=True))

    assert error.field == "key"
    assert 24 + 31 <= error.offset < len(raw) + 1
    assert reason in error.reason
    assert error.status == Status.EINVAL


@pytest.mark.parametrize("number", [0, 1, 0x7F, 0x80, 0x22B, 0x555, 0x7FFF, 0xFFFF, 0xCAFEF00, 0xCAFEF00D, 0xFFFFFFFF])
def test_leb128_decoding_undoes_encoding(number):
    wanted = {0: "00", 0x80: "8001", 0x22B: "ab04", 0xCAFEF00D: "8de0fbd70c", 0xFFFFFFFF: "ffffffff0f"}

    assert wanted.get(number, encode_leb128(number).hex()) == encode_leb128(number).hex()
    if number not in range(1, 8):
        assert split_key(join_key(number, b"k")) == (number, b"k")


@pytest.mark.parametrize(("collection", "size"), [(0, 251), (8, 247)])
def test_a_key_over_the_limit_of_its_collection(collection, size):
    with pytest.raises(InvalidMessage, match="the limit is"):
        split_key(join_key(collection, b"k" * size))


def test_a_key_over_the_limit_without_collections():
    raw = kv.Get(b"k" * 251).encode()

    assert (decoding(raw).field, decoding(raw).offset) == ("key length", 2)


def test_a_snappy_bomb_is_refused_before_memory_is_allocated():
    bomb = bytes(cramjam.snappy.compress_raw(bytes(MAX_INFLATED + 1)))
    raw = dcp.DcpMutation(4, 1, key=b"k", value=bomb, datatype=Datatype.SNAPPY).encode()

    error = decoding(raw, Context(check_values=True))

    assert (error.field, error.offset) == ("value", 24 + 31 + 1)
    assert f"inflates to {MAX_INFLATED + 1}" in error.reason


@pytest.mark.parametrize("block", [b"", b"\xff" * 6, b"\x05\x00", deflate(b"hello" * 30)[:-1]])
def test_a_snappy_block_that_is_damaged(block):
    with pytest.raises(InvalidMessage, match="snappy"):
        inflate(block)


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        pytest.param("000000ff" + "00000005" + "5f61003100", "only 9 bytes follow", id="total too large"),
        pytest.param("0000000a" + "00000005" + "5f61003100", "only 9 bytes follow", id="total too large by one"),
        pytest.param("00000003" + "00000005" + "5f61003100", "cut short", id="total too small"),
        pytest.param("0000", "cut short", id="no total"),
        pytest.param("00000009" + "000000ff" + "5f61003100", "overruns", id="pair too long"),
        pytest.param("00000009" + "00000005" + "5f61313131", "zero byte", id="no zero bytes"),
        pytest.param("00000009" + "00000005" + "0031313100", "empty", id="empty name"),
        pytest.param("00000009" + "00000005" + "ff61003100", "UTF-8", id="name is not text"),
        pytest.param("00000012" + "000000055f61003100" * 2, "twice", id="same name twice"),
    ],
)
def test_an_xattr_blob_that_breaks_a_rule(blob, reason):
    value = bytes.fromhex(blob)
    raw = dcp.DcpMutation(4, 1, key=b"k", value=value, datatype=Datatype.XATTR).encode()

    error = decoding(raw, Context(check_values=True))

    assert error.field == "value"
    assert 56 <= error.offset < 56 + len(value)
    assert reason in error.reason
    assert error.status == Status.XATTR_EINVAL


def test_xattrs_under_snappy_survive_a_round_trip():
    value = deflate(join_xattrs({"_sync": b'{"a":1}', "u": b"2"}, b"{}"))

    assert split_xattrs(inflate(value)) == ({"_sync": b'{"a":1}', "u": b"2"}, b"{}")


@pytest.mark.parametrize("name", ["", "x" * 16, "a\0b"])
def test_an_xattr_name_that_does_not_fit_is_a_local_error(name):
    with pytest.raises(LocalProtocolError):
        join_xattrs({name: b"1"})


def framed(framing: str, opcode: int = Opcode.DCP_MUTATION) -> bytes:
    extras = HELLO.frame().extras if opcode == Opcode.DCP_MUTATION else b""
    return Frame(Magic.ALT_REQUEST, opcode, framing=bytes.fromhex(framing), extras=extras, key=b"k").encode()


@pytest.mark.parametrize(
    ("framing", "reason", "status"),
    [
        pytest.param("2300", "overruns", Status.EINVAL, id="overruns the section"),
        pytest.param("2200", "overruns", Status.EINVAL, id="overruns the section by one byte"),
        pytest.param("f2", "escape", Status.EINVAL, id="ends before the id's escape"),
        pytest.param("2f", "escape", Status.EINVAL, id="ends before the length's escape"),
        pytest.param("30", "unknown", Status.UNKNOWN_FRAME_INFO, id="id 3 was retired"),
        pytest.param("f000", "unknown", Status.UNKNOWN_FRAME_INFO, id="escaped id"),
        pytest.param("2100", "not 2", Status.EINVAL, id="stream-id of one byte"),
        pytest.param("0100", "not 0", Status.EINVAL, id="barrier with data"),
        pytest.param("1104", "level", Status.DURABILITY_INVALID_LEVEL, id="durability level 4"),
        pytest.param("13010000", "reserved", Status.EINVAL, id="durability timeout 0"),
        pytest.param("1101", "no durability", Status.EINVAL, id="durability on a mutation"),
        pytest.param("50", "preserve", Status.NOT_SUPPORTED, id="preserve TTL on a mutation"),
    ],
)
def test_a_framing_extra_that_breaks_a_rule(framing, reason, status):
    error = decoding(framed(framing))

    assert error.field == "framing extras"
    assert 24 <= error.offset <= 24 + len(framing) // 2
    assert reason in error.reason
    assert error.status == status


@pytest.mark.parametrize(
    "message",
    [
        dcp.Prepare(4, 1, key=b"k", cas=1, frame_infos=(FrameInfo(2, b"\0\1"),)),
        dcp.Commit(4, 5, b"k", frame_infos=(FrameInfo(2, b"\0\1"),)),
        dcp.Abort(4, 5, b"k", frame_infos=(FrameInfo(2, b"\0\1"),)),
        dcp.SetVbucketState(1, frame_infos=(FrameInfo(2, b"\0\1"),)),
    ],
)
def test_messages_of_sync_replication_never_carry_a_stream_id(message):
    with pytest.raises(LocalProtocolError, match="stream-id"):
        message.encode()


NOT_ALLOWED = [
    pytest.param(dcp.DcpMutation(1, 1, key=b"k"), 24, "0000000000000000", "by_seqno", 24, id="seqno 0"),
    pytest.param(dcp.DcpMutation(1, 1, key=b"k"), 52, "0001", "nmeta", 52, id="mutation with metadata"),
    pytest.param(dcp.DcpDeletion(1, 1, key=b"k"), 5, "01", "datatype", 5, id="JSON deletion"),
    pytest.param(dcp.DcpMutation(1, 1, key=b"k"), 5, "08", "datatype", 5, id="unknown datatype bit"),
    pytest.param(dcp.StreamRequest(), 5, "01", "datatype", 5, id="stream request with datatype JSON"),
    pytest.param(dcp.StreamRequest(), 24, "00000008", "flags", 24, id="stream flag 8"),
    pytest.param(dcp.StreamRequest(), 24, "00000102", "flags", 24, id="cache transfer with disk only"),
    pytest.param(dcp.AddStream(), 24, "80000000", "flags", 24, id="unknown add-stream flag"),
    pytest.param(dcp.Open(0, 1, b"n"), 28, "00000002", "flags", 28, id="notifier connections are gone"),
    pytest.param(dcp.Open(0, 1, b"n"), 28, "00000200", "flags", 28, id="skip deletes without producer"),
    pytest.param(dcp.Open(0, 1, b"n"), 28, "00000049", "flags", 28, id="two ways of no value"),
    pytest.param(dcp.Open(0, 1, b"n"), 28, "00000101", "flags", 28, id="deleted xattrs without xattrs"),
    pytest.param(dcp.SnapshotMarker(0, 5, 1), 24, "0000000000000006", "start_seqno", 24, id="marker backwards"),
    pytest.param(dcp.SnapshotMarkerV20(0, 0, 5, 1, 5, 5), 24, "01", "version", 24, id="marker version 2.1"),
    pytest.param(dcp.SetVbucketState(1), 24, "05", "state", 24, id="vbucket state 5"),
    pytest.param(dcp.Prepare(1, 1, key=b"k", cas=1), 54, "04", "durability_level", 54, id="prepare level 4"),
    pytest.param(dcp.Prepare(1, 1, key=b"k", cas=1), 16, "00" * 8, "cas", 16, id="prepare without CAS"),
    pytest.param(dcp.Commit(1, 2, b"k"), 16, "0000000000000001", "cas", 16, id="commit with CAS"),
    pytest.param(dcp.Commit(1, 2, b"k"), 32, "00" * 8, "commit_seqno", 32, id="commit at seqno 0"),
    pytest.param(dcp.OsoSnapshot(1), 24, "00000003", "flags", 24, id="OSO neither start nor end"),
    pytest.param(kv.Add(key=b"k"), 16, "0000000000000001", "cas", 16, id="add with CAS"),
    pytest.param(kv.Get(b"k"), 16, "0000000000000001", "cas", 16, id="get with CAS"),
    pytest.param(kv.Unlock(b"k", cas=1), 16, "00" * 8, "cas", 16, id="unlock without CAS"),
    pytest.param(kv.GetMeta(1, b"k"), 24, "03", "version", 24, id="meta version 3"),
    pytest.param(kv.WithMeta(options=8, key=b"k"), 48, "00000004", "options", 48, id="regenerate CAS alone"),
    pytest.param(cluster.GetAllVbSeqnos(1), 24, "00000005", "state", 24, id="seqnos of state 5"),
    pytest.param(cluster.SetVbucket(1), 24, "00", "state", 24, id="set vbucket state 0"),
    pytest.param(upr.UprStreamRequest(), 24, "80000000", "flags", 24, id="UPR knows only takeover"),
    pytest.param(upr.UprMutation(1, 1, key=b"k"), 52, "0001", "nmeta", 52, id="UPR metadata that is not there"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "at", "new", "field", "offset"), NOT_ALLOWED)
def test_a_field_that_breaks_its_rule(message, at, new, field, offset):
    error = decoding(patched(message.encode(), at, new), Context(message.dialect or Dialect.DCP))

    assert (error.field, error.offset) == (field, offset)
    assert error.status == Status.EINVAL


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"{", "JSON object"),
        (b"[]", "JSON object"),
        (b'{"consumer":"x"}', "unknown key"),
        (b'{"consumer_name":1}', "string"),
    ],
)
def test_an_open_value_that_breaks_a_rule(value, reason):
    with pytest.raises(LocalProtocolError, match=reason):
        dcp.Open(0, 0, b"n", value, datatype=1).encode()


def test_a_consumer_may_name_itself_and_a_producer_may_not():
    named = dcp.Open(0, 0, b"n", b'{"consumer_name":"replica1"}', datatype=1)

    assert named.consumer_name == "replica1"
    with pytest.raises(LocalProtocolError, match="consumer connections"):
        dcp.Open(0, 1, b"n", b'{"consumer_name":"replica1"}', datatype=1).encode()


@pytest.mark.parametrize(
    ("opcode", "status"),
    [(0x40, Status.NOT_SUPPORTED), (0x5A, Status.NOT_SUPPORTED), (0x23, Status.UNKNOWN_COMMAND)],
)
def test_an_opcode_without_a_message_is_unknown_or_not_supported(opcode, status):
    error = decoding(Frame(Magic.REQUEST, opcode).encode())

    assert (error.field, error.offset, error.status) == ("opcode", 1, status)


def test_the_two_commands_with_opcode_0xb3_are_told_apart_by_the_value():
    streams = upr.UprAddStreams(7, tuple(range(8)), b"name")
    compaction = cluster.CompactDb(value=b"{}", datatype=1)

    assert len(streams.frame().extras) == len(compaction.frame().extras) == 24
    for message in (streams, compaction, cluster.CompactDb()):
        [frame] = FrameSplitter().receive(message.encode())
        assert decode(frame) == decode(frame, Context(Dialect.UPR)) == message


def test_more_vbuckets_than_an_answer_can_hold_are_refused():
    with pytest.raises(LocalProtocolError, match="63"):
        upr.UprAddStreams(7, tuple(range(64)), b"name").encode()


def test_a_filter_needs_collections_when_values_are_checked():
    raw = dcp.StreamRequest(value=b'{"uid":"0"}').encode()

    error = decoding(raw, Context(check_values=True))

    assert (error.field, error.offset) == ("value", 72)


def test_a_datatype_that_was_not_agreed_on():
    raw = dcp.DcpMutation(1, 1, key=b"k", datatype=Datatype.SNAPPY).encode()

    assert decoding(raw, Context(datatypes=Datatype.JSON)).field == "datatype"


@pytest.mark.parametrize("value", [b"", b"\0\0\0\x08\0\0\0\x04a\x001\0"])
@pytest.mark.parametrize("kind", [dcp.DeletionV2, dcp.Expiration])
def test_a_stream_id_that_the_framing_length_does_not_count_is_read(kind, value):
    """Real servers send such frames; both the object reader and the bulk reader accept them."""
    message = kind(5, 2, 9, key=b"\0hello", value=value, datatype=Datatype.XATTR if value else 0, vbucket=3, opaque=7)
    framed = replace(message, frame_infos=(FrameInfo(RequestFrameId.STREAM_ID, b"\0G"),)).encode()
    forgotten = patched(framed, 2, "00")
    [frame] = FrameSplitter().receive(forgotten)

    mended = decode(frame, Context(collections=True))
    decoder = BulkDecoder(Context(collections=True))
    [part] = decoder.feed(forgotten)

    assert mended.stream_id == 71
    assert (mended.by_seqno, mended.delete_time, mended.key, mended.value) == (5, 9, b"\0hello", value)
    assert (part.controls, part.last) == ([], 1)
    assert [int(part.columns[name][0]) for name in ("stream_id", "seqno", "delete_time", "opaque")] == [71, 5, 9, 7]
    assert (part.columns.key(0), part.columns.value(0)) == (b"hello", value)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: dcp.BufferAck(1 << 32).encode(),
        lambda: dcp.BufferAck(1, vbucket=1 << 16).encode(),
        lambda: dcp.DcpControl(b"", b"x").encode(),
        lambda: kv.Get(b"k" * 252).encode(),
        lambda: Frame(Magic.ALT_REQUEST, 0, key=b"k" * 256).encode(),
        lambda: Frame(Magic.REQUEST, 0, framing=b"\0").encode(),
        lambda: dcp.DcpNoop(frame_infos=(FrameInfo(300),)).encode(),
        lambda: cluster.GetClusterConfig(epoch=1).encode(),
        lambda: kv.GetResponse(status=1).encode(),
        lambda: dcp.FailoverLogResponse((), status=0).encode(),
        lambda: cluster.GetAllVbSeqnosResponse((cluster.VbucketSeqno(1 << 16, 0),)).encode(),
    ],
)
def test_a_message_that_must_not_be_sent_is_a_local_error(wrong):
    with pytest.raises(LocalProtocolError):
        wrong()


@pytest.mark.parametrize("microseconds", [0, 10, 500, 12_345, 1_000_000, 100_000_000])
def test_a_server_duration_is_accurate_to_a_few_percent(microseconds):
    from upriver.wire.framing import decode_duration

    assert decode_duration(encode_duration(microseconds)) == pytest.approx(microseconds, rel=0.05, abs=3)


ERRORS = [
    RemoteProtocolError("reason", "field", 7, Status.XATTR_EINVAL),
    FramingError("reason", "magic", 0),
    InvalidMessage("reason", "key", 3),
    LocalProtocolError("reason"),
    errors.Rollback(900),
    errors.OtherStatus(0xFF01, "context"),
    errors.StatusError.of(0x07, "context"),
    errors.CorruptStore("path"),
    errors.ConfigError("option"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_survive_pickling(error):
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
