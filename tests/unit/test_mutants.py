"""The tool that changes the product to see whether a test notices: what it changes, what it leaves, its verdicts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tools.mutants import AREAS, ROOT, Copies, Mutant, mutants_of, near_tests, sample
from tools.mutants import tests_of as in_order

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


def test_each_kind_of_change_is_made_and_all_else_is_left() -> None:
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


@pytest.mark.thorough
def test_the_same_seed_makes_the_same_mutants_of_every_area() -> None:
    first, again, other = (sample(ROOT, ["pool", "server"], 8, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [area for area, _ in first] == ["pool"] * 4 + ["server"] * 4


@pytest.mark.thorough
@pytest.mark.parametrize("area", AREAS)
def test_an_area_has_code_and_tests_of_its_own(area: str) -> None:
    """A package or a folder of tests that got another name would be left out unnoticed."""
    assert sample(ROOT, [area], 1, 0)
    for patterns in AREAS[area]:
        assert all(list(ROOT.glob(pattern)) for pattern in patterns), patterns
    assert in_order(ROOT, area, Path("none"))


def test_the_tests_of_a_module_come_first() -> None:
    assert in_order(ROOT, "server", Path("hegmd/server/auth.py"))[:2] == [
        "tests/unit/server/test_auth.py",
        "tests/unit/server",
    ]


def test_what_imports_a_module_is_near_it() -> None:
    near = near_tests(ROOT, "server", Path("hegmd/server/scrape.py"))
    assert "tests/unit/server/test_scrape.py" in near
    assert 0 < len(near) < len(list((ROOT / "tests/unit/server").glob("test_*.py"))) / 2


@pytest.mark.thorough
def test_a_change_that_a_test_notices_is_found_and_another_survives(tmp_path: Path) -> None:
    root, before = tmp_path / "root", "def least(a, b):\n    return a if a < b else b\n"
    (root / "client").mkdir(parents=True)
    (root / "least.py").write_text(before)
    (root / "test_least.py").write_text("from least import least\ndef test():\n    assert least(1, 2) == 1\n")
    (tmp_path / "copies").mkdir()
    copies = Copies(root, tmp_path / "copies", limit_s=120)

    def change(old: str, new: str) -> Mutant:
        begin = before.index(old)
        return Mutant(Path("least.py"), 2, "a change", before, begin, begin + len(old), new)

    equal, wrong = change("<", "<="), change("a < b", "not (a < b)")
    hangs = change("    return", "    while True: pass\n    return")
    ran = copies.watched(["test_least.py"], [Path("least.py")])
    assert ran is not None
    assert ran.of(wrong) == ["test_least.py::test"]
    assert [copies.passes([["test_least.py"]], change) for change in (None, equal, wrong, None)] == [
        True,
        True,
        False,
        True,
    ]
    assert not Copies(root, tmp_path / "copies", limit_s=3).passes([["test_least.py"]], hangs)
    assert (root / "least.py").read_text() == before
