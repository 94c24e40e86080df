"""Arrow batches have the declared schemas, and rows that need no change are not copied."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples
from upriver.errors import InvalidMessage
from upriver.model import SEQNO_MAX, Datatype, signed, unsigned
from upriver.records.batches import ChangeOptions, change_batch, row_batch, wire_batch
from upriver.records.schema import CHANGES, WIRE, Event, signed_column
from upriver.wire import Context, Message
from upriver.wire.bulk.decode import BulkDecoder, Columns, ColumnSizes
from upriver.wire.bulk.row_checks import StreamTable
from upriver.wire.messages import dcp
from upriver.wire.values import deflate, join_xattrs

CAS = 1_700_000_000_123_456_789
XATTRS = join_xattrs({"_sync": b'{"rev":1}', "user": b"2"}, b'{"a":1}')
FORBIDDEN = (pa.types.is_large_binary, pa.types.is_large_string, pa.types.is_unsigned_integer, pa.types.is_dictionary)


def decoded(*messages: Message, upto: int = SEQNO_MAX) -> Columns:
    decoder, streams = BulkDecoder(Context(collections=True)), StreamTable()
    streams.open(5, opaque=0, vbuuid=77, epoch=1, upto=upto)
    streams.snapshot(5, 0, 1000)
    list(decoder.feed(b"".join(message.encode() for message in messages)))
    columns = decoder.take()
    assert streams.advance(columns, 0, columns.rows) == -1
    return columns


def mutation(seqno: int, value: bytes = b"value", key: bytes = b"\0key", **header: int) -> dcp.DcpMutation:
    return dcp.DcpMutation(seqno, 3, 4, 1_800_000_000, key=key, value=value, **({"vbucket": 5, "cas": CAS} | header))


def changes(*messages: Message, upto: int = SEQNO_MAX, **how: Any) -> list[dict[str, Any]]:
    batch = change_batch(decoded(*messages, upto=upto), ChangeOptions(**how))
    batch.validate(full=True)
    assert batch.schema.equals(CHANGES)
    return batch.to_pylist()


def test_the_feed_has_the_columns_of_its_specification_in_their_order() -> None:
    assert " ".join(CHANGES.names) == (
        "event vbucket seqno epoch vbuuid rev_seqno cas timestamp scope collection collection_id key value datatype "
        "flags expiry delete_time xattrs snapshot_start snapshot_end"
    )
    assert not any(forbidden(field.type) for field in CHANGES for forbidden in FORBIDDEN)


def test_a_mutation_fills_every_column() -> None:
    [row] = changes(mutation(9, datatype=1, key=b"\x09key"), names={9: ("inventory", "hotels")})
    assert row == {
        "event": "mutation", "vbucket": 5, "seqno": 9, "epoch": 1, "vbuuid": 77, "rev_seqno": 3, "cas": CAS,
        "timestamp": datetime.datetime.fromtimestamp(1_700_000_000, datetime.UTC) + datetime.timedelta(
            microseconds=(CAS >> 16 << 16) // 1000 % 1_000_000),
        "scope": "inventory", "collection": "hotels", "collection_id": 9, "key": b"key", "value": b"value",
        "datatype": 1, "flags": 4, "expiry": 1_800_000_000, "delete_time": 0, "xattrs": None,
        "snapshot_start": 0, "snapshot_end": 1000,
    }  # fmt: skip


def test_tombstones_have_no_value() -> None:
    rows = changes(
        dcp.DeletionV2(1, 1, 1_700_000_000, key=b"\0a", vbucket=5),
        dcp.Expiration(2, 1, 1_700_000_001, key=b"\0b", vbucket=5),
        mutation(3, b""),
    )
    assert [(row["event"], row["value"], row["delete_time"]) for row in rows] == [
        ("deletion", None, 1_700_000_000), ("expiration", None, 1_700_000_001), ("mutation", b"", 0),
    ]  # fmt: skip
    assert rows[0]["timestamp"] is None  # a CAS of 0 is not a clock


def test_only_wrapped_values_are_unwrapped() -> None:
    rows = changes(
        mutation(1, b"plain"),
        mutation(2, deflate(b"x" * 500), datatype=Datatype.SNAPPY),
        mutation(3, XATTRS, datatype=Datatype.XATTR | Datatype.JSON),
        mutation(4, deflate(XATTRS), datatype=7),
        dcp.DcpDeletion(5, 1, key=b"\0k", value=join_xattrs({"_s": b"1"}), datatype=Datatype.XATTR, vbucket=5),
        mutation(6, b"", datatype=7),  # a stream without values that keeps the datatype: nothing to inflate
        xattrs=True,
    )
    attributes = [("_sync", b'{"rev":1}'), ("user", b"2")]
    assert [(row["value"], row["datatype"], row["xattrs"]) for row in rows] == [
        (b"plain", 0, None), (b"x" * 500, 0, None), (b'{"a":1}', 1, attributes), (b'{"a":1}', 1, attributes),
        (None, 0, [("_s", b"1")]), (b"", 7, None),
    ]  # fmt: skip


def test_values_never_include_attributes_even_if_the_column_is_off() -> None:
    [row] = changes(mutation(1, XATTRS, datatype=Datatype.XATTR))
    assert (row["value"], row["xattrs"]) == (b'{"a":1}', None)


@pytest.mark.parametrize(("value", "datatype"), [
    pytest.param(b"\xff\xff\xff\xff\x0f" + b"bomb", Datatype.SNAPPY, id="a snappy bomb"),
    pytest.param(b"\x05abc", Datatype.SNAPPY, id="snappy that is none"),
    pytest.param(b"\0\0\0\xff", Datatype.XATTR, id="an xattr total that lies"),
])  # fmt: skip
def test_a_value_that_contradicts_its_datatype_is_a_remote_error(value: bytes, datatype: int) -> None:
    with pytest.raises(InvalidMessage):
        changes(mutation(1, value, datatype=datatype))


def test_rows_beyond_the_wanted_end_are_left_out() -> None:
    rows = changes(mutation(1), mutation(2), mutation(3, b"\x05abc", datatype=Datatype.SNAPPY), upto=2)
    assert [row["seqno"] for row in rows] == [1, 2]


def test_a_collection_without_a_name_keeps_its_id() -> None:
    [row] = changes(mutation(1, key=b"\x08k"))
    assert (row["scope"], row["collection"], row["collection_id"]) == (None, None, 8)


def test_a_stream_without_values_has_nulls() -> None:
    [row] = changes(mutation(1, b"", datatype=3), values=False)
    assert (row["value"], row["datatype"]) == (None, 3)


def test_a_batch_can_be_made_of_some_of_the_rows() -> None:
    columns = decoded(*(mutation(n, b"v%d" % n) for n in range(1, 6)))
    batch = change_batch(columns, ChangeOptions(), 1, 3)
    batch.validate(full=True)
    assert batch["value"].to_pylist() == [b"v2", b"v3"]
    assert wire_batch(columns, 3)["seqno"].to_pylist() == [4, 5]


def test_a_batch_outlives_the_decoder_and_everything_after_it() -> None:
    decoder = BulkDecoder(Context(collections=True))
    batches = []
    for seqno in range(1, 30):
        list(decoder.feed(mutation(seqno, b"v%d" % seqno).encode()))
        columns = decoder.take()
        StreamTable().advance(columns, 0, 0)
        batches.append((change_batch(columns, ChangeOptions()), wire_batch(columns)))
        del columns
    del decoder
    for seqno, (change, wire) in enumerate(batches, 1):
        assert change["value"].to_pylist() == wire["value"].to_pylist() == [b"v%d" % seqno]
        assert change["seqno"].to_pylist() == [seqno]


def test_a_wire_batch_has_every_field_of_the_frame() -> None:
    columns = decoded(mutation(7, datatype=1), dcp.DeletionV2(8, 1, 99, key=b"\x08k", vbucket=5))
    batch = wire_batch(columns)
    batch.validate(full=True)
    assert batch.schema.equals(WIRE)
    assert batch.to_pylist()[1] == {
        "event": 0x58, "vbucket": 5, "collection_id": 8, "key": b"k", "value": b"", "datatype": 0, "seqno": 8,
        "rev_seqno": 1, "cas": 0, "flags": 0, "expiry": 0, "delete_time": 99, "lock_time": 0, "stream_id": 0,
        "opaque": 0,
    }  # fmt: skip


def test_a_wire_batch_ignores_what_was_in_the_memory_before() -> None:
    decoder = BulkDecoder()
    for noise in (0, 0xFF):
        decoder.columns.view("key_at")[1:] = decoder.columns.view("value_at")[1:] = -noise
        list(decoder.feed(dcp.DcpMutation(1, 1, key=b"k", value=b"v").encode()))
        assert wire_batch(decoder.take())["value"].to_pylist() == [b"v"]
    full = BulkDecoder(sizes=ColumnSizes(rows=1, key_bytes=300, value_bytes=9))
    list(full.feed(dcp.DcpMutation(1, 1, key=b"k", value=b"v").encode()))
    assert wire_batch(full.take())["key"].to_pylist() == [b"k"]


def test_a_mixture_of_collections_gets_its_names() -> None:
    names = {8: ("s", "a"), 9: ("s", "b")}
    rows = changes(*(mutation(n, key=bytes((8 + n % 3,)) + b"k") for n in range(1, 7)), names=names)
    assert [(row["scope"], row["collection"]) for row in rows] == [("s", "b"), (None, None), ("s", "a")] * 2


def test_rows_made_one_by_one_fit_the_same_schema() -> None:
    batch = row_batch([{"event": Event.ROLLBACK, "vbucket": 3, "seqno": 17, "epoch": 1, "vbuuid": 5}])
    batch.validate(full=True)
    assert batch.schema.equals(CHANGES)
    assert batch.to_pylist()[0]["event"] == "rollback"
    assert batch["key"].null_count == 1


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=1))
def test_u64_survives_the_signed_column(numbers: list[int]) -> None:
    import numpy as np

    assert [unsigned(int(n)) for n in signed_column(np.array(numbers, np.uint64))] == numbers
    assert [unsigned(signed(n)) for n in numbers] == numbers


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0, 1, 2, 4, 5, 6, 7]), st.binary(max_size=30)), max_size=12))
def test_every_mixture_of_compression_and_attributes_is_unwrapped(documents: list[tuple[int, bytes]]) -> None:
    messages = []
    for seqno, (datatype, body) in enumerate(documents, 1):
        value = join_xattrs({"x": b"1"}, body) if datatype & Datatype.XATTR else body
        value = deflate(value) if datatype & Datatype.SNAPPY else value
        messages.append(mutation(seqno, value, datatype=datatype))
    rows = changes(*messages, xattrs=True)
    assert [row["value"] for row in rows] == [body for _, body in documents]
    assert [row["xattrs"] for row in rows] == [[("x", b"1")] if d & Datatype.XATTR else None for d, _ in documents]
