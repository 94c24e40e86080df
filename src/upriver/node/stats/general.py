"""Statistics of the node and of a whole bucket, under names that tools expect (docs/protocol/session.md#stats)."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from upriver.model import VbucketState
from upriver.node.stats.query import Figures, Query

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket


def general(query: Query) -> Figures:
    """The group with the empty name: the node, and the bucket if one is selected."""
    node = query.conn.node
    yield "pid", os.getpid()
    yield "uptime", int(time.monotonic() - node.started)
    yield "time", int(time.time())
    yield "version", node.version
    yield "pointer_size", 64
    yield "curr_connections", len(node.connections)
    yield "total_connections", node.total_connections
    yield "rejected_conns", node.connection_limits.refused
    yield "threads", 1
    if query.conn.bucket is not None:
        yield from _bucket(query.conn.bucket, query.conn.node.options.data)


def _bucket(bucket: NodeBucket, data: os.PathLike[str]) -> Figures:
    store = bucket.store
    items: Counter[VbucketState] = Counter()
    number: Counter[VbucketState] = Counter()
    expired: Counter[VbucketState] = Counter()
    waiting = 0
    for vb in store.existing():
        number[vb.state] += 1
        expired[vb.state] += vb.expired_count
        items[vb.state] += vb.item_count
        waiting += vb.high_seqno - vb.persisted_seqno
    yield "curr_items", items[VbucketState.ACTIVE]
    yield "curr_items_tot", items.total()
    for state in VbucketState:
        yield f"vb_{state.name.lower()}_num", number[state]
        yield f"vb_{state.name.lower()}_curr_items", items[state]
    known = store.stats()
    yield "vb_active_expired", expired[VbucketState.ACTIVE]
    yield "mem_used", store.memory_bytes
    yield "ep_max_size", store.options.quota_bytes
    yield "ep_queue_size", waiting
    yield "ep_diskqueue_items", waiting
    yield "ep_commit_num", known.get("commits", 0)
    yield "ep_flusher_state", "paused" if known.get("paused") else "running"
    yield "ep_dbname", os.path.join(data, bucket.name)
    yield "ep_bucket_type", "persistent"
    yield "ep_db_file_size", store.disk_bytes
    yield "ep_dcp_count", len(bucket.dcp_connections)
    yield "ep_degraded_mode", 0 if bucket.traffic else 1
    for name, value in known.items():
        yield f"upriver_{name}", value


def memory(query: Query) -> Figures:
    store = query.bucket.store
    yield "mem_used", store.memory_bytes
    yield "ep_max_size", store.options.quota_bytes
    yield "ep_dirty_bytes", store.dirty_bytes


def config(query: Query) -> Figures:
    options = query.bucket.store.options
    yield "ep_max_size", options.quota_bytes
    yield "ep_max_item_size", options.max_value_bytes
    yield "ep_max_vbuckets", query.bucket.store.vbuckets
    yield "ep_max_ttl", options.max_ttl_s
    yield "ep_conflict_resolution_type", "lww" if options.lww else "seqno"
    yield "ep_persistent_metadata_purge_age", options.purge_age_s
    yield "ep_dbname", os.path.join(query.conn.node.options.data, query.bucket.name)


def warmup(query: Query) -> Figures:
    assert query.bucket
    yield "ep_warmup", "enabled"
    yield "ep_warmup_state", "done"
    yield "ep_warmup_thread", "complete"


def reset(query: Query) -> Figures:
    """Tools reset before they measure; these figures are gauges, so there is nothing to reset."""
    yield from ()


def responses(query: Query) -> Figures:
    """How often each status was answered to clients of this bucket, as JSON: counts by status in hexadecimal."""
    counted = {f"{int(status):x}": count for status, count in sorted(query.bucket.responses.items())}
    yield "responses", json.dumps(counted)


def connections(query: Query) -> Figures:
    for conn in sorted(query.conn.node.connections, key=lambda each: each.id):
        described = {
            "connection": conn.id, "peer": conn.peer, "user": conn.user, "agent": conn.agent,
            "bucket": conn.bucket.name if conn.bucket else "", "dcp": conn.dcp is not None,
        }  # fmt: skip
        yield str(conn.id), json.dumps(described)
