"""The programs that restart trainings on real GPUs: what they take for right, their figures, their words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from hegmd.protocol.operations import StoryLine
from tests.cells import in_one_test
from tests.gpu import bench_record, bench_restart, recovery_jobs, restarts_run
from tests.gpu.in_turn import PARTS
from tests.gpu.moves_node import WentWrongError

AS_IT_IS = [
    "step 0 cuda a b 0x1.0p+0 0x1.8p+1",
    "step 1 cuda b c 0x1.0p+1 0x1.0p+1",
    "step 2 cuda c d 0x1.0p+2 0x1.0p+0",
]


def changed(number: int, place: int, word: str) -> list[str]:
    lines = [line.split() for line in AS_IT_IS]
    lines[number][place] = word
    return [" ".join(line) for line in lines]


@in_one_test(
    ("lines", "wrong"),
    [
        (changed(1, 1, "2"), "step 2 came where step 1 was due"),
        (AS_IT_IS[:1] + AS_IT_IS[2:], "step 2 came where step 1 was due"),
        (changed(2, 3, "x"), "before step 2 it had x, and c after the one before"),
        (changed(1, 5, "0x1.1p+1"), "step 1 had another batch"),
        (changed(1, 6, "0x1.1p+1"), "step 1 has the loss 2.125, and undisturbed 2"),
        (changed(1, 6, "nan"), "step 1 has the loss nan"),
        ([], "it printed nothing"),
    ],
)
def test_an_inexact_restart_is_detected(lines: list[str], wrong: str) -> None:
    assert wrong in restarts_run.differences(lines, AS_IT_IS, restarts_run.Case((), exact=False))
    if lines:
        assert restarts_run.differences(lines, AS_IT_IS, restarts_run.Case(()))


def test_only_losses_may_differ_a_little_and_only_between_devices() -> None:
    near = [line.replace("cuda", "cpu") for line in changed(1, 6, "0x1.0001p+1")]
    assert restarts_run.differences(near, AS_IT_IS, restarts_run.Case((), exact=False)) == ""
    assert "undisturbed it is" in restarts_run.differences(near, AS_IT_IS, restarts_run.Case(()))
    assert restarts_run.differences(AS_IT_IS, AS_IT_IS, restarts_run.Case(())) == ""


@pytest.mark.parametrize(("close_steps", "wrong"), [(1, ""), (2, "step 2 has the loss")])
def test_losses_that_drift_apart_are_compared_for_so_many_steps_from_the_first(close_steps: int, wrong: str) -> None:
    drifting = changed(1, 6, "0x1.0001p+1")[:2] + changed(2, 6, "0x1.8p+1")[2:]
    found = restarts_run.differences(drifting, AS_IT_IS, restarts_run.Case((), exact=False, close_steps=close_steps))
    assert found[: len("step 2 has the loss")] == wrong


def test_cases_go_to_the_other_gpu_if_there_is_one_and_through_the_cpu() -> None:
    assert restarts_run.CASES["plain"].places(["gpu0", "gpu1", "gpu2"]) == ["gpu0", "gpu1", "gpu0"]
    assert restarts_run.CASES["plain"].places(["gpu0"]) == ["gpu0", "gpu0", "gpu0"]
    assert restarts_run.CASES["cpu"].places(["gpu0", "gpu1"]) == ["cpu", "gpu0", "cpu"]
    assert not restarts_run.CASES["cpu"].exact


def test_a_training_on_two_gpus_stays_exchanges_them_and_exchanges_them_again() -> None:
    places = restarts_run.CASES["two"].places(["gpu0", "gpu1", "gpu2"])
    assert places == ["gpu0,gpu1", "gpu0,gpu1", "gpu1,gpu0", "gpu0,gpu1"]
    words = [restarts_run.words_to(*pair) for pair in pairwise(places)]
    assert words == [None, "gpu1,gpu0", "gpu1=gpu0,gpu0=gpu1"]
    assert restarts_run.CASES["two"].places(["gpu0", "gpu1"], rehearsed=True) == ["gpu0", "gpu1", "gpu0"]
    assert restarts_run.CASES["two-killed"].places(["gpu0", "gpu1"]) == ["gpu0,gpu1", "gpu1,gpu0"]
    assert restarts_run.words_to("gpu0", "gpu0") == "gpu0"
    assert restarts_run.each_step(["0 a", "1 b", "1 b", "2 c"]) == ["0 a", "1 b", "2 c"]
    lines = ["on a b", "step 0", "on b a"]
    assert restarts_run.wrong_order(lines, [["a", "b"], ["b", "a"]]) == ""
    assert "had to be on" in restarts_run.wrong_order(lines, [["a", "b"], ["a", "b"]])


def test_words_of_the_run_and_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = restarts_run.parsed(["--only", "amp,cpu", "plain", "--rehearse"])
    assert (options.cases, options.rehearse) == (["plain", "amp", "cpu"], True)
    with pytest.raises(SystemExit):
        restarts_run.parsed(["no-such-case"])
    assert "there is no case 'no-such-case'" in capsys.readouterr().err
    state = tmp_path / "state"
    result = {"case": "amp", "wrong": "one\n two", "seconds": [7.25, 3.5], "places": ["gpu0", "gpu1"], "took_s": 60.0}
    state.write_text(json.dumps(result) + "\n")
    assert restarts_run.main(["--table", "--state", str(state)]) == 0
    assert "| amp | FAILED | gpu0 → gpu1 | 7.2 s, 3.5 s | one two |" in capsys.readouterr().out
    assert not restarts_run.Run(state, again=True).is_done("amp")
    assert restarts_run.Run(state, again=False).is_done("amp")


def story(*events: tuple[str, float]) -> list[StoryLine]:
    return [StoryLine(utc=utc, event=event, phase="") for event, utc in events]


def test_the_parts_of_a_restart_add_up_to_it() -> None:
    steps = story(
        ("begin", 10.125),
        ("pool-reserved", 10.25),
        ("successor-awaited", 10.5),
        ("parked", 11.0),
        ("surveyed", 11.5),
        ("offloaded", 13.0),
        ("worker-exited", 13.5),
        ("restored", 19.0),
    )
    marks = bench_restart.marks_of(["mark began 14.0", "mark imported 16.0", "mark built 18.0"])
    parts, ended_utc = bench_restart.split_of(10.0, steps, {**marks, "stepped": 20.0})
    assert parts == {
        "plan": 0.125, "arm": 0.125, "ready": 0.25, "park": 0.5, "save": 2.0, "leave": 0.5,
        "start": 0.5, "import": 2.0, "build": 2.0, "load": 1.0, "step": 1.0,
    }  # fmt: skip
    assert sum(parts.values()) == ended_utc - 10.0 == 10.0
    assert bench_restart.parked_s(parts) == 9.0
    with pytest.raises(WentWrongError, match="'restored'"):
        bench_restart.split_of(10.0, steps[:-1], {**marks, "stepped": 20.0})


def end_by_sigterm(given_back: list[str]) -> None:
    with contextlib.ExitStack() as held:
        held.enter_context(bench_record.unwinding())
        held.callback(given_back.append, "pages")
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_benchmark_that_gets_sigterm_removes_its_folder_and_its_pages() -> None:
    given_back: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        end_by_sigterm(given_back)
    assert (ended.value.code, given_back) == (128 + signal.SIGTERM, ["pages"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_rates_come_from_the_agents_records_next_to_the_pinned_copy(tmp_path: Path) -> None:
    notes = (
        "hegm agent 7 1.5: the state was written in 0.2000 s: 10000000000 bytes\n"
        "hegm agent 8 2.5: the state was checked in 0.1000 s\n"
        "hegm agent 8 3.5: the state was put back in 0.2500 s\n"
    )
    rates, size_bytes = bench_restart.noted(notes)
    assert (rates, size_bytes) == ({"written": 5e10, "checked": 1e11, "put back": 4e10}, 10**10)
    figures = bench_restart.Measurements(tmp_path / "state")
    figures.keep({"pinned": {"out": 5e10, "in": 5e10}})
    parts = dict.fromkeys(bench_restart.PARTS, 1.0)
    figures.keep({"task": "made-there", "took_s": 8.0, "parts": parts, "rates": rates, "state_bytes": size_bytes})
    again = bench_restart.Measurements(tmp_path / "state").markdown()
    assert again == figures.markdown()
    assert "| made-there | 8.00 s (8.00 to 8.00, 1 times) | 7.00 s | 1.00 |" in again
    assert "over 7 s" in again
    assert "* state written at 50.0 GB/s, 1.00 of the pinned copy's 50.0 (budget 0.9)" in again
    assert "* state put back at 40.0 GB/s, 0.80 of the pinned copy's 50.0 (budget 0.9)" in again


def test_the_benchmark_is_of_the_training_of_the_facts_unless_it_is_rehearsed() -> None:
    assert bench_restart.parsed([]).gib == bench_restart.SIZE_GIB
    assert bench_restart.parsed(["--rehearse"]).gib == bench_restart.REHEARSED_GIB
    assert bench_restart.parsed(["--gib", "2", "made-here"]).gib == 2.0
    assert bench_restart.parsed(["--ready", "in-turn,always"]).ready == ["in-turn", "always"]


def test_both_runs_are_among_those_run_in_turn() -> None:
    words = {part.name: part.words for kind in PARTS.values() for part in kind}
    assert words["restarts"] == ("-m", "tests.gpu.restarts_run")
    assert words["restart"] == ("-m", "tests.gpu.bench_restart")


ALONE = [f"step 1 {number} {number:x}\n" for number in range(9)]


def steps(pid: int, *numbers: int) -> list[str]:
    return [f"step {pid} {number} {number:x}\n" for number in numbers]


def test_a_recovered_training_is_exact_if_each_process_repeats_steps_of_the_undisturbed_run() -> None:
    result = recovery_jobs.compared([*steps(2, 0, 1, 2, 3), "step 2 4", *steps(3, 2, 3, 4)], ALONE)
    assert result == {"exact": True, "checked": 7, "told": 7, "repeated": 2, "processes": 2}
    assert recovery_jobs.compared(steps(2, *range(12)), ALONE)["checked"] == 9


@pytest.mark.parametrize("second", [steps(3, 5, 6), ["step 3 2 f\n"], steps(3, 2, 4)])
def test_a_recovered_training_that_leaves_out_or_changes_a_step_is_not_exact(second: list[str]) -> None:
    assert not recovery_jobs.compared([*steps(2, 0, 1, 2, 3), *second], ALONE)["exact"]
