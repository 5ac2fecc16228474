"""Shared fixtures of the tests of whole jobs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping

import pytest

from tests.e2e.forked import preloaded_hegmd, preloaded_python
from tests.e2e.moved_job import BARE, LEAVING, RANKED, by_rank, environment, steps_alone
from tests.e2e.references import ONE_COMPILER, TWO_RANKS, folder_of_run, once_for_all
from tests.e2e.restarted import Restarts

FRAMEWORKS = ("transformers.trainer", "lightning.pytorch", "accelerate")


@pytest.fixture(scope="session", autouse=True)
def _preloaded_hegmd() -> Iterator[None]:
    """Daemons are forked from one Python that has imported hegmd (forked.py)."""
    with preloaded_hegmd():
        yield


@pytest.fixture(scope="session")
def preloaded_frameworks() -> Iterator[None]:
    """The same with the frameworks that are installed, whose imports take as long as PyTorch's."""
    there = [name for name in FRAMEWORKS if importlib.util.find_spec(name.partition(".")[0])]
    with preloaded_python({**environment(None), **ONE_COMPILER}, *there):
        yield


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Scripts are forked from one Python that has imported PyTorch, if that is installed (forked.py)."""
    yield from _with_torch(ONE_COMPILER, tmp_path_factory)


@pytest.fixture(scope="module")
def preloaded_bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The same without PyTorch's compiler: an image has 130 MiB of each process, and 230 MiB with it."""
    yield from _with_torch(BARE, tmp_path_factory)


def _with_torch(variables: Mapping[str, str], factory: pytest.TempPathFactory) -> Iterator[None]:
    if importlib.util.find_spec("torch") is None:
        yield
        return
    lock = folder_of_run(factory) / f"with {' '.join(variables)}"
    with preloaded_python({**environment(None), **variables}, lock=lock):
        yield


@pytest.fixture(scope="session")
def undisturbed_ranks(tmp_path_factory: pytest.TempPathFactory, preloaded: None) -> dict[str, list[str]]:
    """The step lines of each rank of the undisturbed training in two ranks."""
    return by_rank(steps_alone([sys.executable, *TWO_RANKS, RANKED], tmp_path_factory.mktemp("undisturbed")))


@pytest.fixture(scope="session")
def undisturbed_leaving(tmp_path_factory: pytest.TempPathFactory, preloaded: None) -> list[str]:
    """The step lines of the undisturbed `leaving.py`."""
    words = [sys.executable, LEAVING]
    return once_for_all(tmp_path_factory, "leaving", lambda folder: steps_alone(words, folder))


@pytest.fixture(scope="session")
def restarts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarts]:
    """Scripts of every kind are started and left one after the other in one Python with PyTorch."""
    with Restarts(tmp_path_factory.mktemp("restarts")) as running:
        yield running
