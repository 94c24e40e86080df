"""What a sync notes as committed, and what the next run makes of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from upriver.errors import ConfigError
from upriver.lake.change_log import WrittenFiles
from upriver.lake.layout import Lake
from upriver.lake.options import SyncOptions
from upriver.protocol.filters import Filter
from upriver.protocol.offsets import Offset
from upriver.protocol.position import Position
from upriver.spark.reader.planning import Known
from upriver.spark.sync.committed import (
    BatchReports,
    CommittedBatch,
    SparkCheckpoint,
    check,
    filter_of,
    keep,
    note,
    recall,
    take_over,
)

OFFSET = Offset.earliest(4).to_json()


def options(root: Path, **more) -> SyncOptions:
    return SyncOptions(connection="couchbase://localhost", to=str(root), **more)


def plan(lake: Lake, batch: int, *, committed: bool) -> None:
    """Write a planned batch as Spark does."""
    Path(lake.checkpoint).mkdir(parents=True, exist_ok=True)
    (Path(lake.checkpoint) / "metadata").write_text('{"id":"q1"}')
    for name, text in (("offsets", f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(OFFSET)}'), ("commits", "v1\n{}")):
        if name == "offsets" or committed:
            folder = Path(lake.checkpoint) / name
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(batch)).write_text(text)


def test_a_batch_is_noted_with_the_end_that_spark_planned_for_it(tmp_path):
    lake = Lake(str(tmp_path))
    plan(lake, 0, committed=True)
    plan(lake, 1, committed=False)
    note(lake, 1, options(tmp_path, scope="shop", collections=("orders",)))
    told = json.loads((tmp_path / "_upriver" / "offsets.json").read_text())
    assert told == {"batch": 1, "query": "q1", "offset": OFFSET, "behind": "", "complete": "", "unread": {},
                    "filter": {"scope": "", "collections": ["shop.orders"]}}  # fmt: skip


def test_the_next_plan_knows_what_tasks_reported_of_the_last_batch(tmp_path):
    """A run that ends leaves its consistent points behind, so that a failover costs the next one little."""
    lake = Lake(str(tmp_path))
    plan(lake, 1, committed=False)
    told = keep(lake, 1, WrittenFiles(complete=[0, 3], unread={2: 0}))
    note(lake, 1, options(tmp_path), told)
    known = recall(str(tmp_path))(OFFSET)
    assert known == Known({0: (0, 0), 3: (0, 0)}, {2: 0}, reported=True)
    assert recall(str(tmp_path))({**OFFSET, "seqnos": "1 0 0 0"}) is None


def test_vbuckets_that_are_behind_are_noted(tmp_path):
    positions = tuple(Position(1, 5, 0, 5, filter=each) for each in (None, Filter(scope=8), None, None))
    offset = Offset(positions, unread=frozenset({2}), filters=(Filter(), Filter(scope=8))).to_json()
    CommittedBatch(4, offset, {"scope": "", "collections": []}, BatchReports(unread={3: 1})).store(Lake(str(tmp_path)))
    told = json.loads((tmp_path / "_upriver" / "offsets.json").read_text())
    assert told["behind"] == f"{0b1110:x}"


def test_after_two_runs_of_a_batch_only_what_both_report_is_noted(tmp_path):
    """The first may have committed a part of the log before it died; the second leaves that part as it is."""
    lake = Lake(str(tmp_path))
    keep(lake, 0, WrittenFiles(complete=[5]))
    keep(lake, 1, WrittenFiles(complete=[0, 3], unread={2: 9}))
    assert keep(lake, 1, WrittenFiles(complete=[3, 2], unread={1: 4})) == BatchReports(frozenset({3}), {1: 4, 2: 9})


def test_a_lake_of_an_earlier_version_takes_over_what_its_checkpoint_has_committed(tmp_path):
    lake = Lake(str(tmp_path))
    plan(lake, 9, committed=True)
    plan(lake, 10, committed=True)
    plan(lake, 11, committed=False)
    take_over(lake, options(tmp_path))
    assert CommittedBatch.load(lake) == CommittedBatch(10, OFFSET, {"scope": "", "collections": []}, query="q1")


def test_a_new_lake_has_committed_nothing(tmp_path):
    take_over(Lake(str(tmp_path)), options(tmp_path))
    assert CommittedBatch.load(Lake(str(tmp_path))) is None


def test_a_damaged_checkpoint_is_named(tmp_path):
    lake = Lake(str(tmp_path))
    plan(lake, 0, committed=True)
    (Path(lake.checkpoint) / "offsets" / "0").write_text("v1\n{}\n{half")
    with pytest.raises(ConfigError, match="offsets/0 is damaged"):
        SparkCheckpoint(lake.checkpoint).offset(0)


@pytest.mark.parametrize("harm", ["another query", "an older one", "lost", "lost before anything was noted"])
def test_a_checkpoint_of_another_lake_is_refused(tmp_path, harm):
    """Spark would begin again with batch 0, and the tables have a batch 0."""
    lake = Lake(str(tmp_path))
    plan(lake, 0, committed=True)
    told = keep(lake, 0, WrittenFiles())
    if harm != "lost before anything was noted":
        note(lake, 0, options(tmp_path), told)
    check(lake, 0)
    if harm == "another query":
        (Path(lake.checkpoint) / "metadata").write_text('{"id":"q2"}')
    elif harm == "an older one":
        (Path(lake.checkpoint) / "offsets" / "0").unlink()
    else:
        shutil.rmtree(lake.checkpoint)
    with pytest.raises(ConfigError, match="missing, old or of another lake"):
        check(lake, 0)


@pytest.mark.parametrize(("given", "told"), [
    ({}, {"scope": "", "collections": []}),
    ({"scope": "shop"}, {"scope": "shop", "collections": []}),
    ({"collections": ("b.y", "x")}, {"scope": "", "collections": ["_default.x", "b.y"]}),
    ({"scope": "shop", "collections": ("x", "b.y")}, {"scope": "", "collections": ["b.y", "shop.x"]}),
])  # fmt: skip
def test_names_in_the_filter_are_complete(tmp_path, given, told):
    assert filter_of(options(tmp_path, **given)) == told
