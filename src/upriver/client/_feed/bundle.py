"""What is ready for the caller: items, what they cost, and where the reader stands once it has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from upriver.protocol.feed.cluster_feed import FeedEvent, FeedRows
from upriver.protocol.standing import Mark


@dataclass(slots=True)
class Bundle:
    """Items for the caller, in order, and what to tell the feed once they are taken."""

    items: list[Any]
    held: list[FeedRows] = field(default_factory=list)
    mark: Mark | None = None  # the place in the feed once all is taken; None: the feed has counted more than that
    single: bool = False  # items are single documents, with a vbucket and a seqno each
    rolled_back: tuple[int, int] | None = None  # vbucket, to_seqno: what waits of it beyond that is void
    then: Callable[[], None] | None = None  # to be done when all is taken


class BundleMaker(Protocol):
    """Turns feed events into items."""

    @property
    def holds(self) -> bool: ...
    def add(self, event: FeedEvent) -> Iterator[Bundle]: ...
    def flush(self) -> Iterator[Bundle]: ...
