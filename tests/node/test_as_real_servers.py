"""Details of real servers that some clients rely on (docs/protocol/clients.md#servers)."""

from __future__ import annotations

import json
from collections.abc import Callable
from struct import pack

import pytest

from tests.node.raw import ALL, BASIC, Raw, frame, ready
from tests.node.streaming import OK, manifest, only, producer, stream, to_disk, whole, write
from tests.support.node_thread import NodeThread
from upriver.errors import Status
from upriver.model import Datatype, VbucketState
from upriver.wire import Opcode
from upriver.wire.constants import MarkerFlag, OpenFlag, PathFlag, StreamEndStatus
from upriver.wire.messages import cluster, dcp, kv
from upriver.wire.messages.subdoc import SubdocMutation

MakeNode = Callable[..., NodeThread]


@pytest.fixture
def raw(node: NodeThread) -> Raw:
    return ready(node.port, *BASIC)


def compact(raw: Raw, vbucket: int, *, before_s: int, before_seqno: int, drop_deletes: bool = False) -> None:
    extras = pack(">QQBBHI", before_s, before_seqno, drop_deletes, 0, 0, 0)
    assert raw.ask(frame(Opcode.COMPACT_DB, extras=extras, vbucket=vbucket)).specific == OK


def deleted(node: NodeThread, raw: Raw, vbucket: int) -> int:
    """Write tombstones and then a document, to disk; returns how many tombstones."""
    write(node, vbucket, b"a", b"b", b"c")
    for key in (b"a", b"b"):
        raw.ask(kv.Delete(key, vbucket=vbucket))
    write(node, vbucket, b"last")
    to_disk(node)
    return int(node.vbucket(vbucket).tombstone_count)


def test_a_compaction_without_a_seqno_purges_all_that_is_old_enough(node: NodeThread, raw: Raw) -> None:
    assert deleted(node, raw, 3) == 2
    compact(raw, 3, before_s=2**33, before_seqno=0)
    assert node.vbucket(3).tombstone_count == 0


def test_a_compaction_that_drops_deletes_ignores_the_seqno(node: NodeThread, raw: Raw) -> None:
    assert deleted(node, raw, 4) == 2
    compact(raw, 4, before_s=0, before_seqno=1, drop_deletes=True)
    assert node.vbucket(4).tombstone_count == 0


def test_a_dcp_connection_lists_no_mechanisms(node: NodeThread) -> None:
    with producer(node) as streams:
        assert streams.ask(frame(Opcode.SASL_LIST_MECHS)).specific == Status.NOT_SUPPORTED


def test_the_expiry_opcode_can_be_switched_off(node: NodeThread) -> None:
    with producer(node, flags=OpenFlag.INCLUDE_DELETE_TIMES) as streams:
        for value in (b"true", b"false", b"nonsense"):
            assert streams.ask(dcp.DcpControl(b"enable_expiry_opcode", value)).specific == OK


def test_not_my_vbucket_comes_with_a_map_that_says_it_is_json(node: NodeThread) -> None:
    with ready(node.port, *BASIC) as client:
        answer = client.ask(kv.Get(b"k", vbucket=4000))
        assert (answer.specific, answer.datatype) == (Status.NOT_MY_VBUCKET, Datatype.JSON)
        assert json.loads(answer.value)["name"] == "default"


def test_a_scope_can_be_combined_with_sync_writes_and_a_list_of_collections_cannot(make_node: MakeNode) -> None:
    node = make_node()
    with ready(node.port, *ALL) as client:
        assert client.ask(cluster.SetManifest(manifest(1, (0x8, "a")))).specific == OK
    with producer(node, enable_sync_writes="true") as streams:
        asked = {b'{"scope":"8"}': OK, b'{"collections":["8"]}': Status.NOT_SUPPORTED}
        for vbucket, (value, status) in enumerate(asked.items()):
            assert streams.ask(dcp.StreamRequest(value=value, vbucket=vbucket)).specific == status


def test_a_filter_without_any_collection_is_granted_and_then_empty(node: NodeThread) -> None:
    write(node, 5, b"a")
    with producer(node) as streams:
        for vbucket in (5, 6):  # one with documents, and an empty one
            [end] = stream(streams, vbucket, value=b'{"collections":[]}')
            assert end.status == StreamEndStatus.FILTER_EMPTY


def test_a_document_that_kept_xattrs_when_deleted_does_not_raise_the_next_revision(make_node: MakeNode) -> None:
    node = make_node()
    with ready(node.port, *BASIC) as client:
        upsert = SubdocMutation.under(Opcode.SUBDOC_DICT_UPSERT)
        client.ask(kv.Set(0, 0, b"a", b"{}"))
        for value in (b"1", b"2", b"3"):
            assert client.ask(upsert(2, PathFlag.XATTR, key=b"a", value=b"_s" + value)).specific == OK
        client.ask(kv.Delete(b"a"))
        client.ask(kv.Set(0, 0, b"b", b"{}"))
        client.ask(kv.Delete(b"b"))
        client.ask(kv.Set(0, 0, b"c", b"{}"))
        revisions = [node.vbucket(0).documents.get_meta(key, 0).rev_seqno for key in (b"a", b"b", b"c")]
    assert revisions == [5, 2, 3]


def test_a_vbucket_that_was_dead_begins_with_one_snapshot_from_disk(make_node: MakeNode) -> None:
    node = make_node()
    write(node, 2, b"a", b"b")
    with ready(node.port, *BASIC) as client:
        for state in (VbucketState.DEAD, VbucketState.ACTIVE):
            assert client.ask(frame(Opcode.SET_VBUCKET, extras=bytes((state,)), vbucket=2)).specific == OK
    with producer(node) as streams:
        found = whole(node, streams, 2)
    assert [(m.start_seqno, m.end_seqno, m.flags) for m in only(found, dcp.SnapshotMarker)] == [
        (0, 2, MarkerFlag.DISK | MarkerFlag.CHECKPOINT)
    ]


def test_takeover_statistics_are_complete_for_a_connection_that_does_not_exist(node: NodeThread) -> None:
    with ready(node.port, *BASIC) as client:
        client.send(frame(Opcode.STAT, key=b"dcp-vbtakeover 0 nobody"))
        names = set()
        while (answer := client.receive()).key:
            names.add(answer.key)
    assert {b"status", b"estimate", b"backfillRemaining", b"vb_items", b"chk_items", b"on_disk_deletes"} <= names
