"""`hegm` calls of a script mean the same with and without an agent, before and after a restart."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent.state.save_and_exit import UNRESTORED_STATUS
from hegmd.agent.state.storage import state_file
from hegmd.agent.state.values import inherited
from hegmd.agent.state.values.script_api import KEY, Registrations, replayed
from tests.needs import need_torch
from tests.unit.agent.state.in_file import through_a_file

pytestmark = [pytest.mark.xdist_group("torch")]
torch: Any = need_torch()

ROOT = Path(__file__).parents[5]


class Optimizer:
    """The parts of an optimizer that the agent reads: one object whose module reports its steps."""


class Optimizers:
    """A module of optimizers with a hook for their steps, as PyTorch's is from 2.0 on."""

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def register_optimizer_step_post_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def step(self, optimizer: Optimizer) -> None:
        for hook in self.hooks:
            hook(optimizer, (), {})


@pytest.fixture
def module() -> Optimizers:
    assert torch.optim  # imported, as in a job that has an optimizer
    return Optimizers()


@pytest.fixture
def registrations(module: Optimizers) -> Registrations:
    """A script's words, with steps counted."""
    made = Registrations(lambda: None)
    made.count_in(module)
    return made


def _restarted(state: dict[str, Any]) -> Registrations:
    """A script that was restarted and has made no call yet; the state went through a file."""
    whole = through_a_file({KEY: state})
    return Registrations(lambda: whole)


def test_steps_are_counted_by_optimizer_and_go_along(registrations: Registrations, module: Optimizers) -> None:
    first, second = Optimizer(), Optimizer()
    for optimizer in (second, first, second):
        module.step(optimizer)
    assert (registrations.global_step(), registrations.global_step(first), registrations.global_step(second)) == (
        2,
        1,
        2,
    )
    state, against = registrations.capture([first, second])
    again = _restarted(state)
    assert again.global_step() == 2, "before the first batch as well"
    mine = [Optimizer(), Optimizer()]
    assert again.misfits(state, mine) == against == []
    again.put_back(state, mine)
    assert (again.global_step(), again.global_step(mine[0]), again.global_step(mine[1])) == (2, 1, 2)


def test_a_kept_value_is_set_immediately_and_again_at_the_first_batch(registrations: Registrations) -> None:
    kept = {"best": torch.tensor(0.25), "names": ["a"]}
    registrations.keep("history", lambda: kept, kept.update)
    state, against = registrations.capture([])
    assert against == []
    again = _restarted(state)
    found: list[Any] = []
    again.keep("history", lambda: None, found.append)
    assert len(found) == 1
    again.put_back(state, [])
    assert [one["names"] for one in found] == [["a"], ["a"]]
    assert found[1]["best"] == 0.25


def test_a_value_that_cannot_be_kept_is_a_reason_with_its_place_and_a_hint(registrations: Registrations) -> None:
    def fail() -> None:
        raise KeyError("best")

    registrations.keep("history", lambda: {"log": [print]}, lambda _value: None)
    registrations.keep("best", fail, lambda _value: None)
    _state, against = registrations.capture([])
    assert [what for what, _hint in against] == [
        "what hegm.keep('history') keeps cannot be written: log[0] is a function",
        "what hegm.keep('best') keeps cannot be read: KeyError('best')",
    ]


def test_a_value_that_the_script_no_longer_keeps_is_a_misfit(registrations: Registrations) -> None:
    registrations.keep("history", lambda: 1, lambda _value: None)
    state, _against = registrations.capture([Optimizer()])
    assert _restarted(state).misfits(state, []) == [
        "the state has a value for hegm.keep('history'), but the script did not call it before its first batch",
        "the state has 1 optimizers, and the script has 0",
    ]


def test_the_epoch_is_known_after_a_restart_and_is_0_before(registrations: Registrations, module: Optimizers) -> None:
    registrations.set_steps_per_epoch(6)
    registrations.set_gradient_accumulation_steps(2)
    optimizer = Optimizer()
    for _ in range(7):
        module.step(optimizer)
    assert registrations.start_epoch() == 0
    state, _against = registrations.capture([optimizer])
    assert _restarted(state).start_epoch() == 2


def test_wrong_arguments_to_hegm_are_an_error_at_once(registrations: Registrations) -> None:
    with pytest.raises(ValueError, match="an epoch has 0 batches"):
        registrations.set_steps_per_epoch(0)
    with pytest.raises(TypeError, match="a function that gets the value"):
        registrations.keep("x", 3, print)


def test_resumable_is_enumerate_and_marks_replayable_items(registrations: Registrations) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(4))
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    assert [(number, batch[0].tolist()) for number, batch in registrations.resumable(loader)] == [
        (0, [0, 1]),
        (1, [2, 3]),
    ]
    assert not replayed(loader)
    registrations.resumable(loader, replay=True)
    assert replayed(loader)


def test_a_process_that_was_not_restarted_has_no_state() -> None:
    assert not inherited.is_there()
    assert inherited.state() is None


BEFORE_TRAINING = """
import hegm
value = []
hegm.keep("value", lambda: value, value.extend)
hegm.boundary()
print(list(hegm.resumable([5])))
"""
TRAINING = """
import hegm, torch
value = []
hegm.keep("value", lambda: value, value.extend)
print(hegm.start_epoch(), hegm.global_step(), value)
torch.optim.optimizer.Optimizer().step()
print("a step")
"""
# The parts of PyTorch that the agent reads: importing the real one takes seconds, or a minute on a busy machine.
OPTIMIZERS = """
hooks = []
register_optimizer_step_post_hook = lambda hook: None
def register_optimizer_step_pre_hook(hook):
    hooks.append(hook)
    return register_optimizer_step_pre_hook
register_optimizer_step_pre_hook.remove = hooks.clear
class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""


def _run(script: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": str(ROOT)} if "PYTHONPATH" not in environ else {}
    return subprocess.run(
        [sys.executable, "-c", script], env={**path, **environ}, cwd="/", capture_output=True, text=True, check=False
    )


def test_a_script_runs_without_an_agent_and_starts_no_thread() -> None:
    done = _run(BEFORE_TRAINING + "import threading, sys; print(threading.active_count(), '_hegm' in sys.modules)")
    assert (done.stdout, done.stderr) == ("[(0, 5)]\n1 False\n", "")


def test_under_the_agent_hegm_is_importable_and_no_step_runs_before_the_state_is_restored(tmp_path: Path) -> None:
    """The package is on no path there, and is imported before torch. This script reaches no loop."""
    with (tmp_path / "state").open("wb+") as file:
        state_file.write(
            file.fileno(), {KEY: {"kept": {"value": [7]}, "steps": [41], "first": 0, "epoch": 3}, "passes": []}
        )
    (tmp_path / "torch" / "optim").mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("__version__ = '2.0'\nimport torch.optim.optimizer")
    (tmp_path / "torch" / "optim" / "__init__.py").touch()
    (tmp_path / "torch" / "optim" / "optimizer.py").write_text(OPTIMIZERS)
    inject = str(ROOT / "hegmd" / "agent" / "inject")
    path = f"{inject}:{tmp_path}"
    done = _run(TRAINING, PYTHONPATH=path, HEGM_STATE=str(tmp_path / "state"), HEGM_SOCKET=str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (UNRESTORED_STATUS, "3 41 [7]\n")
    assert "an optimizer was about to step before the script reached its saved position" in done.stderr
