"""The options of ``format("dcp")`` as frozen dataclasses that parse themselves; errors list what is valid.

Spark lower-cases option names and turns every value into a string. The password is never shown; ``passwordFile`` or the
environment variable ``UPRIVER_PASSWORD`` keep it out of query plans altogether.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar, cast

from upriver.client.options import ConnectOptions, Network, has_password, password_of
from upriver.errors import ConfigError
from upriver.model import OnRollback

E = TypeVar("E", bound=StrEnum)
D = TypeVar("D")


class ValueFormat(StrEnum):
    """The form of the ``value`` column."""

    BINARY = "binary"
    STRING = "string"
    VARIANT = "variant"
    STRUCT = "struct"


class KeyFormat(StrEnum):
    """The form of the ``key`` column."""

    BINARY = "binary"
    STRING = "string"


class WriteOperation(StrEnum):
    """What the sink does with a row that is not a deletion."""

    UPSERT = "upsert"
    INSERT = "insert"
    REPLACE = "replace"
    DELETE = "delete"


class OnError(StrEnum):
    """What the sink does with a document that the database refuses for good."""

    FAIL = "fail"
    DEAD_LETTER = "deadletter"
    IGNORE = "ignore"


def _text(name: str, text: str) -> str:
    return text


def _flag(name: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ConfigError(f"{name}={text!r}: write true or false")
    return text.lower() == "true"


def _count(name: str, text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise ConfigError(f"{name}={text!r}: write a whole number above 0")
    return int(text)


def _number(name: str, text: str) -> int:
    if not text.isdigit():
        raise ConfigError(f"{name}={text!r}: write a whole number")
    return int(text)


def _names(name: str, text: str) -> tuple[str, ...]:
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise ConfigError(f"{name}={text!r}: write names separated by commas")
    return found


def _vbuckets(name: str, text: str) -> tuple[int, ...]:
    """``0-511,600``, or a JSON list."""
    found: set[int] = set()
    for part in text.strip().strip("[]").split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise ConfigError(f"{name}={text!r}: write vbuckets like 7 or 0-511 or 0-511,600")
        found.update(range(int(first), int(last or first) + 1))
    return tuple(sorted(found))


def _one_of(enum: type[E], *not_here: E) -> Callable[[str, str], E]:
    valid = {str(each): each for each in enum if each not in not_here}

    def parse(name: str, text: str) -> E:
        try:
            return valid[text.lower()]
        except KeyError:
            raise ConfigError(f"{name}={text!r}: valid are {', '.join(valid)}") from None

    return parse


Starting = str | datetime | Mapping[str, Any]


def _starting(name: str, text: str) -> Starting:
    """``earliest``, ``latest``, a timestamp, or JSON per vbucket."""
    if text.lower() in ("earliest", "latest"):
        return text.lower()
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise ConfigError(f"{name} is not JSON: {error}") from error
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text!r}: write earliest, latest, a timestamp like 2026-01-31T12:00:00Z, "
                          'or JSON like {"0": 17, "1": "latest"}') from error  # fmt: skip
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def _ending(name: str, text: str) -> Starting:
    found = _starting(name, text)
    if found == "earliest" or isinstance(found, datetime):
        raise ConfigError(f"{name}={text!r}: write latest, or JSON per vbucket")
    return found


def spelling(name: str) -> str:
    """An option's name as users write it.

    >>> spelling("starting_offsets")
    'startingOffsets'
    """
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _by(parse: Callable[[str, str], Any]) -> dict[str, Any]:
    return {"parse": parse}


_BY_TYPE: dict[str, Callable[[str, str], Any]] = {"str": _text, "bool": _flag, "int": _count, "int | None": _count}


def parse_one(known: Field[Any], text: str) -> Any:
    """An option's value, by the parser it names or by its type."""
    parse = known.metadata.get("parse") or _BY_TYPE[str(known.type)]
    return parse(spelling(known.name), text)


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect; options of the source and the sink."""

    connection: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    bucket: str = "default"
    ca_file: str = ""
    client_cert: str = ""
    client_key: str = field(default="", repr=False)
    network: str = ""
    allow_plain: bool = False
    timeout_seconds: int = 60  # how long network errors are retried before giving up
    scope: str = ""

    @classmethod
    def parse(cls: type[D], given: Mapping[str, str]) -> D:
        """From Spark's options; ``ConfigError`` for a wrong name or value lists the valid ones."""
        known = {f.name.replace("_", ""): f for f in fields(cls)}  # type: ignore[arg-type]
        given = _without_sparks(given)
        for name in given:
            if name not in known:
                valid = ", ".join(sorted(spelling(f.name) for f in known.values()))
                raise ConfigError(f"format dcp has no option {name!r}; valid are {valid}")
        chosen = [(known[name], text) for name, text in given.items()]
        return cls(**{f.name: parse_one(f, text) for f, text in chosen})

    def __post_init__(self) -> None:
        if not self.connection:
            raise ConfigError('format dcp needs .option("connection", "couchbase://host[:port]")')
        if has_password(self.connection):
            raise ConfigError(
                "connection: leave the password out of the connection string: Spark shows it in its UI and event log; "
                "use the option password, or better passwordFile"
            )
        self.connect_options()

    def connect_options(self) -> ConnectOptions:
        """The options of the client. The password file is read here, where the connection is made.

        No request takes longer than ``timeoutSeconds``, so that it can be retried within them.
        """
        given = ConnectOptions.parse(
            self.connection,
            bucket=self.bucket,
            username=self.username or None,
            password=password_of(self.password, self.password_file, "passwordFile") or None,
            ca_file=self.ca_file or None,
            client_cert=self.client_cert or None,
            client_key=self.client_key or None,
            network=cast("Network | None", self.network or None),  # it says which are valid
            allow_plain=self.allow_plain or None,
        )
        most = float(self.timeout_seconds)
        return replace(
            given,
            connect_timeout_s=min(given.connect_timeout_s, most),
            request_timeout_s=min(given.request_timeout_s, most),
        )


