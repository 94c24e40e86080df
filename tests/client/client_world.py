"""Helpers of the client's tests for the node that they share."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from upriver.client._feed.blocking_feed import ChangeFeed
from upriver.client._requests.operations import Ask, Operation
from upriver.client.blocking import Database
from upriver.client.changes import Deletion, Mutation
from upriver.wire.messages.cluster import SetManifest

VBUCKETS = 8


def keys_of(changes: Any) -> set[bytes]:
    return {change.key for change in changes if isinstance(change, Mutation | Deletion)}


def read_until(feed: ChangeFeed, enough: Callable[[list[Any]], bool], within_s: float = 60.0) -> list[Any]:
    """Read changes until there are enough, then a while longer, in case there are too many."""
    deadline = time.monotonic() + within_s
    found = list(feed.items(idle_s=0.3))
    while not enough(found) and time.monotonic() < deadline:
        found += feed.items(idle_s=0.3)
    return found


def read_keys(feed: ChangeFeed, wanted: set[bytes]) -> set[bytes]:
    """Read until all of these keys have come, then a while longer."""
    return keys_of(read_until(feed, lambda found: wanted <= keys_of(found)))


def provoke(http_port: int, name: str, **arguments: Any) -> Any:
    """Make the node misbehave."""
    url = f"http://127.0.0.1:{http_port}/upriver/faults/{name}"
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(arguments).encode(), headers, method="POST")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.loads(answer.read())


def set_manifest(db: Database, uid: int, **collections: int) -> None:
    """Make these the collections of scope ``shop``."""
    entries = [{"name": name, "uid": f"{number:x}"} for name, number in collections.items()]
    default = {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}
    manifest = {"uid": f"{uid:x}", "scopes": [default, {"name": "shop", "uid": "8", "collections": entries}]}

    def operation() -> Operation[None]:
        answers = yield Ask(db.topology.nodes[0], [SetManifest(json.dumps(manifest).encode())])
        assert answers[0].status == 0, answers

    db.run(operation())
