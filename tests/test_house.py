"""The house rules that no linter knows: one name for one class, a plate on every door, folders of a readable size."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.code_index import ROOT, SOURCE, modules, names_of, python_files, tree_of

MOST_MODULES = 15  # in one folder; more than that is two rooms
LONGEST_FILE = 500  # lines of a source file; the aim is 150 to 450
PLATE_LINES = range(2, 13)


def test_a_public_class_name_is_used_once() -> None:
    homes = defaultdict(list)
    for dotted, module in modules().items():
        for name in module.classes:
            if not name.startswith("_"):
                homes[name].append(dotted)
    _none({name: found for name, found in homes.items() if len(found) > 1})


def test_every_module_says_what_it_is_for() -> None:
    silent = [str(path.relative_to(ROOT)) for path in python_files("src") if not _first_line(path) and _has_code(path)]
    _none(silent)


def test_every_package_has_a_plate_on_its_door() -> None:
    """What is in it, what it promises, what it may touch: two lines at least, and not a page."""
    bad = {}
    for path in python_files("src"):
        lines = (ast.get_docstring(tree_of(path)) or "").splitlines()
        if path.name == "__init__.py" and len(lines) not in PLATE_LINES:
            bad[str(path.parent.relative_to(SOURCE))] = len(lines)
    _none(bad)


def test_a_folder_can_be_seen_at_a_glance() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in python_files("src"):
        counts[str(path.parent.relative_to(SOURCE))] += path.name != "__init__.py"
    _none({folder: count for folder, count in counts.items() if count > MOST_MODULES})


def test_a_file_can_be_read_in_one_sitting() -> None:
    lengths = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in python_files("src")}
    _none({path: length for path, length in lengths.items() if length > LONGEST_FILE})


def test_an_options_module_holds_the_options_of_its_room_and_somebody_reads_them() -> None:
    imported = _imports()
    bad = []
    for dotted, module in modules().items():
        if module.path.name == "options.py":
            public = [name for name in module.classes if not name.startswith("_")]
            if not any(name.endswith("Options") for name in public) or dotted not in imported:
                bad.append(dotted)
    _none(bad)


def test_every_module_is_imported_or_is_a_door() -> None:
    """A module that nobody imports, and that no entry point names, is dead."""
    imported, texts = _imports(), {text for module in modules().values() for text in module.texts}
    settings = (ROOT / "pyproject.toml").read_text()
    dead = [
        dotted
        for dotted, module in modules().items()
        if module.path.name not in ("__init__.py", "__main__.py")
        and dotted not in imported
        and dotted not in texts
        and dotted not in settings
        and not any(
            text.endswith(f".{dotted.rsplit('.', 1)[-1]}") or text == dotted.rsplit(".", 1)[-1] for text in texts
        )
    ]
    _none([dotted for dotted in dead if dotted != "upriver.testing"])


def test_every_property_grows_with_the_nightly_profile() -> None:
    """A plain number in ``@settings`` would keep ``make nightly`` as small as ``make test``."""
    plain = re.compile(r"\bmax_examples=\d|\bderandomize=")
    tests = [path for path in python_files() if path.name.startswith("test_") and path != Path(__file__)]
    _none([str(path.relative_to(ROOT)) for path in tests if plain.search(path.read_text())])


def _none(found: dict[str, object] | list[str]) -> None:
    shown = [f"{name}: {what}" for name, what in found.items()] if isinstance(found, dict) else found
    assert not shown, "\n".join(sorted(shown))


def _imports() -> set[str]:
    """Every module that the code of the repository imports."""
    found = set()
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
    return found


def _first_line(path: Path) -> str:
    text = ast.get_docstring(tree_of(path)) or ""
    return text.splitlines()[0].strip() if text else ""


def _has_code(path: Path) -> bool:
    return any(names_of(statement) for statement in tree_of(path).body)
