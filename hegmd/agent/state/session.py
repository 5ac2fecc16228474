"""Prepares a worker that can be restarted: follows its loaders' passes, and restores its state if it is a restarted
one.

Owns the hooks, and the moment at which the state is restored: when the script reaches the place where it was saved.
Before that, an optimizer's step or the end of the script is an error, because a restarted script must never start over
unnoticed. After that only the record of each pass over a loader remains.
"""

from __future__ import annotations

import os
import sys
from time import monotonic

from ..notes import note
from .code import loop_position, source_check
from .code.loop_shadows import PendingLoops, Shadows
from .code.position import elsewhere, is_of_another_script, path_of, script_frames, step_text
from .code.value_stack import caller
from .frameworks import accelerate_hf, lightning
from .loaders import passes, stateful_loader
from .loaders.rebuild import RebuiltPass
from .save_and_exit import end_unrestored, flush_all, tell_waiting
from .script import capture_points, output_files
from .script.baseline import note_place
from .values import inherited
from .values.refusals import IncompatibleState
from .values.script_api import registrations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

ALLOWED = "HEGM_ALLOW_RESTART"
_due: PendingRestore | None = None
_passes = 0


def is_wanted() -> bool:
    """Return True if this process can be restarted, or was."""
    return os.environ.get(ALLOWED, "") not in ("", "0") or inherited.is_there()


def is_due() -> bool:
    """Return True while this process has a state whose place it has not reached."""
    return _due is not None


def on_loader_import(module: Any) -> None:
    """`module` is torch.utils.data.dataloader: follow each pass over a loader, and wait for the place if one is due."""
    if is_wanted():
        _watch_passes(module.DataLoader)
        stateful_loader.expect(_watch_passes)
        expect(module)


def on_optimizer_import(module: Any) -> None:
    """`module` is torch.optim.optimizer: no step before the state is back."""
    if is_wanted():
        _watch_steps(module)
    if inherited.is_for_ranks() and not inherited.is_there():
        _forbid_steps_without_rank(module)
    if not inherited.is_there() and _due is None:
        return
    expect(None)
    if _due is not None:
        _due.forbid_steps(module)


def expect(loaders: Any) -> None:
    """Take the state that the environment names, if there is one, and be ready for its place."""
    global _due  # noqa: PLW0603 - one state a process
    if _due is None and inherited.is_there():
        try:
            inherited.claim()
        except OSError as error:
            end_unrestored([f"the state cannot be read: {error}"])
        if not inherited.is_there():  # of a rank that its launcher starts again long after
            return
        _due = PendingRestore()
        accelerate_hf.resuming.expect()
        os.register_at_fork(after_in_child=_forget_in_child)
        import atexit

        atexit.register(_end_of_script)
    if _due is not None and loaders is not None:
        _due.watch_batches(loaders)


