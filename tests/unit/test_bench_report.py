"""The report of a benchmark: the verdict on each figure, the same figures in every form, and true readings."""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import time

import pytest

from tests.bench import __main__ as program
from tests.bench.gauges import MIB, Memory, cpu_s, percentile, slope
from tests.bench.report import Machine, Row, as_json, as_markdown, as_text, is_within
from tests.cells import in_one_test

MACHINE = Machine(
    cpu="A CPU",
    cores=2,
    memory_bytes=24 << 30,
    kernel="Linux 6.1",
    python="CPython 3.11.2",
    revision="abc1234",
    taken_utc="2025-03-09 12:00 UTC",
    load="0.1 0.2 0.3",
)
RESULTS = {
    "first": [Row("quick", 0.05, "ms", 1.0), Row("known", 12345.6, "KiB")],
    "second": [Row("slow", 3.0, "s", 2.0)],
}


@in_one_test(
    ("value", "budget", "verdict"),
    [(1.0, 1.0, "ok"), (1.01, 1.0, "over"), (5.0, None, ""), (math.nan, 1.0, "over"), (-1.0, 0.0, "ok")],
)
def test_a_figure_is_held_to_its_budget(value: float, budget: float | None, verdict: str) -> None:
    row = Row("it", value, "ms", budget)
    assert row.verdict == verdict
    assert is_within({"it": [row]}) == (verdict != "over")


def test_a_single_figure_over_its_budget_fails_the_report() -> None:
    assert is_within({"first": RESULTS["first"]})
    assert not is_within(RESULTS)


def test_the_table_is_aligned_and_names_place_and_time() -> None:
    lines = as_text(MACHINE, RESULTS).splitlines()
    assert lines[:2] == [
        "A CPU, 2 cores, 24 GiB; Linux 6.1; CPython 3.11.2",
        "2025-03-09 12:00 UTC, revision abc1234, load average 0.1 0.2 0.3",
    ]
    assert lines[3:] == [
        "WHAT     FIGURE UNIT  BUDGET",
        "first:",
        "  quick    0.05 ms         1  ok",
        "  known  12,346 KiB",
        "second:",
        "  slow        3 s          2  over",
    ]


def test_markdown_has_every_figure_with_its_unit() -> None:
    text = as_markdown(MACHINE, RESULTS)
    assert "| quick | 0.05 ms | 1 ms | ok |" in text
    assert "| known | 12,346 KiB |  |  |" in text
    assert "| slow | 3 s | 2 s | over |" in text
    assert "revision abc1234" in text


def test_json_has_the_figures_as_they_were_measured() -> None:
    record = json.loads(as_json(MACHINE, RESULTS))
    assert record["machine"] == dataclasses.asdict(MACHINE)
    assert record["figures"] == [
        {"benchmark": "first", "name": "quick", "value": 0.05, "unit": "ms", "budget": 1.0, "verdict": "ok"},
        {"benchmark": "first", "name": "known", "value": 12345.6, "unit": "KiB", "budget": None, "verdict": None},
        {"benchmark": "second", "name": "slow", "value": 3.0, "unit": "s", "budget": 2.0, "verdict": "over"},
    ]


@in_one_test(
    ("value", "shown"),
    [(0.0, "0"), (0.0182, "0.0182"), (0.114, "0.114"), (9.81, "9.81"), (39.84, "39.8"), (1e6, "1,000,000")],
)
def test_a_figure_shows_three_digits_that_count(value: float, shown: str) -> None:
    assert f" {shown} ms" in as_text(MACHINE, {"it": [Row("it", value, "ms")]})


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0


def test_a_slope_is_not_moved_by_one_jump() -> None:
    assert slope([0.0, 2.0, 4.0, 6.0]) == 2.0
    assert slope([5.0] * 10 + [500.0] + [5.0] * 10) == 0.0


def test_the_cpu_time_of_a_process_equals_its_own_count() -> None:
    before = time.process_time()
    used_s = cpu_s(os.getpid())
    assert before <= used_s <= time.process_time()


def test_memory_that_a_process_takes_shows_as_its_own() -> None:
    before = Memory.of(os.getpid())
    with mmap.mmap(-1, 8 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as taken:
        for page in range(0, 8 * MIB, mmap.PAGESIZE):
            taken[page] = 1
        after = Memory.of(os.getpid())
    assert 8 * MIB <= after.anonymous_bytes - before.anonymous_bytes < 10 * MIB
    assert after.resident_bytes >= after.proportional_bytes > after.anonymous_bytes / 2


@pytest.mark.parametrize(("rows", "status"), [((("it", 1.0, "ms", 2.0),), 0), ((("it", 3.0, "ms", 2.0),), 1)])
def test_the_exit_status_shows_whether_all_is_within_budget(
    rows: tuple[tuple[str, float, str, float | None], ...], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.main(["it", "--json"], {"it": lambda: rows}) == status
    assert json.loads(capsys.readouterr().out)["figures"][0]["value"] == rows[0][1]


def test_an_unknown_benchmark_is_refused_before_any_runs(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def run() -> list[Row]:
        ran.append("it")
        return []

    with pytest.raises(SystemExit) as left:
        program.main(["it", "that"], {"it": run})
    assert left.value.code == 2
    assert "no benchmark that; there are it" in capsys.readouterr().err
    assert ran == []
