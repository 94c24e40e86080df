"""Bundles: items that are ready for the caller, with the positions reached once it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from upriver.protocol.feed.cluster_feed import FeedEvent, FeedRows
from upriver.protocol.feed.positions import FrozenPositions


@dataclass(slots=True)
class Bundle:
    """Items for the caller, in order, and what to tell the feed once they are taken."""

    items: list[Any]
    held: list[FeedRows] = field(default_factory=list)
    reached: FrozenPositions | None = None  # once all is taken; None: the feed has counted more than that
    single: bool = False  # items are single documents, with a vbucket and a seqno each
    rolled_back: tuple[int, int] | None = None  # vbucket, to_seqno: what waits above that is void
    then: Callable[[], None] | None = None  # to be done when all is taken


class BundleMaker(Protocol):
    """Turns feed events into bundles."""

    @property
    def holds(self) -> bool: ...
    def add(self, event: FeedEvent) -> Iterator[Bundle]: ...
    def flush(self) -> Iterator[Bundle]: ...
