"""The commands, as a person runs them, against a real node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from upriver.cli import cli
from upriver.client.blocking import Database
from upriver.testing import RunningNode


@pytest.fixture
def run(server: RunningNode) -> Any:
    def invoke(command: str, *arguments: str, ok: bool = True) -> Result:
        result = CliRunner().invoke(cli, [command, server.connection_string, *arguments])
        assert (result.exit_code == 0) is ok, result.output
        return result

    return invoke


def lines(result: Result) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_tail_prints_changes_as_json_lines_and_filters_them(run: Any, db: Database) -> None:
    db.set("tail:1", b'{"n": 1}')
    db.set("tail:2", b"not json")
    db.delete("tail:2")
    db.set("other", b"1")
    found = lines(run("tail", "--json", "--key", "tail:"))
    assert {(row["event"], row["key"]) for row in found} >= {("mutation", "tail:1"), ("deletion", "tail:2")}
    assert next(row["value"] for row in found if row["key"] == "tail:1") == {"n": 1}
    assert all(row["event"] == "deletion" for row in lines(run("tail", "--json", "--event", "deletion")))
    assert len(lines(run("tail", "--json", "--limit", "2"))) == 2


def test_tail_is_readable_by_people(run: Any, db: Database) -> None:
    db.set("tail:pretty", b'{"hello": "world"}')
    assert 'tail:pretty  {"hello": "world"}' in run("tail").stdout


def test_a_dump_can_be_continued_and_loaded_again(run: Any, db: Database, tmp_path: Path) -> None:
    db.set_many({b"dump:%d" % n: b'{"n": %d}' % n for n in range(500)})
    first = json.loads(run("dump", "--out", str(tmp_path), "--json", "--part-rows", "200").stdout)
    assert first["parts"] > 1
    db.set("dump:new", b'{"n": -1}')
    second = json.loads(run("dump", "--out", str(tmp_path), "--json").stdout)
    assert second["rows"] == 1
    parts = sorted(tmp_path.glob("part-*.parquet"))
    keys = [key for part in parts for key in pq.read_table(part)["key"].to_pylist()]
    assert {b"dump:%d" % n for n in range(500)} | {b"dump:new"} <= set(keys)
    db.set("dump:7", b"overwritten")
    loaded = json.loads(run("load", *map(str, parts), "--json").stdout)
    assert loaded["written"] >= 501
    assert db.get("dump:7").value == b'{"n": 7}'


def test_a_part_that_the_checkpoint_does_not_know_of_is_written_again(run: Any, db: Database, tmp_path: Path) -> None:
    run("dump", "--out", str(tmp_path), "--json")
    parts = len(list(tmp_path.glob("part-*")))
    (tmp_path / f"part-{parts + 1:06d}.parquet").write_bytes(b"half")
    (tmp_path / f"part-{parts + 2:06d}.unfinished").write_bytes(b"half")
    run("dump", "--out", str(tmp_path), "--json")
    assert len(list(tmp_path.glob("part-*"))) == parts


def test_json_lines_make_the_round_trip(run: Any, db: Database, tmp_path: Path) -> None:
    db.set("jsonl:1", b'{"deep": [1, {"a": null}]}')
    run("dump", "--out", str(tmp_path), "--format", "jsonl", "--json")
    [part] = tmp_path.glob("part-*.jsonl")
    db.delete("jsonl:1")
    run("load", str(part), "--json")
    assert json.loads(db.get("jsonl:1").value) == {"deep": [1, {"a": None}]}


def test_foreign_files_are_loaded_by_their_key_field(run: Any, db: Database, tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "a.csv", tmp_path / "b.jsonl"
    csv.write_text("id,name\ncsv:1,Ada\ncsv:2,Bob\n")
    jsonl.write_text('{"k": "jl:1", "x": 1}\n\n{"no": "key"}\n')
    assert json.loads(run("load", str(csv), "--json").stdout)["written"] == 2
    assert json.loads(db.get("csv:1").value) == {"id": "csv:1", "name": "Ada"}
    loaded = json.loads(run("load", str(jsonl), "--key", "k", "--json").stdout)
    assert loaded == {"written": 1, "deleted": 0, "skipped": 1, "without_key": 1}
    assert "1 without a field 'k' for the key (see --key)" in run("load", str(jsonl), "--key", "k").output


def test_a_line_that_is_not_json_is_named(run: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"id": "fine"}\nnot json\n')
    assert "broken.jsonl, line 2: not JSON (Expecting value at column 1)" in run("load", str(broken), ok=False).output


def test_inspect_shows_the_lag_of_a_checkpoint(run: Any, db: Database, tmp_path: Path) -> None:
    run("dump", "--out", str(tmp_path), "--json")
    db.set("inspect:1", b"1")
    checkpoint = str(tmp_path / "checkpoint.json")
    found = json.loads(run("inspect", "--checkpoint", checkpoint, "--json").stdout)
    assert found["lag"] == 1
    assert found["rolled_back"] == 0
    assert len(found["vbuckets"]) == db.topology.vbuckets
    assert "lag: 1 seqnos" in run("inspect", "--checkpoint", checkpoint).stdout


def test_errors_say_what_to_do(run: Any, tmp_path: Path) -> None:
    assert "neither 'beginning', 'now' nor a checkpoint file" in run("tail", "--from", "nowhere", ok=False).output
    assert "cannot connect" in CliRunner().invoke(cli, ["tail", "couchbase://127.0.0.1:1"]).output
    assert "UNKNOWN_COLLECTION" in run("tail", "--collection", "_default.nope", ok=False).output
    assert "there are mutation, deletion," in run("tail", "--event", "delete", ok=False).output


def test_numbers_that_make_no_sense_are_refused(run: Any, tmp_path: Path) -> None:
    assert "--limit" in run("tail", "--limit", "0", ok=False).output
    assert "--part-rows" in run("dump", "--out", str(tmp_path), "--part-rows", "0", ok=False).output


def test_dump_leaves_the_files_of_others_alone(run: Any, db: Database, tmp_path: Path) -> None:
    db.set("dump:mine", b"1")
    theirs = tmp_path / "part-00001-5e1c.snappy.parquet"
    theirs.write_bytes(b"theirs")
    run("dump", "--out", str(tmp_path), "--json")
    run("dump", "--out", str(tmp_path), "--json")
    assert theirs.read_bytes() == b"theirs"
    (tmp_path / "checkpoint.json").unlink()
    assert "no checkpoint.json that knows of them" in run("dump", "--out", str(tmp_path), ok=False).output
    assert list(tmp_path.glob("part-000001.parquet"))


def test_the_error_for_a_misspelt_bucket_names_it(run: Any) -> None:
    told = run("tail", "--bucket", "nope", ok=False).output
    assert "there is no bucket 'nope' for you" in told
    assert "{" not in told


def test_a_file_that_cannot_be_written_is_one_line_without_a_traceback(run: Any) -> None:
    told = run("dump", "--out", "/proc/nowhere", ok=False).output
    assert "upriver: /proc/nowhere: No such file or directory" in told
