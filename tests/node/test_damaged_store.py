"""A node whose disk has wrong bits: what clients, consumers, replicas and operators see."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import lmdb
import pytest
from click.testing import CliRunner

from tests.node.raw import ALL, ready
from upriver import testing
from upriver.cli import cli
from upriver.cluster.local import local_cluster
from upriver.errors import Status
from upriver.model import VbucketState, vbucket_of
from upriver.wire.constants import StreamEndStatus
from upriver.wire.messages import cluster, dcp, kv

VBUCKETS = 4
VALUE = b"a value that can be found in a file " * 3


def damage(data: Path, vbucket: int) -> None:
    """Flip a bit in each block of a vbucket of a stopped node."""
    with lmdb.open(str(data / "default"), max_dbs=8) as file, file.begin(write=True) as transaction:
        log = file.open_db(b"log", transaction)
        blocks = [(key, value) for key, value in transaction.cursor(db=log) if key[:2] == vbucket.to_bytes(2, "big")]
        assert blocks
        for key, value in blocks:
            transaction.put(key, value[:99] + bytes([value[99] ^ 1]) + value[100:], db=log)
    (data / "default" / "closed.json").unlink()  # LMDB wrote to the store, not the node


def damage_record(data: Path, vbucket: int) -> None:
    """Flip a bit in the record of a vbucket of a stopped node."""
    with lmdb.open(str(data / "default"), max_dbs=8) as file, file.begin(write=True) as transaction:
        meta, key = file.open_db(b"meta", transaction), b"v" + vbucket.to_bytes(2, "big")
        value = transaction.get(key, db=meta)
        transaction.put(key, value[:99] + bytes([value[99] ^ 1]) + value[100:], db=meta)
    (data / "default" / "closed.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def node() -> Iterator[testing.RunningNode]:
    """A node with documents in each vbucket, damage in vbucket 1, and a damaged record of vbucket 3."""
    with testing.node(vbuckets=VBUCKETS) as made:
        with ready(made.kv_port) as raw:
            for number in range(VBUCKETS):
                for each in range(50):
                    value = b"document of vbucket %d " % number + VALUE
                    assert raw.ask(kv.Set(key=b"k%d" % each, value=value, vbucket=number)).specific == Status.SUCCESS
        made.stop()
        damage(made.data, 1)
        damage_record(made.data, 3)
        made.start()
        yield made


def test_a_request_for_a_damaged_document_is_answered_with_an_error_that_says_where(node: testing.RunningNode):
    with ready(node.kv_port, *ALL) as raw:
        answer = raw.ask(kv.Get(b"\0k7", vbucket=1))
        assert answer.specific == Status.EINTERNAL
        context = json.loads(answer.value)["error"]["context"]
        assert "vbucket 1 is damaged" in context
        assert "data.mdb" in context
        assert raw.ask(kv.Get(b"\0k7", vbucket=2)).value.endswith(VALUE)
    log = node.log.read_text()
    assert "event=vbucket_damaged bucket=default vbucket=1" in log
    assert "Traceback" not in log


def test_a_stream_over_damage_ends_with_a_status_and_the_others_continue(node: testing.RunningNode):
    with ready(node.kv_port) as raw:
        raw.ask(dcp.Open(0, 1, b"reader"))
        ends, keys = {}, {1: 0, 2: 0}
        for number in keys:
            raw.send(dcp.StreamRequest(end_seqno=50, vbucket=number, opaque=number))
        while len(ends) < 2:
            message = raw.message()
            if isinstance(message, dcp.StreamEnd):
                ends[message.opaque] = message.status
            elif isinstance(message, dcp.DcpMutation):
                keys[message.opaque] += 1
        assert ends == {1: StreamEndStatus.BACKFILL_FAIL, 2: StreamEndStatus.OK}
        assert keys == {1: 0, 2: 50}


def test_inspect_names_the_damage_beside_a_running_node(node: testing.RunningNode):
    done = CliRunner().invoke(cli, ["inspect", "--check", str(node.data), "--json"])
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert {(each["bucket"], each["vbucket"]) for each in found["damage"]} == {("default", 1), ("default", 3)}
    assert found["damage"][0]["file"] == str(node.data / "default" / "data.mdb")
    assert "checksum" in found["damage"][0]["what"]
    assert found["checked"]["vbuckets"] == VBUCKETS
    said = CliRunner().invoke(cli, ["inspect", "--check", str(node.data)])
    assert said.exit_code == 1
    assert "bucket default, vbucket 1: the block that ends at seqno" in said.output


def test_a_vbucket_whose_record_is_damaged_answers_with_an_error_until_it_is_created_again(node: testing.RunningNode):
    assert "event=vbucket_damaged bucket=default vbucket=3" in node.log.read_text()
    with ready(node.kv_port, *ALL) as raw:
        active = cluster.SetVbucket(VbucketState.ACTIVE, vbucket=3)
        for request in (kv.Get(b"\0k7", vbucket=3), kv.Set(key=b"\0k7", value=b"", vbucket=3), active):
            answer = raw.ask(request)
            assert answer.specific == Status.EINTERNAL, request
            assert "vbucket 3 is damaged" in json.loads(answer.value)["error"]["context"]
        assert raw.ask(kv.Get(b"\0k7", vbucket=2)).value.endswith(VALUE)
        assert raw.ask(cluster.DeleteVbucket(vbucket=3)).specific == Status.SUCCESS
        assert raw.ask(active).specific == Status.SUCCESS
        assert raw.ask(kv.Get(b"\0k7", vbucket=3)).specific == Status.KEY_ENOENT
    assert "Traceback" not in node.log.read_text()


def test_inspect_finds_nothing_in_a_whole_store_and_refuses_other_directories(tmp_path: Path):
    with testing.node(vbuckets=2, data=tmp_path / "data"):
        pass
    done = CliRunner().invoke(cli, ["inspect", "--check", str(tmp_path / "data")])
    assert (done.exit_code, "nothing damaged" in done.output) == (0, True), done.output
    done = CliRunner().invoke(cli, ["inspect", "--check", str(tmp_path)])
    assert done.exit_code == 1
    assert "is neither the data directory of a node nor that of a bucket" in done.output


def test_a_member_that_cannot_read_a_vbucket_leaves_it_to_a_node_with_a_copy_and_replicates_it_again():
    with local_cluster(2, 1, VBUCKETS, lazy=True) as made:
        state, ports = made.state, [member.kv for member in made.state.members]
        vbucket = next(vb for vb, owners in enumerate(state.owners) if owners == (0, 1))
        with ready(ports[0]) as raw:
            assert raw.ask(kv.Set(key=b"k", value=VALUE, vbucket=vbucket)).specific == Status.SUCCESS
        made.sync()
        broken = made.nodes[0]
        broken.stop()
        damage_record(broken.process.data, vbucket)
        broken.start()
        made.manager.watch()
        with ready(ports[0]) as raw:
            assert raw.ask(kv.Get(b"k", vbucket=vbucket)).specific != Status.SUCCESS
        made.fail_over(0, force=True)
        with ready(ports[1]) as raw:
            assert raw.ask(kv.Get(b"k", vbucket=vbucket)).value == VALUE
        made.rebalance()
        made.sync()
        made.nodes[1].stop()
        made.fail_over(1, force=True)
        with ready(ports[0]) as raw:
            assert raw.ask(kv.Get(b"k", vbucket=vbucket)).value == VALUE
        assert "Traceback" not in broken.process.log.read_text()


def test_a_damaged_replica_takes_everything_from_its_active_again():
    with local_cluster(2, 1, VBUCKETS, lazy=True) as made:
        vbucket = next(vb for vb, owners in enumerate(made.state.owners) if owners == (0, 1))
        keys = [key for key in (b"key-%d" % number for number in range(400)) if vbucket_of(key, VBUCKETS) == vbucket]
        ports = [member.kv for member in made.state.members]
        with ready(ports[0]) as raw:
            for key in keys:
                value = b"document of vbucket %d " % vbucket + VALUE
                assert raw.ask(kv.Set(key=key, value=value, vbucket=vbucket)).specific == Status.SUCCESS
        made.sync()
        replica = made.nodes[1]
        replica.stop()
        damage(replica.process.data, vbucket)
        replica.start()
        made.manager.watch()
        with ready(ports[0]) as raw:  # makes the replica read its data
            assert raw.ask(kv.Set(key=keys[0], value=b"new", vbucket=vbucket)).specific == Status.SUCCESS
        made.sync()
        assert f"event=replica_begins_anew bucket=default vbucket={vbucket}" in replica.process.log.read_text()
        made.nodes[0].stop()
        made.fail_over(0, force=True)
        with ready(ports[1]) as raw:
            assert raw.ask(kv.Get(keys[0], vbucket=vbucket)).value == b"new"
            assert all(raw.ask(kv.Get(key, vbucket=vbucket)).value.endswith(VALUE) for key in keys[1:])
            assert raw.ask(cluster.GetAllVbSeqnos()).specific == Status.SUCCESS
