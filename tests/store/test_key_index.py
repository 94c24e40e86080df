"""The key index, with tables so small that a few dozen keys are frozen, written, merged and looked up in many."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.store.old_formats import make_old
from tests.store.store_support import SMALL, changes, open_bucket
from tests.support.examples import examples
from upriver.errors import KeyNotFound
from upriver.model import VbucketState
from upriver.store.index import keyindex
from upriver.store.index.keyindex import FAN, mergeable

KEYS = [b"key-%d" % number for number in range(60)]
some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=30, unique=True)


class Tables(RuleBasedStateMachine):
    """One vbucket and its expected content: key -> (value or None if deleted, rev)."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = keyindex.SMALLEST_TABLE, keyindex.WORTH_A_TABLE, keyindex.MOST_UNKNOWN
        keyindex.SMALLEST_TABLE = keyindex.WORTH_A_TABLE = keyindex.MOST_UNKNOWN = 8
        self.path = Path(tempfile.mkdtemp())
        self.bucket = open_bucket(self.path, SMALL, 1)
        self.bucket.set_state(0, VbucketState.ACTIVE)
        self.true: dict[bytes, tuple[bytes | None, int]] = {}
        self.durable: dict[bytes, tuple[bytes | None, int]] = {}
        self.highest_deleted = 0

    def teardown(self) -> None:
        self.bucket.close()
        keyindex.SMALLEST_TABLE, keyindex.WORTH_A_TABLE, keyindex.MOST_UNKNOWN = self.kept
        shutil.rmtree(self.path)

    @property
    def vb(self):
        return self.bucket.vbucket(0)

    def note(self, key: bytes, value: bytes | None) -> None:
        rev = self.true[key][1] + 1 if key in self.true else self.highest_deleted + 1
        self.true[key] = (value, rev)
        if value is None:
            self.highest_deleted = max(self.highest_deleted, rev)

    @rule(keys=some_keys, value=st.binary(max_size=9))
    def write(self, keys: list[bytes], value: bytes) -> None:
        self.vb.bulk.set_many(keys, [value] * len(keys), datatype=0)
        for key in keys:
            self.note(key, value)

    @rule(keys=some_keys)
    def delete(self, keys: list[bytes]) -> None:
        self.vb.bulk.delete_many(keys)
        for key in keys:
            self.note(key, None)

    @rule()
    def flush(self) -> None:
        self.bucket.flush()
        self.durable = dict(self.true)

    @rule(clean=st.booleans())
    def reopen(self, clean: bool) -> None:
        if clean:
            self.bucket.close()
        else:
            self.bucket.abandon()
            self.true = dict(self.durable)
        self.bucket = open_bucket(self.path, SMALL, 1)
        self.durable = dict(self.true)
        self.highest_deleted = int(self.vb.registers[2])

    @rule()
    def purge(self) -> None:
        """Purges all tombstones, except the last change of the vbucket."""
        last = self.vb.high_seqno
        self.bucket.compact(0, drop_deletes=True)
        for key, (value, _) in list(self.true.items()):
            if value is None and self.seqno_of(key) != last:
                del self.true[key]
        self.durable = dict(self.true)

    def seqno_of(self, key: bytes) -> int:
        try:
            return self.vb.documents.get_meta(key).seqno
        except KeyNotFound:
            return 0

    @invariant()
    def every_key_is_found_in_its_newest_version(self) -> None:
        for key in KEYS:
            try:
                found = self.vb.documents.get_meta(key)
            except KeyNotFound:
                assert key not in self.true
            else:
                value, rev = self.true[key]
                assert (found.deleted, found.rev_seqno) == (value is None, rev)
                assert value is None or self.vb.documents.get(key).value == value
        assert self.vb.item_count == sum(value is not None for value, _ in self.true.values())


TestTables = Tables.TestCase
TestTables.settings = settings(
    max_examples=examples(30), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_an_entry_is_written_only_a_few_times_however_many_tables_there_are():
    sizes: list[int] = []
    written = most = 0
    for _ in range(4**6):
        taken = mergeable(sizes, 1)
        merged = 1 + sum(sizes[len(sizes) - taken :])
        sizes = [*sizes[: len(sizes) - taken], merged]
        written += merged
        most = max(most, len(sizes))
    assert written <= 7 * 4**6  # once, and again each time the number of entries quadruples
    assert most <= 6 * (FAN - 1)


@pytest.mark.parametrize("background", [False, True])
def test_writes_find_older_versions_through_many_tables(tmp_path, monkeypatch, background):
    monkeypatch.setattr(keyindex, "WORTH_A_TABLE", 64)
    options = SMALL if not background else type(SMALL)(flush_delay_s=0.001)
    keys = [b"document-%d" % number for number in range(3000)]
    with open_bucket(tmp_path, options, 1) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        for _ in range(3):
            for at in range(0, len(keys), 100):
                vb.bulk.set_many(keys[at : at + 100], [b"v"] * 100)
                if not background and at % 700 == 0:
                    bucket.flush()
        bucket.flush()
        assert {vb.documents.get(key).rev_seqno for key in keys} == {3}
        assert vb.item_count == len(keys)
        assert vb.indexed_seqno > 0
    with open_bucket(tmp_path, options, 1) as bucket:
        assert {bucket.vbucket(0).documents.get(key).rev_seqno for key in keys} == {3}


def test_a_few_keys_written_over_and_over_leave_little_to_read_again_after_a_crash(tmp_path, monkeypatch):
    monkeypatch.setattr(keyindex, "MOST_UNKNOWN", 100)
    keys = [b"document-%d" % number for number in range(10)]
    bucket = open_bucket(tmp_path, SMALL, 1)
    vb = bucket.set_state(0, VbucketState.ACTIVE)
    for _ in range(100):
        vb.bulk.set_many(keys, [b"v"] * len(keys))
        bucket.flush()
        assert vb.high_seqno - vb.indexed_seqno <= 100
    bucket.abandon()
    with open_bucket(tmp_path, SMALL, 1) as bucket:
        vb = bucket.vbucket(0)
        assert {vb.documents.get(key).rev_seqno for key in keys} == {100}


@pytest.mark.parametrize("number", [1, 2])
def test_a_file_of_an_earlier_version_can_be_read_and_written(tmp_path, monkeypatch, number):
    monkeypatch.setattr(keyindex, "WORTH_A_TABLE", 64)
    keys = [b"document-%d" % number for number in range(2000)]
    with open_bucket(tmp_path, SMALL, 1) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        vb.bulk.set_many(keys, [b"1"] * 2000)
        vb.bulk.set_many(keys[:9], [b"2"] * 9)
        bucket.compact(0)
    make_old(tmp_path, number)
    for _ in range(2):
        with open_bucket(tmp_path, SMALL, 1) as bucket:
            vb = bucket.vbucket(0)
            assert [vb.documents.get(key).rev_seqno for key in keys[:10]] == [2] * 9 + [1]
            assert {vb.documents.get(key).value for key in keys[9:]} == {b"1"}
            assert len(changes(vb.stream(0))) == vb.item_count
            vb.bulk.set_many([b"more-%d" % number for number in range(900)], [b"3"] * 900)
