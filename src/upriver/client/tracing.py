"""Spans around requests, for programs that already use OpenTelemetry; free for all others."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str, bucket: str) -> AbstractContextManager[Any]:
    """A span of the current tracer if the program has loaded OpenTelemetry; it is never loaded for this.

    What a feed does by itself (names with an underscore) gets none: it polls several times a second.
    """
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or name.startswith("_"):
        return _NOTHING
    attributes = {"db.system.name": "couchbase", "db.namespace": bucket, "db.operation.name": name}
    started: AbstractContextManager[Any] = trace.get_tracer("upriver").start_as_current_span(
        f"upriver.{name}", kind=trace.SpanKind.CLIENT, attributes=attributes
    )
    return started
