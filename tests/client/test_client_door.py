"""The public door: the same names for threads and asyncio, typed options, collections by name, all documented."""

from __future__ import annotations

import asyncio
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import upriver
from tests.client.client_world import set_manifest
from upriver.client import aio, blocking
from upriver.client._feed.aio_feed import AsyncChangeFeed
from upriver.client._feed.blocking_feed import ChangeFeed
from upriver.client.options import ConnectKeywords, ConnectOptions
from upriver.client.reading import FeedKeywords, FeedOptions
from upriver.errors import ConfigError, KeyNotFound, UnknownCollection, UnknownScope, UpriverError
from upriver.testing import RunningNode, node

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [
    (blocking.Database, aio.AsyncDatabase),
    (blocking.Collection, aio.AsyncCollection),
    (ChangeFeed, AsyncChangeFeed),
]
SPECIAL = {"__enter__": "__aenter__", "__exit__": "__aexit__", "__iter__": "__aiter__"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningNode]:
    """A separate node, because these tests create and drop collections."""
    with node(vbuckets=8) as running:
        yield running


# ---------------------------------------------------------------------------------------------- both sides


def public(cls: type) -> dict[str, Any]:
    """The public attributes of a class, with the special methods under their blocking names."""
    blocking_name = {theirs: ours for ours, theirs in SPECIAL.items()}
    found = {name: value for name, value in inspect.getmembers(cls) if not name.startswith("_")}
    special = {*SPECIAL, *blocking_name} & set(dir(cls))
    return found | {blocking_name.get(name, name): getattr(cls, name) for name in special}


def shape(member: Any) -> Any:
    """The parameters and the result of a method, apart from being awaited."""
    if isinstance(member, property):
        return "property", shape(member.fget)
    signature = inspect.signature(member)
    result = re.sub(
        r"\b(Async)?(Generator|Iterator)\[([^,]*)(, None)*\]", r"Iterator[\3]", str(signature.return_annotation)
    )
    return list(signature.parameters.values()), result.replace("Async", "")


@pytest.mark.parametrize(("ours", "theirs"), PAIRS, ids=lambda cls: cls.__name__)
def test_both_sides_have_the_same_methods_with_the_same_parameters(ours: type, theirs: type) -> None:
    here, there = public(ours), public(theirs)
    assert here.keys() == there.keys()
    assert {name: shape(member) for name, member in here.items()} == {
        name: shape(member) for name, member in there.items()
    }


def test_connect_is_called_the_same_way_on_both_sides() -> None:
    assert shape(upriver.connect) == shape(upriver.aio.connect)
    assert not inspect.iscoroutinefunction(upriver.aio.connect)


@pytest.mark.parametrize("theirs", [theirs for _, theirs in PAIRS], ids=lambda cls: cls.__name__)
def test_only_methods_that_send_requests_are_awaited(theirs: type) -> None:
    told_at_once = {
        "changes",
        "change_batches",
        "collection",
        "positions",
        "metrics",
        "serve_metrics",
        "items",
        "__iter__",
    }
    for name, member in public(theirs).items():
        if not isinstance(member, property):
            assert inspect.iscoroutinefunction(member) is (name not in told_at_once), name


# ---------------------------------------------------------------------------------------------- names


def test_every_name_in_dir_exists() -> None:
    assert dir(upriver) == sorted(upriver.__all__)
    assert {name for name in dir(upriver) if not hasattr(upriver, name)} == set()
    with pytest.raises(AttributeError, match="nope"):
        upriver.nope  # noqa: B018


def test_every_public_name_says_what_a_caller_may_rely_on() -> None:
    shown = [getattr(upriver, name) for name in dir(upriver) if name not in ("__version__", "Change")]
    shown += [getattr(upriver.aio, name) for name in upriver.aio.__all__]
    silent = [found.__name__ for found in shown if not (found.__doc__ or "").strip()]
    for cls in filter(inspect.isclass, shown):
        members = {name: member for name, member in vars(cls).items() if not name.startswith("_")}
        documented = {
            name: m for name, m in members.items() if inspect.isfunction(m) or isinstance(m, property | classmethod)
        }
        silent += [f"{cls.__name__}.{name}" for name in documented if not inspect.getdoc(getattr(cls, name))]
    assert silent == []


def test_an_event_and_an_error_never_share_a_name() -> None:
    events = {"Mutation", "Deletion", "RolledBack", "CollectionChanged", "Change"}
    raised = {name for name, found in vars(upriver.errors).items() if inspect.isclass(found)}
    assert events & raised == set()
    assert issubclass(upriver.errors.Rollback, UpriverError)


