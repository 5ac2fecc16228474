"""The method of simulated GPUs: a process has only an entry in `SimulatedMemory` there, so nothing is moved.

A worker's GPU is in its handle, which SimulatedPlacement and this method write; its memory is in SimulatedMemory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, nullcontext

from hegmd.migration.contracts import CheckpointResult, Made, MigratedProcess, ProcessState
from hegmd.migration.methods.simulated_memory import SimulatedMemory

NAME = "simulated"


class SimulatedMethod:
    """Books for GPUs that are not there."""

    name = NAME

    def __init__(self, memory: SimulatedMemory) -> None:
        self._memory = memory

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        self._memory.reserve(subject.owner_key, gpu, size_bytes)

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        self._memory.release(subject.owner_key, gpu)

    def reservations(self, subject: MigratedProcess) -> Mapping[str, int]:
        return self._memory.of(subject.owner_key)

    def note_size(self, subject: MigratedProcess, size_bytes: int) -> None:
        if subject.worker.gpu is not None:
            self._memory.hold_what_fits(subject.owner_key, subject.worker.gpu, size_bytes)

    async def lock(self, subject: MigratedProcess) -> None:
        """Nothing of it is on a GPU, so that state cannot change."""

    async def unlock(self, subject: MigratedProcess) -> None:
        """It was never locked."""

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        """Take the process off its GPU. Its reservation there stays, so a rollback needs no other."""
        subject.worker.gpu = None
        return CheckpointResult()

    async def restore(self, subject: MigratedProcess, gpu: str) -> None:
        subject.worker.gpu = gpu

    def storage_allocation(self, subject: MigratedProcess) -> AbstractAsyncContextManager[Made]:
        """Do nothing: the recorded memory is already the worker's."""
        return nullcontext(lambda: False)

    async def verify(self, subject: MigratedProcess) -> None:
        """Do nothing: the next boundary, which the agent reports, is the proof."""

    async def note_resumed(self, subject: MigratedProcess) -> None:
        """Nothing depends on it."""

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        return ProcessState(gpu=subject.worker.gpu)
