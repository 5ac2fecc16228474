"""`hegm.recovery`: a block of a script that runs again, in the same process, when a rank has failed.

One generation after the other: all ranks agree on a step, have its state, and run the block from there. State comes
from the process's own memory, from a rank that has it (through a slot of the host pool), or from the last snapshot. A
rank can be given a step only together with its random state, which is on the board or in the snapshot.

An exception that the block lets through is a fault. KeyboardInterrupt and SystemExit end the training. Without a
launcher the block runs once.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import threading
import warnings

from ..notes import note
from ..refusals import refusal
from . import faults
from .groups import Groups
from .line import Interrupted, LauncherConnection, LauncherEnded, find, now
from .run import RankProcess, Run, Settings, required, state_file, uses_cuda
from .training import Training

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

HARD_LIMIT_S = 30.0
_MAX_WHY = 500
_NO_LAUNCHER = "no launcher recovers this block: it runs once; start it with: hegmctl run --ranks 1 -- python {script}"


class Recovery:
    """The object that `hegm.recovery` returns. See there."""

    def __init__(  # noqa: PLR0913 - each option of a script is named
        self,
        *,
        model: Any,
        optimizer: Any,
        scheduler: Any = None,
        extra: Mapping[str, Any] | None = None,
        step: int = 0,
        soft_limit_s: float | None = None,
        hard_limit_s: float = HARD_LIMIT_S,
        abort: Callable[[], object] | None = None,
        finalize: Callable[[], object] | None = None,
        health_check: Callable[[], object] | None = None,
    ) -> None:
        training = Training(model, optimizer, scheduler, extra)
        fault_text = os.environ.get(faults.VARIABLE, "")
        self.settings = Settings(training, step, soft_limit_s, hard_limit_s, fault_text)
        self.abort = abort
        self.finalize = finalize
        self.health_check = health_check

    def block(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Make a block of a function whose first argument is the run."""

        @functools.wraps(function)
        def wrapped(*args: Any, **named: Any) -> Any:
            if threading.current_thread() is not threading.main_thread():
                raise refusal("a recovery block has to run in the main thread", "call it there")
            found = _line_of_process()
            if found is None:
                warnings.warn(_NO_LAUNCHER.format(script=sys.argv[0]), RuntimeWarning, stacklevel=2)
                rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
                return function(Run(self.settings, None, rank, ranks, Groups(tempfile.gettempdir())), *args, **named)
            if found.line.is_in_block:
                raise refusal("a recovery block cannot run within another one", "call it after the other has ended")
            return Generations(self, found).run(function, args, named)

        return wrapped


_rank: RankProcess | None = None


def _line_of_process() -> RankProcess | None:
    """Connect to the launcher, once; None without one."""
    global _rank  # noqa: PLW0603 - one launcher a process
    if _rank is None:
        found = find(os.environ)
        if found is None:
            return None
        connection, rank, ranks = found
        groups = Groups(os.environ["HEGM_RANKS_FOLDER"])

        def end_waits() -> None:
            """Runs in the listening thread, which goes on. Groups may be destroyed meanwhile; hooks are a script's."""
            for end in (groups.end_waits, None if _rank is None else _rank.abort):
                try:
                    if end is not None:
                        end()
                except Exception as error:  # noqa: BLE001 - the edge of the thread
                    note(f"the waits of this rank were not all ended: {error!r}")

        line = LauncherConnection(connection, rank, ranks, end_waits)
        _rank = RankProcess(line, line.open(), rank, ranks, groups)
    return _rank