class PendingRestore:
    """A state on its way back into this process."""

    def __init__(self) -> None:
        self._state: dict[str, Any] | None = None
        self._entering: PendingLoops | None = None
        self._passes: list[Any] = []
        self._awaited: Any = None
        self._undo: list[Callable[[], None]] = []
        shadows = Shadows(self._needed, self.end)
        shadows.install()
        self._undo.append(shadows.lift)
        registrations.enumerate_loader = self._enumerate
        self._undo.append(lambda: setattr(registrations, "enumerate_loader", enumerate))

    def watch_batches(self, module: Any) -> None:
        """Run before any loader's iterator is asked."""
        kind = module._BaseDataLoaderIter
        before: Callable[[Any], Any] = kind.__next__

        def __next__(iterator: Any) -> Any:  # noqa: N807 - what it stands in for
            if iterator is self._awaited:
                self._arrive_asked(caller())
            return before(iterator)

        __next__._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets
        kind.__next__ = __next__
        self._undo.append(lambda: setattr(kind, "__next__", before))

    def forbid_steps(self, module: Any) -> None:
        """End the process at a step before the place is reached."""
        register = getattr(module, "register_optimizer_step_pre_hook", None)
        if register is None:
            end_unrestored(["this PyTorch has no hooks before optimizers' steps (2.0 has)"])

        def before_step(*_args: object) -> None:
            self.end(
                ["an optimizer was about to step before the script reached its saved position", *self.not_entered()]
            )

        self._undo.append(register(before_step).remove)

    def again(self, loader: Any, path: Any, number: int, make: Callable[[Any], Any]) -> Any:
        """Make the pass of that place again; return None if the state has none there."""
        state = self._read()
        for index, taken in enumerate(self._passes):
            if [tuple(step) for step in taken["path"]] == list(path):
                del self._passes[index]
                return self._made_again(loader, taken, RebuiltPass(number, path, loader), state, make)
        return None

    def _made_again(self, loader: Any, taken: Any, made: Any, state: Any, make: Callable[[Any], Any]) -> Any:
        try:
            again = made.rest_again if taken["rests"] else made.begin_again
            iterator = again(loader, taken, make)
        except IncompatibleState as error:
            self.end(error.reasons)
        if taken["number"] == state["place"]["driver"]:
            self._awaited = iterator
        return iterator

    def _arrive_asked(self, frame: FrameType) -> None:
        """Arrive if the pass is asked at the saved place."""
        frames = script_frames(frame)
        here, there = path_of(frames), tuple(tuple(step) for step in self._read()["place"]["path"])
        if here != there and not any(accelerate_hf.is_own(found) for found in frames):
            where = f"{step_text(here[-1])}, and the training was at {step_text(there[-1])}"
            self.end([f"the loader's next batch is asked for at {where}"])
        self.arrive(frame)

    def arrive(self, frame: FrameType) -> None:
        """Restore everything: the script is at its place. Only workers that wait for their pass remain."""
        from ..lifecycle import note_restarted
        from .restore import put_back

        state = self._read()
        left = self._entering.left() if self._entering is not None else []
        left += elsewhere(state["place"], frame)
        if left:
            self.end([f"the loop at {where} was entered in another way" for where in left])
        if state["place"]["driver"] is None:  # a loop over a loader was noted when its pass began
            note_place(tuple(tuple(step) for step in state["place"]["path"]), script_frames(frame))
        began = monotonic()
        if output_files.KEY in state and inherited.step() is not None:
            flush_all()
            output_files.cut_back(state[output_files.KEY])
        try:
            put_back(state, frame)
        except IncompatibleState as error:
            self.end(error.reasons)
        inherited.forget()
        self._state = {"place": {"driver": None}}
        self._awaited = None
        passes.resting[:] = [taken for taken in self._passes if taken["rests"]]
        self._passes = passes.resting  # shared list: passes that are not started again go into the next state unchanged
        while self._undo:
            self._undo.pop()()
        _arrived()
        note(f"the state was put back in {monotonic() - began:.4f} s")
        note_restarted(inherited.step())

    def _enumerate(self, loader: Any) -> Any:
        """Return what `hegm.resumable` yields until the place is reached."""
        return enumerate(loader, self._needed("enumerate", caller()) or 0)

    def _needed(self, name: str, frame: FrameType) -> Any:
        if _is_half_imported():  # one of the packages whose loops are restored imports it itself, such as tqdm
            return None
        self._read()
        return self._entering.need(name, frame) if self._entering is not None else None

    def _read(self) -> dict[str, Any]:
        """Read the state, not before it is needed: while PyTorch is being imported it could create no tensors."""
        state = self._state
        if state is None:
            try:
                state = inherited.state()
            except (OSError, ValueError) as error:
                end_unrestored([f"the state cannot be read: {error}"])
            self._passes = list(state["passes"])
            self._entering = PendingLoops(state["place"], self.arrive)
            self._state = state
        return state

    def place(self) -> Any:
        """Return where it was saved: the script's frames, outermost first."""
        return self._read()["place"]["path"]

    def end(self, reasons: list[str]) -> NoReturn:
        """End the process, and say so if its script is not the one that saved the state."""
        try:
            state = self._state or inherited.state() or {}
        except (OSError, ValueError):
            state = {}
        edited = source_check.edited_since(state.get("place", {}).get("files", {}))
        if edited:
            inherited.note_edited()
        end_unrestored([*edited, *reasons])

    def not_entered(self) -> list[str]:
        return (
            []
            if self._entering is None
            else [f"the loop at {where} was not entered" for where in self._entering.left()]
        )


_resting: PendingRestore | None = None


def _arrived() -> None:
    global _due, _resting
    _due, _resting = None, _due


def _is_half_imported() -> bool:
    """Return True while PyTorch is being imported: creating tensors would import parts of it too early."""
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _watch_passes(kind: Any) -> None:
    """Follow every pass over a loader of that class from its beginning."""
    make = kind.__iter__

    def __iter__(loader: Any) -> Any:  # noqa: N807 - what it stands in for
        return _begin(loader, caller(), make)

    __iter__._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets
    __iter__.__qualname__ = make.__qualname__
    __iter__.__module__ = make.__module__
    __iter__.__doc__ = make.__doc__
    kind.__iter__ = __iter__


def _watch_steps(module: Any) -> None:
    """See at the first step of each pass over a loader which loops train. `module` is torch.optim.optimizer."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None:
        return

    def after_step(*_args: object) -> None:
        if capture_points.is_news and not sys.modules["torch"].compiler.is_compiling():  # a trace of a step is none
            capture_points.note_step(caller())

    register(after_step)


def _forbid_steps_without_rank(module: Any) -> None:
    """Have no step in a process that does not say which rank it is: a launcher makes none, and a rank would be lost."""

    def before_step(*_args: object) -> None:
        if inherited.is_for_ranks():
            why = (
                f"its state is that of ranks, and {inherited.RANK} did not say which one this process is when it began"
            )
            end_unrestored([why])

    module.register_optimizer_step_pre_hook(before_step)


def _begin(loader: Any, frame: FrameType, make: Callable[[Any], Any]) -> Any:
    global _passes  # noqa: PLW0603 - they are numbered
    _passes += 1
    capture_points.is_news = True
    frames = script_frames(frame)
    path = lightning.path_of_pass(path_of(frames))
    note_place(path, frames)
    loop_position.note_begun(path, frames)
    source = _due or _resting
    if source is not None:
        iterator = source.again(loader, path, _passes, make)
        if iterator is not None:
            return iterator
    return passes.Iteration(_passes, path, loader).begin(loader, make)


def _forget_in_child() -> None:
    global _due, _resting  # noqa: PLW0603 - one state a process
    _due = _resting = None


def _end_of_script() -> None:
    if _due is None:
        return
    if not _passes and is_of_another_script(_due.place()[0]):
        tell_waiting()
    else:
        _due.end(["the script ended before it reached its saved position", *_due.not_entered()])
