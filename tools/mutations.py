"""Every small change of a Python file that could be a mistake: for `make mutants`.

An operator exchanged, a number or truth changed, a condition turned round, a statement left out. Annotations,
docstrings, log lines and what only type checkers read are left as they are.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_EXCHANGED: dict[type[ast.AST], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.Is: "is not",
    ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in", ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*",
    ast.And: "or", ast.Or: "and",
}  # fmt: skip


#: Results that mean the same as None to most callers. `return False` is changed as a constant.
_FALSE = {"None", "False"}
#: A text with a space in it: for a reader.
_PROSE = re.compile(r'"[^"\n]* [^"\n]*"')


@dataclass(frozen=True)
class Mutant:
    """One change of a file: which bytes of its text are replaced, and by what."""

    path: Path
    line: int
    what: str
    before: str
    begin: int
    end: int
    new: str

    @property
    def after(self) -> str:
        """The text of the file with it."""
        whole = self.before.encode()
        return (whole[: self.begin] + self.new.encode() + whole[self.end :]).decode()

    @property
    def lines(self) -> range:
        """The lines of the file that it changes."""
        whole = self.before.encode()
        first, last = (whole[:at].count(b"\n") + 1 for at in (self.begin, self.end))
        return range(min(first, self.line), last + 1)

    @property
    def can_run(self) -> bool:
        """Whether it is another program at all; an operator between brackets makes none."""
        try:
            ast.parse(self.after)
        except SyntaxError:
            return False
        return self.after != self.before

    @property
    def change(self) -> tuple[str, str, str]:
        """Return the file, the lines before and the lines after: this identifies a mutant when other lines change."""
        lines = self.diff().splitlines()[3:]
        old, new = ("\n".join(line[1:].strip() for line in lines if line[0] == sign) for sign in "-+")
        return str(self.path), _PROSE.sub('"..."', old), _PROSE.sub('"..."', new)

    def diff(self) -> str:
        lines = difflib.unified_diff(
            self.before.splitlines(), self.after.splitlines(), str(self.path), "the mutant", n=1, lineterm=""
        )
        return "\n".join(lines)


class _Source:
    """The places of a tree's nodes in the bytes of the file."""

    def __init__(self, text: str) -> None:
        self._starts = [0]
        for line in text.encode().splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        end_line, end_column = node.end_lineno or node.lineno, node.end_col_offset or 0
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[end_line - 1] + end_column

    def between(self, one: ast.expr, other: ast.expr) -> tuple[int, int]:
        return self.span(one)[1], self.span(other)[0]


def _changes_nothing(node: ast.stmt) -> bool:
    """Whether a statement changes nothing but a log, is a docstring, or is for type checkers."""
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "TYPE_CHECKING":
        return True
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(("logger.", "limited", "note"))


def _judged(tree: ast.Module) -> Iterator[ast.AST]:
    """The nodes that run: no annotations, no docstrings, nothing for type checkers, nothing that is only logged."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.stmt) and (_changes_nothing(node) or isinstance(node, ast.Import | ast.ImportFrom)):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name not in {"annotation", "returns", "decorator_list", "type_params"}:
                waiting += [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, ast.AST)]


def mutants_of(path: Path, text: str) -> list[Mutant]:
    """Every change of one file, in the order of its lines; a few of them cannot run."""
    source = _Source(text)
    found: list[Mutant] = []

    def add(node: ast.expr | ast.stmt, what: str, begin: int, end: int, new: str) -> None:
        found.append(Mutant(path, node.lineno, what, text, begin, end, new))

    for node in _judged(ast.parse(text)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _EXCHANGED:
            gap = source.between(node.left, node.comparators[0])
            add(node, "comparison", *gap, f" {_EXCHANGED[type(node.ops[0])]} ")
        elif isinstance(node, ast.BinOp) and type(node.op) in _EXCHANGED:
            add(node, "arithmetic", *source.between(node.left, node.right), f" {_EXCHANGED[type(node.op)]} ")
        elif isinstance(node, ast.BoolOp):
            add(node, "and and or", *source.between(node.values[0], node.values[1]), f" {_EXCHANGED[type(node.op)]} ")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int):
            new = str(not node.value) if isinstance(node.value, bool) else str(int(str(node.value)) + 1)
            add(node, "constant", *source.span(node), new)
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            begin, end = source.span(node.test)
            add(node.test, "condition", begin, end, f"not ({text.encode()[begin:end].decode()})")
        elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) not in _FALSE:
            add(node, "result", *source.span(node), "return None")
        elif isinstance(node, ast.Expr | ast.Raise | ast.AugAssign | ast.Delete | ast.Continue | ast.Break):
            add(node, "statement", *source.span(node), "pass")
    return sorted(found, key=lambda mutant: (mutant.line, mutant.begin, mutant.what))
