"""Spans around requests, for programs that already use OpenTelemetry; free for all others."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(name: str) -> AbstractContextManager[Any]:
    """A span of the current tracer if the program has loaded OpenTelemetry; it is never loaded for this."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return _NOTHING
    started: AbstractContextManager[Any] = trace.get_tracer("upriver").start_as_current_span(f"upriver.{name}")
    return started
