"""Collections of a cluster: members propose changes of the manifest, and the manager decides on them one by one."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from upriver.errors import UpriverError
from upriver.node.cluster.manifest_changes import EditRefused, edited
from upriver.store import Manifest

LOOK_EVERY_S = 0.2


def decided(
    manifest: Mapping[str, Any] | None, edits: Mapping[str, Any]
) -> tuple[Mapping[str, Any] | None, dict[str, dict[str, Any]]]:
    """The manifest after the edits, and the outcome of each edit: the uid of its manifest, or why it was refused."""
    outcomes: dict[str, dict[str, Any]] = {}
    current = json.dumps(manifest).encode() if manifest else Manifest().to_json()
    for name, edit in edits.items():
        try:
            current = edited(current, edit)
            outcomes[name] = {"uid": json.loads(current)["uid"]}
        except EditRefused as error:
            outcomes[name] = {"status": int(error.status), "reason": error.reason, "field": error.field_name}
    after = json.loads(current)
    return (after if int(after["uid"], 16) else None), outcomes


@contextmanager
def answering(answer: Callable[[], None]) -> Iterator[None]:
    """Call ``answer`` several times a second in a thread: a new collection should not wait for the next ``watch``."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(LOOK_EVERY_S):
            try:
                answer()
            except (UpriverError, OSError):
                continue  # no cluster yet, or none any more; the proposal times out at its member

    thread = threading.Thread(target=run, name="answering-proposals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
