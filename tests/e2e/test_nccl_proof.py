"""`hegmctl doctor --nccl` on a simulated node: gloo ranks go through the same code as NCCL's on real GPUs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import BARE, environment
from tests.needs import need_torch
from tests.patience import HANG_S

pytestmark = [pytest.mark.e2e]


def doctor(daemon: RunningDaemon, *words: str, status: int) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-m", "hegmctl", "doctor", "--nccl", *words, "--json"],
        env={**environment(daemon.socket_path), **BARE, "TMPDIR": str(daemon.folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert ran.returncode == status, ran.stdout + ran.stderr
    reply: dict[str, Any] = json.loads((ran.stdout or ran.stderr).splitlines()[-1])
    return reply


def test_a_combination_is_proven_once_and_then_known(tmp_path: Path) -> None:
    """Issue 16, outcome 4."""
    need_torch()
    with RunningDaemon(tmp_path) as daemon:
        reply = doctor(daemon, "--python", sys.executable, status=0)
        assert reply["proof"]["verdict"] == "proven"
        assert reply["gpus"] == ["gpu0", "gpu1"]
        steps = [step["step"] for step in reply["steps"]]
        assert steps[-5:] == ["migrate to gpu1,gpu0", "suspend", "resume on gpu0,gpu1", "suspend", "resume"]
        assert reply["losses"] >= 2 * 80
        (kept,) = json.loads((tmp_path / "state" / "nccl-proofs.json").read_text())
        assert kept == reply["proof"]
        assert kept["combination"]["library"] == "gloo"
        assert not [name for name in os.listdir(tmp_path) if name.startswith("hegm-nccl-")]


def test_a_job_that_does_not_start_is_an_error_and_no_verdict(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'ModuleNotFoundError: No module named torch' >&2\nexit 1\n")
    broken.chmod(0o755)
    with RunningDaemon(tmp_path) as daemon:
        error = doctor(daemon, "--python", str(broken), status=13)["error"]
        assert "No module named torch" in error["message"]
        assert "--python PYTHON" in error["hint"]
        error = doctor(daemon, "--gpu", "gpu0", status=6)["error"]
        assert "needs two GPUs, and 1 are named" in error["message"]
        error = doctor(daemon, "--python", "/missing/python", status=5)["error"]
        assert error["message"] == "/missing/python is not a program"
        assert not (tmp_path / "state" / "nccl-proofs.json").exists()


@pytest.mark.parametrize(("simulated", "there"), [("1x8GiB", "gpu0"), (None, "no GPU")])
def test_a_node_with_fewer_than_two_gpus_gets_no_hint_to_wait_for_free_ones(
    tmp_path: Path, simulated: str | None, there: str
) -> None:
    arguments = () if simulated is None else ("--simulate", simulated)
    with RunningDaemon(tmp_path, *arguments, simulate=False) as daemon:
        error = doctor(daemon, status=6)["error"]
        assert error["message"] == f"the throwaway job needs two GPUs of one chip, and this node has {there}"
        assert "prove it on a node with two" in error["hint"]


# Runs torchrun, and then changes a loss of the undisturbed run, as if the moved one had gone wrong there.
WRONG = f"""#!/bin/sh
{shlex.quote(sys.executable)} "$@"; status=$?
for path; do :; done
case "$path" in */alone) sed -i "3s/.*/0x1.8p+0/" "$path.1" ;; esac
exit $status
"""


@pytest.mark.wide
def test_another_loss_is_a_failed_verdict_that_the_daemon_keeps(tmp_path: Path) -> None:
    need_torch()
    python = tmp_path / "python"
    python.write_text(WRONG)
    python.chmod(0o755)
    with RunningDaemon(tmp_path) as daemon:
        reply = doctor(daemon, "--python", str(python), status=15)
        assert reply["proof"]["verdict"] == "failed"
        assert reply["proof"]["detail"] == "rank 1 has another loss at step 3 than an undisturbed run"
        (kept,) = json.loads((tmp_path / "state" / "nccl-proofs.json").read_text())
        assert kept == reply["proof"]
