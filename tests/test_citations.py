"""Whatever a docstring, a comment or a page refers to is there: documents, sections, files, names.

A reader follows ``docs/protocol/rollback.md#decision``, ``lake/files.py`` or ``upriver.testing.node`` and must arrive.
Nothing is imported; ``tests/code_index.py`` reads the source.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.code_index import ROOT, SOURCE, defines, identifiers, modules, python_files, resolves, tree_of

PACKAGE = SOURCE / "upriver"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

CITED_FILE = re.compile(r"(?<![\w./`$-])((?:docs|src|tests|bench|fuzz)/[\w./-]*[\w/]|[A-Z]{4,}\.md)(?:#([\w-]+))?")
CODE_SPAN = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]+)\1(?!`)")
PATH = re.compile(r"(?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|svg|toml|txt))?|[\w-]+\.(?:py|md)")
PLACE = re.compile(r"((?:\w+/)*\w+\.py):([A-Za-z_][\w.]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMENT = re.compile(r"(?:^\s*|  )# .*")  # as the formatter leaves them
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
ANCHOR = re.compile(r"<a id=\"([\w-]+)\"></a>")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
DOTTED = re.compile(r"(\w+(?:\.\w+)+)(?:\(.*\))?")
SNAKE = re.compile(r"_?[a-z]+[a-z0-9]*(?:_[a-z0-9]+)+(?:\(\))?")
CAMEL = re.compile(r"[A-Z][a-z0-9]+(?:[A-Z][a-z0-9]*)+")

# What the specification was called before it was in the repository, and its section numbers.
GONE = re.compile(r"(?<![\w/\[])(?:protocol|design|clients)\.md|\b[Tt]raps? \d+|\bsections? \d+(?:\.\d+)?")
NUMBERED = re.compile(
    r"\((\d+)\.(\d+)(?=[,):]| steps?\b)|\b(?:of|[Bb]y) (\d+)\.(\d+)(?!\d| ?(?:[MGK]i?B|[mu]?s|M|k)\b|%)"
)
SECTIONS = {1: 6, 2: 18, 5: 7, 6: 7, 7: 4, 8: 4, 9: 6, 10: 12, 12: 5, 15: 5}


class Said(NamedTuple):
    """One line of prose and where it stands."""

    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.text.strip()}"


def prose_of(path: Path, text: str) -> Iterator[Said]:
    """The comments and docstrings of a Python file, or a page without what is fenced in it."""
    if path.suffix == ".md":
        unfenced = FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
        yield from (Said(path, at, line) for at, line in enumerate(unfenced.splitlines(), 1))
        return
    lines = text.splitlines()
    docstrings: set[int] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docstrings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for at, line in enumerate(lines, 1):
        comment = COMMENT.search(line)
        if at in docstrings and not line.lstrip(' "').startswith(">>>"):
            yield Said(path, at, line)
        elif comment and at not in docstrings:
            yield Said(path, at, comment[0])


@cache
def everything() -> list[Said]:
    own = Path(__file__)
    files = [path for path in [*python_files(), *PAGES] if path != own and path.exists()]
    return [said for path in files for said in prose_of(path, path.read_text())]


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Explicit anchors, and those that headings have on every forge."""
    text = FENCE.sub("", page.read_text())
    slugs = (re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in HEADING.findall(text))
    return frozenset((*ANCHOR.findall(text), *slugs))


# ---------------------------------------------------------------------------------------------------- what is broken


def broken_citations(said: Said) -> Iterator[str]:
    """Everything in a line that leads nowhere."""
    without_links = LINK.sub("]", said.text)
    for found in CITED_FILE.finditer(without_links):
        yield from _broken_target(ROOT / found[1], found[2], found[0])
    for span in CODE_SPAN.finditer(without_links):
        yield from _broken_span(said.path, span[2].strip())
    if said.path.suffix == ".md":
        for target in LINK.findall(said.text):
            if not target.startswith(("http://", "https://", "mailto:")):
                name, _, anchor = target.partition("#")
                yield from _broken_target(said.path.parent / name if name else said.path, anchor, target)
    if GONE.search(without_links) and "RFC" not in without_links:
        yield "an old citation"
    if said.path.suffix == ".py" and any(_is_section(found) for found in NUMBERED.finditer(said.text)):
        yield "a bare section number"


def _broken_target(target: Path, anchor: str | None, shown: str) -> Iterator[str]:
    if not target.exists():
        yield f"{shown}: there is no such file"
    elif anchor and anchor not in anchors_of(target):
        yield f"{shown}: the page has no such section"


def _broken_span(path: Path, text: str) -> Iterator[str]:
    """Text between backticks: a file, a place in a file, a dotted name of ours, a class."""
    if found := PLACE.fullmatch(text):
        file = next((base / found[1] for base in (PACKAGE, ROOT) if (base / found[1]).exists()), None)
        if file is None or not defines(file, found[2]):
            yield f"{text}: there is no such place"
    elif PATH.fullmatch(text) and not text.startswith(("/", ".", "HOST", "ADDRESS")):
        bases = [ROOT, SOURCE, PACKAGE, ROOT / "docs", path.parent, path.parent.parent]
        if path.parent == ROOT / "docs":
            bases.append(PACKAGE / path.stem)  # the page of a room speaks of its files
        if _is_ours(text) and not any((base / text).exists() for base in bases):
            yield f"{text}: there is no such file"
    elif (found := DOTTED.fullmatch(text)) and _names_code(found[1]) and not _is_known(found[1]):
        yield f"{text}: there is no such name"
    elif CAMEL.fullmatch(text) and path.suffix == ".py" and text not in identifiers():
        yield f"{text}: there is no such class"
    elif SNAKE.fullmatch(text) and path.suffix == ".py" and text.removesuffix("()") not in identifiers():
        yield f"{text}: there is no such name"


