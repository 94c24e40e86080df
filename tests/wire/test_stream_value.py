"""The JSON value of a stream request: every rule of docs/protocol/stream-request.md#value has its status."""

import contextlib

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import InvalidMessage, LocalProtocolError, RemoteProtocolError, Status
from upriver.wire.messages.stream_value import CacheTransferSettings, StreamValue

ids = st.integers(0, 0xFFFFFFFF)
settings = st.builds(CacheTransferSettings, st.none() | st.integers(0, 1 << 60), st.none() | st.booleans())
filters = st.fixed_dictionaries({}, optional={"collections": st.lists(ids, min_size=1, unique=True).map(tuple)}) | (
    st.fixed_dictionaries({}, optional={"scope": ids})
)
others = st.fixed_dictionaries(
    {},
    optional={
        "uid": st.integers(0, (1 << 64) - 1),
        "sid": st.integers(1, 65535),
        "purge_seqno": st.integers(0, (1 << 64) - 1),
        "cts": settings,
    },
)
stream_values = st.builds(lambda some, more: StreamValue(**some, **more), filters, others)


@given(stream_values)
def test_parse_undoes_encode(value):
    assert StreamValue.parse(value.encode()) == value


@pytest.mark.parametrize(
    ("value", "field", "status"),
    [
        pytest.param("{", "value", Status.EINVAL, id="bad JSON"),
        pytest.param("[]", "value", Status.EINVAL, id="not an object"),
        pytest.param("{}", "value", Status.EINVAL, id="nothing"),
        pytest.param('{"x":1}', "value", Status.EINVAL, id="no known key"),
        pytest.param('{"sid":0}', "sid", Status.DCP_STREAM_ID_INVALID, id="stream-id 0"),
        pytest.param('{"sid":65536}', "sid", Status.EINVAL, id="stream-id above 16 bits"),
        pytest.param('{"sid":65537}', "sid", Status.EINVAL, id="stream-id that would wrap to 1"),
        pytest.param('{"sid":-1}', "sid", Status.EINVAL, id="negative stream-id"),
        pytest.param('{"sid":1.0}', "sid", Status.EINVAL, id="stream-id as a float"),
        pytest.param('{"sid":"1"}', "sid", Status.EINVAL, id="stream-id as text"),
        pytest.param('{"sid":true}', "sid", Status.EINVAL, id="stream-id as a boolean"),
        pytest.param('{"collections":"8"}', "collections", Status.EINVAL, id="collections not an array"),
        pytest.param('{"collections":[8]}', "collections", Status.EINVAL, id="collection as a number"),
        pytest.param('{"collections":["0x8"]}', "collections", Status.EINVAL, id="hex with 0x"),
        pytest.param('{"collections":["8 "]}', "collections", Status.EINVAL, id="hex with a space"),
        pytest.param('{"collections":["-8"]}', "collections", Status.EINVAL, id="negative hex"),
        pytest.param('{"collections":[""]}', "collections", Status.EINVAL, id="empty hex"),
        pytest.param('{"collections":["100000000"]}', "collections", Status.EINVAL, id="id above 32 bits"),
        pytest.param('{"collections":["8","8"]}', "collections", Status.EINVAL, id="the same id twice"),
        pytest.param('{"collections":["8","08"]}', "collections", Status.EINVAL, id="the same id written twice"),
        pytest.param('{"scope":8}', "scope", Status.EINVAL, id="scope as a number"),
        pytest.param('{"scope":"g"}', "scope", Status.EINVAL, id="scope not hex"),
        pytest.param('{"scope":"8","collections":["8"]}', "scope", Status.EINVAL, id="scope and collections"),
        pytest.param('{"purge_seqno":1}', "purge_seqno", Status.EINVAL, id="purge seqno as a number"),
        pytest.param('{"purge_seqno":"1f"}', "purge_seqno", Status.EINVAL, id="purge seqno in hex"),
        pytest.param('{"purge_seqno":"18446744073709551616"}', "purge_seqno", Status.EINVAL, id="above 64 bits"),
        pytest.param('{"cts":1}', "cts", Status.EINVAL, id="settings not an object"),
        pytest.param('{"cts":{"free_memory":-1}}', "cts", Status.EINVAL, id="negative memory"),
        pytest.param('{"cts":{"all_keys":1}}', "cts", Status.EINVAL, id="all keys as a number"),
    ],
)
def test_a_value_that_breaks_a_rule_raises_its_field_and_status(value, field, status):
    with pytest.raises(InvalidMessage) as caught:
        StreamValue.parse(value.encode(), offset=72)

    assert (caught.value.field, caught.value.offset, caught.value.status) == (field, 72, status)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", StreamValue()),
        ('{"uid":"a2"}', StreamValue(uid=0xA2)),
        ('{"uid":7}', StreamValue(uid=0)),
        ('{"sid":7,"unknown":[1]}', StreamValue(sid=7)),
        ('{"collections":["0","1C"]}', StreamValue(collections=(0, 28))),
        ('{"scope":"00000008","purge_seqno":"12"}', StreamValue(scope=8, purge_seqno=12)),
        ('{"cts":{}}', StreamValue(cts=CacheTransferSettings())),
    ],
)
def test_a_value_that_is_allowed(value, expected):
    assert StreamValue.parse(value.encode()) == expected


@pytest.mark.parametrize(
    "value",
    [
        StreamValue(sid=0),
        StreamValue(sid=65536),
        StreamValue(scope=1, collections=(1,)),
        StreamValue(collections=(1, 1)),
        StreamValue(purge_seqno=-1),
    ],
)
def test_a_value_that_breaks_a_rule_is_not_sent(value):
    with pytest.raises(LocalProtocolError):
        value.encode()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 1 << 63) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
known_keys = st.sampled_from(["uid", "sid", "collections", "scope", "purge_seqno", "cts", "x"])


@given(st.dictionaries(known_keys, json_values).map(orjson.dumps) | st.binary(max_size=40))
def test_any_value_is_read_or_refused(raw):
    with contextlib.suppress(RemoteProtocolError):
        assert isinstance(StreamValue.parse(raw), StreamValue)
