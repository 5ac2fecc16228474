"""Trainings in a framework's loops, restarted: every batch, rate, loss, log and count is that of an undisturbed run.

What tells how long something took is not compared: the clock goes on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.restarted import LEFT_STATUS, Ended, Restarts

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts"), pytest.mark.timeout(120)]

ROOT = Path(__file__).parents[2]
TRAINER = str(ROOT / "tests" / "bench" / "restarted" / "trained.py")
ACCELERATED = ROOT / "tests" / "e2e" / "moved" / "accelerated.py"
KEPT = """
import hegm
hegm.keep("losses", lambda: losses, lambda value: globals().update(losses=value))
for epoch in range(3):
"""


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    missing = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `pip install -e '.[frameworks]'` does that")
    with Restarts(tmp_path_factory.mktemp("restarts"), "transformers.trainer") as running:
        yield running


def _lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if "runtime" not in line]


def _left_and_ended(ends: list[Ended], times: int) -> None:
    assert [ended.status for ended in ends] == [*[LEFT_STATUS] * times, 0], [ended.errors for ended in ends]


@pytest.mark.parametrize(
    "at",
    [
        pytest.param((40, 3), id="within-an-epoch-and-soon-after"),
        pytest.param((1,), id="before-the-first-step"),
        pytest.param((62, 31), id="at-the-first-batches-of-epochs"),
    ],
)
def test_the_trainer_of_hugging_face_goes_on_with_its_own_counts(restarts: Restarts, at: tuple[int, ...]) -> None:
    output, ends = restarts.restarted(TRAINER, at=at)
    _left_and_ended(ends, len(at))
    lines = _lines(output)
    assert lines == _lines(restarts.undisturbed(TRAINER))
    assert [line.split()[-1] for line in lines if line.startswith("batch")][-1] == "59", "steps that it had made"
    assert sum("learning_rate" in line for line in lines) == 12, "its own log"


def test_a_loop_of_ones_own_with_accelerate_goes_on_in_the_middle_of_an_accumulation(restarts: Restarts) -> None:
    """With the mean over the interrupted epochs, which the script makes of a list of its own."""
    output, ends = restarts.restarted(str(ACCELERATED), at=(40, 200))
    _left_and_ended(ends, 2)
    assert _lines(output) == _lines(restarts.undisturbed(str(ACCELERATED)))


def test_a_list_of_the_scripts_own_is_whole_with_hegm_keep(restarts: Restarts, tmp_path: Path) -> None:
    script = tmp_path / "kept.py"
    script.write_text(ACCELERATED.read_text().replace("for epoch in range(3):\n", KEPT))
    output, ends = restarts.restarted(str(script), at=(40, 200))
    _left_and_ended(ends, 2)
    assert _lines(output) == _lines(restarts.undisturbed(str(ACCELERATED)))
