"""The steps of HeGM's README against our programs: the same words, exit statuses and files as HeGM 0.3.3 gave.

hegm_0_3_3.json is what `hegm_steps` recorded of the released 0.3.3 (with torch 2.13 on the CPU, on 2026-11-21, and with
HEGM_DISABLE_EPOCH_RANGE_PATCH=1, without which it does not start there).
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.hegm_steps import BATCHES, EPOCHS, TRAINING, Steps, steps
from tests.e2e.moved_job import BARE, BRISK
from tests.needs import need_torch

need_torch()
pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("HeGM's steps")]  # which are taken once for both

RECORDED = Path(__file__).with_name("hegm_0_3_3.json")
# Identifies states of the same training; HeGM has no such file.
OURS_ALONE = "LAUNCHER/command"


@pytest.fixture(scope="module")
def ours() -> Steps:
    programs = [f"{shlex.quote(sys.executable)} -m hegmcompat.{name}" for name in ("launcher_cli", "ctrl_cli")]
    return steps(programs, _environ(), hasty=True)


def test_every_step_is_answered_as_hegm_answers_it(ours: Steps) -> None:
    expected = json.loads(RECORDED.read_text())
    assert [what for what, _said in ours.record] == [what for what, _said in expected]
    assert [_without_ours(step) for step in ours.record] == expected


def test_the_training_that_left_three_times_is_bit_for_bit_the_undisturbed_one(ours: Steps) -> None:
    words = [sys.executable, "-c", TRAINING]
    done = subprocess.run(
        words, input="\n" * EPOCHS * BATCHES, env=_environ(), capture_output=True, text=True, check=True
    )
    batches = [line for line in done.stdout.splitlines() if line.startswith("batch ")]
    assert len(batches) == EPOCHS * BATCHES
    assert ours.batches == batches


def _without_ours(step: list[Any]) -> list[Any]:
    what, lines = step
    if what.startswith("files"):
        assert OURS_ALONE in lines
        lines = [name for name in lines if name != OURS_ALONE]
    return [what, lines]


def _environ() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HEGM_")}
    # The search path of these tests may have a sitecustomize of the distribution.
    path = os.pathsep.join([str(BRISK), *filter(None, sys.path)])
    return {**kept, **BARE, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HEGM_SOCKET": "/nonexistent/hegmd.sock"}
