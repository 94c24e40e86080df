"""What the source tree defines, read from its text: modules, classes, functions, names. Nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src"
CODE = ("src", "tests", "bench", "fuzz")


@dataclass(slots=True)
class Module:
    """One file: what stands at its top level, and in its classes."""

    path: Path
    tree: ast.Module
    names: set[str] = field(default_factory=set)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    texts: set[str] = field(default_factory=set)  # string constants: lazily exported names are only there

    @property
    def dotted(self) -> str:
        parts = self.path.relative_to(SOURCE).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders or CODE:
        yield from sorted((ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def modules() -> dict[str, Module]:
    """Every module under src/ by its dotted name."""
    found = {}
    for path in python_files("src"):
        module = Module(path, tree_of(path))
        for statement in ast.walk(module.tree):
            if isinstance(statement, ast.Constant) and isinstance(statement.value, str):
                module.texts.add(statement.value)
        for statement in _statements(module.tree):
            module.names.update(names_of(statement))
            if isinstance(statement, ast.ClassDef):
                module.classes[statement.name] = statement
        found[module.dotted] = module
    return found


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a module, also those under an ``if`` or a ``try``."""
    for statement in tree.body:
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            yield from (each for each in ast.walk(statement) if isinstance(each, ast.stmt) and each is not statement)


def names_of(statement: ast.stmt) -> set[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    if isinstance(statement, ast.Assign):
        return {name.id for target in statement.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    return set()


def members(name: str, seen: frozenset[str] = frozenset()) -> set[str]:
    """What the classes of that name have, with what they inherit from classes of ours."""
    found: set[str] = set()
    for module in modules().values():
        made = module.classes.get(name)
        if made is None or name in seen:
            continue
        for statement in made.body:
            found |= names_of(statement)
            if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                found |= {
                    each.attr for each in ast.walk(statement) if isinstance(each, ast.Attribute) and _is_self(each)
                }
        for base in made.bases:
            inherited = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
            found |= members(inherited, seen | {name})
    return found


def _is_self(attribute: ast.Attribute) -> bool:
    return isinstance(attribute.ctx, ast.Store) and getattr(attribute.value, "id", "") == "self"


def resolves(dotted: str) -> bool:
    """Whether a name from ``upriver`` on is a module, a name in one, or a member of a class in one."""
    parts = dotted.split(".")
    for size in range(len(parts), 0, -1):
        module = modules().get(".".join(parts[:size]))
        if module is not None:
            rest = parts[size:]
            return not rest or (rest[0] in module.names | module.texts and _has(rest))
    return False


def _has(rest: list[str]) -> bool:
    if len(rest) == 1 or not any(rest[0] in module.classes for module in modules().values()):
        return True  # a member of something that is no class of ours: only its home is checked
    return len(rest) == 2 and rest[1] in members(rest[0])


@cache
def identifiers() -> frozenset[str]:
    """Every name that occurs in the code of the tree, imported ones and words of its strings too; not of its prose."""
    found: set[str] = set()
    for path in python_files():
        if path.name == "test_citations.py":  # whose strings are wrong on purpose
            continue
        found.add(path.stem)
        nodes = list(ast.walk(tree_of(path)))
        prose = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, ast.alias):
                found.add((node.asname or node.name).rsplit(".", 1)[-1])
            elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.arg | ast.keyword) and node.arg:
                found.add(node.arg)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found.update(re.findall(r"\w+", node.value))
    return frozenset(found)


def defines(path: Path, dotted: str) -> bool:
    """Whether a file defines a function, a class or a member: ``name`` or ``Class.name``, at any depth."""
    *owner, name = dotted.split(".")
    for node in ast.walk(tree_of(path)):
        if owner:
            if isinstance(node, ast.ClassDef) and node.name == owner[-1]:
                return name in set().union(*map(names_of, node.body))
        elif isinstance(node, ast.stmt) and name in names_of(node):
            return True
    return False
