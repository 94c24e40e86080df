"""Vbuckets on disk: ordered history, documents, failover logs, snapshots, rollback. Knows nothing of sockets.

``Bucket.open`` is the way in; ``VBucket`` has the operations; ``StreamSource`` hands history out.
"""

from upriver.store.bucket import Bucket
from upriver.store.collections.manifest import CollectionEntry, Manifest, ManifestEvent, ScopeEntry
from upriver.store.disk.file import claim
from upriver.store.documents import Stored
from upriver.store.log.blocks import record_on_disk
from upriver.store.log.stream import StreamSource, live_after
from upriver.store.options import Durability, StoreOptions
from upriver.store.vbucket import VBucket
from upriver.store.withmeta import WithMetaOption
from upriver.wire.source_events import End, EndReason, NewSnapshot, OsoEnd, OsoStart, Run, SnapshotStart, StreamEvent

__all__ = [
    "Bucket",
    "CollectionEntry",
    "Durability",
    "End",
    "EndReason",
    "Manifest",
    "ManifestEvent",
    "NewSnapshot",
    "OsoEnd",
    "OsoStart",
    "Run",
    "ScopeEntry",
    "SnapshotStart",
    "StoreOptions",
    "Stored",
    "StreamEvent",
    "StreamSource",
    "VBucket",
    "WithMetaOption",
    "claim",
    "live_after",
    "record_on_disk",
]
