"""Requests of one connection that wait for answers, and which answers belong to them; pure.

Every request gets its own opaque. An answer with a wrong opaque ends the connection: if a peer mixed up answers, a
caller would get the wrong document. On a connection without collections, keys have no collection id.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from upriver.errors import RemoteProtocolError, UnknownCollection
from upriver.model import DEFAULT_COLLECTION
from upriver.wire.keys import split_key
from upriver.wire.message import Message, Response
from upriver.wire.messages.cluster import GetAllVbSeqnos

Ends = Callable[[Response], bool]
_OPAQUE = slice(12, 16)
_LAST_OPAQUE = 0xFFFF_0000


class Encodes(Protocol):
    """A message, or a run of messages."""

    def encode(self) -> bytes: ...


class RequestRun(Protocol):
    """Quiet requests with opaques 0, 1, 2 ..., followed by one request that is always answered: the fence."""

    fence: int

    def __len__(self) -> int: ...
    def encode(self) -> bytes: ...


class Opaques:
    """Opaques for requests; one is reused only after all others."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, count: int) -> range:
        first = self._next + 1 if self._next + count < _LAST_OPAQUE else 1
        self._next = first + count - 1
        return range(first, first + count)


@dataclass(slots=True)
class Pending:
    """Requests as bytes to send, and their answers so far: one per request, or all up to the one that ``ends`` them."""

    data: bytes
    opaques: range
    ends: Ends | None = None
    fence: int | None = None  # the opaque of a run's fence; of the run itself, only refusals are answered
    answers: list[Response] = field(default_factory=list)

    def add(self, response: Response) -> bool:
        """Add an answer; True if it is the last one. ``RemoteProtocolError`` if it has a wrong opaque."""
        if not self._is_ours(response.opaque):
            what = f"this answers request {response.opaque:#x}, not the one that waits for an answer"
            raise RemoteProtocolError(what, "opaque", 12)
        self.answers.append(response)
        return self.ends(response) if self.ends else len(self.answers) == len(self.opaques)

    def _is_ours(self, opaque: int) -> bool:
        if self.ends:
            return opaque in self.opaques or opaque == self.fence
        return opaque == self.opaques[len(self.answers)]


def pending(
    messages: Sequence[Encodes], opaques: Opaques, ends: Ends | None = None, *, collections: bool = True
) -> Pending:
    """Give requests their opaques and encode them."""
    numbers = opaques.next(len(messages))
    encoded = (_encoded(message, number, collections) for message, number in zip(messages, numbers, strict=True))
    return Pending(b"".join(encoded), numbers, ends)


def pending_run(run: RequestRun) -> Pending:
    """A run, which has its own opaques; its answers are refusals, then the answer to the fence."""
    return Pending(run.encode(), range(len(run)), lambda response: response.opaque == run.fence, run.fence)


def _encoded(message: Encodes, opaque: int, collections: bool) -> bytes:
    if not collections and isinstance(message, Message):
        message = bare(message)
    data = message.encode()
    return data[: _OPAQUE.start] + opaque.to_bytes(4) + data[_OPAQUE.stop :]


def bare(message: Message) -> Message:
    """The request for a server without collections; ``UnknownCollection`` if it is not for the default one."""
    if isinstance(message, GetAllVbSeqnos) and message.collection_id is not None:
        _must_be_default(message.collection_id)
        return _replaced(message, collection_id=None)
    name = message.declared.key_name
    if not message.declared.key.document or not getattr(message, name):
        return message
    collection_id, key = split_key(getattr(message, name))
    _must_be_default(collection_id)
    return _replaced(message, **{name: key})


def _must_be_default(collection_id: int) -> None:
    if collection_id != DEFAULT_COLLECTION:
        raise UnknownCollection(f"collection {collection_id:#x}: this server has no collections but the default one")


def _replaced(message: Message, **values: Any) -> Message:
    changed = copy.copy(message)
    for name, value in values.items():
        setattr(changed, name, value)
    return changed
