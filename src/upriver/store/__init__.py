"""The store: vbuckets on disk and in memory, with their documents, history, failover logs and collections.

Start at ``Bucket.open``. A ``VBucket`` groups its operations in parts: ``documents``, ``bulk``, ``with_meta``,
``durable``, ``replication``, ``collections``. A ``StreamSource`` reads the history.

A write is accepted when its call returns, and durable when ``persisted_seqno`` has reached it. A crash loses nothing
below that; damage is an error that names the vbucket. Operations may be called from any thread. The store touches
files, threads and the clock it is given. It knows nothing of sockets, and no other code takes its locks. See
``docs/store.md``.
"""

from upriver.store.bucket import Bucket
from upriver.store.collections.manifest import CollectionEntry, Manifest, ManifestEvent, ScopeEntry
from upriver.store.disk.file import claim
from upriver.store.documents import Stored
from upriver.store.log.blocks import record_on_disk
from upriver.store.log.stream import StreamSource, follow, live_after
from upriver.store.options import Durability, StoreOptions
from upriver.store.vbucket import VBucket
from upriver.store.withmeta import WithMetaOption
from upriver.wire.packed import End, EndReason, NewSnapshot, OsoEnd, OsoStart, Run, SnapshotStart, StreamEvent

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
    "follow",
    "live_after",
    "record_on_disk",
]
