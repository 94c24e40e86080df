"""Everything that a client asks of a cluster, as operations without I/O.

An operation is a generator: it yields steps (connect, ask, pause), and the blocking or asyncio client performs them and
sends the results back. So retries, cluster maps and errors are written once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from upriver.client._requests.bulk_set import SetRun, parts_of, set_runs
from upriver.client.options import ConnectOptions
from upriver.errors import (
    ConnectFailed,
    NoCollectionsManifest,
    NotMyVbucket,
    RemoteProtocolError,
    Status,
    StatusError,
    UnknownCollection,
    UnknownScope,
    UpriverError,
    is_retryable,
)
from upriver.model import DEFAULT_COLLECTION, Document, FailoverLog, VbucketState, vbucket_of
from upriver.net.requests import Encodes, Ends, RequestRun
from upriver.protocol.feed.stream_states import backoff
from upriver.protocol.session import config_json
from upriver.protocol.topology import Address, Topology
from upriver.wire.constants import Feature, Opcode
from upriver.wire.keys import join_key
from upriver.wire.message import Message, Response
from upriver.wire.messages.cluster import (
    GetAllVbSeqnos,
    GetAllVbSeqnosResponse,
    GetCollectionId,
    GetCollectionIdResponse,
    GetFailoverLog,
    GetFailoverLogResponse,
    GetManifest,
    ObserveSeqno,
)
from upriver.wire.messages.kv import Add, Delete, Get, GetResponse, Set
from upriver.wire.messages.session import Stat, StatResponse

T = TypeVar("T")


@dataclass(slots=True)
class Connect:
    """Connect to a node (again). The result is the JSON of its cluster map; a failure is a ``ConnectFailed``."""

    address: Address


@dataclass(slots=True)
class Ask:
    """Send requests to a node. The result is one response per request, in order.

    With ``ends``, it is all responses up to the first for which ``ends`` is true.
    """

    address: Address
    messages: Sequence[Encodes]
    ends: Ends | None = None


@dataclass(slots=True)
class AskRun:
    """Send a run of quiet requests to a node. The result is the refusals and the answer to the fence."""

    address: Address
    run: RequestRun


@dataclass(slots=True)
class Features:
    """The result is the features of the connection to a node; connects if necessary."""

    address: Address


@dataclass(slots=True)
class Pause:
    seconds: float


Step = Connect | Ask | AskRun | Features | Pause
Operation = Generator[Step, Any, T]
DEFAULT_MANIFEST: dict[str, Any] = {
    "uid": "0",
    "scopes": [{"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}],
}  # of servers without collections
RUN_BYTES = 16 * 1024 * 1024  # of documents that are sent before the answers are read


def raw_key(key: str | bytes) -> bytes:
    return key.encode() if isinstance(key, str) else key


class Operations:
    """The operations on one bucket; keeps the newest cluster map that any of them received."""

    def __init__(self, options: ConnectOptions, seeds: Sequence[Address]) -> None:
        self.options = options
        self.seeds = tuple(seeds)
        self._topology: Topology | None = None

    @property
    def topology(self) -> Topology:
        if self._topology is None:
            raise ConnectFailed("not connected")
        return self._topology

    @property
    def connected(self) -> bool:
        """Whether the cluster has accepted us before: user name, password and bucket are right."""
        return self._topology is not None

    # ---------------------------------------------------------------------------------------------- cluster

    def bootstrap(self) -> Operation[Topology]:
        """The cluster map from the first node that answers; tries the nodes of the last map, then the seeds."""
        known = self._topology.nodes if self._topology else ()
        failures = []
        for address in dict.fromkeys((*known, *self.seeds)):
            try:
                config = yield Connect(address)
                return self.adopt(config, address)
            except (ConnectFailed, RemoteProtocolError) as error:
                failures.append(str(error))
        raise ConnectFailed("no node could be reached: " + "; ".join(failures))

    def adopt(self, config: bytes, address: Address) -> Topology:
        """Use a map if it is newer than ours; returns the newest."""
        found = self.options.parse_map(config_json(config), address.host)
        if self._topology is None or found.revision > self._topology.revision:
            self._topology = found
        return self._topology

    def _owner(self, vbucket: int) -> Address:
        owner = self.topology.active(vbucket)
        if owner is None:
            raise NotMyVbucket(f"no node owns vbucket {vbucket} in the current cluster map; try again after failover")
        return owner

    def _retried(self, make: Callable[[], Operation[T]]) -> Operation[T]:
        """Retry until it succeeds, or until the request timeout."""
        waited, attempt = 0.0, 0
        while True:
            try:
                return (yield from make())
            except (ConnectFailed, StatusError) as error:
                attempt += 1
                waited += backoff(attempt)
                if waited > self.options.request_timeout_s or not is_retryable(error):
                    raise
            yield Pause(backoff(attempt))
            yield from self._refresh_map()

    def _refresh_map(self) -> Operation[None]:
        """Ask for a newer map; if no node answers, the next attempt will fail by itself."""
        try:
            yield from self.bootstrap()
        except ConnectFailed:
            return

    def _ask(self, address: Address, message: Message, what: str = "") -> Operation[Response]:
        """The answer, if it is a success; else raises the error for its status."""
        answers: list[Response] = yield Ask(address, [message])
        response = answers[0]
        if response.status != Status.SUCCESS:
            raise self._refusal(response, address, what)
        return response

    def _refusal(self, response: Response, address: Address, what: str) -> StatusError:
        if response.status == Status.NOT_MY_VBUCKET and (config := getattr(response, "value", b"")):
            self.adopt(config, address)
            return NotMyVbucket(f"{what} at {address}")
        said = getattr(response, "context", str)()
        return StatusError.of(response.status, f"{what} at {address}{': ' + said if said else ''}".strip())

    # ---------------------------------------------------------------------------------------------- documents

    def to_owner(self, key: bytes, make: Callable[[int], Message]) -> Operation[Response]:
        """Send a request for one document to the node that owns it, also if it moves."""
        vb = vbucket_of(key, self.topology.vbuckets)
        what = f"vbucket {vb}"
        return (yield from self._retried(lambda: self._ask(self._owner(vb), make(vb), what)))

    def get(self, key: str | bytes, collection_id: int) -> Operation[Document]:
        raw = raw_key(key)
        wire_key = join_key(collection_id, raw)
        found = yield from self.to_owner(raw, lambda vb: Get(wire_key, vbucket=vb))
        if not isinstance(found, GetResponse):
            raise RemoteProtocolError("the answer to GET has no flags", "extras length", 4)
        return Document(raw, found.value, collection_id, found.cas, flags=found.flags, datatype=found.datatype)

    def set(self, key: str | bytes, value: bytes, collection_id: int, expiry: int, cas: int) -> Operation[int]:
        raw = raw_key(key)
        wire_key = join_key(collection_id, raw)
        stored = yield from self.to_owner(raw, lambda vb: Set(0, expiry, wire_key, value, vbucket=vb, cas=cas))
        return stored.cas

    def add(self, key: str | bytes, value: bytes, collection_id: int, expiry: int) -> Operation[int]:
        raw = raw_key(key)
        wire_key = join_key(collection_id, raw)
        return (yield from self.to_owner(raw, lambda vb: Add(0, expiry, wire_key, value, vbucket=vb))).cas

    def delete(self, key: str | bytes, collection_id: int, cas: int) -> Operation[int]:
        raw = raw_key(key)
        wire_key = join_key(collection_id, raw)
        return (yield from self.to_owner(raw, lambda vb: Delete(wire_key, vbucket=vb, cas=cas))).cas

    def set_many(self, documents: Mapping[bytes, bytes], collection_id: int) -> Operation[None]:
        """Write many documents, pipelined per node; temporarily refused ones are sent again."""
        left = dict(documents)
        waited, attempt = 0.0, 0
        while left:
            left, failure = yield from self._set_once(left, collection_id)
            if left:
                attempt += 1
                waited += backoff(attempt)
                if failure is not None and waited > self.options.request_timeout_s:
                    raise failure
                yield Pause(backoff(attempt))
                yield from self._refresh_map()

    def _set_once(
        self, documents: Mapping[bytes, bytes], collection_id: int
    ) -> Operation[tuple[dict[bytes, bytes], UpriverError | None]]:
        """Send everything once; returns what must be sent again, and why."""
        bare = yield from self._without_collections(collection_id)
        left: dict[bytes, bytes] = {}
        failure: UpriverError | None = None
        for part in parts_of(documents.items(), RUN_BYTES):
            runs, unowned = set_runs(part, self.topology, collection_id, bare)
            left.update((key, documents[key]) for key in unowned)
            failure = NotMyVbucket("no node owns some vbuckets now") if unowned else failure
            for address, run in runs.items():
                refused, error = yield from self._set_run(address, run)
                left.update((key, documents[key]) for key in refused)
                failure = error or failure
        return left, failure

    def _without_collections(self, collection_id: int) -> Operation[frozenset[Address]]:
        """The nodes without collections; ``UnknownCollection`` if there are any and the id is not the default one."""
        found: frozenset[Address] = frozenset()
        for address in self.topology.serving:
            try:
                has_them = yield from self._has_collections(address)
            except ConnectFailed:
                continue  # the write will report it
            found |= frozenset() if has_them else {address}
        if found and collection_id != DEFAULT_COLLECTION:
            raise UnknownCollection(f"{collection_id:#x} at {min(map(str, found))}, which has only the default one")
        return found

    def _has_collections(self, address: Address) -> Operation[bool]:
        return Feature.COLLECTIONS in (yield Features(address))

    def _set_run(self, address: Address, run: SetRun) -> Operation[tuple[list[bytes], UpriverError | None]]:
        """The keys that must be sent again. If the connection broke, all of them: a SET may be repeated."""
        refused: list[bytes] = []
        failure: UpriverError | None = None
        try:
            answers = yield AskRun(address, run)
        except ConnectFailed as error:
            return run.keys, error
        for answer in answers:
            if answer.status != Status.SUCCESS and answer.opaque < len(run.keys):
                refused.append(run.keys[answer.opaque])
                failure = self._refusal(answer, address, f"vbucket {vbucket_of(refused[-1], self.topology.vbuckets)}")
                if not is_retryable(failure):
                    raise failure
        return refused, failure

    # ---------------------------------------------------------------------------------------------- history

    def high_seqnos(self, collection_id: int | None = None, *, complete: bool = True) -> Operation[dict[int, int]]:
        """The high seqno of every active vbucket; with ``complete``, waits for vbuckets that are moving."""
        return (yield from self._retried(lambda: self._high_seqnos(collection_id, complete)))

    def _high_seqnos(self, collection_id: int | None, complete: bool) -> Operation[dict[int, int]]:
        found: dict[int, int] = {}
        for address in dict.fromkeys(a for vb in range(self.topology.vbuckets) if (a := self.topology.active(vb))):
            answer = yield from self._ask(address, GetAllVbSeqnos(VbucketState.ACTIVE, collection_id), "high seqnos")
            if isinstance(answer, GetAllVbSeqnosResponse):
                found.update((entry.vbucket, entry.seqno) for entry in answer.seqnos)
        if complete and collection_id is None and (moved := self.topology.owned() - found.keys()):
            # A node reports only the vbuckets that it has: those that moved since our map would be missing silently.
            raise NotMyVbucket(f"no node that should own vbucket {min(moved)} has it; it is moving")
        return found

    def failover_logs(self, vbuckets: Iterable[int]) -> Operation[dict[int, FailoverLog]]:
        wanted = list(vbuckets)
        return (yield from self._retried(lambda: self._failover_logs(wanted)))

    def _failover_logs(self, vbuckets: list[int]) -> Operation[dict[int, FailoverLog]]:
        found: dict[int, FailoverLog] = {}
        for address, owned in self._by_owner(vbuckets).items():
            answers = yield Ask(address, [GetFailoverLog(vbucket=vb) for vb in owned])
            for vb, answer in zip(owned, answers, strict=True):
                if not isinstance(answer, GetFailoverLogResponse):
                    raise self._refusal(answer, address, f"failover log of vbucket {vb}")
                found[vb] = FailoverLog(answer.entries)
        return found

    def _by_owner(self, vbuckets: Iterable[int]) -> dict[Address, list[int]]:
        by_node: dict[Address, list[int]] = {}
        for vb in vbuckets:
            by_node.setdefault(self._owner(vb), []).append(vb)
        return by_node

    def persisted(self, branches: Mapping[int, int]) -> Operation[dict[int, int]]:
        """The seqno up to which each vbucket's branch is on the disks of its active and all its replicas; 0: unknown.

        It is unknown if a copy cannot be asked or is on another branch.
        """
        copies: dict[Address, list[int]] = {}
        for vb in branches:
            owner = self.topology.active(vb)
            for address in (owner, *self.topology.replicas(vb)) if owner else ():
                copies.setdefault(address, []).append(vb)
        lowest: dict[int, int] = {}
        for address, vbuckets in copies.items():
            seqnos = yield from self._persisted_at(address, {vb: branches[vb] for vb in vbuckets})
            lowest.update((vb, min(lowest.get(vb, seqno), seqno)) for vb, seqno in seqnos.items())
        return {vb: lowest.get(vb, 0) for vb in branches}

    def _persisted_at(self, address: Address, branches: Mapping[int, int]) -> Operation[dict[int, int]]:
        try:
            answers = yield Ask(address, [ObserveSeqno(branch, vbucket=vb) for vb, branch in branches.items()])
        except ConnectFailed:
            return dict.fromkeys(branches, 0)
        return {
            vb: int(getattr(answer, "persisted_seqno", 0)) if getattr(answer, "vbuuid", None) == branch else 0
            for (vb, branch), answer in zip(branches.items(), answers, strict=True)
        }

    def has_disk(self) -> Operation[bool]:
        """Whether the bucket is on disk, not only in memory.

        Buckets in memory lack the capability ``couchapi``. Others may lack it too, so the nodes are asked then.
        """
        if not self.topology.capabilities or "couchapi" in self.topology.capabilities:
            return True
        for address in self.topology.serving:
            try:
                found = yield from self._stats_of(address, "")
            except (ConnectFailed, StatusError):
                continue
            return found.get("ep_bucket_type") != "ephemeral"
        return True

    # ---------------------------------------------------------------------------------------------- collections

    def has_collections(self) -> Operation[bool]:
        """Whether the server supports collections; before 7.0, it has only the default one."""
        return (yield from self._retried(lambda: self._has_collections(self.topology.serving[0])))

    def manifest(self) -> Operation[dict[str, Any]]:
        """The collections manifest as parsed JSON; without collections, a manifest with only the default one."""
        return (yield from self._retried(self._manifest))

    def _manifest(self) -> Operation[dict[str, Any]]:
        address = self.topology.serving[0]
        if not (yield from self._has_collections(address)):
            return DEFAULT_MANIFEST
        try:
            answer = yield from self._ask(address, GetManifest(), "manifest")
        except NoCollectionsManifest:
            return DEFAULT_MANIFEST
        found = config_json(getattr(answer, "value", b""))
        return found if isinstance(found, dict) else {}

    def collection_names(self) -> Operation[dict[int, tuple[str, str]]]:
        manifest = yield from self.manifest()
        try:
            return {
                int(collection["uid"], 16): (scope["name"], collection["name"])
                for scope in manifest["scopes"]
                for collection in scope["collections"]
            }
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the collections manifest is not usable: {error!r}", "value") from error

    def collection_id(self, path: str) -> Operation[int]:
        """The id of ``scope.collection``; ``UnknownCollection`` or ``UnknownScope`` if it does not exist."""
        if not (yield from self.has_collections()):
            return _default_id(path, "_default._default", UnknownCollection)
        return (yield from self._id(GetCollectionId(value=path.encode()), path))

    def scope_id(self, name: str) -> Operation[int]:
        if not (yield from self.has_collections()):
            return _default_id(name, "_default", UnknownScope)
        lookup = GetCollectionId.under(Opcode.COLLECTIONS_GET_SCOPE_ID)
        return (yield from self._id(lookup(value=name.encode()), name))

    def _id(self, message: Message, path: str) -> Operation[int]:
        answer = yield from self._retried(lambda: self._ask(self.topology.serving[0], message, repr(path)))
        if not isinstance(answer, GetCollectionIdResponse):
            raise RemoteProtocolError("the answer has no id", "extras length", 4)
        return answer.id

    # ---------------------------------------------------------------------------------------------- statistics

    def stats(self, group: str) -> Operation[dict[str, dict[str, str]]]:
        """A group of statistics from every node, by address."""
        found: dict[str, dict[str, str]] = {}
        for address in self.topology.serving:
            found[str(address)] = yield from self._stats_of(address, group)
        return found

    def _stats_of(self, address: Address, group: str) -> Operation[dict[str, str]]:
        answers: list[Response] = yield Ask(address, [Stat(group.encode())], ends=ends_list)
        if answers and answers[-1].status != Status.SUCCESS:
            raise self._refusal(answers[-1], address, f"statistics {group!r}")
        told = (answer for answer in answers if isinstance(answer, StatResponse) and answer.key)
        return {answer.key.decode(): answer.value.decode("utf-8", "replace") for answer in told}


def _default_id(name: str, default: str, error: type[StatusError]) -> int:
    if name != default:
        raise error(f"{name!r}: this server has no collections but {default!r}")
    return DEFAULT_COLLECTION


def ends_list(response: Response) -> bool:
    """Whether this is the last of several answers to one request."""
    return response.status != Status.SUCCESS or not getattr(response, "key", b"")
