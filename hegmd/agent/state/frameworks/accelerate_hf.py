"""Loops outside the script: accelerate's loaders and the Trainer of Hugging Face, brought to their place.

Knows as little of their internals as possible: how many batches accelerate's loader has prefetched, and by which
methods the Trainer starts in the middle of an epoch, as it does from its own checkpoints. Their counters are saved. An
unknown version prevents a restart; nothing is guessed. Models, optimizers, schedules and passes over loaders are found
as in any script. Lightning is in `lightning.py`.
"""

from __future__ import annotations

import gc
import sys

from ..storage import state_file
from ..values import inherited
from ..values.duck_types import class_of
from ..values.script_api import meet
from . import lightning

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any

#: The key of this module's part in the state.
KEY = "frameworks"
#: Packages whose loops are restored here, and not by names in the script's modules.
OWN_LOOPS = frozenset(("transformers", "lightning", "pytorch_lightning"))
TRAINER = "transformers.trainer"
_TRAINING, _EPOCH, _BATCHES = "_inner_training_loop", "_run_epoch", "get_batch_samples"
_OF_TRAINER = (
    *("_tr_loss", "_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step"),
    *("_initial_num_input_tokens_seen", "current_flos", "current_gradient_accumulation_steps"),
)
_KNOWN_METHODS = ("_init_training_state", _EPOCH, _BATCHES, "_load_rng_state")


# ---- accelerate ------------------------------------------------------------------------------------------------------


def look_ahead(generator: Any) -> tuple[Any, int] | None:
    """Return the loader that a generator of accelerate reads, and its fetched batches; None for other generators.

    The iterator is None for a generator of accelerate whose position is unknown.
    """
    frame = generator.gi_frame
    if frame is None or _package_of(frame) != "accelerate":
        return None
    values = frame.f_locals
    iterator = values.get("dataloader_iter")
    if type(values.get("self")).__name__ != "DataLoaderShard" or iterator is None:
        return None, 0
    if generator.gi_running:  # it reads one batch ahead, to know the last one when it gives it out
        return iterator, 1 if "batch_index" in values else 0
    return iterator, 0 if values["self"].end_of_dataloader else 1


def reseeds(sampler: Any) -> bool:
    """Return True if a sampler seeds its generator for each epoch and creates it only then: its state says nothing."""
    return type(sampler).__name__ == "SeedableRandomSampler" and type(sampler).__module__ == "accelerate.data_loader"


def _accelerators() -> list[Any]:
    kind: Any = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    return [] if kind is None else [found for found in gc.get_objects() if issubclass(type(found), kind)]


def _taken_of_accelerate() -> list[dict[str, Any]]:
    return [
        {
            "step": found.step,
            "sync_gradients": found.gradient_state.sync_gradients,
            "iterations": [getattr(loader, "iteration", None) for loader in found._dataloaders],
        }
        for found in _accelerators()
    ]


def _put_accelerate(taken: list[dict[str, Any]]) -> None:
    for found, saved in zip(_accelerators(), taken):
        found.step = saved["step"]
        found.gradient_state._set_sync_gradients(saved["sync_gradients"])
        for loader, iteration in zip(found._dataloaders, saved["iterations"]):
            if iteration is not None:
                loader.iteration = iteration


# ---- capture ---------------------------------------------------------------------------------------------------------


def is_own(frame: FrameType) -> bool:
    """Return True if this frame's loops are restored here."""
    return _package_of(frame) in OWN_LOOPS


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


def against(frames: list[FrameType]) -> list[tuple[str, str, bool]] | None:
    """Return why a thread in these frames could not continue: the reason, a hint, and whether it passes by itself.

    Empty if it could; None if it is in none of these loops.
    """
    if not any(is_own(frame) for frame in frames):
        return None
    if any(_package_of(frame) != "transformers" for frame in frames if is_own(frame)):
        return list(lightning.OrderState(frames).against())
    by_name = _trainers_frames(frames)
    if _TRAINING not in by_name:
        return None
    kind = sys.modules[TRAINER].Trainer
    if not all(hasattr(kind, name) for name in _KNOWN_METHODS):
        version = getattr(sys.modules.get("transformers"), "__version__", "?")
        return [(f"the Trainer of transformers {version} is not supported", "use transformers 5", False)]
    if _EPOCH not in by_name or frames[-1] is not by_name.get(_BATCHES):
        return [("the Trainer is evaluating or saving", "try again shortly; nothing has to change", True)]
    ahead = look_ahead(frames[-1].f_locals["epoch_iterator"])
    if ahead is None or ahead[0] is None:
        return [("the Trainer reads a loader whose position is unknown", "let it make its own loader", False)]
    mine = by_name[_EPOCH].f_locals["self"]
    others = [found for found in gc.get_objects() if issubclass(type(found), kind) and found is not mine]
    if any(found.state.global_step for found in others):
        return [
            ("another Trainer has trained before this one, and would do so again", "give each its own script", False)
        ]
    return []


