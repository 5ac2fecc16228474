"""The objects that a script has registered through `hegm`, and which of them a restart keeps.

Owns the counts of optimizers' steps, the values that are kept, and the loaders that may be replayed. Works without an
agent as well: then it counts, and keeps nothing beyond this process.
"""

from __future__ import annotations

import sys

from ...notes import note
from ..storage import state_file
from . import inherited

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Any

#: The key of this module's part in the state.
KEY = "hegm"
_STEPS = "_hegm_steps"
_REPLAY = "_hegm_replay"
_HINT = "give it a `get` that returns numbers, text, bytes, lists, dicts or tensors"


def make_boundary() -> Callable[[], None]:
    """Return the function that marks a boundary: the gate's own method with an agent, because each call counts."""
    registrations.count_steps()
    if not __name__.startswith("_hegm."):
        return _no_boundary
    from ... import lifecycle

    return lifecycle.start().explicit_boundary


def _no_boundary() -> None:
    """Do nothing: there is no agent."""


def make_released() -> Callable[[Callable[[str], object]], Any]:
    """Return the context manager that lends the process's GPU memory, or gets the reason if nothing is lent."""
    if not __name__.startswith("_hegm."):
        return _no_block
    from ... import lifecycle
    from ...lending import Block

    return lambda warn: Block(lifecycle.lending, warn)


class _NoBlock:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_exc: object) -> None:
        pass


def _no_block(_warn: Callable[[str], object]) -> _NoBlock:
    return _NoBlock()


def replayed(loader: Any) -> bool:
    """Return True if the script declared that this loader yields the same items each time."""
    return bool(getattr(loader, _REPLAY, False))


