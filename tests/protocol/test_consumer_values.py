"""What a consumer must not take: values that nobody could read, stream-ids.

See docs/protocol/messages.md#checks, steps 8 and 9.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.consumer_talk import Store, Talk, marker, mutation, success
from tests.protocol.test_consumer_receive import answers
from tests.protocol.test_consumer_setup import upr
from tests.support.examples import examples
from upriver.errors import InvalidMessage, Status
from upriver.model import Datatype
from upriver.wire import Opcode
from upriver.wire.bulk.decode import BulkDecoder
from upriver.wire.bulk.row_checks import ValueChecker
from upriver.wire.checks import Context
from upriver.wire.constants import RequestFrameId
from upriver.wire.framing import FrameInfo
from upriver.wire.messages.dcp import DcpMutation, DeletionV2, Expiration, Prepare, SnapshotMarker
from upriver.wire.messages.upr import UprMutation, UprSnapshotMarker
from upriver.wire.values import MAX_XATTR_BYTES, MAX_XATTRS, check_value, deflate, join_xattrs

SNAPPY, XATTR = int(Datatype.SNAPPY), int(Datatype.XATTR)
SID = (FrameInfo(RequestFrameId.STREAM_ID, b"\0\7"),)


def pair(name: bytes, content: bytes) -> bytes:
    body = name + b"\0" + content + b"\0"
    return len(body).to_bytes(4, "big") + body


def section(*pairs: bytes) -> bytes:
    joined = b"".join(pairs)
    return len(joined).to_bytes(4, "big") + joined


BROKEN = [
    pytest.param(XATTR, b"", Status.XATTR_EINVAL, id="no section at all"),
    pytest.param(XATTR, b"\xff\xff\xff\xff{}", Status.XATTR_EINVAL, id="a total beyond the value"),
    pytest.param(XATTR, section(b"\0\0\0\x09a\0{}\0"), Status.XATTR_EINVAL, id="a pair beyond the total"),
    pytest.param(XATTR, section(pair(b"a", b"{}")[:-1] + b"x"), Status.XATTR_EINVAL, id="a pair without its last zero"),
    pytest.param(XATTR, section(pair(b"", b"{}")), Status.XATTR_EINVAL, id="an attribute without a name"),
    pytest.param(XATTR, section(pair(b"sixteen_bytes_xx", b"{}")), Status.XATTR_EINVAL, id="a name of 16 bytes"),
    pytest.param(XATTR, section(pair(b"a", b"1"), pair(b"a", b"2")), Status.XATTR_EINVAL, id="a name twice"),
    pytest.param(XATTR, section(pair(b"a", b"not json")), Status.XATTR_EINVAL, id="an attribute that is not JSON"),
    pytest.param(XATTR, section(pair(b"a", b"1" * MAX_XATTR_BYTES)), Status.E2BIG, id="more than 1 MiB"),
    pytest.param(XATTR | SNAPPY, deflate(b"\0\0\0\x09{}"), Status.XATTR_EINVAL, id="broken behind compression"),
    pytest.param(SNAPPY, b"", Status.EINVAL, id="nothing compressed"),
    pytest.param(SNAPPY, b"\x08\xff\xff\xff", Status.EINVAL, id="not snappy"),
    pytest.param(SNAPPY, deflate(b"x" * 99)[:-1], Status.EINVAL, id="snappy cut short"),
    pytest.param(SNAPPY, b"\xff\xff\xff\x7f" + b"\0" * 9, Status.EINVAL, id="snappy that claims 256 MiB"),
]


@pytest.mark.parametrize(("datatype", "value", "status"), BROKEN)
@pytest.mark.parametrize("kind", ["mutation", "prepare", "deletion", "expiration"])
def test_a_replica_refuses_an_unreadable_value(
    store: Store, kind: str, datatype: int, value: bytes, status: Status
) -> None:
    talk = Talk(store, consumer_name="replica")
    opaque = talk.open(0)
    fields: Any = {"key": b"\0bad", "value": value, "cas": 7, "datatype": datatype, "opaque": opaque}
    bad = {
        "mutation": DcpMutation(2, 1, **fields),
        "prepare": Prepare(2, 1, durability_level=1, **fields),
        "deletion": DeletionV2(2, 1, **fields),
        "expiration": Expiration(2, 1, **fields),
    }[kind]
    said = talk.say(marker(1, 3, opaque), mutation(1, opaque), bad, mutation(3, opaque))
    assert answers(said) == [(bad.opcode, status, opaque), (Opcode.DCP_MUTATION, Status.ERANGE, opaque)]
    assert talk.vb().high_seqno == 1, "nothing behind it is taken either, or it would be missing for ever"


def test_a_replica_of_the_older_dialect_refuses_it_too(talk: Talk) -> None:
    request = upr(talk)
    talk.say(success(request))
    said = talk.say(
        UprSnapshotMarker(opaque=request.opaque),
        UprMutation(1, 1, key=b"\0bad", value=b"{}", cas=7, datatype=XATTR, opaque=request.opaque),
    )
    assert answers(said) == [(Opcode.DCP_MUTATION, Status.XATTR_EINVAL, request.opaque)]


def test_sound_values_are_taken_as_they_came(talk: Talk) -> None:
    opaque = talk.open(0)
    many = join_xattrs({f"a{n}": b"%d" % n for n in range(200)}, b"{}")
    kept = [
        (XATTR, join_xattrs({"_sync": b"{}", "user": b"[1,2]"}, b"{}")), (XATTR, join_xattrs({}, b"body")),
        (SNAPPY, deflate(b"x" * 5000)), (XATTR | SNAPPY, deflate(join_xattrs({"ñ": b'"\\u00e9"'}, b"x" * 500_000))),
        (XATTR, many),
    ]  # fmt: skip
    sent = [mutation(n, opaque, datatype=datatype, value=value) for n, (datatype, value) in enumerate(kept, 1)]
    assert talk.say(marker(1, len(kept), opaque), *sent) == []
    found = [talk.vb().documents.get_replica(b"k%d" % n, 0) for n in range(1, len(kept) + 1)]
    assert [(each.datatype & ~1, each.value) for each in found] == kept


def test_a_message_with_a_stream_id_is_refused_by_a_consumer(talk: Talk) -> None:
    opaque = talk.open(0)
    said = talk.say(
        SnapshotMarker(1, 3, 1, opaque=opaque, frame_infos=SID), marker(1, 3, opaque), mutation(1, opaque),
        mutation(2, opaque, frame_infos=SID),
    )  # fmt: skip
    assert answers(said) == [
        (Opcode.DCP_SNAPSHOT_MARKER, Status.EINVAL, opaque), (Opcode.DCP_MUTATION, Status.EINVAL, opaque),
    ]  # fmt: skip
    assert talk.vb().high_seqno == 1


def test_a_document_may_have_only_so_many_attributes() -> None:
    pairs = [pair(b"%x" % n, b"1") for n in range(MAX_XATTRS + 1)]
    check_value(section(*pairs[:-1]), XATTR)
    with pytest.raises(InvalidMessage, match="limit") as error:
        check_value(section(*pairs), XATTR)
    assert error.value.status is Status.E2BIG


# ---------------------------------------------------------------------------------------------- one truth

PAIRS = st.tuples(st.binary(min_size=1, max_size=17), st.one_of(st.just(b"{}"), st.just(b'"x"'), st.binary(max_size=6)))
SECTIONS = st.lists(PAIRS, max_size=4).map(lambda found: section(*(pair(*each) for each in found)))
PLAIN = st.one_of(SECTIONS, st.tuples(SECTIONS, st.binary(max_size=8)).map(b"".join), st.binary(max_size=24))


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, SNAPPY, XATTR, SNAPPY | XATTR]), PLAIN, st.integers(-1, 30), st.integers(0, 255)),
        max_size=5,
    )
)
def test_the_bulk_check_and_the_rules_agree_about_every_value(found: list[tuple[int, bytes, int, int]]) -> None:
    """Values are compressed where they say so, and then some have a byte changed."""
    values = []
    for datatype, plain, at, byte in found:
        value = bytearray(deflate(plain) if datatype & SNAPPY else plain)
        if 0 <= at < len(value):
            value[at] = byte
        values.append((datatype, bytes(value)))
    decoder = BulkDecoder(Context(collections=True))
    data = b"".join(mutation(n, 1, datatype=d, value=v).encode() for n, (d, v) in enumerate(values, 1))
    for part in decoder.feed(data):
        assert not part.controls
    broken = ValueChecker().first_broken(decoder.columns, 0, decoder.columns.rows)
    assert (broken.row if broken else -1) == _first_broken(values)


def _first_broken(values: list[tuple[int, bytes]]) -> int:
    for row, (datatype, value) in enumerate(values):
        try:
            check_value(value, datatype)
        except InvalidMessage:
            return row
    return -1
