"""Requests to a node's management port; a refusal is a ``ConfigError`` in the node's own words.

The port is found as SDKs find it: in the cluster map that the node's data service sends.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from upriver.errors import AccessDenied, ConfigError, ConnectFailed, Status, StatusError

if TYPE_CHECKING:
    from upriver.client.options import ConnectOptions
    from upriver.protocol.topology import Address

BUCKETS = ("pools", "default", "buckets")
_NOT_FOUND = "Requested resource not found."  # the text that SDKs look for; it does not say what is missing
_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Management:
    """Where the port is, and who asks."""

    host: str
    port: int
    username: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    @classmethod
    def of(cls, options: ConnectOptions) -> Management:
        """The management port of the first node of a connection that answers."""
        from upriver.client.srv import srv_seeds

        failed = ""
        for seed in srv_seeds(options):
            try:
                port = _management_port(seed, options)
            except ConnectFailed as error:
                failed = failed or str(error)
            else:
                return cls(seed.host, port, options.username, options.password, options.ssl_context())
        raise ConnectFailed(failed)

    def get(self, *path: str) -> Any:
        return self.request("GET", *path)

    def request(self, method: str, *path: str, form: Mapping[str, object] | None = None) -> Any:
        """The JSON of the answer; ``ConfigError`` says why the node refused, or did not answer."""
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
        if status >= HTTPStatus.BAD_REQUEST:
            raise ConfigError(f"{self}: {_refusal(status, body, path)}")
        return json.loads(body) if body else None

    def _exchange(self, method: str, target: str, body: str, headers: dict[str, str]) -> tuple[int, bytes]:
        if self.tls is not None:
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self.host, self.port, timeout=_TIMEOUT_S, context=self.tls
            )
        else:
            connection = http.client.HTTPConnection(self.host, self.port, timeout=_TIMEOUT_S)
        with closing(connection):
            try:
                connection.request(method, target, body, headers)
                response = connection.getresponse()
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                raise ConfigError(f"{self}, the node's management port, does not answer: {error}") from error

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls is None else 'https'}://{host}:{self.port}"


def _refusal(status: int, body: bytes, path: tuple[str, ...]) -> str:
    try:
        errors = json.loads(body)["errors"]
        reason = "; ".join(text if name == "_" else f"{name}: {text}" for name, text in errors.items())
    except (ValueError, KeyError, AttributeError, TypeError):
        reason = f"HTTP status {status}"
    if path[:3] == BUCKETS and len(path) > 3 and reason == _NOT_FOUND:
        return f"there is no bucket {path[3]!r}"
    return reason


def _management_port(seed: Address, options: ConnectOptions) -> int:
    """Ask the data service for its cluster map; no bucket is needed for that."""
    from upriver.client._requests.connections import converse
    from upriver.protocol.session import config_json
    from upriver.protocol.topology import management_port
    from upriver.wire.messages.cluster import GetClusterConfig

    with closing(converse(seed, replace(options, bucket=""))) as connection:
        [answer] = connection.ask([GetClusterConfig()])
    if answer.status == Status.EACCESS and not options.username:
        raise AccessDenied(f"{seed}: the node requires a login: give --username, and the password in UPRIVER_PASSWORD")
    if answer.status != Status.SUCCESS:
        raise StatusError.of(answer.status, f"{seed}: cannot get the cluster map")
    config = config_json(getattr(answer, "value", b""))
    port = management_port(config, seed.host, tls=options.tls, network=options.network)
    if port is None:
        without = " with TLS; couchbase:// uses the one without" if options.tls else ""
        raise ConfigError(f"{seed}: the node has no management port{without}")
    return port
