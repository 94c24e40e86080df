"""What the two roles of a DCP connection have in common."""

from __future__ import annotations

from dataclasses import dataclass

from upriver.errors import RemoteProtocolError
from upriver.wire.framing import Frame


class WrongRole(RemoteProtocolError):
    """A command for the other role, or an answer that cannot be: disconnect.

    See docs/protocol/framing.md#malformed and docs/protocol/consumer.md.
    """


@dataclass(slots=True)
class Foreign:
    """A frame that is no business of DCP: a key-value command on the same connection."""

    frame: Frame
