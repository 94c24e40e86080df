"""Failover logs, high seqnos, and whether a seqno or key is on disk (docs/protocol/kv.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from struct import Struct
from typing import TYPE_CHECKING

from upriver.errors import InvalidArguments, KeyNotFound, NotMyVbucket, TemporaryFailure, UnknownCollection
from upriver.model import VbucketState
from upriver.node.dispatch import command
from upriver.wire.constants import ObserveState
from upriver.wire.messages import cluster
from upriver.wire.messages.cluster import KeyState, ObservedKey, SeqnoPersistence

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection
    from upriver.store import VBucket

_ENTRY = Struct(">QQ")
_SEQNO = Struct(">HQ")
_CURRENT = Struct(">BHQQQ")
_FAILED_OVER = Struct(">BHQQQQQ")
_ALIVE = (VbucketState.ACTIVE, VbucketState.REPLICA, VbucketState.PENDING)


def failover_log(conn: ClientConnection, request: cluster.GetFailoverLog) -> None:
    log = conn.vbucket(request.vbucket).failover_log
    conn.reply(request, value=b"".join(_ENTRY.pack(*entry) for entry in log))


def all_vb_seqnos(conn: ClientConnection, request: cluster.GetAllVbSeqnos) -> None:
    if request.collection_id is not None and not conn.context.collections:
        raise InvalidArguments("a collection id needs collections")
    wanted = (VbucketState(request.state),) if request.state else _ALIVE
    bucket = conn.require_bucket().store
    if request.collection_id is not None and request.collection_id not in bucket.manifest.collections:
        raise UnknownCollection(f"no collection {request.collection_id:x}")
    pairs = []
    for vb in bucket.existing():
        seqno = _seqno_of(conn, vb, request.collection_id) if vb.state in wanted else None
        if seqno is not None:
            pairs.append(_SEQNO.pack(vb.id, seqno))
    conn.reply(request, value=b"".join(pairs))


def _seqno_of(conn: ClientConnection, vb: VBucket, collection_id: int | None) -> int | None:
    """The high seqno as this client sees it; None if the vbucket does not have the collection."""
    if collection_id is not None:
        return vb.collection_high_seqno(collection_id) if collection_id in vb.collection_ids() else None
    if not conn.context.collections:
        return vb.visible_high_seqno(0) if 0 in vb.collection_ids() else 0
    return vb.high_seqno if vb.state is VbucketState.ACTIVE else max(vb.snapshot[1], vb.high_seqno)


def observe_seqno(conn: ClientConnection, request: cluster.ObserveSeqno) -> None:
    vb = conn.vbucket(request.vbucket)
    if vb.state is VbucketState.DEAD:
        raise NotMyVbucket
    entries = list(vb.failover_log)
    now = (entries[0].uuid, vb.persisted_seqno, vb.high_seqno)
    index = next((n for n, entry in enumerate(entries) if entry.uuid == request.vbuuid), None)
    if index is None:
        raise KeyNotFound("no such branch of history")
    if index == 0:
        value = _CURRENT.pack(0, vb.id, *now)
    else:
        value = _FAILED_OVER.pack(1, vb.id, *now, request.vbuuid, entries[index - 1].seqno)
    conn.reply(request, value=value)


def observe(conn: ClientConnection, request: cluster.Observe) -> None:
    states = tuple(_observe_one(conn, each) for each in request.observed)
    conn.reply(request, value=cluster.ObserveResponse(states).frame().value)


def _observe_one(conn: ClientConnection, observed: ObservedKey) -> KeyState:
    vb = conn.vbucket(observed.vbucket)
    if vb.state is VbucketState.DEAD:
        raise NotMyVbucket
    collection, key = conn.split(observed.key)
    try:
        document = vb.documents.get_meta(key, collection)
    except KeyNotFound:
        return KeyState(observed.vbucket, observed.key, ObserveState.NOT_FOUND, 0)
    if document.deleted:
        state = ObserveState.LOGICALLY_DELETED
    else:
        persisted = document.seqno <= vb.persisted_seqno
        state = ObserveState.PERSISTED if persisted else ObserveState.NOT_PERSISTED
    return KeyState(observed.vbucket, observed.key, state, document.cas)


def seqno_persistence(conn: ClientConnection, request: SeqnoPersistence) -> Awaitable[None] | None:
    vb = conn.vbucket(request.vbucket)
    if vb.persisted_seqno >= request.seqno:
        conn.reply(request)
        return None
    return _wait_for_seqno(conn, request)


async def _wait_for_seqno(conn: ClientConnection, request: SeqnoPersistence) -> None:
    waiting = conn.require_bucket().waits.until(request.vbucket, request.seqno)
    try:
        await asyncio.wait_for(waiting, conn.node.options.limits.persistence_wait_s)
    except TimeoutError as error:
        raise TemporaryFailure("not on disk in time") from error
    conn.reply(request)


COMMANDS = (
    command(cluster.GetFailoverLog, failover_log),
    command(cluster.GetAllVbSeqnos, all_vb_seqnos),
    command(cluster.ObserveSeqno, observe_seqno),
    command(cluster.Observe, observe),
    command(cluster.SeqnoPersistence, seqno_persistence),
)
