"""The run over images on real GPUs, over the stub driver with real CRIU: no time there is for its own mistakes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.e2e.real_criu import criu_or_skip
from tests.e2e.rehearsal import rehearse
from tests.room import MIB, SHARED_MEMORY, skip_without

pytestmark = [pytest.mark.e2e]


def run(folder: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    criu = ["--criu", criu_or_skip().path, "--disk", str(folder)]
    return rehearse("image_run", folder, *criu, "--sizes", "1", *words, **more)


@pytest.mark.wide
def test_jobs_go_through_images_onto_the_other_gpu_and_finished_cases_are_not_repeated(tmp_path: Path) -> None:
    """The driver checkpoints; we or CRIU carry the video memory; another job has the GPU meanwhile."""
    skip_without(SHARED_MEMORY, 768 * MIB)
    state = tmp_path / "state"
    words = ["--state", str(state), "--repeat", "1"]
    first = run(tmp_path / "first", *words, "--only", "taken,left-1-disk")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "are needed" in first.stdout, first.stdout
    second = run(tmp_path / "second", *words, "--only", "taken,left-1-disk,driver-1-disk,back-1-disk")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "2 cases" in second.stdout
    reply = [json.loads(line) for line in state.read_text().splitlines()]
    assert {one["case"]: one["wrong"] for one in reply if "case" in one} == {
        "taken": "",
        "left-1-disk": "",
        "driver-1-disk": "",
        "back-1-disk": "",
    }
    figures = [one["figure"] for one in reply if "figure" in one]
    parts = {(figure["action"], figure["carrier"]): set(figure["parts"]) for figure in figures}
    assert parts["checkpoint", "host"] == {"suspend", "dump", "write", "read back", "verify", "end"}
    assert parts["restore", "host"] == {"check", "read", "criu", "driver", "reload"}
    assert "write" not in parts["checkpoint", "driver"], "all video memory goes through CRIU"
    (left,) = (one for one in figures if one["action"] == "leave-running")
    assert {"suspend", "dump", "driver", "reload", "write", "read back", "verify"} == set(left["parts"])
    assert 0 < left["parked_s"] < left["took_s"], "its bytes are written while it trains"
    assert "the job stood" in first.stdout


@pytest.mark.wide
def test_a_job_whose_output_differs_from_the_undisturbed_run_fails_its_case(tmp_path: Path) -> None:
    ran = run(tmp_path / "node", "--only", "back-1-tmpfs", "--repeat", "1", HEGM_TEST_UNLIKE="1")
    assert ran.returncode == 1
    assert "| back-1-tmpfs | line " in ran.stdout, ran.stdout + ran.stderr
    assert "and undisturbed it is" in ran.stdout
