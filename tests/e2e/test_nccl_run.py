"""`tests.gpu.nccl_run` without a GPU: the ranks use gloo, and what it finds and keeps is checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.rehearsal import rehearse
from tests.gpu.nccl_run import MAX_GROWTH_MIB, compare
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.wide]
need_torch()


def test_the_undisturbed_run_makes_as_many_steps_as_the_job_that_was_moved(tmp_path: Path) -> None:
    """Its number of steps was a guess: too small once, and four minutes too long another time."""
    out = tmp_path / "results.json"
    ran = rehearse("nccl_run", tmp_path / "run", "--out", str(out), "--agent-only", "--rounds", "1", "ddp")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    steps = {step["step"]: step for step in json.loads(out.read_text())["steps"]}
    for name in ("exchange 1", "same GPUs"):
        assert steps[name]["losses_equal"] == steps[name]["steps"]
    assert steps["reference"]["made"] >= steps["same GPUs"]["steps"]


def test_a_failed_run_keeps_the_logs_of_the_daemon_and_of_the_job(tmp_path: Path) -> None:
    """The job's log was looked for in another folder, and the daemon's was cut off before its end."""
    out = tmp_path / "results.json"
    ran = rehearse("nccl_run", tmp_path / "run", "--out", str(out), "ddp", GLOO_SOCKET_IFNAME="none")
    assert ran.returncode == 1, "the ranks cannot connect"
    (failed,) = json.loads(out.read_text())["steps"]
    assert any("Traceback" in line for line in failed["job"])
    assert "Traceback" in (tmp_path / "results.ddp.job.log").read_text()
    assert "stopped" in (tmp_path / "results.ddp.log").read_text()


def test_a_step_after_the_first_loss_that_differs_is_wrong_and_one_before_it_is_not() -> None:
    before, after, larger = {"steps": 1}, {"steps": 2}, {"steps": 1, "memory_mib": [{0: 9.0 + MAX_GROWTH_MIB}]}
    losses = [["a\n", "b\n"], ["a\n", "c\n"]]
    compare(losses, [["a\n", "b\n"], ["a\n", "b\n"]], [{0: 8.0}], [before, after, larger])
    assert before == {"steps": 1, "losses_equal": 1}
    assert after == {"steps": 2, "wrong": "rank 1 step 1: c and not b"}
    assert "MiB on its GPU" in str(larger["wrong"])
    short: dict[str, object] = {"steps": 2}
    compare(losses[:1], [["a\n"]], [], [short])
    assert short["wrong"] == "rank 0 step 1: b and not None"
