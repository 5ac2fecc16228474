"""The agent's part of a restart: it weighs its state, saves it, and exits. Runs in the agent's thread.

Connects the daemon's orders to the package `state`, which knows what a training's state is. It is loaded on the first
such order only: a job that is never restarted does not import it.
"""

from __future__ import annotations

import os
import sys

from .notes import note
from .refusals import refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from ..errors import HegmError
    from .quiesce import Gate
    from .state.prestart import PrestartModules
    from .state.storage.state_file import UnwrittenRest

# The operation from whose state this process continues, as its supervisor reports it.
OPERATION = "HEGM_RESTART"
# Set by a supervisor; without one the process would not be started again.
ALLOWED = "HEGM_ALLOW_RESTART"
# Limits of the list of variables that start over.
_MAX_NAMES = 16
_MAX_NAME = 200
_MAX_REFUSAL = 500


class RestartCost:
    """The size of the state that a restart carries, the reasons against one, the variables that start over, and the
    modules that a prestarted process can import.
    """

    __slots__ = ("beforehand", "begin_anew", "refusals", "size_bytes")

    def __init__(
        self, size_bytes: int, refusals: tuple[str, ...], begin_anew: tuple[str, ...], beforehand: PrestartModules
    ) -> None:
        self.size_bytes = size_bytes
        self.refusals = refusals
        self.begin_anew = begin_anew
        self.beforehand = beforehand


def weigh() -> RestartCost:
    """Weigh the state now, at a boundary. Raises HegmError if this process cannot be restarted at all."""
    size_bytes, refusals, anew = _import_state_module("save_and_exit").weigh()
    bounded = [str(name)[:_MAX_NAME] for name in anew[:_MAX_NAMES]]
    refused = tuple([str(found) for found in refusals])
    return RestartCost(int(size_bytes), refused, tuple(bounded), _import_state_module("prestart").beforehand())


def beforehand() -> PrestartModules:
    """Return what a prestarted process can import. Raises HegmError if there can be none."""
    found: PrestartModules = _import_state_module("prestart").beforehand()
    return found


def fits_of(gate: Gate) -> Callable[[], bool]:
    """Return the check that the gate makes at each boundary, to park where a restart can continue. Raises HegmError."""
    found: Callable[[], bool] = _import_state_module("script.capture_points").fits_of(gate)
    return found


def can_restart_here() -> bool:
    """Return True if a restart can continue from where the training is parked. Raises HegmError."""
    return not any(found.passes for found in _import_state_module("capture").capture()[1])


def save(fd: int, progress: Callable[[int], None]) -> int:
    """Write the state of the parked training into the descriptor; how many bytes. Raises HegmError."""
    return int(_import_state_module("save_and_exit").save(fd, progress=progress))


def snapshot(
    fd: int | None, most_bytes: int, begin: Callable[[], object]
) -> tuple[int, tuple[str, ...], UnwrittenRest | None]:
    """Write the state of the parked training to the descriptor.

    Returns its size, what starts over after a start from it, and what is still to be written while the training
    continues. Calls `begin` before the first byte is written. Raises HegmError, whose facts have the needed size or
    what prevents it.
    """
    leaving = _import_state_module("save_and_exit")
    if _import_state_module("session").is_due():
        raise refusal("it has not reached the position of the state that it was started from", "try again after that")
    try:
        size_bytes, anew, rest = leaving.snapshot(fd, most_bytes, begin)
    except leaving.TooLarge as error:
        raise _too_large(error.size_bytes, most_bytes) from error
    except leaving.SaveObstacles as error:
        raise _prevented(error, leaving.hints_of(error.refusals)) from error
    return int(size_bytes), tuple([str(name)[:_MAX_NAME] for name in anew[:_MAX_NAMES]]), rest


# In a variable of the function that raises it, an error would keep itself and the state that was not written.
def _too_large(size_bytes: int, most_bytes: int) -> HegmError:
    short = refusal(f"its state has {size_bytes} bytes, and the slot takes {most_bytes}", "take a larger one")
    short.facts["state_bytes"] = size_bytes
    return short


def _prevented(error: Any, hints: str) -> HegmError:
    refused = refusal(str(error), hints)
    if not error.passes:
        refused.facts["refusals"] = [str(found)[:_MAX_REFUSAL] for found in error.refusals][:_MAX_NAMES]
    return refused


def leave() -> NoReturn:
    """End the process, its output flushed, with the exit code that tells its supervisor of a restart."""
    note("leaving for a restart")
    _import_state_module("save_and_exit").leave()
    raise refusal("it did not end", "read its log")


def give_up_lock() -> None:
    """Close the lock on the state that this process was started from, if it has one."""
    inherited = sys.modules.get(f"{__package__}.state.values.inherited")
    if inherited is not None:
        inherited.close_lock()


def _import_state_module(name: str) -> Any:
    """Return a module of the package. Raises HegmError without a supervisor, or in a release without the package."""
    if os.environ.get(ALLOWED, "") in ("", "0"):
        raise refusal(
            "this process has no supervisor that can start it again", "start it with hegmctl run --allow-restart"
        )
    try:
        return __import__(f"{__package__}.state.{name}", fromlist=["__name__"])
    except (ImportError, AttributeError) as error:
        raise refusal(
            f"its agent cannot restart it: {error}",
            "install one release of hegmd and hegmctl, then start the job again",
        ) from error
