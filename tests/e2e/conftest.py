"""What tests of whole jobs have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.e2e.forked import preloaded_python
from tests.e2e.moved_job import environment
from tests.e2e.references import ONE_COMPILER

FRAMEWORKS = ("transformers.trainer", "lightning.pytorch", "accelerate")


@pytest.fixture(scope="session")
def preloaded_frameworks() -> Iterator[None]:
    """The same with the frameworks that are installed, whose imports take as long as PyTorch's."""
    there = [name for name in FRAMEWORKS if importlib.util.find_spec(name.partition(".")[0])]
    with preloaded_python({**environment(None), **ONE_COMPILER}, *there):
        yield


@pytest.fixture(scope="session")
def preloaded() -> Iterator[None]:
    """Scripts are forked from one Python that has imported PyTorch, where that is installed (forked.py)."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    with preloaded_python({**environment(None), **ONE_COMPILER}):
        yield
