"""Messages that are not taken in bulk, as the records that a replica keeps: events, prepares, UPR documents."""

from __future__ import annotations

from upriver.errors import InvalidMessage, Status, StatusError
from upriver.model import SEQNO_MAX
from upriver.protocol.consumer.rows import tombstone_value
from upriver.protocol.consumer.streams import ReplicaVbucket
from upriver.wire.keys import join_key, split_key
from upriver.wire.message import Message
from upriver.wire.messages.dcp import Abort, Commit, Prepare, SeqnoAdvanced
from upriver.wire.messages.events import CollectionBegun, CollectionEnded, SystemEvent, to_record
from upriver.wire.messages.upr import UprDeletion, UprExpiration, UprMutation
from upriver.wire.packed import RecordKind, pack
from upriver.wire.values import check_value

_UPR_KINDS = {UprMutation: RecordKind.MUTATION, UprDeletion: RecordKind.DELETION, UprExpiration: RecordKind.EXPIRATION}


def apply_message(replica: ReplicaVbucket, message: Message, collections: bool) -> int:
    """Store what one message says; returns the seqno that the stream has reached."""
    if isinstance(message, SeqnoAdvanced):
        replica.replication.advance(message.by_seqno)
        return message.by_seqno
    if isinstance(message, SystemEvent):
        return _apply_event(replica, message)
    if isinstance(message, Prepare):
        return _apply_prepare(replica, message, collections)
    if isinstance(message, Commit | Abort):
        return _complete(replica, message, collections)
    if isinstance(message, UprMutation | UprDeletion | UprExpiration):
        return _apply_upr_document(replica, message, collections)
    raise StatusError.of(Status.NOT_SUPPORTED, type(message).__name__)


def _apply_event(replica: ReplicaVbucket, message: SystemEvent) -> int:
    """A system event, in the form that stores keep, whatever version it came in."""
    content = message.content()
    event, version, key, value = to_record(content)
    collection_id = content.collection_id if isinstance(content, CollectionBegun | CollectionEnded) else 0
    record = pack(
        RecordKind.SYSTEM_EVENT, key, value, seqno=message.by_seqno, cas=message.cas, collection_id=collection_id,
        extra=event << 8 | version,
    )  # fmt: skip
    replica.replication.apply_records(record)
    return message.by_seqno


def _split(wire_key: bytes, collections: bool) -> tuple[int, bytes]:
    return split_key(wire_key) if collections else (0, wire_key)


def _apply_prepare(replica: ReplicaVbucket, message: Prepare, collections: bool) -> int:
    collection_id, key = _split(message.key, collections)
    datatype, value = message.datatype, message.value
    if message.deleted and value:
        datatype, value = tombstone_value(datatype, value)
    record = pack(
        RecordKind.PREPARE, join_key(collection_id, key), value, seqno=message.by_seqno, rev_seqno=message.rev_seqno,
        cas=_usable_cas(replica, message.cas), flags=message.flags, time=message.expiry, datatype=datatype,
        collection_id=collection_id,
        extra=message.durability_level << 8 | message.deleted,
    )  # fmt: skip
    replica.replication.apply_records(record)
    return message.by_seqno


def _check_value(value: bytes, datatype: int) -> None:
    """Only here is it known where the document ends and extended metadata begins, so the decoder could not check it."""
    try:
        check_value(value, datatype)
    except InvalidMessage as error:
        raise StatusError.of(error.status, error.reason) from error


def _usable_cas(replica: ReplicaVbucket, cas: int) -> int:
    """The message's CAS; 0 and the largest number are not valid, and are replaced by a new one.

    See docs/protocol/consumer.md#receiving.
    """
    return cas if 0 < cas < SEQNO_MAX else replica.max_cas + 1


def _complete(replica: ReplicaVbucket, message: Commit | Abort, collections: bool) -> int:
    collection_id, key = _split(message.key, collections)
    if isinstance(message, Commit):
        replica.replication.commit(key, collection_id, message.prepared_seqno, message.commit_seqno)
        return message.commit_seqno
    replica.replication.abort(key, collection_id, message.prepared_seqno, message.abort_seqno)
    return message.abort_seqno


def _apply_upr_document(
    replica: ReplicaVbucket, message: UprMutation | UprDeletion | UprExpiration, collections: bool
) -> int:
    """A document of UPR; its extended metadata is not kept, as nothing here uses it."""
    collection_id, key = _split(message.key, collections)
    flags, expiry, datatype, value = 0, 0, message.datatype, message.document
    _check_value(value, datatype)
    if isinstance(message, UprMutation):
        flags, expiry = message.flags, message.expiry
    elif value:
        datatype, value = tombstone_value(datatype, value)
    record = pack(
        _UPR_KINDS[type(message)], join_key(collection_id, key), value, seqno=message.by_seqno,
        rev_seqno=message.rev_seqno, cas=_usable_cas(replica, message.cas), datatype=datatype, flags=flags,
        time=expiry, collection_id=collection_id,
    )  # fmt: skip
    replica.replication.apply_records(record)
    return message.by_seqno
