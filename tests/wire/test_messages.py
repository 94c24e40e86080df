"""Properties of every declared message and of every byte stream."""

import contextlib
import pickle

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from tests.wire.wire_strategies import messages_of
from tests.wire.wire_vectors import MODERN, SEED
from upriver.errors import FramingError, LocalProtocolError, RemoteProtocolError
from upriver.wire import Context, Dialect, Frame, FrameSplitter, Magic, Opcode, OtherResponse, decode
from upriver.wire.constants import DCP_OPCODES, ServerOpcode
from upriver.wire.message import declared_messages
from upriver.wire.messages import kv

CLASSES = declared_messages()
CONTEXTS = [
    Context(dialect, collections, datatypes, check_values)
    for dialect in Dialect
    for collections in (False, True)
    for datatypes, check_values in ((7, False), (7, True), (0, True))
]
SOUND = [v.raw for v in (*SEED, *MODERN) if not isinstance(v.expected, FramingError)]


def named(cls: type) -> str:
    return f"{cls.__qualname__}"


@pytest.mark.parametrize("cls", CLASSES, ids=named)
@settings(
    max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(data=st.data())
def test_decode_undoes_encode(cls, data):
    message = data.draw(messages_of(cls))
    [frame] = FrameSplitter().receive(message.encode())

    decoded = decode(frame, Context(cls.dialect or Dialect.DCP))

    assert type(decoded) is cls
    assert decoded == message
    assert decoded.encode() == message.encode()
    assert pickle.loads(pickle.dumps(decoded)) == decoded


def test_every_opcode_has_a_request():
    declared = {cls.opcode for cls in CLASSES if not cls.magic.is_response and not cls.magic.is_server}

    assert {opcode for opcode in Opcode if opcode not in declared} == set()
    assert ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION in {cls.opcode for cls in CLASSES if cls.magic.is_server}


@st.composite
def chopped_streams(draw):
    """A stream of valid frames, and the same bytes in pieces."""
    stream = b"".join(draw(st.lists(st.sampled_from(SOUND), min_size=1, max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    return stream, [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]


@given(chopped_streams())
def test_chopping_does_not_matter(chopped):
    stream, pieces = chopped
    splitter = FrameSplitter()

    frames = [frame for piece in pieces for frame in splitter.receive(piece)]
    splitter.receive_eof()

    assert frames == list(FrameSplitter().receive(stream))
    assert b"".join(frame.encode() for frame in frames) == stream


def test_one_byte_at_a_time_gives_the_same_frames():
    stream = b"".join(SOUND)
    splitter = FrameSplitter()

    frames = [frame for byte in stream for frame in splitter.receive(bytes([byte]))]

    assert [frame.encode() for frame in frames] == SOUND
    assert splitter.pending == 0


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=200), st.sampled_from(CONTEXTS))
def test_arbitrary_bytes_raise_only_remote_errors(raw, context):
    with contextlib.suppress(RemoteProtocolError):
        for frame in FrameSplitter().receive(raw):
            decode(frame, context)


frames = st.builds(
    Frame,
    st.sampled_from(list(Magic)),
    st.sampled_from([*Opcode]).map(int) | st.sampled_from(DCP_OPCODES) | st.integers(0, 255),
    st.sampled_from([0, 1, 7, 0x23, 0xCC]) | st.integers(0, 0xFFFF),
    st.just(5),
    st.sampled_from([0, 1]),
    st.integers(0, 8),
    st.just(b"") | st.just(b"\x22\0\1") | st.binary(max_size=6),
    st.sampled_from([0, 1, 4, 8, 13, 16, 18, 20, 21, 24, 30, 31, 40, 48]).flatmap(
        lambda size: st.binary(min_size=size, max_size=size)
    ),
    st.binary(max_size=20),
    st.binary(max_size=60),
)


@settings(max_examples=examples(600), deadline=None)
@given(frames, st.sampled_from(CONTEXTS))
def test_a_well_framed_frame_raises_only_remote_errors_with_field_and_offset(frame, context):
    if not frame.magic.is_flexible:
        frame.framing = b""
    message, error = outcome(frame, context)
    if error:
        assert error.field
        assert 0 <= error.offset <= frame.size
    elif frame.framing or not frame.magic.is_flexible:
        assert message.encode() == frame.encode()


def outcome(frame, context):
    try:
        return decode(frame, context), None
    except RemoteProtocolError as error:
        return None, error


def test_quiet_commands_have_the_same_layout_with_another_opcode():
    quiet = kv.Get.under(Opcode.GETQ)(b"k", opaque=7)

    assert quiet.opcode == Opcode.GETQ
    assert isinstance(quiet, kv.Get)
    assert pickle.loads(pickle.dumps(quiet)) == quiet
    with pytest.raises(LocalProtocolError, match="0x01"):
        kv.Get.under(Opcode.SET)


def test_an_error_response_gives_its_text_and_manifest():
    raw = b'{"error":{"context":"no such collection","ref":"x"},"manifest_uid":"1f"}'
    error = OtherResponse(Opcode.GET, value=raw, status=0x88, datatype=1)
    [frame] = FrameSplitter().receive(error.encode())

    decoded = decode(frame)

    assert decoded.context() == "no such collection"
    assert decoded.manifest_uid() == 0x1F


@pytest.mark.parametrize("value", [b"", b"[]", b"\xff", b'{"error":1}', b'{"error":{"context":1}}'])
def test_an_error_response_without_a_text_gives_none(value):
    error = OtherResponse(Opcode.GET, value=value, status=4)

    assert error.context() == ""
    assert error.manifest_uid() is None


def test_the_cluster_map_of_not_my_vbucket_is_not_an_error_text():
    assert OtherResponse(Opcode.GET, value=b'{"error":{"context":"x"}}', status=7).context() == ""
