"""Positions as values, and the stores that keep them."""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upriver.client.blocking import Database
from upriver.client.checkpoints import BucketCheckpoint, FileCheckpoint, SqliteCheckpoint
from upriver.client.names import named
from upriver.client.positions import Positions
from upriver.errors import CheckpointError, CorruptCheckpoint, ForeignCheckpoint
from upriver.model import SEQNO_MAX
from upriver.protocol.position import Position

seqnos = st.integers(0, 2**40)


@st.composite
def any_position(draw: Any) -> Position:
    start, seqno, end = sorted(draw(st.tuples(seqnos, seqnos, st.one_of(seqnos, st.just(SEQNO_MAX)))))
    points = tuple(sorted(draw(st.sets(st.integers(1, start - 1), max_size=3)))) if start > 3 else ()
    return Position(draw(st.integers(0, 2**64 - 1)), seqno, start, end, points, draw(st.integers(0, 9)))


any_positions = st.builds(
    Positions, st.dictionaries(st.integers(0, 1023), any_position(), max_size=5), st.text(max_size=8), st.just(1024)
)


@given(any_positions)
def test_json_undoes_json(positions: Positions) -> None:
    again = Positions.from_json(json.loads(json.dumps(positions.to_json())))
    assert again == positions
    assert again.by_vbucket == positions.by_vbucket


def test_a_checkpoint_of_an_earlier_version_is_read_and_written_as_it_was() -> None:
    positions = {
        "0": {"vbuuid": "a1b2", "seqno": 120, "snapshot": [100, "8c"], "points": [10, 80], "epoch": 2},
        "1": {"vbuuid": "8000000000000005", "seqno": 7, "filter": {"collections": ["_default.b", "shop.a"]}},
        "2": {"vbuuid": "3", "seqno": 0, "snapshot": [0, "32"], "filter": None},
        "3": {"vbuuid": "3", "seqno": 5, "snapshot": [4, "ffffffffffffffff"], "filter": {}},
    }
    saved = {"format": "upriver-positions", "version": 2, "bucket_uuid": "f00", "vbuckets": 4}
    found = Positions.from_json({**saved, "filter": {"scope": "shop"}, "positions": positions})
    assert found[0] == Position(0xA1B2, 120, 100, 140, (10, 80), 2, named("shop"))
    assert found[1] == Position(2**63 + 5, 7, 7, 7, filter=named(names=("shop.a", "b")))
    assert found[2] == Position(3, 0, 0, 50)
    assert found[3] == Position(3, 5, 4, SEQNO_MAX, filter=named())
    assert found.to_json() == {**saved, "filter": {"scope": "shop"}, "positions": positions}
    first = Positions.from_json({**saved, "version": 1, "positions": {"0": positions["0"]}})
    assert first[0] == Position(0xA1B2, 120, 100, 140, (10, 80), 2), "version 1 did not tell what was read"


@given(any_positions, st.data())
def test_a_damaged_checkpoint_is_corrupt_and_nothing_else(positions: Positions, data: Any) -> None:
    text = json.dumps(positions.to_json())
    at = data.draw(st.integers(0, len(text) - 1))
    damaged = text[:at] + data.draw(st.characters()) + text[at + 1 :]
    try:
        found = Positions.from_json(json.loads(damaged))
    except (CorruptCheckpoint, ValueError):
        return
    assert all(0 <= p.snap_start <= p.seqno <= p.snap_end <= SEQNO_MAX for p in found.values())


@pytest.mark.parametrize(
    "entry",
    [
        {"vbuuid": "a", "seqno": 1.5}, {"vbuuid": "a", "seqno": float("inf")}, {"vbuuid": "a", "seqno": -1},
        {"vbuuid": "a", "seqno": True}, {"vbuuid": "-1", "seqno": 1}, {"vbuuid": "1" * 17, "seqno": 1}, {"seqno": 1},
        {"vbuuid": "a", "seqno": 5, "snapshot": [6, "7"]}, {"vbuuid": "a", "seqno": 5, "snapshot": [0, "4"]},
        {"vbuuid": "a", "seqno": 5, "points": [-1]}, {"vbuuid": "a", "seqno": 5, "points": 3}, 7, None,
    ],
)  # fmt: skip
def test_a_position_that_cannot_be_is_corrupt_not_an_error_of_the_server(entry: Any) -> None:
    value = {**positions_of(1).to_json(), "positions": {"0": entry}}
    with pytest.raises(CorruptCheckpoint, match="delete it"):
        Positions.from_json(json.loads(json.dumps(value)))


