"""What a lake says that it has reached."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upriver.errors import ConfigError
from upriver.spark.offsets import Offset
from upriver.spark.tables.lake import Lake
from upriver.spark.tables.options import SyncOptions
from upriver.spark.tables.reached import Checkpoint, Reached, filter_of, note, take_over

OFFSET = Offset.earliest(4).to_json()


def options(root: Path, **more) -> SyncOptions:
    return SyncOptions(connection="couchbase://localhost", to=str(root), **more)


def plan(lake: Lake, batch: int, *, committed: bool) -> None:
    """As Spark writes it."""
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
    assert told == {"batch": 1, "offset": OFFSET, "filter": {"scope": "", "collections": ["shop.orders"]}}


def test_a_lake_of_an_earlier_version_has_reached_what_its_checkpoint_says_is_committed(tmp_path):
    lake = Lake(str(tmp_path))
    plan(lake, 9, committed=True)
    plan(lake, 10, committed=True)
    plan(lake, 11, committed=False)
    take_over(lake, options(tmp_path))
    assert Reached.load(lake) == Reached(10, OFFSET, {"scope": "", "collections": []})


def test_a_new_lake_has_reached_nothing(tmp_path):
    take_over(Lake(str(tmp_path)), options(tmp_path))
    assert Reached.load(Lake(str(tmp_path))) is None


def test_a_damaged_checkpoint_is_named(tmp_path):
    lake = Lake(str(tmp_path))
    plan(lake, 0, committed=True)
    (Path(lake.checkpoint) / "offsets" / "0").write_text("v1\n{}\n{half")
    with pytest.raises(ConfigError, match="offsets/0 is damaged"):
        Checkpoint(lake.checkpoint).offset(0)


@pytest.mark.parametrize(("given", "told"), [
    ({}, {"scope": "", "collections": []}),
    ({"scope": "shop"}, {"scope": "shop", "collections": []}),
    ({"collections": ("b.y", "x")}, {"scope": "", "collections": ["_default.x", "b.y"]}),
    ({"scope": "shop", "collections": ("x", "b.y")}, {"scope": "", "collections": ["b.y", "shop.x"]}),
])  # fmt: skip
def test_names_in_the_filter_are_complete(tmp_path, given, told):
    assert filter_of(options(tmp_path, **given)) == told
