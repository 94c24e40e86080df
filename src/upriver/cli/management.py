"""A node's management port as commands use it; a refusal is a ``ConfigError`` in the node's own words."""

from __future__ import annotations

import base64
import http.client
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import click

from upriver.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8091"
BUCKETS = ("pools", "default", "buckets")
_NOT_FOUND = "Requested resource not found."  # the text that SDKs look for; it does not say what is missing
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Management:
    """Where the port is, and who asks."""

    url: str
    username: str = ""
    password: str = field(default="", repr=False)

    def get(self, *path: str) -> Any:
        return self.request("GET", *path)

    def request(self, method: str, *path: str, form: Mapping[str, object] | None = None) -> Any:
        """The JSON of the answer; ``ConfigError`` says what the node, or the way to it, had against it."""
        return self._ask(method, path, urlencode(form or {}), "application/x-www-form-urlencoded")

    def post_json(self, *path: str, content: Mapping[str, object]) -> Any:
        """The same, for requests whose arguments are JSON."""
        return self._ask("POST", path, json.dumps(content), "application/json")

    def _ask(self, method: str, path: tuple[str, ...], content: str, content_type: str) -> Any:
        target = "/" + "/".join(quote(part, safe="") for part in path)
        headers = {"Content-Type": content_type} if content else {}
        if self.username:
            token = base64.b64encode(f"{self.username}:{self.password}".encode()).decode()
            headers["Authorization"] = f"Basic {token}"
        status, body = self._exchange(method, target, content, headers)
        if status >= 400:
            raise ConfigError(f"{self.url}: {self._refusal(status, body, path)}")
        return json.loads(body) if body else None

    def _refusal(self, status: int, body: bytes, path: tuple[str, ...]) -> str:
        if status == HTTPStatus.UNAUTHORIZED:
            missing = "the node wants a login: give --username, and the password in UPRIVER_PASSWORD"
            return "wrong user name or password" if self.username else missing
        reason = _reason(status, body)
        if path[:3] == BUCKETS and reason == _NOT_FOUND:
            return f"there is no bucket {path[3]!r}"
        return reason

    def _exchange(self, method: str, target: str, body: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = self._connection()
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, UnicodeError, http.client.HTTPException) as error:
            advice = "is --url the management port of a node that runs with --http-port?"
            raise ConfigError(f"{self.url} does not answer ({error}); {advice}") from error
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        wrong = f"{self.url!r} is not the address of a management port, like {DEFAULT_URL}"
        try:
            parts = urlsplit(self.url if "://" in self.url else f"http://{self.url}")
            port = parts.port
        except ValueError as error:  # also for a bracket that is not closed
            raise ConfigError(wrong) from error
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(wrong)
        return http.client.HTTPConnection(parts.hostname, port or 8091, timeout=_TIMEOUT_S)


def _reason(status: int, body: bytes) -> str:
    try:
        errors = json.loads(body)["errors"]
        return "; ".join(text if name == "_" else f"{name}: {text}" for name, text in errors.items())
    except (ValueError, KeyError, AttributeError):
        return f"HTTP status {status}"


def management_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--url``, ``--username`` and ``--password`` for a command."""
    for option in (
        click.option("--password", default="", envvar="UPRIVER_PASSWORD", help="Better in UPRIVER_PASSWORD."),
        click.option("--username", default="", envvar="UPRIVER_USERNAME"),
        click.option("--url", default=DEFAULT_URL, show_default=True, help="The node's management port."),
    ):
        command = option(command)
    return command
