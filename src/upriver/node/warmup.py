"""Runs every kernel once before the node is ready, so that no request waits for one to be compiled or loaded."""

from __future__ import annotations

import tempfile
from pathlib import Path

from upriver.model import VbucketState
from upriver.store import Bucket, Run, StoreOptions
from upriver.wire import Context, json_text
from upriver.wire.bulk.decode import BulkDecoder
from upriver.wire.bulk.encode import FrameOptions, PackedEncoder, RowPacker, SendBuffer
from upriver.wire.bulk.row_checks import StreamTable
from upriver.wire.bulk.shape import ScratchMemory, ShapingEncoder, ValueShape
from upriver.wire.packed import RecordKind, pack

LONG_AGO = 1 << 30  # unix seconds


def warm_up() -> None:
    """Encode and receive a record of each kind, and use every part of the store in temporary buckets."""
    run = b"".join(
        pack(kind, b"\0k", b"v", seqno=1) for kind in (RecordKind.MUTATION, RecordKind.DELETION, RecordKind.EXPIRATION)
    )
    out = SendBuffer(1 << 12)
    encoder = PackedEncoder(FrameOptions())
    encoder.encode(run, out)
    _receive(bytes(out.view()))
    ShapingEncoder(FrameOptions(), ValueShape(force_compression=True, snappy=True), ScratchMemory()).encode(run, out)
    json_text.find_member(b"[[]]", json_text.depth_of(b"[]"))
    with tempfile.TemporaryDirectory(prefix="upriver-warm-up-") as scratch:
        _warm_up_store(Path(scratch) / "active", encoder, out)
        _warm_up_upkeep(Path(scratch) / "active")
        _warm_up_replica(Path(scratch) / "replica")


def _receive(frames: bytes) -> None:
    """Decode documents as a consumer does: into columns, and back into records."""
    table, packer = StreamTable(1), RowPacker()
    table.open(0, opaque=0)
    table.snapshot(0, 1, 1)
    for part in BulkDecoder(Context(collections=True)).feed(frames):
        table.advance(part.columns, part.first, part.last)
        packer.pack(part.columns, part.first)


def _warm_up_store(path: Path, encoder: PackedEncoder, out: SendBuffer) -> None:
    """Write, read, stream and persist."""
    with Bucket.open(path, name="warm-up", vbuckets=1, options=StoreOptions(background=False)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        for key in (b"one", b"two", b"one"):
            vb.documents.set(key, b"{}")
        vb.documents.delete(b"two")
        vb.documents.get(b"one")
        vb.stream(0, vb.high_seqno).poll()
        vb.documents.set(b"one", b"{}")  # a second segment, which the streams below merge with the first
        for disk_only in (False, True):
            bucket.flush()
            source = vb.stream(0, vb.high_seqno, disk_only=disk_only, collections=frozenset((0,)))
            while (event := source.poll()) is not None:
                if isinstance(event, Run):
                    encoder.encode(event.data, out)


def _warm_up_upkeep(path: Path) -> None:
    """Open the bucket again, read and write what is only on disk, then expire and compact."""
    with Bucket.open(path, name="warm-up", vbuckets=1, options=StoreOptions(background=False)) as bucket:
        vb = bucket.vbucket(0)
        vb.documents.get(b"one")
        vb.bulk.set_many([b"two", b"three"], [b"{}", b"{}"], expiry=LONG_AGO)
        bucket.run_expiry_pager()
        bucket.compact(drop_deletes=True)


def _warm_up_replica(path: Path) -> None:
    """Receive documents and a prepare, compact, and roll back."""
    count = 200  # documents: too many bytes for the kernel that takes short runs
    run = b"".join(pack(RecordKind.MUTATION, b"\0k%d" % n, b"v" * 300, seqno=n, cas=n) for n in range(1, count + 1))
    with Bucket.open(path, name="warm-up", vbuckets=1, options=StoreOptions(background=False)) as bucket:
        vb = bucket.set_state(0, VbucketState.REPLICA)
        vb.replication.begin_snapshot(1, count + 1)
        vb.replication.apply_records(run)
        vb.replication.apply_records(pack(RecordKind.PREPARE, b"\0k1", b"v", seqno=count + 1, cas=count + 1))
        bucket.compact()
        vb.rollback(count // 2)
