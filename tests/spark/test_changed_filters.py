"""The filter is part of the position: collections that a wider filter adds are read from the beginning."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spark.spark_batches import Batches
from tests.spark.spark_model import at
from tests.spark.spark_world import DOCUMENT, World
from tests.support.by_id import ById
from upriver.errors import ConfigError
from upriver.model import FailoverLog
from upriver.protocol.filters import Filter, Missing, Wanted
from upriver.protocol.offsets import Offset
from upriver.spark.reader.planning import Known, View, plan, ranges

A, B, C = 8, 9, 10


def some(*ids: int) -> Filter:
    return Filter(collections=frozenset(ids))


SCOPE_OF = {0: 0, A: 1, B: 1, C: 2}


@pytest.mark.parametrize(("wanted", "have", "missing"), [
    (some(A), Filter(), None),
    (some(A), Filter(scope=1), None),
    (some(A), some(A, B), None),
    (Filter(scope=1), Filter(scope=1), None),
    (some(A, B), some(A), Missing(some(B))),
    (some(A, C), Filter(scope=1), Missing(some(C))),
    (Filter(scope=1), some(A), Missing(Filter(scope=1), (A,))),
    (Filter(scope=2), Filter(scope=1), Missing(Filter(scope=2), (A, B))),
    (Filter(), some(A), Missing(Filter(), (A,))),
    (Filter(), Filter(scope=1), Missing(Filter(), (A, B))),
])  # fmt: skip
def test_what_a_position_lacks(wanted, have, missing):
    assert Wanted(wanted, SCOPE_OF).missing(have) == missing


@given(st.one_of(st.just(Filter()), st.builds(Filter, st.integers(0, 2**32 - 1)),
                 st.builds(Filter, st.none(), st.frozensets(st.integers(0, 2**32 - 1)))))  # fmt: skip
def test_a_filter_has_one_text(given):
    assert Filter.of_text(given.text()) == given


def view(start: Offset) -> View:
    """Every vbucket is at 50."""
    vbuckets = range(start.vbuckets)
    return View(dict.fromkeys(vbuckets, 50), dict.fromkeys(vbuckets, FailoverLog.new(0xA)))


WIDER = Wanted(some(A, B), SCOPE_OF)


def narrow(*seqnos: int, former: tuple[Filter, ...] = ()) -> Offset:
    places = tuple(at(0xA, seqno, (seqno,)) for seqno in seqnos)
    return Offset(places, filters=(some(A),), former=former)


def test_a_wider_filter_reads_what_is_new_up_to_the_position_and_then_continues():
    start = narrow(40, 50)
    end = plan(start, view(start), Known(reported=True), wanted=WIDER)
    todo = ranges(start, end, view(start), Known(), WIDER)
    assert [(one.start.seqno, one.end, one.filter) for one in todo] == [
        (0, 40, b'{"collections": ["9"]}'), (0, 50, b'{"collections": ["9"]}')]  # fmt: skip
    assert end.positions == (at(0xA, 40), at(0xA, 50))  # their points are gone: what B had there is unknown
    on = plan(end, view(end), Known({0: (0xA, 40)}, reported=True), wanted=WIDER)
    todo = ranges(end, on, view(end), Known(), WIDER)
    assert [(one.start.seqno, one.end, one.filter) for one in todo] == [(40, 50, b'{"collections": ["8", "9"]}')]
    assert on.positions[0].consistent_points == (0, 40)


def test_a_position_is_complete_with_what_is_new_only_if_it_was_before():
    start = Offset((at(0xA, 40, (40,)), at(0xA, 50, (20,)), at(0xA, 50, (20,))), filters=(some(A),))
    known = Known({2: (0xA, 50)}, reported=True)
    todo = ranges(start, plan(start, view(start), known, wanted=WIDER), view(start), known, WIDER)
    assert [one.addition for one in todo] == [False, True, False]


def test_a_limit_holds_for_what_is_new_and_at_least_one_vbucket_catches_up():
    start = narrow(40, 45, 50)
    end = plan(start, view(start), Known(reported=True), most=90, wanted=WIDER)
    assert (end.reads, [each.filter for each in end.positions]) == ({0, 1}, [None, None, some(A)])
    back = Offset.from_json(end.to_json())
    assert back == end
    assert plan(back, view(back), Known(reported=True), most=1, wanted=WIDER).reads == {2}


def test_a_collection_that_is_left_out_is_no_longer_followed():
    start = Offset((at(0xA, 40, (40,)),), filters=(Filter(),))
    end = plan(start, view(start), Known(reported=True), wanted=Wanted(some(A), SCOPE_OF))
    todo = ranges(start, end, view(start), Known(), WIDER)
    assert [(one.start.seqno, one.filter) for one in todo] == [(40, b'{"collections": ["8"]}')]
    assert (end.filters, end.former) == ((some(A),), (Filter(),))


def test_what_was_read_once_before_is_rolled_back_and_read_again():
    """Its reader may hold documents that were deleted while it was not followed."""
    start = narrow(40, former=(some(A, B),))
    end = plan(start, view(start), Known(reported=True), wanted=WIDER)
    assert (end.rollbacks, end.positions[0]) == ({0}, at(0xA, 50, (), 1))


def test_what_is_new_but_was_left_unread_is_read_again_from_the_beginning():
    start = narrow(40)
    end = plan(start, view(start), Known(reported=True), wanted=WIDER)
    again = plan(end, view(end), Known(unread={0: 40}, reported=True), wanted=WIDER)
    assert (again.rollbacks, again.positions[0].snap_start) == ({0}, 0)


def test_an_offset_of_an_earlier_version_is_taken_to_have_the_filter_of_now():
    start = Offset((at(0xA, 50, (50,)),))
    assert plan(start, view(start), Known(reported=True), wanted=WIDER) is start


def manifest(uid: int, shop: dict[str, int], other: dict[str, int] | None = None) -> dict[str, Any]:
    def scope(name: str, number: int, collections: dict[str, int]) -> dict[str, Any]:
        listed = [{"name": each, "uid": f"{identity:x}"} for each, identity in collections.items()]
        return {"name": name, "uid": f"{number:x}", "collections": listed}

    return {"uid": f"{uid:x}", "scopes": [scope("_default", 0, {"_default": 0}), scope("shop", 8, shop),
                                          scope("other", 9, other or {})]}  # fmt: skip


def put(world: World, collection: int, count: int, prefix: str) -> None:
    ById(world.db, collection).set_many({f"{prefix}{n}".encode(): b"1" for n in range(count)})


def documents(rows: list[dict[str, Any]]) -> dict[str, int]:
    """How many changes there are of each collection."""
    found: dict[str, int] = {}
    for row in rows:
        if row["event"] in DOCUMENT:
            found[row["collection"]] = found.get(row["collection"], 0) + 1
    return found


@pytest.fixture
def shop(world: World) -> World:
    world.set_manifest(manifest(1, {"a": A, "b": B}))
    put(world, A, 20, "a")
    put(world, B, 30, "b")
    world.put(10)
    return world


@pytest.mark.parametrize(("wider", "new"), [
    ({"collections": "shop.a,shop.b"}, {"b": 30}),
    ({"collections": "", "scope": "shop"}, {"b": 30}),
    ({"collections": ""}, {"b": 30, "_default": 10}),
], ids=["another collection", "the scope", "no filter"])  # fmt: skip
def test_a_query_that_continues_with_a_wider_filter_reads_the_past_of_what_is_new(shop: World, wider, new):
    batches = Batches(shop, collections="shop.a")
    assert documents(batches.drain()) == {"a": 20}
    batches.restart(**wider)
    assert documents(batches.drain()) == new
    put(shop, A, 3, "late")
    put(shop, B, 2, "late")
    assert documents(batches.drain()) == {"a": 3, "b": 2}
    assert not [row for row in batches.rows if row["event"] == "rollback"]


def test_a_collection_created_while_its_scope_is_followed_is_read(shop: World):
    batches = Batches(shop, scope="shop")
    assert documents(batches.drain()) == {"a": 20, "b": 30}
    shop.set_manifest(manifest(2, {"a": A, "b": B, "c": C}))
    put(shop, C, 7, "c")
    assert documents(batches.drain()) == {"c": 7}


def test_a_collection_that_is_dropped_and_created_again_is_followed_by_its_name(shop: World):
    batches = Batches(shop, collections="shop.a,shop.b")
    batches.drain()
    shop.set_manifest(manifest(2, {"b": B}))
    batches.drain()
    shop.set_manifest(manifest(3, {"a": C, "b": B}))
    put(shop, C, 7, "again")
    batches.drain()
    put(shop, B, 2, "late")
    batches.drain()
    rows = batches.rows
    assert {bytes(row["key"]) for row in rows if row["collection_id"] == C and row["event"] == "mutation"} == {
        f"again{n}".encode() for n in range(7)}  # fmt: skip
    assert {b"late0", b"late1"} <= {row["key"] for row in rows}


def test_all_collections_of_a_filter_may_be_gone_for_a_while(shop: World):
    batches = Batches(shop, collections="shop.a")
    batches.drain()
    shop.set_manifest(manifest(2, {"b": B}))
    put(shop, B, 3, "other")
    batches.drain()
    shop.set_manifest(manifest(3, {"a": C, "b": B}))
    put(shop, C, 7, "again")
    assert documents(batches.drain()) == {"a": 7}


def test_names_that_do_not_exist_are_an_error_at_the_start(shop: World):
    with pytest.raises(ConfigError, match=r"no collection shop.typo; there are _default._default, shop.a, shop.b"):
        Batches(shop, collections="shop.typo")
    with pytest.raises(ConfigError, match=r"no scope typo; there are _default, other, shop"):
        Batches(shop, scope="typo")


def test_a_vbucket_behind_a_filter_that_was_dropped_is_read_again_and_not_refused_for_ever():
    """It waits for a wider filter, loses history, and its own filter names a collection that is gone."""
    start = Offset((at(0xA, 40, (40, 20)),), filters=(some(C), some(A)))
    start = replace(start, positions=(start.positions[0]._replace(filter=some(A)),))
    forked = View({0: 30}, {0: FailoverLog.new(0xA).branch(0xB, 30)})
    for gone in ({B: 1, C: 2}, {C: 2}):
        wanted = Wanted(some(C), gone)
        end = plan(start, forked, Known(reported=True), wanted=wanted)
        (one,) = ranges(start, end, forked, Known(), wanted)
        assert (one.rolled_back, one.start.seqno, one.end, one.filter) == (True, 0, 30, some(C).wire())
        assert end.positions == (at(0xB, 30, (), 1),)


@pytest.mark.parametrize(
    ("one", "there"),
    [
        (Filter(), True),
        (some(A, B), True),
        (some(A, 77), False),
        (Filter(scope=2), True),
        (Filter(scope=3), False),
    ],
)
def test_whether_a_filter_can_still_be_read_with(one, there):
    assert Wanted(Filter(), SCOPE_OF).exists(one) is there