def test_importing_the_package_is_cheap() -> None:
    program = "import sys, upriver; dir(upriver); print(len(sys.modules)); upriver.connect, upriver.aio, upriver.Group"
    check = f"{program}; print(sorted({{'numba', 'pyarrow', 'pyspark', 'deltalake'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60, check=True)
    modules, heavy = done.stdout.splitlines()
    assert int(modules) < 200
    assert heavy == "[]"


# ---------------------------------------------------------------------------------------------- options


def test_the_keywords_are_the_options() -> None:
    internal = {"completes"}
    assert set(FeedKeywords.__annotations__) == {field.name for field in fields(FeedOptions)} - internal
    said_otherwise = {"seeds", "tls", "bucket"}
    assert set(ConnectKeywords.__annotations__) == {field.name for field in fields(ConnectOptions)} - said_otherwise


SNIPPETS = """
import upriver
from upriver.client.reading import FeedOptions

def right(db: upriver.Database) -> None:
    upriver.connect("couchbase://h", "travel", username="ann", window_bytes=0, network="external")
    for change in db.changes(collections=["shop.orders"], end="now", on_rollback="fail"):
        if isinstance(change, upriver.Mutation):
            change.key
    for batch in db.change_batches(rows=100, content=upriver.Content.KEYS, start=upriver.Positions()):
        batch.num_rows
    db.collection("shop.orders").set("k", b"v", expiry=5)

async def right_too(db: upriver.aio.AsyncDatabase) -> None:
    upriver.aio.connect("couchbase://h", "travel", connect_timeout_s=1)
    async for change in db.changes(scope="shop", checkpoint=upriver.FileCheckpoint("c")):
        change.vbucket
    await db.collection("shop.orders").get("k")

def wrong(db: upriver.Database) -> None:
    upriver.connect("couchbase://h", colour="red")
    upriver.connect("couchbase://h", window_bytes="large")
    upriver.connect("couchbase://h", network="mars")
    db.changes(colections=["shop.orders"])
    db.changes(end="never")
    db.change_batches(on_rollback="explode")
    db.set("k", b"v", 8)

async def wrong_too(db: upriver.aio.AsyncDatabase) -> None:
    upriver.aio.connect("couchbase://h", colour="red")
    db.changes(content="everything")
    db.collection(8)
"""


