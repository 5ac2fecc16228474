"""The names that HeGM's users import, beside those that a training script says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import hegm
import hegm.ctrl

SCRIPT = """
for epoch in range(epochs):
    for step, batch in enumerate(loader):
        pass
for number in range(3):
    pass
for number in range(1, 3):
    for item in enumerate([]):
        pass
"""


def test_loops_of_epochs_are_found_as_hegm_finds_them(tmp_path: Path) -> None:
    """Issue 14, row 7: these are what HeGM 0.3.3 gives for the same text."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for found in (hegm.find_training_loop_sites(SCRIPT), hegm.find_training_loop_sites(script)):
        assert [(site.lineno, site.col_offset, site.loop_var, site.has_enumerate) for site in found] == [
            (2, 13, "epoch", True)
        ]
    assert hegm.find_training_loop_sites(tmp_path / "none.py") == []
    assert hegm.find_training_loop_sites("for\n") == []


def test_a_controller_in_python_finds_hegms_functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 14, row 7: `hegm.ctrl` could not be imported."""
    monkeypatch.setenv("HEGM_CHECKPOINT_DIR", str(tmp_path))
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "lock").touch()
    assert hegm.ctrl.pending_ppids() == [7]
    assert hegm.ctrl.resume_ppids([7, 8]) == {7: "lock-removed", 8: "no-lock"}
    assert hegm.ctrl.resume_all_pending() == {}
    assert hegm.ctrl.checkpoint_pids([0]) == {0: "no-such-process"}
    assert (hegm.ctrl.checkpoint_all_gpu(), hegm.ctrl.registered_worker_pids()) == ({}, {})
    assert hegm.ctrl.main_cli(["resume", "--all"]) == 0


def test_the_launcher_runs_as_a_module() -> None:
    """Issue 14, row 7: `python3 -m hegm.launcher` is how HeGM's Kubernetes examples start one."""
    done = subprocess.run([sys.executable, "-m", "hegm.launcher"], capture_output=True, text=True, check=False)
    assert done.stderr.startswith("Usage: hegm-launcher")
    assert done.returncode == 0
