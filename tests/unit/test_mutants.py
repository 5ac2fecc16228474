"""The tool that changes the product to see whether a test notices: what it changes, what it leaves, its verdicts."""

from __future__ import annotations

import ast
import os
from contextlib import closing
from pathlib import Path

import pytest

from tests.cells import in_one_test
from tools.equivalent_mutants import EQUIVALENT
from tools.forked_tests import ForkedTests, changed_functions
from tools.mutant_tests import AreaTests
from tools.mutants import AREAS, ROOT, paths_of, sample
from tools.mutations import Mutant, mutants_of

CODE = '''"""A docstring with 1 number."""
import logging
def f(a: int = 3, b: "tuple[int, ...] | None" = None) -> bool:
    """Another, with 2."""
    logger.info("4 of them", extra={"x": a + 5})
    if a < b and not a:
        g(a)
    raise E(a - 1)
    return a == 7
'''
CHANGED = {
    "comparison": {"a <= b", "a != 7"},
    "and and or": {"a < b or not a"},
    "arithmetic": {"a + 1"},
    "constant": {"= 4", "a - 2", "a == 8"},
    "condition": {"if not (a < b and not a)"},
    "statement": {"        pass\n", "    pass\n"},
    "result": {"return None"},
}


def test_each_mutation_changes_only_its_place() -> None:
    mutants = [mutant for mutant in mutants_of(Path("x.py"), CODE) if mutant.can_run]
    for what, texts in CHANGED.items():
        of_kind = [mutant.after for mutant in mutants if mutant.what == what]
        assert len(of_kind) == len(texts), what
        assert all(any(text in after for after in of_kind) for text in texts), what
    for mutant in mutants:
        ast.parse(mutant.after)
        assert mutant.after != CODE
        assert len([line for line in mutant.diff().splitlines()[3:] if line.startswith(("+", "-"))]) == 2
    assert {mutant.what for mutant in mutants} == CHANGED.keys()


def test_a_mutant_is_the_same_after_its_help_text_was_changed() -> None:
    field = 'gid: int = field("{}", default=0)\n'
    first, other = (mutants_of(Path("x.py"), field.format(text))[0].change for text in ("a group", "whose it is"))
    assert first == other == ("x.py", 'gid: int = field("...", default=0)', 'gid: int = field("...", default=1)')
    assert mutants_of(Path("x.py"), field.format("gid"))[0].change != first


@pytest.mark.thorough
def test_the_same_seed_makes_the_same_mutants_of_every_area() -> None:
    first, again, other = (sample(ROOT, ["pool", "server"], 8, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [area for area, _ in first] == ["pool"] * 4 + ["server"] * 4


@pytest.mark.thorough
def test_each_equivalent_mutant_can_be_made() -> None:
    """An entry stays behind when its line is changed."""
    for path, old, new in EQUIVALENT:
        mutants = mutants_of(ROOT / path, (ROOT / path).read_text())
        assert (old, new) in {mutant.change[1:] for mutant in mutants}, path


@pytest.mark.thorough
@in_one_test("area", AREAS)
def test_an_area_has_its_own_code_and_tests(area: str) -> None:
    """A package or a folder of tests that got another name would be left out unnoticed."""
    mutants = (mutant for path in paths_of(ROOT, area) for mutant in mutants_of(path, (ROOT / path).read_text()))
    assert any(mutant.can_run for mutant in mutants)
    for patterns in AREAS[area]:
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), patterns


def test_a_file_belongs_to_one_area() -> None:
    """Otherwise a mutant meets the tests of one area by chance, and survives those of the other."""
    paths = [path for area in AREAS for path in paths_of(ROOT, area)]
    assert len(paths) == len(set(paths))


BODY = """class A:
    size = 3
    def grown(self, by=1):
        return sorted((self.size, by), key=lambda one: one + 2)
"""


def test_a_function_is_replaced_and_import_time_code_is_not() -> None:
    for old, new, expected in (
        ("+ 2", "- 2", {(3, "grown"), (4, "<lambda>")}),
        ("(self.size, by)", "(self.size, 1)", {(3, "grown"), (4, "<lambda>")}),
        ("size = 3", "size = 4", None),
        ("by=1", "by=2", None),
        ("grown", "grown", set()),
    ):
        found = changed_functions(BODY, BODY.replace(old, new))
        assert (None if found is None else found.keys()) == expected, old


LEAST = """SIGN = 1


def least(a, b):
    return SIGN * (a if a < b else b)
"""
TESTS = """import pytest
from least import least


@pytest.mark.parametrize("one", [1, 2])
def test_first(one):
    assert least(one, 3) == one


def test_second():
    assert least(4, 3) == 3


def test_broken():
    assert least(1, 2) == 2
"""


@pytest.mark.thorough
def test_a_change_that_a_test_notices_is_found_and_another_survives(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "client").mkdir(parents=True)
    (root / "least.py").write_text(LEAST)
    (root / "test_least.py").write_text(TESTS)
    (tmp_path / "copies").mkdir()

    def change(old: str, new: str) -> Mutant:
        begin = LEAST.index(old)
        line = LEAST[:begin].count("\n") + 1
        return Mutant(Path("least.py"), line, "a change", LEAST, begin, begin + len(old), new)

    equal = change(" < ", " <= ")
    in_function = change("a < b", "not (a < b)"), change("(a if a < b else b)", "a"), change("b)", "c)")
    at_import = (
        change("SIGN = 1", "SIGN = 2"),
        change("SIGN = 1", "SIGN = None + 1"),
        change("(a, b)", "(a, b=1, *, c)"),
    )
    with closing(AreaTests(root, ["test_*.py"], [Path("least.py")], tmp_path / "copies", 120)) as tests:
        assert tests.failing == ["test_least.py::test_broken"]
        assert len(tests.tests_of(equal, in_function=True)) == 3
        assert tests.verdict(equal).survived
        for mutant in (*in_function, *at_import):
            assert not tests.verdict(mutant).survived, mutant.diff()
        assert tests.verdict(equal).survived
        assert tests.verdict(in_function[0]).by.startswith("test_least.py::")
    assert (root / "least.py").read_text() == LEAST


@pytest.mark.thorough
def test_a_command_that_exceeds_its_limit_has_no_status(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/test_long.py").write_text("import signal\ndef test(): signal.pause()\n")
    with closing(ForkedTests(["-q", "-p", "no:cacheprovider"], [], tmp_path / "tree", os.environ, 120)) as forked:
        assert forked.tests == ["test_long.py::test"]
        assert forked.run(["test_long.py::test"], 0.0)[0] is None
    with pytest.raises(ChildProcessError, match="nothing"):
        ForkedTests(["nothing.py"], [], tmp_path / "tree", os.environ, 120)
