"""The campaign of `tests.bench.failures` where a case has not ended when the time is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench import failures
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.wide]
need_torch()


def test_the_budget_does_not_begin_before_the_undisturbed_runs_have_ended_and_a_cut_case_keeps_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The undisturbed runs used up a short budget, so that no case began. A case that was cut had no line at all."""
    out = tmp_path / "rows"
    hangs = ["--only", "hang: sleep", "--hang-limit", "off", "--ranks", "1", "--times", "1"]
    status = failures.main([*hangs, "--budget-s", "2", "--grace-s", "0", "--out", str(out)])
    assert status == 0
    (row,) = map(json.loads, out.read_text().splitlines())
    assert row["result"] == "cut"
    assert "serves at" in row["story"]
    assert capsys.readouterr().out.endswith("0 cases, 0 of them WRONG; 1 were cut\n")
