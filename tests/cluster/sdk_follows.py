"""What the official SDK does while its cluster changes; a process of its own, because a bad answer can crash its core.

Prints a line after each phase and goes on when it is told to.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import Durability, ServerDurability
from couchbase.options import ClusterOptions, ClusterTimeoutOptions, UpsertOptions

COUNT = 100
MAJORITY = UpsertOptions(durability=ServerDurability(Durability.MAJORITY), timeout=timedelta(seconds=20))


def main() -> None:
    timeouts = ClusterTimeoutOptions(kv_timeout=timedelta(seconds=20), connect_timeout=timedelta(seconds=20))
    options = ClusterOptions(PasswordAuthenticator("ann", "secret"), timeout_options=timeouts)
    cluster = Cluster(sys.argv[1], options)
    cluster.wait_until_ready(timedelta(seconds=20))
    assert len(cluster.cluster_info().nodes) == 3
    bucket = cluster.bucket("default")
    bucket.collections().create_scope("shop")
    bucket.collections().create_collection("shop", "orders")
    collection = bucket.scope("shop").collection("orders")
    for phase in range(3):
        for n in range(COUNT):
            collection.upsert(f"doc-{n}", {"phase": phase, "n": n}, MAJORITY)
        for n in range(COUNT):
            assert collection.get(f"doc-{n}").content_as[dict] == {"phase": phase, "n": n}
        print(f"phase {phase} done", flush=True)
        sys.stdin.readline()
    cluster.close()


main()
