"""Scripts that know nothing of hegm leave their state at a boundary and go on from it: every line bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.agented import SCRIPTS
from tests.e2e.restarted import LEFT_STATUS, Restarts

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("restarts")]


@pytest.fixture(scope="module")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    with Restarts(tmp_path_factory.mktemp("restarts")) as running:
        yield running


def as_undisturbed(restarts: Restarts, script: str, at: tuple[int, ...]) -> None:
    argv = str(SCRIPTS / script)
    output, ends = restarts.restarted(argv, at=at)
    assert [ended.status for ended in ends] == [*[LEFT_STATUS] * len(at), 0], [ended.errors for ended in ends]
    assert output.splitlines() == restarts.undisturbed(argv).splitlines()


@pytest.mark.parametrize(
    ("script", "at"),
    [
        pytest.param("epochs.py", (2, 3, 4), id="epochs-within-and-at-their-ends"),
        pytest.param("epochs.py", (1, 4), id="epochs-before-the-first-batch"),
        pytest.param("workers.py", (5, 120, 111), id="workers-that-draw-and-persist-inside-accumulation"),
        pytest.param("gan.py", (150, 20), id="gan-at-the-end-of-an-epoch"),
        pytest.param("threaded.py", (33, 150), id="threaded-nested-loaders"),
    ],
)
def test_training_goes_on_bit_for_bit(restarts: Restarts, script: str, at: tuple[int, ...]) -> None:
    as_undisturbed(restarts, script, at)
