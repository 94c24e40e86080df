"""Opening a bucket: checks that the file is ours, reads its vbuckets, and starts new branches after a crash."""

from __future__ import annotations

from typing import Any

from upriver.errors import CorruptStore, DamagedVbucket, NotOurFile
from upriver.model import FailoverLog, VbucketState
from upriver.store import registers as r
from upriver.store.disk.file import FORMAT, READABLE, VB_META, Disk
from upriver.store.record import restore
from upriver.store.shared import Shared
from upriver.store.vbucket import VBucket

UNCLEAN_CAS_LEAP = 1 << 32  # more CAS values than can have been assigned and lost


def check_identity(identity: dict[str, Any], disk: Disk, vbuckets: int) -> None:
    """Raise ``NotOurFile`` if the bucket's record does not fit this build, or the number of vbuckets asked for."""
    missing = {"format", "uuid", "seed", "vbuckets", "clean", "manifest"} - identity.keys()
    if missing:
        raise NotOurFile(f"{disk.file}: the bucket record lacks {sorted(missing)[0]}")
    if identity["format"] not in READABLE:
        raise NotOurFile(f"{disk.file} has format {identity['format']}; this build reads {FORMAT}")
    if identity["vbuckets"] != vbuckets:
        raise NotOurFile(f"{disk.file} has {identity['vbuckets']} vbuckets, not {vbuckets}")


def read_vbuckets(shared: Shared, most: int, version: int, fresh: bool) -> tuple[dict[int, VBucket], dict[int, str]]:
    """The vbuckets by id, and what is wrong with those whose records are damaged; ``version`` is the file format."""
    found: dict[int, VBucket] = {}
    unreadable: dict[int, str] = {}
    disk = shared.disk
    with disk.read() as transaction:
        present = disk.present(transaction) if not fresh else []
        numbers = _recorded(transaction, disk) if present is None else present
        cursor = transaction.cursor(db=disk.meta)
        for number in numbers:
            if number >= most:
                raise CorruptStore(f"{disk.file}: vbucket {number} of {most}")
            vbucket = VBucket(shared, number, VbucketState.DEAD, FailoverLog.new(1))
            try:
                restore(vbucket, disk.vbucket_value(cursor, number))
            except DamagedVbucket as damage:  # the other vbuckets work; this one stays on disk as it is
                unreadable[number] = damage.what
                continue
            if version == 1:  # a rollback in format 1 reset this count
                vbucket.content = vbucket.content._replace(dead=max(1, vbucket.content.dead))
            found[number] = vbucket
    shared.present = frozenset(numbers)
    return found, unreadable


def _recorded(transaction: Any, disk: Disk) -> list[int]:
    """The vbuckets of a store whose version kept no list of them."""
    found: list[int] = []
    cursor = transaction.cursor(db=disk.meta)
    more = cursor.set_range(VB_META)
    while more and bytes(cursor.key()).startswith(VB_META):
        found.append(int.from_bytes(bytes(cursor.key())[1:], "big"))
        more = cursor.next()
    return found


def survive_crash(vbucket: VBucket) -> None:
    """Begin a new branch: acknowledged but unpersisted changes are lost, and their seqnos may be assigned again.

    See docs/protocol/rollback.md#failover-log.
    """
    vbucket.registers[r.CAS] += UNCLEAN_CAS_LEAP
    if vbucket.state is not VbucketState.ACTIVE:
        return
    seqno = vbucket.snap_end if vbucket.snapshot_complete else vbucket.snap_start
    shared = vbucket.shared
    vbucket.failover_log = vbucket.failover_log.branch(shared.random_uuid(), seqno, shared.options.max_failover_entries)
