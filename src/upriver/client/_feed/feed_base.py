"""What the feeds for threads and for asyncio have in common: everything that a caller may ask and that is no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from upriver.client._feed.outbox import Outbox
from upriver.client._feed.subscription import Subscription
from upriver.client.names import Names
from upriver.client.positions import Positions
from upriver.client.reading import FeedOptions, settings_of
from upriver.client.telemetry import FeedMetrics, MetricsEndpoint, serve_metrics
from upriver.errors import ConfigError, LocalProtocolError
from upriver.protocol.feed.cluster_feed import ClusterFeed
from upriver.protocol.feed.events import FeedRequest

if TYPE_CHECKING:
    from upriver.client._requests.operations import Operations

T = TypeVar("T")


class FeedBase(Generic[T]):
    """A feed of changes or batches: what it was asked for, and, once it is open, where it is."""

    def __init__(self, options: FeedOptions, *, batches: bool) -> None:
        if batches and options.where:
            raise ConfigError("where: it takes one change at a time; use changes(), or filter the batches themselves")
        self.options = options
        self._batches = batches
        self._subscription: Subscription | None = None
        self._closed = False

    @property
    def subscription(self) -> Subscription:
        """For upriver's own modules; ``LocalProtocolError`` before the feed is open."""
        if self._subscription is None:
            raise LocalProtocolError("the feed is not open yet")
        return self._subscription

    @property
    def feed(self) -> ClusterFeed:
        """For upriver's own modules: the machine that this feed drives."""
        return self.subscription.feed

    def _subscribe(
        self, operations: Operations, read: FeedOptions, request: FeedRequest, manifest: dict[str, Any]
    ) -> None:
        settings, names = settings_of(operations.options, read), Names.of_manifest(manifest)
        self._subscription = Subscription(operations, request, settings, names, read, read.filter)
        if self._batches:
            from upriver.client._feed.arrow import BatchMaker

            self._subscription.deliver(BatchMaker, rows=read.rows)
        else:
            from upriver.client.changes import ObjectMaker

            self._subscription.deliver(ObjectMaker, where=read.where)

    @property
    def _outbox(self) -> Outbox:
        """Where items are taken from."""
        outbox = self.subscription.outbox
        assert outbox is not None  # since it is open
        return outbox

    @property
    def _is_over(self) -> bool:
        """Whether everything up to the end has been given."""
        return self.feed.done and self._outbox.idle

    def _must_not_be_closed(self) -> None:
        if self._closed:
            raise LocalProtocolError("the feed is closed; begin another one at its positions()")

    def positions(self) -> Positions:
        """Where this reader is: exactly what it has been given so far, also between two items of a loop.

        A mapping from vbucket to ``Position``; it stays readable when the feed is closed.
        """
        return self.subscription.positions()

    def metrics(self) -> FeedMetrics:
        """What has come so far; reading it costs nothing."""
        return FeedMetrics.of(self.subscription)

    def serve_metrics(self, port: int, host: str = "127.0.0.1", name: str = "feed") -> MetricsEndpoint:
        """Answer Prometheus at ``http://host:port/metrics`` from a thread, until the endpoint's ``close()``.

        Port 0 takes a free one; ``name`` is the label of this feed. Needs the extra ``metrics``.
        """
        return serve_metrics(self.subscription, port, host, name)

    def _lag(self, high_seqnos: dict[int, int]) -> dict[int, int]:
        at = self.positions()
        return {vb: max(0, high_seqnos[vb] - at[vb].seqno) for vb in at if vb in high_seqnos}
