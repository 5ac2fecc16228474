"""The functions where a batch ends, by framework: hooks that call the gate. One function for each framework.

The gate (`quiesce.Gate`) decides which of these calls is a boundary.

PyTorch's data loader is hooked at the class of its iterators, which all loaders share, also those of accelerate,
Lightning and the Hugging Face Trainer. Its optimizers are hooked by PyTorch's global hooks. `builtins` and all objects
of the script stay unchanged.
"""

from __future__ import annotations

import sys
from _thread import get_ident

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .quiesce import Gate


# torch.compiler.is_compiling came with it.
FIRST_WITH_COMPILER = (2, 3)


def watch_loaders(module: Any, gate: Gate) -> None:
    """Call the gate when a loader's iterator is asked for a batch. `module` is torch.utils.data.dataloader."""
    iterators = getattr(module, "_BaseDataLoaderIter", None)
    if iterators is None or "__next__" not in vars(iterators):
        note("this PyTorch has no iterator class that is known; boundaries are its optimizers' steps")
        return
    iterators.__next__ = _passing(gate, iterators.__next__)


def _passing(gate: Gate, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def __next__(self: Any) -> Any:  # noqa: N807 - replaces the method of that name
        if get_ident() == gate.thread:
            gate.count += 1
            if gate.requested:
                gate.at_boundary()
        else:
            gate.batch_from_other_thread()
        try:
            return original(self)
        except BaseException as error:
            # Tracebacks show the script's own frames and no line of ours (from Python 3.11 on a bare `raise` keeps it).
            own = error.__traceback__
            error.__traceback__ = own.tb_next if own is not None else None
            del own  # it holds this frame, which would hold it, and the iterator with its workers, until a collection
            raise

    # When a compiled function reads a loader, TorchDynamo calls this function without tracing it.
    __next__._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets
    __next__.__qualname__ = original.__qualname__
    __next__.__module__ = original.__module__
    __next__.__doc__ = original.__doc__
    return __next__


def watch_optimizers(module: Any, gate: Gate) -> None:
    """Report every optimizer step to the gate. `module` is torch.optim.optimizer."""
    register = getattr(module, "register_optimizer_step_post_hook", None)
    if register is None or _version_of(sys.modules["torch"]) < FIRST_WITH_COMPILER:
        note("this PyTorch has no optimizer hooks that we can use; boundaries are its loaders' batches only")
        return
    torch = sys.modules["torch"]

    def after_step(_optimizer: object, _args: object, _kwargs: object) -> None:
        # Looked up at each step: this is registered while torch is being imported, before it has its `compiler`.
        if torch.compiler.is_compiling():  # a trace of the step, not a step
            return
        if get_ident() == gate.thread:
            gate.step()
        else:
            gate.other_thread_steps()

    register(after_step)


def _version_of(torch: Any) -> tuple[int, ...]:
    return tuple(int(part) for part in str(torch.__version__).split(".")[:2] if part.isdigit())
