"""Messages of a session: HELLO, SASL, buckets, statistics.

See docs/protocol/session.md and docs/protocol/kv.md#commands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from upriver.wire.constants import Feature, Opcode
from upriver.wire.layout import JSON_OR_RAW, U32, Broken, Key, OptKey, OptU32, OptValue, Presence, Repeated, ValueU16
from upriver.wire.message import Message, Response, message, response

_NO_CAS = Presence.FORBIDDEN


@message(Opcode.HELLO, cas=_NO_CAS)
class Hello(Message):
    """Names the agent and asks for features; the answer lists the features that are on."""

    agent: OptKey = b""
    features: Annotated[tuple[int, ...], Repeated("H", int), Feature] = ()


@response(Opcode.HELLO)
class HelloResponse(Response):
    """The features that are on."""

    features: Annotated[tuple[int, ...], Repeated("H", int), Feature] = ()


@message(Opcode.SASL_LIST_MECHS, cas=_NO_CAS)
class SaslListMechanisms(Message):
    """Asks for the mechanisms of authentication."""


@message(Opcode.SASL_AUTH, Opcode.SASL_STEP, cas=_NO_CAS)
class SaslAuth(Message):
    """Begins authentication; as SASL_STEP, continues it."""

    mechanism: Key
    value: OptValue = b""


@response(
    Opcode.VERSION, Opcode.SASL_LIST_MECHS, Opcode.SASL_AUTH, Opcode.SASL_STEP, Opcode.LIST_BUCKETS,
    Opcode.GET_CLUSTER_CONFIG, Opcode.GET_ERROR_MAP, Opcode.COLLECTIONS_GET_MANIFEST,
)  # fmt: skip
class ValueResponse(Response):
    """An answer whose value is one text: a version, a list, a challenge, or a map or manifest as JSON."""

    value: OptValue = b""


@message(Opcode.SELECT_BUCKET)
class SelectBucket(Message):
    """Selects the bucket for the commands that follow."""

    name: OptKey = b""


@message(Opcode.LIST_BUCKETS)
class ListBuckets(Message):
    """Asks for the buckets that the user may see."""


@message(Opcode.GET_ERROR_MAP, cas=_NO_CAS)
class GetErrorMap(Message):
    """Asks for the names and attributes of all statuses."""

    version: ValueU16

    def rules(self) -> Iterator[Broken]:
        if self.vbucket:
            yield Broken("vbucket", "must be 0")


@message(Opcode.NOOP, Opcode.QUIT, Opcode.QUITQ, Opcode.VERSION, cas=_NO_CAS)
class Noop(Message):
    """A command without a body: NOOP, or with their opcodes QUIT and VERSION."""


@message(Opcode.VERBOSITY, cas=_NO_CAS)
class Verbosity(Message):
    """Accepted for old clients; has no effect."""

    level: U32 = 0


@message(Opcode.FLUSH, Opcode.FLUSHQ)
class Flush(Message):
    """Empties the bucket, where the node allows it."""

    delay: OptU32 = None


@message(Opcode.STAT, cas=_NO_CAS, datatypes=JSON_OR_RAW)
class Stat(Message):
    """Asks for a group of statistics; each is answered in a frame of its own, and an empty frame ends the list."""

    group: OptKey = b""
    value: OptValue = b""


@response(Opcode.STAT)
class StatResponse(Response):
    """One statistic; an empty key ends the list."""

    key: OptKey = b""
    value: OptValue = b""


@message(Opcode.ENABLE_TRAFFIC, Opcode.DISABLE_TRAFFIC, cas=_NO_CAS)
class Traffic(Message):
    """Lets clients read and write documents after warm-up; as DISABLE_TRAFFIC, stops them."""


@message(Opcode.START_PERSISTENCE, Opcode.STOP_PERSISTENCE)
class Persistence(Message):
    """Starts writing to disk; as STOP_PERSISTENCE, stops it. For tests of what is not yet persisted."""
