"""Where the command modules come together; the only place that knows them all."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from upriver.node import (
    auth,
    collection_commands,
    consumer_role,
    dcp_commands,
    dispatch,
    error_map,
    kv_commands,
    meta_commands,
    observe_commands,
    session_commands,
    stats,
    subdoc,
    tls,
    vbucket_commands,
)
from upriver.wire import Message
from upriver.wire import subdoc as wire_subdoc

if TYPE_CHECKING:
    import ssl

    from upriver.node.connection import Connection
    from upriver.node.http import HttpServer
    from upriver.node.options import NodeOptions
    from upriver.node.server import Node
    from upriver.node.users import Users

_MODULES = (
    session_commands, kv_commands, meta_commands, observe_commands, vbucket_commands, collection_commands,
    dcp_commands, consumer_role, auth, error_map, subdoc, stats,
)  # fmt: skip


def register_all() -> None:
    for module in _MODULES:
        dispatch.register(module.HANDLERS, module.BUCKETLESS)
    dispatch.register({kind: _expecting_xattrs(subdoc.HANDLERS[kind]) for kind in _XATTR_WRITERS})


_XATTR_WRITERS: tuple[type[Message], ...] = (wire_subdoc.SubdocMutation, wire_subdoc.SubdocMultiMutation)


def _expecting_xattrs(handler: dispatch.Handler) -> dispatch.Handler:
    """Sub-document mutations may write extended attributes, which plain writes then have to keep."""

    def run(conn: Connection, request: Any) -> Awaitable[None] | None:
        conn.require_bucket().expect_xattrs()
        return handler(conn, request)

    return run


def load_users(options: NodeOptions) -> Users:
    return auth.load(options)


def tls_context(options: NodeOptions) -> ssl.SSLContext:
    return tls.context(options)


async def start_http(node: Node) -> HttpServer:
    from upriver.node import http

    return await http.start(node)
