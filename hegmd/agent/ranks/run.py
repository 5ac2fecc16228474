"""One generation of a block as a script sees it: its ranks, its step, and the guard of each step.

A step is made completely or not at all: nothing interrupts it, and a rank whose step was cut short by an error has no
state until it gets one. On a GPU the guard waits for all queued work, checks whether the generation has ended, makes
the step, and waits again before it counts: after an abort a collective «succeeds» with garbage.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from ...errors import HegmError
from ...protocol.slots import RECORD_BYTES, SlotRecord, packed, slot_bytes, unpacked
from .. import copying
from ..refusals import refusal
from . import faults
from .line import Interrupted, LauncherEnded, now

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from typing_extensions import Self

    from ...protocol.board import Board
    from .groups import Groups
    from .line import LauncherConnection
    from .training import Training

SLOTS = 2
# As for other recoveries: a snapshot takes one part in this many of the time, and at most one is taken each second.
SHARE, LEAST_INTERVAL_S = 100, 1.0
# As for other recoveries: a rank hangs if it makes no step for this many times the longest step, and at least this
# long.
LEARNED_TIMES, LEAST_HANG_S = 5.0, 60.0
# A failed snapshot is tried again after this time.
UNPROTECTED_S = 30.0
_LOOK_S = 0.001


class Settings:
    """The options of a script's block."""

    def __init__(
        self, training: Training, first_step: int, soft_limit_s: float | None, hard_limit_s: float, fault_text: str
    ) -> None:
        """Raises ValueError for a fault that cannot be."""
        self.training = training
        self.first_step = first_step
        self.soft_limit_s = soft_limit_s
        self.hard_limit_s = hard_limit_s
        self.faults = faults.parse(fault_text)


class RankProcess:
    """This process as a rank of a launcher: one for all blocks that it runs."""

    def __init__(self, line: LauncherConnection, board: Board, rank: int, ranks: int, groups: Groups) -> None:
        self.line, self.board = line, board
        self.rank, self.ranks = rank, ranks
        self.groups = groups
        #: Ends the waits of the script's own communication.
        self.abort: Callable[[], object] | None = None


