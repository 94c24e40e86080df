"""Options of ``upriver sync``: a wrong value is refused before anything starts, and the error names the option."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from upriver.cli import cli
from upriver.errors import ConfigError
from upriver.lake.options import SyncOptions

GIVEN = {"connection": "couchbase://db", "to": "lake"}


@pytest.mark.parametrize(("option", "value"), [
    ("every", "5"), ("give_up_after", "soon"), ("max_rows", 0), ("max_bytes", -1), ("partitions", -1),
])  # fmt: skip
def test_a_wrong_value_is_refused_and_the_error_names_the_option(option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=option):
        SyncOptions.parse({**GIVEN, option: value})


def test_host_and_port_are_enough() -> None:
    assert SyncOptions.parse({**GIVEN, "connection": "db:11210"}).connection == "couchbase://db:11210"


def test_an_error_in_the_file_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "sync.toml"
    path.write_text('connecton = "couchbase://db"\n')
    with pytest.raises(ConfigError, match=r"sync\.toml: sync has no option 'connecton'"):
        SyncOptions.load(str(path), {})


@pytest.mark.parametrize("command", ["sync", "verify"])
def test_a_command_without_its_arguments_exits_with_a_usage_error(command: str) -> None:
    assert CliRunner().invoke(cli, [command]).exit_code == 2
