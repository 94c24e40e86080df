"""HTTP/1.1 for the management port: requests in, JSON or chunked answers out, with limits on everything.

Small on purpose: no pipelining tricks, no transfer encodings in requests, no multipart. What it does not understand
it refuses with a status and closes the connection.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import orjson

from upriver.node.access.roles import ADMIN, Access

MAX_HEAD = 16 * 1024
MAX_BODY = 1024 * 1024
MAX_HEADERS = 100
REQUEST_S = 30.0  # for one request to arrive, once its first byte has
IDLE_S = 75.0
SEND_S = 30.0
_ONCE = frozenset({"content-length", "host", "authorization", "transfer-encoding", "content-type", "origin"})


class HttpError(Exception):
    """An answer other than success; ``reason`` goes to the client."""

    def __init__(self, status: HTTPStatus, reason: str, field_name: str = "_") -> None:
        super().__init__(status, reason, field_name)
        self.status, self.reason, self.field_name = status, reason, field_name


@dataclass(frozen=True, slots=True)
class Request:
    """One request; header names in lower case."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes = b""
    access: Access = ADMIN  # what whoever asks may do

    @property
    def segments(self) -> list[str]:
        return [unquote(part) for part in self.path.split("/") if part]

    @property
    def keep_alive(self) -> bool:
        return self.headers.get("connection", "").lower() != "close"

    def arguments(self) -> dict[str, Any]:
        """The body as a dictionary: JSON, or a form as Couchbase's tools send it."""
        if not self.body:
            return {}
        if "json" not in self.headers.get("content-type", ""):
            return dict(parse_qsl(self.body.decode("utf-8", "replace"), keep_blank_values=True))
        return self.json_object()

    def json_object(self) -> dict[str, Any]:
        """The body, which must be a JSON object whatever its content type says."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise HttpError(HTTPStatus.BAD_REQUEST, "the body must be a JSON object")
        return found

    def basic_credentials(self) -> tuple[str, str] | None:
        """User name and password of the Authorization header."""
        kind, _, encoded = self.headers.get("authorization", "").partition(" ")
        if kind.lower() != "basic":
            return None
        try:
            name, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, ValueError):
            return None
        return (name, password) if colon else None


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with a JSON body, or raw bytes that are JSON already."""

    content: Any = None
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)

    def encode(self, keep_alive: bool, with_body: bool = True) -> bytes:
        raw = self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()
        body = b"" if self.content is None else raw
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **self.headers}
        return head_of(self.status, headers, keep_alive) + (body if with_body else b"")


@dataclass(frozen=True, slots=True)
class Stream:
    """A response that goes on: one chunk per piece."""

    pieces: AsyncIterator[bytes]


def head_of(status: HTTPStatus, headers: Mapping[str, str], keep_alive: bool) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", "Server: upriver", "Cache-Control: no-store"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines.append(f"Connection: {'keep-alive' if keep_alive else 'close'}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def error_answer(error: HttpError) -> Answer:
    headers = {"WWW-Authenticate": 'Basic realm="upriver"'} if error.status is HTTPStatus.UNAUTHORIZED else {}
    return Answer({"errors": {error.field_name: error.reason}}, error.status, headers)


async def read_request(reader: asyncio.StreamReader, idle_s: float = IDLE_S) -> Request | None:
    """The next request, or None when the client has gone or stays silent; ``HttpError`` for what we refuse."""
    try:
        async with asyncio.timeout(idle_s):
            first = await reader.readexactly(1)
        async with asyncio.timeout(REQUEST_S):
            head = first + await reader.readuntil(b"\r\n\r\n")
            request, length = _parse_head(head)
            body = await reader.readexactly(length) if length else b""
    except (asyncio.IncompleteReadError, TimeoutError, ConnectionError):
        return None
    except asyncio.LimitOverrunError as error:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers exceed {MAX_HEAD} bytes") from error
    return Request(request.method, request.path, request.query, request.headers, body)


def _parse_head(head: bytes) -> tuple[Request, int]:
    lines = head.decode("latin-1").split("\r\n")[:-2]
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1.") or not words[1].startswith("/"):
        raise HttpError(HTTPStatus.BAD_REQUEST, "not an HTTP/1.1 request")
    if len(lines) > MAX_HEADERS:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEADERS} headers")
    headers = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or name != name.strip() or not name:
            raise HttpError(HTTPStatus.BAD_REQUEST, "a header is malformed")
        if name.lower() in _ONCE and name.lower() in headers:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is there twice")
        headers[name.lower()] = value.strip()
    try:
        target = urlsplit(words[1])
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the path is malformed: {error}") from error
    request = Request(words[0], target.path, dict(parse_qsl(target.query, keep_blank_values=True)), headers)
    return request, _body_length(headers)


def _body_length(headers: Mapping[str, str]) -> int:
    if "transfer-encoding" in headers:
        raise HttpError(HTTPStatus.LENGTH_REQUIRED, "send the body with a Content-Length")
    text = headers.get("content-length", "0")
    if not (text.isascii() and text.isdigit()):
        raise HttpError(HTTPStatus.BAD_REQUEST, "Content-Length is not a number")
    if len(text) > 9 or int(text) > MAX_BODY:
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY} bytes")
    return int(text)


async def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Bytes to a client; one that does not take them in time is given up (``TimeoutError``)."""
    writer.write(data)
    async with asyncio.timeout(SEND_S):
        await writer.drain()


async def send_stream(writer: asyncio.StreamWriter, stream: Stream) -> None:
    headers = {"Content-Type": "application/json", "Transfer-Encoding": "chunked"}
    await send(writer, head_of(HTTPStatus.OK, headers, keep_alive=False))
    async for piece in stream.pieces:
        await send(writer, b"%x\r\n%s\r\n" % (len(piece), piece))
    await send(writer, b"0\r\n\r\n")