class Run:
    """A generation of a block, as the script sees it."""

    def __init__(self, settings: Settings, rank: RankProcess | None, number: int, ranks: int, groups: Groups) -> None:
        self._settings = settings
        self.training = settings.training
        self._process = rank
        self._groups = groups
        self.rank = number
        self.world_size = ranks
        self.step = settings.first_step
        self.generation = 1
        #: The step whose state is whole; None while a step is being made.
        self.whole_step: int | None = settings.first_step
        #: Whether its generation is over: a thread that the block has left behind must not make a step of the next one.
        self.is_over = False
        #: Held while a step is made.
        self._is_committing = threading.Lock()
        self._first_step_here = self.step
        self._limit_s = settings.soft_limit_s or 0.0
        self._longest_s = 0.0
        self._since = now()
        self._next_snapshot = 0.0
        #: The slot to write next: the one without the newest snapshot.
        self.next_slot = 0

    # ---- for scripts ------------------------------------------------------------------------------------------------

    def init_process_group(self, backend: str | None = None, **options: Any) -> None:
        """Connect the ranks of this generation, as `torch.distributed.init_process_group` does."""
        if self._process is not None:
            self._groups.connect(backend, self.generation, self.rank, self.world_size, options)
        elif self.world_size > 1:
            __import__("torch.distributed").distributed.init_process_group(backend, **options)

    def new_group(self, *args: Any, **options: Any) -> Any:
        """Make a group of some ranks, as `torch.distributed.new_group` does; its waits end when a rank fails."""
        return self._groups.new_group(*args, **options)

    def ddp(self, model: Any, **options: Any) -> Any:
        """Return the model in DistributedDataParallel, for this generation."""
        is_first = self.step == self._settings.first_step
        return self._groups.wrap(model, is_first_step=is_first, options=options)

    def step_guard(self) -> Guard:
        """Return the context of one step."""
        return Guard(self)

    def section(self, name: str, limit: float | None = None) -> Section:
        """Return a context in which another limit holds, in seconds; None for none: an evaluation, a checkpoint."""
        del name
        return Section(self, limit)

    # ---- limits -----------------------------------------------------------------------------------------------------

    def stamp(self, limit_s: float | None = None) -> None:
        """Record on the board that this rank makes progress."""
        if self._process is not None:
            limit_s = self._limit_s if limit_s is None else limit_s
            self._process.board.stamp(self.rank, now(), limit_s, self.step)

    def retire(self) -> None:
        """Make no further step, not even in a thread that the block has left behind; waits for one being made."""
        self.is_over = True
        with self._is_committing:
            pass

    def replaced(self) -> Run:
        """Return the run for the next generation, which knows what this one has learned."""
        following = Run.__new__(Run)
        following.__dict__.update(self.__dict__)
        return following

    def begin(self, generation: int, step: int | None) -> None:
        """A generation begins at that step."""
        self.is_over = False
        self.generation = generation
        self.step = self.whole_step = self._first_step_here = self._settings.first_step if step is None else step
        self._since = now()
        self.stamp()

    def begin_step(self) -> None:
        """A step begins. Raises Interrupted, and RuntimeError after a step that an error has cut short."""
        self.check()
        if self.whole_step is None:
            raise RuntimeError("the last step was cut short by an error that the script caught: its state is not whole")
        self.inject("forward")
        self.training.keep_buffers()
        self.stamp()

    def check(self) -> None:
        """Raise Interrupted if another generation is wanted."""
        if self.is_over:
            raise Interrupted
        if self._process is not None:
            self._process.line.check()

    def inject(self, phase: str) -> None:
        """Have the fault happen that HEGM_FAULT names for this place."""
        if self._settings.faults:
            faults.inject(self._settings.faults, self.rank, self.step, phase, self.generation)

    def backward(self, loss: Any, options: dict[str, Any]) -> None:
        """Record what the next step needs of this rank, and run the backward pass.

        A rank that has begun its backward pass may be killed while others complete the step with its gradients.
        """
        process = self._process
        if self.is_over:
            raise Interrupted
        if process is not None:
            process.board.write(self.rank, self.step + 1, self.training.own())
        self.inject("backward")
        loss.backward(**options)
        if process is not None and self._groups.settle(self.world_size):
            process.line.say("layout", layout=self._groups.layout)

    def commit(self) -> None:
        """Make the step: all of it or nothing."""
        _synchronize()
        with self._is_committing:
            self._commit()

    def _commit(self) -> None:
        process = self._process
        if self.is_over:
            raise Interrupted
        if process is not None:
            process.line.making_step(is_sure=not uses_cuda())
        self.inject("commit")
        self.whole_step = None
        self.training.step()
        self.inject("torn")
        _synchronize()
        self.training.end_step()
        self.step += 1
        self.whole_step = self.step
        self._learn_limit()
        if process is None:
            return
        if self.step == self._first_step_here + 1:
            process.line.say("step", generation=self.generation, at=now())
        process.line.made_step()
        self.inject("after")
        if self.rank == 0 and now() >= self._next_snapshot:
            self.take_snapshot(self.generation, self.step)

    def _learn_limit(self) -> None:
        """Learn from the longest step so far how long one may take."""
        at = now()
        self._longest_s, self._since = max(self._longest_s, at - self._since), at
        if self._settings.soft_limit_s is None:
            self._limit_s = max(LEAST_HANG_S, LEARNED_TIMES * self._longest_s)
        self.stamp()

    # ---- snapshots --------------------------------------------------------------------------------------------------

    def take_snapshot(self, generation: int, step: int) -> None:
        """Write the state into the older slot. A problem is reported to the launcher, which shows it once."""
        process = self._process
        if process is None:
            return
        self.stamp(0.0)
        try:
            cost_s = self.write_slot(generation, step)
        except (HegmError, OSError) as error:
            process.line.say("unprotected", why=getattr(error, "message", str(error)))
            self._next_snapshot = now() + UNPROTECTED_S
        except LauncherEnded:
            self._next_snapshot = float("inf")
        else:
            self._next_snapshot = now() + max(LEAST_INTERVAL_S, SHARE * cost_s)
        self.stamp()

    def write_slot(self, generation: int, step: int) -> float:
        """Write the state of that step with what each rank needs for it. Raises HegmError, OSError, Alone.

        Return the seconds that each snapshot takes, without waits that come once: for imports, other ranks and memory.
        """
        process = self._process
        if process is None:
            return 0.0
        files, own = state_file(), self._own_of_all(process, generation, step)
        began = now()
        try:
            whole = files.State({"replicated": self.training.state(), "ranks": own})
        except files.UnsupportedValue as error:
            raise refusal(f"the state cannot be saved: {error}", "keep plain values and tensors in it") from error
        asked = now()
        fd = process.line.slot(self.next_slot, slot_bytes(whole.size_bytes))
        began += now() - asked
        end = os.fstat(fd).st_size - RECORD_BYTES
        copying.write_small(fd, end, bytes(RECORD_BYTES))
        with _Pinned():
            whole.write(fd)
        record = SlotRecord(
            generation=1 + max(_number_in(held) for held in process.line.held_slots),
            step=step,
            rank=0,
            ranks=1,  # one state for all of them
            size_bytes=whole.size_bytes,
            taken_utc=time.time(),
            took_s=now() - began,
        )
        copying.write_small(fd, end, packed(record))
        self.next_slot = (self.next_slot + 1) % SLOTS
        return now() - began

    def _own_of_all(self, process: RankProcess, generation: int, step: int) -> list[bytes]:
        """Return what each rank needs to start that step.

        All ranks have recorded it before one can reach the step. Before the first step a rank may need a moment.
        """
        deadline = now() + self._settings.hard_limit_s
        while any(process.board.read(rank, step) is None for rank in range(self.world_size)) and now() < deadline:
            if step != self._settings.first_step or process.line.wanted_generation > generation:
                break
            time.sleep(_LOOK_S)
        return [required(process.board.read(rank, step)) for rank in range(self.world_size)]


