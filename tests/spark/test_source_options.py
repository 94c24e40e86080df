"""Options: parsed once, and a mistake is answered with what is valid."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from upriver.errors import ConfigError
from upriver.model import OnRollback
from upriver.spark.options import ReadOptions, ValueFormat, WriteOptions

HERE = {"connection": "couchbase://127.0.0.1:12345"}


def test_names_are_taken_in_any_case_as_spark_gives_them():
    options = ReadOptions.parse({**HERE, "maxrowspertrigger": "7", "KEYSONLY": "TRUE", "collections": "a.b, c"})
    assert (options.max_rows_per_trigger, options.keys_only, options.collections) == (7, True, ("a.b", "c"))


def test_an_unknown_option_is_answered_with_all_valid_ones():
    with pytest.raises(ConfigError, match=r"no option 'startingoffset'; valid are .*startingOffsets.*xattrs"):
        ReadOptions.parse({**HERE, "startingOffset": "latest"})


@pytest.mark.parametrize(("name", "text", "says"), [
    ("valueFormat", "json", "binary, string, variant, struct"),
    ("onRollback", "ignore", "emit, fail"),
    ("maxRowsPerTrigger", "many", "whole number above 0"),
    ("includeValue", "yes", "true or false"),
    ("startingOffsets", "tomorrow", "earliest, latest, a timestamp"),
    ("startingOffsets", "{broken", "not JSON"),
    ("endingOffsets", "earliest", "latest, or JSON"),
    ("valueFormat", "struct", "valueSchema"),
    ("connection", "mysql://h", "couchbase://"),
])  # fmt: skip
def test_a_wrong_value_is_refused_with_what_is_allowed(name, text, says):
    with pytest.raises(ConfigError, match=says):
        ReadOptions.parse({**HERE, name: text})


def test_without_a_connection_the_error_shows_how_to_give_one():
    with pytest.raises(ConfigError, match=r'option\("connection"'):
        ReadOptions.parse({})


def test_a_timestamp_reads_everything_and_leaves_out_what_is_older():
    options = ReadOptions.parse({**HERE, "startingOffsets": "2026-01-31T12:00:00"})
    assert options.starting == "earliest"
    assert options.since == datetime(2026, 1, 31, 12, tzinfo=UTC)


def test_the_password_is_never_shown(tmp_path):
    options = ReadOptions.parse({**HERE, "username": "u", "password": "hush-hush"})
    assert "hush-hush" not in repr(options) + repr(options.connect_options())


def test_a_password_file_is_read_where_the_connection_is_made(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text("from-file\n")
    options = ReadOptions.parse({**HERE, "username": "u", "passwordFile": str(file)})
    assert options.connect_options().password == "from-file"
    monkeypatch.setenv("UPRIVER_PASSWORD", "from-environment")
    assert ReadOptions.parse({**HERE, "username": "u"}).connect_options().password == "from-environment"
    with pytest.raises(ConfigError, match="passwordFile"):
        ReadOptions.parse({**HERE, "passwordFile": str(tmp_path / "missing")})


def test_a_value_schema_alone_means_struct():
    options = ReadOptions.parse({**HERE, "valueSchema": "a INT"})
    assert options.format is ValueFormat.STRUCT
    assert options.on_rollback is OnRollback.EMIT


def test_dead_letters_need_a_folder():
    with pytest.raises(ConfigError, match="deadLetter"):
        WriteOptions.parse({**HERE, "onError": "deadletter"})
