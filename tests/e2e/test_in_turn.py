"""The runner of `make test-gpu` over the stub driver: it stops when the time is over, and continues from there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.rehearsal import rehearse

pytestmark = [pytest.mark.e2e]

ROW = "the_wrong_order_changes_nothing"


def test_parts_are_left_for_another_time_and_ended_ones_are_not_begun_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    words = ["test", "--state", str(state), "--only", "driver,moves", "--budget-s"]
    rows = ["--", "driver", ROW, "--", "moves", "migrate-plain-peer"]
    short = rehearse("in_turn", tmp_path / "short", *words, "1", *rows)
    assert short.returncode == 1, short.stderr
    assert short.stdout.count("left for another time") == 2
    enough = rehearse("in_turn", tmp_path / "enough", *words, "100", *rows)
    assert enough.returncode == 0, enough.stdout + enough.stderr
    assert f"ok       {ROW}" in enough.stdout
    assert "| migrate-plain-peer | ok | peer |" in enough.stdout
    again = rehearse("in_turn", tmp_path / "again", *words, "100", *rows)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("ended before") == 2
    assert ROW not in again.stdout


def test_the_rows_of_the_contract_continue_where_they_were_cut_and_failed_ones_run_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    cut = rehearse("driver_run", tmp_path / "cut", "--state", str(state), "--budget-s", "0", ROW)
    assert cut.returncode == 1, cut.stderr
    assert f"cut before {ROW}" in cut.stdout
    state.write_text(f'{{"row": "{ROW}", "holds": false}}\n')
    again = rehearse("driver_run", tmp_path / "again", "--state", str(state), ROW)
    assert (again.returncode, "0 of 1 rows do not hold" in again.stdout) == (0, True), again.stdout + again.stderr
    held = rehearse("driver_run", tmp_path / "held", "--state", str(state), ROW)
    assert (held.returncode, f"ok       {ROW}" in held.stdout) == (0, False), held.stdout


def test_arguments_for_an_unknown_part_are_refused(tmp_path: Path) -> None:
    ran = rehearse("in_turn", tmp_path / "node", "bench", "--", "driver", ROW)
    assert ran.returncode == 2
    assert "there are rows, images, restart, moves, inventory" in ran.stderr
