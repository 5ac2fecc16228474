"""The runs on real GPUs that move jobs, over the stub driver: no time on such machines is for their own mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stubs.cuda.node import CudaNode

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
GIB = 1 << 30


def run(folder: Path, *words: str, program: str = "moves_run", **more: str) -> subprocess.CompletedProcess[str]:
    """The run, on a node with two stub GPUs."""
    folder.mkdir()
    node = CudaNode.make(folder / "node", gpus=2, gpu_bytes=8 * GIB)
    scenario = node.nvml(folder / "nvml")
    scenario.link_all()
    scenario.write()
    paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'client'}"}
    return subprocess.run(
        [sys.executable, "-m", f"tests.gpu.{program}", *words],
        env={**os.environ, **node.environment(), **scenario.environment(), **paths, **more},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_run_moves_jobs_kills_the_daemon_and_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    results = tmp_path / "results"
    cases = ["migrate-plain-peer", "suspend-plain", "helper-evacuating", "daemon-refilling"]
    first = run(tmp_path / "first", "--results", str(results), *cases[:2])
    assert first.returncode == 0, first.stdout + first.stderr
    second = run(tmp_path / "second", "--results", str(results), *cases)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "2 cases" in second.stdout, "what was done already is not done again"
    found = {result["case"]: result for result in map(json.loads, results.read_text().splitlines())}
    assert list(found) == [*cases[:2], "nothing-left", *cases[2:]]
    assert [result["wrong"] for result in found.values()] == [""] * 5


def test_a_job_that_says_anything_else_than_undisturbed_fails_its_case(tmp_path: Path) -> None:
    ran = run(tmp_path / "node", "migrate-plain-peer", HEGM_TEST_UNLIKE="1")
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "and undisturbed it is" in ran.stdout


def test_the_benchmark_measures_each_way_and_ends_when_its_time_is_over(tmp_path: Path) -> None:
    words = ["--sizes", "2", "--repeat", "1", "--budget-s", "60", "peer", "host", "idle"]
    ran = run(tmp_path / "node", *words, program="bench_moves")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:5]] for line in ran.stdout.splitlines() if line.startswith("|")]
    measured = [["2", "migrate", "peer", "1"], ["2", "suspend", "host", "1"], ["2", "resume", "host", "1"]]
    assert rows[2:] == measured
    assert "a step: " in ran.stdout
    cut = run(tmp_path / "cut", "--sizes", "2", "--budget-s", "1", "peer", program="bench_moves")
    assert "was cut: the time is over" in cut.stdout, cut.stdout + cut.stderr
