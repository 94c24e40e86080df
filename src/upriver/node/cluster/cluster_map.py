"""The cluster map: which node serves which vbucket, as JSON for clients, and the newest one on disk.

A node alone has a map with one node; the manager of a cluster makes maps with several (docs/protocol/framing.md#header
and docs/protocol/session.md#cluster-map). A node keeps the newest map that it was given, so that it refuses an older
one after a restart, too: a manager may have lost the newest, or have been started from an old copy of its file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import ConfigError
from upriver.files import replace_file
from upriver.model import Datatype
from upriver.wire.constants import Feature
from upriver.wire.messages.cluster import ClustermapChangeNotification

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.connection import ClientConnection
    from upriver.node.server import Node

_FILE = "upriver.map"
_CAPABILITIES = (
    "cbhello", "cccp", "collections", "couchapi", "dcp", "durableWrite", "nodesExt", "preserveExpiry",
    "subdoc.DocumentMacroSupport", "subdoc.ReplicaRead", "subdoc.ReviveDocument", "tombstonedUserXAttrs", "touch",
    "xattr", "xdcrCheckpointing",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a node listens; None for a port that it does not have."""

    host: str
    kv: int
    mgmt: int | None = None
    kv_tls: int | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.kv}"

    def services(self) -> dict[str, int]:
        named = {"kv": self.kv, "mgmt": self.mgmt, "kvSSL": self.kv_tls}
        return {name: port for name, port in named.items() if port is not None}


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a map. Epoch and revision order the maps of a cluster; ``branch`` names their writer.

    Two managers that start from copies of one file write different maps with the same revisions, but never with the
    same branch.
    """

    epoch: int = 0
    revision: int = 0
    branch: str = ""


@dataclass(frozen=True, slots=True)
class Lineage:
    """A map's version, and its ancestors: the last revision of each branch before it."""

    version: Version = Version()
    ancestors: Mapping[str, int] = field(default_factory=dict)

    def includes(self, other: Version) -> bool:
        """Whether the writer of this map knew that one.

        >>> Lineage(Version(1, 9, "b"), {"a": 5}).includes(Version(1, 7, "a"))
        False
        """
        if not other.branch:  # there was no map, or one from before maps had branches
            return (other.epoch, other.revision) <= (self.version.epoch, self.version.revision)
        if other.branch == self.version.branch:
            return other.revision <= self.version.revision
        return other.revision <= self.ancestors.get(other.branch, -1)

    def follows(self, other: Version) -> bool:
        """Whether a node that has that map may take this one."""
        newer = (self.version.epoch, self.version.revision) > (other.epoch, other.revision)
        return newer and self.includes(other)


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """One revision of the map. ``owners[vb]`` lists node indexes, the active one first, -1 for none.

    ``uuid`` is the bucket's, the same at all members; a node alone has its own.
    """

    nodes: tuple[NodeAddress, ...]
    owners: Sequence[Sequence[int]]
    revision: int = 1
    epoch: int = 1
    replicas: int = 0
    uuid: str = ""
    branch: str = ""
    ancestors: Mapping[str, int] = field(default_factory=dict)

    @property
    def lineage(self) -> Lineage:
        return Lineage(Version(self.epoch, self.revision, self.branch), self.ancestors)

    @classmethod
    def alone(cls, address: NodeAddress, vbuckets: int, revision: int = 1) -> ClusterMap:
        return cls((address,), [[0]] * vbuckets, revision)

    def is_newer_than(self, epoch: int, revision: int) -> bool:
        return (self.epoch, self.revision) > (epoch, revision)

    def to_json(self, name: str, uuid: str, this_node: int = 0, manifest_uid: int = 0) -> bytes:
        return orjson.dumps(
            {
                "rev": self.revision,
                "revEpoch": self.epoch,
                "name": name,
                "uuid": uuid,
                "nodeLocator": "vbucket",
                "uri": f"/pools/default/buckets/{name}?bucket_uuid={uuid}",
                "streamingUri": f"/pools/default/bucketsStreaming/{name}?bucket_uuid={uuid}",
                "bucketCapabilitiesVer": "",
                "bucketCapabilities": _CAPABILITIES,
                "collectionsManifestUid": f"{manifest_uid:x}",
                **self._nodes_json(this_node),
                "vBucketServerMap": self._vbuckets_json(),
            }
        )

    def to_json_without_bucket(self, this_node: int = 0) -> bytes:
        """The nodes only, for a client that has selected no bucket."""
        return orjson.dumps({"rev": self.revision, "revEpoch": self.epoch, "nodesExt": self._extended(this_node)})

    def _nodes_json(self, this_node: int) -> dict[str, object]:
        plain = [{"hostname": f"{n.host}:{n.mgmt or 8091}", "ports": {"direct": n.kv}} for n in self.nodes]
        return {"nodes": plain, "nodesExt": self._extended(this_node)}

    def _extended(self, this_node: int) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for index, node in enumerate(self.nodes):
            entry: dict[str, object] = {"hostname": node.host, "services": node.services()}
            if index == this_node:
                entry["thisNode"] = True
            found.append(entry)
        return found

    def _vbuckets_json(self) -> dict[str, object]:
        return {
            "hashAlgorithm": "CRC",
            "numReplicas": self.replicas,
            "serverList": [str(node) for node in self.nodes],
            "vBucketMap": [list(row) for row in self.owners],
        }


