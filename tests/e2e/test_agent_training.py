"""Scripts that know nothing of hegm, moved several times at boundaries chosen by seed: no loss differs in a single bit
from those of an undisturbed run.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.e2e.agented import SCRIPTS, Training, undisturbed
from tests.e2e.references import ONE_COMPILER
from tests.e2e.scripted_daemon import Gone, ScriptedDaemon
from tests.needs import need_torch
from tests.wide import telling

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("preloaded")]

MOVES = 4
WITH_TORCH = ("plain", "workers", "gan", "iterable", "threaded", "no_loader")


def _moved(script: str, socket_path: Path, *, seed: int, **more: str) -> tuple[str, list[int]]:
    """The output of the script, moved at boundaries of that seed, and how many storages went out each time."""
    draw = random.Random(seed)
    at = draw.randint(2, 12)
    storages: list[int] = []
    with (
        ScriptedDaemon(socket_path) as daemon,
        Training([str(SCRIPTS / f"{script}.py")], socket_path, **more) as training,
    ):
        agent = daemon.attended()
        for _ in range(MOVES):
            parked, out = agent.move(at=at)
            assert parked.boundary is not None
            assert parked.boundary >= at
            assert out.storages is not None
            storages.append(out.storages)
            at = parked.boundary + draw.randint(1, 12)
        status, output, errors = training.result()
    assert (status, errors) == (0, "")
    return output, storages


@pytest.mark.parametrize("script", WITH_TORCH)
def test_every_loss_is_that_of_an_undisturbed_run(script: str, socket_path: Path) -> None:
    need_torch()
    output, storages = _moved(script, socket_path, seed=11)
    assert min(storages) >= 2
    assert output == undisturbed([str(SCRIPTS / f"{script}.py")])


@pytest.mark.parametrize("by", telling([("aot_eager",), ("inductor",)], [("aot_eager",)]))
def test_a_compiled_model_is_moved_too(socket_path: Path, by: str) -> None:
    """The second compiles C++ too, which is nearly all of what it takes; what is compiled is called as the first's."""
    need_torch()
    if by == "inductor" and shutil.which("g++") is None:
        pytest.skip("no g++, which torch.compile needs")
    how = {**ONE_COMPILER, "COMPILED_BY": by}
    expected = undisturbed([str(SCRIPTS / "compiled.py")], **how)
    output, storages = _moved("compiled", socket_path, seed=12, **how)
    assert min(storages) >= 2
    assert output == expected


def test_a_hand_written_loop_parks_at_its_explicit_boundary(socket_path: Path) -> None:
    output, storages = _moved("by_hand", socket_path, seed=13)
    assert storages == [0] * MOVES
    assert output == undisturbed([str(SCRIPTS / "by_hand.py")])


def test_a_script_that_exits_during_a_request_counts_as_gone(socket_path: Path) -> None:
    with ScriptedDaemon(socket_path) as daemon, Training([str(SCRIPTS / "by_hand.py")], socket_path) as training:
        agent = daemon.attended()
        with pytest.raises(Gone):
            agent.order("park", at=1_000_000)
        assert training.result()[0] == 0