def test_a_type_checker_takes_the_right_options_and_refuses_the_wrong_ones(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPETS)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    refused = {int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error: " in line}
    lines = SNIPPETS.splitlines()
    wrong = {n for n, line in enumerate(lines, 1) if line.startswith("    ") and n > lines.index(_of("wrong")) + 1}
    wrong -= {n for n, line in enumerate(lines, 1) if "def " in line}
    assert refused == wrong, done.stdout + done.stderr


def _of(name: str) -> str:
    return next(line for line in SNIPPETS.splitlines() if line.startswith(f"def {name}("))


def test_an_option_that_does_not_exist_is_told_at_once(db: upriver.Database) -> None:
    misspelt: dict[str, Any] = {"colections": "shop.orders"}
    with pytest.raises(ConfigError, match="unknown option 'colections'; valid are start, end, vbuckets"):
        db.changes(**misspelt)
    with pytest.raises(ConfigError, match="where works on single changes"):
        db.change_batches(where=lambda change: True)


# ---------------------------------------------------------------------------------------------- collections


@pytest.fixture
def manifests(db: upriver.Database) -> Iterator[Callable[..., None]]:
    """Replaces the collections of scope ``shop``; ids are chosen here, and never used again."""

    def replace(*names: str) -> None:
        uid = int(db.manifest()["uid"], 16) + 1
        set_manifest(db, uid, **{name: 0x1000 * uid + n for n, name in enumerate(names)})

    return replace


def test_a_collection_is_addressed_by_its_name(db: upriver.Database, manifests: Callable[..., None]) -> None:
    manifests("orders", "carts")
    orders, carts = db.collection("shop.orders"), db.collection("shop.carts")
    before = orders.set("same", b"of orders")
    carts.set_many({b"same": b"of carts"})
    assert (orders.get("same").value, carts.get("same").value) == (b"of orders", b"of carts")
    assert orders.name == "shop.orders"
    assert db.collections() == ["_default._default", "shop.carts", "shop.orders"]
    highs = carts.high_seqnos()
    orders.set("other", b"1")
    assert carts.high_seqnos() == highs
    carts.set("other", b"1")
    assert sum(carts.high_seqnos()[vb] > highs[vb] for vb in highs) == 1
    orders.delete("same", cas=before)
    orders.add("same", b"again")
    with pytest.raises(KeyNotFound):
        db.get("same")
    db.collection("_default").set("plain", b"1")
    assert db.get("plain").value == b"1"


def test_a_collection_that_does_not_exist_is_named_in_the_error(
    db: upriver.Database, manifests: Callable[..., None]
) -> None:
    manifests("orders")
    with pytest.raises(UnknownCollection, match=r"UNKNOWN_COLLECTION 0x88: 'shop\.nope'"):
        db.collection("shop.nope").get("k")
    with pytest.raises(UnknownScope, match=r"'market\.orders'"):
        db.collection("market.orders").set("k", b"v")


def test_a_collection_that_was_dropped_and_created_again_is_found_again(
    db: upriver.Database, manifests: Callable[..., None]
) -> None:
    manifests("orders")
    orders = db.collection("shop.orders")
    orders.set("k", b"1")
    manifests()
    with pytest.raises(UnknownCollection, match=r"shop\.orders"):
        orders.get("k")
    manifests("orders")
    with pytest.raises(KeyNotFound):
        orders.get("k")
    manifests("orders")  # with another id, and without having been away as far as this client knows
    orders.set_many({b"k": b"2"})
    assert orders.get("k").value == b"2"


def test_the_other_side_does_the_same(
    server: RunningNode, db: upriver.Database, manifests: Callable[..., None]
) -> None:
    manifests("orders")

    async def scenario() -> None:
        async with upriver.aio.connect(server.connection_string) as other:
            orders = other.collection("shop.orders")
            await asyncio.gather(*(orders.set(f"k{n}", b"1") for n in range(20)))
            manifests("orders")
            await asyncio.gather(*(orders.set(f"k{n}", b"2") for n in range(20)))
            assert (await orders.get("k7")).value == b"2"
            with pytest.raises(UnknownCollection, match=r"shop\.nope"):
                await other.collection("shop.nope").get("k")
            found = [change async for change in other.changes(collections="shop.orders", end="now")]
            assert sum(isinstance(change, upriver.Mutation) for change in found) == 20

    asyncio.run(scenario())


# ---------------------------------------------------------------------------------------------- feeds


def test_a_feed_knows_its_lag_and_its_figures(server: RunningNode, db: upriver.Database) -> None:
    db.set_many({b"figures:%d" % n: b"x" for n in range(50)})

    async def other_side() -> tuple[int, int, int]:
        async with upriver.aio.connect(server.connection_string) as other, other.changes() as feed:
            behind = sum((await feed.lag()).values())
            async for _ in feed.items(idle_s=0.5):
                pass
            return behind, sum((await feed.lag()).values()), feed.metrics().rows

    with db.changes() as feed:
        behind = sum(feed.lag().values())
        taken = sum(1 for _ in feed.items(idle_s=0.5))
        assert behind == sum(db.high_seqnos().values())
        assert sum(feed.lag().values()) == 0
        figures = feed.metrics()
        assert (figures.connections, figures.reconnects, figures.rollbacks) == (1, 0, 0)
        assert 50 <= figures.rows <= taken
        assert figures.bytes > 50
        db.set("figures:more", b"x")
        assert sum(feed.lag().values()) == 1
    assert asyncio.run(other_side()) == (behind + 1, 0, figures.rows + 1)


def test_closing_the_database_closes_its_feeds(server: RunningNode) -> None:
    with upriver.connect(server.connection_string) as db:
        db.set("k", b"v")
        feed = db.changes().__enter__()
        next(iter(feed))
    with pytest.raises(upriver.errors.LocalProtocolError, match="closed"):
        next(iter(feed))
    assert sum(position.seqno for position in feed.positions().values()) >= 1


def test_a_checkpoint_may_lie_in_any_collection(db: upriver.Database, manifests: Callable[..., None]) -> None:
    manifests("meta")
    db.set("seen", b"1")
    store = upriver.BucketCheckpoint(db.collection("shop.meta"), "door")
    with db.changes(collections="_default._default", end="now", checkpoint=store) as feed:
        assert b"seen" in {change.key for change in feed if isinstance(change, upriver.Mutation)}
        feed.confirm()
    assert store.load() == feed.positions()
    again = db.changes(collections="_default._default", end="now", checkpoint=store)
    assert [change for change in again if isinstance(change, upriver.Mutation)] == []


def test_the_example_of_the_package_runs(server: RunningNode, manifests: Callable[..., None]) -> None:
    manifests("orders")
    example = textwrap.dedent((upriver.__doc__ or "").split("\n\n")[1])
    example = example.replace("couchbase://localhost", server.connection_string).replace("travel", "default")
    exec(compile(example, "example", "exec"), {"upriver": upriver})
