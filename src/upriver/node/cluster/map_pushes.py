"""New cluster maps, pushed to the clients that asked HELLO for them (``protocol.md`` 1.1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.model import Datatype
from upriver.wire.constants import Feature
from upriver.wire.messages.cluster import ClustermapChangeNotification

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.node.server import Node


def push_map(node: Node, bucket: NodeBucket) -> None:
    """Tell every connection of the bucket; the short form wins where both were asked for."""
    for conn in list(node.connections):
        if conn.bucket is not bucket or conn.closed or Feature.DUPLEX not in conn.features:
            continue
        if Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF in conn.features:
            _push(node, bucket, conn, b"")
        elif Feature.CLUSTERMAP_CHANGE_NOTIFICATION in conn.features:
            _push(node, bucket, conn, node.cluster_json(bucket))


def _push(node: Node, bucket: NodeBucket, conn: ClientConnection, value: bytes) -> None:
    current = node.cluster_map(bucket)
    datatype = int(Datatype.JSON) if value else 0
    notification = ClustermapChangeNotification(
        epoch=current.epoch, revision=current.revision, bucket=bucket.name.encode(), value=value, datatype=datatype
    )
    conn.write(notification.encode())