def _is_ours(path: str) -> bool:
    """Whether a path begins in the repository or the package; ``lake/current`` or ``a/b`` may be anything."""
    first = path.split("/", 1)[0]
    return path.endswith(".py") or (ROOT / first).exists() or ("/" in path and (PACKAGE / first).is_dir())


def _names_code(dotted: str) -> bool:
    """Whether a dotted name claims to be code of ours: from ``upriver`` on, or ``module.Class``."""
    first, second = dotted.split(".")[:2]
    is_class = first in _stems() and CAMEL.fullmatch(second) is not None
    return first == "upriver" or is_class or f"upriver.{first}.{second}" in modules()


def _is_known(dotted: str) -> bool:
    first, rest = dotted.split(".", 1)
    if first == "upriver" or f"upriver.{first}.{rest.split('.')[0]}" in modules():
        return resolves(dotted if first == "upriver" else f"upriver.{dotted}")
    return any(resolves(f"{name}.{rest}") for name in modules() if name.rsplit(".", 1)[-1] == first)


@cache
def _stems() -> frozenset[str]:
    return frozenset(name.rsplit(".", 1)[-1] for name in modules())


def _is_section(found: re.Match[str]) -> bool:
    chapter, part = (int(each) for each in found.groups() if each is not None)
    return 1 <= part <= SECTIONS.get(chapter, 0)


# ---------------------------------------------------------------------------------------------------- the tests


def test_every_citation_leads_somewhere() -> None:
    broken = [f"{said}\n    {reason}" for said in everything() for reason in broken_citations(said)]
    assert not broken, f"{len(broken)} broken\n" + "\n".join(broken)


@pytest.mark.parametrize("text", [
    "as docs/protocol/nowhere.md says", "see docs/protocol/rollback.md#nowhere", "see NOWHERE.md", "see ``nowhere.py``",
    "``lake/nowhere.py`` has it", "``upriver.testing.nowhere``", "``upriver.nowhere``", "``framing.NoSuchThing``",
    "``wire.framing.nowhere``",
    "``NoSuchThing``", "``no_such_thing``", "``node/dispatch.py:nowhere``", "the decision (5.6)", "the rules of 5.6",
    "(5.4, step 10)",
    "protocol.md 3", "``design.md``", "clients.md", "trap 44", "section 3",
])  # fmt: skip
def test_a_wrong_citation_is_found(text: str) -> None:
    assert list(broken_citations(Said(PACKAGE / "errors.py", 1, text)))


@pytest.mark.parametrize("text", [
    "docs/protocol/rollback.md#decision, rule D", "``upriver.testing.node``", "``node/dispatch.py:dispatch``",
    "a factor between 0.5 and 1.5", "documents of 1.4 MB", "marker version 2.2", "``upriver.wire.framing.Frame.size``",
    "``wire.framing``",
    "``lake/`` and ``wire/framing.py``", "RFC 5802 section 5", "``FrameSplitter``",
])  # fmt: skip
def test_a_right_one_is_not(text: str) -> None:
    assert not list(broken_citations(Said(PACKAGE / "errors.py", 1, text)))


def test_every_page_of_the_specification_is_in_its_index() -> None:
    folder = ROOT / "docs" / "protocol"
    index = (folder / "README.md").read_text()
    assert not [page.name for page in folder.glob("*.md") if page.name != "README.md" and f"({page.name})" not in index]


def test_the_architecture_shows_the_layers_that_are_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    [block] = re.findall(r"^```text layers\n(.*?)^```$", (ROOT / "ARCHITECTURE.md").read_text(), re.M | re.S)
    assert [re.split(r"\s{2,}", line)[0] for line in block.splitlines()] == layers


OPENS_SOCKETS = re.compile(
    r"socket\.socket\(|socket\.create_\w+\(|(?:loop|asyncio)\.(?:create_connection|create_server|start_server)\("
    r"|urlopen\(|http\.client\.HTTPS?Connection\("
)


def test_the_architecture_names_every_module_that_opens_sockets() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    table = page[page.index("## Who opens sockets") :].split("\n## ", 1)[0]
    named = set(re.findall(r"`([\w/]+\.py)`", table))
    found = {str(path.relative_to(PACKAGE)) for path in python_files("src") if OPENS_SOCKETS.search(path.read_text())}
    assert named == found


def test_a_walk_has_eight_hops_at_most() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    walks = page[page.index('<a id="walks"></a>') : page.index('<a id="faults"></a>')].split("\n### ")[1:]
    assert len(walks) == 4
    assert all(1 <= len(re.findall(r"^\d\. ", walk, re.MULTILINE)) <= 8 for walk in walks)


def test_a_class_that_is_called_like_a_word_of_the_glossary_lives_in_its_home() -> None:
    homes = {name: module.path for module in modules().values() for name in module.classes}
    astray = []
    for words, cells in re.findall(
        r"^\| ([^|]+) \| [^|]+ \| ([^|]+) \|$", (ROOT / "docs/glossary.md").read_text(), re.M
    ):
        listed = [PACKAGE / home for home in re.findall(r"`([\w/.]+)`", cells)]
        for word in words.split(", "):
            path = homes.get("".join(part.capitalize() for part in re.split(r"[ -]", word)))
            if path and listed and not any(path == home or home in path.parents for home in listed):
                astray.append(f"{word}: {path.relative_to(PACKAGE)}")
    assert not astray, "\n".join(astray)
