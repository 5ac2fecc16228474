"""The runs on real GPUs that restart trainings, rehearsed: on simulated GPUs, and one restart over the stub driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.protocol.messages import Migrate, OperationReply
from tests.e2e.moved_job import BARE, BRISK
from tests.gpu.moves_jobs import TRAINING
from tests.gpu.restart_node import RestartedJob, RestartNode
from tests.needs import need_torch
from tests.stubs.cuda.node import GIB, CudaNode

pytestmark = [pytest.mark.e2e]
need_torch()

ROOT = Path(__file__).parents[2]
# Threads that poll for each other take the processors from all other processes.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def rehearsed(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "client", BRISK)))
    environ = {**os.environ, **ONE_THREAD, **BARE, "PYTHONPATH": paths}
    return subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{program}", "--rehearse", *words],
        env=environ, cwd=ROOT, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip


@pytest.mark.wide
def test_trainings_go_from_the_cpu_to_a_gpu_and_back_and_finished_cases_are_not_repeated(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ("--state", str(state), "--budget-s", "200", "cpu")
    first = rehearsed("restarts_run", *words)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "| cpu | ok | cpu → gpu0 → cpu |" in first.stdout
    (result,) = [json.loads(line) for line in state.read_text().splitlines()]
    assert len(result["seconds"]) == 2
    again = rehearsed("restarts_run", *words, "plain", "--budget-s", "1")
    assert again.returncode == 1
    assert "1 ok, 0 failed: -, 1 not run" in again.stdout


@pytest.mark.wide
def test_the_benchmark_splits_a_restart_and_has_its_rates() -> None:
    ran = rehearsed("bench_restart", "--repeat", "1", "--ready", "always", "pinned", "made-there")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "made-there, always: " in ran.stdout
    for what in ("written", "put back", "checked"):
        assert f"* state {what} at " in ran.stdout


def test_a_training_on_the_cpu_of_a_node_with_real_gpus_is_listed_and_restarted_on_a_gpu(tmp_path: Path) -> None:
    """Without CUDA an agent counts the memory on the CPU, as on simulated GPUs, and the training looked as if it were
    on a GPU. The driver is a stub, which PyTorch does not use: only the new process's arguments show the change.
    """
    cuda = CudaNode.make(tmp_path / "cuda", gpus=2, gpu_bytes=64 * GIB)
    scenario = cuda.nvml(tmp_path / "nvml")
    scenario.write()
    stubs = {**cuda.environment(), **scenario.environment(), **ONE_THREAD}
    folder = tmp_path / "node"
    folder.mkdir()
    words = [str(TRAINING / "restarted.py"), "4000", "pace=0.05"]
    with RestartNode(folder, rehearsed=False, pool_bytes=GIB, more=stubs) as node:
        job = RestartedJob(node, words, "cpu")
        try:
            job.read_steps(3)
            job.seen_at("cpu")
            with node.connect() as hegmd:
                request = Migrate(pids=(job.pid,), to="gpu1", via="restart")
                moved = hegmd.call(request, OperationReply).operation
                uuid = hegmd.gpus().gpus[1].uuid
            assert moved is not None
            assert (moved.phase, moved.processes[0].began_on, moved.processes[0].gpu) == ("done", "cpu", "gpu1")
            environ = Path(f"/proc/{job.worker()}/environ").read_bytes().split(b"\0")
            assert f"CUDA_VISIBLE_DEVICES={uuid}".encode() in environ
            numbers = [int(line.split()[1]) for line in job.steps()]
            assert numbers == list(range(len(numbers)))
        finally:
            job.close()
