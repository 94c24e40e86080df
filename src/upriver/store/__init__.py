"""Vbuckets on disk: ordered history, documents, failover logs, snapshots, rollback. Knows nothing of sockets.

``Bucket.open`` is the way in; ``VBucket`` has the operations; ``StreamSource`` hands history out.
"""

from upriver.store.bucket import Bucket
from upriver.store.collections.manifest import CollectionEntry, Event, Manifest, ScopeEntry
from upriver.store.disk.file import claim
from upriver.store.documents import Stored
from upriver.store.log.stream import StreamSource, live_after
from upriver.store.options import Durability, StoreOptions
from upriver.store.vbucket import VBucket
from upriver.store.withmeta import WithMeta
from upriver.wire.source_events import End, EndReason, NewSnapshot, OsoEnd, OsoStart, Run, SnapshotStart, StreamEvent

__all__ = [
    "Bucket",
    "CollectionEntry",
    "Durability",
    "End",
    "EndReason",
    "Event",
    "Manifest",
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
    "WithMeta",
    "claim",
    "live_after",
]
