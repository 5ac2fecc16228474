"""The moment in which a process on a real GPU has its storages made: the room that is held for them becomes its own.

Owns when that is let go of, and who is held still until then. What room is, and the restore before this, are elsewhere
(`gpu_reservation`, `driver`).
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

__all__ = ["StorageHandover", "free_bytes_of", "others_on"]


class StorageHandover:
    """`in_hand` are processes that a step of the driver is under way in: nobody holds these still."""

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
        # Whose storages found no room beside the one that is held for them.
        self._crowded: set[tuple[int, int]] = set()

    @asynccontextmanager
    async def block(self, subject: MigratedProcess) -> AsyncGenerator[Made]:
        """Others there are held still, but not for long: an agent that is stopped in the block makes nobody stand.

        Where as much is free besides, the storages are made beside the room that is held for them, and that is let go
        of at the end of the block, in which they may be filled as well: the driver clears what is let go of, and what
        is made or opened or copied meanwhile waits for that. Should it come to nothing, the next attempt has the room.
        Where as much again is free even then, and it goes on at once, it is let go of when it was seen to (`verify`):
        it need not stand for that, and has as much left as it holds.

        Otherwise it is let go of before, and who cannot be held still may be quicker. Then the bytes wait for the next
        attempt, and none is lost.
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
                has_spare_memory = await tasks.start(self._make_way, subject, subject.gpu, made)
                yield note_made
                if not has_spare_memory:
                    await self._reservations.let_go_for_storages(subject, subject.gpu)
                self._crowded.discard(subject.owner_key)
            except HegmError as error:  # past the group, which would put it into another
                self._crowded.add(subject.owner_key)
                failure = error
            finally:
                made.set()
        if failure is not None:
            raise failure

    async def _make_way(
        self,
        subject: MigratedProcess,
        gpu: str,
        made: anyio.Event,
        *,
        task_status: anyio.abc.TaskStatus[bool] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Starts with whether there is so much room that nothing need be let go of before it goes on."""
        async with self._gpus.turns(gpus_of(gpu)):
            held = await self._reservations.with_storages(subject, gpu)
            if not held:  # as in all rounds but the first: nothing changes hands
                task_status.started(False)
                with anyio.move_on_after(self._other_processes.max_pause_s):
                    await made.wait()
                return
            node = await self._gpus.seen()
            others = others_on(node, subject, held, self._steps.helper_pid)
            async with self._other_processes.paused(others, but_for=self._in_hand):
                if others:  # they may have taken some since
                    node = await self._gpus.seen()
                free = free_bytes_of(node)
                fits = await self._reservations.fits_beside(subject, gpu, CALM_BYTES, free)
                if subject.owner_key in self._crowded or not fits:
                    await self._reservations.let_go_for_storages(subject, gpu)
                # Not where it was let go of: nothing is held then that could fit twice.
                has_spare_memory = await self._reservations.fits_beside(subject, gpu, CALM_BYTES, free, times=2)
                task_status.started(has_spare_memory and subject.goes_on)
                with anyio.move_on_after(self._other_processes.max_pause_s):
                    await made.wait()


def others_on(
    node: Node, subject: MigratedProcess, gpus: Container[str], helper_pid: int | None
) -> list[tuple[int, int]]:
    """Who else computes on those GPUs, as far as it can be seen; the helper takes room there in its turn alone."""
    return [
        (process.pid, process.start_ticks)
        for process in node.processes
        if process.pid not in {subject.pid, helper_pid} and process.start_ticks is not None
        if any(use.gpu in gpus and use.kind == "compute" for use in process.gpus)
    ]


def free_bytes_of(node: Node) -> Mapping[str, int | None]:
    """What is free, by GPU, as far as its driver says it."""
    return {gpu.id: gpu.memory_free_bytes for gpu in node.gpus}
