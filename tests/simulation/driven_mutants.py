"""Bugs put into the real parts that move processes without an agent; see mutants.py.

Each is the real class with one method of it made wrong, as it was once, or as somebody could write it.
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
from tests.simulation.driven import Means, ModelNeighbours

EVERYTHING_BYTES = 1 << 60


class RestoresWithoutHolding(DriverMethod):
    async def _restore_reserved(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int], pairs: list[list[str]]
    ) -> str:
        await self._restore_shielded(subject, pairs)
        for uuid in uuid_by_gpu.values():
            await self._memory.release(driver_owner(subject), uuid)
        return await self._steps.state(subject)


class DoesNotLookOnceMore(DriverMethod):
    """What was held is believed to be free when it has been let go of."""

    async def _restore_reserved(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int], pairs: list[list[str]]
    ) -> str:
        for uuid in uuid_by_gpu.values():
            await self._memory.release(driver_owner(subject), uuid)
        others = others_on(await self._gpus.seen(), subject, uuid_by_gpu, self._steps.helper_pid)
        async with self._other_processes.paused(others):
            await self._restore_shielded(subject, pairs)
        return await self._steps.state(subject)


class MapsTwoGpus(DriverMethod):
    async def _pairs(self, subject: MigratedProcess, to: list[str]) -> list[list[str]]:
        return [pair for pair in await super()._pairs(subject, to) if pair[0] != pair[1]]


class BelievesSuccess(Steps):
    async def expect(self, subject: MigratedProcess, op: str, *wanted: str) -> str:
        return wanted[0]


class CountsTheOldFigure(DriverMethod):
    """What it has grown to is known to nobody before it is off."""

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        return await super().checkpoint(dataclasses.replace(subject, driver_bytes=EVERYTHING_BYTES))


class ForgetsTheMargin(DriverMethod):
    async def _needed(self, subject: MigratedProcess) -> list[int]:
        return [size_bytes - RESTORE_MARGIN_BYTES for size_bytes in await super()._needed(subject)]

    async def restore(self, subject: MigratedProcess, gpu: str) -> None:
        await super().restore(
            dataclasses.replace(subject, driver_bytes=subject.driver_bytes - RESTORE_MARGIN_BYTES), gpu
        )


class TakesALostRestoreForOver(Steps):
    async def until_over(self, subject: MigratedProcess) -> None:
        return


class CountsOnTheRuined(DriverMethod):
    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        return dataclasses.replace(await super().inspect(subject), failed="")


class LeavesTheLocked(Steps):
    """Whoever an earlier daemon has locked is found to run."""

    async def unlock(self, subject: MigratedProcess, state: str | None = None) -> None:
        return


class HasNoTurns(Gpus):
    def turn(self, name: str) -> anyio.Lock:
        return anyio.Lock()


class LetsNeighboursGoOn(ModelNeighbours):
    @asynccontextmanager
    async def paused(
        self,
        processes: Sequence[ProcessKey],
        *,
        but_for: Container[ProcessKey] = (),
        restored: ProcessKey | None = None,
    ) -> AsyncGenerator[Sequence[ProcessKey]]:
        yield []


class CountsOnWhoIsLoose(ModelNeighbours):
    """One that could not be locked is believed to stand."""

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


class NotesNobody(ModelNeighbours):
    async def _note(self, whom: dict[ProcessKey, ProcessKey | None]) -> None:
        self._noted = whom


class BelievesAnUnlock(ModelNeighbours):
    async def _unlock(self, who: ProcessKey) -> bool:
        try:
            await self._helper.call("unlock", {"pid": who[0]}, deadline_s=10.0)
        except HegmError:
            return False
        return True


class GivesUpOnWhoStands(ModelNeighbours):
    def _leave(self, whom: set[ProcessKey]) -> None:
        for who in whom:
            self._held.pop(who).set()


_GROWING = {"grow": 0.2, "fill": 0.2, "snatch": 0.8}
MEANS: dict[str, tuple[Means, dict[str, float]]] = {
    "restores_without_holding": (Means(method=RestoresWithoutHolding), _GROWING),
    "does_not_look_once_more": (Means(method=DoesNotLookOnceMore), {"crash": 0.05, **_GROWING}),
    "maps_two_gpus_of_three": (Means(method=MapsTwoGpus), {}),
    "believes_success": (Means(steps=BelievesSuccess), {"lie": 0.2}),
    "counts_the_old_figure": (Means(method=CountsTheOldFigure), {"crash": 0.05, **_GROWING}),
    "forgets_the_margin": (Means(method=ForgetsTheMargin), _GROWING),
    "takes_a_lost_restore_for_over": (
        Means(steps=TakesALostRestoreForOver),
        {"helper": 0.05, "begin": 0.3, "fill": 0.5, "snatch": 1.0},
    ),
    "counts_on_the_ruined": (Means(method=CountsOnTheRuined), {"ruin": 0.5}),
    "leaves_the_locked": (Means(steps=LeavesTheLocked), {"helper": 0.1}),
    "has_no_turns": (Means(gpus=HasNoTurns), {"begin": 0.2, **_GROWING}),
    "lets_neighbours_go_on": (Means(other_processes=LetsNeighboursGoOn), _GROWING),
    "counts_on_who_is_loose": (Means(other_processes=CountsOnWhoIsLoose), {"busy": 0.5, **_GROWING}),
    "notes_nobody": (Means(other_processes=NotesNobody), {"crash": 0.05}),
    "believes_an_unlock": (Means(other_processes=BelievesAnUnlock), {"lie": 0.2}),
    "gives_up_on_who_stands": (Means(other_processes=GivesUpOnWhoStands), {"helper": 0.1}),
}
