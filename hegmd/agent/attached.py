"""Starts the agent in a training that already runs, for `hegmctl attach`.

The hooks are on PyTorch's classes and in its global lists, so they reach existing loaders and optimizers. The agent
does not know what happened before, and reports that: it prevents a restart, but not a migration. The environment of the
process stays unchanged: a C thread may read it at any time.
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
    """Start the agent with these variables in addition to the process's own. Return what hegmctl shows of it, as pairs.

    Raises what prevents the start, and KeyError for a PyTorch without the hooked functions. Then no hook is left.
    """
    _provide_msgpack(msgpack)
    from . import boundary, lifecycle, torch_state

    loaders, optimizers = (sys.modules[name] for name in _HOOKED)
    unknown = (*UNKNOWN, *_children())
    gate = lifecycle.begin({**os.environ, **environ}, unknown)
    boundary.watch_loaders(loaders, gate)
    boundary.watch_optimizers(optimizers, gate)
    framework = torch_state.version()
    return [("framework_version", framework[1] if framework else ""), *[("unknown", phrase) for phrase in unknown]]


def _provide_msgpack(folder: str) -> None:
    """Let `protocol.codec` find the msgpack of hegmctl, which a variable of the environment names elsewhere."""
    package = type(sys)(_MSGPACK)
    package.__path__ = [folder]
    sys.modules[_MSGPACK] = package


def _children() -> tuple[str, ...]:
    """Return what is unknown about processes started before, such as workers of data loaders."""
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
