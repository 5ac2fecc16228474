"""The runs on real GPUs that move jobs, over the stub driver: no time on such machines is for their own mistakes."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.e2e.rehearsal import rehearse

pytestmark = [pytest.mark.e2e]


def run(folder: Path, *words: str, program: str = "moves_run", **more: str) -> subprocess.CompletedProcess[str]:
    return rehearse(program, folder, *words, **more)


@pytest.mark.wide
def test_the_run_moves_jobs_kills_the_daemon_and_continues_where_it_was_cut(tmp_path: Path) -> None:
    results = tmp_path / "state"
    cases = ["migrate-plain-peer", "suspend-plain", "migrate-two", "helper-offloading", "keeper-reloading-peer"]
    first = run(tmp_path / "first", "--state", str(results), *cases[:2])
    assert first.returncode == 0, first.stdout + first.stderr
    second = run(tmp_path / "second", "--state", str(results), *cases)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "3 cases" in second.stdout, "what was done already is not done again"
    assert "1 descriptors kept without it" in second.stdout, "hegmd's own keeper has them"
    found = {result["case"]: result for result in map(json.loads, results.read_text().splitlines())}
    assert list(found) == [*cases[:2], "nothing-left", *cases[2:]]
    assert [result["wrong"] for result in found.values()] == [""] * 6


@pytest.mark.wide
def test_concurrent_jobs_whose_output_differs_from_the_undisturbed_run_fail_their_cases(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ["--state", str(state), "--only", "migrate-amp,migrate-plain-peer"]
    ran = run(tmp_path / "node", *words, HEGM_TEST_UNLIKE="1")
    found = {result["case"]: result for result in map(json.loads, state.read_text().splitlines())}
    assert set(found) == {"migrate-plain-peer", "migrate-amp", "nothing-left"}, ran.stdout + ran.stderr
    assert all("and undisturbed it is" in found[case]["wrong"] for case in ("migrate-plain-peer", "migrate-amp"))
    again = run(tmp_path / "again", *words, "--again")
    assert again.returncode == 0, again.stdout + again.stderr
    assert again.stdout.count("beside 1 other") >= 2


@pytest.mark.wide
def test_the_benchmark_measures_each_carrier_and_continues_where_it_was_cut(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ["--sizes", "2", "--repeat", "1", "--state", str(state)]
    cut = run(tmp_path / "cut", *words, "--budget-s", "1", "peer", program="bench_moves")
    assert "the time is over" in cut.stdout, cut.stdout + cut.stderr
    first = run(tmp_path / "first", *words, "peer", program="bench_moves")
    assert first.returncode == 0, first.stdout + first.stderr
    measured = [["2", "migrate", "peer", "gpu0 to 1", "1"], ["2", "migrate", "peer", "gpu1 to 0", "1"]]
    assert rows_of(first.stdout) == measured
    ran = run(tmp_path / "node", *words, "peer", "host", "idle", program="bench_moves")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rest = [["2", "resume", "host", "gpu0", "1"], ["2", "suspend", "host", "gpu0", "1"]]
    assert rows_of(ran.stdout) == [*measured, *rest], "what was measured is not measured again"
    assert "a step: " in ran.stdout
    stood = re.search(r"^\| 2 \| suspend \| host \| gpu0 \| (\d+) \| [a-z]+ ", ran.stdout, re.MULTILINE)
    assert stood is not None, "whose each moment was is told from the log"
    match = re.search(r"2 GiB suspend host gpu0: ([\d.]+) s", ran.stdout)
    assert match is not None
    assert abs(float(match[1]) * 1e3 - int(stood[1])) <= 2, "the parts do not add up to how long it stood"


def rows_of(output: str) -> list[list[str]]:
    """The first cells of the first table, whose head begins so."""
    table = output[output.index("| GiB |") :].partition("\n\n")[0]
    return [[cell.strip() for cell in line.split("|")[1:6]] for line in table.splitlines()[2:]]


def test_a_suspend_that_keeps_contexts_frees_the_rest_and_every_loss_is_the_same(tmp_path: Path) -> None:
    words = ["--sizes", "1", "--repeat", "1", "--modes", "keep-context", "--ready", "on"]
    ran = run(tmp_path / "node", *words, program="bench_suspend")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"\| 1 \| keep-context \| on \|.*\| 512 \(512\) \|", ran.stdout), ran.stdout


@pytest.mark.wide
def test_kept_contexts_survive_a_killed_daemon_and_slices(tmp_path: Path) -> None:
    state = tmp_path / "state"
    stages = ("offloading", "checkpointing", "suspended", "reloading")
    cases = ["keep-context-plain", "keep-context-expandable", *(f"daemon-keep-context-{stage}" for stage in stages)]
    ran = run(tmp_path / "node", "--state", str(state), *cases)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = {result["case"]: result["wrong"] for result in map(json.loads, state.read_text().splitlines())}
    assert found == dict.fromkeys([*cases, "nothing-left"], "")
