"""Waiting until a vbucket can be handed over: the target has it on disk, and little is left to send.

Only requests that every server of this protocol answers are used: high seqnos and the statistics ``dcp-vbtakeover`` at
the source, SEQNO_PERSISTENCE at the target.

See docs/protocol/consumer.md#third-party.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from upriver.client._requests.connections import converse
from upriver.client._requests.operations import ends_list
from upriver.client.options import ConnectOptions
from upriver.errors import Status, StatusError, UpriverError
from upriver.model import VbucketState
from upriver.net.conversation import Conversation
from upriver.wire.message import Response
from upriver.wire.messages.cluster import GetAllVbSeqnos, GetAllVbSeqnosResponse, SeqnoPersistence
from upriver.wire.messages.session import Stat, StatResponse

FEW_ITEMS = 100  # a takeover may begin when this many are left to send
LOOK_EVERY_S = 0.02
STREAMING = ("in-memory", "backfilling")


def takeover_stat(vbucket: int, connection_name: str) -> Stat:
    return Stat(f"dcp-vbtakeover {vbucket} {connection_name}".encode())


def is_close(answers: Iterable[Response]) -> bool:
    """Whether the answers to ``takeover_stat`` say that a stream runs and has little left to send."""
    found = {answer.key: answer.value for answer in answers if isinstance(answer, StatResponse)}
    status, estimate = found.get(b"status", b"").decode(), found.get(b"estimate", b"")
    return status in STREAMING and estimate.isdigit() and int(estimate) <= FEW_ITEMS


class CatchUp:
    """Waits for vbuckets that stream from one node to another over the connection ``name``."""

    def __init__(self, source: ConnectOptions, target: ConnectOptions, name: str, deadline: float) -> None:
        self._source, self._target, self._name, self._deadline = source, target, name, deadline

    def wait(self, vbuckets: list[int]) -> None:
        """Return once all of them can be handed over; ``UpriverError`` after the deadline."""
        with self._connected(self._source) as source, self._connected(self._target) as target:
            self._until_persisted(target, self._high_seqnos(source, vbuckets))
            for vb in vbuckets:
                while not is_close(source.ask([takeover_stat(vb, self._name)], ends_list)):
                    self._pause(vb)

    @contextmanager
    def _connected(self, options: ConnectOptions) -> Iterator[Conversation]:
        left = max(0.1, self._deadline - time.monotonic())
        options = replace(options, connect_timeout_s=min(left, options.connect_timeout_s), request_timeout_s=left)
        connection = converse(options.seeds[0], options)
        try:
            yield connection
        finally:
            connection.close()

    @staticmethod
    def _high_seqnos(source: Conversation, vbuckets: list[int]) -> dict[int, int]:
        [answer] = source.ask([GetAllVbSeqnos(VbucketState.ACTIVE)])
        if not isinstance(answer, GetAllVbSeqnosResponse):
            raise StatusError.of(answer.status, f"high seqnos of {source.address}")
        highs = {entry.vbucket: entry.seqno for entry in answer.seqnos}
        return {vb: highs.get(vb, 0) for vb in vbuckets}

    def _until_persisted(self, target: Conversation, seqnos: dict[int, int]) -> None:
        """Ask the target until it has every seqno on disk."""
        left = {vb: seqno for vb, seqno in seqnos.items() if seqno}
        while left:
            answers = target.ask([SeqnoPersistence(seqno, vbucket=vb) for vb, seqno in left.items()])
            late = [vb for vb, answer in zip(left, answers, strict=True) if answer.status != Status.SUCCESS]
            left = {vb: left[vb] for vb in late}
            if late:
                self._pause(late[0])

    def _pause(self, vb: int) -> None:
        if time.monotonic() > self._deadline:
            raise UpriverError(f"{self._target.seeds[0]} does not catch up with vbucket {vb}")
        time.sleep(LOOK_EVERY_S)
