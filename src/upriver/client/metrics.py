"""Figures of a feed for Prometheus: rows, bytes, rollbacks, reconnects and the lag of each vbucket.

Needs prometheus-client (the extra ``metrics``). Figures are read when somebody asks for them; reading costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from upriver.errors import ConfigError

if TYPE_CHECKING:
    from upriver.client._feed.subscription import Subscription


def _prometheus() -> Any:
    try:
        return import_module("prometheus_client")
    except ImportError as error:
        raise ConfigError("metrics need prometheus-client: pip install 'upriver[metrics]'") from error


class FeedCollector:
    """A collector for ``prometheus_client.REGISTRY.register``; several feeds are told apart by ``name``."""

    def __init__(self, subscription: Subscription, name: str = "feed") -> None:
        self._subscription, self._name = subscription, name
        self._core = import_module("prometheus_client.core") if _prometheus() else None
        subscription.track_lag = True

    def collect(self) -> Iterator[Any]:
        subscription, feed = self._subscription, self._subscription.feed
        yield self._counter("rows", "Changes that came, wanted or not.", subscription.rows)
        yield self._counter("bytes", "Bytes of changes that came.", subscription.bytes)
        yield self._counter("rollbacks", "Rollbacks of vbuckets.", feed.rollbacks)
        yield self._counter(
            "reconnects", "Connections that were lost or could not be made.", subscription.reconnects.count
        )
        yield self._gauge("connections", "Connections that are ready.", sum(x.ready for x in feed.links.values()))
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


def serve_metrics(subscription: Subscription, port: int, host: str = "127.0.0.1", name: str = "feed") -> Any:
    """Answer Prometheus at ``http://host:port/metrics`` from a thread; the result's ``close()`` ends it."""
    prometheus = _prometheus()
    registry = prometheus.CollectorRegistry()
    registry.register(FeedCollector(subscription, name))
    server, thread = prometheus.start_http_server(port, host, registry)
    return _Endpoint(server, thread)


class _Endpoint:
    def __init__(self, server: Any, thread: Any) -> None:
        self._server, self._thread = server, thread
        self.port: int = server.server_address[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
