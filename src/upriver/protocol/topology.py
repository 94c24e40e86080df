"""The cluster map as a value: which node owns which vbucket, parsed from the JSON that nodes send.

See docs/protocol/session.md#cluster-map.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from upriver.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class Address:
    """Where a node's data service listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Topology:
    """One revision of the cluster map; ``chains[vb]`` lists indexes into ``nodes``, active first, -1 for none."""

    revision: tuple[int, int]
    nodes: tuple[Address, ...]
    chains: tuple[tuple[int, ...], ...]
    bucket: str = ""
    bucket_uuid: str = ""
    capabilities: frozenset[str] = frozenset()

    @property
    def vbuckets(self) -> int:
        return len(self.chains)

    def active(self, vbucket: int) -> Address | None:
        """The node that owns a vbucket, or None while no node does."""
        return self.nodes[index] if (index := self.chains[vbucket][0]) >= 0 else None

    @property
    def serving(self) -> tuple[Address, ...]:
        """The nodes that own vbuckets. A map may list others, which should not be asked."""
        owners = {chain[0] for chain in self.chains if chain[0] >= 0}
        return tuple(self.nodes[index] for index in sorted(owners)) or self.nodes

    def owned(self) -> set[int]:
        """The vbuckets that have an owner."""
        return {vb for vb, chain in enumerate(self.chains) if chain[0] >= 0}

    def replicas(self, vbucket: int) -> list[Address]:
        return [self.nodes[index] for index in self.chains[vbucket][1:] if index >= 0]


def parse_topology(config: Any, seen_host: str, *, tls: bool = False, network: str = "auto") -> Topology:
    """The map in a config. ``seen_host`` is the host by which we reached its sender, for ``$HOST`` and missing names.

    ``network`` is "default", "external" (alternate addresses) or "auto": external if we used such an address.
    """
    with _as_protocol_error():
        return _parse(config, seen_host, tls, network)


def management_port(config: Any, seen_host: str, *, tls: bool = False, network: str = "auto") -> int | None:
    """The management port of the node that sent a config; None if it has none. Arguments as in ``parse_topology``."""
    with _as_protocol_error():
        addresses = _addresses_of("mgmtSSL" if tls else "mgmt", config, seen_host, network)
        senders = [at for node, at in zip(config.get("nodesExt", ()), addresses, strict=True) if node.get("thisNode")]
        found = (senders or addresses or [None])[0]
        return None if found is None else found.port


@contextmanager
def _as_protocol_error() -> Iterator[None]:
    """A config of the wrong shape is the server's fault."""
    try:
        yield
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise RemoteProtocolError(f"the cluster config is not usable: {error!r}", "cluster config") from error


def _parse(config: Any, seen_host: str, tls: bool, network: str) -> Topology:
    server_map = config["vBucketServerMap"]
    servers = [str(server).replace("$HOST", seen_host) for server in server_map["serverList"]]
    nodes = _extended_nodes(config, seen_host, tls, network) or [_split_address(server) for server in servers]
    chains = tuple(tuple(int(index) for index in row) for row in server_map["vBucketMap"])
    if not chains or any(not row or max(row) >= len(nodes) for row in chains):
        raise ValueError("vBucketMap names a node that is not listed")
    return Topology(
        revision=(int(config.get("revEpoch", 0)), int(config.get("rev", 0))),
        nodes=tuple(nodes),
        chains=chains,
        bucket=str(config.get("name", "")),
        bucket_uuid=str(config.get("uuid", "")),
        capabilities=frozenset(config.get("bucketCapabilities", ())),
    )


def _extended_nodes(config: Any, seen_host: str, tls: bool, network: str) -> list[Address]:
    """Addresses from ``nodesExt``, the only part with TLS ports and alternate addresses.

    Its data nodes are in the order of ``serverList``, so the indexes of the vbucket map apply.
    """
    return [at for at in _addresses_of("kvSSL" if tls else "kv", config, seen_host, network) if at is not None]


def _addresses_of(service: str, config: Any, seen_host: str, network: str) -> list[Address | None]:
    """Where each node of ``nodesExt`` has a service; None for a node without it."""
    if network == "auto":
        network = _network_of(config, seen_host)
    found: list[Address | None] = []
    for node in config.get("nodesExt", ()):
        alternate = node.get("alternateAddresses", {}).get("external") if network == "external" else None
        port = ((alternate or {}).get("ports") or node["services"]).get(service)
        host = str((alternate or node).get("hostname", seen_host)).replace("$HOST", seen_host)
        found.append(None if port is None else Address(host, int(port)))
    return found


def _network_of(config: Any, seen_host: str) -> str:
    """The cluster's network by which we reached it."""
    nodes = config.get("nodesExt", ())
    if any(node.get("hostname") == seen_host for node in nodes):
        return "default"
    alternates = (node.get("alternateAddresses", {}).get("external", {}) for node in nodes)
    return "external" if any(a.get("hostname") == seen_host for a in alternates) else "default"


def _split_address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    return Address(host.strip("[]"), int(port))
