"""The host memory that a state's bytes go through: taken ahead of its use, and one piece at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hegmd.agent import pinned_buffers
from tests.patience import HANG_S

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _nothing_prepared() -> Iterator[None]:
    pinned_buffers.drop()
    yield
    pinned_buffers.drop()


def _pages_bytes() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.thorough
def test_prepared_memory_has_its_pages_before_use() -> None:
    before = _pages_bytes()
    pinned_buffers.prepare()
    pinned_buffers.prepare()
    pinned_buffers.wait()
    assert pinned_buffers.SIZE_BYTES * 0.9 < _pages_bytes() - before < pinned_buffers.SIZE_BYTES * 1.5, (
        "one piece, and all of it"
    )
    taken = pinned_buffers.take()
    assert _pages_bytes() - before < pinned_buffers.SIZE_BYTES * 1.5
    taken.close()


@pytest.mark.thorough
def test_another_buffer_is_used_if_no_prepared_one_is_left() -> None:
    pinned_buffers.prepare()
    taken = [pinned_buffers.take(), pinned_buffers.take()]
    assert taken[0].address != taken[1].address
    for one in taken:
        one.close()


@pytest.mark.thorough
def test_unclaimed_memory_is_released() -> None:
    before = _pages_bytes()
    pinned_buffers.prepare()
    pinned_buffers.drop()
    pinned_buffers.drop()
    assert _pages_bytes() - before < pinned_buffers.SIZE_BYTES * 0.5


# Forks beside a piece that is prepared, and beside one on its way: with 1 ends who has any of it, or waits for it.
FORKS = """
import os, signal
from hegmd.agent import pinned_buffers as ground

def in_child(look):
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        os._exit(int(look()))
    return os.waitpid(child, 0)[1]

def is_mapped(address):
    with open("/proc/self/maps") as maps:
        return any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)

ground.prepare()
ground.wait()
address = ground._ahead.result.address
print(in_child(lambda: is_mapped(address)), is_mapped(address))
ground.drop()
ground._ahead = late = ground.EarlyWork(ground.PopulatedMemory, "failed")
print(in_child(lambda: ground.wait() or ground.drop() or False))
late.live()
ground.take().close()
"""


@pytest.mark.thorough
def test_a_forked_child_kept_or_awaited_its_parents_prepared_buffers() -> None:
    """Like a loader's worker, which exists before the state is restored and does not use it."""
    words = [sys.executable, "-c", FORKS]
    output = subprocess.check_output(words, env={"PYTHONPATH": str(ROOT)}, text=True, timeout=HANG_S)
    assert output.splitlines() == ["0 True", "0"]
