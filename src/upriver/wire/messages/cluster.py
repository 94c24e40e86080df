"""Messages about cluster maps, vbucket states and seqnos, observe, compaction and collections.

See docs/protocol/vbuckets.md, docs/protocol/collections.md#commands and docs/protocol/kv.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Annotated, NamedTuple

from upriver.errors import InvalidMessage
from upriver.model import FailoverEntry, VbucketState
from upriver.wire.checks import Context
from upriver.wire.constants import ObserveState, Opcode, ServerOpcode
from upriver.wire.framing import Frame
from upriver.wire.keys import split_key
from upriver.wire.layout import (
    JSON_OR_RAW,
    U8,
    U16,
    U32,
    U64,
    Broken,
    Number,
    OptI64,
    OptKey,
    OptU32,
    OptValue,
    Presence,
    Repeated,
    Section,
    Value,
    ValueCodec,
    ValueU8,
    ValueU16,
    ValueU64,
)
from upriver.wire.message import Message, Response, message, response
from upriver.wire.sections import cut_bytes, cut_struct

_NO_CAS = Presence.FORBIDDEN


@message(Opcode.GET_CLUSTER_CONFIG, cas=_NO_CAS, extras=(0, 16))
class GetClusterConfig(Message):
    """Asks for the cluster map, or, with the client's revision, only for a newer one."""

    epoch: OptI64 = None
    revision: OptI64 = None


@message(Opcode.SET_VBUCKET, cas=_NO_CAS, datatypes=JSON_OR_RAW)
class SetVbucket(Message):
    """Sets the state of a vbucket, which is created if missing."""

    state: Annotated[int, Number("B"), VbucketState]
    value: OptValue = b""

    def rules(self) -> Iterator[Broken]:
        if self.state not in VbucketState._value2member_map_:
            yield Broken("state", f"{self.state} is not a vbucket state")
        if bool(self.value) != bool(self.datatype):
            yield Broken("datatype", "a value must be JSON, and no value must be raw")


@message(Opcode.SET_VBUCKET, cas=_NO_CAS, datatypes=JSON_OR_RAW)
class SetVbucketWide(Message):
    """``SetVbucket`` with a state of four bytes, as servers before 8.0 expect it."""

    state: Annotated[int, Number("I"), VbucketState]
    value: OptValue = b""

    rules = SetVbucket.rules


@message(Opcode.GET_VBUCKET, cas=_NO_CAS)
class GetVbucket(Message):
    """Asks for the state of a vbucket."""

    key: OptKey = b""


@response(Opcode.GET_VBUCKET)
class GetVbucketResponse(Response):
    state: Annotated[int, Number("I", Section.VALUE), VbucketState]


@message(Opcode.DEL_VBUCKET, cas=_NO_CAS)
class DeleteVbucket(Message):
    """Removes a vbucket; with ``async=0`` the answer waits until its data is gone."""

    value: OptValue = b""


@message(Opcode.GET_ALL_VB_SEQNOS, cas=_NO_CAS)
class GetAllVbSeqnos(Message):
    """Asks for the high seqnos of all vbuckets in a state, or of one collection in them."""

    state: OptU32 = None
    collection_id: OptU32 = None

    def rules(self) -> Iterator[Broken]:
        if self.state is not None and self.state > max(VbucketState):
            yield Broken("state", f"{self.state} is not a vbucket state")

    def agreed_rules(self, context: Context) -> Iterator[Broken]:
        if self.collection_id is not None and not context.collections:
            yield Broken("collection_id", "HELLO did not turn collections on")


class VbucketSeqno(NamedTuple):
    vbucket: int
    seqno: int


@response(Opcode.GET_ALL_VB_SEQNOS)
class GetAllVbSeqnosResponse(Response):
    seqnos: Annotated[tuple[VbucketSeqno, ...], Repeated("HQ", VbucketSeqno)]


@message(Opcode.GET_FAILOVER_LOG)
class GetFailoverLog(Message):
    """Asks for the failover log of a vbucket, on any connection."""


@response(Opcode.GET_FAILOVER_LOG)
class GetFailoverLogResponse(Response):
    entries: Annotated[tuple[FailoverEntry, ...], Repeated("QQ", FailoverEntry, at_least=1)]


@message(Opcode.SEQNO_PERSISTENCE, cas=_NO_CAS)
class SeqnoPersistence(Message):
    """Waits until a seqno is on disk."""

    seqno: U64


@message(Opcode.OBSERVE_SEQNO)
class ObserveSeqno(Message):
    """Asks how far the branch ``vbuuid`` has got, in memory and on disk."""

    vbuuid: ValueU64


@response(Opcode.OBSERVE_SEQNO, when=lambda frame: frame.specific == 0 and frame.value[:1] != b"\1")
class ObserveSeqnoResponse(Response):
    """The branch is the current one."""

    format: ValueU8 = 0
    observed: ValueU16 = 0
    vbuuid: ValueU64 = 0
    persisted_seqno: ValueU64 = 0
    current_seqno: ValueU64 = 0


