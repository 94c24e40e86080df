"""What the official SDK does with a node; a separate process, because a bad answer can crash the SDK's C++ core.

``python sdk_scenarios.py PORT USER PASSWORD TLS_PORT CA_FILE`` prints a JSON line per scenario: name, and what failed.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from datetime import timedelta
from typing import Any

import couchbase.subdocument as SD
from couchbase import exceptions as ex
from couchbase.auth import PasswordAuthenticator
from couchbase.cluster import Cluster
from couchbase.durability import Durability, ServerDurability
from couchbase.management.buckets import CreateBucketSettings
from couchbase.options import (
    ClusterOptions,
    ClusterTimeoutOptions,
    DecrementOptions,
    DeltaValue,
    GetOptions,
    IncrementOptions,
    InsertOptions,
    LookupInOptions,
    MutateInOptions,
    RemoveOptions,
    ReplaceOptions,
    SignedInt64,
    UpsertOptions,
)
from couchbase.transcoder import RawBinaryTranscoder

from tests.node import sdk_transactions

RAW = RawBinaryTranscoder()
GAVE_UP = (ex.AmbiguousTimeoutException, ex.UnAmbiguousTimeoutException)
PATIENCE = ClusterTimeoutOptions(
    bootstrap_timeout=timedelta(seconds=60), kv_timeout=timedelta(seconds=30), kv_durable_timeout=timedelta(seconds=60)
)


def raises(kind: type[BaseException] | tuple[type[BaseException], ...], action: Any) -> BaseException:
    try:
        action()
    except kind as error:
        return error
    raise AssertionError(f"{kind} was not raised")


def upsert_and_get(c: Any) -> None:
    first = c.upsert("doc", {"name": "ann", "list": [1, 2]})
    got = c.get("doc")
    assert got.content_as[dict] == {"name": "ann", "list": [1, 2]}
    assert got.cas == first.cas != 0


def mutation_tokens_count_up(c: Any) -> None:
    first = c.upsert("token", 1).mutation_token()
    second = c.upsert("token", 2).mutation_token()
    assert first.partition_id == second.partition_id
    assert first.partition_uuid == second.partition_uuid != 0
    assert second.sequence_number > first.sequence_number > 0
    assert first.bucket_name == "default"


def insert_only_once(c: Any) -> None:
    c.insert("once", {"a": 1})
    raises(ex.DocumentExistsException, lambda: c.insert("once", {"a": 2}))
    assert c.get("once").content_as[dict] == {"a": 1}


def replace_and_remove(c: Any) -> None:
    raises(ex.DocumentNotFoundException, lambda: c.replace("gone", 1))
    c.upsert("gone", 1)
    c.replace("gone", 2)
    c.remove("gone")
    raises(ex.DocumentNotFoundException, lambda: c.get("gone"))
    raises(ex.DocumentNotFoundException, lambda: c.remove("gone"))


def cas_conflicts(c: Any) -> None:
    old = c.upsert("cas", 1).cas
    new = c.upsert("cas", 2).cas
    raises(ex.CasMismatchException, lambda: c.replace("cas", 3, ReplaceOptions(cas=old)))
    raises(ex.CasMismatchException, lambda: c.remove("cas", RemoveOptions(cas=old)))
    raises(ex.CasMismatchException, lambda: c.mutate_in("cas", [SD.upsert("x", 1)], MutateInOptions(cas=old)))
    c.replace("cas", 3, ReplaceOptions(cas=new))


def exists(c: Any) -> None:
    assert not c.exists("perhaps").exists
    c.upsert("perhaps", 1)
    assert c.exists("perhaps").exists
    c.remove("perhaps")
    assert not c.exists("perhaps").exists


def counters(c: Any) -> None:
    binary = c.binary()
    options = IncrementOptions(initial=SignedInt64(10), delta=DeltaValue(5))
    assert binary.increment("counter", options).content == 10
    assert binary.increment("counter", options).content == 15
    assert binary.decrement("counter", DecrementOptions(delta=DeltaValue(20))).content == 0
    raises(ex.DocumentNotFoundException, lambda: binary.increment("no", IncrementOptions(initial=SignedInt64(-1))))
    c.upsert("text", "not a number")
    raises(ex.DeltaInvalidException, lambda: binary.increment("text"))


def append_and_prepend(c: Any) -> None:
    binary = c.binary()
    c.upsert("raw", b"b", UpsertOptions(transcoder=RAW))
    binary.append("raw", b"c")
    binary.prepend("raw", b"a")
    assert c.get("raw", GetOptions(transcoder=RAW)).content_as[bytes] == b"abc"
    raises(ex.CouchbaseException, lambda: binary.append("nothing", b"c"))


def large_and_compressed_values(c: Any) -> None:
    value = {"text": "all work and no play " * 20_000}
    c.upsert("large", value)
    assert c.get("large").content_as[dict] == value


def many_keys_at_once(c: Any) -> None:
    documents = {f"many{number}": {"n": number} for number in range(200)}
    assert c.upsert_multi(documents).all_ok
    found = c.get_multi([*documents, "many-missing"])
    assert {key: result.content_as[dict] for key, result in found.results.items()} == documents
    assert list(found.exceptions) == ["many-missing"]


def expiry(c: Any) -> None:
    c.upsert("short", 1, UpsertOptions(expiry=timedelta(seconds=1)))
    c.upsert("long", 1, UpsertOptions(expiry=timedelta(hours=1)))
    assert c.get("long").content_as[int] == 1
    end = c.get("long", GetOptions(with_expiry=True)).expiryTime
    assert 3500 < end.timestamp() - time.time() < 3700
    time.sleep(2.1)
    raises(ex.DocumentNotFoundException, lambda: c.get("short"))


def touch_and_preserve(c: Any) -> None:
    def left(key: str) -> float:
        end = c.get(key, GetOptions(with_expiry=True)).expiryTime
        return 0 if end is None else end.timestamp() - time.time()

    c.upsert("t", {"a": 1})
    c.touch("t", timedelta(hours=2))
    assert 7000 < left("t") < 7300
    assert c.get_and_touch("t", timedelta(hours=1)).content_as[dict] == {"a": 1}
    assert 3500 < left("t") < 3700
    c.upsert("t", {"a": 2}, UpsertOptions(preserve_expiry=True))
    c.mutate_in("t", [SD.upsert("a", 3)], MutateInOptions(preserve_expiry=True))
    assert 3500 < left("t") < 3700
    c.mutate_in("t", [SD.upsert("a", 4)])
    assert left("t") <= 0
    raises(ex.DocumentNotFoundException, lambda: c.touch("t-missing", timedelta(hours=1)))


def locks(c: Any) -> None:
    c.upsert("locked", 1)
    held = c.get_and_lock("locked", timedelta(seconds=15))
    soon = UpsertOptions(timeout=timedelta(milliseconds=300))
    raises((ex.DocumentLockedException, *GAVE_UP), lambda: c.upsert("locked", 2, soon))
    c.unlock("locked", held.cas)
    c.upsert("locked", 2)
    held = c.get_and_lock("locked", timedelta(seconds=15))
    c.replace("locked", 3, ReplaceOptions(cas=held.cas))
    c.upsert("locked", 4)


def lookup_in(c: Any) -> None:
    c.upsert("deep", {"a": {"b": [1, {"c": "x"}]}, "n": None, "d.e": 1})
    found = c.lookup_in("deep", [
        SD.get("a.b[1].c"), SD.exists("n"), SD.exists("z"), SD.count("a.b"), SD.get("a.b[-1]"), SD.get("`d.e`"),
        SD.get_full(),
    ])  # fmt: skip
    assert found.content_as[str](0) == "x"
    assert found.exists(1)
    assert not found.exists(2)
    assert found.content_as[int](3) == 2
    assert found.content_as[dict](4) == {"c": "x"}
    assert found.content_as[int](5) == 1
    assert found.content_as[dict](6)["n"] is None
    raises(ex.PathNotFoundException, lambda: c.lookup_in("deep", [SD.get("zz")]).content_as[str](0))
    raises(ex.PathMismatchException, lambda: c.lookup_in("deep", [SD.get("a.b.c")]).content_as[str](0))
    raises(ex.DocumentNotFoundException, lambda: c.lookup_in("deep-missing", [SD.get("a")]))


def mutate_in(c: Any) -> None:
    c.upsert("m", {"list": [2], "n": 1, "old": 0, "set": [1]})
    done = c.mutate_in("m", [
        SD.upsert("o.p", 1, create_parents=True), SD.insert("new", "x"), SD.replace("n", 2), SD.remove("old"),
        SD.array_append("list", 3, 4), SD.array_prepend("list", 0, 1), SD.array_insert("list[2]", 1.5),
        SD.array_addunique("set", 2), SD.increment("count", 5), SD.decrement("count", 2),
    ])  # fmt: skip
    assert done.content_as[int](8) == 5
    assert done.content_as[int](9) == 3
    assert c.get("m").content_as[dict] == {
        "list": [0, 1, 1.5, 2, 3, 4], "n": 2, "set": [1, 2], "o": {"p": 1}, "new": "x", "count": 3,
    }  # fmt: skip
    raises(ex.PathExistsException, lambda: c.mutate_in("m", [SD.insert("new", 1)]))
    raises(ex.PathExistsException, lambda: c.mutate_in("m", [SD.array_addunique("set", 2)]))
    raises(ex.PathNotFoundException, lambda: c.mutate_in("m", [SD.replace("n", 9), SD.replace("zz", 1)]))
    assert c.get("m").content_as[dict]["n"] == 2


def mutate_in_creates_documents(c: Any) -> None:
    raises(ex.DocumentNotFoundException, lambda: c.mutate_in("born", [SD.upsert("a", 1)]))
    upsert = MutateInOptions(store_semantics=SD.StoreSemantics.UPSERT)
    c.mutate_in("born", [SD.upsert("a.b", 1, create_parents=True)], upsert)
    assert c.get("born").content_as[dict] == {"a": {"b": 1}}
    insert = MutateInOptions(store_semantics=SD.StoreSemantics.INSERT)
    raises(ex.DocumentExistsException, lambda: c.mutate_in("born", [SD.upsert("a", 1)], insert))


def extended_attributes(c: Any) -> None:
    c.upsert("x", {"body": 1})
    done = c.mutate_in("x", [
        SD.upsert("meta.by", "ann", xattr=True, create_parents=True),
        SD.upsert("meta.cas", SD.MutationMacro.cas(), xattr=True),
        SD.upsert("meta.seqno", SD.MutationMacro.seq_no(), xattr=True),
        SD.upsert("meta.crc", SD.MutationMacro.value_crc32c(), xattr=True),
        SD.upsert("body", 2),
    ])  # fmt: skip
    found = c.lookup_in("x", [
        SD.get("meta", xattr=True), SD.get("$document", xattr=True), SD.get("$XTOC", xattr=True), SD.get("body"),
    ])  # fmt: skip
    meta, document = found.content_as[dict](0), found.content_as[dict](1)
    assert meta["by"] == "ann"
    assert bytes.fromhex(meta["cas"][2:]) == done.cas.to_bytes(8, "little")
    assert int(meta["seqno"], 16) == done.mutation_token().sequence_number
    assert int(document["CAS"], 16) == done.cas
    assert document["seqno"] == meta["seqno"]
    assert document["value_crc32c"] == meta["crc"]
    assert document["deleted"] is False
    assert document["datatype"] == ["json", "xattr"], document
    assert found.content_as[list](2) == ["meta"]
    assert found.content_as[int](3) == 2
    assert c.get("x").content_as[dict] == {"body": 2}


def deleted_documents_keep_system_attributes(c: Any) -> None:
    c.upsert("tomb", {"a": 1})
    c.mutate_in("tomb", [SD.upsert("_sys", 1, xattr=True), SD.upsert("user", 2, xattr=True)])
    c.remove("tomb")
    raises(ex.DocumentNotFoundException, lambda: c.lookup_in("tomb", [SD.get("_sys", xattr=True)]))
    found = c.lookup_in("tomb", [SD.get("_sys", xattr=True)], LookupInOptions(access_deleted=True))
    assert found.content_as[int](0) == 1


def durable_writes(c: Any) -> None:
    c.upsert("none", 1, UpsertOptions(durability=ServerDurability(Durability.NONE)))
    for level in (Durability.MAJORITY, Durability.MAJORITY_AND_PERSIST_TO_ACTIVE, Durability.PERSIST_TO_MAJORITY):
        c.upsert("durable", level.value, UpsertOptions(durability=ServerDurability(level)))
        c.insert(f"durable{level.value}", 1, InsertOptions(durability=ServerDurability(level)))
        c.mutate_in("none-json", [SD.upsert("a", 1)], MutateInOptions(
            durability=ServerDurability(level), store_semantics=SD.StoreSemantics.UPSERT))  # fmt: skip
    assert c.get("durable").content_as[int] == Durability.PERSIST_TO_MAJORITY.value


def replica_reads_without_replicas(c: Any) -> None:
    c.upsert("replica", 1)
    assert c.get_any_replica("replica").content_as[int] == 1
    assert [each.is_replica for each in c.get_all_replicas("replica")] == [False]
    raises(ex.DocumentUnretrievableException, lambda: c.get_any_replica("replica-missing"))


SCENARIOS = [
    upsert_and_get, mutation_tokens_count_up, insert_only_once, replace_and_remove, cas_conflicts, exists, counters,
    append_and_prepend, large_and_compressed_values, many_keys_at_once, expiry, touch_and_preserve, locks, lookup_in,
    mutate_in, mutate_in_creates_documents, extended_attributes, deleted_documents_keep_system_attributes,
    durable_writes, replica_reads_without_replicas,
]  # fmt: skip


def outcome(action: Any) -> str:
    try:
        action()
    except Exception:
        return traceback.format_exc(limit=-4)
    return "ok"


def report(name: str, action: Any) -> None:
    print(json.dumps({"name": name, "outcome": outcome(action)}), flush=True)


def wrong_password(port: str, username: str) -> None:
    def connect() -> None:
        timeouts = ClusterTimeoutOptions(bootstrap_timeout=timedelta(seconds=30))
        authenticator = PasswordAuthenticator(username, "wrong")
        Cluster(f"couchbase://127.0.0.1:{port}", ClusterOptions(authenticator, timeout_options=timeouts))

    raises(ex.AuthenticationException, connect)


def main(port: str, username: str, password: str, tls_port: str, ca: str) -> None:
    options = ClusterOptions(PasswordAuthenticator(username, password), timeout_options=PATIENCE)
    cluster = Cluster(f"couchbase://127.0.0.1:{port}", options)
    cluster.wait_until_ready(timedelta(seconds=60))
    bucket = cluster.bucket("default")
    report("managers", lambda: managers(cluster))
    for scenario in SCENARIOS:
        report(scenario.__name__, lambda scenario=scenario: scenario(bucket.default_collection()))
    named = bucket.scope("shop").collection("orders")
    for scenario in SCENARIOS:
        report(f"{scenario.__name__} in a named collection", lambda scenario=scenario: scenario(named))
    for scenario in sdk_transactions.SCENARIOS:
        report(scenario.__name__, lambda scenario=scenario: scenario(cluster, named))
    report("unknown bucket", lambda: unknown_bucket(cluster))
    report("unknown collection", lambda: unknown_collection(bucket))
    report("wrong password", lambda: wrong_password(port, username))
    report("over TLS", lambda: over_tls(tls_port, PasswordAuthenticator(username, password, cert_path=ca)))
    cluster.close()


def managers(cluster: Any) -> None:
    """Create and drop buckets and collections through the management port."""
    buckets, collections = cluster.buckets(), cluster.bucket("default").collections()
    buckets.create_bucket(CreateBucketSettings(name="other", ram_quota_mb=100))
    raises(ex.BucketAlreadyExistsException, lambda: buckets.create_bucket(CreateBucketSettings(name="other")))
    assert {each.name for each in buckets.get_all_buckets()} == {"default", "other"}
    settings = buckets.get_bucket("other")
    settings["max_expiry"] = timedelta(hours=1)
    buckets.update_bucket(settings)
    changed = buckets.get_bucket("other")
    assert (changed["max_expiry"], changed["ram_quota_mb"]) == (timedelta(hours=1), 100)
    assert [each["status"] for each in cluster.cluster_info().nodes] == ["healthy"]
    other = cluster.bucket("other").default_collection()
    other.upsert("k", 1)
    buckets.flush_bucket("other")
    assert not other.exists("k").exists
    collections.create_scope("shop")
    collections.create_collection("shop", "orders")
    raises(ex.ScopeAlreadyExistsException, lambda: collections.create_scope("shop"))
    raises(ex.CollectionAlreadyExistsException, lambda: collections.create_collection("shop", "orders"))
    raises(ex.ScopeNotFoundException, lambda: collections.create_collection("nowhere", "orders"))
    collections.create_collection("shop", "temporary")
    collections.drop_collection("shop", "temporary")
    raises(ex.CollectionNotFoundException, lambda: collections.drop_collection("shop", "temporary"))
    [shop] = [scope for scope in collections.get_all_scopes() if scope.name == "shop"]
    assert [each.name for each in shop.collections] == ["orders"]
    buckets.drop_bucket("other")
    raises(ex.BucketNotFoundException, lambda: buckets.drop_bucket("other"))


def over_tls(port: str, authenticator: Any) -> None:
    cluster = Cluster(f"couchbases://127.0.0.1:{port}", ClusterOptions(authenticator, timeout_options=PATIENCE))
    cluster.wait_until_ready(timedelta(seconds=60))
    upsert_and_get(cluster.bucket("default").default_collection())
    cluster.close()


def unknown_bucket(cluster: Any) -> None:
    """It fails at once, not with a timeout that does not say what is wrong."""
    raises(ex.BucketNotFoundException, lambda: cluster.bucket("defualt"))


def unknown_collection(bucket: Any) -> None:
    missing = bucket.scope("shop").collection("missing")
    options = UpsertOptions(timeout=timedelta(seconds=1))
    error = raises(ex.CouchbaseException, lambda: missing.upsert("k", 1, options))
    assert isinstance(error, (ex.CollectionNotFoundException, *GAVE_UP)), error


if __name__ == "__main__":
    main(*sys.argv[1:])
