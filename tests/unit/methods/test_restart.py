"""The method of a restart, of whom it takes for the process that goes on, and when there is nobody to wait for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from hegmd.errors import Refused
from hegmd.methods.base import Over, Reborn, Subject
from hegmd.methods.restart import RestartMethod, has_come_to_its_end, lock_path
from hegmd.methods.simulated import SimulatedMethod
from hegmd.pool import Keep, Pool
from hegmd.protocol.agents import AgentAttend, Order
from hegmd.protocol.snapshots import AgentInfo, Gpu
from hegmd.protocol.supervision import BACK, OVER
from hegmd.rooms import Rooms
from hegmd.supervisors import Supervisors
from hegmd.workers import Identity, Worker, Workers

UID, TICKS = 1000, 7
BEFORE, NEXT = 4711, 4712


class Gone(Supervisors):
    """The supervisor of every run has ended."""

    def has_ended(self, uid: int | None, run: str | None) -> bool:
        return True


class Attending(Workers):
    """Workers that attend, whatever has become of them."""

    def __init__(self, *pids: int) -> None:
        super().__init__(lambda _pid: TICKS)
        self._attending = [_went_on(pid) for pid in pids]

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._attending)


def _went_on(pid: int) -> Worker:
    """One that says that it has the state of operation 4 back."""
    about = AgentAttend(token=f"token-{pid}", python_version="3.11", boundary=5, restarted="4", gpu="gpu1", run="run-1")
    worker = Worker(Identity(pid, TICKS, UID), AgentInfo(name="agent", version="1"), about)
    worker.connect(_send, about)
    return worker


async def _send(_order: Order, _fds: Sequence[int]) -> None:
    raise AssertionError("nothing is asked of it")


def method(folder: Path, *pids: int) -> RestartMethod:
    gpus = [Gpu(id=name, index=index, uuid=name, vendor="simulated") for index, name in enumerate(("gpu0", "gpu1"))]
    by = SimulatedMethod(Rooms(None))
    pool = Pool(1 << 20, keep=Keep())
    return RestartMethod(Attending(*pids), Gone(lambda _: TICKS), pool, by=by, gpus=lambda: gpus, folder=folder)


def subject(pid: int = BEFORE) -> Subject:
    return Subject("4", "a", pid, TICKS, gpu=None, goal="gpu1", left="gpu0", uid=UID, run="run-1")


def noted(folder: Path, notes: bytes) -> None:
    lock_path(folder, "4").write_bytes(notes)


async def test_who_says_that_it_has_the_state_back_is_the_one_that_goes_on(tmp_path: Path) -> None:
    reborn = await method(tmp_path, NEXT).restore(subject(), "gpu1")
    assert isinstance(reborn, Reborn)
    assert (reborn.pid, reborn.gpu, reborn.boundary) == (NEXT, "gpu1", 5)


async def test_a_process_that_was_killed_is_not_taken_for_the_one_in_its_place(tmp_path: Path) -> None:
    """Killed before its boundary, its connection was there for a moment still: it went on a second time, and the
    operation was suspended while its supervisor had started another."""
    with pytest.raises(Refused, match="is gone, and nobody else can start it again"):
        await method(tmp_path, NEXT).restore(subject(NEXT), "gpu0")


@pytest.mark.parametrize("attends", [(), (NEXT,)])
async def test_nobody_is_started_from_the_state_of_a_training_that_came_to_its_end(
    tmp_path: Path, attends: tuple[int, ...]
) -> None:
    noted(tmp_path, BACK + OVER)
    assert await method(tmp_path, *attends).restore(subject(NEXT), "gpu1") == Over()


@pytest.mark.parametrize("notes", [b"", BACK, bytes(len(BACK)) + OVER])
def test_both_words_are_the_end_of_a_training_and_neither_alone_is(tmp_path: Path, notes: bytes) -> None:
    assert not has_come_to_its_end(tmp_path, "4")
    noted(tmp_path, notes)
    assert not has_come_to_its_end(tmp_path, "4")
    with lock_path(tmp_path, "4").open("r+b") as lock:
        os.pwrite(lock.fileno(), BACK, 0)
        os.pwrite(lock.fileno(), OVER, len(BACK))
    assert has_come_to_its_end(tmp_path, "4")
