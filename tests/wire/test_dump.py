"""Dumps: every byte is in a row, every frame has a JSON object, and no bytes raise an exception."""

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.wire.test_messages import frames
from tests.wire.wire_vectors import MODERN, SEED
from upriver.errors import FramingError
from upriver.wire import Context, Dialect, Frame, FrameSplitter, Magic
from upriver.wire.constants import Feature
from upriver.wire.inspect.conversation import CapturedConversation, DumpReader, find_frame
from upriver.wire.inspect.dump import as_json, dump_frame, rows
from upriver.wire.messages import dcp, session, upr

SOUND = [v for v in (*SEED, *MODERN) if not isinstance(v.expected, FramingError)]
MUTATION = dcp.DcpMutation(4, 1, key=b"\x08hello", value=b"world", vbucket=7, opaque=0x1007)


def all_of(reader, raw):
    return [*reader.receive(raw), *reader.receive_eof()]


@pytest.mark.parametrize("vector", SOUND, ids=lambda vector: vector.name)
def test_the_rows_of_an_example_cover_every_byte_once(vector):
    [dump] = all_of(DumpReader(CapturedConversation(vector.context.dialect)), vector.raw)

    shown = [row for row in rows(dump) if row.raw]

    assert dump.error is None
    assert b"".join(row.raw for row in sorted(shown, key=lambda row: row.offset)) == vector.raw
    assert all(vector.raw[row.offset : row.offset + len(row.raw)] == row.raw for row in shown)


@pytest.mark.parametrize("vector", SOUND, ids=lambda vector: vector.name)
def test_the_object_of_an_example_has_the_header_and_the_declared_fields(vector):
    [dump] = all_of(DumpReader(CapturedConversation(vector.context.dialect)), vector.raw)

    found = orjson.loads(orjson.dumps(as_json(dump)))

    word = "status" if dump.frame.magic.is_response else "vbucket"
    assert {"magic", "opcode", "name", word, "opaque", "cas", "datatype", "fields", "key", "value"} <= set(found)
    assert "error" not in found
    for name, content in found["fields"].items():
        if isinstance(content, int):
            assert content == getattr(vector.expected, name)


@settings(max_examples=examples(300), deadline=None)
@given(frames, st.sampled_from(Dialect), st.sampled_from([None, False, True]))
def test_any_frame_can_be_shown_and_a_broken_one_says_why(frame, dialect, collections):
    if not frame.magic.is_flexible:
        frame.framing = b""
    [dump] = all_of(DumpReader(CapturedConversation(dialect, collections)), frame.encode())

    found = as_json(dump)

    assert rows(dump)
    assert orjson.dumps(found)
    if dump.error:
        assert found["error"]["field"]
        assert found["error"]["reason"]


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=6), st.lists(st.booleans(), min_size=6, max_size=6))
def test_any_bytes_with_gaps_can_be_shown(pieces, gaps):
    reader = DumpReader(CapturedConversation())
    for piece, lost in zip(pieces, gaps, strict=False):
        if lost:
            reader.gap()
        for dump in reader.receive(piece):
            assert rows(dump)
    assert len(list(reader.receive_eof())) <= 1


def test_the_dialect_of_a_stream_is_learned_from_its_request():
    talk = CapturedConversation()
    asked = [upr.UprStreamRequest(opaque=1), dcp.StreamRequest(opaque=2)]
    ended = [upr.UprStreamEnd(1, opaque=1), dcp.StreamEnd(1, opaque=2)]

    for message in asked:
        talk.dump(message.frame())

    assert [talk.dump(message.frame()).message for message in ended] == ended


def test_bytes_that_only_one_dialect_has_are_read_in_that_dialect():
    assert CapturedConversation().dump(upr.UprFlush().frame()).message == upr.UprFlush()
    assert CapturedConversation(Dialect.DCP).dump(upr.UprFlush().frame()).error.field == "opcode"


def test_collections_are_learned_from_the_hello_response():
    talk = CapturedConversation()
    before = as_json(talk.dump(MUTATION.frame()))
    talk.dump(session.HelloResponse((Feature.COLLECTIONS,)).frame())
    after = as_json(talk.dump(MUTATION.frame()))

    assert before["key"] == {"hex": "0868656c6c6f"}
    assert (after["collection_id"], after["key"]) == (8, "hello")


def test_a_stream_filter_that_breaks_a_rule_is_named():
    dump = dump_frame(dcp.StreamRequest(value=b'{"sid":0}').frame(), Context())

    assert (dump.error.field, dump.error.offset, dump.error.status) == ("sid", 72, 0x8D)


def test_a_stream_id_that_the_framing_length_does_not_count_is_shown_and_named():
    body = dcp.Expiration(5, 2, 9, key=b"hello").frame()
    cut = Frame(Magic.ALT_REQUEST, body.opcode, extras=b"\x22\0G" + body.extras, key=body.key).encode()
    raw = cut[:4] + bytes([len(body.extras)]) + cut[5:]
    [dump] = DumpReader(CapturedConversation()).receive(raw)

    assert dump.error.field == "framing length"
    assert dump.raw == raw
    assert as_json(dump)["stream_id"] == 71
    assert as_json(dump)["fields"]["by_seqno"] == 5


def test_bytes_that_are_not_a_frame_stop_the_reader_once():
    reader = DumpReader(CapturedConversation())

    [dump] = all_of(reader, b"\xff" * 100)

    assert (dump.error.field, dump.error.offset) == ("magic", 0)
    assert reader.stopped
    assert all_of(reader, MUTATION.encode()) == []


def test_after_a_gap_the_reader_finds_the_next_frame():
    raw = MUTATION.encode() * 3
    reader = DumpReader(CapturedConversation())
    [first] = reader.receive(raw[: len(raw) // 3 + 20])

    assert reader.gap() == 20
    [last] = reader.receive(raw[len(raw) // 3 + 40 :])

    assert first.message == last.message == MUTATION


def test_a_magic_inside_a_value_is_not_taken_for_a_frame_unless_the_header_is_plausible():
    value = b"\x80\x57" + b"\xff" * 30
    real = MUTATION.encode()

    assert find_frame(value + real + real) == len(value)
    assert find_frame(value) is None


def test_frames_come_out_the_same_however_the_bytes_are_cut():
    stream = b"".join(v.raw for v in SOUND)
    reader, whole = DumpReader(CapturedConversation()), DumpReader(CapturedConversation())

    pieces = [dump.raw for at in range(0, len(stream), 7) for dump in reader.receive(stream[at : at + 7])]

    assert pieces == [dump.raw for dump in whole.receive(stream)]
    assert pieces == [frame.encode() for frame in FrameSplitter().receive(stream)]
