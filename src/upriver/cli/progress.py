"""A progress bar with rate and remaining time, on stderr so that output can be piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int, int], None]


@contextmanager
def progress_bar(what: str, total: int, *, quiet: bool = False, unit: str = "rows") -> Iterator[Advance]:
    """A bar; call what it gives with how much of ``total`` is done, and how many rows were added."""
    if quiet:
        yield lambda done, rows: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
        TextColumn("{task.fields[rows]:,} {task.fields[unit]}"), TextColumn("{task.fields[rate]:,.0f}/s"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=False) as progress:
        task = progress.add_task(what, total=max(total, 1), rows=0, rate=0.0, unit=unit)
        rows_so_far = 0

        def advance_to(done: int, rows: int) -> None:
            nonlocal rows_so_far
            rows_so_far += rows
            elapsed = progress.tasks[0].elapsed or 1e-9
            progress.update(task, completed=min(done, max(total, 1)), rows=rows_so_far, rate=rows_so_far / elapsed)

        yield advance_to
        progress.update(task, completed=max(total, 1))
