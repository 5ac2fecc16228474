"""Every reason against a restart says in one sentence what to change: the whole package is walked for them."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread, main_thread
from typing import Any

import pytest

from hegmd.agent.state.capture import instead_of
from hegmd.agent.state.code.position import ThreadPosition
from hegmd.agent.state.save_and_exit import hints_of, not_plain
from hegmd.agent.state.script.capture_points import refusals_of
from hegmd.agent.state.storage.errors import UnsupportedValue
from hegmd.agent.state.values.refusals import Refusal
from tests.cells import in_one_test

PACKAGE = Path(__file__).parents[4] / "hegmd/agent/state"
VERBS = frozenset("ask create draw give go hold keep let make put read set start take try use write".split())
#: The value of a reason that calls of these functions have, and the list that `against` collects.
_CALLED = {"Refusal", "_refuse"}
#: Reasons that another function found: their hints are walked where that function makes them.
_PASSED_ON = {"hint"}


class _Module:
    """One module, and the values of its names."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.values = {
            target.id: node.value
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def hints(self) -> Iterator[tuple[int, str]]:
        """Each hint with its line."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield from self._of_call(node)
            elif isinstance(node, ast.FunctionDef) and node.name == "against":
                for part in ast.walk(node):
                    if isinstance(part, ast.Yield) and isinstance(part.value, ast.Tuple):
                        yield from self._texts(part.value.elts[1])

    def _of_call(self, node: ast.Call) -> Iterator[tuple[int, str]]:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        arguments: list[ast.expr] = list(node.args)
        if name == "append" and isinstance(arguments[0], ast.Tuple) and "against" in ast.unparse(node.func):
            yield from self._texts(arguments[0].elts[1])
        elif name in _CALLED:
            if isinstance(arguments[0], ast.Starred):
                pair = self.values[ast.unparse(arguments[0].value)]
                assert isinstance(pair, ast.Tuple)
                arguments = list(pair.elts)
            yield from self._texts(arguments[1])

    def _texts(self, node: ast.expr) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.Constant):
            yield node.lineno, str(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield from self._texts(node.values[0])
        elif isinstance(node, ast.IfExp):
            yield from self._texts(node.body)
            yield from self._texts(node.orelse)
        elif isinstance(node, ast.Name) and node.id in self.values:
            yield from self._texts(self.values[node.id])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "instead_of":
            pass  # tested by itself
        else:
            assert ast.unparse(node) in _PASSED_ON, ast.unparse(node)


@pytest.mark.thorough
def test_a_refusal_names_what_to_change() -> None:
    """Issue 14, row 19: it named the line, and left the rest to the user."""
    found = [(path.name, line, hint) for path in sorted(PACKAGE.rglob("*.py")) for line, hint in _Module(path).hints()]
    assert len(found) > 35, "the walk does not see what it is there for"
    assert {name for name, _line, _hint in found} >= {"capture.py", "passes.py", "lightning.py", "capture_points.py"}
    lacking = [one for one in found if one[2].split()[0] not in VERBS]
    assert not lacking


@in_one_test(
    ("name", "named"),
    [
        ("count", "range("),
        ("cycle", "range("),
        ("list_iterator", "range(len("),
        ("tuple_iterator", "range(len("),
        ("generator batches()", "in place of the generator"),
        ("map", "hegm.keep"),
    ],
)
def test_the_hint_for_a_loop_was_the_same_for_all(name: str, named: str) -> None:
    """Issue 14, row 19."""
    hint = instead_of(name)
    assert named in hint
    assert hint.split()[0] in VERBS


@pytest.mark.parametrize(
    ("why", "named"),
    [
        ("is a tensor without ordinary memory (torch.sparse_coo, on cpu)", "sparse=False"),
        ("is an object of a class of its own", "hegm.keep"),
    ],
)
def test_sparse_gradients_were_refused_without_a_hint(why: str, named: str) -> None:
    """Issue 14, row 19: the hint was to leave them out of a state that the script does not make."""
    state: dict[str, Any] = {"holdings": []}
    assert named in not_plain(state, UnsupportedValue("holdings", why)).hint


def test_only_the_first_of_several_reasons_had_its_hint() -> None:
    """Issue 14, row 19: who had changed that was refused for the next one."""
    again = Refusal("a third", "make it before the loop")
    found = [Refusal("one", "make it before the loop"), Refusal("another", "write it as a for loop"), again]
    assert hints_of(found) == "make it before the loop; and write it as a for loop"


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("while True:\n    if look():\n        break\n", "the body of a `while` loop, at line 2 of script"),
        ("look()\n", "no loop, at line 1 of script"),
    ],
)
def test_a_training_in_a_while_loop_was_told_to_try_again_shortly(script: str, said: str) -> None:
    """It could never be saved, and the hint was that nothing has to change."""
    found: list[Refusal] = []

    def look() -> bool:
        found.extend(refusals_of(ThreadPosition(sys._getframe(1)), None, main_thread().ident))
        return True

    names = {"__name__": "script", "look": look}
    thread = Thread(target=exec, args=(compile(script, "train.py", "exec"), names))
    thread.start()
    thread.join()
    (refusal,) = found
    assert said in refusal.what
    assert "for step in range" in refusal.hint
    assert not refusal.passes
