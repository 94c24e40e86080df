"""All routes of the management port (docs/protocol/clients.md#http).

To add a route, decorate a function with ``route`` in one of these modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from upriver.node.cluster import membership
from upriver.node.http import buckets as http_buckets
from upriver.node.http import cluster as http_cluster
from upriver.node.http import collections as http_collections
from upriver.node.http.server import HttpServer, route

if TYPE_CHECKING:
    from upriver.node.server import Node

__all__ = ["HttpServer", "route", "start"]

ROUTES = (http_cluster, http_buckets, http_collections, membership)  # importing them fills the table


async def start(node: Node) -> HttpServer:
    """Take the node's management port."""
    server = HttpServer(node)
    await server.bind(node.options.host, node.options.http_port)
    return server
