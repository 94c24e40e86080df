"""``upriver verify`` finds every planted fault and names it; only what the sync has not reached yet is late."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.lake.synced import DEFAULT, Synced
from tests.support.by_id import ById
from upriver.cli import cli
from upriver.client.blocking import connect
from upriver.errors import ConfigError
from upriver.lake import Comparison
from upriver.testing import RunningNode, node

UIDS = itertools.count(1)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningNode]:
    with node(vbuckets=4, enable_faults=True, lazy=True) as found:
        yield found


@pytest.fixture
def lake(running: RunningNode, tmp_path: Path) -> Iterator[Synced]:
    made = Synced(running, tmp_path / "lake")
    made.set_manifest(next(UIDS))
    made.put(40)
    yield made
    made.db.close()


def wrong(found: Comparison) -> dict[str, list[str]]:
    """What differs, by kind."""
    kinds = ("missing", "extra", "different", "duplicate", "lost_files")
    return {kind: getattr(found, kind) for kind in kinds if getattr(found, kind)}


def judged(lake: Synced, **more: Any) -> dict[str, list[str]]:
    return wrong(lake.verify(**more)[DEFAULT])


def test_tables_that_follow_are_equal(lake: Synced) -> None:
    lake.sync()
    lake.db.delete("k3")
    lake.db.set("k4", b"no json")
    lake.db.set("k5", b'{"n": "three"}', expiry=2_000_000_000)
    lake.sync()
    found = lake.verify()[DEFAULT]
    assert (found.equal, found.late, found.bucket_rows) == (True, 0, found.table_rows)


def test_a_row_that_is_gone_is_missing(lake: Synced) -> None:
    lake.sync()
    lake.delta().delete("_key = 'k7'")
    assert judged(lake) == {"missing": ["k7"]}


def test_a_row_too_many_is_extra(lake: Synced) -> None:
    lake.db.set("phantom", b'{"n": 1}')
    lake.sync()
    lake.db.delete("phantom")
    lake.sync(apply=False)
    assert judged(lake) == {"extra": ["phantom"]}


def test_a_row_that_is_there_twice_is_a_duplicate(lake: Synced) -> None:
    from deltalake import write_deltalake

    lake.sync()
    table = lake.delta().to_pyarrow_table()
    write_deltalake(lake.delta(), table.slice(11, 1), mode="append")
    found = lake.verify()[DEFAULT]
    assert wrong(found) == {"duplicate": table.column("_key").slice(11, 1).to_pylist()}
    assert found.table_rows == found.bucket_rows + 1


@pytest.mark.parametrize(
    "update",
    [
        {"n": "-1"},
        {"n": "null"},
        {"odd": "'{\"a\": [1]}'"},
        {"_rest": "'{\"a b\": 2}'"},
        {"_rest": "null"},
        {"_seqno": "_seqno + 1"},
        {"_cas": "1"},
        {"_expires_at": "_changed_at"},
        {"_value": "arrow_cast('x', 'Binary')"},
        {"_vbucket": "(_vbucket + 1) % 4"},
        {"_vbucket": "99"},
    ],
    ids=str,
)
def test_a_row_that_changed_anywhere_is_different(lake: Synced, update: dict[str, str]) -> None:
    lake.db.set("odd", b'{"n": 1, "odd": {"a": [1, null]}, "a b": 1}')
    lake.sync()
    lake.delta().update(updates=update, predicate="_key = 'odd'")
    assert judged(lake) == {"different": ["odd"]}


def test_a_data_file_that_is_lost_is_named_with_what_it_held(lake: Synced) -> None:
    lake.sync()
    keys = lake.delta().to_pyarrow_table().column("_key").to_pylist()
    (file,) = Path(lake.root, "current", DEFAULT).rglob("vb*/*.parquet")
    file.unlink()
    found = lake.verify()[DEFAULT]
    assert found.missing == sorted(keys)
    assert [Path(name).name for name in found.lost_files] == [file.name]


def test_a_file_that_is_damaged_is_named(lake: Synced) -> None:
    lake.sync()
    (file,) = Path(lake.root, "current", DEFAULT).rglob("vb*/*.parquet")
    file.write_bytes(file.read_bytes()[:100])
    assert [Path(name).name for name in lake.verify()[DEFAULT].lost_files] == [file.name]


def test_a_change_that_was_lost_is_not_late_for_ever(lake: Synced) -> None:
    """The log of its vbucket has nothing newer, but the offset says that it was read."""
    lake.sync()
    lake.db.set("k1", b'{"n": -1}')
    lake.db.set("new", b'{"n": -1}')
    lake.db.delete("k2")
    lake.sync(apply=False)
    assert judged(lake) == {"missing": ["new"], "extra": ["k2"], "different": ["k1"]}


def test_only_what_lies_beyond_the_committed_offset_is_late(lake: Synced) -> None:
    lake.sync()
    lake.db.set("k1", b'{"n": -1}')
    lake.db.set("later", b'{"n": -1}')
    lake.db.delete("k2")
    found = lake.verify()[DEFAULT]
    assert (found.equal, found.late) == (True, 3)
    lake.delta().delete("_key = 'k7'")
    found = lake.verify()[DEFAULT]
    assert (wrong(found), found.late) == ({"missing": ["k7"]}, 3)


def test_a_batch_that_the_tables_have_and_spark_has_not_noted_is_no_difference(lake: Synced) -> None:
    lake.sync()
    lake.db.set("k1", b'{"n": -1}')
    lake.sync(note=False)
    assert judged(lake) == {}
    lake.delta().update(updates={"n": "7"}, predicate="_key = 'k1'")
    assert judged(lake) == {"different": ["k1"]}  # it is the same change, so it must say the same


def test_documents_that_went_with_their_collection_are_gone(lake: Synced) -> None:
    orders = {"name": "orders", "uid": "20"}
    lake.set_manifest(next(UIDS), orders)
    ById(lake.db, 0x20).set_many({b"o%d" % n: b'{"n": 1}' for n in range(100)})
    lake.sync()
    again = {"name": "orders", "uid": "21"}
    lake.set_manifest(next(UIDS))
    lake.set_manifest(next(UIDS), again)
    ById(lake.db, 0x21).set_many({b"o%d" % n: b'{"n": 2}' for n in range(5)})
    found = lake.verify("_default.orders")["_default.orders"]
    assert (found.bucket_rows, found.equal, found.late) == (5, True, 100)
    lake.sync(apply=False)
    found = lake.verify("_default.orders")["_default.orders"]
    assert (len(found.different), len(found.extra)) == (5, 95)


def test_a_flush_is_honoured(lake: Synced) -> None:
    lake.set_manifest(next(UIDS), {"name": "flushed", "uid": "30"})
    ById(lake.db, 0x30).set_many({b"o%d" % n: b'{"n": 1}' for n in range(20)})
    lake.sync()
    uid = next(UIDS)
    lake.set_manifest(uid, {"name": "flushed", "uid": "30", "flush_uid": f"{uid:x}"})
    found = lake.verify("_default.flushed")["_default.flushed"]
    assert (found.bucket_rows, found.equal, found.late) == (0, True, 20)
    lake.sync()
    found = lake.verify("_default.flushed")["_default.flushed"]
    assert (found.bucket_rows, found.table_rows, found.equal, found.late) == (0, 0, True, 0)


def test_rows_of_a_dropped_collection_are_extra(lake: Synced) -> None:
    lake.set_manifest(next(UIDS), {"name": "old", "uid": "40"})
    ById(lake.db, 0x40).set_many({b"o%d" % n: b'{"n": 1}' for n in range(20)})
    lake.sync()
    lake.set_manifest(next(UIDS))
    assert lake.verify("_default.old")["_default.old"].late == 20
    lake.sync(apply=False)
    assert len(lake.verify("_default.old")["_default.old"].extra) == 20


def test_a_collection_that_was_never_loaded_is_named(lake: Synced) -> None:
    lake.set_manifest(next(UIDS), {"name": "unloaded", "uid": "50"}, {"name": "empty", "uid": "51"})
    lake.sync()
    ById(lake.db, 0x50).set_many({b"o%d" % n: b'{"n": 1}' for n in range(20)})
    found = lake.verify()
    assert (found["_default.unloaded"].equal, found["_default.unloaded"].late) == (True, 20)
    assert (found["_default.empty"].equal, found["_default.empty"].has_table) == (True, False)
    lake.sync(apply=False)
    found = lake.verify()
    assert (len(found["_default.unloaded"].missing), found["_default.unloaded"].has_table) == (20, False)


def test_a_rollback_that_was_not_repaired_is_found(lake: Synced) -> None:
    lake.sync()
    before = lake.keys_of(1, "k")[0]
    lake.db.set(before, b'{"n": "lost"}')
    lost = lake.keys_of(1, "lost")[0]
    lake.db.set(lost, b'{"n": "lost"}')
    lake.sync()
    lake.fault("failover", vbucket=1, lose=2)
    found = lake.verify()[DEFAULT]
    assert (found.equal, found.late) == (True, 2)  # the feed will take it back
    lake.sync(apply=False)
    assert judged(lake) == {"extra": [lost], "different": [before]}


def test_a_rollback_that_was_repaired_is_equal(lake: Synced) -> None:
    lake.sync()
    for number in range(12):
        lake.db.set(f"k{number}", b'{"n": "lost"}')
    lake.sync()
    for vbucket in range(4):
        lake.fault("failover", vbucket=vbucket, lose=2)
    lake.sync()
    found = lake.verify()[DEFAULT]
    assert (wrong(found), found.late) == ({}, 0)


def test_a_fault_below_a_pending_rollback_is_found(lake: Synced) -> None:
    lake.sync()
    lake.db.set(lake.keys_of(2, "lost")[0], b"{}")
    lake.sync()
    lake.fault("failover", vbucket=2, lose=1)
    key = lake.keys_of(2, "k")[0]
    lake.delta().delete(f"_key = '{key}'")
    # The last offset was complete, so the rollback goes to 0 or to the fork. Either way the fault shows in the end.
    lake.sync()
    assert judged(lake) == {"missing": [key]}


def test_keys_that_look_alike_are_two_rows(lake: Synced) -> None:
    keys = [b"\xff", rb"\xff", rb"\\xff", b"\\\xff", rb"a\b", rb"\\\xff", "\ufffd".encode()]
    lake.db.set_many({key: b'{"n": %d}' % n for n, key in enumerate(keys)})
    lake.sync()
    assert judged(lake) == {}
    rows = lake.delta().to_pyarrow_table(columns=["_key", "n"]).to_pylist()
    assert len({row["_key"] for row in rows}) == len(rows)
    assert {row["_key"] for row in rows} >= {r"\xff", r"\\xff", r"a\b", "\ufffd"}
    lake.delta().delete(r"_key = '\xff'")
    assert judged(lake) == {"missing": [r"\xff"]}


LONG = 2**64 + 1


def test_integers_of_any_size_are_kept_exactly(lake: Synced) -> None:
    lake.db.set("big", b'{"n": %d, "odd": {"deep": [%d]}, "other": %d}' % (LONG, -LONG, 10**40))
    lake.db.set("twice", b'{"n": %d}' % (2**53 + 1))
    lake.sync()
    assert judged(lake) == {}
    lake.put(5, "half", '{"n": %d.5}')  # the column becomes double
    lake.db.set("big", b'{"n": %d, "odd": {"deep": [%d]}, "other": %d}' % (LONG, -LONG, 10**40 + 1))
    lake.sync()
    assert judged(lake) == {}
    (row,) = [row for row in lake.delta().to_pyarrow_table().to_pylist() if row["_key"] == "big"]
    assert (json.loads(row["_rest"])["n"], row["n"]) == (LONG, None)


def test_an_integer_that_was_rounded_is_noticed(lake: Synced) -> None:
    lake.db.set("big", b'{"n": %d}' % LONG)
    lake.sync()
    lake.delta().update(updates={"_rest": f"'{{\"n\": {float(LONG)!r}}}'"}, predicate="_key = 'big'")
    assert judged(lake) == {"different": ["big"]}


def test_the_view_that_was_asked_for_is_judged(running: RunningNode, tmp_path: Path) -> None:
    lake = Synced(running, tmp_path / "lake", small_rows=0, share=100)
    lake.put(40)
    lake.sync()
    lake.tables.collection(DEFAULT).advance(lake.number - 1, force=True)
    lake.db.set("k1", b'{"n": "new"}')
    lake.db.delete("k2")
    lake.sync()
    assert judged(lake) == {}
    found = lake.verify(view="current")[DEFAULT]
    assert (found.view, wrong(found), found.waiting) == ("current", {"different": ["k1"], "extra": ["k2"]}, 2)
    lake.tables.collection(DEFAULT).advance(lake.number - 1, force=True)
    assert judged(lake, view="current") == {}
    lake.db.close()


def test_the_offsets_that_a_sync_writes_count_before_its_checkpoint(lake: Synced) -> None:
    lake.set_manifest(next(UIDS), {"name": "left", "uid": "60"})
    ById(lake.db, 0x60).set("o", b"{}")
    lake.sync(note=False)
    lake.note_as_now(filter={"scope": "", "collections": [DEFAULT]})
    assert [found.name for found in lake.verify().values()] == [DEFAULT]
    lake.delta().delete("_key = 'k7'")
    assert judged(lake) == {"missing": ["k7"]}
    with pytest.raises(ConfigError, match=r"no collection '_default.left'.*the sync of this lake reads"):
        lake.verify("_default.left")


def test_a_vbucket_that_the_last_batch_left_unread_is_late_down_to_where_it_goes_back(lake: Synced) -> None:
    lake.sync(note=False)
    old, new = lake.keys_of(1, "k")[0], lake.keys_of(1, "unread")[0]
    at = lake.offset()["seqnos"].split(" ")[1]
    lake.db.set(new, b"{}")
    lake.sync(apply=False, note=False)
    behind = lake.offset()["behind"].split(" ")
    behind[1] = "1"
    place = {"behind": " ".join(behind)}
    for told in ({"offset": place, "unread": {"1": int(at)}}, {"offset": {**place, "unread": "2"}}):
        lake.note_as_now(**told)
        found = lake.verify()[DEFAULT]
        assert (wrong(found), found.late) == ({}, 1)
    lake.delta().delete(f"_key = '{old}'")
    assert judged(lake) == {"missing": [old]}
    lake.note_as_now()
    assert judged(lake) == {"missing": sorted([old, new])}


def test_writes_during_verify_make_no_difference(lake: Synced) -> None:
    lake.sync()
    stop = threading.Event()

    def write() -> None:
        with connect(lake.node.connection_string) as db:
            for number in itertools.count():
                db.set_many({b"k%d" % (n % 40): b'{"n": %d}' % n for n in range(number, number + 7)})
                db.delete(f"k{number % 40}")
                if stop.is_set():
                    return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = [lake.verify()[DEFAULT] for _ in range(10)]
    finally:
        stop.set()
        writer.join()
    assert [wrong(one) for one in found] == [{}] * 10
    assert found[-1].late


def test_what_a_wider_filter_has_not_brought_yet_is_late(lake: Synced) -> None:
    lake.set_manifest(next(UIDS), {"name": "wider", "uid": "61"})
    ById(lake.db, 0x61).set_many({b"o%d" % n: b"{}" for n in range(20)})
    lake.sync(note=False)
    lake.delta("current", "_default.wider").delete()
    lake.note_as_now({"filters": ["*", "0"], "filter_of": "1111"})
    found = lake.verify()
    assert (found["_default.wider"].late, found["_default.wider"].equal) == (20, True)
    lake.note_as_now({"filters": ["*", "0"], "filter_of": "0000"})
    assert len(lake.verify()["_default.wider"].missing) == 20
    lake.note_as_now({"filters": ["s0"]})
    assert len(lake.verify()["_default.wider"].missing) == 20


def test_tables_that_are_held_back_in_a_load_are_late_and_what_the_log_lacks_is_missing(lake: Synced) -> None:
    lake.sync(lag=10**9)
    found = lake.verify()[DEFAULT]
    assert (wrong(found), found.late) == ({}, found.bucket_rows)
    lake.sync()
    lake.put(30, "held")
    lake.sync(lag=10**9)
    found = lake.verify()[DEFAULT]
    assert (wrong(found), found.late) == ({}, 30)
    lake.db.set("lost", b"{}")
    lake.sync(apply=False)
    found = lake.verify()[DEFAULT]
    assert (wrong(found), found.late) == ({"missing": ["lost"]}, 30)


def test_tables_of_a_bucket_that_was_created_again_are_refused(lake: Synced) -> None:
    lake.sync()
    settings = Path(lake.root, "_upriver", "lake.json")
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "uuid": "another"}))
    with pytest.raises(ConfigError, match="with uuid another; this one has uuid"):
        lake.verify()


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["verify", *arguments])


def test_nothing_to_verify_is_an_error(lake: Synced, tmp_path: Path) -> None:
    where = lake.node.connection_string
    nothing = run(where, "--to", str(tmp_path / "nolake"))
    assert (nothing.exit_code, "there are no tables" in nothing.output) == (1, True)
    unread = run(where, "--to", lake.root)
    assert (unread.exit_code, "no batch is committed" in unread.output) == (1, True)
    lake.sync()
    assert run(where, "--to", lake.root).exit_code == 0
    unknown = run(where, "--to", lake.root, "--collections", "_default.nosuch")
    assert unknown.exit_code == 1
    assert "no collection '_default.nosuch' to verify; there are _default._default" in unknown.output
    assert run(where, "--to", lake.root, "--scope", "nosuch").exit_code == 1
    assert run(where, "--to", lake.root, "--bucket", "other").exit_code == 1
    assert run(where, "--to", lake.root, "--view", "nosuch").exit_code == 2
    assert run(where).exit_code == 2


def test_the_command_says_what_it_judged_and_takes_the_options_of_the_sync(lake: Synced, tmp_path: Path) -> None:
    lake.sync()
    (tmp_path / "secret").write_text("none\n")
    config = tmp_path / "sync.toml"
    config.write_text(f'connection = "{lake.node.connection_string}"\nto = "{lake.root}"\nevery = "5s"\n')
    found = run("--config", str(config), "--password-file", str(tmp_path / "secret"), "--network", "default")
    assert (found.exit_code, "view: current with its tail" in found.output) == (0, True)
    lake.delta().delete("_key = 'k7'")
    found = run("--config", str(config))
    assert found.output.splitlines()[-1] == "1 difference (view: current with its tail)"
    assert "  missing: k7" in found.output
    found = run("--config", str(config), "--view", "current", "--json")
    assert found.exit_code == 1
    assert json.loads(found.output.splitlines()[0])["missing"] == ["k7"]


def test_a_row_whose_deleted_is_null_is_missing_as_it_is_for_queries(lake: Synced) -> None:
    lake.sync()
    lake.delta().update(updates={"_deleted": "null"}, predicate="_key = 'k7'")
    assert judged(lake) == {"missing": ["k7"]}


def test_a_lost_tail_is_not_taken_for_one_that_does_not_exist_yet(running: RunningNode, tmp_path: Path) -> None:
    made = Synced(running, tmp_path / "lake", small_rows=0)
    made.put(40)
    made.sync()
    made.db.set("k1", b'{"n": -1}')
    made.sync()
    made.note_as_now()
    shutil.rmtree(Path(made.root, "tail", DEFAULT))
    assert judged(made) == {"different": ["k1"]}
    made.db.close()


def test_a_table_that_no_reader_can_open_is_named(lake: Synced) -> None:
    lake.sync()
    entry = max(Path(lake.root, "current", DEFAULT, "_delta_log").glob("*.json"))
    entry.write_text(entry.read_text()[:30])
    with pytest.raises(ConfigError, match=f"a Delta reader cannot open .*/current/{DEFAULT}"):
        lake.verify()


def test_a_table_without_one_of_the_meta_columns_is_named(lake: Synced) -> None:
    from deltalake import write_deltalake

    lake.sync()
    rows = lake.delta().to_pyarrow_table().drop_columns(["_cas"])
    write_deltalake(lake.delta(), rows, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(ConfigError, match="has no column _cas"):
        lake.verify()
