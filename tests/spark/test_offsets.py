"""Offsets: canonical, compact, and safe to thin out."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.errors import ConfigError
from upriver.model import SEQNO_MAX
from upriver.protocol.filters import Filter
from upriver.protocol.offsets import LIMIT_BYTES, Offset
from upriver.protocol.position import POINTS_KEPT, Position


@st.composite
def places(draw):
    points = sorted(draw(st.sets(st.integers(1, 2**40), max_size=POINTS_KEPT)))
    seqno = draw(st.integers(points[-1] if points else 0, 2**41))
    return Position.of_points(draw(st.integers(0, 2**64 - 1)), seqno, tuple(points), draw(st.integers(0, 2**20)))


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

    def position() -> Position:
        seqno = rng.randint(10**9, 10**10) if worst else rng.randint(10**6, 10**9)
        behind = [10**8, 10**5, 10**3, 0] if worst else [70_000, 900, 20, 0]
        points = tuple(seqno - b for b in behind)
        return Position.of_points(rng.getrandbits(64 if worst else 48), seqno, points, 3 * worst)

    every = frozenset(range(1024))
    some = {"rollbacks": every, "unread": every} if worst else {}
    offset = Offset(tuple(position() for _ in range(1024)), reads=every, bucket="f" * 32, **some)
    text = json.dumps(offset.to_json())
    assert len(text) <= LIMIT_BYTES
    back = Offset.from_json(json.loads(text))
    assert [(p.vbuuid, p.seqno, p.epoch) for p in back.positions] == [
        (p.vbuuid, p.seqno, p.epoch) for p in offset.positions
    ]
    assert all(
        set(b.consistent_points) <= set(a.consistent_points)
        for a, b in zip(offset.positions, back.positions, strict=True)
    )


def test_a_baseline_survives_thinning():
    """Its oldest point is where the query began: without it, a rollback would go to the beginning."""
    seqno = 10**9
    points = tuple(seqno - back for back in (10**8, 10**6, 10**4, 0))
    offset = Offset((Position.of_points(2**63, seqno, points),) * 1024, baseline=True)
    back = Offset.from_json(offset.to_json())
    assert all(at.consistent_points[1] == seqno - 10**8 for at in back.positions)


def test_an_offset_of_an_earlier_version_is_read_and_written_as_it_was():
    """To the letter, with a filter that no position has any more: what a lake has kept of a batch is found by it."""
    found = {
        "dcp": 1, "vbuuids": "a1b2 8000000000000005 0", "seqnos": "120 7 0", "behind": "20,40,110 0 -",
        "epochs": "2 0 0", "rollbacks": "1", "reads": "3", "unread": "4", "baseline": True, "bucket": "0f3a",
        "filters": ["s8", "9 a", "*"], "former": ["*"], "filter_of": "100",
    }  # fmt: skip
    offset = Offset.from_json(found)
    narrow = Filter(collections=frozenset({9, 10}))
    assert offset.positions[0] == Position(0xA1B2, 120, 100, SEQNO_MAX, (10, 80), 2, narrow)
    assert offset.positions[1:] == (Position(2**63 + 5, 7, 7, 7), Position())
    assert json.dumps(offset.to_json()) == json.dumps(found)


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
