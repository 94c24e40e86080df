"""The options of a sync: one frozen dataclass that parses itself from keywords or a TOML file."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from upriver.client.options import ConnectOptions, password_of
from upriver.errors import ConfigError

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
# Passed to the source as they are.
_SOURCE = (
    "connection", "bucket", "username", "password", "password_file", "ca_file", "client_cert", "client_key", "network",
    "scope", "partitions", "adopt",
)  # fmt: skip
_CONNECT = ("bucket", "username", "ca_file", "client_cert", "client_key", "network")
FOR_EVER_S = 10 * 365 * 86400
GIVE_UP_S = 60  # with ``once``


class ColumnType(StrEnum):
    """The type of a column that holds a field of documents."""

    BOOLEAN = "boolean"
    BIGINT = "bigint"
    DOUBLE = "double"
    STRING = "string"
    JSON = "json"
    """The text of a nested object or array."""


TableShape = dict[str, ColumnType]  # the columns of a table, beside those that every row has


class SyncKeywords(TypedDict, total=False):
    """The options of `SyncOptions` as keywords, for type checkers."""

    connection: str
    to: str
    bucket: str
    username: str
    password: str
    password_file: str
    ca_file: str
    checkpoint: str
    client_cert: str
    client_key: str
    network: str
    scope: str
    collections: str | Sequence[str]
    format: str
    once: bool
    every: str
    partitions: int
    max_rows: int
    max_bytes: int
    adopt: bool
    deletes: Literal["remove", "mark"]
    history: bool
    xattrs: bool
    give_up_after: str
    max_columns: int
    retention: str
    log_retention: str
    share: float
    max_staleness: str
    schema: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class SyncOptions:
    """Options of ``upriver sync``; each can stand in a TOML file under its own name."""

    connection: str = ""
    to: str = ""
    bucket: str = "default"
    username: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    ca_file: str = ""
    checkpoint: str = ""  # directory of Spark's checkpoint; empty: in the lake
    client_cert: str = ""
    client_key: str = field(default="", repr=False)
    network: str = ""
    scope: str = ""
    collections: tuple[str, ...] = ()
    format: str = "delta"
    once: bool = False
    every: str = "1s"
    partitions: int = 0  # tasks per batch; 0: one per core
    max_rows: int = 1_000_000  # per batch
    max_bytes: int = 1 << 30  # per batch, as they come over the wire
    adopt: bool = False  # continue with another bucket of the same name
    deletes: str = "remove"  # or "mark": keep the row, with _deleted true
    history: bool = False
    xattrs: bool = False  # extended attributes in the change log
    give_up_after: str = ""  # how long the bucket may be away; empty: a minute with ``once``, otherwise for ever
    max_columns: int = 200
    retention: str = "24h"  # how long readers may stay on an old version of a table
    log_retention: str = ""  # how far back the change log reaches; empty: for ever
    share: float = 0.25  # how much of a range of `current` changes before it is rewritten
    max_staleness: str = "5m"  # a change reaches `current` within this time; empty: when a rewrite is worth it
    schema: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # table -> column -> type

    def __post_init__(self) -> None:
        if not self.connection or not self.to:
            raise ConfigError("sync needs a connection (couchbase://host[:port]) and a directory (--to)")
        if self.format != "delta":
            raise ConfigError(f"format {self.format!r}: tables are written as 'delta'; for Iceberg see `merge_sql`")
        if self.deletes not in ("remove", "mark"):
            raise ConfigError(f"deletes {self.deletes!r}: write remove or mark")
        if self.history and self.log_retention:
            raise ConfigError("history needs the whole change log: leave log_retention out")
        for name in ("every", "retention", "log_retention", "max_staleness", "give_up_after"):
            seconds(getattr(self, name) or "0s", name)
        for name, least in (("max_rows", 1), ("max_bytes", 1), ("partitions", 0), ("max_columns", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name}={getattr(self, name)}: write a whole number from {least} on")
        _ = self.shapes

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> SyncOptions:
        """From plain values; ``ConfigError`` lists the valid names if one is unknown."""
        known = {known.name for known in fields(cls)}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ConfigError(f"sync has no option {unknown[0]!r}; valid are {', '.join(sorted(known))}")
        values = dict(given)
        connection = values.get("connection")
        if isinstance(connection, str) and connection and "://" not in connection:
            values["connection"] = f"couchbase://{connection}"  # host:port is enough, as in the other commands
        if "collections" in values:
            values["collections"] = _names(values["collections"])
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"an option has a value of the wrong type: {error}") from error

    @classmethod
    def load(cls, path: str | None, given: Mapping[str, Any]) -> SyncOptions:
        """From a TOML file, overridden by what was given on the command line."""
        if path is None:
            return cls.parse(given)
        try:
            found = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"{path}: {error}") from error
        try:
            return cls.parse({**found, **given})
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    def with_(self, **changed: Unpack[SyncKeywords]) -> SyncOptions:
        """The same options, but for these."""
        return SyncOptions.parse({**{known.name: getattr(self, known.name) for known in fields(self)}, **changed})

    @property
    def shapes(self) -> dict[str, TableShape]:
        """The columns that the user gave."""
        try:
            return {
                table: {name: ColumnType(kind) for name, kind in columns.items()}
                for table, columns in self.schema.items()
            }
        except ValueError as error:
            raise ConfigError(f"schema: {error}; valid types are {', '.join(ColumnType)}") from error

    def connect_options(self) -> ConnectOptions:
        """How the client connects."""
        given = {name: getattr(self, name) or None for name in _CONNECT}
        password = password_of(self.password, self.password_file, "password_file")
        return ConnectOptions.parse(self.connection, password=password or None, **given)

    @property
    def patience_s(self) -> float:
        """How long the sync waits for a bucket that does not answer."""
        if self.give_up_after:
            return max(1.0, seconds(self.give_up_after))
        return GIVE_UP_S if self.once else FOR_EVER_S

    def source_options(self) -> dict[str, str]:
        """What the source gets, in Spark's spelling."""
        found = {name: str(getattr(self, name)) for name in _SOURCE if getattr(self, name)}
        if self.collections:
            found["collections"] = ",".join(self.collections)
        found["timeout_seconds"] = str(int(self.patience_s))
        if self.xattrs:
            found["xattrs"] = "true"
        return {name.replace("_", ""): text for name, text in found.items()}


def _names(given: str | Iterable[str]) -> tuple[str, ...]:
    parts = given.split(",") if isinstance(given, str) else given
    return tuple(part.strip() for part in parts if part.strip())


def seconds(text: str, name: str = "") -> float:
    """A duration as people write it; ``name`` is the name of the option, for the error.

    >>> seconds("5s"), seconds("250ms"), seconds("24h")
    (5.0, 0.25, 86400.0)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)", text.strip())
    if found is None:
        where = f"{name}: " if name else ""
        raise ConfigError(f"{where}{text!r} is not a duration: write 500ms, 5s, 10m, 24h or 7d")
    return float(found[1]) * _SECONDS[found[2]]
