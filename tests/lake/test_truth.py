"""Whatever happens to the feed, the tables say what the bucket says."""

from __future__ import annotations

import tempfile

import orjson
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lake.feeds import Feed
from tests.support.examples import examples
from upriver.lake import read_documents
from upriver.lake.apply.policy import MergePolicy, TableOptions
from upriver.lake.apply.upkeep import fold_log, fold_tail
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.layout import Lake
from upriver.lake.tables import Tables

KEYS = [f"k{index}" for index in range(12)]
# Ranges that never merge by themselves, that always do, and small ones that split.
POLICIES = [
    MergePolicy(share=100, small_rows=0, tail_files=3),
    MergePolicy(small_rows=10**6, tail_files=3),
    MergePolicy(share=0.5, small_rows=2, target_rows=2, tail_files=2, max_files=1),
]
documents = st.fixed_dictionaries(
    {
        "n": st.one_of(
            st.integers(-5, 5),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=3),
            st.just(2**60),
            st.just(2**63 + 5),
        )
    },
    optional={
        "name": st.text(max_size=5),
        "deep": st.just({"a": [1, {"b": None}]}),
        "Name": st.booleans(),
        "_key": st.just(1),
        "a b": st.just(1),
    },
)
ops = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(KEYS), documents),
        st.tuples(st.just("raw"), st.sampled_from(KEYS), st.binary(max_size=4)),
        st.tuples(st.just("delete"), st.sampled_from(KEYS)),
        st.tuples(st.just("fail over"), st.integers(0, 3), st.floats(0, 1)),
        st.tuples(st.just("batch"), st.booleans(), st.booleans()),
        st.tuples(st.just("drop"), st.sampled_from(["orders", "users"])),
    ),
    min_size=1,
    max_size=60,
)


def normal(value: bytes) -> object:
    """A document as the tables have it: null fields count as absent."""
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError:
        return value
    return {k: v for k, v in document.items() if v is not None} if isinstance(document, dict) else value


def apply(tables: Tables, feed: Feed, batch: int, lag: int = 0) -> WrittenFiles:
    written = write_log(feed.batch(), tables.lake.root, batch)
    tables.apply(batch, WrittenFiles.from_tasks([written.to_json()]), lag)
    return written


def run(op: tuple[object, ...], feed: Feed, which: str) -> None:
    match op:
        case ("put", key, document):
            feed.put(str(key), document, which)  # type: ignore[arg-type]
        case ("raw", key, value):
            feed.put(str(key), value, which, json=False)  # type: ignore[arg-type]
        case ("delete", key):
            feed.delete(str(key), which)
        case ("fail over", vbucket, share):
            feed.fail_over(int(vbucket), int(feed.histories[int(vbucket)].seqno * float(share)))  # type: ignore[call-overload]
        case ("drop", name):
            feed.drop(str(name))


def replayed(tables: Tables, name: str) -> dict[str, bytes]:
    """What a reader gets from the log that skips voided rows and ignores epochs."""
    documents: dict[str, tuple[int, bytes]] = {}
    rows = tables.collection(name).changes.delta.to_pyarrow_table().to_pylist()
    for row in sorted(rows, key=lambda row: (row["vbucket"], row["seqno"])):
        if row["voided"] or row["event"] == "rollback":
            continue
        if row["event"] == "collection_dropped":
            documents = {key: found for key, found in documents.items() if found[0] != row["vbucket"]}
        elif row["event"] == "mutation":
            documents[row["key"].decode()] = row["vbucket"], row["value"]
        else:
            documents.pop(row["key"].decode(), None)
    return {key: value for key, (_, value) in documents.items()}


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ops, st.sampled_from(POLICIES), st.randoms(use_true_random=False))
def test_tables_equal_the_bucket_after_every_batch(ops, policy, random) -> None:
    feed = Feed(collections=("orders", "users"))
    with tempfile.TemporaryDirectory() as root:
        tables = Tables(Lake(root), "app", TableOptions(policy=policy, vbuckets=4))
        number = 0
        for op in [*ops, ("batch", False, False)]:
            if op[0] != "batch":
                run(op, feed, random.choice(["orders", "users"]))
                continue
            hold, restart = op[1], op[2]
            apply(tables, feed, number, lag=10**6 if hold else 0)
            number += 1
            if restart:
                tables = Tables(Lake(root), "app", TableOptions(policy=policy, vbuckets=4))
            for name in tables.names():
                assert replayed(tables, name) == feed.truth(name.removeprefix("shop."))
            if not hold:
                for name in tables.names():
                    fold_tail(tables.collection(name))
                    fold_log(tables.collection(name))
                    truth = feed.truth(name.removeprefix("shop."))
                    assert read_documents(root, name) == {key: normal(value) for key, value in truth.items()}
        tables.drain()
        for name in tables.names():
            keys = tables.collection(name).current.delta.to_pyarrow_table()["_key"].to_pylist()
            truth = feed.truth(name.removeprefix("shop."))
            assert sorted(keys) == sorted(truth)
            assert read_documents(root, name) == {key: normal(value) for key, value in truth.items()}
