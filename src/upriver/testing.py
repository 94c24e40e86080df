"""A real node for tests of programs that speak DCP: its own process, free ports, its own directory.

>>> with node(vbuckets=4) as n:  # doctest: +SKIP
...     connect(n.connection_string)
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

from upriver.node.process import RunningNode, ServeOptions

__all__ = ["RunningNode", "ServeOptions", "node"]


@contextmanager
def node(*, data: Path | None = None, **options: Unpack[ServeOptions]) -> Iterator[RunningNode]:
    """A node with the options of ``upriver serve``, such as ``vbuckets=4`` or ``lazy=True``; stopped at the end."""
    with tempfile.TemporaryDirectory(prefix="upriver-") as temporary:
        running = RunningNode(data or Path(temporary) / "data", options)
        try:
            yield running
        finally:
            if running.running:
                running.stop()
