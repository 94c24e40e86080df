"""What a client exposes: OpenTelemetry spans, Prometheus metrics and logs; and what it must not expose."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import upriver
from tests.client.client_world import read_until
from upriver.client.blocking import Database, connect
from upriver.errors import AuthenticationFailed, KeyNotFound
from upriver.testing import RunningNode, node

Fault = Callable[..., Any]


@pytest.fixture(scope="module")
def exporter() -> InMemorySpanExporter:
    """Spans of the whole process; a provider can be set only once."""
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    return spans


@pytest.fixture
def spans(exporter: InMemorySpanExporter) -> Iterator[Callable[[], list[ReadableSpan]]]:
    exporter.clear()
    yield lambda: list(exporter.get_finished_spans())
    exporter.clear()


def test_requests_are_spans_inside_those_of_the_program(db: Database, spans: Callable[[], list[ReadableSpan]]) -> None:
    with trace.get_tracer("program").start_as_current_span("checkout") as outer:
        db.set("traced", b"secret document")
    ours, _ = spans()
    assert (ours.name, ours.kind) == ("upriver.set", SpanKind.CLIENT)
    assert ours.parent is not None
    assert ours.parent.span_id == outer.get_span_context().span_id
    assert ours.attributes == {"db.system.name": "couchbase", "db.namespace": "default", "db.operation.name": "set"}


def test_a_request_that_fails_is_a_span_that_says_so(db: Database, spans: Callable[[], list[ReadableSpan]]) -> None:
    with pytest.raises(KeyNotFound):
        db.get("never written")
    [failed] = spans()
    assert failed.status.status_code is StatusCode.ERROR
    assert [event.name for event in failed.events] == ["exception"]


def test_the_async_client_has_the_same_spans(server: RunningNode, spans: Callable[[], list[ReadableSpan]]) -> None:
    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as db:
            await asyncio.gather(db.set("traced:1", b"1"), db.set("traced:2", b"2"))
            assert [change async for change in db.changes(end="now")]

    asyncio.run(scenario())
    assert {"upriver.bootstrap", "upriver.set", "upriver.plan", "upriver.manifest"} <= {span.name for span in spans()}


def test_what_a_feed_does_by_itself_is_not_traced(db: Database, spans: Callable[[], list[ReadableSpan]]) -> None:
    db.set("traced", b"1")
    with db.changes(wait_for_disk=True) as feed:
        assert list(feed.items(idle_s=0.5))
    assert not [span.name for span in spans() if "_" in span.name.removeprefix("upriver.")[:1]]


def test_opentelemetry_is_not_loaded_for_programs_that_do_not_use_it() -> None:
    program = "import sys, upriver.client.blocking as b, upriver.client.telemetry as t; t.span('get', 'b')"
    check = f"{program}; sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0


def test_prometheus_sees_rows_rollbacks_and_lag(db: Database, fault: Fault) -> None:
    db.set_many({b"metrics:%d" % n: b"x" for n in range(50)})
    with db.changes() as feed:
        endpoint = feed.serve_metrics(0)
        try:
            last = db.high_seqnos()[0]
            read_until(feed, lambda changes: (0, last) in {(c.vbucket, c.seqno) for c in changes})
            fault("failover", vbucket=0, lose=1)
            read_until(feed, lambda changes: any(isinstance(change, upriver.RolledBack) for change in changes))
            text = urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=60).read().decode()
        finally:
            endpoint.close()
    assert 'upriver_feed_rollbacks_total{feed="feed"} 1.0' in text
    assert 'upriver_feed_lag_seqnos{feed="feed",vbucket="0"}' in text
    assert "upriver_feed_rows_total" in text


def test_a_wrong_password_is_said_at_once_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    with node(vbuckets=4, username="ada", password="lovelace") as running:
        with connect(running.connection_string, username="ada", password="lovelace") as db:
            db.set("k", b"v")
        caplog.set_level(logging.DEBUG)
        address = running.connection_string.removeprefix("couchbase://")
        with pytest.raises(AuthenticationFailed, match=f"wrong user name or password at {address}") as refused:
            connect(running.connection_string, username="ada", password="hunter2")
    assert "hunter2" not in caplog.text
    assert "hunter2" not in str(refused.value)


def test_logs_name_hosts_and_reasons_but_no_documents(
    db: Database, fault: Fault, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with db.changes(start="now") as feed:
        list(feed.items(idle_s=0.2))
        fault("drop-connection")
        db.set("logged key", b"logged value")
        assert [change.key for change in read_until(feed, bool)] == [b"logged key"]
    assert "lost the connection to 127.0.0.1" in caplog.text
    assert "logged" not in caplog.text
