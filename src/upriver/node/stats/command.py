"""STAT: groups of figures under the names that existing tools read (``protocol.md`` 10.10).

A group is a generator of (name, value); the handler sends one packet each. Only figures that are really known are
reported. A long group lets the other connections work in between, and waits for a client that reads slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.node.dispatch import command
from upriver.node.stats import collections as stats_collections
from upriver.node.stats import dcp as stats_dcp
from upriver.node.stats import general as stats_general
from upriver.node.stats import keys as stats_keys
from upriver.node.stats import vbuckets as stats_vbuckets
from upriver.node.stats.query import Figures, Query
from upriver.wire.messages.session import Stat

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

_PER_TURN = 500
_SLOW_READER_S = 0.02

GROUPS: dict[str, Callable[[Query], Figures]] = {
    "": stats_general.general,
    "config": stats_general.config,
    "connections": stats_general.connections,
    "dcp": stats_dcp.dcp,
    "dcpagg": stats_dcp.dcp_aggregated,
    "dcp-vbtakeover": stats_dcp.dcp_takeover,
    "memory": stats_general.memory,
    "reset": stats_general.reset,
    "warmup": stats_general.warmup,
    "vbucket": stats_vbuckets.vbucket,
    "vbucket-details": stats_vbuckets.vbucket_details,
    "vbucket-seqno": stats_vbuckets.vbucket_seqno,
    "failovers": stats_vbuckets.failovers,
    "collections": stats_collections.collections,
    "collections-byid": stats_collections.collections_by_id,
    "collections-details": stats_collections.collections_details,
    "key": stats_keys.key,
    "key-byid": stats_keys.key_by_id,
    "responses": stats_general.responses,
    "scopes": stats_collections.scopes,
    "scopes-byid": stats_collections.scopes_by_id,
    "vkey": stats_keys.vkey,
    "vkey-byid": stats_keys.vkey_by_id,
    "uuid": stats_vbuckets.uuid,
}


async def stat(conn: ClientConnection, request: Stat) -> None:
    name, *arguments = request.group.decode("utf-8", "backslashreplace").split(" ") or [""]
    group = GROUPS.get(name)
    if group is None:
        raise KeyNotFound(f"there is no group {name!r}, but {', '.join(sorted(filter(None, GROUPS)))}")
    figures = group(Query(conn, [word for word in arguments if word], _options(request)))
    for sent, (key, value) in enumerate(figures, 1):
        conn.reply(request, key=key.encode()[:0xFFFF], value=_shown(value))
        if sent % _PER_TURN == 0:
            await _let_others_work(conn)
    conn.reply(request)


async def _let_others_work(conn: ClientConnection) -> None:
    conn.flush()
    await asyncio.sleep(0)
    while not conn.can_write and not conn.closed:  # noqa: ASYNC110 - the transport says so to the connection alone
        await asyncio.sleep(_SLOW_READER_S)


def _options(request: Stat) -> dict[str, Any]:
    if not request.value:
        return {}
    try:
        options = orjson.loads(request.value)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        raise InvalidArguments("the value must be a JSON object")
    return options


def _shown(value: object) -> bytes:
    if isinstance(value, bool):
        return b"true" if value else b"false"
    return str(value).encode()


COMMANDS = (command(Stat, stat, needs_bucket=False),)