def meet(name: str, action: Callable[[Any], object]) -> None:
    """Call `action` with the module of that name, now or as soon as it is imported."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    # No import statement: import_hooks imports this package when a training framework is imported.
    mount = __import__(f"{__name__.rpartition('.state.')[0]}.import_hooks", fromlist=["FrameworkFinder"])
    sys.meta_path.insert(0, mount.FrameworkFinder({name: action}))


class Registrations:
    """The registrations of one script. `state` returns the state of its restart, until that is restored."""

    def __init__(self, state: Callable[[], Any]) -> None:
        self._state = state
        self._kept: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}
        self._steps_per_epoch: int | None = None
        self._batches_per_step = 1
        self._first_optimizer: Any = None
        self._counts = False
        self._epoch = 0
        #: The iterator of `resumable`. Code that restores loops replaces it.
        self.enumerate_loader: Callable[[Any], Iterator[tuple[int, Any]]] = enumerate

    # ---- what scripts call

    def global_step(self, optimizer: Any = None) -> int:
        """Return the number of steps of that optimizer; without one, of the first that has stepped."""
        found = self._first_optimizer if optimizer is None else optimizer
        if found is not None:
            return int(getattr(found, _STEPS, 0))
        before = self._before()
        return int(before["steps"][before["first"]]) if before and before["first"] is not None else 0

    def resumable(self, loader: Iterable[Any], *, replay: bool = False) -> Iterator[tuple[int, Any]]:
        """Yield the loader's batches with their numbers."""
        if replay:
            try:
                setattr(loader, _REPLAY, True)
            except (AttributeError, TypeError):
                note(f"a {type(loader).__name__} cannot be marked for replay")
        return self.enumerate_loader(loader)

    def start_epoch(self) -> int:
        """Return the epoch that the script was in when its state was saved."""
        before = self._before()
        return int(before["epoch"]) if before else self._epoch

    def set_steps_per_epoch(self, steps: int) -> None:
        if steps < 1:
            raise ValueError(f"an epoch has {steps} batches")
        self._steps_per_epoch = int(steps)

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Set the number of batches in a step."""
        self._batches_per_step = max(1, int(steps))

    def keep(self, name: str, get: Any, put: Any) -> None:
        """Keep that value over a restart, and bring it back at once in a script that was restarted."""
        if not callable(get) or not callable(put):
            raise TypeError("hegm.keep takes a name, a function that gets the value, and one that sets it")
        self._kept[name] = (get, put)
        before = self._before()
        if before and name in before["kept"]:
            put(before["kept"][name])

    def _before(self) -> Any:
        """Return what the script had registered before its restart; None without a restart, or once all is restored."""
        whole: Any = self._state()
        return None if whole is None else whole.get(KEY)

    # ---- steps

    def count_steps(self) -> None:
        """Count optimizers' steps from here on, or from the import of torch on."""
        if self._counts:
            return
        self._counts = True
        meet("torch.optim.optimizer", self.count_in)

    def count_in(self, module: Any) -> Any:
        """Have that module's optimizers counted; what takes the hook away again, or None."""
        register = getattr(module, "register_optimizer_step_post_hook", None)
        if register is None:
            note("this PyTorch has no hook for optimizers' steps; hegm.global_step() stays 0")
            return None

        def after_step(optimizer: Any, _args: object, _kwargs: object) -> None:
            compiler = getattr(sys.modules["torch"], "compiler", None)
            if compiler is not None and compiler.is_compiling():  # a trace of the step, not a step
                return
            setattr(optimizer, _STEPS, getattr(optimizer, _STEPS, 0) + 1)
            if self._first_optimizer is None:
                self._first_optimizer = optimizer

        return register(after_step)

    # ---- over a restart

    def capture(self, optimizers: list[Any]) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """Return this part of the state, and what prevents a restart: the problem, and its fix."""
        against: list[tuple[str, str]] = []
        kept: dict[str, Any] = {}
        for name, (get, _put) in list(self._kept.items()):
            try:
                kept[name] = value = get()
                state_file.size_bytes(value)
            except state_file.UnsupportedValue as error:
                against.append((f"what hegm.keep({name!r}) keeps cannot be written: {error}", _HINT))
            except Exception as error:  # noqa: BLE001 - the script's own function
                against.append((f"what hegm.keep({name!r}) keeps cannot be read: {error!r}", _HINT))
        steps = [int(getattr(optimizer, _STEPS, 0)) for optimizer in optimizers]
        first = next((index for index, found in enumerate(optimizers) if found is self._first_optimizer), None)
        return {"kept": kept, "steps": steps, "first": first, "epoch": self._epoch_now()}, against

    @property
    def keeps(self) -> bool:
        """Return True if the script keeps objects of its own over a restart."""
        return bool(self._kept)

    def _epoch_now(self) -> int:
        if self._steps_per_epoch is None:
            return self._epoch
        return self.global_step() * self._batches_per_step // self._steps_per_epoch

    def misfits(self, state: dict[str, Any], optimizers: list[Any]) -> list[str]:
        """Return why this cannot be restored into the current script; empty if it can. Changes nothing."""
        found = [
            f"the state has a value for hegm.keep({name!r}), but the script did not call it before its first batch"
            for name in state["kept"]
            if name not in self._kept
        ]
        if len(state["steps"]) != len(optimizers):
            found.append(f"the state has {len(state['steps'])} optimizers, and the script has {len(optimizers)}")
        return found

    def put_back(self, state: dict[str, Any], optimizers: list[Any]) -> None:
        """Set all of it. Raises what a function of the script raises."""
        for optimizer, steps in zip(optimizers, state["steps"]):
            setattr(optimizer, _STEPS, steps)
        if state["first"] is not None:
            self._first_optimizer = optimizers[state["first"]]
        self._epoch = state["epoch"]
        for name, value in state["kept"].items():
            self._kept[name][1](value)


def _given() -> Any:
    """Return the state of this process. It cannot be read before torch is imported."""
    if not inherited.is_there() or sys.modules.get("torch") is None:
        return None
    try:
        return inherited.state()
    except (state_file.DamagedStateFile, OSError) as error:
        # the restore fails the same way, and ends the process with its reason
        note(f"the state cannot be read: {error}")
        return None


#: The declarations of this process's script.
registrations = Registrations(_given)
