"""What tests need that may not be installed: they are skipped without it, and it is imported by the test that uses it.

PyTorch takes 1.5 s of the processor to import. Collecting the tests must not import it, in each of the workers.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest


class ImportedWhenUsed:
    """Stands for a module of that name, which is imported when the first of its attributes is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        module = sys.modules.get(self._name) or self._imported()
        return getattr(module, attribute)

    def _imported(self) -> ModuleType:
        module = importlib.import_module(self._name)
        # A million objects that stay: each later test that left anything would have the collector look through them.
        gc.freeze()
        return module


def need_torch() -> Any:
    """PyTorch, not imported yet. Skips the test or module that calls this where it is not installed."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not installed; `make test` installs it", allow_module_level=True)
    return ImportedWhenUsed("torch")
