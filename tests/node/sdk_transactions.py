"""Transactions of the official SDK, as far as they need no query service; part of ``sdk_scenarios``."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from couchbase import exceptions as ex
from couchbase.options import TransactionOptions

PATIENCE = TransactionOptions(timeout=timedelta(seconds=60))


def run(cluster: Any, logic: Any) -> None:
    cluster.transactions.run(logic, PATIENCE)


def fails(cluster: Any, logic: Any) -> BaseException | None:
    """The cause of the transaction's failure."""
    try:
        run(cluster, logic)
    except ex.TransactionFailed as error:
        return error.inner_cause
    raise AssertionError("the transaction did not fail")


def content(c: Any, key: str) -> Any:
    return c.get(key).content_as[dict]


def a_transaction_inserts(cluster: Any, c: Any) -> None:
    run(cluster, lambda ctx: ctx.insert(c, "t-insert", {"n": 1}))
    assert content(c, "t-insert") == {"n": 1}
    assert isinstance(fails(cluster, lambda ctx: ctx.insert(c, "t-insert", {"n": 2})), ex.DocumentExistsException)


def a_transaction_inserts_what_was_deleted(cluster: Any, c: Any) -> None:
    c.upsert("t-again", {"n": 1})
    c.remove("t-again")
    run(cluster, lambda ctx: ctx.insert(c, "t-again", {"n": 2}))
    assert content(c, "t-again") == {"n": 2}


def a_transaction_reads(cluster: Any, c: Any) -> None:
    c.upsert("t-read", {"n": 1})
    seen = []
    run(cluster, lambda ctx: seen.append(ctx.get(c, "t-read").content_as[dict]))
    assert seen == [{"n": 1}]
    assert isinstance(fails(cluster, lambda ctx: ctx.get(c, "t-missing")), ex.DocumentNotFoundException)


def a_transaction_replaces(cluster: Any, c: Any) -> None:
    c.upsert("t-replace", {"n": 1})
    run(cluster, lambda ctx: ctx.replace(ctx.get(c, "t-replace"), {"n": 2}))
    assert content(c, "t-replace") == {"n": 2}


def a_transaction_removes(cluster: Any, c: Any) -> None:
    c.upsert("t-remove", {"n": 1})
    run(cluster, lambda ctx: ctx.remove(ctx.get(c, "t-remove")))
    assert not c.exists("t-remove").exists


def a_transaction_changes_its_mind(cluster: Any, c: Any) -> None:
    """A transaction sees its own changes; others see them only after it commits."""

    def logic(ctx: Any) -> None:
        ctx.replace(ctx.insert(c, "t-mind", {"n": 1}), {"n": 2})
        ctx.insert(c, "t-other", {"n": 1})
        ctx.remove(ctx.get(c, "t-other"))
        ctx.insert(c, "t-other", {"n": 5})
        assert not c.exists("t-mind").exists

    run(cluster, logic)
    assert (content(c, "t-mind"), content(c, "t-other")) == ({"n": 2}, {"n": 5})


def a_transaction_that_fails_leaves_nothing(cluster: Any, c: Any) -> None:
    for key in ("t-kept", "t-stays"):
        c.upsert(key, {"n": 1})

    def logic(ctx: Any) -> None:
        ctx.insert(c, "t-never", {"n": 1})
        ctx.replace(ctx.get(c, "t-kept"), {"n": 2})
        ctx.remove(ctx.get(c, "t-stays"))
        raise RuntimeError("no")

    assert isinstance(fails(cluster, logic), RuntimeError)
    assert not c.exists("t-never").exists
    assert (content(c, "t-kept"), content(c, "t-stays")) == ({"n": 1}, {"n": 1})


def a_foreign_write_is_not_lost(cluster: Any, c: Any) -> None:
    c.upsert("t-foreign", {"n": 1})
    attempts = []

    def logic(ctx: Any) -> None:
        found = ctx.get(c, "t-foreign")
        attempts.append(found)
        if len(attempts) == 1:
            c.upsert("t-foreign", {"n": 100})
        ctx.replace(found, {"n": found.content_as[dict]["n"] + 1})

    try:
        run(cluster, logic)
    except ex.TransactionFailed:
        assert content(c, "t-foreign") == {"n": 100}
    else:  # the SDK decides whether it retries
        assert content(c, "t-foreign") == {"n": 101}


def transactions_at_once_do_not_lose_updates(cluster: Any, c: Any) -> None:
    c.upsert("t-counter", {"n": 0})

    def increment(_: int) -> bool:
        def logic(ctx: Any) -> None:
            found = ctx.get(c, "t-counter")
            ctx.replace(found, {"n": found.content_as[dict]["n"] + 1})

        try:
            run(cluster, logic)
        except ex.TransactionFailed:
            return False
        return True

    with ThreadPoolExecutor(3) as threads:
        committed = sum(threads.map(increment, range(9)))
    assert committed, "no transaction ever got through"
    assert content(c, "t-counter") == {"n": committed}


SCENARIOS = [
    a_transaction_inserts, a_transaction_inserts_what_was_deleted, a_transaction_reads, a_transaction_replaces,
    a_transaction_removes, a_transaction_changes_its_mind, a_transaction_that_fails_leaves_nothing,
    a_foreign_write_is_not_lost, transactions_at_once_do_not_lose_updates,
]  # fmt: skip