def positions_of(seqno: int, branch: int = 7, uuid: str = "u") -> Positions:
    return Positions({0: Position(branch, seqno, seqno, seqno, tuple(p for p in (1, 2) if p < seqno))}, uuid, 8)


def test_positions_compare_by_what_they_cover() -> None:
    assert positions_of(5) <= positions_of(6)
    assert not positions_of(6) <= positions_of(5)
    assert not positions_of(5, branch=7) <= positions_of(6, branch=8)
    assert positions_of(5) == positions_of(5)
    assert positions_of(5) != positions_of(5, uuid="other")


def test_undoing_a_vbucket_keeps_the_points_below() -> None:
    back = positions_of(9).rolled_back(0, 2)
    assert back[0] == Position(7, 2, 2, 2, (1,), 1)
    assert back.rolled_back(0, 0)[0][:4] == (0, 0, 0, 0)


@pytest.fixture(params=["file", "sqlite", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "file":
        return FileCheckpoint(tmp_path / "checkpoint.json")
    if request.param == "sqlite":
        return SqliteCheckpoint(tmp_path / "checkpoints.db", "mine")
    return BucketCheckpoint(request.getfixturevalue("db"), "mine")


def test_a_store_gives_back_what_was_saved_last(store: Any) -> None:
    store.delete()
    assert store.load() is None
    store.save(positions_of(1))
    store.save(positions_of(2))
    assert store.load().by_vbucket == positions_of(2).by_vbucket
    store.delete()
    store.delete()
    assert store.load() is None


def test_a_checkpoint_of_garbage_says_what_to_do(tmp_path: Path, db: Database) -> None:
    path = tmp_path / "c.json"
    path.write_text("{")
    with pytest.raises(CorruptCheckpoint, match=r"c\.json is not readable .* delete it"):
        FileCheckpoint(path).load()
    path.write_text('{"format": "something else"}')
    with pytest.raises(CorruptCheckpoint, match="not a checkpoint of upriver"):
        FileCheckpoint(path).load()
    sqlite = tmp_path / "c.db"
    sqlite.write_bytes(b"not a database, but long enough to be taken for one" * 20)
    with pytest.raises(CorruptCheckpoint, match="delete the file"):
        SqliteCheckpoint(sqlite)


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    store = FileCheckpoint(tmp_path / "c.json")
    store.save(positions_of(1))
    with pytest.raises(TypeError):
        store.save(positions_of(2), beside=object())
    assert store.load() == positions_of(1)
    assert [path.name for path in tmp_path.iterdir()] == ["c.json"]


def test_a_file_that_cannot_be_written_or_read_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot save .*nowhere"):
        FileCheckpoint(tmp_path / "nowhere" / "c.json").save(positions_of(1))
    with pytest.raises(CheckpointError, match="cannot read"):
        FileCheckpoint(tmp_path).load()


def test_a_checkpoint_is_the_old_one_or_the_new_one_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    fork = multiprocessing.get_context("fork")
    for delay in range(12):
        writer = fork.Process(target=save_for_ever, args=(path,), daemon=True)
        writer.start()
        while not path.exists():
            time.sleep(0.001)
        time.sleep(delay / 1000)
        writer.kill()
        writer.join()
        found = FileCheckpoint(path).load()
        assert found is not None
        assert {p.seqno for p in found.values()} == {found[0].seqno}, "all of one save"
        path.unlink()


def save_for_ever(path: Path) -> None:
    for n in range(1, 1_000_000):
        FileCheckpoint(path).save(Positions({vb: Position(7, n, n, n) for vb in range(512)}, "u", 512))


def test_positions_and_data_can_be_one_transaction(tmp_path: Path) -> None:
    sql = sqlite3.connect(tmp_path / "t.db", isolation_level=None)
    store = SqliteCheckpoint(connection=sql)
    store.save(positions_of(1))
    sql.execute("BEGIN")
    store.save(positions_of(2))
    sql.execute("ROLLBACK")
    assert store.load() == positions_of(1)


def test_a_checkpoint_of_another_bucket_is_refused(db: Database, tmp_path: Path) -> None:
    foreign = FileCheckpoint(tmp_path / "c.json")
    foreign.save(Positions({0: Position()}, "f00", db.topology.vbuckets))
    with pytest.raises(ForeignCheckpoint, match="use another checkpoint name, or delete it"):
        list(db.changes(checkpoint=foreign))
    foreign.save(Positions({0: Position()}, db.topology.bucket_uuid, 4))
    with pytest.raises(ForeignCheckpoint, match="4 vbuckets"):
        list(db.changes(checkpoint=foreign))
