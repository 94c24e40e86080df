"""HTTP/1.1 for the management port: requests in, JSON or chunked answers out, with limits on everything.

h11 parses and frames. This module moves its bytes, refuses what is too large or too slow, and checks arguments. The
requests of one connection are answered in order, pipelined or not.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import h11
import orjson

from upriver.node.access.roles import ADMIN, Access

MAX_HEAD = 16 * 1024
MAX_BODY = 1024 * 1024
MAX_HEADERS = 100
REQUEST_S = 30.0  # for one request to arrive, once its first byte has
IDLE_S = 75.0
SEND_S = 30.0
_READ_SIZE = 16 * 1024
_NUMBER = re.compile(r"-?[0-9]{1,20}\Z")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
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
    access: Access = ADMIN  # what the sender may do

    @property
    def segments(self) -> list[str]:
        return [unquote(part) for part in self.path.split("/") if part]

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


def number_or_none(arguments: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A number from ``low`` to ``high``; None if it is missing or empty."""
    text = _text(arguments, name)
    if not text:
        return None
    if not _NUMBER.match(text) or not low <= int(text) <= high:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be a number from {low} to {high}", name)
    return int(text)


def flag_or_none(arguments: Mapping[str, Any], name: str) -> bool | None:
    """A flag as forms (``0``, ``1``) and JSON write it; None if it is missing or empty."""
    text = _text(arguments, name)
    if not text:
        return None
    if text not in _FLAGS:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be true or false", name)
    return _FLAGS[text]


def choice_or_none(arguments: Mapping[str, Any], name: str, allowed: Mapping[str, Any]) -> Any:
    """The value that the text stands for; None if it is missing or empty."""
    text = _text(arguments, name)
    if not text:
        return None
    for word, value in allowed.items():
        if word.lower() == text:
            return value
    raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} must be one of {', '.join(allowed)}", name)


def _text(arguments: Mapping[str, Any], name: str) -> str:
    return str(arguments.get(name, "")).strip().lower()


@dataclass(frozen=True, slots=True)
class Answer:
    """A response with a JSON body, or raw bytes that are JSON already."""

    content: Any = None
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def refusing(cls, error: HttpError) -> Answer:
        headers = {"WWW-Authenticate": 'Basic realm="upriver"'} if error.status is HTTPStatus.UNAUTHORIZED else {}
        return cls({"errors": {error.field_name: error.reason}}, error.status, headers)

    @property
    def body(self) -> bytes:
        if self.content is None:
            return b""
        return self.content if isinstance(self.content, bytes) else json.dumps(self.content).encode()


@dataclass(frozen=True, slots=True)
class ChunkedAnswer:
    """A response that is sent piece by piece, one chunk each."""

    pieces: AsyncIterator[bytes]


class HttpConnection:
    """One client's connection: ``receive`` a request, ``send`` its answer, and again while ``is_open``."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._machine = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD)
        self._is_head = False

    async def receive(self, idle_s: float = IDLE_S) -> Request | None:
        """The next request; None if the client is gone or silent; ``HttpError`` if the request is refused."""
        self._is_head = False
        try:
            if not self._machine.trailing_data[0]:
                async with asyncio.timeout(idle_s):
                    await self._read()
            async with asyncio.timeout(REQUEST_S):
                return await self._request()
        except (TimeoutError, ConnectionError):
            return None
        except h11.RemoteProtocolError as error:
            raise HttpError(HTTPStatus(error.error_status_hint), str(error)) from error

    async def _request(self) -> Request | None:
        head = await self._event()
        if not isinstance(head, h11.Request):
            return None
        self._is_head = head.method == b"HEAD"
        headers = _checked_headers(head)
        target = _target(head)
        if self._machine.they_are_waiting_for_100_continue:
            self._write(h11.InformationalResponse(status_code=100, headers=[]))
        body = bytearray()
        while isinstance(event := await self._event(), h11.Data):
            body += event.data
        query = dict(parse_qsl(target.query, keep_blank_values=True))
        return Request(head.method.decode("ascii"), target.path, query, headers, bytes(body))

    async def _event(self) -> object:
        while (event := self._machine.next_event()) is h11.NEED_DATA:
            await self._read()
        return event

    async def _read(self) -> None:
        self._machine.receive_data(await self._reader.read(_READ_SIZE))

    async def send(self, result: Answer | ChunkedAnswer) -> None:
        """Send the answer to the request; ``TimeoutError`` if the client does not read it in time."""
        if isinstance(result, ChunkedAnswer):
            await self._send_stream(result)
        else:
            body = result.body
            self._respond(result.status, {"Content-Length": str(len(body)), **result.headers})
            await self._finish(body)
        if self.is_open:
            self._machine.start_next_cycle()

    async def refuse(self, error: HttpError) -> None:
        """Send a refusal as the last answer on this connection."""
        answer = Answer.refusing(error)
        headers = {"Content-Length": str(len(answer.body)), "Connection": "close", **answer.headers}
        self._respond(answer.status, headers)
        await self._finish(answer.body)

    async def _send_stream(self, stream: ChunkedAnswer) -> None:
        self._respond(HTTPStatus.OK, {"Transfer-Encoding": "chunked", "Connection": "close"})
        if not self._is_head:
            async for piece in stream.pieces:
                self._write(h11.Data(data=piece))
                await self._drain()
        await self._finish(b"")

    def _respond(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        always = {"Server": "upriver", "Cache-Control": "no-store", "Content-Type": "application/json"}
        self._write(
            h11.Response(
                status_code=status.value, reason=status.phrase.encode(), headers=list({**always, **headers}.items())
            )
        )

    async def _finish(self, body: bytes) -> None:
        if body and not self._is_head:
            self._write(h11.Data(data=body))
        self._write(h11.EndOfMessage())
        await self._drain()

    def _write(self, event: h11.Event) -> None:
        self._writer.write(self._machine.send(event) or b"")

    async def _drain(self) -> None:
        async with asyncio.timeout(SEND_S):
            await self._writer.drain()

    @property
    def is_open(self) -> bool:
        """Whether another request may come: neither end has said that this is the last one."""
        return self._machine.our_state in (h11.DONE, h11.IDLE) and self._machine.their_state in (h11.DONE, h11.IDLE)


def _checked_headers(head: h11.Request) -> dict[str, str]:
    pairs = [(name.decode("ascii"), value.decode("latin-1")) for name, value in head.headers]
    if len(pairs) > MAX_HEADERS:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"more than {MAX_HEADERS} headers")
    if sum(len(name) + len(value) + 4 for name, value in pairs) + len(head.target) > MAX_HEAD:
        raise HttpError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"headers exceed {MAX_HEAD} bytes")
    headers: dict[str, str] = {}
    for name, value in pairs:
        if name in _ONCE and name in headers:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"{name} is given twice")
        headers[name] = value
    if "transfer-encoding" in headers:
        raise HttpError(HTTPStatus.LENGTH_REQUIRED, "send the body with a Content-Length")
    if int(headers.get("content-length", "0")) > MAX_BODY:
        raise HttpError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a body has at most {MAX_BODY} bytes")
    return headers


def _target(head: h11.Request) -> SplitResult:
    target = head.target.decode("ascii")
    if not target.startswith("/"):
        raise HttpError(HTTPStatus.BAD_REQUEST, "the target of a request is a path")
    try:
        return urlsplit(target)
    except ValueError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, f"the path is malformed: {error}") from error
