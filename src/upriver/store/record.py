"""A vbucket's record in the meta tree: its fields, how to write it, and how to restore a vbucket from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from upriver.model import FailoverLog, VbucketState
from upriver.store import registers as r
from upriver.store.disk.file import Words
from upriver.store.log.kernels import ingest

if TYPE_CHECKING:
    from upriver.store.vbucket import VBucket

_PLAIN = (  # fields that are attributes of the same name
    "purge_seqno", "rollback_floor", "indexed_seqno", "complete_seqno", "snap_start", "snap_end", "topology", "erasing",
    "snapshot_from_disk", "compacted_s", "log_end", "tables",
)  # fmt: skip


class Tally(NamedTuple):
    """How much a vbucket has on disk; ``dead`` counts the records that newer ones have replaced."""

    blocks: int = 0
    records: int = 0
    dead: int = 0


class OnDisk(NamedTuple):
    """What the marker of a disk snapshot says, as of the last commit."""

    visible: int
    prepared: int
    completed: int
    collections: Words


def describe(vbucket: VBucket) -> dict[str, Any]:
    """All fields of the record, for ``seal_vbucket``; few objects, because a thousand of these exist at once."""
    fields: dict[str, Any] = {name: getattr(vbucket, name) for name in _PLAIN}
    fields["manifest_uid"] = vbucket.manifest_uid
    fields["manifest"] = vbucket.collections.manifest_field()
    fields["content"] = list(vbucket.content)
    fields["state"] = int(vbucket.state)
    fields["pending"] = [[key.hex(), seqno] for key, seqno in vbucket.pending.items()] if vbucket.pending else ()
    if vbucket.stored_log[0] is not vbucket.failover_log:
        vbucket.stored_log = (vbucket.failover_log, [list(entry) for entry in vbucket.failover_log])
    fields["failover_log"] = vbucket.stored_log[1]
    fields["registers"] = vbucket.registers.copy()
    fields["collections"] = vbucket.collection_table.copy()
    return fields


def restore(vbucket: VBucket, data: Any) -> None:
    """The inverse of ``describe``, from a sealed record. Clears the memory log and the overlay."""
    disk = vbucket.shared.disk
    fields = disk.vbucket_record(vbucket.id, data)
    try:
        _restore(vbucket, fields)
    except (KeyError, TypeError, ValueError, OverflowError) as failure:
        raise disk.damaged(vbucket.id, "its record has invalid fields") from failure


def _restore(vbucket: VBucket, fields: dict[str, Any]) -> None:
    vbucket.collections.restore(fields["manifest"])
    if "log_end" not in fields:  # written by a version without checksums
        _count_anew(vbucket, fields)
    log = FailoverLog.load((uuid, seqno) for uuid, seqno in fields["failover_log"])
    vbucket.failover_log = log or FailoverLog.new(vbucket.shared.random_uuid())
    note_persisted(vbucket, fields["registers"][r.HIGH], fields)
    vbucket.state = VbucketState(fields["state"])
    vbucket.registers[:] = fields["registers"]
    vbucket.replace_collection_table(vbucket.on_disk.collections.reshape(-1, r.C_WORDS).copy())
    vbucket.pending = {bytes.fromhex(key): seqno for key, seqno in fields["pending"]}
    for register in (r.USED, r.ENTRIES, r.DEDUPED):
        vbucket.numbers[register] = 0
    if vbucket.registers[r.CAS] >= ingest.NO_CLOCK:  # an older version trusted a CAS beyond any clock
        vbucket.numbers[r.CAS] = 0
    for name in fields.keys() & set(_PLAIN):
        setattr(vbucket, name, fields[name])
    vbucket.memory.clear(vbucket.high_seqno)
    vbucket.keys.clear()
    vbucket.keys_loaded = False


def _count_anew(vbucket: VBucket, fields: dict[str, Any]) -> None:
    """Add the fields that a version without checksums did not write: end of the log, key tables, dead records."""
    disk = vbucket.shared.disk
    with disk.read(vbucket.id) as transaction:
        fields["log_end"] = disk.last_block(transaction, vbucket.id)
        fields["tables"] = [each for each, _ in disk.tables_in(transaction, vbucket.id, guarded=True)]
        dead = disk.dead_in(transaction, vbucket.id, fields["registers"][r.HIGH], guarded=True)
        fields["content"][2] = dead.size


def note_persisted(vbucket: VBucket, high_seqno: int, fields: dict[str, Any]) -> None:
    """Everything up to ``high_seqno`` is durable; ``fields`` is the record that was written with it."""
    vbucket.persisted_seqno = high_seqno
    vbucket.content = Tally(*fields["content"])
    vbucket.log_end, vbucket.tables = fields["log_end"], fields["tables"]
    visible, prepared, completed = (int(fields["registers"][at]) for at in (r.VISIBLE, r.PREPARED, r.COMPLETED))
    vbucket.on_disk = OnDisk(visible, prepared, completed, np.asarray(fields["collections"], np.uint64))
