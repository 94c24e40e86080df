"""A real bucket and a lake that follows it, without Spark: the same log, tables and offsets, batch by batch."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from upriver.client._requests.operations import Ask
from upriver.client.blocking import Database, connect
from upriver.client.positions import Positions
from upriver.lake import Comparison, compare
from upriver.lake.apply.policy import MergePolicy, TableOptions
from upriver.lake.apply.rollbacks import Epochs
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.lake.tables import Tables
from upriver.model import vbucket_of
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.testing import RunningNode
from upriver.wire.messages.cluster import SetManifest

DEFAULT = "_default._default"


class Synced:
    """A lake of the bucket of a node."""

    def __init__(self, node: RunningNode, root: Path, **policy: Any) -> None:
        self.node, self.root = node, str(root)
        self.db: Database = connect(node.connection_string, "default")
        self.vbuckets = self.db.topology.vbuckets
        self.positions: Positions | None = None
        self.number = 0
        Lake(self.root).create_or_check("default", self.vbuckets)
        options = TableOptions(vbuckets=self.vbuckets, policy=MergePolicy(**{"small_rows": 10**6, **policy}))
        self.tables = Tables(Lake(self.root), "app", options)

    def put(self, count: int, prefix: str = "k", value: str = '{"n": %d, "odd": {"a": [1, null]}}') -> None:
        self.db.set_many({f"{prefix}{n}".encode(): (value % n).encode() for n in range(count)})

    def keys_of(self, vbucket: int, prefix: str) -> list[str]:
        keys = [f"{prefix}{n}" for n in range(200)]
        return [key for key in keys if vbucket_of(key.encode(), self.vbuckets) == vbucket]

    def sync(self, *, apply: bool = True, note: bool = True, lag: int = 0) -> None:
        """Run a batch with everything new. Without ``apply`` the batch is lost; without ``note``, its offset is."""
        with self.db.change_batches(start=self.positions or "beginning", end="now") as feed:
            batches = list(feed)
            self.positions = feed.positions()
        if apply:
            rows = list(Epochs(Lake(self.root).epochs()).lift(batches))
            written = write_log(rows, self.root, self.number)
            self.tables.apply(self.number, WrittenFiles.from_tasks([written.to_json()]), lag)
        if note:
            self.note()
        self.number += 1

    def offset(self) -> dict[str, Any]:
        assert self.positions is not None
        found = [self.positions[vb] for vb in range(self.vbuckets)]
        return Offset(tuple(Position.consistent_at(at.vbuuid, at.seqno, epoch=at.epoch) for at in found)).to_json()

    def note(self) -> None:
        """The offset, in the form of Spark's checkpoint."""
        home = Path(self.root, "_upriver", "checkpoint")
        for kind, text in (("offsets", f"v1\n{{}}\n{json.dumps(self.offset())}"), ("commits", "v1\n{}")):
            (home / kind).mkdir(parents=True, exist_ok=True)
            (home / kind / str(self.number)).write_text(text)

    def note_as_now(self, offset: dict[str, Any] | None = None, **more: Any) -> None:
        """The offset, as a sync notes it in the lake."""
        noted = {"batch": self.number - 1, "filter": {}, "offset": {**self.offset(), **(offset or {})}, **more}
        Path(self.root, "_upriver", "offsets.json").write_text(json.dumps(noted))

    def delta(self, kind: str = "current", name: str = DEFAULT) -> DeltaTable:
        return DeltaTable(f"{self.root}/{kind}/{name}")

    def options(self, **more: Any) -> SyncOptions:
        return SyncOptions.parse({"connection": self.node.connection_string, "to": self.root, **more})

    def verify(self, *collections: str, view: str = "fresh", **more: Any) -> dict[str, Comparison]:
        return {found.name: found for found in compare(self.options(**more), collections, rounds=0, view=view)}

    def fault(self, name: str, **arguments: Any) -> None:
        url = f"http://127.0.0.1:{self.node.http_port}/upriver/faults/{name}"
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(url, json.dumps(arguments).encode(), headers, method="POST")
        urllib.request.urlopen(request, timeout=60).close()

    def set_manifest(self, uid: int, *collections: dict[str, str]) -> None:
        """The default collection and these."""
        default = {"name": "_default", "uid": "0"}
        scopes = [{"name": "_default", "uid": "0", "collections": [default, *collections]}]
        message = SetManifest(json.dumps({"uid": f"{uid:x}", "scopes": scopes}).encode())

        def conversation() -> Any:
            answers = yield Ask(self.db.topology.nodes[0], [message])
            assert answers[0].status == 0

        self.db.run(conversation())
