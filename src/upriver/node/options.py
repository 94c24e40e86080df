"""The options of a node, as one frozen value that every part of the server reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from upriver.errors import ConfigError
from upriver.store import StoreOptions

VERSION = "7.6.2-0000-upriver"  # clients gate features on the number; it must start with a digit


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one client, or all of them, may take. Times in seconds, sizes in bytes."""

    max_connections: int = 2000  # that have logged in
    max_connections_per_peer: int = 1000
    max_new_connections: int = 512  # connections that have not logged in; the oldest are closed
    max_http_connections: int = 256
    unfinished_bytes: int = 192 << 20  # requests that have not arrived whole, of all connections
    unread_bytes: int = 256 << 20  # answers that clients have not read, of all connections
    max_streams: int = 16 * 1024  # per DCP connection
    output_bytes: int = 1 << 20  # unsent answers of a connection before its requests have to wait
    silent_s: float = 10.0  # until a new connection must have said something
    handshake_s: float = 30.0  # until a connection must be authenticated
    idle_s: float = 300.0  # silence on a plain connection
    dcp_idle_s: float = 360.0  # silence, or nothing read, on a DCP connection
    takeover_s: float = 60.0  # until a takeover that does not catch up makes writers wait
    persistence_wait_s: float = 30.0
    parked_ops: int = 1024  # operations that wait for a pending vbucket, per connection


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """Options of a node. Port 0 picks a free one; without ``tls_port`` the node does not listen for TLS."""

    data: Path
    host: str = "127.0.0.1"
    kv_port: int = 11210
    advertised_kv_port: int | None = None  # where others reach kv_port, if a proxy is in between
    http_port: int = 0  # the management port
    tls_port: int | None = None
    bucket: str = "default"
    vbuckets: int = 1024
    username: str = ""
    password: str = field(default="", repr=False)
    default_bucket: str = ""  # selected at once on every new connection, for plain memcached clients
    member: bool = False  # of a cluster: serve no client before a manager has pushed its map
    enable_faults: bool = False
    enable_flush: bool = False
    plain_without_tls: bool = True
    certificate: Path | None = None
    private_key: Path | None = None
    client_ca: Path | None = None
    upr_expirations: bool = False  # send expired documents on UPR streams with opcode 0x59
    expiry_pager_s: float = 600.0
    maintain_s: float = 1.0
    store: StoreOptions = field(default_factory=StoreOptions)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 1 <= self.vbuckets <= 65535:
            raise ConfigError(f"vbuckets is {self.vbuckets}; allowed: 1 to 65535")
        for name in ("kv_port", "advertised_kv_port", "http_port", "tls_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65535:  # bind() would silently use the low 16 bits
                raise ConfigError(f"--{name.replace('_', '-')} is {port}; allowed: 0 to 65535")
        if bool(self.username) != bool(self.password):
            raise ConfigError("--username and --password (or UPRIVER_PASSWORD) go together: one of them is missing")
