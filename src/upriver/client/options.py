"""Where and how to connect: one frozen dataclass that parses connection strings, the environment and TOML files."""

from __future__ import annotations

import os
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from upriver.errors import ConfigError
from upriver.protocol.topology import Address, Topology, parse_topology

DEFAULT_PORT = 11210
DEFAULT_TLS_PORT = 11207
DEFAULT_WINDOW = 20 * 1024 * 1024
ENVIRONMENT_PREFIX = "UPRIVER_"
NETWORKS = ("auto", "default", "external")


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
    network: str = "auto"
    dns_srv: bool = True  # look a single host without a port up as _couchbase._tcp, where dnspython is installed
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    noop_interval_s: float = 20.0
    window_bytes: int = DEFAULT_WINDOW  # of flow control, per node: what a feed may hold that the caller has not taken
    allow_plain: bool = False

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ConfigError(f"network: {self.network!r} is not one of {', '.join(NETWORKS)}")
        if self.client_key and not self.client_cert:
            raise ConfigError("client_key needs client_cert")
        if not 0 <= self.window_bytes < 2**32:
            raise ConfigError(f"window_bytes: {self.window_bytes} is not between 0 (no flow control) and 4 GiB")

    @classmethod
    def parse(cls, connection: str, **given: Any) -> ConnectOptions:
        """From a connection string; keyword arguments win over its ``?query``, which wins over the environment."""
        tls, seeds, query = parse_connection_string(connection)
        known = {f.name: f for f in fields(cls) if f.name != "seeds"}
        merged = {**_from_environment(known), **query, **{k: v for k, v in given.items() if v is not None}}
        unknown = sorted(set(merged) - set(known))
        if unknown:
            raise ConfigError(f"unknown option {unknown[0]!r}; valid are {', '.join(sorted(known))}")
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
        return _ssl_context(self.ca_file, self.client_cert, self.client_key) if self.tls else None

    def parse_map(self, config: Any, seen_host: str) -> Topology:
        """A cluster map with the addresses that these options can reach."""
        return parse_topology(config, seen_host, tls=self.tls, network=self.network)


@cache
def _ssl_context(ca_file: str, client_cert: str, client_key: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file or None)
        if client_cert:
            context.load_cert_chain(client_cert, client_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"ca_file, client_cert or client_key cannot be used: {error}") from error
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
    try:
        parts = urlsplit("//" + text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r}: {error}") from error
    if not parts.hostname or "@" in text or "/" in text:
        raise ConfigError(f"{text!r} is not a host, or host:port")
    return Address(parts.hostname, port or (DEFAULT_TLS_PORT if tls else DEFAULT_PORT))


def srv_seeds(options: ConnectOptions) -> tuple[Address, ...]:
    """The seeds that DNS lists for a single host name, or the given ones where there is no such list.

    Needs dnspython, which is used when it is installed; the standard library cannot ask for SRV records. Blocking.
    """
    default = DEFAULT_TLS_PORT if options.tls else DEFAULT_PORT
    if not options.dns_srv or len(options.seeds) != 1 or options.seeds[0].port != default:
        return options.seeds
    host = options.seeds[0].host
    if host == "localhost" or ":" in host or host.replace(".", "").isdigit():
        return options.seeds
    try:
        resolver, exception = import_module("dns.resolver"), import_module("dns.exception")
    except ImportError:
        return options.seeds
    service = "_couchbases" if options.tls else "_couchbase"
    try:
        found = resolver.resolve(f"{service}._tcp.{host}", "SRV")
    except exception.DNSException:
        return options.seeds
    return tuple(Address(str(record.target).rstrip("."), int(record.port)) for record in found) or options.seeds


def _from_environment(known: Mapping[str, Any]) -> dict[str, str]:
    found = {name: os.environ.get(ENVIRONMENT_PREFIX + name.upper()) for name in known}
    return {name: value for name, value in found.items() if value is not None}


def _typed(name: str, value: Any, annotation: Any) -> Any:
    if not isinstance(value, str) or annotation == "str":
        return value
    try:
        if annotation in ("float", "int"):
            return float(value) if annotation == "float" else int(value)
    except ValueError as error:
        raise ConfigError(f"{name}: {value!r} is not a number") from error
    if value.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
        raise ConfigError(f"{name}: {value!r} is neither true nor false")
    return value.lower() in ("true", "1", "yes", "on")
