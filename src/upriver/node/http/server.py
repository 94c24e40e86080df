"""The server of the management port, and its table of routes.

A route is a method, a path whose ``*`` parts become arguments, and a function. Add one with ``route``. Without users,
everything is open to clients on this machine. Requests that a browser sends for another site are refused. So are
requests for another host name while there are no users, because an attacker's name may point here.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from upriver.errors import ConfigError, KeyExists, KeyNotFound, StatusError, UpriverError
from upriver.node import log
from upriver.node.access.connection_limits import NewConnections
from upriver.node.access.roles import ADMIN, NOTHING, Access, Privilege, lacking
from upriver.node.http.wire import IDLE_S, MAX_HEAD, Answer, ChunkedAnswer, HttpConnection, HttpError, Request

if TYPE_CHECKING:
    from upriver.node.server import Node

_OPEN_TO_ALL = frozenset({"/pools", "/versions"})
_OF_BUCKETS = ("b", "bs", "buckets", "bucketsStreaming")

Result = Answer | ChunkedAnswer
View = Callable[..., Result | Awaitable[Result]]
_routes: list[tuple[str, list[str], View]] = []


def route(method: str, pattern: str) -> Callable[[View], View]:
    """Serve ``pattern`` with the decorated function: ``view(node, request, *parts)``, sync or async."""

    def register(view: View) -> View:
        _routes.append((method, pattern.strip("/").split("/"), view))
        return view

    return register


def find_view(request: Request) -> tuple[View, list[str]]:
    """The view of a request and its arguments; 404, or 405 if only the method is wrong."""
    methods = []
    for method, pattern, view in _routes:
        arguments = _match(pattern, request.segments)
        if arguments is not None:
            if method == request.method or (method, request.method) == ("GET", "HEAD"):
                return view, arguments
            methods.append(method)
    if methods:
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} allows {', '.join(sorted(methods))}")
    raise HttpError(HTTPStatus.NOT_FOUND, f"there is nothing at {request.path}")


def _match(pattern: list[str], segments: list[str]) -> list[str] | None:
    if len(pattern) != len(segments):
        return None
    if any(want not in ("*", have) for want, have in zip(pattern, segments, strict=True)):
        return None
    return [have for want, have in zip(pattern, segments, strict=True) if want == "*"]


class HttpServer:
    """Serves the management port: ``bind``, then ``serve``. ``close`` ends every connection."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._limits = node.options.limits
        self._tasks: set[asyncio.Task[None]] = set()
        self._new_connections: NewConnections[asyncio.Task[None]] = NewConnections(self._limits.max_new_connections)
        self._server: asyncio.Server
        self.port = 0

    async def bind(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD, start_serving=False)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def serve(self) -> None:
        await self._server.start_serving()

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        host = _peer(writer)
        leaving = self._new_connections.add(task, host)
        if leaving is not None:
            leaving.cancel()
        try:
            await self._serve(HttpConnection(reader, writer), task, host)
        except (ConnectionError, TimeoutError):
            pass  # the client is gone, or does not read
        except asyncio.CancelledError:
            writer.transport.abort()  # the node stops, or a newer connection takes the place
        except Exception:
            log.failure("http_failed")
        finally:
            self._tasks.discard(task)
            self._new_connections.remove(task, host)
            writer.close()

    async def _serve(self, connection: HttpConnection, task: asyncio.Task[None], host: str) -> None:
        idle_s = self._limits.silent_s
        while connection.is_open:
            try:
                request = await connection.receive(idle_s)
                if request is None:
                    return
                idle_s = IDLE_S
                self._count_as_known(task, host)
            except HttpError as error:
                await connection.refuse(error)
                return
            await connection.send(await self._answer(request, host))

    def _count_as_known(self, task: asyncio.Task[None], host: str) -> None:
        """Count the connection as known, now that it has sent a request; 503 if there are too many."""
        was_new = self._new_connections.remove(task, host)
        known = len(self._tasks) - len(self._new_connections)
        if was_new and known > self._limits.max_http_connections:
            raise HttpError(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; try again later")

    async def _answer(self, request: Request, host: str) -> Result:
        try:
            request = replace(request, access=await self._access(request, host))
            view, arguments = find_view(request)
            _check_rights(request)
            result = view(self._node, request, *arguments)
            return await result if isinstance(result, Awaitable) else result
        except HttpError as error:
            return Answer.refusing(error)
        except (KeyNotFound, KeyExists, StatusError, ConfigError) as error:
            return Answer.refusing(HttpError(_status_of(error), str(error)))
        except Exception:
            log.failure("http_request_failed", method=request.method, path=request.path)
            reason = "internal error; the node's log says more"
            return Answer.refusing(HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, reason))

    async def _access(self, request: Request, host: str) -> Access:
        """What the sender of a request may do; ``HttpError`` if the sender is not allowed to ask."""
        node = self._node
        origin = request.headers.get("origin")
        if origin and origin.partition("://")[2] != request.headers.get("host"):
            raise HttpError(HTTPStatus.FORBIDDEN, "requests from other web sites are refused")
        if node.users.empty and _is_loopback(host):
            _check_host(request.headers.get("host", ""), node.options.host)
            return ADMIN
        given = request.basic_credentials()
        if given is not None and await node.logins.password_is(node.users, *given):
            node.logins.succeeded(given[0], host)
            return node.users.access(given[0])
        if request.path in _OPEN_TO_ALL:
            return Access()
        if given is not None:
            await node.logins.failed(given[0], host, "HTTP")
        raise HttpError(HTTPStatus.UNAUTHORIZED, "a user name and its password are needed")


def _check_host(given: str, own: str) -> None:
    """Refuse other host names: without passwords, only the name reveals that another site sent a browser here."""
    try:
        name = urlsplit(f"//{given}").hostname or ""
    except ValueError:
        name = given
    if name and name not in ("localhost", own) and not _is_loopback(name):
        raise HttpError(HTTPStatus.FORBIDDEN, f"this node is not {name!r}: call it by its address, or add a user")


def _check_rights(request: Request) -> None:
    """Every user may read what concerns no bucket, or a bucket in which they have a role; changes need a privilege."""
    needed, bucket = _needed(request)
    have = request.access.inside(bucket) if bucket else request.access.outside
    allowed = bool(have) if needed is NOTHING and bucket else not needed & ~have
    if not allowed:
        reason = "the user has no role in this bucket" if needed is NOTHING else lacking(needed)
        raise HttpError(HTTPStatus.FORBIDDEN, reason)


def _needed(request: Request) -> tuple[Privilege, str]:
    """The privilege that a request needs, and in which bucket."""
    parts = request.segments
    is_read = request.method in ("GET", "HEAD")
    if parts[:1] == ["upriver"]:
        return Privilege.NODE_ADMIN, ""
    if parts[:2] == ["pools", "default"] and len(parts) > 3 and parts[2] in _OF_BUCKETS:
        if len(parts) == 4 and request.method == "DELETE":
            return Privilege.NODE_ADMIN, ""
        return (NOTHING if is_read else Privilege.BUCKET_ADMIN), parts[3]
    return (NOTHING if is_read else Privilege.NODE_ADMIN), ""


def _status_of(error: UpriverError) -> HTTPStatus:
    return HTTPStatus.NOT_FOUND if isinstance(error, KeyNotFound) else HTTPStatus.BAD_REQUEST


def _peer(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return str(peer[0]).partition("%")[0] if peer else ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
