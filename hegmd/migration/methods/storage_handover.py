"""The moment in which a process on a real GPU allocates its storages: their reservation passes to it.

Owns when that is released, and which processes are paused until then. `gpu_reservation` owns reservations, and `driver`
the restore before this.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Container, Mapping
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from hegmd.errors import HegmError
from hegmd.memory.sizes import CALM_BYTES
from hegmd.migration.contracts import Made, MigratedProcess
from hegmd.migration.methods.driver_calls import Steps
from hegmd.migration.methods.gpu_reservation import GpuReservation
from hegmd.migration.methods.gpus import Gpus, Node
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.node.gpu_sets import gpus_of


class StorageHandover:
    """Hands reservations over. `in_hand`: processes with a running driver call, which must not be paused."""

    def __init__(
        self,
        steps: Steps,
        reservations: GpuReservation,
        gpus: Gpus,
        other_processes: OtherProcesses,
        in_hand: Container[tuple[int, int]],
    ) -> None:
        self._steps = steps
        self._reservations = reservations
        self._gpus = gpus
        self._other_processes = other_processes
        self._in_hand = in_hand
        # Processes whose storages did not fit beside their reservation.
        self._crowded: set[tuple[int, int]] = set()

    @asynccontextmanager
    async def block(self, subject: MigratedProcess) -> AsyncGenerator[Made]:
        """Hold a block in which the process allocates its storages. Other processes are paused, but only briefly.

        If as much memory is free besides, the storages are allocated beside the reservation, which is released at the
        end of the block; they may be filled within it, too. (The driver clears released memory, and allocations and
        copies wait for that.) If the block fails, the next attempt has the reservation. If twice as much is free and
        the process resumes at once, `verify` releases the reservation later, so that its downtime does not include
        that.

        Otherwise the reservation is released before, and a process that cannot be paused may take it. Then the bytes
        wait for the next attempt, and none is lost.
        """
        made = anyio.Event()
        has_spare_memory = False

        def note_made() -> bool:
            made.set()
            return has_spare_memory

        if subject.gpu is None:
            yield note_made
            return
        failure: HegmError | None = None
        async with anyio.create_task_group() as tasks:
            try:
                has_spare_memory = await tasks.start(self._pause_others, subject, subject.gpu, made)
                yield note_made
                if not has_spare_memory:
                    await self._reservations.release_for_storages(subject, subject.gpu)
                self._crowded.discard(subject.owner_key)
            except HegmError as error:  # past the group, which would put it into another
                self._crowded.add(subject.owner_key)
                failure = error
            finally:
                made.set()
        if failure is not None:
            raise failure

    async def _pause_others(
        self,
        subject: MigratedProcess,
        gpu: str,
        made: anyio.Event,
        *,
        task_status: anyio.abc.TaskStatus[bool] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Pause the others, and report True if the reservation need not be released before the process resumes."""
        async with self._gpus.turns(gpus_of(gpu)):
            held = await self._reservations.with_storages(subject, gpu)
            if not held:  # all rounds but the first have none: no memory changes its owner
                task_status.started(False)
                with anyio.move_on_after(self._other_processes.max_pause_s):
                    await made.wait()
                return
            node = await self._gpus.node()
            others = others_on(node, subject, held, self._steps.helper_pid)
            async with self._other_processes.paused(others, but_for=self._in_hand):
                if others:  # they may have taken some since
                    node = await self._gpus.node()
                free = free_bytes_of(node)
                fits = await self._reservations.fits_beside(subject, gpu, CALM_BYTES, free)
                if subject.owner_key in self._crowded or not fits:
                    await self._reservations.release_for_storages(subject, gpu)
                # Not after a release: then no reservation is left that could fit twice.
                has_spare_memory = await self._reservations.fits_beside(subject, gpu, CALM_BYTES, free, times=2)
                task_status.started(has_spare_memory and subject.goes_on)
                with anyio.move_on_after(self._other_processes.max_pause_s):
                    await made.wait()


def others_on(
    node: Node, subject: MigratedProcess, gpus: Container[str], helper_pid: int | None
) -> list[tuple[int, int]]:
    """Return the other compute processes on those GPUs, as far as they are seen, except the helper."""
    return [
        (process.pid, process.start_ticks)
        for process in node.processes
        if process.pid not in {subject.pid, helper_pid} and process.start_ticks is not None
        if any(use.gpu in gpus and use.kind == "compute" for use in process.gpus)
    ]


def free_bytes_of(node: Node) -> Mapping[str, int | None]:
    """Return the free memory by GPU; None where its driver does not say."""
    return {gpu.id: gpu.memory_free_bytes for gpu in node.gpus}
