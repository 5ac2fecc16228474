"""A training that is killed again and again: a smaller campaign than that of `tests.bench.many_recoveries`."""

from __future__ import annotations

import pytest

from tests.bench import many_recoveries
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e, pytest.mark.wide]
need_torch()

TIMES = 12


def test_recoveries_in_a_row_have_the_losses_of_the_undisturbed_run_and_leave_nothing_behind() -> None:
    assert many_recoveries.main(["--times", str(TIMES)]) == 0
