"""Members of a consumer group as separate processes, for ``test_groups.py``."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from upriver.client.blocking import connect
from upriver.client.groups import Group, SharedDocument, SharedFile, SharedRow, read_as_member
from upriver.errors import CheckpointError


def shared_value(kind: str, at: Path, connection: str) -> Any:
    """The group's shared value, opened by this process."""
    if kind == "file":
        return SharedFile(at / "group.json")
    return SharedRow(at / "group.db") if kind == "sqlite" else SharedDocument(connect(connection), at.name)


def claim_and_let_go(kind: str, at: Path, connection: str, name: str, beats: int) -> None:
    """Read our share; create a file per vbucket, and exit with 1 if one exists already."""
    group = Group(shared_value(kind, at, connection), member=name, ttl_s=60)
    reading: set[int] = set()
    for n in range(beats):
        share = set(group.beat(16).vbuckets)
        time.sleep(0.002 * (n % 3))  # letting go takes a while
        for vb in reading - share:
            (at / f"{vb}.reader").unlink()
        for vb in share - reading:
            os.close(os.open(at / f"{vb}.reader", os.O_CREAT | os.O_EXCL))
        reading = share
    for vb in reading:
        (at / f"{vb}.reader").unlink()
    group.leave()


def stop_in_the_middle(kind: str, at: Path, connection: str) -> None:
    """Take a batch, be suspended while processing it, and save after waking up; exit with 7 if that is refused."""
    group = Group(shared_value(kind, at, connection), member="sleeper", ttl_s=0.5)
    with connect(connection) as db:
        for feed, _ in read_as_member(db, group, rows=10):
            (at / "taken").touch()
            os.kill(os.getpid(), signal.SIGSTOP)
            try:
                feed.confirm()
            except CheckpointError:
                os._exit(7)
            os._exit(0)
