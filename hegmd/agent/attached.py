"""The agent's beginning in a training that runs already, as `hegmctl attach` has it.

The hooks are on PyTorch's classes and in its global lists, so they reach the loaders and optimizers that exist. What
happened before is not known, and is said to the daemon: it blocks a restart, but no move. The environment of the
process stays as it was: a C thread may read it at any time.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN = (
    "the passes over data loaders that began earlier",
    "the initial values of the script's variables",
    "the command that would start it again",
)
_MSGPACK = "_hegm_msgpack"
_HOOKED = ("torch.utils.data.dataloader", "torch.optim.optimizer")  # `import torch` imports both


def begin(environ: Mapping[str, str], msgpack: str) -> list[tuple[str, str]]:
    """Start the agent with those variables besides its process's own; what hegmctl shows of it, by key and value.

    Raises what keeps the agent from starting, KeyError for a PyTorch without what is hooked. No hook is there then.
    """
    _lend_msgpack(msgpack)
    from . import boundary, lifecycle, torch_state

    loaders, optimizers = (sys.modules[name] for name in _HOOKED)
    unknown = (*UNKNOWN, *_children())
    gate = lifecycle.begin({**os.environ, **environ}, unknown)
    boundary.watch_loaders(loaders, gate)
    boundary.watch_optimizers(optimizers, gate)
    framework = torch_state.version()
    return [("framework_version", framework[1] if framework else ""), *[("unknown", phrase) for phrase in unknown]]


def _lend_msgpack(folder: str) -> None:
    """Let `protocol.codec` find the msgpack of hegmctl, which a variable of the environment names elsewhere."""
    package = type(sys)(_MSGPACK)
    package.__path__ = [folder]
    sys.modules[_MSGPACK] = package


def _children() -> tuple[str, ...]:
    """What cannot be known of processes that it has started before, such as workers of its data loaders."""
    count = 0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                count += len(file.read().split())
        except OSError:  # the thread has ended, or this kernel does not say
            continue
    if not count:
        return ()
    return (f"the state of its {count} child processes",)
