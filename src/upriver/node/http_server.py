"""The server of the management port around ``http_wire``, and the table of routes.

A route is a method, a path whose ``*`` parts become arguments, and a function. Add one with ``route``. Without users
everything is open to clients on this machine; a browser's request from another site is refused in any case.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from upriver.errors import ConfigError, KeyExists, KeyNotFound, StatusError, UpriverError
from upriver.node import log
from upriver.node.http_wire import (
    MAX_HEAD,
    Answer,
    HttpError,
    Request,
    Stream,
    error_answer,
    read_request,
    send,
    send_stream,
)

if TYPE_CHECKING:
    from upriver.node.server import Node

MAX_CONNECTIONS = 256
_OPEN_TO_ALL = frozenset({"/pools", "/versions"})

Result = Answer | Stream
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
        raise HttpError(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.path} knows {', '.join(sorted(methods))}")
    raise HttpError(HTTPStatus.NOT_FOUND, f"there is nothing at {request.path}")


def _match(pattern: list[str], segments: list[str]) -> list[str] | None:
    if len(pattern) != len(segments):
        return None
    if any(want not in ("*", have) for want, have in zip(pattern, segments, strict=True)):
        return None
    return [have for want, have in zip(pattern, segments, strict=True) if want == "*"]


class HttpServer:
    """Listens; ``port`` is the real one. ``close`` ends open streams too."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server
        self.port = 0

    async def listen(self, host: str, port: int) -> None:
        self._server = await asyncio.start_server(self._connected, host, port, limit=MAX_HEAD)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) <= MAX_CONNECTIONS:
                await self._serve(reader, writer)
        except (ConnectionError, TimeoutError):
            pass  # the client has gone, or does not read: there is nobody to tell
        except Exception:
            log.failure("http_failed")
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                request = await read_request(reader)
            except HttpError as error:
                await send(writer, error_answer(error).encode(keep_alive=False))
                return
            if request is None:
                return
            result = await self._answer(request, _is_loopback(writer))
            if isinstance(result, Stream):
                await send_stream(writer, result)
                return
            await send(writer, result.encode(request.keep_alive, with_body=request.method != "HEAD"))
            if not request.keep_alive:
                return

    async def _answer(self, request: Request, loopback: bool) -> Result:
        try:
            await self._authorize(request, loopback)
            view, arguments = find_view(request)
            result = view(self._node, request, *arguments)
            return await result if isinstance(result, Awaitable) else result
        except HttpError as error:
            return error_answer(error)
        except (KeyNotFound, KeyExists, StatusError, ConfigError) as error:
            return error_answer(HttpError(_status_of(error), str(error)))
        except Exception:
            log.failure("http_request_failed", method=request.method, path=request.path)
            return error_answer(HttpError(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; the node's log says more"))

    async def _authorize(self, request: Request, loopback: bool) -> None:
        origin = request.headers.get("origin")
        if origin and urlsplit(origin).netloc != request.headers.get("host"):
            raise HttpError(HTTPStatus.FORBIDDEN, "requests from other web sites are refused")
        users = self._node.users
        if (users.empty and loopback) or request.path in _OPEN_TO_ALL:
            return
        given = request.basic_credentials()
        loop = asyncio.get_running_loop()
        if given is None or not await loop.run_in_executor(None, users.password_is, *given):
            raise HttpError(HTTPStatus.UNAUTHORIZED, "a user name and its password are needed")


def _status_of(error: UpriverError) -> HTTPStatus:
    return HTTPStatus.NOT_FOUND if isinstance(error, KeyNotFound) else HTTPStatus.BAD_REQUEST


def _is_loopback(writer: asyncio.StreamWriter) -> bool:
    peer = writer.get_extra_info("peername")
    return bool(peer) and ipaddress.ip_address(peer[0].split("%")[0]).is_loopback
