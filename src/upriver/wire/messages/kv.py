"""Messages that read, write, count and lock documents, and write them with given metadata (docs/protocol/kv.md).

A quiet command has the same layout with its own opcode.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from upriver.wire.checks import Context
from upriver.wire.constants import MetaOption, Opcode
from upriver.wire.layout import (
    ANY_DATATYPE,
    U32,
    U64,
    Broken,
    DocKey,
    Number,
    OptKey,
    OptU8,
    OptU16,
    OptU32,
    OptU64,
    OptValue,
    Presence,
    ValueU64,
)
from upriver.wire.message import Message, Response, message, response

_NO_CAS = Presence.FORBIDDEN


@message(Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_REPLICA, cas=_NO_CAS)
class Get(Message):
    """Reads a document."""

    key: DocKey


@response(
    Opcode.GET, Opcode.GETQ, Opcode.GETK, Opcode.GETKQ, Opcode.GET_REPLICA, Opcode.GAT, Opcode.GATQ, Opcode.GET_LOCKED
)
class GetResponse(Response):
    """The document; only the GETK forms repeat the key."""

    flags: U32 = 0
    key: OptKey = b""
    value: OptValue = b""


@message(Opcode.SET, Opcode.SETQ, Opcode.REPLACE, Opcode.REPLACEQ, datatypes=ANY_DATATYPE)
class Set(Message):
    """Writes a document; with a CAS, only if the document still has that CAS."""

    flags: U32 = 0
    expiry: U32 = 0
    key: DocKey = b""
    value: OptValue = b""


@message(Opcode.ADD, Opcode.ADDQ, cas=_NO_CAS, datatypes=ANY_DATATYPE)
class Add(Message):
    """Writes a document that must not exist."""

    flags: U32 = 0
    expiry: U32 = 0
    key: DocKey = b""
    value: OptValue = b""


@message(Opcode.DELETE, Opcode.DELETEQ)
class Delete(Message):
    """Removes a document."""

    key: DocKey


@message(Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ, datatypes=ANY_DATATYPE)
class Append(Message):
    """Adds bytes to the end of a document; as PREPEND, to the start."""

    key: DocKey
    value: OptValue = b""


@response(
    Opcode.SET, Opcode.SETQ, Opcode.REPLACE, Opcode.REPLACEQ, Opcode.ADD, Opcode.ADDQ, Opcode.DELETE, Opcode.DELETEQ,
    Opcode.APPEND, Opcode.APPENDQ, Opcode.PREPEND, Opcode.PREPENDQ, Opcode.SET_WITH_META, Opcode.SETQ_WITH_META,
    Opcode.ADD_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DEL_WITH_META, Opcode.DELQ_WITH_META,
    extras=(0, 16),
)  # fmt: skip
class MutationResponse(Response):
    """The write succeeded; with its vbuuid and seqno if the client asked HELLO for mutation seqnos."""

    vbuuid: OptU64 = None
    seqno: OptU64 = None


@message(Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ, cas=_NO_CAS)
class Counter(Message):
    """Adds to a decimal counter; as DECREMENT, subtracts. With expiry 0xffffffff it is not created if missing."""

    delta: U64 = 1
    initial: U64 = 0
    expiry: U32 = 0
    key: DocKey = b""


@response(Opcode.INCREMENT, Opcode.INCREMENTQ, Opcode.DECREMENT, Opcode.DECREMENTQ, extras=(0, 16))
class CounterResponse(Response):
    """The counter's new value."""

    vbuuid: OptU64 = None
    seqno: OptU64 = None
    count: ValueU64 = 0


@message(Opcode.TOUCH, Opcode.GAT, Opcode.GATQ, cas=_NO_CAS)
class Touch(Message):
    """Gives a document a new expiry; as GAT, also reads it."""

    expiry: U32 = 0
    key: DocKey = b""


@message(Opcode.GET_LOCKED, cas=_NO_CAS)
class GetLocked(Message):
    """Reads and locks a document for some seconds."""

    seconds: OptU32 = None
    key: DocKey = b""


@message(Opcode.UNLOCK_KEY, cas=Presence.REQUIRED)
class Unlock(Message):
    """Releases a lock."""

    key: DocKey


@message(Opcode.GET_META, Opcode.GETQ_META, cas=_NO_CAS)
class GetMeta(Message):
    """Reads the metadata of a key, also of a tombstone."""

    version: OptU8 = None
    key: DocKey = b""

    def rules(self) -> Iterator[Broken]:
        if self.version not in (None, 1, 2):
            yield Broken("version", "must be 1 or 2")


@response(Opcode.GET_META, Opcode.GETQ_META)
class GetMetaResponse(Response):
    """The metadata of a key; includes the datatype if version 2 was asked for."""

    deleted: U32 = 0
    flags: U32 = 0
    expiry: U32 = 0
    rev_seqno: U64 = 0
    stored_datatype: OptU8 = None


@message(
    Opcode.SET_WITH_META, Opcode.SETQ_WITH_META, Opcode.ADD_WITH_META, Opcode.ADDQ_WITH_META, Opcode.DEL_WITH_META,
    Opcode.DELQ_WITH_META, datatypes=ANY_DATATYPE,
)  # fmt: skip
class WithMeta(Message):
    """Writes or removes a document with another cluster's metadata, if it wins conflict resolution."""

    flags: U32 = 0
    expiry: U32 = 0  # the deletion time, for the delete commands
    rev_seqno: U64 = 0
    new_cas: U64 = 0
    options: Annotated[int | None, Number("I", optional=True), MetaOption] = None
    nmeta: OptU16 = None
    key: DocKey = b""
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        options = self.options or 0
        if options & ~sum(MetaOption):
            yield Broken("options", f"option bits 0x{options & ~sum(MetaOption):x} do not exist")
        if options & MetaOption.REGENERATE_CAS and not options & MetaOption.SKIP_CONFLICT_RESOLUTION:
            yield Broken("options", "4 (regenerate CAS) needs 8 (skip conflict resolution)")
        if (self.nmeta or 0) > len(self.value):
            yield Broken("nmeta", f"{self.nmeta} bytes of metadata in a value of {len(self.value)}")


@message(Opcode.GET_RANDOM_KEY, cas=_NO_CAS, extras=(0, 4, 5))
class GetRandomKey(Message):
    """Reads a random document, of one collection if given."""

    collection_id: OptU32 = None
    include_xattr: OptU8 = None

    def agreed_rules(self, context: Context) -> Iterator[Broken]:
        if self.collection_id is not None and not context.collections:
            yield Broken("collection_id", "HELLO did not turn collections on")


@response(Opcode.GET_RANDOM_KEY)
class GetRandomKeyResponse(Response):
    """A random document, with its key."""

    flags: OptU32 = None
    key: OptKey = b""
    value: OptValue = b""
