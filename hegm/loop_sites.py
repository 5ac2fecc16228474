"""The places where a script has epochs over an enumerated loader, in the form of HeGM's `find_training_loop_sites`.
Runs nothing.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from typing import NamedTuple


class TrainingLoopSite(NamedTuple):
    """One call of `range` whose loop has a loop over `enumerate` in it."""

    lineno: int
    col_offset: int
    loop_var: str
    has_enumerate: bool


def find(source_or_path: str | bytes | os.PathLike[str]) -> list[TrainingLoopSite]:
    """Those of a script's text, or of the file of that name; none where it cannot be read."""
    is_text = isinstance(source_or_path, (str, bytes)) and "\n" in str(source_or_path)
    try:
        if isinstance(source_or_path, (str, bytes)) and is_text:
            return list(_sites(ast.parse(source_or_path)))
        with open(source_or_path, encoding="utf-8", errors="replace") as file:
            return list(_sites(ast.parse(file.read())))
    except (OSError, SyntaxError, ValueError):
        return []


def _sites(tree: ast.AST) -> Iterator[TrainingLoopSite]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.For) or not _is_call_of(node.iter, "range") or not _enumerates(node):
            continue
        if isinstance(node.iter, ast.Call) and len(node.iter.args) == 1:
            name = node.target.id if isinstance(node.target, ast.Name) else "?"
            yield TrainingLoopSite(node.iter.lineno, node.iter.col_offset, name, True)


def _enumerates(loop: ast.For) -> bool:
    inner = (part for statement in loop.body for part in ast.walk(statement))
    return any(isinstance(part, ast.For) and _is_call_of(part.iter, "enumerate") for part in inner)


def _is_call_of(node: ast.expr, name: str) -> bool:
    if not isinstance(node, ast.Call):
        return False
    return name in (getattr(node.func, "id", None), getattr(node.func, "attr", None))
