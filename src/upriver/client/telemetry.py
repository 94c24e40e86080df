"""Metrics of a feed, as a value and for Prometheus, and OpenTelemetry spans around requests.

Metrics are read when asked for; nothing is counted for them. Prometheus needs prometheus-client (the extra
``metrics``). Spans are made only in programs that have loaded OpenTelemetry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.client._feed.subscription import Subscription


@dataclass(frozen=True, slots=True)
class FeedMetrics:
    """What a feed has done since it was opened."""

    rows: int  # changes received, wanted or not
    bytes: int  # of these changes
    rollbacks: int  # of vbuckets
    reconnects: int  # connections that were lost or could not be made
    connections: int  # that are ready now

    @classmethod
    def of(cls, subscription: Subscription) -> FeedMetrics:
        """The metrics of a feed now."""
        feed, reconnects = subscription.feed, subscription.reconnects.count
        ready = sum(link.ready for link in feed.links.values())
        return cls(subscription.rows, subscription.bytes, feed.rollbacks, reconnects, ready)


class FeedCollector:
    """A collector for ``prometheus_client.REGISTRY.register``; ``name`` tells several feeds apart."""

    def __init__(self, subscription: Subscription, name: str = "feed") -> None:
        self._subscription, self._name = subscription, name
        self._core = import_module("prometheus_client.core") if _prometheus() else None
        subscription.track_lag = True

    def collect(self) -> Iterator[Any]:
        now = FeedMetrics.of(self._subscription)
        yield self._counter("rows", "Changes that came, wanted or not.", now.rows)
        yield self._counter("bytes", "Bytes of changes that came.", now.bytes)
        yield self._counter("rollbacks", "Rollbacks of vbuckets.", now.rollbacks)
        yield self._counter("reconnects", "Connections that were lost or could not be made.", now.reconnects)
        yield self._gauge("connections", "Connections that are ready.", now.connections)
        yield self._lag()

    def _counter(self, name: str, what: str, value: float) -> Any:
        family = self._core.CounterMetricFamily(f"upriver_feed_{name}", what, labels=["feed"])  # type: ignore[union-attr]
        family.add_metric([self._name], value)
        return family

    def _gauge(self, name: str, what: str, value: float) -> Any:
        family = self._core.GaugeMetricFamily(f"upriver_feed_{name}", what, labels=["feed"])  # type: ignore[union-attr]
        family.add_metric([self._name], value)
        return family

    def _lag(self) -> Any:
        labels = ["feed", "vbucket"]
        what = "Seqnos between what came and the vbucket's newest."
        family = self._core.GaugeMetricFamily("upriver_feed_lag_seqnos", what, labels=labels)  # type: ignore[union-attr]
        for vb, lag in self._subscription.lag().items():
            family.add_metric([self._name, str(vb)], lag)
        return family


class MetricsEndpoint:
    """Answers Prometheus at ``port`` until ``close()``."""

    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_address[1]

    def close(self) -> None:
        """Stop answering; returns when the port is free."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(subscription: Subscription, port: int, host: str, name: str) -> MetricsEndpoint:
    """Answer Prometheus from a thread."""
    prometheus = _prometheus()
    registry = prometheus.CollectorRegistry()
    registry.register(FeedCollector(subscription, name))
    server, thread = prometheus.start_http_server(port, host, registry)
    return MetricsEndpoint(server, thread)


def _prometheus() -> Any:
    try:
        return import_module("prometheus_client")
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client: pip install 'upriver[metrics]'") from error


_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str, bucket: str) -> AbstractContextManager[Any]:
    """A span of the current tracer, if the program has loaded OpenTelemetry; this never loads it.

    Requests that a feed makes on its own (names with an underscore) get no span: it polls several times a second.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or name.startswith("_"):
        return _NOTHING
    attributes = {"db.system.name": "couchbase", "db.namespace": bucket, "db.operation.name": name}
    started: AbstractContextManager[Any] = trace.get_tracer("upriver").start_as_current_span(
        f"upriver.{name}", kind=trace.SpanKind.CLIENT, attributes=attributes
    )
    return started