class Generations:
    """Runs a block in one generation after the other."""

    def __init__(self, recovery: Recovery, rank: RankProcess) -> None:
        self._recovery = recovery
        self._settings = recovery.settings
        self._training = recovery.settings.training
        self._line, self._board, self._groups = rank.line, rank.board, rank.groups
        self._rank = rank
        self._run = Run(recovery.settings, rank, rank.rank, rank.ranks, rank.groups)
        rank.abort = recovery.abort
        #: The step whose state this process has; None if it has none that is whole.
        self._step: int | None = None

    def run(self, function: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run the block until it has ended on all ranks. Raises what ended it."""
        about: dict[str, Any] = {"is_new": True, "imports": _imports(), "path": sys.path}
        about["hard_limit_s"] = self._settings.hard_limit_s
        while True:
            plan = self._line.join(self._step, **about)
            about = {"is_new": False}
            if not self._is_prepared(plan) or not self._line.await_go(plan["generation"]):
                continue
            try:
                result = self._attempt(plan["generation"], function, args, named)
                self._line.leave()
                if self._is_over(plan["generation"]):
                    return result
            except Interrupted:
                pass
            except (KeyboardInterrupt, SystemExit):
                self._line.say("ends")
                raise
            except Exception as error:
                if self._fail(plan["generation"], error):
                    raise
            self._clean_up()

    def _attempt(self, generation: int, function: Callable[..., Any], args: Any, named: Any) -> Any:
        """Run the block once. Raises Interrupted, and what it raises. May be interrupted while it is on the stack."""
        self._run = self._run.replaced()
        self._run.begin(generation, self._step)
        self._line.enter(generation, sys._getframe())  # pyright: ignore[reportPrivateUsage] - it is documented
        return function(self._run, *args, **named)

    def _is_over(self, generation: int) -> bool:
        """Wait until the block has ended on all ranks; False if it has to run again."""
        self._run.stamp(0.0)
        self._line.say("done", generation=generation)
        try:
            is_over = self._line.await_end(generation)
        except LauncherEnded:
            is_over = True
        if is_over:
            self._rank.abort = None
            self._groups.forget()
        return is_over

    def _fail(self, generation: int, error: Exception) -> bool:
        """Report the fault; True if it is not recovered from."""
        self._run.retire()
        self._line.leave()
        if self._line.wanted_generation > generation:
            return False  # another rank has failed, and ended the waits of this one
        self._line.say("fault", generation=generation, why=_why(error), at=now())
        try:
            return self._line.await_abort(generation) is not None
        except LauncherEnded:
            return True

    def _clean_up(self) -> None:
        """Be ready for the next generation. An error here ends the process, which is then replaced."""
        self._run.retire()  # before the line is left: it checks no step after that
        self._line.leave()
        self._step = self._run.whole_step
        self._groups.leave()
        if self._step is not None:
            self._training.undo_step()
        if self._recovery.finalize is not None:
            self._recovery.finalize()
        check = self._recovery.health_check or _compute
        check()

    # ---- state ------------------------------------------------------------------------------------------------------

    def _is_prepared(self, plan: dict[str, Any]) -> bool:
        """Get the state of the plan's step; False if the launcher has to plan again."""
        generation = plan["generation"]
        try:
            self._prepare(plan, generation)
        except LauncherEnded:
            raise
        except Exception as error:
            self._line.say("unusable", generation=generation, why=_why(error))
            why = self._line.await_abort(generation)
            if why is not None:
                raise refusal(why, "run: hegmctl recovery") from error
            return False
        self._line.say("restored", generation=generation)
        return True

    def _prepare(self, plan: dict[str, Any], generation: int) -> None:
        """Have the state of the plan's step. Raises what prevents it."""
        rank, step = self._rank.rank, plan["step"]
        self._groups.layout = plan["layout"]
        self._run.next_slot = plan["next_slot"]
        if step is None:  # the first one: each has what its script has made
            self._step = self._settings.first_step
            self._board.write(rank, self._step, self._training.own())
            if rank == 0:
                self._run.take_snapshot(generation, self._step)
            return
        if plan["slot"] is None:
            self._training.restore_own(required(self._board.read(rank, step)))
        else:
            self._step = None
            faults.inject(self._settings.faults, rank, step, "restore", generation)
            saved = state_file().read(self._line.held_slot(plan["slot"]))
            self._training.restore(saved["replicated"])
            self._training.end_step()
            self._board.write(rank, step, saved["ranks"][rank])
            self._training.restore_own(saved["ranks"][rank])
            self._step = step
        if plan["gives"]:
            self._run.write_slot(generation, step)


def _imports() -> list[str]:
    """Return what a spare process may import before its turn."""
    from ..state import prestart

    return list(prestart.beforehand(is_launched=True).modules)


def _compute() -> None:
    """Run the default health check: the GPU must multiply correctly. Raises what is wrong."""
    if not uses_cuda():
        return
    torch: Any = sys.modules["torch"]
    ones = torch.ones(64, 64, device="cuda")
    if float((ones @ ones).sum().item()) != 64.0**3:
        raise refusal("the GPU does not multiply correctly", "run: hegmctl doctor")


def _why(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_WHY]
