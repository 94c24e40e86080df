"""The JSON value of a stream request: its filter, stream-id and purge seqno.

``parse`` applies every rule that needs no knowledge of the node; the producer checks whether collections and scopes
exist. An empty value means everything and is ``StreamValue()``.

See docs/protocol/stream-request.md#value.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from upriver.errors import InvalidMessage, LocalProtocolError, Status
from upriver.model import SEQNO_MAX

MAX_STREAM_ID = 0xFFFF
_HEX = re.compile(r"[0-9a-fA-F]{1,16}", re.ASCII)
_HEX_ID = re.compile(r"[0-9a-fA-F]{1,8}", re.ASCII)
_DECIMAL = re.compile(r"[0-9]{1,20}", re.ASCII)


@dataclass(frozen=True, slots=True)
class CacheTransferSettings:
    """How much of its cache a producer should send (``cts``)."""

    free_memory: int | None = None
    all_keys: bool | None = None


@dataclass(frozen=True, slots=True)
class StreamValue:
    """What a stream request asks for beyond seqnos; ``None`` means that the key is absent."""

    uid: int | None = None  # the last manifest seen; producers ignore it
    sid: int | None = None
    collections: tuple[int, ...] | None = None
    scope: int | None = None
    purge_seqno: int | None = None
    cts: CacheTransferSettings | None = None

    @classmethod
    def parse(cls, value: bytes, offset: int = 0) -> StreamValue:
        """Parse a request's value; ``InvalidMessage`` has the status that a producer answers.

        >>> StreamValue.parse(b'{"collections": ["8", "1c"], "sid": 7}')
        StreamValue(uid=None, sid=7, collections=(8, 28), scope=None, purge_seqno=None, cts=None)
        """
        if not value:
            return cls()
        try:
            return cls(**_known_keys(value))
        except InvalidMessage as error:
            raise InvalidMessage(error.reason, error.field, offset, error.status) from error

    def encode(self) -> bytes:
        """The value as compact JSON, empty if nothing is asked for; ``LocalProtocolError`` if it breaks a rule.

        >>> StreamValue(collections=(8, 28), purge_seqno=900).encode()
        b'{"collections":["8","1c"],"purge_seqno":"900"}'
        """
        import orjson

        present = {name: getattr(self, name) for name in _KEYS if getattr(self, name) is not None}
        if not present:
            return b""
        try:
            encoded = orjson.dumps({name: _KEYS[name][1](content) for name, content in present.items()})
            _known_keys(encoded)
        except (InvalidMessage, TypeError) as error:
            raise LocalProtocolError(f"stream value: {error}") from error
        return encoded


def _known_keys(value: bytes) -> dict[str, Any]:
    found = _object(value)
    known = {name: read(found[name]) for name, (read, _) in _KEYS.items() if name in found}
    if not known:
        raise InvalidMessage(f"none of {', '.join(_KEYS)} is present", "value")
    if "scope" in known and "collections" in known:
        raise InvalidMessage("a filter names a scope or collections, not both", "scope")
    return known


def _object(value: bytes) -> dict[str, Any]:
    import orjson

    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise InvalidMessage(f"not JSON: {error}", "value") from error
    if not isinstance(found, dict):
        raise InvalidMessage("not a JSON object", "value")
    return found


def _read_uid(raw: object) -> int:
    # Producers ignore the uid and do not even check its type: anything but a hex number counts as manifest 0.
    return int(raw, 16) if isinstance(raw, str) and _HEX.fullmatch(raw) else 0


def _read_sid(raw: object) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int) or raw < 0:
        raise InvalidMessage("must be an unsigned integer", "sid")
    if raw == 0:
        raise InvalidMessage("stream-ids start at 1", "sid", 0, Status.DCP_STREAM_ID_INVALID)
    if raw > MAX_STREAM_ID:
        raise InvalidMessage(f"{raw} is above {MAX_STREAM_ID}", "sid")
    return raw


def _read_id(field: str) -> Callable[[object], int]:
    def read(raw: object) -> int:
        if not isinstance(raw, str) or not _HEX_ID.fullmatch(raw):
            raise InvalidMessage(f"{raw!r} is not a 32-bit id: up to 8 hex digits, as a string", field)
        return int(raw, 16)

    return read


def _read_collections(raw: object) -> tuple[int, ...]:
    if not isinstance(raw, list):
        raise InvalidMessage("must be an array of hex strings", "collections")
    ids = tuple(map(_read_id("collections"), raw))
    if len(set(ids)) < len(ids):
        raise InvalidMessage("an id is named twice", "collections")
    return ids


def _read_purge_seqno(raw: object) -> int:
    if not isinstance(raw, str) or not _DECIMAL.fullmatch(raw) or int(raw) > SEQNO_MAX:
        raise InvalidMessage("must be a seqno as a decimal string", "purge_seqno")
    return int(raw)


def _read_cts(raw: object) -> CacheTransferSettings:
    if not isinstance(raw, dict):
        raise InvalidMessage("must be an object", "cts")
    memory, all_keys = raw.get("free_memory"), raw.get("all_keys")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 0):
        raise InvalidMessage("free_memory must be an unsigned integer", "cts")
    if all_keys is not None and not isinstance(all_keys, bool):
        raise InvalidMessage("all_keys must be true or false", "cts")
    return CacheTransferSettings(memory, all_keys)


def _write_cts(cts: CacheTransferSettings) -> dict[str, object]:
    settings = {"free_memory": cts.free_memory, "all_keys": cts.all_keys}
    return {name: content for name, content in settings.items() if content is not None}


def _hex(number: int) -> str:
    return f"{number:x}"


# How each key is read and written, in the order of the specification's table.
_KEYS: dict[str, tuple[Callable[[object], Any], Callable[[Any], object]]] = {
    "uid": (_read_uid, _hex),
    "sid": (_read_sid, int),
    "collections": (_read_collections, lambda ids: [_hex(each) for each in ids]),
    "scope": (_read_id("scope"), _hex),
    "purge_seqno": (_read_purge_seqno, str),
    "cts": (_read_cts, _write_cts),
}
