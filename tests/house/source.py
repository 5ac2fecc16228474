"""The project's files as the house rules see them: found on disk, parsed once, with their imports resolved.

Reads the tree and judges nothing; the rules are in rules.py and test_layers.py. Files are found by walking, not through
git, so that the tests also run from an unpacked release.
"""

from __future__ import annotations

import ast
import functools
import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[2]

# The folders of Python packages, and the name that imports their modules.
PACKAGES = {
    "hegm": ROOT / "hegm",
    "hegmd": ROOT / "hegmd",
    "hegmctl": ROOT / "client" / "hegmctl",
    "hegmcompat": ROOT / "client" / "hegmcompat",
}

Node = TypeVar("Node", bound=ast.AST)

# Fields of nodes in which no rule looks for another node: names, contexts, operators.
_NOT_SEARCHED = frozenset(
    "arg asname attr conversion ctx id is_async kind level module name op ops simple type_comment type_ignores".split()
)

# Built or fetched, or belonging to a tool: the rules do not apply.
_SKIPPED = {".git", ".venv", "build", "dist", "node_modules", "__pycache__"}


@dataclass(frozen=True, slots=True)
class Import:
    """One name that a module imports, resolved to a module where that is known."""

    target: str
    line: int
    for_types_only: bool


@dataclass(frozen=True)
class Module:
    """One Python file. `name` is what it is imported by; files outside the packages have their path as a name."""

    name: str
    path: Path
    text: str = field(repr=False)
    tree: ast.Module = field(repr=False)

    @classmethod
    def parse(cls, name: str, path: Path, text: str) -> Module:
        return cls(name, path, text, ast.parse(text, filename=str(path)))

    @functools.cached_property
    def _nodes(self) -> dict[type[ast.AST], list[ast.AST]]:
        """All of the tree by kind, outer nodes first: each rule looks at a few kinds of them."""
        found: list[ast.AST] = [self.tree]
        by_kind: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        for node in found:  # which grows meanwhile
            kind = type(node)
            by_kind[kind].append(node)
            for name in _searched(kind._fields):
                inner = getattr(node, name, None)
                if isinstance(inner, list):
                    found += [one for one in inner if isinstance(one, ast.AST)]
                elif isinstance(inner, ast.AST):
                    found.append(inner)
        return by_kind

    def nodes(self, *kinds: type[Node]) -> list[Node]:
        """The nodes of these kinds, one kind after the other."""
        return [node for kind in kinds for node in self._nodes.get(kind, ())]  # type: ignore[misc]  # each is of its kind

    @property
    def where(self) -> str:
        return str(self.path.relative_to(ROOT)) if self.path.is_absolute() else str(self.path)

    @property
    def lines(self) -> int:
        return self.text.count("\n")

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    def imports(self, known: frozenset[str] = frozenset()) -> Iterator[Import]:
        """Every import, also those inside functions and for type checkers only: a layer is a layer in all of them.

        `from package import name` is the module `package.name` if that is among `known`, and `package` otherwise.
        """
        for node, is_for_types in self._imports:
            base = self._absolute(node) if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                full = alias.name if base is None else f"{base}.{alias.name}"
                yield Import(full if base is None or full in known else base, node.lineno, is_for_types)

    @functools.cached_property
    def _imports(self) -> tuple[tuple[ast.Import | ast.ImportFrom, bool], ...]:
        """Every statement that imports, and whether it is for type checkers only."""
        for_types = {
            inner
            for node in self.nodes(ast.If)
            if isinstance(node.test, ast.Name | ast.Attribute) and dotted(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for inner in ast.walk(statement)
        }
        found: list[ast.Import | ast.ImportFrom] = self.nodes(ast.Import, ast.ImportFrom)
        return tuple((node, node in for_types) for node in found)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        if self.path.name == "__init__.py":
            parts.append("__init__")
        return ".".join([*parts[: len(parts) - node.level], *([node.module] if node.module else [])])


@functools.cache
def _searched(fields: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in fields if name not in _NOT_SEARCHED)


def dotted(node: ast.expr) -> str:
    """A name with its attributes, as it is written; nothing for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def files(*suffixes: str) -> list[Path]:
    """Every file of the project with one of the suffixes (with all files where none is given), in a stable order."""
    return [path for path in _all_files() if not suffixes or path.name.endswith(suffixes)]


@functools.cache
def _all_files() -> tuple[Path, ...]:
    found: list[Path] = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(
            name
            for name in folders
            if name not in _SKIPPED and not name.endswith(("_cache", ".egg-info", ".hypothesis"))
        )
        # In a linked worktree of git, .git is a file, which names the folder of another checkout.
        found += [Path(folder, name) for name in sorted(names) if name not in _SKIPPED]
    return tuple(found)


def _module_name(path: Path) -> str:
    for package, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return str(path.relative_to(ROOT))


@functools.cache
def _module(path: Path) -> Module:
    gc.disable()
    try:
        return Module.parse(_module_name(path), path, path.read_text())
    finally:
        gc.freeze()  # trees stay, and the collector would look through all of them again and again
        gc.enable()


@functools.cache
def _paths() -> dict[str, Path]:
    """Every Python file by its module's name."""
    return {_module_name(path): path for path in files(".py")}


@functools.cache
def python_files() -> tuple[Module, ...]:
    return tuple(_module(path) for path in _paths().values())


def modules(*prefixes: str) -> tuple[Module, ...]:
    """The modules of the product, or those under the given dotted names."""
    wanted = prefixes or tuple(PACKAGES)
    return tuple(_module(path) for name, path in _paths().items() if any(is_within(name, prefix) for prefix in wanted))


def names(package: str) -> list[str]:
    """The names of the modules in a package of the product, which need not be parsed for that."""
    return [name for name in _paths() if is_within(name, package)]


def module(name: str) -> Module:
    return _module(_paths()[name])


def modules_of_tests() -> tuple[Module, ...]:
    return tuple(_module(path) for name, path in _paths().items() if name.startswith("tests/"))


def is_within(name: str, room: str) -> bool:
    """Whether a dotted name is that module or lies under it."""
    return name == room or name.startswith(room + ".")
