"""What a consumer does with what arrives: the table of docs/protocol/consumer.md#receiving, the takeover of
docs/protocol/vbuckets.md#takeover, durable writes.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.protocol.consumer_talk import BRANCH, Store, Talk, marker, mutation, success
from tests.protocol.test_consumer_setup import upr
from tests.support.examples import examples
from upriver.errors import Status
from upriver.model import SEQNO_MAX, Datatype, VbucketState
from upriver.protocol.consumer.machine import StateSet, StreamClosed
from upriver.protocol.consumer.records import usual_marker
from upriver.wire import Message, Opcode, OtherResponse, decode
from upriver.wire.constants import MarkerFlag, StreamEndStatus
from upriver.wire.framing import cut_frame
from upriver.wire.messages.dcp import (
    Abort,
    BufferAck,
    Commit,
    DcpDeletion,
    DeletionV2,
    Expiration,
    Prepare,
    SeqnoAcknowledged,
    SeqnoAdvanced,
    SetVbucketState,
    SnapshotMarker,
    SnapshotMarkerV20,
    SnapshotMarkerV22,
    StreamEnd,
    marker_range,
)
from upriver.wire.messages.events import CollectionBegun, SystemEvent
from upriver.wire.messages.upr import (
    UprDeletion,
    UprFlush,
    UprMutation,
    UprSetVbucketState,
    UprSnapshotMarker,
    UprStreamEnd,
)
from upriver.wire.values import deflate, join_xattrs

DISK = MarkerFlag.DISK | MarkerFlag.CHECKPOINT
ACK = MarkerFlag.MEMORY | MarkerFlag.ACK


def answers(said: list[Message]) -> list[tuple[int, int, int]]:
    """Opcode, status and opaque of each response."""
    assert all(isinstance(each, OtherResponse) for each in said), said
    return [(each.to, int(each.status), each.opaque) for each in said if isinstance(each, OtherResponse)]


# ------------------------------------------------------------------------- errors (docs/protocol/consumer.md#receiving)


@pytest.mark.parametrize(("v7", "status"), [(True, Status.DCP_STREAM_NOT_FOUND), (False, Status.KEY_ENOENT)])
def test_messages_for_a_vbucket_without_a_stream(store: Store, v7: bool, status: Status) -> None:
    talk = Talk(store)
    talk.refused_controls = {} if v7 else {"v7_dcp_status_codes": Status.EINVAL}
    talk.open(0)
    said = talk.say(marker(0, 1, 7, vbucket=1), mutation(1, 7, vbucket=1), SeqnoAdvanced(1, vbucket=1, opaque=7))
    opcodes = (Opcode.DCP_SNAPSHOT_MARKER, Opcode.DCP_MUTATION, Opcode.DCP_SEQNO_ADVANCED)
    assert answers(said) == [(opcode, status, 7) for opcode in opcodes]


@pytest.mark.parametrize(("v7", "status"), [(True, Status.OPAQUE_NO_MATCH), (False, Status.KEY_EEXISTS)])
def test_messages_of_another_stream(store: Store, v7: bool, status: Status) -> None:
    talk = Talk(store)
    talk.refused_controls = {} if v7 else {"v7_dcp_status_codes": Status.EINVAL}
    talk.open(0)
    said = talk.say(marker(0, 1, 4242), mutation(1, 4242), DcpDeletion(2, 1, key=b"\0k", opaque=4242))
    assert [status for _, status, _ in answers(said)] == [status] * 3
    assert talk.say(StreamEnd(StreamEndStatus.OK, vbucket=0, opaque=4242)) == []
    assert 0 in talk.machine.streams


def test_seqnos_that_do_not_rise(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 5, opaque), mutation(3, opaque))
    said = talk.say(mutation(3, opaque), DeletionV2(2, 1, key=b"\0k", opaque=opaque))
    assert answers(said) == [
        (Opcode.DCP_MUTATION, Status.ERANGE, opaque), (Opcode.DCP_DELETION, Status.ERANGE, opaque),
    ]  # fmt: skip
    assert talk.say(mutation(4, opaque), mutation(5, opaque)) == []
    assert talk.vb().high_seqno == 5


@pytest.mark.parametrize("before_any_marker", [True, False])
def test_nothing_is_taken_behind_a_document_outside_its_snapshot(talk: Talk, before_any_marker: bool) -> None:
    """The replica would miss that document for ever, because it resumes after its high seqno."""
    opaque = talk.open(0)
    seqno = 1
    if not before_any_marker:
        talk.say(marker(0, 5, opaque), mutation(3, opaque))
        seqno = 6
    said = talk.say(mutation(seqno, opaque), marker(7, 9, opaque), mutation(8, opaque), prepare(9, opaque))
    assert answers(said) == [
        (Opcode.DCP_MUTATION, Status.ERANGE, opaque), (Opcode.DCP_SNAPSHOT_MARKER, Status.ERANGE, opaque),
        (Opcode.DCP_MUTATION, Status.ERANGE, opaque), (Opcode.DCP_PREPARE, Status.ERANGE, opaque),
    ]  # fmt: skip
    assert talk.vb().high_seqno == (0 if before_any_marker else 3)


def test_nothing_is_taken_behind_what_came_while_the_vbucket_was_no_replica(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 9, opaque), mutation(1, opaque))
    talk.store.bucket.set_state(0, VbucketState.DEAD)
    assert answers(talk.say(mutation(2, opaque)))[0][1] == Status.NOT_MY_VBUCKET
    assert answers(talk.say(mutation(3, opaque)))[0][1] == Status.NOT_MY_VBUCKET
    talk.store.bucket.set_state(0, VbucketState.REPLICA)
    assert answers(talk.say(mutation(4, opaque), marker(10, 12, opaque))) == [
        (Opcode.DCP_MUTATION, Status.ERANGE, opaque), (Opcode.DCP_SNAPSHOT_MARKER, Status.ERANGE, opaque),
    ]  # fmt: skip
    assert talk.vb().high_seqno == 1


def test_markers_that_lie_behind_or_are_upside_down(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 5, opaque), mutation(5, opaque))
    assert answers(talk.say(marker(1, 4, opaque)))[0][1] == Status.ERANGE
    upside_down = bytearray(marker(6, 9, opaque).encode())
    upside_down[24:40] = upside_down[32:40] + upside_down[24:32]
    assert answers(talk.say(bytes(upside_down)))[0][1] == Status.EINVAL


def test_documents_for_a_vbucket_that_is_no_replica_any_more(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 9, opaque), mutation(1, opaque))
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    said = talk.say(mutation(2, opaque), Expiration(3, 1, 0, key=b"\0k", opaque=opaque), marker(10, 12, opaque))
    assert answers(said) == [
        (Opcode.DCP_MUTATION, Status.NOT_MY_VBUCKET, opaque), (Opcode.DCP_EXPIRATION, Status.NOT_MY_VBUCKET, opaque),
        (Opcode.DCP_SNAPSHOT_MARKER, Status.NOT_MY_VBUCKET, opaque),
    ]  # fmt: skip
    assert talk.vb().high_seqno == 1


def test_a_vbucket_that_an_administrator_promotes_takes_nothing_more_and_says_nothing(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 9, opaque), mutation(1, opaque))
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    talk.machine.registry.kill(0)
    assert talk.say(mutation(2, opaque)) == []
    assert talk.say(StreamEnd(StreamEndStatus.STATE_CHANGED, vbucket=0, opaque=opaque)) == []


@pytest.mark.parametrize("cas", [0, SEQNO_MAX])
def test_a_document_without_a_usable_cas_gets_one(talk: Talk, cas: int) -> None:
    opaque = talk.open(0)
    assert talk.say(marker(0, 2, opaque), mutation(1, opaque), mutation(2, opaque, cas=cas)) == []
    stored = talk.vb().documents.get_replica(b"k2").cas
    assert stored not in (0, SEQNO_MAX)
    assert stored > talk.vb().documents.get_replica(b"k1").cas


def test_the_deletion_of_a_key_that_is_not_here_leaves_a_tombstone(talk: Talk) -> None:
    opaque = talk.open(0)
    said = talk.say(marker(0, 1, opaque), DeletionV2(1, 7, 1234, key=b"\0gone", cas=5, opaque=opaque))
    assert said == []
    assert (talk.vb().high_seqno, talk.vb().tombstone_count) == (1, 1)


@pytest.mark.parametrize(
    ("datatype", "value", "kept"),
    [
        (0, b"a body", (0, b"")),
        (Datatype.SNAPPY, deflate(b"a body"), (0, b"")),
        (Datatype.XATTR, join_xattrs({"_sync": b"{}"}), (Datatype.XATTR, join_xattrs({"_sync": b"{}"}))),
        (Datatype.XATTR, join_xattrs({"_sync": b"{}"}, b"a body"), (Datatype.XATTR, join_xattrs({"_sync": b"{}"}))),
        (
            Datatype.XATTR | Datatype.JSON | Datatype.SNAPPY,
            deflate(join_xattrs({"_sync": b"{}"}, b"[]")),
            (Datatype.XATTR, join_xattrs({"_sync": b"{}"})),
        ),
    ],
)
@pytest.mark.parametrize("kind", [DeletionV2, Expiration, Prepare])
def test_a_tombstone_keeps_xattrs_but_no_body(durable: Talk, kind: Any, datatype: int, value: bytes, kept: Any) -> None:
    """Between other documents of the same snapshot, which are as they came."""
    opaque = durable.open(0)
    fields: Any = {"key": b"\0gone", "value": value, "cas": 7, "datatype": int(datatype), "opaque": opaque}
    removal = Prepare(2, 2, deleted=1, durability_level=1, **fields) if kind is Prepare else kind(2, 2, **fields)
    said = durable.say(marker(1, 3, opaque), mutation(1, opaque), removal, mutation(3, opaque))
    assert all(isinstance(each, SeqnoAcknowledged) for each in said)
    vb = durable.store.bucket.set_state(0, VbucketState.ACTIVE)
    found = vb.durable.get_prepared(b"gone") if kind is Prepare else vb.documents.get_meta(b"gone")
    assert (found.datatype, found.value) == kept
    assert [vb.documents.get(key).value for key in (b"k1", b"k3")] == [b'{"n":1}', b'{"n":3}']


def test_a_replica_that_becomes_active_knows_that_documents_have_xattrs(talk: Talk) -> None:
    """A plain SET must look for xattrs to keep, but most buckets never have any."""
    opaque = talk.open(0)
    talk.say(marker(1, 1, opaque), mutation(1, opaque))
    assert not hasattr(talk.store, "has_xattrs")
    value = join_xattrs({"_sync": b"{}"}, b"{}")
    talk.say(marker(2, 2, opaque), mutation(2, opaque, value=value, datatype=int(Datatype.XATTR | Datatype.JSON)))
    assert talk.store.has_xattrs


@given(
    st.sampled_from((SnapshotMarker, SnapshotMarkerV20, SnapshotMarkerV22)), st.integers(0, SEQNO_MAX),
    st.integers(0, SEQNO_MAX), st.integers(0, 0xFFFF_FFFF), st.integers(0, 255), st.integers(0, 5),
)  # fmt: skip
def test_the_short_way_to_read_a_marker_agrees_with_the_long_one(
    kind: Any, start: int, end: int, flags: int, byte: int, at: int
) -> None:
    """Also if a header byte is unusual: then the fast path leaves the marker to the decoder."""
    more = {SnapshotMarker: (), SnapshotMarkerV20: (end, 0), SnapshotMarkerV22: (end, 0, start, 0)}[kind]
    version = {SnapshotMarker: (), SnapshotMarkerV20: (0,), SnapshotMarkerV22: (2,)}[kind]
    start, end = sorted((start, end))
    frame = kind(*version, start, end, flags, *more, vbucket=5, opaque=6).encode()
    for data in (frame, frame[:at] + bytes((byte,)) + frame[at + 1 :]):
        found = usual_marker(memoryview(data))
        if found is not None:
            message: Any = decode(cut_frame(data))
            assert found == (5, 6, *marker_range(message), getattr(message, "purge_seqno", 0))
            assert data == frame
    assert usual_marker(memoryview(frame))


def test_a_stream_end_removes_the_stream_without_a_word(talk: Talk) -> None:
    opaque = talk.open(0)
    assert talk.say(StreamEnd(StreamEndStatus.STATE_CHANGED, vbucket=0, opaque=opaque)) == []
    assert talk.events == [StreamClosed(0, StreamEndStatus.STATE_CHANGED)]
    assert answers(talk.say(marker(0, 1, opaque)))[0][1] == Status.DCP_STREAM_NOT_FOUND


# ---------------------------------------------------------------------------------------------- flow control


def acknowledged(said: list[Message]) -> int:
    return sum(each.bytes for each in said if isinstance(each, BufferAck))


def test_every_byte_is_acknowledged_also_of_messages_that_were_refused_or_swallowed(store: Store) -> None:
    talk = Talk(store, window=100)
    opaque = talk.open(0)
    messages: list[Any] = [
        marker(0, 9, opaque), mutation(1, opaque), mutation(1, opaque), mutation(2, 4242), marker(0, 1, 7, vbucket=1),
        Prepare(2, 1, key=b"\0p", cas=9, durability_level=1, opaque=opaque), b"\x80\x57" + bytes(22),
    ]  # fmt: skip
    sizes = [len(each if isinstance(each, bytes) else each.encode()) for each in messages]
    said: list[Message] = []
    for each in messages:
        talk.now += 10
        said += talk.say(each)
    assert acknowledged(said) == sum(sizes) + 2  # both sides count a prepare two bytes too long


def test_under_memory_pressure_documents_are_taken_and_acknowledgements_withheld(store: Store) -> None:
    talk = Talk(store, window=100)
    opaque = talk.open(0)
    talk.now = 10.0
    store.under_pressure = True
    said = talk.say(marker(0, 9, opaque), mutation(1, opaque))
    assert acknowledged(said) == 0
    assert talk.vb().high_seqno == 1
    assert talk.machine.backoffs > 0
    store.under_pressure = False
    talk.machine.wake(11.0)
    expected = len(marker(0, 9, opaque).encode()) + len(mutation(1, opaque).encode())
    assert acknowledged(talk.heard()) == expected


# ------------------------------------------------------------------------ takeover (docs/protocol/vbuckets.md#takeover)


def test_the_takeover_sequence(talk: Talk) -> None:
    opaque = talk.open(0, flags=1)
    assert talk.say(marker(0, 2, opaque, DISK), mutation(1, opaque), mutation(2, opaque)) == []
    assert talk.say(marker(3, 4, opaque, ACK), mutation(3, opaque)) == []  # not before it is complete
    assert answers(talk.say(mutation(4, opaque))) == [(Opcode.DCP_SNAPSHOT_MARKER, 0, opaque)]
    said = talk.say(SetVbucketState(VbucketState.PENDING, vbucket=0, opaque=opaque))
    assert answers(said) == [(Opcode.DCP_SET_VBUCKET_STATE, 0, opaque)]
    assert talk.vb().state is VbucketState.PENDING
    said = talk.say(marker(5, 5, opaque, ACK), mutation(5, opaque))
    assert answers(said) == [(Opcode.DCP_SNAPSHOT_MARKER, 0, opaque)]
    said = talk.say(SetVbucketState(VbucketState.ACTIVE, vbucket=0, opaque=opaque))
    assert answers(said) == [(Opcode.DCP_SET_VBUCKET_STATE, 0, opaque)]
    assert talk.vb().state is VbucketState.ACTIVE
    assert [tuple(entry) for entry in talk.vb().failover_log] == [(BRANCH, 0)]  # a takeover is no new branch
    assert talk.say(StreamEnd(StreamEndStatus.OK, vbucket=0, opaque=opaque)) == []
    assert talk.events == [StateSet(0, VbucketState.PENDING), StateSet(0, VbucketState.ACTIVE), StreamClosed(0, 0)]


def test_a_snapshot_that_ends_by_seqno_advanced_is_confirmed_too(talk: Talk) -> None:
    opaque = talk.open(0, flags=1)
    talk.say(marker(0, 4, opaque, ACK), mutation(1, opaque))
    assert answers(talk.say(SeqnoAdvanced(4, vbucket=0, opaque=opaque))) == [(Opcode.DCP_SNAPSHOT_MARKER, 0, opaque)]


def test_an_unknown_state_is_malformed(talk: Talk) -> None:
    opaque = talk.open(0)
    frame = bytearray(SetVbucketState(VbucketState.ACTIVE, vbucket=0, opaque=opaque).encode())
    frame[-1] = 9
    assert answers(talk.say(bytes(frame)))[0][1] == Status.EINVAL
    assert talk.vb().state is VbucketState.REPLICA


def test_a_promotion_in_the_middle_of_a_snapshot_branches_where_the_last_one_ended(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 3, opaque), mutation(1, opaque), mutation(3, opaque))
    talk.say(marker(4, 9, opaque, 5), mutation(5, opaque), mutation(7, opaque))
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    log = [tuple(entry) for entry in talk.vb().failover_log]
    assert (log[0][1], log[1:]) == (3, [(BRANCH, 0)])
    assert talk.vb().high_seqno == 7


# ---------------------------------------------------------------------------------------------- durable writes


def prepare(seqno: int, opaque: int, level: int = 1, key: bytes = b"d", **fields: Any) -> Prepare:
    return Prepare(
        seqno, 1, key=b"\0" + key, value=b"[1]", durability_level=level, opaque=opaque, **{"cas": 77, **fields}
    )  # fmt: skip


@pytest.fixture
def durable(store: Store) -> Talk:
    return Talk(store, consumer_name="me")


def test_prepares_are_acknowledged_only_when_their_snapshot_is_complete(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 3, opaque), prepare(1, opaque), mutation(2, opaque))
    assert durable.machine.take_prepared() == []
    durable.say(mutation(3, opaque))
    assert durable.machine.take_prepared() == [(0, 1, 1)]
    durable.machine.acknowledge_prepares(0, 1)
    (ack,) = durable.heard()
    assert isinstance(ack, SeqnoAcknowledged)
    assert (ack.prepared_seqno, ack.opaque, ack.vbucket) == (1, opaque, 0)


def test_what_was_prepared_before_the_connection_broke_is_acknowledged_on_the_next(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 1, opaque), prepare(1, opaque))
    durable.machine.receive_eof()
    again = Talk(durable.store, consumer_name="me")
    again.say(success(again.add()))
    assert again.machine.take_prepared() == [(0, 1, 3)]


def test_a_commit_makes_the_prepared_document_current_with_its_own_seqno(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 2, opaque), prepare(1, opaque))
    assert durable.say(Commit(1, 2, b"\0d", vbucket=0, opaque=opaque)) == []
    document = durable.vb().documents.get_replica(b"d")
    assert (document.value, document.cas, document.seqno, document.rev_seqno) == (b"[1]", 77, 2, 1)


def test_a_prepared_deletion_deletes_when_it_is_committed(durable: Talk) -> None:
    opaque = durable.open(0)
    removal = prepare(2, opaque, deleted=1, expiry=1_234_567_890)  # which is when the active deleted it
    durable.say(marker(0, 3, opaque), mutation(1, opaque, b"d"), removal)
    durable.say(Commit(2, 3, b"\0d", vbucket=0, opaque=opaque))
    assert (durable.vb().item_count, durable.vb().tombstone_count) == (0, 1)
    tombstone = durable.store.bucket.set_state(0, VbucketState.ACTIVE).documents.get_meta(b"d")
    assert tombstone.delete_time == 1_234_567_890


def test_a_prepare_without_a_usable_cas_gets_one(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 2, opaque), mutation(1, opaque, b"d"), prepare(2, opaque, cas=SEQNO_MAX))
    assert 1001 < durable.vb().durable.get_prepared(b"d").cas < SEQNO_MAX


def test_an_abort_leaves_what_was_there(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 3, opaque), mutation(1, opaque, b"d"), prepare(2, opaque))
    assert durable.say(Abort(2, 3, b"\0d", vbucket=0, opaque=opaque)) == []
    assert durable.vb().documents.get_replica(b"d").seqno == 1
    assert durable.vb().pending == {}


@pytest.mark.parametrize("completion", [Commit(9, 10, b"\0d"), Abort(9, 10, b"\0d")], ids=["commit", "abort"])
def test_the_end_of_a_write_that_was_never_prepared_is_refused(durable: Talk, completion: Any) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 20, opaque))
    completion.opaque = opaque
    assert answers(durable.say(completion)) == [(completion.opcode, Status.KEY_ENOENT, opaque)]


def test_a_disk_snapshot_may_have_an_abort_without_its_prepare(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(SnapshotMarkerV22(2, 0, 5, DISK, 5, 5, 0, 5, vbucket=0, opaque=opaque))
    assert durable.say(Abort(4, 5, b"\0d", vbucket=0, opaque=opaque)) == []
    assert durable.vb().high_seqno == 5


def test_a_prepare_is_settled_by_a_later_document_of_its_key_in_a_disk_snapshot(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(SnapshotMarkerV22(2, 0, 9, DISK, 9, 4, 0, 4, vbucket=0, opaque=opaque))
    durable.say(prepare(4, opaque), prepare(5, opaque, key=b"open"), mutation(9, opaque, b"d"))
    assert set(durable.vb().pending) == {b"\0open"}
    durable.store.bucket.set_state(0, VbucketState.ACTIVE)
    assert durable.vb().documents.get(b"d").seqno == 9


def test_the_level_and_the_cas_of_a_prepare_are_checked(durable: Talk) -> None:
    opaque = durable.open(0)
    durable.say(marker(0, 9, opaque))
    good = prepare(1, opaque).encode()
    assert durable.say(good) == []
    level_4 = good[:54] + b"\x04" + good[55:]
    without_cas = good[:16] + bytes(8) + good[24:]
    for bad in (level_4, without_cas):
        assert answers(durable.say(bad)) == [(Opcode.DCP_PREPARE, Status.EINVAL, opaque)]
    assert answers(durable.say(prepare(2, opaque))) == [(Opcode.DCP_PREPARE, Status.ERANGE, opaque)]


# ---------------------------------------------------------------------------------------------- faithfulness


def test_documents_are_stored_as_they_came(talk: Talk) -> None:
    opaque = talk.open(0)
    xattrs = join_xattrs({"_sync": b'{"r":1}', "mine": b"2"}, b'{"a":1}')
    packed = deflate(b'{"big":"' + b"x" * 200 + b'"}')
    talk.say(
        marker(0, 4, opaque),
        mutation(1, opaque, b"a", flags=0xDEADBEEF, expiry=2_000_000_000, rev_seqno=17, datatype=Datatype.JSON),
        mutation(2, opaque, b"b", value=xattrs, datatype=Datatype.XATTR | Datatype.JSON),
        mutation(3, opaque, b"c", value=packed, datatype=Datatype.SNAPPY | Datatype.JSON),
        mutation(4, opaque, b"d", value=b"", datatype=0),
    )
    a, b, c, d = (talk.vb().documents.get_replica(key) for key in (b"a", b"b", b"c", b"d"))
    assert (a.flags, a.expiry, a.rev_seqno, a.cas, a.seqno, a.datatype) == (0xDEADBEEF, 2_000_000_000, 17, 1001, 1, 1)
    assert (b.value, b.datatype) == (xattrs, Datatype.XATTR | Datatype.JSON)
    assert (c.value, c.datatype) == (packed, Datatype.SNAPPY | Datatype.JSON)
    assert (d.value, d.datatype) == (b"", 0)


def test_an_expiration_stays_one_and_a_tombstone_keeps_its_xattrs_and_its_time(talk: Talk) -> None:
    opaque = talk.open(0)
    kept = join_xattrs({"_sync": b"1"}, b"")
    talk.say(
        marker(0, 2, opaque),
        Expiration(1, 3, 1111, key=b"\0e", cas=5, opaque=opaque),
        DeletionV2(2, 4, 2222, key=b"\0x", value=kept, datatype=Datatype.XATTR, cas=6, opaque=opaque),
    )
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    e, x = talk.vb().documents.get_meta(b"e"), talk.vb().documents.get_meta(b"x")
    assert (e.expired, e.delete_time, e.rev_seqno) == (True, 1111, 3)
    assert (x.expired, x.delete_time, x.value) == (False, 2222, kept)


@pytest.mark.parametrize("flat", [True, False], ids=["flatbuffers", "plain"])
def test_collections_arrive_as_system_events(talk: Talk, flat: bool) -> None:
    opaque = talk.open(0)
    begun = CollectionBegun("fruit", 1, 0, 9, max_ttl=60)
    event = SystemEvent.of(1, begun, flat=flat, vbucket=0, opaque=opaque)
    assert talk.say(marker(0, 2, opaque), event, mutation(2, opaque)) == []
    assert 9 in talk.vb().collection_ids()
    assert talk.vb().manifest_uid == 1


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(cuts=st.lists(st.integers(1, 400), max_size=40))
def test_it_does_not_matter_how_the_bytes_are_cut(tmp_path_factory: pytest.TempPathFactory, cuts: list[int]) -> None:
    store = Store(tmp_path_factory.mktemp("cut") / "bucket")
    talk = Talk(store, consumer_name="me")
    opaque = talk.open(0)
    data = b"".join(
        message.encode()
        for message in (
            marker(0, 4, opaque), mutation(1, opaque), prepare(2, opaque), Commit(2, 3, b"\0d", opaque=opaque),
            mutation(4, opaque), marker(5, 6, opaque, ACK), mutation(6, opaque), mutation(6, opaque),
            StreamEnd(StreamEndStatus.OK, vbucket=0, opaque=opaque),
        )
    )  # fmt: skip
    said: list[Message] = []
    for cut in (*cuts, len(data)):
        piece, data = data[:cut], data[cut:]
        said += talk.say(piece) if piece else []
    assert answers(said) == [(Opcode.DCP_SNAPSHOT_MARKER, 0, opaque), (Opcode.DCP_MUTATION, Status.ERANGE, opaque)]
    assert (talk.vb().high_seqno, talk.vb().item_count) == (6, 4)
    store.bucket.close()


# ---------------------------------------------------------------------------------------------- the older dialect


def upr_mutation(seqno: int, opaque: int, **fields: Any) -> UprMutation:
    return UprMutation(seqno, 1, key=b"\0k%d" % seqno, value=b"v", cas=seqno, opaque=opaque, **fields)


def test_a_takeover_in_the_older_dialect(talk: Talk) -> None:
    request = upr(talk)
    talk.say(success(request))
    opaque = request.opaque
    assert talk.say(UprSnapshotMarker(opaque=opaque), upr_mutation(1, opaque), upr_mutation(2, opaque)) == []
    assert talk.say(UprSetVbucketState(2, opaque=opaque)) == []  # 2 is pending there, and nobody answers
    assert talk.vb().state is VbucketState.PENDING
    assert talk.say(UprSnapshotMarker(opaque=opaque), upr_mutation(3, opaque)) == []
    assert talk.say(UprSetVbucketState(1, opaque=opaque), UprStreamEnd(0, opaque=opaque)) == []
    assert talk.vb().state is VbucketState.ACTIVE
    assert talk.vb().item_count == 3
    assert [tuple(entry) for entry in talk.vb().failover_log] == [(BRANCH, 0)]


def test_a_bare_marker_completes_what_came_before_it_and_nothing_else(talk: Talk) -> None:
    request = upr(talk)
    talk.say(success(request))
    opaque = request.opaque
    talk.say(UprSnapshotMarker(opaque=opaque), upr_mutation(1, opaque), upr_mutation(2, opaque))
    talk.say(UprSnapshotMarker(opaque=opaque), upr_mutation(3, opaque))
    talk.say(upr_mutation(4, opaque))
    assert not talk.vb().snapshot_complete
    talk.store.bucket.set_state(0, VbucketState.ACTIVE)
    assert talk.vb().failover_log.entries[0].seqno == 2


def test_flush_empties_the_vbucket_and_the_stream_goes_on(talk: Talk) -> None:
    request = upr(talk)
    talk.say(success(request))
    opaque = request.opaque
    talk.say(UprSnapshotMarker(opaque=opaque), upr_mutation(1, opaque), upr_mutation(2, opaque))
    assert talk.say(UprFlush(opaque=opaque)) == []
    assert talk.vb().item_count == 0
    assert talk.say(UprSnapshotMarker(opaque=opaque), upr_mutation(1, opaque)) == []
    assert talk.vb().item_count == 1


def test_flush_is_unknown_in_the_newer_dialect(talk: Talk) -> None:
    opaque = talk.open(0)
    talk.say(marker(0, 1, opaque), mutation(1, opaque))
    said = talk.say(UprFlush(vbucket=0, opaque=opaque))
    assert answers(said) == [(Opcode.DCP_FLUSH, Status.NOT_SUPPORTED, opaque)]
    assert talk.vb().item_count == 1


def test_extended_metadata_is_not_part_of_the_document(talk: Talk) -> None:
    request = upr(talk)
    talk.say(success(request))
    opaque = request.opaque
    talk.say(UprSnapshotMarker(opaque=opaque))
    talk.say(UprMutation(1, 1, nmeta=4, key=b"\0k", value=b"bodymeta", cas=9, opaque=opaque))
    assert talk.vb().documents.get_replica(b"k").value == b"body"
    talk.say(UprDeletion(2, 2, nmeta=4, key=b"\0k", value=b"meta", cas=10, opaque=opaque))
    assert (talk.vb().high_seqno, talk.vb().item_count) == (2, 0)


def test_a_stream_knows_the_snapshot_that_it_receives(talk: Talk) -> None:
    """Its statistics show it as ``cur_snapshot_start`` and ``cur_snapshot_end``."""
    opaque = talk.open(0)
    talk.say(marker(0, 3, opaque), mutation(3, opaque), marker(4, 9, opaque))
    stream = talk.machine.streams[0]
    assert (stream.snapshot_start, stream.snapshot_end) == (4, 9)
