"""The guard of a step: a step is made completely, in its own generation, or not at all."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from hegmd.agent.ranks.groups import Groups
from hegmd.agent.ranks.line import Interrupted
from hegmd.agent.ranks.run import RankProcess, Run, Settings
from hegmd.agent.ranks.training import Training
from hegmd.protocol.board import Board, board_bytes
from tests.looks import pause
from tests.needs import need_torch

torch: Any = need_torch()

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.leaks_allowed("PyTorch sets a variable when it makes its first optimizer"),
    pytest.mark.xdist_group("torch"),
]


class Scheduler:
    """A scheduler whose step, after the optimizer's, fails on demand."""

    fails = False

    def step(self) -> None:
        if self.fails:
            raise RuntimeError("after the update")


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(1, 1)


@pytest.fixture
def run(model: Any, tmp_path: Path) -> Run:
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1.0), Scheduler(), None)
    return Run(Settings(training, 0, None, 1.0, ""), None, 0, 1, Groups(str(tmp_path)))


def _step(run: Run, model: Any) -> None:
    with run.step_guard() as guard:
        guard.backward(model(torch.ones(1)))
        guard.commit()


def test_a_script_that_catches_the_error_of_a_torn_step_cannot_make_the_next_one(run: Run, model: Any) -> None:
    """The next step counted as whole, and the torn state was given to other ranks."""
    _step(run, model)
    run.training.schedulers[0].fails = True
    with pytest.raises(RuntimeError, match="after the update"):
        _step(run, model)
    run.training.schedulers[0].fails = False
    with pytest.raises(RuntimeError, match="its state is not whole"):
        _step(run, model)
    assert (run.step, run.whole_step) == (1, None)


def test_a_thread_that_a_block_has_left_behind_makes_no_step_of_the_next_generation(run: Run, model: Any) -> None:
    """It changed the parameters while the ranks restored them."""
    with run.step_guard() as late:
        late.backward(model(torch.ones(1)))
        run.retire()
        following = run.replaced()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(Interrupted):
            late.commit()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(Interrupted):
        _step(run, model)
    following.begin(2, 0)
    _step(following, model)
    assert (following.step, run.step) == (1, 0)


class SlowDaemon:
    """A launcher whose daemon takes its time to give the memory of a slot."""

    wanted_generation = 1

    def __init__(self) -> None:
        self.took_s = 0.0
        self.held_slots: tuple[int, ...] = ()

    def slot(self, _number: int, size_bytes: int) -> int:
        began = monotonic()
        pause()
        fd = os.memfd_create("slot")
        os.ftruncate(fd, size_bytes)
        self.held_slots = (fd,)
        self.took_s = monotonic() - began
        return fd


def test_the_wait_for_the_memory_of_a_slot_does_not_postpone_the_next_snapshot(model: Any, tmp_path: Path) -> None:
    """It counted a hundred times: ranks that were killed 20 s after their start began again at step 0."""
    training = Training(model, torch.optim.SGD(model.parameters(), lr=1.0), None, None)
    daemon: Any = SlowDaemon()
    board = Board(bytearray(board_bytes(1)), 1)
    board.write(0, 0, training.own())
    groups = Groups(str(tmp_path))
    run = Run(Settings(training, 0, None, 1.0, ""), RankProcess(daemon, board, 0, 1, groups), 0, 1, groups)
    began = monotonic()
    cost_s = run.write_slot(1, 0)
    took_s = monotonic() - began
    os.close(daemon.held_slots[0])
    assert 0 < cost_s <= took_s - daemon.took_s
