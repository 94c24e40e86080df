"""A call in the loop's thread, asked for in any thread."""

from __future__ import annotations

import threading
from asyncio import AbstractEventLoop
from collections.abc import Callable


class Soon:
    """Calls ``act`` in the loop, once for all that ask before it happens. Made in the loop's thread."""

    __slots__ = ("_act", "_is_scheduled", "_loop", "_thread")

    def __init__(self, loop: AbstractEventLoop, act: Callable[[], None]) -> None:
        self._loop, self._thread = loop, threading.get_ident()
        self._act: Callable[[], None] | None = act
        self._is_scheduled = False

    def __call__(self) -> None:
        if self._is_scheduled or self._act is None:
            return
        self._is_scheduled = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self._run)
        else:
            self._loop.call_soon_threadsafe(self._run)

    def cancel(self) -> None:
        """Never again; what ``act`` leads to is let go."""
        self._act = None

    def _run(self) -> None:
        self._is_scheduled = False  # first: who asks from now on may have something that ``act`` no longer sees
        if self._act is not None:
            self._act()
