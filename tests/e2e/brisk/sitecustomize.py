"""Has a Python that trains in a test start and end in half of the processor: its collector seldom looks at modules.

On the path of those Pythons as anybody's sitecustomize would be, so that the agent's runs it. Importing PyTorch and an
optimizer makes a million objects that stay, and the collector goes through all of them a hundred times until the script
begins, and once more at the end: 3.2 s of processor with it, and 1.8 s without. What scripts do is the same.

Where `BARE_TORCH` is set, PyTorch comes without its compiler too, for scripts that cannot say so themselves as others
do (training/bare_torch.py): those that are restarted, whose imports are done for them before their next start.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from importlib.machinery import ModuleSpec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

gc.set_threshold(100_000, 50, 100)
atexit.register(gc.freeze)


class NoCompiler:
    """Finds and loads `torch._dynamo`, of which an optimizer takes two functions where nothing is compiled."""

    @classmethod
    def find_spec(cls, name: str, _path: Any = None, _target: Any = None) -> ModuleSpec | None:
        loader: Any = cls
        return ModuleSpec(name, loader) if name == "torch._dynamo" else None

    @staticmethod
    def create_module(_spec: ModuleSpec) -> None: ...

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        vars(module).update(disable=_same, graph_break=lambda: None)


def _same(function: Any, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True) -> Any:
    return function


if os.environ.get("BARE_TORCH"):
    sys.meta_path.insert(0, NoCompiler)