def parse_map(data: Any) -> ClusterMap:
    """The map that a manager pushes; ``ConfigError`` says what is wrong with it."""
    try:
        nodes = tuple(_address(node) for node in data["nodes"])
        owners = [[int(index) for index in row] for row in data["owners"]]
        revision, epoch, replicas = (int(data[name]) for name in ("revision", "epoch", "replicas"))
        branch, ancestors = str(data.get("branch", "")), {str(b): int(r) for b, r in data.get("ancestors", {}).items()}
        found = ClusterMap(nodes, owners, revision, epoch, replicas, str(data.get("uuid", "")), branch, ancestors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"not a cluster map: {error!r}") from error
    if any(not row or max(row) >= len(nodes) for row in owners):
        raise ConfigError("the cluster map names a node that it does not list")
    return found


def _address(node: Any) -> NodeAddress:
    host, ports = node["host"], (node["kv"], node.get("mgmt") or 1)
    if not isinstance(host, str) or any(type(port) is not int or not 0 < port < 1 << 16 for port in ports):
        raise ValueError(f"{host}:{node['kv']} is not an address")
    return NodeAddress(host, node["kv"], node.get("mgmt"))


class KeptMap:
    """The newest map of one bucket, as a file and as it was pushed; ``data`` is None before the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._damage = ""
        self.data: dict[str, Any] | None = None
        self.map: ClusterMap | None = None
        if path.exists():
            try:
                data = orjson.loads(path.read_bytes())
                self.data, self.map = data, parse_map(data)
            except (orjson.JSONDecodeError, ConfigError) as error:
                self._damage = f"{path} is damaged ({error}); remove it if the manager's cluster.json is the newest"

    def checked(self) -> ClusterMap | None:
        """The map, if there is one; ``ConfigError`` if its file is damaged."""
        if self._damage:
            raise ConfigError(self._damage)
        return self.map

    @classmethod
    def of(cls, node: Node, bucket: NodeBucket) -> KeptMap:
        if bucket.kept_map is None:
            bucket.kept_map = cls(node.options.data / bucket.name / _FILE)
        return bucket.kept_map

    @property
    def version(self) -> Version:
        return self.map.lineage.version if self.map is not None else Version()

    def keep(self, data: dict[str, Any], new: ClusterMap) -> None:
        """Keep a new map; it is on disk on return."""
        replace_file(self._path, orjson.dumps(data).decode())
        self.data, self.map = data, new


def push_map(node: Node, bucket: NodeBucket) -> None:
    """Notify the bucket's clients that asked HELLO for it; those that asked for both forms get the brief one."""
    for conn in list(node.connections):
        if conn.bucket is not bucket or conn.closed or Feature.DUPLEX not in conn.features:
            continue
        if Feature.CLUSTERMAP_CHANGE_NOTIFICATION_BRIEF in conn.features:
            _push(node, bucket, conn, b"")
        elif Feature.CLUSTERMAP_CHANGE_NOTIFICATION in conn.features:
            _push(node, bucket, conn, node.cluster_json(bucket))


def _push(node: Node, bucket: NodeBucket, conn: ClientConnection, value: bytes) -> None:
    current = node.cluster_map(bucket)
    datatype = int(Datatype.JSON) if value else 0
    notification = ClustermapChangeNotification(
        epoch=current.epoch, revision=current.revision, bucket=bucket.name.encode(), value=value, datatype=datatype
    )
    conn.write(notification.encode())
