"""Memory that is let go is used again, but never while anybody can still see it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.store.store_support import SMALL, open_bucket, records
from upriver.model import VbucketState
from upriver.store import Run
from upriver.store.arrays import MAPPED, POOL, octets, words


@pytest.fixture
def allowance():
    POOL.allow(4 * MAPPED)
    yield
    POOL.allow(-4 * MAPPED)


def address(array) -> int:
    return array.__array_interface__["data"][0]


@pytest.mark.parametrize("hold", [lambda a: a[7:], lambda a: a.data, lambda a: a[7:].view(np.uint8).data[1:]])
def test_memory_comes_again_when_the_last_view_of_it_is_gone(allowance, hold):
    first = octets(MAPPED)
    where = address(first)
    held = hold(first)
    del first
    second = octets(MAPPED)
    assert address(second) != where
    del held
    assert address(octets(MAPPED)) == where


def test_used_memory_comes_as_zeros_to_who_wants_zeros(allowance):
    first = octets(MAPPED)
    first[:] = 255
    where = address(first)
    del first
    second = words(MAPPED // 8)
    assert address(second) == where
    assert not second.any()


def test_no_more_waits_than_the_open_buckets_allow(allowance):
    many = [octets(MAPPED) for _ in range(10)]
    many.clear()
    assert POOL.free_bytes <= POOL.allowed_bytes
    large = octets(3 * MAPPED)
    del large
    assert len({address(octets(3 * MAPPED)) for _ in range(3)}) == 1  # sizes that nobody asks for made way


def test_a_run_stays_what_it_is_while_its_checkpoint_is_forgotten_and_written_over(tmp_path):
    options = replace(SMALL, checkpoint_bytes=2 * MAPPED, quota_bytes=16 << 20)
    with open_bucket(tmp_path, options, 1) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        source = vb.stream(0)
        for round_ in range(3):
            vb.bulk.set_many([b"%d-%d" % (round_, i) for i in range(100)], [b"%d" % round_ * 1000] * 100)
            bucket.flush()
            while not isinstance(run := source.poll(), Run):
                assert run is not None
            bucket.trim_memory()
            for i in range(20):
                vb.bulk.set_many([b"other-%d-%d" % (i, j) for j in range(100)], [b"x" * 1000] * 100)
                bucket.flush()
                bucket.trim_memory()
            values = {record.value[:1] for record in records(run) if not record.key.startswith(b"other")}
            assert values <= {b"0", b"1", b"2"}
            if round_ == 0:
                assert [record.key for record in records(run)] == [b"0-%d" % i for i in range(100)]
                assert values == {b"0"}
