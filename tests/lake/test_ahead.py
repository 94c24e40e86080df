"""What was read again beyond the offset of the sync is not believed for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.lake.desks import Desk
from tests.lake.test_trimming import TAIL, reading, trim, truth
from upriver.lake.apply import reread
from upriver.lake.change_log import WrittenFiles, write_log
from upriver.lake.layout import Lake
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.spark.sync.committed import CommittedBatch


def branches(desk: Desk) -> Any:
    def of(vbuckets: Any) -> dict[int, list[tuple[int, int]]]:
        return {vbucket: desk.feed.histories[vbucket].branches[::-1] for vbucket in vbuckets}

    return of


@pytest.mark.parametrize("idle", [True, False], ids=["nothing is written after it", "the new branch goes on"])
def test_what_was_read_again_beyond_the_offset_goes_when_a_second_failover_loses_it(tmp_path, idle) -> None:
    desk = Desk(tmp_path / "lake", policy=TAIL)
    vbucket = desk.feed.vbucket("k")
    extra = [key for key in map(str, range(99)) if desk.feed.vbucket(key) == vbucket]
    for n in range(4):
        desk.feed.put("k", {"n": n})
    desk.commit()
    assert trim(desk, desk.feed.clock) == 1
    reading(desk)
    desk.tables.branches = branches(desk)
    desk.feed.fail_over(vbucket, 2)
    batch = desk.feed.batch()  # is planned up to here
    offset = desk.feed.histories[vbucket].seqno
    desk.feed.put(extra[0], {"ahead": True})
    desk.tables.apply(desk.number, WrittenFiles.from_tasks([write_log(batch, desk.root, desk.number).to_json()]))
    desk.number += 1
    assert extra[0] in desk.read()  # read again, beyond the offset
    desk.feed.fail_over(vbucket, offset)  # loses it; the source is not behind that and hears of no rollback
    desk.feed.histories[vbucket].epoch -= 1
    desk.feed.batch()
    if idle:
        desk.tables.freshen()
    else:
        desk.feed.put(extra[1], {"n": 2})
        desk.commit()
    assert desk.read() == truth(desk)
    desk.feed.put(extra[2], {"n": 3})
    desk.feed.pending = [row | {"epoch": desk.tables.lake.epochs()[vbucket]} for row in desk.feed.pending]
    desk.commit()
    assert desk.read() == truth(desk)


def test_a_vbucket_that_the_sync_has_passed_is_not_asked_after_any_more(tmp_path) -> None:
    lake = Lake(str(tmp_path))
    reread.note_ahead(lake, "shop.orders", {1: reread.Ahead(7, 50)})
    asked: list[int] = []

    def branches(vbuckets: Any) -> dict[int, list[tuple[int, int]]]:
        asked.extend(vbuckets)
        return {1: [(8, 40), (7, 0)]}

    assert reread.find_lost(lake, branches) == {"shop.orders": [1]}
    CommittedBatch(3, Offset((Position.of_points(7, 9), Position.of_points(7, 50))).to_json()).store(lake)
    assert reread.find_lost(lake, branches) == {}
    assert asked == [1]
