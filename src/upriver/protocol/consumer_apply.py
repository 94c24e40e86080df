"""Messages that are not plain documents, as the records a replica keeps: system events and prepares."""

from __future__ import annotations

from upriver.protocol.consumer_streams import Replica
from upriver.wire.dcp import Prepare
from upriver.wire.events import CollectionBegun, CollectionEnded, SystemEvent
from upriver.wire.keys import join_key, split_key
from upriver.wire.packed import Kind, pack


def apply_event(replica: Replica, message: SystemEvent) -> int:
    """Store a system event in its plain form, whatever version it came in; its seqno."""
    content = message.content()
    plain = SystemEvent.of(message.by_seqno, content)
    owns = isinstance(content, CollectionBegun | CollectionEnded)
    record = pack(
        Kind.SYSTEM_EVENT, plain.key, plain.value, seqno=message.by_seqno, cas=message.cas,
        collection_id=content.collection_id if owns else 0, extra=plain.event << 8 | plain.version,
    )  # fmt: skip
    replica.apply_records(record)
    return message.by_seqno


def apply_prepare(replica: Replica, message: Prepare, collections: bool) -> int:
    """Store a prepare; its seqno."""
    collection_id = split_key(message.key)[0] if collections else 0
    key = message.key if collections else join_key(0, message.key)
    record = pack(
        Kind.PREPARE, key, message.value, seqno=message.by_seqno, rev_seqno=message.rev_seqno, cas=message.cas,
        flags=message.flags, time=message.expiry, datatype=message.datatype, collection_id=collection_id,
        extra=message.durability_level << 8 | message.deleted,
    )  # fmt: skip
    replica.apply_records(record)
    return message.by_seqno