# The path of load("..."), and options that Spark adds for queries and tables.
_SPARKS_OWN = frozenset({
    "path", "checkpointlocation", "queryname", "outputmode",
    "owner", "provider", "location", "comment", "external", "is_managed_location", "collation",
})  # fmt: skip


def _without_sparks(given: Mapping[str, str]) -> dict[str, str]:
    """Only our options; the options of a table have a prefix."""
    lowered = {name.lower(): text for name, text in given.items()}
    of_table = {name.removeprefix("option."): text for name, text in lowered.items() if name.startswith("option.")}
    plain = {name: text for name, text in lowered.items() if not name.startswith("option.")}
    return {name: text for name, text in (of_table | plain).items() if name not in _SPARKS_OWN}


@dataclass(frozen=True, slots=True)
class ReadOptions(ConnectionOptions):
    """Options of the source."""

    collections: tuple[str, ...] = field(default=(), metadata=_by(_names))
    starting_offsets: Starting = field(default="earliest", metadata=_by(_starting))
    ending_offsets: Starting = field(default="latest", metadata=_by(_ending))
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    partitions: int | None = None
    on_rollback: OnRollback = field(default=OnRollback.EMIT, metadata=_by(_one_of(OnRollback, OnRollback.REWIND)))
    flow_control_buffer: int = 20 * 1024 * 1024
    include_value: bool = True
    value_format: ValueFormat | None = field(default=None, metadata=_by(_one_of(ValueFormat)))
    value_schema: str = ""
    key_format: KeyFormat = field(default=KeyFormat.BINARY, metadata=_by(_one_of(KeyFormat)))
    vbuckets: tuple[int, ...] = field(default=(), metadata=_by(_vbuckets))  # batch reads: only these
    xattrs: bool = False
    keys_only: bool = False
    batch_rows: int = 32_768
    adopt: bool = False  # continue with a bucket that is not the one of the checkpoint
    poll_milliseconds: int = field(default=200, metadata=_by(_number))  # how often idle queries ask the nodes

    def __post_init__(self) -> None:
        super(ReadOptions, self).__post_init__()
        if (self.value_format is ValueFormat.STRUCT) != bool(self.value_schema) and self.value_format is not None:
            raise ConfigError('valueFormat=struct and valueSchema="name STRING, age INT" go together')

    @property
    def format(self) -> ValueFormat:
        return self.value_format or (ValueFormat.STRUCT if self.value_schema else ValueFormat.BINARY)

    @property
    def starting(self) -> str | Mapping[str, Any]:
        """Where to start reading. A timestamp has no seqno, so everything is read and older changes are left out."""
        return "earliest" if isinstance(self.starting_offsets, datetime) else self.starting_offsets

    @property
    def since(self) -> datetime | None:
        """Changes before this moment are left out."""
        return self.starting_offsets if isinstance(self.starting_offsets, datetime) else None

    @property
    def values_wanted(self) -> bool:
        return self.include_value and not self.keys_only

    @property
    def task_limit(self) -> int:
        """The most tasks per batch: by default, the cores of the driver, which in local mode are all there are."""
        return self.partitions or os.cpu_count() or 2


@dataclass(frozen=True, slots=True)
class WriteOptions(ConnectionOptions):
    """Options of the sink."""

    operation: WriteOperation = field(default=WriteOperation.UPSERT, metadata=_by(_one_of(WriteOperation)))
    collection: str = ""
    with_meta: bool = False
    ttl_seconds: int = field(default=0, metadata=_by(_number))
    on_error: OnError = field(default=OnError.FAIL, metadata=_by(_one_of(OnError)))
    dead_letter: str = ""  # directory for refused documents, as Parquet files

    def __post_init__(self) -> None:
        super(WriteOptions, self).__post_init__()
        if (self.on_error is OnError.DEAD_LETTER) != bool(self.dead_letter):
            raise ConfigError("onError=deadletter and deadLetter=<directory> go together")
