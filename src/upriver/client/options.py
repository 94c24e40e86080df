"""Where and how to connect: one frozen dataclass that parses connection strings, the environment and TOML files."""

from __future__ import annotations

import os
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from upriver.errors import ConfigError
from upriver.protocol.topology import Address

DEFAULT_PORT = 11210
DEFAULT_TLS_PORT = 11207
ENVIRONMENT_PREFIX = "UPRIVER_"


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How to reach a cluster and who we are there."""

    seeds: tuple[Address, ...]
    bucket: str = "default"
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    client_cert: str = ""
    client_key: str = field(default="", repr=False)
    network: str = "default"
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    allow_plain: bool = False

    @classmethod
    def parse(cls, connection: str, **given: Any) -> ConnectOptions:
        """From a connection string; keyword arguments win over its ``?query``, which wins over the environment."""
        tls, seeds, query = parse_connection_string(connection)
        known = {f.name: f for f in fields(cls)} | {}
        merged = {**_from_environment(known), **query, **{k: v for k, v in given.items() if v is not None}}
        unknown = sorted(set(merged) - set(known))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; valid are {', '.join(sorted(set(known) - {'seeds'}))}")
        typed = {name: _typed(name, value, known[name].type) for name, value in merged.items()}
        return replace(cls(seeds=seeds, tls=tls), **typed)

    @classmethod
    def from_toml(cls, path: str | Path, **given: Any) -> ConnectOptions:
        """From the ``[connection]`` table of a TOML file; its ``connection`` key is the connection string."""
        try:
            table = dict(tomllib.loads(Path(path).read_text())["connection"])
            return cls.parse(str(table.pop("connection")), **{**table, **given})
        except (OSError, tomllib.TOMLDecodeError, KeyError) as error:
            what = f"{path}: {error}; expected a [connection] table with connection = 'couchbase://...'"
            raise ConfigError(what) from error

    def ssl_context(self) -> ssl.SSLContext | None:
        """The TLS context to connect with, or None without TLS."""
        if not self.tls:
            return None
        context = ssl.create_default_context(cafile=self.ca_file or None)
        if self.client_cert:
            context.load_cert_chain(self.client_cert, self.client_key or None)
        return context


def parse_connection_string(text: str) -> tuple[bool, tuple[Address, ...], dict[str, str]]:
    """TLS or not, the seed nodes, and the query options of ``couchbase://host1,host2:port?option=value``.

    >>> parse_connection_string("couchbase://a,b:12000?network=external")[1]
    (Address(host='a', port=11210), Address(host='b', port=12000))
    """
    scheme, separator, rest = text.partition("://")
    if not separator or scheme not in ("couchbase", "couchbases"):
        raise ConfigError(f"{text!r} is not a connection string; write couchbase://host or couchbases://host (TLS)")
    tls = scheme == "couchbases"
    hosts, _, query = rest.partition("?")
    seeds = tuple(_seed(host, tls) for host in hosts.rstrip("/").split(",") if host)
    if not seeds:
        raise ConfigError(f"{text!r} names no host")
    return tls, seeds, dict(parse_qsl(query))


def _seed(text: str, tls: bool) -> Address:
    parts = urlsplit("//" + text)
    try:
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if not parts.hostname:
        raise ConfigError(f"{text!r} has no host name")
    return Address(parts.hostname, port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT))


def _from_environment(known: Mapping[str, Any]) -> dict[str, str]:
    found = {name: os.environ.get(ENVIRONMENT_PREFIX + name.upper()) for name in known if name != "seeds"}
    return {name: value for name, value in found.items() if value is not None}


def _typed(name: str, value: Any, annotation: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        if annotation == "float":
            return float(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {value!r} is not a number of seconds") from error
    if annotation == "bool":
        if value.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise ConfigError(f"{name}: {value!r} is neither true nor false")
        return value.lower() in ("true", "1", "yes", "on")
    return value
