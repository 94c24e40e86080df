"""System events of version 2: our FlatBuffers against the reference implementation, and against hostile bytes."""

import contextlib
from dataclasses import replace

import flatbuffers
import flatbuffers.table
import pytest
from flatbuffers import number_types
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import InvalidMessage
from upriver.wire.messages import events
from upriver.wire.messages.events import _FLAT_COLLECTION as COLLECTION
from upriver.wire.messages.events import CollectionBegun, SystemEvent
from upriver.wire.messages.flatbuffer import read_table, write_table

NUMBER_TYPES = {"Q": number_types.Uint64Flags, "I": number_types.Uint32Flags, "?": number_types.BoolFlags}

collections = st.fixed_dictionaries(
    {
        "uid": st.integers(0, (1 << 64) - 1), "scopeId": st.integers(0, 0xFFFFFFFF),
        "collectionId": st.integers(0, 0xFFFFFFFF), "ttlValid": st.booleans(), "maxTtl": st.integers(0, 0xFFFFFFFF),
        "name": st.text(st.characters(codec="utf-8"), max_size=40), "history": st.booleans(),
        "defaultCollectionMVS": st.integers(0, (1 << 64) - 1), "metered": st.booleans(),
        "flushUid": st.integers(0, (1 << 64) - 1),
    }
)  # fmt: skip


def write_with_reference(fields):
    builder = flatbuffers.Builder(0)
    name = builder.CreateString(fields["name"])
    builder.StartObject(len(COLLECTION))
    for slot, column in enumerate(COLLECTION):
        if column.code == "s":
            builder.PrependUOffsetTRelativeSlot(slot, name, 0)
        else:
            write = {"Q": builder.PrependUint64Slot, "I": builder.PrependUint32Slot, "?": builder.PrependBoolSlot}
            write[column.code](slot, fields[column.name], column.default)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def read_with_reference(raw):
    root = flatbuffers.encode.Get(flatbuffers.packer.uoffset, raw, 0)
    table = flatbuffers.table.Table(raw, root)
    found = {}
    for slot, column in enumerate(COLLECTION):
        at = table.Offset(4 + 2 * slot)
        if column.code == "s":
            found[column.name] = table.String(at + table.Pos).decode() if at else ""
        else:
            found[column.name] = table.Get(NUMBER_TYPES[column.code], at + table.Pos) if at else column.default
    return found


@given(collections)
def test_we_read_what_the_reference_writes(fields):
    assert read_table(write_with_reference(fields), COLLECTION) == fields


@given(collections)
def test_the_reference_reads_what_we_write(fields):
    assert read_with_reference(write_table(COLLECTION, fields)) == fields


def test_scalars_are_aligned_as_the_format_demands():
    raw = write_table(COLLECTION, {"uid": 1, "scopeId": 2, "ttlValid": True, "flushUid": 3, "name": "n"})
    table = int.from_bytes(raw[:4], "little")
    vtable = table - int.from_bytes(raw[table : table + 4], "little", signed=True)
    for slot, width in ((0, 8), (1, 4), (9, 8)):
        at = int.from_bytes(raw[vtable + 4 + 2 * slot :][:2], "little")
        assert (table + at) % width == 0


@given(st.binary(max_size=120))
def test_hostile_bytes_raise_only_invalid_message(raw):
    with contextlib.suppress(InvalidMessage):
        read_table(raw, COLLECTION)


@given(collections, st.data())
def test_a_damaged_buffer_is_refused_or_read(fields, data):
    raw = bytearray(write_table(COLLECTION, fields))
    raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(InvalidMessage):
        read_table(bytes(raw[: data.draw(st.integers(0, len(raw)))]), COLLECTION)


EVENTS = [
    CollectionBegun("c", 2, 0, 8),
    CollectionBegun("c", 2, 0, 8, max_ttl=0),
    CollectionBegun("c", 2, 0, 8, max_ttl=72000, history=True, metered=True, flush_uid=9, default_collection_mvs=5),
    CollectionBegun("c", 2, 0, 8, modified=True, history=True),
    events.CollectionEnded(3, 0, 8, system=True),
    events.ScopeCreated("s", 4, 9),
    events.ScopeDropped(5, 9, system=True),
]


@pytest.mark.parametrize("content", EVENTS, ids=str)
def test_every_collection_event_survives_a_round_trip_through_flatbuffers(content):
    assert SystemEvent.of(1, content, flat=True).content() == content


@pytest.mark.parametrize("content", EVENTS, ids=str)
def test_a_stored_event_keeps_every_field_that_readers_need(content):
    """Only the flush uid tells a flush from a creation, so the store must keep it."""
    unkept = {"default_collection_mvs": 0} if isinstance(content, CollectionBegun) else {}
    unkept |= {"system": False} if hasattr(content, "system") else {}
    assert events.of_record(*events.to_record(content)) == replace(content, **unkept)


@pytest.mark.parametrize(
    ("event", "version", "value", "reason"),
    [
        (2, 0, b"", "does not exist"),
        (0, 3, b"", "no version 3"),
        (5, 0, bytes(16), "no version 0"),
        (1, 1, bytes(20), "no version 1"),
        (0, 0, bytes(20), "not 16"),
        (0, 1, bytes(16), "not 20"),
        (3, 0, bytes(11), "not 12"),
        (0, 2, b"\xff" * 8, "outside the value"),
    ],
)
def test_a_system_event_that_breaks_a_rule(event, version, value, reason):
    broken = [rule.reason for rule in SystemEvent(1, event, version, b"n", value).rules()]

    assert reason in broken[0]