@response(Opcode.OBSERVE_SEQNO, when=lambda frame: frame.specific == 0 and frame.value[:1] == b"\1")
class ObserveSeqnoFailedOver(Response):
    """The branch ended at ``last_seqno``; another one is current."""

    format: ValueU8 = 1
    observed: ValueU16 = 0
    vbuuid: ValueU64 = 0
    persisted_seqno: ValueU64 = 0
    current_seqno: ValueU64 = 0
    old_vbuuid: ValueU64 = 0
    last_seqno: ValueU64 = 0


class ObservedKey(NamedTuple):
    vbucket: int
    key: bytes


class KeyState(NamedTuple):
    vbucket: int
    key: bytes
    state: int
    cas: int


_OBSERVED = Struct(">HH")
_KEY_STATE = Struct(">BQ")


def _encode_observed(observed: tuple[ObservedKey, ...]) -> bytes:
    return b"".join(_OBSERVED.pack(o.vbucket, len(o.key)) + o.key for o in observed)


def _decode_observed(data: bytes, offset: int) -> tuple[ObservedKey, ...]:
    found = []
    at = 0
    while at < len(data):
        (vbucket, size), at = cut_struct(_OBSERVED, data, at, offset)
        key, at = cut_bytes(data, at, size, offset)
        found.append(ObservedKey(vbucket, key))
    return tuple(found)


def _encode_key_states(states: tuple[KeyState, ...]) -> bytes:
    return b"".join(_OBSERVED.pack(s.vbucket, len(s.key)) + s.key + _KEY_STATE.pack(s.state, s.cas) for s in states)


def _decode_key_states(data: bytes, offset: int) -> tuple[KeyState, ...]:
    found = []
    at = 0
    while at < len(data):
        (vbucket, size), at = cut_struct(_OBSERVED, data, at, offset)
        key, at = cut_bytes(data, at, size, offset)
        (state, cas), at = cut_struct(_KEY_STATE, data, at, offset)
        found.append(KeyState(vbucket, key, state, cas))
    return tuple(found)


@message(Opcode.OBSERVE, cas=_NO_CAS)
class Observe(Message):
    """Asks whether keys are on disk, and with which CAS."""

    observed: Annotated[tuple[ObservedKey, ...], ValueCodec(_encode_observed, _decode_observed)]

    def rules(self) -> Iterator[Broken]:
        if not self.observed:
            yield Broken("observed", "no key is named")

    def agreed_rules(self, context: Context) -> Iterator[Broken]:
        try:
            for _, key in self.observed if context.collections else ():
                split_key(key)
        except InvalidMessage as error:
            yield Broken("observed", error.reason)


@response(Opcode.OBSERVE)
class ObserveResponse(Response):
    states: Annotated[tuple[KeyState, ...], ValueCodec(_encode_key_states, _decode_key_states), ObserveState]


def _is_compaction(frame: Frame) -> bool:
    return not frame.value or frame.datatype != 0


@message(Opcode.COMPACT_DB, cas=_NO_CAS, datatypes=JSON_OR_RAW, when=_is_compaction)
class CompactDb(Message):
    """Compacts a vbucket's file and purges its tombstones."""

    purge_before_ts: U64 = 0
    purge_before_seq: U64 = 0
    drop_deletes: U8 = 0
    padding1: U8 = 0
    db_file_id: U16 = 0
    padding2: U32 = 0
    value: OptValue = b""


@message(Opcode.COLLECTIONS_SET_MANIFEST, cas=_NO_CAS)
class SetManifest(Message):
    """Replaces the collections manifest."""

    manifest: Value

    def rules(self) -> Iterator[Broken]:
        if self.vbucket:
            yield Broken("vbucket", "must be 0")


@message(Opcode.COLLECTIONS_GET_MANIFEST)
class GetManifest(Message):
    """Asks for the collections manifest."""

    def rules(self) -> Iterator[Broken]:
        if self.vbucket:
            yield Broken("vbucket", "must be 0")


@message(Opcode.COLLECTIONS_GET_ID, Opcode.COLLECTIONS_GET_SCOPE_ID)
class GetCollectionId(Message):
    """Asks for the id of ``scope.collection``, or of a scope; the path is the value, or from older clients the key."""

    key: OptKey = b""
    value: OptValue = b""

    @property
    def path(self) -> bytes:
        return self.value or self.key

    def rules(self) -> Iterator[Broken]:
        if bool(self.key) == bool(self.value):
            yield Broken("value", "the path must be in either the value or the key")
        dots = self.path.count(b".")
        if self.opcode == Opcode.COLLECTIONS_GET_ID and dots != 1:
            yield Broken("value", f"a path is scope.collection, with one dot, not {dots}")
        if dots > 1:
            yield Broken("value", f"a scope's path has at most one dot, not {dots}")


@response(Opcode.COLLECTIONS_GET_ID, Opcode.COLLECTIONS_GET_SCOPE_ID)
class GetCollectionIdResponse(Response):
    manifest_uid: U64 = 0
    id: U32 = 0


@message(ServerOpcode.CLUSTERMAP_CHANGE_NOTIFICATION, datatypes=JSON_OR_RAW, extras=(4, 16), server=True)
class ClustermapChangeNotification(Message):
    """Pushes a new cluster map, or in its brief form only the revision."""

    revision32: OptU32 = None
    epoch: OptI64 = None
    revision: OptI64 = None
    bucket: OptKey = b""
    value: OptValue = b""
