"""The method that keeps contexts: storages leave the GPU, and the process keeps its CUDA context there.

No driver call is made, so it works where the driver's checkpoint does not (drivers before 570, MIG, MPS), and
communicators stay connected. The process can resume on the same GPU only. Memory that its agent does not offload
stays on the GPU too; the plan says how much.

A checkpoint only confirms, by the vendor's library, that the memory of the storages is free. A restore has nothing to
do. Memory is not reserved by allocating it, because a reload without enough memory loses nothing: the agent frees what
it has allocated, the bytes stay in the pool, and hegmd tries again. So a reservation here is a promise in this daemon:
free memory that was promised to one process is not promised to another.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.memory.sizes import MIB, RESTORE_MARGIN_BYTES
from hegmd.migration.contracts import CheckpointResult, Made, MigratedProcess, OutOfMemory, ProcessState
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.node.gpu_sets import gpus_of
from hegmd.protocol.operations import KEEP_CONTEXT

# NVML shows freed memory as free 2.5 ms later.
_SHOWN_AFTER_S = (0.003, 0.006, 0.012, 0.025, *[0.05] * 40)
# Without a planned size to compare with, memory is read once, after this time.
_UNPLANNED_AFTER_S = 0.025
# The allocator of the process may have grown since it was counted; the memory of its other storages has to be free.
_MAX_KEPT_SHARE = 8


class SimulatedKeepContext(SimulatedMethod):
    """The method for simulated GPUs, where a context takes no memory."""

    name = KEEP_CONTEXT

    async def restore(self, subject: MigratedProcess, gpu: str) -> None:
        _refuse_another_gpu(subject, gpu)
        await super().restore(subject, gpu)


class KeepContextMethod:
    """Confirms that storages have left real GPUs, and promises free memory for their return."""

    name = KEEP_CONTEXT

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus
        #: Bytes promised to each process: its place, and the share of each GPU.
        self._promised: dict[tuple[int, int], tuple[str, dict[str, int]]] = {}

    # -- promises ------------------------------------------------------------------------------------------------------

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        wholes = subject.wholes(gpu)
        async with self._gpus.turns(wholes):
            node = await self._gpus.node()
            free = {one.id: one.memory_free_bytes for one in node.gpus}
            for name, needed_bytes in wholes.items():
                free_bytes = free.get(name)
                promised_bytes = self._promised_to_others(subject, name)
                if free_bytes is None or free_bytes - promised_bytes < needed_bytes:
                    raise _out_of_memory(subject, name, needed_bytes, free_bytes, promised_bytes)
            self._promised[subject.owner_key] = (gpu, wholes)

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        known = self._promised.get(subject.owner_key)
        if known is not None and known[0] == gpu:
            del self._promised[subject.owner_key]
        self._gpus.changed()

    def reservations(self, subject: MigratedProcess) -> Mapping[str, int]:
        held: dict[str, int] = {}
        if (known := self._promised.get(subject.owner_key)) is not None:
            held[known[0]] = sum(known[1].values())
        if subject.gpu is not None:  # its own memory there needs no reservation
            own_bytes = subject.driver_bytes + subject.storage_reservation_bytes
            held[subject.gpu] = max(held.get(subject.gpu, 0), own_bytes)
        return held

    def _promised_to_others(self, subject: MigratedProcess, gpu: str) -> int:
        return sum(wholes.get(gpu, 0) for who, (_, wholes) in self._promised.items() if who != subject.owner_key)

    def note_size(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Nothing to record: a real GPU knows what a process uses."""

    # -- away and back -------------------------------------------------------------------------------------------------

    async def lock(self, subject: MigratedProcess) -> None:
        """Do nothing: its training thread is parked, which suffices."""

    async def unlock(self, subject: MigratedProcess) -> None:
        """It was never locked."""

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        """Confirm that the memory of the storages is free on the GPU. Raises HegmError if it is not."""
        stays_bytes = await (self._unplanned_bytes(subject) if subject.stays_bytes is None else self._freed(subject))
        if subject.gpu is not None:  # for a rollback; released with the operation's own step
            self._promised[subject.owner_key] = (subject.gpu, subject.wholes(subject.gpu))
        self._gpus.changed()
        return CheckpointResult(stays_bytes=stays_bytes)

    async def _freed(self, subject: MigratedProcess) -> int | None:
        """The memory that stays, once it is at most what was planned. Raises HegmError if it is more."""
        used_bytes = 0
        limit_bytes = (subject.stays_bytes or 0) + max(RESTORE_MARGIN_BYTES, subject.size_bytes // _MAX_KEPT_SHARE)
        for pause_s in _SHOWN_AFTER_S:
            seen_bytes = await self._used_bytes(subject)
            if seen_bytes is None or seen_bytes <= limit_bytes:
                return seen_bytes
            used_bytes = seen_bytes
            await anyio.sleep(pause_s)
        raise _still_used(subject, used_bytes, limit_bytes)

    async def _unplanned_bytes(self, subject: MigratedProcess) -> int | None:
        """The memory that stays, if the plan had no figure: no amount is too much then."""
        await anyio.sleep(_UNPLANNED_AFTER_S)
        return await self._used_bytes(subject)

    async def _used_bytes(self, subject: MigratedProcess) -> int | None:
        """Return what it uses on its GPUs; None if the vendor's library does not report it."""
        node = await self._gpus.node()
        uses = [use for process in node.processes if process.pid == subject.pid for use in process.gpus]
        sizes = [use.vram_bytes for use in uses if use.gpu in gpus_of(subject.gpu)]
        known = [size_bytes for size_bytes in sizes if size_bytes is not None]
        return sum(known) if known and len(known) == len(sizes) else None

    async def restore(self, subject: MigratedProcess, gpu: str) -> None:
        """Nothing to do: its context is there."""
        _refuse_another_gpu(subject, gpu)

    def storage_allocation(self, subject: MigratedProcess) -> AbstractAsyncContextManager[Made]:
        return self._allocation(subject)

    @asynccontextmanager
    async def _allocation(self, subject: MigratedProcess) -> AsyncGenerator[Made]:
        yield lambda: False
        self._promised.pop(subject.owner_key, None)  # the GPU itself counts that memory as used now
        self._gpus.changed()

    async def verify(self, subject: MigratedProcess) -> None:
        """The next boundary, which the agent reports, proves that it runs."""
        self._promised.pop(subject.owner_key, None)
        self._gpus.changed()

    async def note_resumed(self, subject: MigratedProcess) -> None:
        """Nothing depends on it."""

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        """It has left if its operation has recorded that and its bytes are out; otherwise it is where it was."""
        is_out = subject.agent is not None and subject.agent.held_bytes > 0
        if subject.gpu is None and is_out:
            return ProcessState(gpu=None)
        return ProcessState(gpu=subject.gpu or subject.previous_gpu or subject.target_gpu)


def _refuse_another_gpu(subject: MigratedProcess, gpu: str) -> None:
    if subject.previous_gpu not in (None, gpu):
        raise Refused(
            f"process {subject.pid} keeps its CUDA context on {subject.previous_gpu} and cannot resume on {gpu}",
            f"run: hegmctl resume {subject.pid}; then: hegmctl migrate {subject.pid} --to {gpu}",
            {"pid": subject.pid, "gpu": gpu},
        )


def _out_of_memory(
    subject: MigratedProcess, gpu: str, needed_bytes: int, free_bytes: int | None, promised_bytes: int
) -> OutOfMemory:
    free = "an unknown amount is" if free_bytes is None else f"{free_bytes // MIB} MiB are"
    promised = f", {promised_bytes // MIB} MiB of it promised to others" if promised_bytes else ""
    return OutOfMemory(
        f"process {subject.pid} needs {needed_bytes // MIB} MiB on {gpu} and {free} free{promised}",
        f"free GPU memory on {gpu}; the job stays suspended with its bytes until then",
        {"pid": subject.pid, "gpu": gpu, "needed_bytes": needed_bytes, "free_bytes": free_bytes},
    )


def _still_used(subject: MigratedProcess, used_bytes: int, limit_bytes: int) -> HegmError:
    return HegmError(
        UNAVAILABLE,
        f"process {subject.pid} has offloaded its storages and {used_bytes // MIB} MiB on {subject.gpu} are its own, "
        f"and at most {limit_bytes // MIB} MiB were expected",
        f"suspend it without --keep-context: hegmctl suspend {subject.pid}; or see what the script allocates",
        {"pid": subject.pid, "gpu": subject.gpu, "used_bytes": used_bytes, "limit_bytes": limit_bytes},
    )
