"""The conditions under which tests skip themselves: PyTorch, and a clone that other users can enter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.needs import ImportedWhenUsed, hidden_folder


def test_a_clone_below_a_folder_of_one_user_failed_where_another_user_ran_its_files(tmp_path: Path) -> None:
    """Issue 14, row 22: six tests failed in a clone below /root."""
    hidden = tmp_path / "hidden"
    clone = hidden / "clone"
    clone.mkdir(parents=True)
    hidden.chmod(0o700)
    assert hidden_folder([clone / "x.py"]) in {hidden, *hidden.parents}  # pytest's own folder is hidden too
    assert hidden_folder([Path("/usr/bin/x"), Path("/tmp/x")]) is None


def test_a_module_is_imported_when_it_is_used() -> None:
    sys.modules.pop("colorsys", None)
    later = ImportedWhenUsed("colorsys")
    assert "colorsys" not in sys.modules
    assert later.rgb_to_hsv(0, 0, 0) == (0.0, 0.0, 0)
    assert "colorsys" in sys.modules


def test_every_worker_imported_pytorch_while_it_collected_the_tests(request: pytest.FixtureRequest) -> None:
    """pytest 9 asks whether anything in a module is a test case: 1.8 s of CPU time of each worker."""
    sys.modules.pop("colorsys", None)
    later = ImportedWhenUsed("colorsys")
    module = request.node.getparent(pytest.Module)
    request.config.hook.pytest_pycollect_makeitem(collector=module, name="later", obj=later)
    assert "colorsys" not in sys.modules
