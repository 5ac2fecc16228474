"""Restores Lightning's Trainer: it starts as usual, and finds its counters set at the first batch.

Its loops are `while` loops over counters that it reads each time. So nothing is skipped, and no loop is entered
differently: at its first batch its progress is loaded as from a checkpoint, with the counters of its callbacks and the
logged values. Lightning's own restart in the middle of an epoch is not used: depending on the place it repeats or skips
an evaluation, a step of a schedule or a checkpoint. Internals that differ from the known ones prevent a restart.
"""

from __future__ import annotations

import gc
import sys

from ..values.duck_types import class_of, is_a
from ..values.script_api import meet

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType
    from typing import Any

#: The key of this module's part in the state.
KEY = "lightning"
#: Both names under which it is installed, and where its loops are in each.
BASES = ("lightning.pytorch", "pytorch_lightning")
_FIT, _EPOCH, _EVALUATION = "loops.fit_loop", "loops.training_epoch_loop", "loops.evaluation_loop"
#: Parts that are restored here, so that the search for the script's objects leaves them out.
_SEEN_TO = (
    "loops",
    "trainer.connectors.logger",
    "trainer.connectors.data",
    "utilities.combined_loader",
    "core.optimizer",
)
_OF_LOOP = ("_batches_that_stepped",)
_OF_CONNECTOR = (
    *("_callback_metrics", "_logged_metrics", "_progress_bar_metrics"),
    *("_first_loop_iter", "_current_fx"),
)
_KNOWN = ("restarted_mid_epoch", "on_advance_start", "setup_data", "_should_reload_train_dl")
_MID_EPOCH, _NO_RESTART = "restarted_mid_epoch", "none"


# ---- its position ----------------------------------------------------------------------------------------------------


def is_of(frame: FrameType) -> bool:
    """Return True if this frame runs Lightning's code."""
    return _part_of(str(frame.f_globals.get("__name__"))) is not None


def _part_of(module_name: str) -> str | None:
    """Return the module's name within Lightning; None for other modules."""
    for base in BASES:
        if module_name.startswith(f"{base}."):
            return module_name[len(base) + 1 :]
    return None


def is_part(thing: Any) -> bool:
    """Return True for a part of its loops, whose `state_dict` is not the script's."""
    return any((_part_of(kind.__module__) or "").startswith(_SEEN_TO) for kind in class_of(thing).__mro__)


def is_callback(thing: Any) -> bool:
    """Return True for Lightning's own callbacks: their counters are saved here, not by `state_dict`."""
    return (_part_of(class_of(thing).__module__) or "").startswith("callbacks.")


def path_of_pass(path: Any) -> Any:
    """Return where a pass of the training loader starts: above the epochs, or at a later epoch."""
    parts = [_part_of(step[0]) for step in path]
    if _EVALUATION in parts or _FIT not in parts:
        return path
    index = parts.index(_FIT)
    module_name, function, first, _line = path[index]
    return (*path[:index], (module_name, function, first, 0))


class OrderState:
    """A thread in these frames, which are Lightning's and the script's."""

    def __init__(self, frames: list[FrameType]) -> None:
        by_part = {_part_of(str(frame.f_globals.get("__name__"))): frame for frame in frames if is_of(frame)}
        found = by_part.get(_EPOCH)
        self._is_asking = _part_of(str(frames[-1].f_globals.get("__name__"))) == "utilities.combined_loader"
        self._evaluates = _EVALUATION in by_part
        values: Any = {} if found is None or found.f_code.co_name != "advance" else found.f_locals
        self._fetcher = values.get("data_fetcher")
        self._loop = values.get("self")
        self.trainer: Any = getattr(self._loop, "trainer", None)

    def against(self) -> Iterator[tuple[str, str, bool]]:
        """Yield why the training could not continue from here: the reason, a hint, and whether it passes by itself."""
        if self.trainer is None or self._evaluates or not self._is_asking:
            yield (
                "Lightning is not about to fetch a batch for its training",
                "try again shortly; nothing has to change",
                True,
            )
            return
        fit: Any = self.trainer.fit_loop
        if not all(hasattr(class_of(fit), name) for name in _KNOWN):
            version = getattr(sys.modules.get(type(fit).__module__.partition(".")[0]), "__version__", "?")
            yield f"the loops of Lightning {version} are not supported", "use Lightning 2.6", False
            return
        iterators: Any = getattr(fit._combined_loader._iterator, "iterators", ())
        if len(iterators) != 1 or self._fetcher.length is None or "Iter" in type(self._fetcher).__name__:
            hint = "use one loader of known length, and training_step(batch)"
            yield "Lightning reads several loaders, or ahead, or lets the script read", hint, False
        if self.trainer.reload_dataloaders_every_n_epochs:
            yield (
                "Lightning creates its loaders again after some epochs",
                "set reload_dataloaders_every_n_epochs=0",
                False,
            )
        if any(found is not self.trainer and found.global_step for found in _trainers(self.trainer)):
            yield (
                "another Trainer has trained before this one, and would do so again",
                "give each its own script",
                False,
            )
        if any(_counts(metric) for metric in self._metrics()):
            yield (
                "Lightning is within an epoch whose logged means, or metrics, are not complete",
                "try again after the epoch has ended",
                True,
            )

    def _metrics(self) -> Iterator[Any]:
        yield from self._loop._results.values()
        yield from (found for found in self.trainer.lightning_module.modules() if hasattr(found, "_update_count"))

    def reads(self) -> Any:
        """Return the iterator of the training's loader."""
        return self.trainer.fit_loop._combined_loader._iterator.iterators[0]

    def taken(self, plain_of: Callable[[Any], Any]) -> dict[str, Any]:
        """Return all its counters. `plain_of` returns the part of a dictionary that a state file can hold."""
        trainer, loop = self.trainer, self._loop
        return {
            "progress": {name: found.state_dict() for name, found in _progress_of(trainer).items()},
            "loop": {name: getattr(loop, name) for name in _OF_LOOP},
            "fetched": self._fetcher.fetched,
            "logged": plain_of({name: getattr(trainer._logger_connector, name) for name in _OF_CONNECTOR}),
            "should_stop": bool(trainer.should_stop),
            "callbacks": [
                (type(found).__qualname__, plain_of(found.__dict__) if _is_carried(found) else {})
                for found in trainer.callbacks
            ],
        }


