"""How many changes the bucket has that the tables lack: a thread asks the bucket every second, beside the query.

The source only knows what it has not planned yet, which is nothing during a long batch. The thread is also the first to
notice that the bucket does not answer.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from typing import Any

from upriver.errors import UpriverError
from upriver.lake import bucket
from upriver.lake.options import SyncOptions
from upriver.protocol.offsets import Offset

EVERY_S = 1.0


class LagWatch:
    """A context in which the lag is known; a bucket that does not answer is asked again."""

    def __init__(self, options: SyncOptions) -> None:
        self._options = options
        self._highs: dict[int, int] = {}
        self._reached: dict[int, int] = {}
        self._answered_at = time.monotonic()
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._ask, name="upriver lag", daemon=True)

    def __enter__(self) -> LagWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        self._thread.join(timeout=2 * EVERY_S)

    def committed(self, progress: Mapping[str, Any]) -> None:
        """Note the end of the last batch, from Spark's progress."""
        sources = progress.get("sources") or [{}]
        end = sources[0].get("endOffset")
        if isinstance(end, str):
            end = json.loads(end)
        if end:
            self._reached = {vb: at.seqno for vb, at in enumerate(Offset.from_json(end).positions)}

    @property
    def lag(self) -> int | None:
        """Changes behind; None before both sides are known."""
        highs, reached = self._highs, self._reached
        if not highs or not reached:
            return None
        return sum(max(0, high - reached.get(vbucket, 0)) for vbucket, high in highs.items())

    @property
    def away(self) -> tuple[float, str]:
        """For how many seconds the bucket has not answered (at most about one while it does), and the last error."""
        return time.monotonic() - self._answered_at, self._trouble or "no answer yet"

    def _ask(self) -> None:
        while not self._ended.is_set():
            try:
                with bucket.database(self._options) as database:
                    while not self._ended.is_set():
                        self._highs = database.high_seqnos()
                        self._answered_at, self._trouble = time.monotonic(), ""
                        self._ended.wait(EVERY_S)
            except (UpriverError, OSError) as error:
                self._trouble = str(error)
            self._ended.wait(EVERY_S)
