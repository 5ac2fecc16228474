"""Trainings in a framework's loops, restarted: every batch, rate, loss, log and count is that of an undisturbed run.

Durations are not compared, because the clock continues.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agented import SCRIPTS
from tests.e2e.restarted import LEFT_STATUS, REFUSED_STATUS, Ended, Restarts, Spot
from tests.needs import need_packages

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts")]

ROOT = Path(__file__).parents[2]
TRAINER = str(ROOT / "tests" / "bench" / "restarted" / "trained.py")
ACCELERATED = ROOT / "tests" / "e2e" / "moved" / "accelerated.py"
LIGHTNING = ROOT / "tests" / "e2e" / "moved" / "lightning_fit.py"
WATCHED = SCRIPTS / "lightning_watched.py"
KEPT = """
import hegm
hegm.keep("losses", lambda: losses, lambda value: globals().update(losses=value))
for epoch in range(3):
"""


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    need_packages("transformers", "accelerate", "lightning")
    with Restarts(tmp_path_factory.mktemp("restarts"), "transformers.trainer", "lightning.pytorch") as running:
        yield running


def _lines(output: str) -> list[str]:
    return [line for line in output.splitlines() if "runtime" not in line]


def _left_and_ended(ends: list[Ended], times: int) -> None:
    assert [ended.status for ended in ends] == [*[LEFT_STATUS] * times, 0], [ended.errors for ended in ends]


@pytest.mark.parametrize(
    "at",
    [
        pytest.param((40, 3), id="within-an-epoch-and-soon-after"),
        pytest.param((1,), id="before-the-first-step", marks=pytest.mark.wide),
        pytest.param((62, 31), id="at-the-first-batches-of-epochs", marks=pytest.mark.wide),
    ],
)
def test_the_trainer_of_hugging_face_continues_with_its_own_counts(restarts: Restarts, at: tuple[int, ...]) -> None:
    output, ends = restarts.restarted(TRAINER, at=at)
    _left_and_ended(ends, len(at))
    lines = _lines(output)
    assert lines == _lines(restarts.undisturbed(TRAINER))
    assert [line.split()[-1] for line in lines if line.startswith("batch")][-1] == "59", "steps that it had made"
    assert sum("learning_rate" in line for line in lines) == 12, "its own log"


def test_a_custom_loop_with_accelerate_continues_in_the_middle_of_an_accumulation(restarts: Restarts) -> None:
    """With the mean over the interrupted epochs, which the script makes of a list of its own."""
    output, ends = restarts.restarted(str(ACCELERATED), at=(40, 200))
    _left_and_ended(ends, 2)
    assert _lines(output) == _lines(restarts.undisturbed(str(ACCELERATED)))


@pytest.mark.wide
def test_a_list_of_the_scripts_own_is_whole_with_hegm_keep(restarts: Restarts, tmp_path: Path) -> None:
    script = tmp_path / "kept.py"
    script.write_text(ACCELERATED.read_text().replace("for epoch in range(3):\n", KEPT))
    output, ends = restarts.restarted(str(script), at=(40, 200))
    _left_and_ended(ends, 2)
    assert _lines(output) == _lines(restarts.undisturbed(str(ACCELERATED)))


@pytest.mark.parametrize(
    ("script", "places"),
    [
        pytest.param(
            LIGHTNING, [(50, "within"), (50, "last batch")], id="schedule-by-step-and-two-evaluations-an-epoch"
        ),
        pytest.param(
            WATCHED,
            [(1, "first batch"), (8, "accumulating")],
            id="before-the-first-step-and-in-accumulation",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            WATCHED, [(6, "within"), (4, "first batch"), (10, "last batch")], id="after-an-evaluation-and-at-the-ends"
        ),
    ],
)
def test_lightning_continues_with_its_own_counts(
    restarts: Restarts, tmp_path: Path, script: Path, places: list[tuple[int, str]]
) -> None:
    """Its checkpoints, early stopping, monitors and bars too, and nothing of them twice."""
    undisturbed, found = tmp_path / "undisturbed", tmp_path / "found"
    undisturbed.mkdir()
    found.mkdir()
    computed, record = restarts.computed(str(script), str(undisturbed), is_recorded=True)
    spots = [Spot(at, kind) for at, kind in places]
    output, found_record, ends = restarts.recorded(str(script), str(found), places=spots)
    _left_and_ended(ends, len(places))
    assert [ended.kinds[-1] for ended in ends[:-1]] == [kind for _at, kind in places]
    assert output.splitlines() == computed.splitlines()
    assert found_record.splitlines() == record.splitlines()


def _changed(tmp_path: Path, before: str, after: str) -> tuple[str, str]:
    script = tmp_path / "changed.py"
    script.write_text(WATCHED.read_text().replace(before, after))
    return str(script), str(tmp_path)


def test_lightning_gathers_the_means_of_its_epoch_before_it_leaves(restarts: Restarts, tmp_path: Path) -> None:
    """No state has the gathered values: the epoch's mean would have been that of its remaining batches."""
    argv = _changed(tmp_path, 'self.log("loss", loss, prog_bar=True)', 'self.log("loss", loss, on_epoch=True)')
    expected = restarts.undisturbed(*argv)
    output, ends = restarts.restarted(*argv, at=(5,))
    _left_and_ended(ends, 1)
    assert [line for line in output.splitlines() if line[:4] != "kept"] == [
        line for line in expected.splitlines() if line[:4] != "kept"
    ]


def test_lightning_that_reloads_its_loaders_is_refused(restarts: Restarts, tmp_path: Path) -> None:
    argv = _changed(tmp_path, "max_epochs=6,", "max_epochs=6, reload_dataloaders_every_n_epochs=1,")
    _output, ends = restarts.restarted(*argv, at=(5,))
    assert [ended.status for ended in ends] == [REFUSED_STATUS]
    assert "Lightning creates its loaders again after some epochs" in ends[0].errors


@pytest.fixture
def stateful() -> Path:
    need_packages("torchdata")
    return SCRIPTS / "stateful_loaders.py"


@pytest.mark.parametrize("at", [(5, 8), (13, 2, 20)], ids=["shuffled-and-a-stream", "with-workers"])
def test_loaders_of_torchdata_continue_at_their_batch(restarts: Restarts, stateful: Path, at: tuple[int, ...]) -> None:
    output, ends = restarts.restarted(str(stateful), at=at)
    _left_and_ended(ends, len(at))
    assert output.splitlines() == restarts.undisturbed(str(stateful)).splitlines()


def test_a_pass_of_torchdatas_workers_that_may_draw_numbers_is_never_left_in_the_middle(
    restarts: Restarts, stateful: Path, tmp_path: Path
) -> None:
    """Their random numbers are in no state: the next place that can be left is in the shuffled pass after it."""
    script = tmp_path / "drawing.py"
    script.write_text(stateful.read_text().replace("hegm.resumable(worked, replay=True)", "enumerate(worked)"))
    output, ends = restarts.restarted(str(script), at=(15,))
    _left_and_ended(ends, 1)
    assert output == restarts.undisturbed(str(script))
    _output, ends = restarts.restarted(str(script), at=(52,))
    assert [ended.status for ended in ends] == [0], "it is in the last such pass, and trains to its end"
