"""Runs every compiled kernel once before the node says that it is ready, so that no request pays for loading it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from upriver.model import VbucketState
from upriver.node.crc32c import crc32c
from upriver.store import Bucket, Run, StoreOptions
from upriver.wire.bulk_encode import FrameOptions, PackedEncoder, SendBuffer
from upriver.wire.bulk_shape import Shape, ShapingEncoder, Workshop
from upriver.wire.packed import Kind, pack


def warm_up() -> None:
    """Encode a record of each kind of document; write, read, stream and persist in a store of no importance."""
    run = b"".join(pack(kind, b"\0k", b"v", seqno=1) for kind in (Kind.MUTATION, Kind.DELETION, Kind.EXPIRATION))
    out = SendBuffer(1 << 12)
    encoder = PackedEncoder(FrameOptions())
    encoder.encode(run, out)
    ShapingEncoder(FrameOptions(), Shape(force_compression=True, snappy=True), Workshop()).encode(run, out)
    crc32c(run)
    with tempfile.TemporaryDirectory(prefix="upriver-warm-up-") as scratch:
        _warm_up_store(Path(scratch), encoder, out)


def _warm_up_store(path: Path, encoder: PackedEncoder, out: SendBuffer) -> None:
    with Bucket.open(path, name="warm-up", vbuckets=1, options=StoreOptions(background=False)) as bucket:
        vb = bucket.set_state(0, VbucketState.ACTIVE)
        for key in (b"one", b"two", b"one"):
            vb.set(key, b"{}")
        vb.delete(b"two")
        vb.get(b"one")
        for disk_only in (False, True):
            bucket.flush()
            source = vb.stream(0, vb.high_seqno, disk_only=disk_only, collections=frozenset((0,)))
            while (event := source.poll()) is not None:
                if isinstance(event, Run):
                    encoder.encode(event.data, out)
