"""Statistics of DCP connections and their streams (docs/protocol/session.md#stats)."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments
from upriver.node.dcp.consumer import ConsumerRole
from upriver.node.dcp.producer import ProducerRole
from upriver.node.stats.query import Figures, Query, vbucket_number

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.protocol.producer.stream import ProducerStream
    from upriver.store import VBucket

_FORMATS = ("legacy", "json", "skip")


def dcp(query: Query) -> Figures:
    """Every DCP connection and its streams; ``filter`` selects connections, ``stream_format`` says how streams look."""
    stream_format = query.options.get("stream_format", "legacy")
    if stream_format not in _FORMATS:
        raise InvalidArguments(f"stream_format is one of {', '.join(_FORMATS)}")
    shown = [(name, conn) for name, conn in query.bucket.dcp_connections.items() if _passes(conn, query.options)]
    producers = total_bytes = 0
    for name, conn in shown:
        figures = _figures(conn)
        producers += figures["type"] == "producer"
        total_bytes += _number(figures, "total_bytes_sent")
        yield from _dcp_connection(f"eq_dcpq:{name}:", conn, figures, stream_format)
    yield "ep_dcp_count", len(query.bucket.dcp_connections)
    yield "ep_dcp_producer_count", producers
    yield "ep_dcp_total_bytes", total_bytes


def _passes(conn: ClientConnection, options: dict[str, object]) -> bool:
    wanted = options.get("filter", {})
    if not isinstance(wanted, dict):
        raise InvalidArguments("filter must be an object with user or port")
    user, port = wanted.get("user"), wanted.get("port")
    return (user is None or conn.user == user) and (port is None or conn.peer.endswith(f":{port}"))


def _dcp_connection(prefix: str, conn: ClientConnection, figures: dict[str, object], stream_format: str) -> Figures:
    for name, value in figures.items():
        yield prefix + name, value
    yield prefix + "agent", conn.agent
    yield prefix + "connected", not conn.closed
    yield prefix + "user", conn.user
    yield prefix + "peer", conn.peer
    for vbucket_id, stream in _streams(conn) if stream_format != "skip" else ():
        if stream_format == "json":
            yield f"{prefix}stream_{vbucket_id}", json.dumps(stream)
        else:
            for name, value in stream.items():
                yield f"{prefix}stream_{vbucket_id}_{name}", value


def _figures(conn: ClientConnection) -> dict[str, object]:
    """Figures of a connection as a whole."""
    role = conn.dcp
    if not isinstance(role, ProducerRole):
        return dict(role.stats()) if role is not None else {"type": "consumer", "created": 0}
    producer = role.machine
    options, window = producer.options, producer.options.window
    return {
        "type": "producer",
        "created": int(role.created),
        "paused": not conn.can_write or not window.is_open,
        "priority": options.priority.name.lower(),
        "items_sent": producer.items_sent,
        "items_remaining": sum(_remaining(stream) for stream in producer.streams.values()),
        "total_bytes_sent": producer.bytes_sent,
        "noop_enabled": options.noop.enabled,
        "noop_tx_interval": options.noop.interval_s,
        "noop_wait": options.noop.outstanding,
        "flow_control": "enabled" if window.size else "disabled",
        "max_buffer_bytes": window.size,
        "unacked_bytes": window.outstanding,
        "total_acked_bytes": window.total_acknowledged,
        "num_streams": len(producer.streams),
        "backfill_num_active": sum(stream.backfilling for stream in producer.streams.values()),
        "send_stream_end_on_client_close_stream": options.end_on_close,
        "enable_expiry_opcode": options.expiry_opcode,
        "enable_stream_id": options.stream_ids,
        "synchronous_replication": options.sync_replication,
    }


def _streams(conn: ClientConnection) -> Iterator[tuple[int, dict[str, object]]]:
    """Figures of each stream, with its vbucket."""
    if isinstance(conn.dcp, ConsumerRole):
        yield from conn.dcp.stream_stats()
    streams = list(conn.dcp.streams.values()) if isinstance(conn.dcp, ProducerRole) else []
    for stream in streams:
        yield (
            stream.vbucket_id,
            {
                "flags": int(stream.flags),
                "opaque": stream.opaque,
                "start_seqno": stream.start_seqno,
                "end_seqno": stream.end_seqno,
                "vb_uuid": stream.vbuuid,
                "snap_start_seqno": stream.snap_start,
                "snap_end_seqno": stream.snap_end,
                "state": _state(stream),
                "last_sent_seqno": stream.last_sent_seqno,
                "last_read_seqno": stream.last_read_seqno,
                "items_sent": stream.items_sent,
                "items_remaining": _remaining(stream),
            },
        )


def _state(stream: ProducerStream) -> str:
    if stream.ended:
        return "dead"
    if stream.takeover is not None and not stream.backfilling:
        return stream.takeover.state
    return "backfilling" if stream.backfilling else "in-memory"


def _remaining(stream: ProducerStream) -> int:
    """An estimate, by seqnos: deduplication may leave fewer."""
    return max(0, min(stream.vbucket.high_seqno, stream.end_seqno) - stream.last_read_seqno)


def _number(figures: dict[str, object], name: str) -> int:
    value = figures.get(name, 0)
    return value if isinstance(value, int) else 0


def dcp_aggregated(query: Query) -> Figures:
    """Sums by the first part of the connections' names, up to a separator."""
    separator = query.arguments[0] if query.arguments else ":"
    groups: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, conn in query.bucket.dcp_connections.items():
        figures = _figures(conn)
        for group in (name.split(separator)[0], ":total"):
            groups[group]["count"] += 1
            groups[group]["producer_count"] += figures.get("type") == "producer"
            for total, figure in (("total_bytes", "total_bytes_sent"), ("items_sent", "items_sent"),
                                  ("items_remaining", "items_remaining"), ("backoff", "backoff")):  # fmt: skip
                groups[group][total] += _number(figures, figure)
    for group, sums in groups.items():
        for name, value in sums.items():
            yield f"{group}:{name}", value


def dcp_takeover(query: Query) -> Figures:
    """How much the takeover of a vbucket over a connection still has to send."""
    if len(query.arguments) != 2:
        raise InvalidArguments("write: dcp-vbtakeover VBUCKET CONNECTION-NAME")
    vb = query.bucket.store.vbucket(vbucket_number(query.arguments[0]))
    name = query.arguments[1]
    yield "name", name
    conn = query.bucket.dcp_connections.get(name.removeprefix("eq_dcpq:"))
    producer = conn.dcp if conn is not None else None
    found = (
        [s for s in producer.streams.values() if s.vbucket_id == vb.id] if isinstance(producer, ProducerRole) else []
    )
    if not found:
        yield "status", "connection_does_not_exist" if conn is None else "stream_does_not_exist"
        yield "estimate", vb.item_count if conn is None else 0
        yield "backfillRemaining", 0
        yield from _takeover_items(vb, 0)
        return
    stream = found[-1]
    remaining, backfilling = _remaining(stream), stream.backfilling
    yield "status", "backfilling" if backfilling else "stream_is_dead" if stream.ended else "in-memory"
    yield "estimate", remaining
    yield "backfillRemaining", remaining if backfilling else 0
    yield from _takeover_items(vb, 0 if backfilling else remaining)


def _takeover_items(vb: VBucket, in_memory: int) -> Figures:
    yield "chk_items", in_memory
    yield "vb_items", vb.item_count
    yield "on_disk_deletes", vb.tombstone_count
