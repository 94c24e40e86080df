"""What producers and consumers have in common: the error for a wrong role, and frames that are not DCP."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.errors import RemoteProtocolError
from upriver.wire.framing import Frame


class WrongRole(RemoteProtocolError):
    """The peer sent a command for the other role, or an impossible answer: disconnect.

    See docs/protocol/framing.md#malformed and docs/protocol/consumer.md.
    """


@dataclass(slots=True)
class Foreign:
    """A frame that is not DCP: a key-value command on the same connection."""

    frame: Frame