def _trainers_frames(frames: list[FrameType]) -> dict[str, FrameType]:
    return {frame.f_code.co_name: frame for frame in frames if frame.f_globals.get("__name__") == TRAINER}


class FrameworkCapture:
    """The saved state of the frameworks for a thread in these frames, and the reasons against it."""

    def __init__(self, frames: list[FrameType]) -> None:
        self.against: list[tuple[str, str]] = []
        #: The iterator that the Trainer reads and how many of its last batches have to be given again.
        self.read: tuple[Any, int] | None = None
        self.state: dict[str, Any] = {}
        accelerators = _accelerators()
        if len(accelerators) > 1:
            self.against.append((f"the script has {len(accelerators)} Accelerators", "use one for all of its parts"))
        elif accelerators:
            self.state["accelerate"] = _taken_of_accelerate()
        if any(lightning.is_of(frame) for frame in frames):
            checked_trainer = lightning.OrderState(frames)
            if checked_trainer.trainer is not None and not list(checked_trainer.against()):
                self.read = checked_trainer.reads(), 0
                self.state[lightning.KEY] = checked_trainer.taken(_plain_among)
        by_name = _trainers_frames(frames)
        if _EPOCH in by_name and frames[-1] is by_name.get(_BATCHES):
            self._take_trainer(by_name[_EPOCH].f_locals, frames[-1].f_locals)

    def _take_trainer(self, epoch: Any, batches: Any) -> None:
        ahead = look_ahead(batches["epoch_iterator"])
        if ahead is not None and ahead[0] is not None:
            self.read = ahead[0], ahead[1] + len(batches["batch_samples"])
            self.state["trainer"] = _taken_of_trainer(epoch["self"], epoch["epoch"], epoch["step"] + 1)


def _taken_of_trainer(trainer: Any, epoch: int, batches: int) -> dict[str, Any]:
    return {
        "epoch": epoch,
        "batches": batches,
        "state": {**vars(trainer.state)},
        "control": {**vars(trainer.control)},
        "own": {name: getattr(trainer, name) for name in _OF_TRAINER if hasattr(trainer, name)},
        "callbacks": [_plain_of(callback) for callback in trainer.callback_handler.callbacks],
    }


def _plain_of(callback: Any) -> tuple[str, dict[str, Any]]:
    """Return the class of a callback and its counters. The bars of transformers follow the Trainer's count."""
    kind = class_of(callback)
    if kind.__module__.startswith("transformers.") and not hasattr(callback, "state"):
        return kind.__qualname__, {}
    return kind.__qualname__, _plain_among(callback.__dict__)


