"""`hegmctl run` where no daemon is: the one that it starts is found again, has the GPU named, and is the user's own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.nvml_daemon import NvmlDaemon
from tests.patience import HANG_S
from tests.stubs.build import build_stub
from tests.stubs.nvml.scenario import Scenario, uuid
from tests.unit.hegmctl.running import command, environment

pytestmark = pytest.mark.e2e


def _run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*words), env=environment(**environ), capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_a_gpu_that_the_daemon_started_for_the_job_has_not_is_refused(socket_dir: Path) -> None:
    """`--gpu gpu9` was only looked at where a daemon was there already; else the job trained on no GPU at all."""
    spec = ("--socket", str(socket_dir / "d.sock"), "run", "--simulate", "2x1GiB", "--gpu")
    refused = _run(*spec, "gpu9", "--", "echo", "trains")
    assert (refused.returncode, refused.stdout) == (5, "")
    assert "no GPU 'gpu9'; this node has gpu0, gpu1" in refused.stderr
    assert _run(*spec, "gpu1", "--", "echo", "trains").stdout == "trains\n"


def test_no_daemon_is_started_where_another_user_could_answer(socket_dir: Path) -> None:
    """A folder that is not the user's alone was used, and one of them could put a socket of its own in its place."""
    if os.access("/run/hegm/hegmd.sock", os.W_OK):
        pytest.skip("this node has a daemon that is found first")
    folder = socket_dir / "hegm"
    folder.mkdir()
    folder.chmod(0o777)
    words = ("run", "--simulate", "1x1GiB", "--", "echo", "trains")
    refused = _run(*words, XDG_RUNTIME_DIR=str(socket_dir))
    assert (refused.returncode, refused.stdout) == (6, "")
    assert f"{folder} is writable for other users, who could impersonate the daemon" in refused.stderr
    folder.chmod(0o700)
    assert _run(*words, XDG_RUNTIME_DIR=str(socket_dir)).stdout == "trains\n"


def test_the_daemon_of_a_run_is_found_without_being_named(socket_dir: Path) -> None:
    if os.access("/run/hegm/hegmd.sock", os.W_OK):
        pytest.skip("this node has a daemon that is found first")
    ask = "unset HEGM_SOCKET; exec " + shlex.join(command("gpus", "--quiet"))
    result = _run("run", "--simulate", "1x1GiB", "--", "sh", "-c", ask, XDG_RUNTIME_DIR=str(socket_dir))
    assert (result.returncode, "gpu0" in result.stdout) == (0, True), result.stderr


def test_the_requested_gpu_was_ignored_on_a_node_with_real_gpus(tmp_path: Path, socket_dir: Path) -> None:
    """Issue 14, row 8: the job trained on gpu0 despite --gpu, and on another after the loss of its GPU."""
    scenario = Scenario.of_h200s(tmp_path / "scenario", 3)
    scenario.order("error *@2 15")  # NVML_ERROR_GPU_IS_LOST
    build_stub("nvml", tmp_path)
    libraries = {"LD_LIBRARY_PATH": str(tmp_path), **scenario.environment()}
    within = "import os, subprocess; subprocess.run(['sh', '-c', 'echo $CUDA_VISIBLE_DEVICES'], check=True)"
    job = ("--", sys.executable, "-c", within)
    with NvmlDaemon(socket_dir, environ=libraries) as daemon:
        spec = ("--socket", str(daemon.socket_path), "run", "--gpu")
        assert _run(*spec, "gpu1", *job).stdout == f"{uuid(1)}\n"
        assert _run(*spec, "gpu1,gpu0", *job).stdout == f"{uuid(1)},{uuid(0)}\n"
        lost = _run(*spec, "gpu2", *job)
    assert (lost.returncode, lost.stdout) == (6, "")
    assert "gpu2 is lost: it fell off the bus; use another: gpu0, gpu1" in lost.stderr
