"""What both roles share: their view of a vbucket, the error for a wrong role, and frames that are not DCP."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from upriver.errors import RemoteProtocolError
from upriver.model import FailoverLog, VbucketState
from upriver.wire.framing import Frame


class WrongRole(RemoteProtocolError):
    """The peer sent a command for the other role, or an impossible answer: disconnect.

    See docs/protocol/framing.md#malformed and docs/protocol/consumer.md.
    """


@dataclass(slots=True)
class Foreign:
    """A frame that is not DCP: a key-value command on the same connection."""

    frame: Frame


class StoredVbucket(Protocol):
    """What both roles see of a vbucket; ``upriver.store.VBucket`` is one."""

    @property
    def state(self) -> VbucketState: ...
    @property
    def failover_log(self) -> FailoverLog: ...
    @property
    def high_seqno(self) -> int: ...
    @property
    def snapshot(self) -> tuple[int, int]: ...
    @property
    def snapshot_complete(self) -> bool: ...
