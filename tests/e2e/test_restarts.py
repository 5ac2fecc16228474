"""Scripts that know nothing of hegm leave their state at a boundary and go on from it: every line bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.agented import SCRIPTS
from tests.e2e.restarted import LEFT_STATUS, REFUSED_STATUS, Restarts

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts")]


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    with Restarts(tmp_path_factory.mktemp("restarts")) as running:
        yield running


@pytest.mark.parametrize(
    ("script", "at"),
    [
        pytest.param("epochs.py", (2, 3, 4), id="within-and-at-the-ends-of-epochs"),
        pytest.param("epochs.py", (1, 4), id="before-the-first-batch"),
        pytest.param("workers.py", (5, 120, 111), id="workers-that-draw-and-persist-inside-accumulation"),
        pytest.param("gan.py", (150, 20), id="two-optimizers-at-the-end-of-an-epoch"),
        pytest.param("threaded.py", (33, 150), id="nested-loaders-in-a-thread"),
        pytest.param("no_loader.py", (50, 1), id="no-loader-and-so-from-the-middle-of-the-body-to-the-loop"),
        pytest.param("evaluated.py", (3, 12, 13), id="asked-in-an-evaluation-it-stands-in-the-next-epoch"),
        pytest.param("evaluated.py", (1, 11), id="scaler-schedules-averages-and-generators"),
    ],
)
def test_training_goes_on_bit_for_bit(restarts: Restarts, tmp_path: Path, script: str, at: tuple[int, ...]) -> None:
    argv = (str(SCRIPTS / script), str(tmp_path))
    output, ends = restarts.restarted(*argv, at=at)
    assert [ended.status for ended in ends] == [*[LEFT_STATUS] * len(at), 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(*argv).splitlines()


@pytest.mark.parametrize(
    ("script", "why"),
    [
        pytest.param("compiled.py", "reads the loader at line 18 of __main__ in read_ahead() ahead", id="read-ahead"),
        pytest.param("iterable.py", "an iterable dataset that cannot say where it is", id="a-stream-without-a-place"),
    ],
)
def test_what_cannot_go_on_exactly_is_refused_and_said(restarts: Restarts, script: str, why: str) -> None:
    _output, ends = restarts.restarted(str(SCRIPTS / script), at=(20,))
    assert [ended.status for ended in ends] == [REFUSED_STATUS]
    assert why in ends[0].errors
