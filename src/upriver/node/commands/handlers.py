"""Where the command modules come together; the only place that knows them all."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from upriver.node import dispatch
from upriver.node.access import auth, tls
from upriver.node.commands import collections as collection_commands
from upriver.node.commands import dcp as dcp_commands
from upriver.node.commands import error_map
from upriver.node.commands import kv as kv_commands
from upriver.node.commands import meta as meta_commands
from upriver.node.commands import observe as observe_commands
from upriver.node.commands import session as session_commands
from upriver.node.commands import vbuckets as vbucket_commands
from upriver.node.dcp import consumer as consumer_role
from upriver.node.stats import command as stats
from upriver.node.subdoc import commands as subdoc
from upriver.wire import Message
from upriver.wire.messages import subdoc as wire_subdoc

if TYPE_CHECKING:
    import ssl

    from upriver.node.access.users import Users
    from upriver.node.connection import ClientConnection
    from upriver.node.http.routes import HttpServer
    from upriver.node.options import NodeOptions
    from upriver.node.server import Node

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

    def run(conn: ClientConnection, request: Any) -> Awaitable[None] | None:
        conn.require_bucket().expect_xattrs()
        return handler(conn, request)

    return run


def load_users(options: NodeOptions) -> Users:
    return auth.load(options)


def tls_context(options: NodeOptions) -> ssl.SSLContext:
    return tls.context(options)


async def start_http(node: Node) -> HttpServer:
    from upriver.node.http import routes as http

    return await http.start(node)
