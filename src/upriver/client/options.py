"""Where and how to connect: one frozen dataclass that parses connection strings, the environment and TOML files.

Errors name the option and what is wrong with it, but never show a password.
"""

from __future__ import annotations

import os
import ssl
import tomllib
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, get_args
from urllib.parse import parse_qsl, unquote_plus, urlsplit

from upriver.errors import ConfigError
from upriver.protocol.topology import Address, Topology, parse_topology

DEFAULT_PORT = 11210
DEFAULT_TLS_PORT = 11207
DEFAULT_WINDOW = 20 * 1024 * 1024
ENVIRONMENT_PREFIX = "UPRIVER_"
Network = Literal["auto", "default", "external"]
NETWORKS: tuple[Network, ...] = get_args(Network)
_FROM_STRING = ("seeds", "tls")  # set only by the connection string (couchbase:// or couchbases://)
_SECONDS = ("connect_timeout_s", "request_timeout_s", "noop_interval_s")


class ConnectKeywords(TypedDict, total=False):
    """The keyword arguments of ``connect`` beside the bucket; ``ConnectOptions`` has their defaults.

    None means that the option is not given.
    """

    username: str | None
    password: str | None
    ca_file: str | os.PathLike[str] | None
    client_cert: str | os.PathLike[str] | None
    client_key: str | os.PathLike[str] | None
    network: Network | None
    dns_srv: bool | None
    dns_nameserver: str | None
    connect_timeout_s: float | None
    request_timeout_s: float | None
    noop_interval_s: float | None
    window_bytes: int | None
    allow_plain: bool | None


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How to reach a cluster, and as which user. A value: it compares and hashes, and its ``repr`` has no secrets.

    Make one with ``parse`` or ``from_toml``; change one with ``dataclasses.replace``.
    """

    seeds: tuple[Address, ...]
    bucket: str = "default"
    username: str = ""
    password: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    client_cert: str = ""
    client_key: str = field(default="", repr=False)
    network: str = "auto"
    dns_srv: bool = False  # look the seed up as a DNS service; on for connection strings without a port
    dns_nameserver: str = ""  # "address" or "address:port", instead of the system's
    connect_timeout_s: float = 10.0
    request_timeout_s: float = 30.0
    noop_interval_s: float = 20.0
    window_bytes: int = DEFAULT_WINDOW  # flow control per node: what a feed may hold for the caller
    allow_plain: bool = False

    def __post_init__(self) -> None:
        if self.network not in NETWORKS:
            raise ConfigError(f"network: {self.network!r} is not one of {', '.join(NETWORKS)}")
        if self.client_key and not self.client_cert:
            raise ConfigError("client_key needs client_cert")
        if not 0 <= self.window_bytes < 2**32:
            raise ConfigError(f"window_bytes: {self.window_bytes} is not between 0 (no flow control) and 4 GiB")
        for name in _SECONDS:
            if not 0 < getattr(self, name) < 2**31:
                raise ConfigError(f"{name}: {getattr(self, name)} is not a number of seconds above 0")

    @classmethod
    def of(
        cls, connection: str | ConnectOptions, bucket: str | None = None, **given: Unpack[ConnectKeywords]
    ) -> ConnectOptions:
        """From the arguments of ``connect``: options as they are, or a connection string."""
        if not isinstance(connection, ConnectOptions):
            return cls.parse(connection, bucket, **given)
        if twice := [name for name, value in {"bucket": bucket, **given}.items() if value is not None]:
            raise ConfigError(f"{twice[0]}: set it in the options (dataclasses.replace changes them)")
        return connection

    @classmethod
    def parse(cls, connection: str, bucket: str | None = None, **given: Unpack[ConnectKeywords]) -> ConnectOptions:
        """From a connection string. Keyword arguments override its ``?query``, which overrides the environment."""
        return cls._merge(connection, {}, {"bucket": bucket, **given})

    @classmethod
    def from_toml(
        cls,
        path: str | Path,
        bucket: str | None = None,
        *,
        connection: str | None = None,
        **given: Unpack[ConnectKeywords],
    ) -> ConnectOptions:
        """From the ``[connection]`` table of a TOML file; its ``connection`` key is the connection string.

        Keyword arguments, the ``?query`` and the environment override the file.
        """
        table = _connection_table(path)
        ours = table.pop("connection")
        try:
            return cls._merge(connection or ours, table, {"bucket": bucket, **given})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def _merge(cls, connection: str, file: Mapping[str, Any], given: Mapping[str, Any]) -> ConnectOptions:
        parsed = parse_connection_string(connection)
        known = {f.name: f for f in fields(cls) if f.name not in _FROM_STRING}
        said = {name: value for name, value in given.items() if value is not None}
        merged = {"dns_srv": True, **file, **_from_environment(known), **parsed.query, **said}
        if unknown := sorted(set(merged) - set(known)):
            raise ConfigError(f"unknown option {unknown[0]!r}; valid are {', '.join(sorted(known))}")
        typed = {name: _typed(known[name], value) for name, value in merged.items()}
        typed["dns_srv"] = typed["dns_srv"] and parsed.is_service
        return replace(cls(seeds=parsed.seeds, tls=parsed.tls), **typed)

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


def password_of(password: str, file: str, option: str) -> str:
    """The password, or else the content of ``file``; ``ConfigError``, naming ``option``, if it cannot be read."""
    if password or not file:
        return password
    try:
        return Path(file).read_text().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"{option}: {error}") from error


class ConnectionString(NamedTuple):
    """The parts of a connection string."""

    tls: bool
    seeds: tuple[Address, ...]
    query: dict[str, str]
    is_service: bool  # a single host name without a port, which may be a DNS service


def parse_connection_string(text: str) -> ConnectionString:
    """TLS or not, the seed nodes, and the query options of ``couchbase://host1,host2:port?option=value``.

    >>> parse_connection_string("couchbase://a,b:12000?network=external").seeds
    (Address(host='a', port=11210), Address(host='b', port=12000))
    """
    base, _, query = text.partition("?")
    if "@" in base:
        raise ConfigError(
            "a connection string must not contain a name and password: use the options username and password"
        )
    scheme, separator, hosts = base.partition("://")
    if not separator or scheme not in ("couchbase", "couchbases"):
        raise ConfigError(f"{base!r} is not a connection string; write couchbase://host or couchbases://host (TLS)")
    found = [_seed(host) for host in hosts.rstrip("/").split(",") if host]
    if not found:
        raise ConfigError(f"{base!r} names no host")
    default = DEFAULT_TLS_PORT if scheme == "couchbases" else DEFAULT_PORT
    seeds = tuple(Address(host, default if port is None else port) for host, port in found)
    is_service = len(found) == 1 and found[0][1] is None and _is_name(found[0][0])
    return ConnectionString(scheme == "couchbases", seeds, dict(parse_qsl(query)), is_service)


def has_password(connection: str) -> bool:
    """Whether a connection string contains a password."""
    return redacted(connection) != connection


def redacted(connection: str) -> str:
    """A connection string for messages and logs: without passwords.

    >>> redacted("couchbase://h?password=secret&network=auto")
    'couchbase://h?password=***&network=auto'
    """
    base, mark, query = connection.partition("?")
    if "@" in base:
        scheme, separator, rest = base.rpartition("://")
        base = f"{scheme}{separator}***@{rest.rpartition('@')[2]}"
    words = ["password=***" if _is_password(word) else word for word in query.split("&")]
    return base + mark + "&".join(words)


def _is_password(word: str) -> bool:
    name, equals, _ = word.partition("=")
    return bool(equals) and unquote_plus(name) == "password"


def _seed(text: str) -> tuple[str, int | None]:
    try:
        parts = urlsplit("//" + text)
        host, port = parts.hostname or "", parts.port
        good = port != 0 and _is_host(text, host, port)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a host of a connection string: {error}") from error
    if not good:
        raise ConfigError(f"{text!r} is not a host, host:port, or an IPv6 address as [::1] or [::1]:port")
    return host, port


def _is_host(text: str, host: str, port: int | None) -> bool:
    """Whether a host can be looked up at all; if not, fail here and not far away."""
    if text.startswith("["):
        behind = text.partition("]")[2]
        return ip_address(host).version == 6 and behind == ("" if port is None else f":{port}")
    host.encode("idna")
    return bool(host) and not any(each.isspace() or each in "/\\#\0" for each in text)


def _is_name(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return host != "localhost"
    return False


def _connection_table(path: str | Path) -> dict[str, Any]:
    expected = "expected a [connection] table with connection = 'couchbase://...'"
    try:
        table = tomllib.loads(Path(path).read_text()).get("connection")
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: {error}; {expected}") from error
    if not isinstance(table, dict) or not isinstance(table.get("connection"), str):
        raise ConfigError(f"{path}: {expected}")
    return table


def _from_environment(known: Mapping[str, Any]) -> dict[str, str]:
    found = {name: os.environ.get(ENVIRONMENT_PREFIX + name.upper()) for name in known}
    return {name: value for name, value in found.items() if value is not None}


_KINDS = {"str": str, "int": int, "float": float, "bool": bool}
_TRUTH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def _typed(option: Field[Any], value: Any) -> Any:
    """The value in the option's type; text is converted, other wrong types are errors."""
    kind = _KINDS[str(option.type)]
    if kind is str:
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
    elif isinstance(value, str):
        value = _from_text(option.name, value, kind)
    elif kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ConfigError(f"{option.name}: this is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _from_text(name: str, text: str, kind: type) -> Any:
    if kind is bool:
        if text.lower() not in _TRUTH:
            raise ConfigError(f"{name}: {text!r} is neither true nor false")
        return _TRUTH[text.lower()]
    try:
        return kind(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} is not a number") from error