def _counts(metric: Any) -> bool:
    """Return True if a metric has values whose mean it has still to report."""
    is_for_epoch = getattr(getattr(metric, "meta", None), "on_epoch", True)
    return bool(is_for_epoch and metric._update_count)


def _trainers(known: Any) -> list[Any]:
    return [found for found in gc.get_objects() if type(found) is type(known)]


def _progress_of(trainer: Any) -> dict[str, Any]:
    fit = trainer.fit_loop
    loop = fit.epoch_loop
    return {
        "epochs": fit.epoch_progress,
        "batches": loop.batch_progress,
        "schedules": loop.scheduler_progress,
        "steps": loop.automatic_optimization.optim_progress,
        "manual steps": loop.manual_optimization.optim_step_progress,
        "evaluation": loop.val_loop.batch_progress,
    }


def _is_carried(callback: Any) -> bool:
    """Return False for bars, which follow the counters, and for timers, which follow this process's clock."""
    return not _is_bar(callback) and type(callback).__name__ != "Timer"


def _is_bar(callback: Any) -> bool:
    return any(
        kind.__name__ == "ProgressBar" and _part_of(kind.__module__) is not None for kind in type(callback).__mro__
    )


# ---- in a restarted script -------------------------------------------------------------------------------------------


class Resuming:
    """Restores a Trainer. `taken` returns what was saved of it, or None."""

    def __init__(self, taken: Callable[[], Any]) -> None:
        self._taken = taken
        self._trainer: Any = None
        self._undo: list[Callable[[], None]] = []

    def expect(self) -> None:
        """Wait for the import of the Trainer, under either name."""
        for base in BASES:
            meet(f"{base}.trainer.trainer", self.meet)

    def meet(self, module: Any) -> None:
        """Have its Trainers start without the work done before: the first evaluation, the start of the epoch."""
        trainer, fit = module.Trainer, sys.modules[f"{module.__name__.rpartition('.trainer.')[0]}.{_FIT}"]._FitLoop
        if not all(hasattr(fit, name) for name in _KNOWN):
            return  # nothing was saved of such an object
        check, start = trainer._run_sanity_check, fit.on_advance_start

        def _run_sanity_check(found: Any) -> None:
            if self._taken() is None:
                check(found)

        def on_advance_start(loop: Any) -> None:
            if self._taken() is None or self._trainer is not None:
                start(loop)
                return
            self._trainer = loop.trainer
            loop._restart_stage = _MID_EPOCH
            try:
                start(loop)
            finally:
                loop._restart_stage = _NO_RESTART

        trainer._run_sanity_check, fit.on_advance_start = _run_sanity_check, on_advance_start
        self._undo += [
            lambda: setattr(trainer, "_run_sanity_check", check),
            lambda: setattr(fit, "on_advance_start", start),
        ]

    def misfits(self, taken: Any) -> list[str]:
        """Return why this cannot be restored; empty if it can."""
        if self._trainer is None:
            return ["Lightning's Trainer was not started"]
        here = [type(callback).__qualname__ for callback in self._trainer.callbacks]
        there = [name for name, _values in taken["callbacks"]]
        if here != there:
            return [f"the Trainer has the callbacks {', '.join(here)} and had {', '.join(there)}"]
        return []

    def put_back(self, taken: Any) -> None:
        """Restore its counters, and show them in its bars. `taken` is None if it was not Lightning that trained."""
        while self._undo:
            self._undo.pop()()
        if taken is None:
            return
        trainer = self._trainer
        for name, progress in _progress_of(trainer).items():
            progress.load_state_dict(taken["progress"][name])
        fit = trainer.fit_loop
        _set_all(fit.epoch_loop, taken["loop"])
        fit._data_fetcher.fetched = taken["fetched"]
        fit._combined_loader._iterator._idx = taken["fetched"]
        _set_all(trainer._logger_connector, taken["logged"])
        trainer.should_stop = taken["should_stop"]
        for callback, (_name, values) in zip(trainer.callbacks, taken["callbacks"]):
            _set_all(callback, values)
            if _is_bar(callback):
                callback.on_train_epoch_start(trainer, trainer.lightning_module)


def _set_all(thing: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(thing, name, _owned(value))


def _owned(value: Any) -> Any:
    """Return copies of tensors, which are views of the state's file."""
    if hasattr(value, "untyped_storage"):
        return value.clone()
    if is_a(value, dict):
        return {key: _owned(found) for key, found in value.items()}
    return [_owned(found) for found in value] if class_of(value) is list else value
