"""When to connect to which node again: backoff with jitter, kept by the shells of a feed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from upriver.errors import TEMPORARY, ConnectFailed, RemoteProtocolError, Status, StatusError, UpriverError
from upriver.protocol.feed.cluster_feed import backoff
from upriver.protocol.topology import Address

TRIES_OF_A_BROKEN_PEER = 5  # in a row, without one useful message in between
LONG_ENOUGH_S = 10.0  # a connection that lived this long was a good one


def jitter() -> float:
    """A factor between 0.5 and 1.5."""
    return 0.5 + secrets.randbelow(1000) / 1000


def located(error: StatusError, address: Address) -> StatusError:
    """A node's refusal, with the node's name."""
    if str(address) in error.context:
        return error
    return StatusError.of(getattr(error, "code", error.status), f"{error.context} at {address}")


def refusal(error: StatusError, address: Address, again: bool) -> StatusError | ConnectFailed:
    """A node's refusal of our handshake.

    A node that restarts listens before it has its buckets; to a client that was there before (``again``) it is away.
    """
    if again and error.status in (*_OF_A_RESTARTING_NODE, *TEMPORARY):
        return ConnectFailed(f"{address} has just started, or has lost the bucket: {error}")
    return located(error, address)


@dataclass(slots=True)
class Reconnects:
    """How often each node has failed in a row, and from when on it may be tried again."""

    failures: dict[Address, int] = field(default_factory=dict)
    count: int = 0
    last_error: UpriverError | OSError | None = None
    _try_at: dict[Address, float] = field(default_factory=dict)
    _ready_at: dict[Address, float] = field(default_factory=dict)
    _worked: set[Address] = field(default_factory=set)

    def may_try(self, address: Address, now: float) -> bool:
        return self._try_at.get(address, 0.0) <= now

    def failed(self, address: Address, now: float) -> None:
        self.count += 1
        if now - self._ready_at.pop(address, now) > LONG_ENOUGH_S:
            self.progressed(address)
        self.failures[address] = self.failures.get(address, 0) + 1
        self._try_at[address] = now + backoff(self.failures[address]) * jitter()

    def ready(self, address: Address, now: float) -> None:
        """Its handshake is over: from now on, a refusal means that the node restarts."""
        self._ready_at.setdefault(address, now)
        self._worked.add(address)

    def progressed(self, address: Address) -> None:
        """It has sent something useful: earlier failures no longer count."""
        self.failures.pop(address, None)

    def forgive(self, address: Address, error: UpriverError | OSError) -> None:
        """Remember the error of a connection that will be tried again; raise one that no new try can mend."""
        self.last_error = error
        if isinstance(error, StatusError):
            restarting = address in self._worked and error.status in _OF_A_RESTARTING_NODE
            if not (restarting or error.status in (*TEMPORARY, *_WITHOUT_BUCKET)):
                raise located(error, address)
        elif isinstance(error, RemoteProtocolError):
            if self.failures.get(address, 0) >= TRIES_OF_A_BROKEN_PEER:
                raise error
        elif not isinstance(error, OSError | ConnectFailed):
            raise error


_WITHOUT_BUCKET = (Status.NO_BUCKET, Status.KEY_ENOENT)  # the bucket was there before the feed was begun
_OF_A_RESTARTING_NODE = (*_WITHOUT_BUCKET, Status.EACCESS, Status.NOT_SUPPORTED)
