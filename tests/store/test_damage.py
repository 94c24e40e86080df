"""Flipped bits: an error names vbucket and file, or there is no harm; data is never silently wrong or missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import numpy as np
import pytest

from tests.store.old_formats import make_old
from tests.store.store_support import SMALL, changes, open_bucket
from upriver.errors import CorruptStore, DamagedVbucket, Status, StatusError
from upriver.model import VbucketState
from upriver.store.disk.kernels.checksum import checksum, copy_checked
from upriver.store.index import keyindex
from upriver.store.upkeep.check import check_bucket

KEYS = [b"document-%d" % number for number in range(900)]


@pytest.mark.parametrize("seed", [1, 2])
def test_every_flipped_bit_is_noticed_or_harmless(tmp_path: Path, seed: int):
    command = [sys.executable, "-m", "tests.store.flipped_bits", str(tmp_path), str(seed), "120"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parents[2])
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    came = [line["came"] for line in lines if "came" in line]
    assert [each for each in came if each.startswith("WRONG")] == []
    assert sum(each != "harmless" for each in came) > len(came) // 4


@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, 127, 128, 129, 300, 1000])
def test_the_checksum_detects_every_flipped_bit(size: int):
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before = checksum(data, 0, size, np.uint64(7))
    for at in range(size * 8):
        data[at // 8] ^= 1 << at % 8
        assert checksum(data, 0, size, np.uint64(7)) != before
        data[at // 8] ^= 1 << at % 8
    copy = np.zeros(size + 3, np.uint8)
    assert copy_checked(data, 0, size, np.uint64(7), copy, 3) == before != checksum(data, 0, size, np.uint64(8))
    assert (copy[3:] == data).all()


def test_the_checksum_is_the_same_on_every_machine():
    data = np.arange(1000, dtype=np.uint64).view(np.uint8)
    found = [int(checksum(data, at, 1000 + at, np.uint64(at))) for at in (0, 1)]
    assert found == [0xD306178BB4F27320, 0x1F77DC2F4A2CC913]


def fill(path: Path) -> None:
    """Three vbuckets with several blocks, dead versions and key tables."""
    with open_bucket(path) as bucket:
        for number in range(3):
            vb = bucket.set_state(number, VbucketState.ACTIVE)
            for value in (b"first", b"second"):
                vb.bulk.set_many(KEYS, [value * 10] * len(KEYS))
                bucket.flush()


Which = Callable[[list[bytes]], bytes]


def change(path: Path, tree: bytes, which: Which, how: Callable[[bytes], bytes | None]) -> None:
    """Change an entry as a disk defect would, or delete it."""
    with lmdb.open(str(path), max_dbs=8) as file, file.begin(write=True) as transaction:
        database = file.open_db(tree, transaction)
        key = which([bytes(key) for key, _ in transaction.cursor(db=database)])
        value = how(bytes(transaction.get(key, db=database)))
        if value is None:
            transaction.delete(key, db=database)
        else:
            transaction.put(key, value, db=database)
    (path / "closed.json").unlink()  # the file was changed behind the store's back


def of(vbucket: int, at: int) -> Which:
    return lambda keys: [key for key in keys if key[:2] == vbucket.to_bytes(2, "big")][at]


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda value: value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :]


def gone(value: bytes) -> None:
    return None


DAMAGE = [
    pytest.param(b"log", 3, flipped(500), "does not match its checksum", id="a record changed"),
    pytest.param(b"log", 3, flipped(8), "does not match its checksum", id="a block's head changed"),
    pytest.param(b"log", 3, flipped(40), "length", id="a block of another length"),
    pytest.param(b"log", 3, lambda value: value[:-8], "length", id="a block cut short"),
    pytest.param(b"log", 0, gone, "missing", id="the first block missing"),
    pytest.param(b"log", 3, gone, "missing", id="a block missing"),
    pytest.param(b"log", -1, gone, "missing|not in the log", id="the last block missing"),
    pytest.param(b"dead", 0, flipped(30), "does not match its checksum", id="a dead list changed"),
    pytest.param(b"dead", 0, gone, "listed as replaced", id="a dead list missing"),
    pytest.param(b"index", 0, flipped(700), "key table .* does not match its checksum", id="a key table changed"),
    pytest.param(b"index", 0, gone, "its key tables are", id="a key table missing"),
]


@pytest.mark.parametrize(("tree", "at", "how", "said"), DAMAGE)
def test_damage_fails_the_request_that_meets_it_and_other_vbuckets_still_work(
    tmp_path, monkeypatch, tree, at, how, said
):
    monkeypatch.setattr(keyindex, "WORTH_A_TABLE", 64)
    fill(tmp_path)
    change(tmp_path, tree, of(1, at), how)
    looked, findings = check_bucket(tmp_path, lambda done, total: None)
    assert looked.vbuckets == 3
    assert {finding.vbucket for finding in findings} == {1}
    heard: list[DamagedVbucket] = []
    with open_bucket(tmp_path) as bucket:
        bucket.listeners.on_damage = heard.append

        def read(number: int) -> list[bytes]:
            vb = bucket.vbucket(number)
            return [record.key for record in changes(vb.stream(0, vb.high_seqno))] and [
                vb.documents.get(k).value for k in KEYS
            ]

        with pytest.raises(DamagedVbucket, match=said) as caught:
            read(1)
        assert isinstance(caught.value, StatusError)
        assert caught.value.status == Status.EINTERNAL
        assert "vbucket 1 is damaged in" in str(caught.value)
        assert str(tmp_path / "data.mdb") in str(caught.value)
        assert [error.vbucket for error in heard] == [1]
        assert read(0) == read(2) == [b"second" * 10] * len(KEYS)
        assert bucket.maintain(3) == 0
        bucket.vbucket(0).documents.set(b"more", b"1")
        bucket.flush()


def test_a_damaged_replica_can_begin_anew(tmp_path):
    fill(tmp_path)
    change(tmp_path, b"log", of(1, 3), flipped(500))
    with open_bucket(tmp_path) as bucket:
        replica = bucket.set_state(1, VbucketState.REPLICA)
        with pytest.raises(DamagedVbucket):
            changes(replica.stream(0, replica.high_seqno))
        bucket.begin_anew(1)
        assert (replica.high_seqno, replica.item_count, dict(bucket.damage)) == (0, 0, {})
        assert changes(replica.stream(0)) == []
    assert check_bucket(tmp_path, lambda done, total: None)[1] == []


@pytest.mark.parametrize("key", [b"bucket", b"present"])
@pytest.mark.parametrize("how", [flipped(20), gone])
def test_a_damaged_record_keeps_the_bucket_from_opening(tmp_path, key, how):
    fill(tmp_path)
    change(tmp_path, b"meta", lambda keys: key, how)
    with pytest.raises(CorruptStore, match=r"damaged.*data\.mdb|data\.mdb.*damaged"):
        open_bucket(tmp_path)
    assert check_bucket(tmp_path, lambda done, total: None)[1]


@pytest.mark.parametrize("how", [flipped(20), gone])
def test_a_vbucket_whose_record_is_damaged_is_refused_and_the_others_still_work(tmp_path, how):
    fill(tmp_path)
    change(tmp_path, b"meta", lambda keys: b"v\0\1", how)
    for _ in range(2):  # using the others neither forgets nor overwrites it
        assert {finding.vbucket for finding in check_bucket(tmp_path, lambda done, total: None)[1]} == {1}
        with open_bucket(tmp_path) as bucket:
            assert list(bucket.damage) == list(bucket.unreadable) == [1]
            bucket.create_all()
            for use in (lambda: bucket.vbucket(1), lambda: bucket.set_state(1, VbucketState.ACTIVE), bucket.empty):
                with pytest.raises(DamagedVbucket, match="vbucket 1 is damaged in"):
                    use()
            assert {bucket.vbucket(number).documents.get(KEYS[0]).value for number in (0, 2)} == {b"second" * 10}
            bucket.vbucket(2).documents.set(b"more", b"1")
            bucket.apply_manifest(MANIFEST % 1)
    with open_bucket(tmp_path) as bucket:
        if how is gone:
            bucket.delete_vbucket(1)
        assert bucket.set_state(1, VbucketState.REPLICA).high_seqno == 0  # its active fills it again
        assert dict(bucket.damage) == dict(bucket.unreadable) == {}
        bucket.set_state(1, VbucketState.ACTIVE).documents.set(b"again", b"1")
    assert check_bucket(tmp_path, lambda done, total: None)[1] == []
    with open_bucket(tmp_path) as bucket:
        assert bucket.vbucket(1).documents.get(b"again").value == b"1"


MANIFEST = b'{"uid":"%x","scopes":[{"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"}]},' \
    b'{"name":"shop","uid":"8","collections":[]}]}'  # fmt: skip


@pytest.mark.parametrize("how", [flipped(20), flipped(60), gone])
def test_a_damaged_manifest_is_found_and_repaired_from_the_buckets_record(tmp_path, how):
    fill(tmp_path)
    with open_bucket(tmp_path) as bucket:
        bucket.apply_manifest(MANIFEST % 1)
    change(tmp_path, b"meta", lambda keys: next(key for key in keys if key.startswith(b"manifest")), how)
    found = check_bucket(tmp_path, lambda done, total: None)[1]
    assert {finding.vbucket for finding in found} - {None} == {0, 1, 2}
    assert all("manifest" in finding.what for finding in found)
    with open_bucket(tmp_path) as bucket:
        assert [vb.collections.manifest.uid for vb in bucket.existing()] == [1, 1, 1]
        bucket.vbucket(1).documents.set(b"more", b"1")
    assert check_bucket(tmp_path, lambda done, total: None)[1] == []


def test_a_damaged_manifest_of_one_vbucket_does_not_affect_the_others(tmp_path):
    with open_bucket(tmp_path) as bucket:
        for number in range(3):
            bucket.set_state(number, VbucketState.ACTIVE).documents.set(b"k", b"v")
        bucket.apply_manifest(MANIFEST % 1)
        bucket.set_state(1, VbucketState.REPLICA)  # it stays behind
        bucket.apply_manifest(MANIFEST % 2)
    change(tmp_path, b"meta", lambda keys: b"manifest" + (1).to_bytes(8, "big"), flipped(60))
    found = check_bucket(tmp_path, lambda done, total: None)[1]
    assert [finding.vbucket for finding in found] == [None, 1]
    with open_bucket(tmp_path) as bucket:
        assert list(bucket.unreadable) == [1]
        assert [bucket.vbucket(number).documents.get(b"k").value for number in (0, 2)] == [b"v", b"v"]


@pytest.mark.parametrize("name", [b"log", b"dead", b"index", b"meta"])
def test_a_tree_that_lost_its_name_is_not_mistaken_for_an_empty_one(tmp_path, name):
    fill(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as file, file.begin(write=True) as transaction:
        transaction.drop(file.open_db(name, transaction))
    (tmp_path / "closed.json").unlink()
    with pytest.raises(CorruptStore, match=name.decode()):
        open_bucket(tmp_path)


def test_the_first_pages_are_compared_with_the_note_of_the_last_close(tmp_path):
    fill(tmp_path)
    with (tmp_path / "data.mdb").open("r+b") as file:
        file.seek(4096 + 16 + 8 + 16 + 96 + 8)  # the last commit's number, in the second of LMDB's meta pages
        number = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([number ^ 2]))
    with pytest.raises(CorruptStore, match=r"closed\.json"):
        open_bucket(tmp_path)


def test_a_crash_leaves_no_note_behind(tmp_path):
    fill(tmp_path)
    assert (tmp_path / "closed.json").exists()
    bucket = open_bucket(tmp_path)
    assert not (tmp_path / "closed.json").exists()
    bucket.vbucket(0).documents.set(b"k", b"v")
    bucket.flush()
    bucket.abandon()
    with open_bucket(tmp_path) as bucket:
        assert bucket.vbucket(0).documents.get(b"k").value == b"v"


def test_a_store_without_checksums_is_read_and_gets_them_as_it_is_written(tmp_path):
    fill(tmp_path)
    make_old(tmp_path, 2)
    with open_bucket(tmp_path) as bucket:
        for vb in bucket.existing():
            assert {vb.documents.get(key).value for key in KEYS} == {b"second" * 10}
            assert len(changes(vb.stream(0, vb.high_seqno))) == len(KEYS)
            vb.bulk.set_many(KEYS[:400], [b"third" * 10] * 400)
    assert check_bucket(tmp_path, lambda done, total: None)[1] == []
    change(tmp_path, b"log", of(1, -1), flipped(500))
    with open_bucket(tmp_path) as bucket, pytest.raises(DamagedVbucket, match="checksum"):
        changes(bucket.vbucket(1).stream(0, bucket.vbucket(1).high_seqno))


def test_a_block_that_lost_its_checksum_flag_is_noticed_in_an_old_store_too(tmp_path):
    fill(tmp_path)
    make_old(tmp_path, 2)
    with open_bucket(tmp_path) as bucket:
        bucket.vbucket(1).bulk.set_many(KEYS, [b"third"] * len(KEYS))
    change(tmp_path, b"log", of(1, -1), lambda value: bytes([value[0] ^ 2]) + value[1:])
    with open_bucket(tmp_path, SMALL) as bucket, pytest.raises(DamagedVbucket, match="lost its checksum"):
        changes(bucket.vbucket(1).stream(0, bucket.vbucket(1).high_seqno))
