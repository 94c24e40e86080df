"""The ``upriver`` command answers at once: nothing heavy is imported before it is needed."""

import json
import subprocess
import sys

import pytest

from upriver import __version__
from upriver.cli import COMMANDS

HEAVY = {"numba", "numpy", "pyarrow", "pyspark", "rich", "dpkt", "orjson", "asyncio"}
PROBE = """
import json, sys
sys.argv = ["upriver", *sys.argv[1:]]
try:
    {statement}
except SystemExit:
    pass
print(json.dumps(sorted(name for name in sys.modules if "." not in name)))
"""


def modules_after(statement, *args):
    code = PROBE.format(statement=statement)
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout, set(json.loads(done.stdout.splitlines()[-1]))


def test_help_lists_every_command_and_imports_nothing_heavy():
    shown, loaded = modules_after("from upriver.cli import main; main()", "--help")

    assert all(f"  {name} " in shown for name in COMMANDS)
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(
    "name", ["upriver", "upriver.wire", "upriver.wire.inspect.dump", "upriver.errors", "upriver.model"]
)
def test_importing_the_objects_loads_no_numba_numpy_or_arrow(name):
    _, loaded = modules_after(f"import {name}")

    assert loaded & {"numba", "numpy", "pyarrow", "pyspark", "asyncio", "socket"} == set()


def test_version():
    done = subprocess.run([sys.executable, "-m", "upriver", "--version"], capture_output=True, text=True, timeout=60)

    assert done.stdout.strip() == f"upriver, version {__version__}"


def test_every_command_has_one_line_of_help_and_a_place():
    for name, command in COMMANDS.items():
        assert command.help.endswith("."), name
        assert ":" in command.target, name


def test_an_unknown_command_is_a_usage_error():
    done = subprocess.run([sys.executable, "-m", "upriver", "swim"], capture_output=True, text=True, timeout=60)

    assert done.returncode == 2
    assert "No such command 'swim'" in done.stderr


@pytest.mark.parametrize("name", ["cluster", "collections", "buckets", "fault", "user", "wire"])
def test_the_list_of_a_group_shows_every_summary_whole(name):
    done = subprocess.run([sys.executable, "-m", "upriver", name, "--help"], capture_output=True, text=True, timeout=60)

    assert "..." not in done.stdout.partition("Commands:")[2]
