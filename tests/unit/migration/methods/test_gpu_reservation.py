"""Memory that is reserved on a GPU for a process: whole or not at all, and waited for where it is about to be free."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from hegmd.memory.video_memory import VideoMemory
from hegmd.migration.contracts import MigratedProcess, OutOfMemory
from hegmd.migration.methods.gpu_reservation import GpuReservation
from tests.unit.memory.test_video_memory import GIB
from tests.unit.memory.test_video_memory import Gpus as Helper

SUBJECT: Any = SimpleNamespace(operation="7", name="4711")


class Gpus:
    """The node's GPUs, all with the same free memory."""

    def __init__(self, free_bytes: int | None = None) -> None:
        self.free_bytes = free_bytes
        self.calls = 0

    async def gpu(self, _name: str) -> Any:
        self.calls += 1
        return SimpleNamespace(memory_free_bytes=self.free_bytes)

    async def uuid_of(self, name: str) -> str:
        return f"GPU-{name}"

    def name_of(self, uuid: str) -> str:
        return uuid.removeprefix("GPU-")

    @asynccontextmanager
    async def turns(self, _names: Iterable[str]) -> AsyncGenerator[None]:
        yield

    def changed(self) -> None:
        pass


def reservation(gpus: Gpus, memory: VideoMemory | None = None) -> GpuReservation:
    return GpuReservation(memory or VideoMemory(Helper()), cast(Any, gpus))


async def test_the_wanted_size_is_enough() -> None:
    gpus = Gpus(100)
    assert await reservation(gpus).wait_until_free("gpu0", 100) == 100
    assert gpus.calls == 1


async def test_memory_freed_meanwhile_is_noticed() -> None:
    gpus = Gpus(None)

    async def free() -> None:
        gpus.free_bytes = 100

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(free)
        assert await reservation(gpus).wait_until_free("gpu0", 100) == 100


async def test_a_reservation_is_on_all_gpus_or_on_none() -> None:
    memory = VideoMemory(Helper(capacity_bytes=3 * GIB))
    with pytest.raises(OutOfMemory, match="no room"):
        await reservation(Gpus(), memory).reserve_by_gpu(SUBJECT, {"gpu0": 2 * GIB, "gpu1": 4 * GIB}, {})
    assert memory.by_owner() == {}


async def test_storages_of_the_first_gpu_stayed_reserved_when_the_second_had_no_room() -> None:
    memory = VideoMemory(Helper(capacity_bytes=3 * GIB))
    with pytest.raises(OutOfMemory, match="no room"):
        await reservation(Gpus(), memory).reserve_by_gpu(SUBJECT, {"gpu0": GIB, "gpu1": 4 * GIB}, {"gpu0": GIB})
    assert memory.by_owner() == {}


async def test_a_restart_on_exchanged_gpus_holds_the_difference_and_all_of_it_once_the_process_has_exited() -> None:
    memory = VideoMemory(Helper())
    held = reservation(Gpus(), memory)
    here, there = "gpu0,gpu1", "gpu1,gpu0"
    running = MigratedProcess(
        "7", "4711", 4711, 1, gpu=here, target_gpu=there, previous_gpu=None,
        driver_bytes=16 * GIB, driver_bytes_by_gpu=(12 * GIB, 4 * GIB),
        size_bytes=8 * GIB, storage_reservation_bytes=8 * GIB, storage_bytes_by_gpu=(6 * GIB, 2 * GIB),
    )  # fmt: skip
    await held.reserve(running, there, 24 * GIB)
    assert {key: size for key, size in memory.by_owner().items() if size} == {
        ("7.4711.rest", "GPU-gpu1"): 8 * GIB,
        ("7.4711.storages", "GPU-gpu1"): 4 * GIB,
    }
    assert held.of(running)[there] == 24 * GIB
    exited = replace(running, gpu=None, previous_gpu=here)
    assert held.of(exited)[there] == 0, "what the process had on gpu0 is not held"
    await held.reserve(exited, there, 24 * GIB)
    assert memory.of("7.4711.rest") == {"GPU-gpu1": 12 * GIB, "GPU-gpu0": 4 * GIB}
    assert memory.of("7.4711.storages") == {"GPU-gpu1": 6 * GIB, "GPU-gpu0": 2 * GIB}
    assert held.of(exited)[there] == 24 * GIB
    for place in held.of(exited):
        await held.release(exited, place)
    assert memory.by_owner() == {}
