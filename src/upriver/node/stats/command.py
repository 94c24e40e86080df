"""STAT: groups of figures under the names that existing tools read (docs/protocol/session.md#stats).

A group is a generator of names and values; each pair is one packet. Only figures that are really known are reported.
A long group gives the other connections turns in between, and waits for a client that reads slowly.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import orjson

from upriver.errors import InvalidArguments, KeyNotFound
from upriver.node.dispatch import command
from upriver.node.stats import collections, dcp, general, vbuckets
from upriver.node.stats.query import Figures, Query
from upriver.wire.messages.session import Stat

if TYPE_CHECKING:
    from upriver.node.connection import ClientConnection

_PER_TURN = 500
_SLOW_READER_S = 0.02

GROUPS: dict[str, Callable[[Query], Figures]] = {
    "": general.general,
    "config": general.config,
    "connections": general.connections,
    "dcp": dcp.dcp,
    "dcpagg": dcp.dcp_aggregated,
    "dcp-vbtakeover": dcp.dcp_takeover,
    "memory": general.memory,
    "reset": general.reset,
    "warmup": general.warmup,
    "vbucket": vbuckets.vbucket,
    "vbucket-details": vbuckets.vbucket_details,
    "vbucket-seqno": vbuckets.vbucket_seqno,
    "failovers": vbuckets.failovers,
    "collections": collections.collections,
    "collections-byid": collections.collections_by_id,
    "collections-details": collections.collections_details,
    "key": vbuckets.key,
    "key-byid": vbuckets.key_by_id,
    "responses": general.responses,
    "scopes": collections.scopes,
    "scopes-byid": collections.scopes_by_id,
    "vkey": vbuckets.vkey,
    "vkey-byid": vbuckets.vkey_by_id,
    "uuid": vbuckets.uuid,
}


async def stat(conn: ClientConnection, request: Stat) -> None:
    """Answer with one packet per figure, and an empty one at the end."""
    name, *arguments = request.group.decode("utf-8", "backslashreplace").split(" ") or [""]
    group = GROUPS.get(name)
    if group is None:
        raise KeyNotFound(f"there is no group {name!r}; there are {', '.join(sorted(filter(None, GROUPS)))}")
    figures = group(Query(conn, [word for word in arguments if word], _options(request)))
    for sent, (key, value) in enumerate(figures, 1):
        conn.reply(request, key=key.encode()[:0xFFFF], value=_shown(value))
        if sent % _PER_TURN == 0:
            await _give_others_a_turn(conn)
    conn.reply(request)


async def _give_others_a_turn(conn: ClientConnection) -> None:
    conn.flush()
    await asyncio.sleep(0)
    while not conn.can_write and not conn.closed:  # noqa: ASYNC110 - only the connection hears it from the transport
        await asyncio.sleep(_SLOW_READER_S)


def _options(request: Stat) -> dict[str, object]:
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