class Guard:
    """A step. It is committed at its end, once, or the block fails."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_committed = False

    def __enter__(self) -> Self:
        self._run.begin_step()
        return self

    def backward(self, loss: Any, **options: Any) -> None:
        self._run.backward(loss, options)

    def commit(self) -> None:
        """Make the step of optimizer and scheduler, count it, and set the gradients to None."""
        if self._is_committed:
            raise RuntimeError("this step is committed already")
        self._is_committed = True
        self._run.commit()

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is None and not self._is_committed:
            raise RuntimeError("the step was not committed: call guard.commit() in it")


class Section:
    """Part of a block with its own limit."""

    def __init__(self, run: Run, limit_s: float | None) -> None:
        self._run, self._limit_s = run, limit_s or 0.0

    def __enter__(self) -> None:
        self._run.check()
        self._run.stamp(self._limit_s)

    def __exit__(self, *_exc: object) -> None:
        self._run.stamp()


class _Pinned:
    """Pinned memory for a copy from a GPU."""

    def __enter__(self) -> None:
        if uses_cuda():
            _buffers().prepare()

    def __exit__(self, *_exc: object) -> None:
        if uses_cuda():
            _buffers().drop()


def _buffers() -> Any:
    from .. import pinned_buffers

    return pinned_buffers


def state_file() -> Any:
    """Loaded late: a script without a launcher needs none of it."""
    from ..state.storage import state_file

    return state_file


def _number_in(fd: int) -> int:
    """Return the number of the snapshot in a slot; 0 without a whole one."""
    record = unpacked(os.pread(fd, RECORD_BYTES, os.fstat(fd).st_size - RECORD_BYTES))
    return 0 if record is None else record.generation


def required(data: bytes | None) -> bytes:
    if data is None:
        raise refusal("the ranks are not at one step: there is no random state of one", "use step_guard on each rank")
    return data


def uses_cuda() -> bool:
    return bool(sys.modules["torch"].cuda.is_initialized())


def _synchronize() -> None:
    """Wait for the GPU, so that the next check covers all queued work."""
    if uses_cuda():
        sys.modules["torch"].cuda.synchronize()
