"""Functions that a training script may call. Each is safe without hegmd.

A job can be moved and restarted without them. They are for loops that no hook can see, for the script's own
variables, and for scripts that were written for HeGM, whose functions are here with the same meaning.

Owns no state: under `hegmctl run` the agent of this process answers, elsewhere the same code of the installed package
does, without a thread or a socket.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

__all__ = [
    "boundary",
    "find_training_loop_sites",
    "global_step",
    "keep",
    "recovery",
    "released",
    "resumable",
    "set_gradient_accumulation_steps",
    "set_steps_per_epoch",
    "start_epoch",
]

_Batch = TypeVar("_Batch")

# The agent is mounted under a private name; a second copy in this process would have no state.
_package = "_hegm" if "_hegm" in sys.modules else "hegmd"
_interface: Any = importlib.import_module(f"{_package}.agent.state.values.script_api")
_registrations: Any = _interface.registrations

#: A batch ends here: for loops without a DataLoader and an optimizer, called once a batch by the training thread.
boundary: Callable[[], None] = _interface.make_boundary()

_make_block: Callable[[Callable[[str], object]], AbstractContextManager[None]] = _interface.make_released()


def released() -> AbstractContextManager[None]:
    """Lend the GPU memory of this job to others: `with hegm.released(): rollouts()`.

    At the begin of the block the tensors of this process leave its GPU; the CUDA context stays. At its end they come
    back before the next line runs, also if the block raises. The block must not use tensors that existed before it.
    If nothing can be lent, the block runs all the same, with its tensors in place, and a warning says why. Only the
    training thread can lend; a block within a block changes nothing. All ranks of a job have to come to the block.
    """
    return _make_block(_warn)


def _warn(why: str) -> None:
    warnings.warn(f"hegm.released() lends no GPU memory: {why}", RuntimeWarning, stacklevel=4)


def recovery(  # noqa: PLR0913 - what a script may say, each named
    *,
    model: Any,
    optimizer: Any,
    scheduler: Any = None,
    extra: Mapping[str, Any] | None = None,
    step: int = 0,
    soft_limit_s: float | None = None,
    hard_limit_s: float = 30.0,
    abort: Callable[[], object] | None = None,
    finalize: Callable[[], object] | None = None,
    health_check: Callable[[], object] | None = None,
) -> Any:
    """Have a block of this script run again when a rank fails: `rec = hegm.recovery(...)`, then `@rec.block`.

    For scripts under `hegmctl run --ranks N`; elsewhere the block runs once, with a warning. Model, optimizer and
    scheduler are one each, or lists. `extra` are objects of each rank with `state_dict` and `load_state_dict`. `step`
    is the first one. No step for `soft_limit_s` is a hang (default: five times the longest step, and at least 60 s);
    a rank that does not stop within `hard_limit_s` after that is killed and replaced. `abort` ends waits of the
    script's own, in another thread; `finalize` and `health_check` run before the block runs again, and a process in
    which one of them raises is replaced. Takes over the signal SIGRTMIN+9 once a block runs. See docs/recovery.md.
    """
    block: Any = importlib.import_module(f"{_package}.agent.ranks.block")
    return block.Recovery(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        extra=extra,
        step=step,
        soft_limit_s=soft_limit_s,
        hard_limit_s=hard_limit_s,
        abort=abort,
        finalize=finalize,
        health_check=health_check,
    )


def global_step(optimizer: Any = None) -> int:
    """How many steps that optimizer has made, those before a restart included; without one, the first that was made."""
    return int(_registrations.global_step(optimizer))


def resumable(loader: Iterable[_Batch], optimizer: Any = None, *, replay: bool = False) -> Iterator[tuple[int, _Batch]]:
    """`enumerate(loader)`, which continues at its batch and its number after a restart.

    An ordinary `enumerate` of a DataLoader does so as well. `replay` is for data that has no place of its own, as an
    iterable dataset: it gives the same items in the same order each time, so that those already seen may be asked for
    again and thrown away. `optimizer` is taken for HeGM's sake and not needed.
    """
    del optimizer
    found: Iterator[tuple[int, _Batch]] = _registrations.resumable(loader, replay=replay)
    return found


def start_epoch() -> int:
    """The epoch that a restarted script is in, 0 in one that has just begun: `range(hegm.start_epoch(), epochs)`."""
    return int(_registrations.start_epoch())


def set_steps_per_epoch(steps: int) -> None:
    """The number of batches of an epoch, if `start_epoch` needs it."""
    _registrations.set_steps_per_epoch(steps)


def set_gradient_accumulation_steps(steps: int) -> None:
    """The number of batches for each optimizer step, if `start_epoch` needs it."""
    _registrations.set_gradient_accumulation_steps(steps)


def find_training_loop_sites(source_or_path: Any) -> list[Any]:
    """The places where a script has a loop over `range` with one over `enumerate` inside: `lineno`, `col_offset`,
    `loop_var`.

    Takes the text of the script, or a path. It is here for HeGM's sake: no loop is patched by it.
    """
    sites: list[Any] = importlib.import_module("hegm.loop_sites").find(source_or_path)
    return sites


def keep(name: str, get: Callable[[], Any], set: Callable[[Any], object]) -> None:  # noqa: A002 - as one says it
    """Keep a variable of the script's own over a restart: `get` gives its value, `set` takes it.

    The value is made of numbers, text, bytes, lists, tuples, dicts, sets, tensors and arrays. Call this before the
    first batch. In a restarted script `set` is called at once, and again at the first batch, when the script's own
    preparations are over.
    """
    _registrations.keep(name, get, set)
