"""Every ``python`` and ``console`` block in README.md, ARCHITECTURE.md and docs/ runs, and prints what the page says.

A python block is a program, or an interactive session with its output. A console block is ``$ command`` lines, each
followed by its output; ``...`` stands for anything. Blocks of one page run in order in one empty directory, with the
repository's root as ``$UPRIVER``. Blocks in any other language are not run.
"""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SECONDS = 120


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [Block(page, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in FENCE.finditer(text)]


PAGES_WITH_BLOCKS = [page for page in PAGES if page.exists() and blocks_of(page)]


@pytest.mark.parametrize("page", PAGES_WITH_BLOCKS, ids=lambda page: page.name)
def test_every_example_on_the_page_does_what_it_shows(page, tmp_path):
    for block in blocks_of(page):
        if block.language == "python":
            run(block, python_command(block, tmp_path), tmp_path)
        else:
            for command, expected in commands_of(block.text):
                shown = run(block, ["bash", "-c", command], tmp_path)
                assert matches(expected, shown), f"{block.page.name}:{block.line}: $ {command}\n{shown}"


def python_command(block: Block, folder: Path) -> list[str]:
    if not block.text.startswith(">>> "):
        return [sys.executable, "-c", block.text]
    session = folder / f"line{block.line}.txt"  # an interactive session: doctest compares what it prints
    session.write_text(block.text)
    return [sys.executable, "-m", "doctest", session.name]


def commands_of(text: str) -> list[tuple[str, str]]:
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    return [tuple(re.split(r"(?<!\\)\n", part, maxsplit=1)) for part in parts]  # type: ignore[misc]


def run(block: Block, command: list[str], folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "UPRIVER": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    said = done.stdout + done.stderr
    assert "Traceback" not in said, f"{block.page.name}:{block.line}\n{said}"
    if block.language == "python":
        assert done.returncode == 0, f"{block.page.name}:{block.line}\n{said}"
    return said


def matches(expected: str, shown: str) -> bool:
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(expected.strip() + "\n", shown.strip() + "\n", flags)


def test_the_readme_has_examples_that_run():
    assert ROOT / "README.md" in PAGES_WITH_BLOCKS