def _plain_among(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        state_file.size_bytes(value)
    except state_file.UnsupportedValue:
        return False
    return True


# ---- in a restarted script -------------------------------------------------------------------------------------------


class Resuming:
    """Restores a Trainer. `state` returns what was saved of it, or None."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self._state = state
        self._trainer: Any = None
        self._evaluates_first = False
        self._undo: list[Callable[[], None]] = []
        self._lightning = lightning.Resuming(lambda: self._kept(lightning.KEY))

    def expect(self) -> None:
        meet(TRAINER, self.meet)
        self._lightning.expect()

    def meet(self, module: Any) -> None:
        """Have its Trainers begin in the middle. `module` is transformers.trainer."""
        kind = module.Trainer
        if not all(hasattr(kind, name) for name in _KNOWN_METHODS):
            return  # nothing was saved of such an object
        begin, run_epoch = kind._init_training_state, kind._run_epoch

        def _init_training_state(
            trainer: Any, max_steps: Any, updates: Any, epochs: Any, checkpoint: Any, trial: Any
        ) -> tuple[int, int]:
            began: tuple[int, int] = begin(trainer, max_steps, updates, epochs, checkpoint, trial)
            taken = self._taken()
            if taken is None or self._trainer is not None:
                return began
            self._begin(trainer, module.TrainerState(**taken["state"]))
            trainer.state.init_training_references(trainer, max_steps, epochs, trial)
            return taken["epoch"], taken["batches"]

        def _run_epoch(trainer: Any, *args: Any, **named: Any) -> Any:
            taken = self._taken()
            if trainer is self._trainer and taken is not None and taken["batches"]:
                named["resume_from_checkpoint"] = named.get("resume_from_checkpoint") or "the state of a restart"
                self._skip_nothing(module, trainer)
            return run_epoch(trainer, *args, **named)

        kind._init_training_state, kind._run_epoch = _init_training_state, _run_epoch
        self._undo += [
            lambda: setattr(kind, "_init_training_state", begin),
            lambda: setattr(kind, "_run_epoch", run_epoch),
        ]

    def _taken(self) -> Any:
        return self._kept("trainer")

    def _kept(self, key: str) -> Any:
        whole = self._state()
        return None if whole is None else whole.get(key)

    def _begin(self, trainer: Any, state: Any) -> None:
        """Mark the Trainer's start, and the start of its epoch, as done."""
        self._trainer = trainer
        trainer.state = state
        handler = trainer.callback_handler

        def on_epoch_begin(_args: Any, _state: Any, control: Any) -> Any:
            del handler.on_epoch_begin
            return control

        handler.on_epoch_begin = on_epoch_begin
        self._evaluates_first = bool(trainer.args.eval_on_start)
        trainer.args.eval_on_start = False

    def _skip_nothing(self, module: Any, trainer: Any) -> None:
        """Let the Trainer skip no batches and load no random states: both are restored elsewhere."""
        skip = module.skip_first_batches

        def skip_first_batches(loader: Any, _batches: int = 0) -> Any:
            return loader

        module.skip_first_batches = skip_first_batches

        def _load_rng_state(_checkpoint: Any) -> None:
            del trainer._load_rng_state

        trainer._load_rng_state = _load_rng_state
        self._undo.append(lambda: setattr(module, "skip_first_batches", skip))

    def misfits(self, state: dict[str, Any]) -> list[str]:
        """Return why this cannot be restored; empty if it can."""
        found: list[str] = []
        if len(state.get("accelerate", ())) != len(_accelerators()):
            found.append(f"the script has {len(_accelerators())} Accelerators, and had another number")
        if lightning.KEY in state:
            found += self._lightning.misfits(state[lightning.KEY])
        if "trainer" not in state:
            return found
        if self._trainer is None:
            return [*found, "the script's Trainer was not started"]
        here = [type(callback).__qualname__ for callback in self._trainer.callback_handler.callbacks]
        there = [name for name, _values in state["trainer"]["callbacks"]]
        if here != there:
            found.append(f"the Trainer has the callbacks {', '.join(here)} and had {', '.join(there)}")
        return found

    def put_back(self, state: dict[str, Any]) -> None:
        """Set their counters."""
        _put_accelerate(state.get("accelerate", []))
        self._lightning.put_back(state.get(lightning.KEY))
        while self._undo:
            self._undo.pop()()
        taken = state.get("trainer")
        if taken is None:
            return
        trainer = self._trainer
        trainer.args.eval_on_start = self._evaluates_first
        for name, value in taken["own"].items():
            setattr(trainer, name, value.clone().to(trainer.args.device) if hasattr(value, "clone") else value)
        counted = [(trainer.state, taken["state"]), (trainer.control, taken["control"])]
        counted += zip(trainer.callback_handler.callbacks, (values for _name, values in taken["callbacks"]))
        for thing, values in counted:
            for name, value in values.items():
                setattr(thing, name, value)


def _given() -> Any:
    whole: Any = inherited.state() if inherited.is_there() else None
    return None if whole is None else whole.get(KEY)


#: The restore under way in this process.
resuming = Resuming(_given)
