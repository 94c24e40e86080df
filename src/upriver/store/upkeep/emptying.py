"""Emptying a bucket: every vbucket begins a new history without documents, all with one commit.

Until that commit other threads read and write the old history; only the commit and the reset of the vbuckets happen
under the lock.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from upriver.model import FailoverLog, VbucketState
from upriver.store.disk.file import meta_key, seal_vbucket
from upriver.store.record import describe, restore
from upriver.store.shared import Shared
from upriver.store.vbucket import VBucket
from upriver.wire.packed import EndReason


def empty(shared: Shared, vbuckets: dict[int, VBucket], check: Callable[[], None]) -> None:
    """Empty every vbucket and keep its state; raises what ``check`` raises. Durable on return."""
    disk = shared.disk
    with shared.commit_lock, ExitStack() as at_last:
        check()
        with shared.lock:
            states = {number: vbucket.state for number, vbucket in vbuckets.items()}
        with disk.write() as transaction:
            for tree in (disk.log, disk.dead, disk.index):
                transaction.drop(tree, delete=False)
            fresh = {number: _fresh(shared, number, state) for number, state in states.items()}
            records = {number: seal_vbucket(number, describe(vbucket)) for number, vbucket in fresh.items()}
            at_last.enter_context(shared.lock)  # until the vbuckets are empty, no reader may look for the old blocks
            for number, vbucket in vbuckets.items():
                if states.get(number) is not vbucket.state:  # changed or created meanwhile
                    fresh[number] = _fresh(shared, number, vbucket.state)
                    records[number] = seal_vbucket(number, describe(fresh[number]))
                transaction.put(meta_key(number), records[number], db=disk.meta)
            disk.put_present(transaction, vbuckets)
        shared.present = frozenset(vbuckets)
        disk.damage.clear()  # the damaged data is gone
        for number, vbucket in vbuckets.items():
            _begin_anew(shared, vbucket, records[number])


def _fresh(shared: Shared, number: int, state: VbucketState) -> VBucket:
    return VBucket(shared, number, state, FailoverLog.new(shared.random_uuid()))


def _begin_anew(shared: Shared, vbucket: VBucket, record: bytes) -> None:
    """Reset the vbucket, including what is not on disk yet.

    It stays the same object: a thread that holds it and waits for the lock finds it empty.
    """
    vbucket.close_segment()
    shared.dirty_bytes -= sum(segment.end - segment.at for segment in vbucket.memory.collect_unflushed())
    shared.dirty.pop(vbucket.id, None)
    vbucket.end_streams(EndReason.STATE_CHANGED)
    vbucket.locks.clear()
    vbucket.epoch += 1
    restore(vbucket, record)
    vbucket.wake()
