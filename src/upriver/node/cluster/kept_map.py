"""The newest cluster map that a node was given, on disk, so that it refuses an older one after a restart, too.

A manager may have lost the newest map, or have been started from an old copy of its file; then the nodes have the
newer one, and say so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from upriver.errors import ConfigError
from upriver.files import replace_file
from upriver.node.cluster.cluster_map import ClusterMap, NodeAddress, Version

if TYPE_CHECKING:
    from upriver.node.buckets import NodeBucket
    from upriver.node.server import Node

_FILE = "upriver.map"


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
    """The map of one bucket as it was pushed; ``data`` is None before the first one."""

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
        """Durable on return."""
        replace_file(self._path, orjson.dumps(data).decode())
        self.data, self.map = data, new
