"""A loaded dump restores documents in their collections, without changes that were undone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.client.client_world import provoke, set_manifest
from tests.support.by_id import ById
from tests.support.on_disk import until_on_disk
from upriver.cli import cli
from upriver.client.blocking import Database, connect
from upriver.errors import KeyNotFound
from upriver.testing import RunningNode, node


@pytest.fixture(scope="module")
def shop() -> Iterator[RunningNode]:
    with node(vbuckets=1, enable_faults=True, lazy=True) as running:
        yield running


@pytest.fixture
def db(shop: RunningNode) -> Iterator[Database]:
    with connect(shop.connection_string) as database:
        yield database


def run(server: RunningNode, command: str, *arguments: Any, ok: bool = True) -> str:
    result = CliRunner().invoke(cli, [command, server.connection_string, *map(str, arguments)])
    assert (result.exit_code == 0) is ok, result.output
    return result.output


def has(db: Database, key: str) -> bool:
    try:
        db.get(key)
    except KeyNotFound:
        return False
    return True


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_a_dump_comes_back_without_what_was_undone(shop: RunningNode, db: Database, tmp_path: Path, kind: str) -> None:
    uid = int(db.manifest()["uid"], 16) + 1
    set_manifest(db, uid, **{f"{kind}_a": 16 * uid, f"{kind}_b": 16 * uid + 1})
    values = {b"text": b"a", b"string": b'"a"', b"null": b"null", b"number": b"7", b"raw": b"\xff", b"empty": b""}
    db.set_many(values)
    ById(db, 16 * uid).set_many({b"same": b"1"})
    ById(db, 16 * uid + 1).set_many({b"same": b"2", b"of b": b"3"})
    dump = ("dump", "--out", tmp_path, "--format", kind, "--json")
    run(shop, *dump)
    high = db.high_seqnos()[0]
    until_on_disk(db)
    db.set("never happened", b"1")
    run(shop, *dump)
    provoke(shop.http_port, "rollback", vbucket=0, seqno=high)
    db.set("happened", b"1")
    set_manifest(db, uid + 1, **{f"{kind}_a": 16 * uid})
    run(shop, *dump)
    for key in values:
        db.delete(key)
    ById(db, 16 * uid).delete("same")
    run(shop, "load", *sorted(tmp_path.glob("part-*")), "--json")
    assert {key: db.get(key).value for key in values} == values
    assert ById(db, 16 * uid).get("same").value == b"1"
    assert has(db, "happened")
    assert not has(db, "never happened")
    assert not has(db, "same")
    assert not has(db, "of b")


def test_documents_of_a_missing_collection_are_not_loaded_into_another(
    shop: RunningNode, db: Database, tmp_path: Path
) -> None:
    lines = tmp_path / "part-000001.jsonl"
    row = {"event": "mutation", "vbucket": 0, "seqno": 1, "scope": "shop", "collection": "gone", "key": "k", "value": 1}
    lines.write_text(json.dumps(row) + "\n")
    assert "documents of shop.gone, which this bucket does not have" in run(shop, "load", lines, ok=False)
    run(shop, "load", lines, "--collection", "_default._default")
    assert db.get("k").value == b"1"


def test_keys_are_loaded_as_they_are_written(shop: RunningNode, db: Database, tmp_path: Path) -> None:
    table, binary = tmp_path / "a.csv", tmp_path / "b.parquet"
    table.write_text("id,n\n007,1\n008,2\n")
    pq.write_table(pa.table({"id": [b"bytes"], "n": [1]}), binary)
    run(shop, "load", table, binary)
    assert json.loads(db.get("007").value) == {"id": "007", "n": 1}
    assert json.loads(db.get("bytes").value) == {"id": "bytes", "n": 1}


def test_lines_without_values_overwrite_nothing(shop: RunningNode, db: Database, tmp_path: Path) -> None:
    db.set("kept", b"value")
    lines = tmp_path / "keys.jsonl"
    lines.write_text(run(shop, "tail", "--json", "--keys-only"))
    run(shop, "load", lines)
    assert db.get("kept").value == b"value"
