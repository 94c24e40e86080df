"""Offsets: canonical, compact, and safe to thin out."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import ConfigError
from upriver.spark.reader.offsets import LIMIT_BYTES, POINTS_KEPT, Offset, Place, with_point


@st.composite
def places(draw):
    points = sorted(draw(st.sets(st.integers(1, 2**40), max_size=POINTS_KEPT)), reverse=True)
    seqno = draw(st.integers(points[0] if points else 0, 2**41))
    return Place(draw(st.integers(0, 2**64 - 1)), seqno, tuple(points), draw(st.integers(0, 2**20)))


@st.composite
def offsets(draw):
    found = draw(st.lists(places(), min_size=1, max_size=20))
    some = st.frozensets(st.integers(0, len(found) - 1))
    return Offset(
        tuple(found),
        draw(some),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(some),
        draw(some),
        draw(st.sampled_from(("", "0f3a"))),
    )


@given(offsets())
def test_json_and_back_is_the_same_offset(offset):
    assert Offset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


@given(offsets())
def test_an_offset_has_exactly_one_text(offset):
    """Spark compares texts: the same places in other words would be new data, for ever."""
    text = json.dumps(offset.to_json())
    assert json.dumps(Offset.from_json(json.loads(text)).to_json()) == text
    assert "\n" not in text


@pytest.mark.parametrize("worst", [False, True], ids=["usual", "worst case"])
def test_1024_vbuckets_stay_below_40_kilobytes(worst):
    rng = random.Random(7)

    def new_file_name() -> Place:
        seqno = rng.randint(10**9, 10**10) if worst else rng.randint(10**6, 10**9)
        behind = [10**8, 10**5, 10**3, 0] if worst else [70_000, 900, 20, 0]
        return Place(rng.getrandbits(64 if worst else 48), seqno, tuple(seqno - b for b in reversed(behind)), 3 * worst)

    every = frozenset(range(1024))
    some = {"rollbacks": every, "unread": every} if worst else {}
    offset = Offset(tuple(new_file_name() for _ in range(1024)), reads=every, bucket="f" * 32, **some)
    text = json.dumps(offset.to_json())
    assert len(text) <= LIMIT_BYTES
    back = Offset.from_json(json.loads(text))
    assert [(p.vbuuid, p.seqno, p.epoch) for p in back.places] == [(p.vbuuid, p.seqno, p.epoch) for p in offset.places]
    assert all(set(b.points) <= set(a.points) for a, b in zip(offset.places, back.places, strict=True))


def test_a_baseline_survives_thinning():
    """Its oldest point is where the query began: without it, a rollback would go to the beginning."""
    seqno = 10**9
    points = tuple(seqno - back for back in (0, 10**4, 10**6, 10**8))
    offset = Offset((Place(2**63, seqno, points),) * 1024, baseline=True)
    back = Offset.from_json(offset.to_json())
    assert all(place.points[-1] == seqno - 10**8 for place in back.places)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200))
def test_points_are_thinned_but_the_newest_stays(gaps):
    points: tuple[int, ...] = ()
    seqno = 0
    for gap in gaps:
        seqno += gap
        points = with_point(points, seqno)
        assert points[0] == seqno
        assert len(points) <= POINTS_KEPT
        assert list(points) == sorted(set(points), reverse=True)


@pytest.mark.parametrize("broken", [
    pytest.param({}, id="nothing"),
    pytest.param({"dcp": 2, "vbuuids": "0", "seqnos": "0", "behind": "-"}, id="another version"),
    pytest.param({"dcp": 1, "vbuuids": "0 0", "seqnos": "0", "behind": "-"}, id="columns of different length"),
    pytest.param({"dcp": 1, "vbuuids": "x", "seqnos": "0", "behind": "-"}, id="not a number"),
    pytest.param({"dcp": 1, "vbuuids": "1", "seqnos": "5", "behind": "-3"}, id="a point ahead of the seqno"),
    pytest.param({"partition": 3}, id="an offset of another source"),
])  # fmt: skip
def test_a_foreign_offset_is_refused_by_name(broken):
    with pytest.raises(ConfigError, match="not an offset of the dcp source"):
        Offset.from_json(broken)
