"""Optional requirements of tests: a test is skipped without them, and imports them itself.

PyTorch takes 1.5 s of the processor to import. Collecting the tests must not import it, in each of the workers.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# pytest asks everything in a test module for other special names, to find the fixtures and the test cases in it.
_SPECIAL_OF_MODULES = {"__version__", "__file__"}


class ImportedWhenUsed:
    """A proxy for the module of that name, which is imported at the first access to an attribute."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__") and attribute not in _SPECIAL_OF_MODULES:
            raise AttributeError(attribute)
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


def need_packages(*names: str) -> None:
    """Skips the test that calls this where one of these packages is not installed."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed; `make test` installs them")


def hidden_folder(paths: Iterable[Path]) -> Path | None:
    """The first folder above these files that other users may not enter, as they may not enter /root."""
    return next((folder for path in paths for folder in path.parents[::-1] if not folder.stat().st_mode & 0o001), None)


def need_a_clone_for_all() -> None:
    """Skips a test in which another user runs what is in this clone."""
    folder = hidden_folder([Path(sys.executable), Path(__file__)])
    if folder is not None:
        pytest.skip(f"other users may not enter {folder}; a clone elsewhere runs this test")
