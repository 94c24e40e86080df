"""A log that was trimmed knows how far, and never restores what it cannot know."""

from __future__ import annotations

from typing import Any

from tests.lake.desks import Desk
from tests.lake.feeds import BASE_NS
from tests.lake.test_truth import normal
from upriver.lake.apply import upkeep
from upriver.lake.apply.policy import MergePolicy

TAIL = MergePolicy(small_rows=0, share=100, tail_files=2)


def truth(desk: Desk) -> dict[str, object]:
    return {key: normal(value) for key, value in desk.feed.truth().items()}


def trim(desk: Desk, clock: int) -> int:
    """Forget what was written up to this moment of the feed."""
    return upkeep.trim_log(desk.orders, BASE_NS // 1000 + clock * 1_000_000 + 500_000)


def reading(desk: Desk) -> list[int]:
    asked: list[int] = []

    def reread(vbuckets: Any) -> Any:
        asked.extend(vbuckets)
        return desk.feed.scan(vbuckets)

    desk.open(reread=reread)
    return asked


def test_a_rollback_restores_no_value_that_was_replaced_before_the_log_was_trimmed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(upkeep, "LARGE_ROWS", 5)
    desk = Desk(tmp_path / "lake", policy=TAIL)
    desk.feed.put("k", {"n": 0})
    desk.commit()
    for index in range(10):
        desk.feed.put(f"other{index}", {"n": index})
    desk.feed.put("k", {"n": 1})
    desk.commit()
    large = desk.feed.clock
    desk.feed.put("small", {"n": 0})
    desk.commit()
    assert upkeep.fold_log(desk.orders) == 1  # the small files around the large one
    trim(desk, large)
    vbucket = desk.feed.vbucket("k")
    good = desk.feed.histories[vbucket].seqno
    desk.feed.put("k", {"n": 2})
    desk.commit()
    reading(desk)
    desk.feed.fail_over(vbucket, good)
    desk.commit()
    assert desk.read() == truth(desk)
    assert desk.read()["k"] == {"n": 1}


def test_a_rollback_below_what_was_trimmed_reads_the_vbucket_again(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=TAIL)
    vbucket = desk.feed.vbucket("k")
    desk.feed.put("k", {"n": 0})
    good = desk.feed.histories[vbucket].seqno
    desk.feed.put("k", {"n": 1})
    desk.commit()
    assert trim(desk, desk.feed.clock) == 1
    asked = reading(desk)
    desk.feed.fail_over(vbucket, good)  # the log has no word about what is lost
    desk.commit()
    assert desk.read() == truth(desk) == {"k": {"n": 0}}
    assert asked == [vbucket]


def test_a_vbucket_of_which_nothing_was_trimmed_is_not_read_again(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=TAIL)
    key = [next(key for key in map(str, range(99)) if desk.feed.vbucket(key) == vbucket) for vbucket in range(4)]
    desk.feed.put(key[0], {"n": 0})
    desk.commit()
    assert trim(desk, desk.feed.clock) == 1
    good = desk.feed.histories[1].seqno
    desk.feed.put(key[1], {"n": 1})
    desk.commit()
    asked = reading(desk)
    desk.feed.fail_over(1, good)
    desk.commit()
    assert desk.read() == truth(desk) == {key[0]: {"n": 0}}
    assert asked == []


def test_a_lake_that_an_earlier_version_trimmed_reads_again_whatever_rolls_back(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=TAIL)
    vbucket = desk.feed.vbucket("k")
    desk.feed.put("k", {"n": 0})
    good = desk.feed.histories[vbucket].seqno
    desk.feed.put("k", {"n": 1})
    desk.commit()
    file = desk.orders.changes.files()[0]
    desk.orders.changes.commit("upriver.trimmed", 0, [], [file])
    asked = reading(desk)
    for _ in range(2):
        desk.feed.fail_over(vbucket, good)
        desk.commit()
        assert desk.read() == truth(desk) == {"k": {"n": 0}}
    assert asked == [vbucket]  # the second time the log knows


def test_a_rollback_below_where_a_vbucket_was_read_again_does_not_trust_what_was_read_then(tmp_path) -> None:
    desk = Desk(tmp_path / "lake", policy=TAIL)
    vbucket = desk.feed.vbucket("k")
    for n in range(4):
        desk.feed.put("k", {"n": n})
    desk.commit()
    assert trim(desk, desk.feed.clock) == 1
    asked = reading(desk)
    desk.feed.fail_over(vbucket, 2)
    desk.feed.put("k", {"n": 9})  # replaces, in what is read again, the version that the next rollback brings back
    desk.commit()
    assert desk.read() == truth(desk) == {"k": {"n": 9}}
    desk.feed.fail_over(vbucket, 2)
    desk.commit()
    assert desk.read() == truth(desk) == {"k": {"n": 1}}
    assert asked == [vbucket, vbucket]
