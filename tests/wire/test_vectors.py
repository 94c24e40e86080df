"""The examples of the specification decode to what it says they mean, and encode to the same bytes."""

import pytest

from tests.wire.wire_vectors import MODERN, SEED, Vector
from upriver.errors import FramingError, InvalidMessage, RemoteProtocolError
from upriver.wire import Context, Frame, FrameSplitter, decode
from upriver.wire.messages import events
from upriver.wire.messages.stream_value import StreamValue

VECTORS = [*SEED, *MODERN]
SOUND = [vector for vector in VECTORS if not isinstance(vector.expected, FramingError)]
BROKEN = [vector for vector in VECTORS if isinstance(vector.expected, FramingError)]
named = pytest.mark.parametrize("vector", SOUND, ids=lambda vector: vector.name)


def only_frame(vector: Vector) -> Frame:
    [frame] = split_to_the_end(vector.raw)
    return frame


def test_every_example_of_the_specification_is_here():
    assert len(SEED) == 29
    assert len(MODERN) == 32
    assert len({vector.name for vector in VECTORS}) == 61


@named
def test_example_means_what_the_specification_says(vector):
    decoded = decode(only_frame(vector), vector.context)

    assert type(decoded) is type(vector.expected)
    assert decoded == vector.expected


@named
def test_example_encodes_to_the_same_bytes(vector):
    assert vector.expected.encode().hex() == vector.hex


def split_to_the_end(raw: bytes) -> list[Frame]:
    splitter = FrameSplitter()
    found = list(splitter.receive(raw))
    splitter.receive_eof()
    return found


@pytest.mark.parametrize("vector", BROKEN, ids=lambda vector: vector.name)
def test_example_that_is_broken_as_printed_names_field_and_offset(vector):
    with pytest.raises(FramingError) as caught:
        split_to_the_end(vector.raw)

    assert caught.value.args == vector.expected.args


def test_the_response_printed_without_a_body_lacks_its_failover_log():
    [printed] = [vector for vector in BROKEN if "body length 0" in vector.name]
    frames = FrameSplitter().receive(printed.raw)

    with pytest.raises(InvalidMessage, match="no entry") as caught:
        decode(next(frames), printed.context)

    assert (caught.value.field, caught.value.offset) == ("body length", 8)


@named
def test_example_cut_short_anywhere_never_becomes_a_message(vector):
    for size in range(len(vector.raw)):
        splitter = FrameSplitter()
        assert list(splitter.receive(vector.raw[:size])) == []
        if size:
            with pytest.raises(FramingError):
                splitter.receive_eof()


@named
def test_example_with_any_one_bit_flipped_is_another_message_or_a_remote_error(vector):
    for at in range(len(vector.raw) * 8):
        flipped = bytearray(vector.raw)
        flipped[at // 8] ^= 1 << at % 8
        try:
            for frame in FrameSplitter().receive(flipped):
                decode(frame, vector.context)
        except RemoteProtocolError:
            pass


def named_vector(name: str) -> Vector:
    return next(vector for vector in VECTORS if vector.name.startswith(name))


def test_the_system_event_example_creates_a_collection():
    event = decode(only_frame(named_vector("SYSTEM_EVENT begin")))

    assert event.content() == events.CollectionBegun("mycollection", 2, 0, 8, max_ttl=72000)


def test_the_stream_filter_example_asks_for_collection_8():
    request = decode(only_frame(named_vector("STREAM_REQ vb7 {")), Context(collections=True, check_values=True))

    assert StreamValue.parse(request.value) == StreamValue(collections=(8,))


def test_the_stream_id_example_has_its_stream_id():
    assert decode(only_frame(named_vector("MUTATION collection 8"))).stream_id == 71
