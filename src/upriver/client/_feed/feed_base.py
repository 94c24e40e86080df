"""The common part of the blocking and the asyncio feed: everything that needs no I/O."""

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
    """A feed of changes or batches: its options, and, once it is open, its subscription."""

    def __init__(self, options: FeedOptions, *, batches: bool) -> None:
        if batches and options.where:
            raise ConfigError("where works on single changes: use changes(), or filter the batches yourself")
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
        """For upriver's own modules: the cluster feed."""
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
        """The outbox of an open feed."""
        outbox = self.subscription.outbox
        assert outbox is not None  # set when the feed was opened
        return outbox

    @property
    def _is_over(self) -> bool:
        """Whether the caller has everything up to the end."""
        return self.feed.done and self._outbox.idle

    def _must_not_be_closed(self) -> None:
        if self._closed:
            raise LocalProtocolError("the feed is closed; open another one at its positions()")

    def positions(self) -> Positions:
        """Where the reader is: covers exactly what it has been given so far, also between two items of a loop.

        A mapping from vbucket to ``Position``; still available when the feed is closed.
        """
        return self.subscription.positions()

    def metrics(self) -> FeedMetrics:
        """Rows, bytes, rollbacks and reconnects so far; reading them costs nothing."""
        return FeedMetrics.of(self.subscription)

    def serve_metrics(self, port: int, host: str = "127.0.0.1", name: str = "feed") -> MetricsEndpoint:
        """Serve Prometheus metrics at ``http://host:port/metrics`` from a thread, until the endpoint's ``close()``.

        Port 0 means any free port; ``name`` is the label of this feed. Needs the extra ``metrics``.
        """
        return serve_metrics(self.subscription, port, host, name)

    def _lag(self, high_seqnos: dict[int, int]) -> dict[int, int]:
        at = self.positions()
        return {vb: max(0, high_seqnos[vb] - at[vb].seqno) for vb in at if vb in high_seqnos}
