"""A block that runs again after a fault: what it left behind changes nothing while the state is restored."""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hegmd.agent.ranks.block import Generations, Recovery
from hegmd.agent.ranks.groups import Groups
from hegmd.agent.ranks.line import Interrupted
from hegmd.agent.ranks.run import RankProcess, Run
from hegmd.agent.trap import NoCollection
from hegmd.protocol.board import Board, board_bytes
from tests.looks import pause
from tests.needs import need_torch
from tests.patience import HANG_S

torch: Any = need_torch()

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.leaks_allowed("PyTorch sets a variable when it makes its first optimizer"),
    pytest.mark.xdist_group("torch"),
]


class Line:
    """A launcher that recovers once. `rejoined` is called when the rank offers its state for generation 2."""

    def __init__(self, rejoined: Callable[[], object]) -> None:
        self._rejoined = rejoined
        self.offers: list[int | None] = []
        self.wanted_generation = 1
        self.running = 0

    def join(self, step: int | None, **_about: Any) -> dict[str, Any]:
        self.offers.append(step)
        if len(self.offers) == 2:
            self._rejoined()
        plan = {"generation": self.wanted_generation, "step": None if len(self.offers) == 1 else step}
        return {**plan, "slot": None, "gives": False, "next_slot": 0, "layout": None}

    def await_go(self, _generation: int) -> bool:
        return True

    def await_abort(self, generation: int) -> None:
        self.wanted_generation = generation + 1

    def await_end(self, _generation: int) -> bool:
        return True

    def say(self, do: str, **what: Any) -> None: ...

    def enter(self, generation: int, _frame: object) -> None:
        self.running = generation

    def leave(self) -> None:
        self.running = 0

    def check(self) -> None:
        if self.running and self.wanted_generation > self.running:
            raise Interrupted

    def making_step(self, *, is_sure: bool) -> None: ...

    def made_step(self) -> None: ...


def _generations(model: Any, optimizer: Any, line: Any, folder: Path) -> Generations:
    board = Board(bytearray(board_bytes(2)), 2)
    rank = RankProcess(line, board, 1, 2, Groups(str(folder)))
    return Generations(Recovery(model=model, optimizer=optimizer), rank)


def test_a_thread_that_a_block_has_left_behind_makes_no_step_while_the_state_is_restored(tmp_path: Path) -> None:
    """It made one between the end of the block and the next generation: the losses were others, without an error."""
    model = torch.nn.Linear(1, 1)
    late: list[Any] = []
    ended: list[BaseException] = []

    def commit() -> None:
        model(torch.ones(1)).backward()
        try:
            late[0].commit()
        except Interrupted as error:
            ended.append(error)

    def rejoined() -> None:
        before = copy.deepcopy(model.state_dict())
        thread = threading.Thread(target=commit)
        thread.start()
        thread.join()
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    def block(run: Run) -> int:
        with run.step_guard() as guard:
            guard.backward(model(torch.ones(1)))
            if run.generation == 1:
                late.append(guard)
                raise RuntimeError("no")
            guard.commit()
        return run.step

    line = Line(rejoined)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert _generations(model, optimizer, line, tmp_path).run(block, (), {}) == 1
    assert (line.offers, len(ended)) == ([None, 0], 1)


def test_a_fault_that_was_given_up_kept_all_tensors_until_the_garbage_collector_ran(tmp_path: Path) -> None:
    class GivenUp(Line):
        def await_abort(self, generation: int) -> Any:
            return f"generation {generation} was the last one"

    class Fault(Exception): ...

    def block(_run: Run) -> None:
        raise Fault

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with NoCollection():
        with pytest.raises(Fault) as raised:
            _generations(model, optimizer, GivenUp(lambda: None), tmp_path).run(block, (), {})
        known = weakref.ref(raised.value)
        del raised
        assert known() is None


def _is_in_retire() -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return frame.f_code.co_name == "retire"


def test_a_rank_waits_for_the_step_of_a_thread_before_it_offers_its_state(tmp_path: Path) -> None:
    """The check that the block is over, and the step, were not one: the step ran while the state was restored."""
    model = torch.nn.Linear(1, 1)
    has_rejoined = threading.Event()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    first_step_began = threading.Event()
    steps: list[int] = []
    threads: list[threading.Thread] = []

    def begin_step(*_args: Any) -> None:
        """The first step lasts until the block's thread waits for it, or has continued without it."""
        steps.append(len(steps))
        first_step_began.set()
        while steps == [0] and not has_rejoined.is_set() and not _is_in_retire():
            pause()

    optimizer.register_step_pre_hook(begin_step)

    def block(run: Run) -> int:
        with run.step_guard() as guard:
            guard.backward(model(torch.ones(1)))
            if run.generation == 1:
                threads.append(threading.Thread(target=guard.commit))
                threads[0].start()
                assert first_step_began.wait(HANG_S)
                raise RuntimeError("no")
            guard.commit()
        return run.step

    line = Line(has_rejoined.set)
    try:
        assert _generations(model, optimizer, line, tmp_path).run(block, (), {}) == 2
    finally:
        has_rejoined.set()
        for thread in threads:
            thread.join(HANG_S)
    assert (line.offers, steps) == ([None, 1], [0, 1])
