"""What tests of whole jobs have in common."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from tests.e2e.moved_job import environment
from tests.e2e.references import ONE_COMPILER, preloaded_python


@pytest.fixture(scope="session")
def preloaded() -> Iterator[None]:
    """References are forked from one Python that has imported PyTorch, where that is installed."""
    if importlib.util.find_spec("torch") is None:
        yield
        return
    with preloaded_python({**environment(None), **ONE_COMPILER}):
        yield
