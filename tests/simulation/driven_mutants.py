"""Bugs put into the real parts that move processes without an agent; see mutants.py.

Each is the real class with one wrong method, as it once was or could be written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Container, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from hegmd.errors import HegmError
from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.migration.contracts import CheckpointResult, MigratedProcess, ProcessState
from hegmd.migration.methods.driver import DriverMethod
from hegmd.migration.methods.driver_calls import Steps
from hegmd.migration.methods.gpus import Gpus, driver_owner
from hegmd.migration.methods.other_processes import ProcessKey
from hegmd.migration.methods.storage_handover import others_on
from tests.simulation.driven import ModelOtherProcesses, RealParts

EVERYTHING_BYTES = 1 << 60


class RestoresWithoutPausingOthers(DriverMethod):
    async def _restore_reserved(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int], pairs: list[list[str]]
    ) -> str:
        await self._restore_shielded(subject, pairs)
        for uuid in uuid_by_gpu.values():
            await self._memory.release(driver_owner(subject), uuid)
        return await self._steps.state(subject)


class SkipsSecondMemoryCheck(DriverMethod):
    """Released memory is believed to be free."""

    async def _restore_reserved(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int], pairs: list[list[str]]
    ) -> str:
        for uuid in uuid_by_gpu.values():
            await self._memory.release(driver_owner(subject), uuid)
        others = others_on(await self._gpus.node(), subject, uuid_by_gpu, self._steps.helper_pid)
        async with self._other_processes.paused(others):
            await self._restore_shielded(subject, pairs)
        return await self._steps.state(subject)


class MapsTwoGpus(DriverMethod):
    async def _pairs(self, subject: MigratedProcess, to: list[str]) -> list[list[str]]:
        return [pair for pair in await super()._pairs(subject, to) if pair[0] != pair[1]]


class TrustsSuccessWithoutCheck(Steps):
    async def expect(self, subject: MigratedProcess, op: str, *wanted: str) -> str:
        return wanted[0]


class UsesOldMemoryFigure(DriverMethod):
    """Its growth is unknown before the checkpoint."""

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        return await super().checkpoint(dataclasses.replace(subject, driver_bytes=EVERYTHING_BYTES))


class IgnoresMargin(DriverMethod):
    async def _needed(self, subject: MigratedProcess) -> list[int]:
        return [size_bytes - RESTORE_MARGIN_BYTES for size_bytes in await super()._needed(subject)]

    async def restore(self, subject: MigratedProcess, gpu: str) -> None:
        await super().restore(
            dataclasses.replace(subject, driver_bytes=subject.driver_bytes - RESTORE_MARGIN_BYTES), gpu
        )


class TakesLostRestoreForDone(Steps):
    async def until_over(self, subject: MigratedProcess) -> None:
        return


class CountsRuinedReservation(DriverMethod):
    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        return (await super().inspect(subject))._replace(failed="")


class LeavesLockedProcesses(Steps):
    """A process that an earlier daemon locked is reported as running."""

    async def unlock(self, subject: MigratedProcess, state: str | None = None) -> None:
        return


class HasNoRestoreLock(Gpus):
    def turn(self, name: str) -> anyio.Lock:
        return anyio.Lock()


class ResumesOtherProcesses(ModelOtherProcesses):
    @asynccontextmanager
    async def paused(
        self,
        processes: Sequence[ProcessKey],
        *,
        but_for: Container[ProcessKey] = (),
        restored: ProcessKey | None = None,
    ) -> AsyncGenerator[Sequence[ProcessKey]]:
        yield []


class TakesUnlockedForPaused(ModelOtherProcesses):
    """A process that could not be locked is believed to be locked."""

    @asynccontextmanager
    async def paused(
        self,
        processes: Sequence[ProcessKey],
        *,
        but_for: Container[ProcessKey] = (),
        restored: ProcessKey | None = None,
    ) -> AsyncGenerator[Sequence[ProcessKey]]:
        async with super().paused(processes, but_for=but_for, restored=restored):
            yield []


class RecordsNoPausedProcess(ModelOtherProcesses):
    async def _note(self, whom: dict[ProcessKey, ProcessKey | None]) -> bool:
        self._noted = whom
        return True


class TrustsUnlockWithoutCheck(ModelOtherProcesses):
    async def _unlock(self, who: ProcessKey) -> bool:
        try:
            await self._helper.call("unlock", {"pid": who[0]}, deadline_s=10.0)
        except HegmError:
            return False
        return True


class AbandonsPausedProcess(ModelOtherProcesses):
    def _leave(self, whom: set[ProcessKey]) -> None:
        for who in whom:
            self._held.pop(who).set()


_GROWING = {"grow": 0.2, "fill": 0.2, "snatch": 0.8}
MEANS: dict[str, tuple[RealParts, dict[str, float]]] = {
    "restores_without_holding": (RealParts(method=RestoresWithoutPausingOthers), _GROWING),
    "does_not_look_once_more": (RealParts(method=SkipsSecondMemoryCheck), {"crash": 0.05, **_GROWING}),
    "maps_two_gpus_of_three": (RealParts(method=MapsTwoGpus), {}),
    "believes_success": (RealParts(steps=TrustsSuccessWithoutCheck), {"lie": 0.2}),
    "counts_the_old_figure": (RealParts(method=UsesOldMemoryFigure), {"crash": 0.05, **_GROWING}),
    "forgets_the_margin": (RealParts(method=IgnoresMargin), _GROWING),
    "takes_a_lost_restore_for_over": (
        RealParts(steps=TakesLostRestoreForDone),
        {"helper": 0.05, "begin": 0.3, "fill": 0.5, "snatch": 1.0},
    ),
    "counts_on_the_ruined": (RealParts(method=CountsRuinedReservation), {"ruin": 0.5}),
    "leaves_the_locked": (RealParts(steps=LeavesLockedProcesses), {"helper": 0.1}),
    "has_no_turns": (RealParts(gpus=HasNoRestoreLock), {"begin": 0.2, **_GROWING}),
    "lets_neighbours_go_on": (RealParts(other_processes=ResumesOtherProcesses), _GROWING),
    "counts_on_who_is_loose": (RealParts(other_processes=TakesUnlockedForPaused), {"busy": 0.5, **_GROWING}),
    "notes_nobody": (RealParts(other_processes=RecordsNoPausedProcess), {"crash": 0.05}),
    "believes_an_unlock": (RealParts(other_processes=TrustsUnlockWithoutCheck), {"lie": 0.2}),
    "gives_up_on_who_stands": (RealParts(other_processes=AbandonsPausedProcess), {"helper": 0.1}),
}
