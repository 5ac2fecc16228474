"""Room on real GPUs for processes that the driver takes off and brings back: video memory that is really taken.

Two pieces for each GPU: what the driver needs, which goes to it at the restore, and that for the storages, which goes
to the agent when it makes them. Owns what is held under these names and what that comes to; when it is let go of is the
method's, since on that moment it rests whether a job is lost. That something is held is news to whoever plans from what
is free.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import anyio

from hegmd.errors import HegmError, Refused
from hegmd.memory.sizes import CALM_BYTES
from hegmd.migration.contracts import MigratedProcess, OutOfMemory
from hegmd.migration.methods.gpus import Gpus, VideoMemory, driver_owner, storage_owner
from hegmd.node.gpu_sets import gpus_of, is_several, more_than

__all__ = ["GpuReservation", "out_of_memory", "unsafe"]

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Between looks at what was let go of; others stand still meanwhile.
_FREED_AFTER_S = (0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.2, 0.0)


class GpuReservation:
    """What is held in `memory`, by descriptor, which outlives helper and daemon."""

    def __init__(self, memory: VideoMemory, gpus: Gpus) -> None:
        self._memory = memory
        self._gpus = gpus

    async def reserve_by_gpu(
        self, subject: MigratedProcess, rests: Mapping[str, int], storages: Mapping[str, int]
    ) -> None:
        """So much for the driver on each of these GPUs, and so much for storages; on all of them or on none."""
        uuids = {gpu: await self._gpus.uuid_of(gpu) for gpu in rests}
        async with self._gpus.turns(rests):
            held = self._memory.of(driver_owner(subject))
            fresh = [uuid for uuid in uuids.values() if not held.get(uuid)]
            try:
                for gpu, driver_bytes in rests.items():
                    await self._memory.reserve(driver_owner(subject), uuids[gpu], driver_bytes)
                    await self._memory.reserve(storage_owner(subject), uuids[gpu], storages.get(gpu, 0))
            except BaseException as error:
                with anyio.CancelScope(shield=True):  # one half is no room, and nobody would know of it
                    for uuid in fresh:
                        await self._memory.release(driver_owner(subject), uuid)
                if isinstance(error, Refused):
                    raise OutOfMemory(error.message, error.hint, error.facts) from error
                raise
            finally:
                self._gpus.changed()

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        """So much in all for it to be there; what it has there already counts."""
        missing = more_than(subject.needs(gpu), subject.needs(subject.gpu))
        rests = {name: min(driver_bytes, size_bytes) for name, driver_bytes in missing.items()}
        # One on several GPUs has room for its storages where it is, as long as it is there.
        own = subject.storages(subject.gpu) if is_several(subject.gpu) else {}
        storages = more_than(subject.storages(gpu), own)
        await self.reserve_by_gpu(
            subject, rests, {name: min(storage_bytes, size_bytes) for name, storage_bytes in storages.items()}
        )

    async def reserve_for_rollback(self, subject: MigratedProcess) -> int:
        """Where it has just been, as far as it can be had: somebody may have been quicker, and the way on is open then.

        First what it needs for the way on where it has just been, which was its own until now.
        """
        back, onward = subject.needs(subject.gpu), subject.needs(subject.target_gpu)
        again = {gpu: size_bytes for gpu, size_bytes in onward.items() if gpu in back}
        try:
            await self.reserve_by_gpu(subject, again, subject.storages(subject.target_gpu))
            if subject.gpu is None or not subject.keeps_reservation:
                return 0
            await self.reserve_by_gpu(subject, back, subject.storages(subject.gpu))
        except HegmError as error:
            logger.warning("no room is kept on %s for the way back: %s", subject.gpu, error.message)
            return 0
        return subject.driver_bytes + subject.storage_reservation_bytes

    def require(self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int]) -> None:
        """Raises NoRoom unless as much is held for the driver on these GPUs, by name with their UUIDs."""
        for gpu, uuid in uuid_by_gpu.items():
            held_bytes = self._memory.of(driver_owner(subject)).get(uuid, 0)
            if held_bytes < needs[gpu]:
                raise out_of_memory(subject, gpu, needs[gpu], held_bytes, "held")

    async def release_for_restore(self, subject: MigratedProcess, uuids: Iterable[str]) -> None:
        """What the driver needs is its own from now on, or whoever's is quicker."""
        for uuid in uuids:
            await self._memory.release(driver_owner(subject), uuid)

    async def wait_until_free(self, gpu: str, wanted_bytes: int) -> int | None:
        """What is free there, as soon as it is as much as is wanted, or after a while.

        What has just been let go of shows 2.5 ms later, and the helper may have it for as long as it takes to close it.
        """
        free_bytes: int | None = None
        for pause_s in _FREED_AFTER_S:
            free_bytes = (await self._gpus.gpu(gpu)).memory_free_bytes
            if free_bytes is not None and free_bytes >= wanted_bytes:
                break
            await anyio.sleep(pause_s)
        return free_bytes

    async def with_storages(self, subject: MigratedProcess, place: str) -> list[str]:
        """The GPUs of that place on which some is held for its storages."""
        held = self._memory.of(storage_owner(subject))
        return [gpu for gpu in gpus_of(place) if held.get(await self._gpus.uuid_of(gpu))]

    async def fits_beside(
        self, subject: MigratedProcess, place: str, spare_bytes: int, free: Mapping[str, int | None], times: int = 1
    ) -> bool:
        """Whether on every GPU of that place as much as is held for its storages is free besides, so many times over,
        and so much more.

        `free` is what is free now, by GPU.
        """
        held = self._memory.of(storage_owner(subject))
        if not held:
            return False
        needed = {gpu: times * held.get(await self._gpus.uuid_of(gpu), 0) + spare_bytes for gpu in gpus_of(place)}
        return all((free.get(gpu) or 0) >= size_bytes for gpu, size_bytes in needed.items())

    async def let_go_for_storages(self, subject: MigratedProcess, place: str) -> None:
        """What is held for its storages there is its own from now on, if it was not before."""
        for gpu in gpus_of(place):
            await self._memory.release(storage_owner(subject), await self._gpus.uuid_of(gpu))

    async def reserve_again(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int]
    ) -> None:
        """What was let go of for nothing, as far as it can be had."""
        for gpu, uuid in uuid_by_gpu.items():
            try:
                await self._memory.reserve(driver_owner(subject), uuid, needs[gpu])
            except HegmError as error:
                logger.warning("the room for process %d was lost: %s", subject.pid, error.message)
        self._gpus.changed()

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        """All that is held there."""
        for name in gpus_of(gpu):
            uuid = await self._gpus.uuid_of(name)
            await self._memory.release(driver_owner(subject), uuid)
            await self._memory.release(storage_owner(subject), uuid)
        self._gpus.changed()

    def of(self, subject: MigratedProcess) -> Mapping[str, int]:
        """By GPU. Of the GPU that it is on, what it has there is its own; room for storages that are out is besides."""
        held: dict[str, int] = {}
        for owner in (driver_owner(subject), storage_owner(subject)):
            for uuid, size_bytes in self._memory.of(owner).items():
                name = self._gpus.name_of(uuid)
                held[name] = held.get(name, 0) + size_bytes
        if subject.driver_bytes_by_gpu:
            return _by_place(subject, held)
        for gpu, driver_bytes in subject.needs(subject.gpu).items():
            held[gpu] = max(held.get(gpu, 0), driver_bytes + subject.storage_reservation_bytes)
        return held


def _by_place(subject: MigratedProcess, held: Mapping[str, int]) -> Mapping[str, int]:
    """What is held for one on several GPUs, by the places that it is to do with; 0 where some of it is missing."""
    own = subject.wholes(subject.gpu)
    sizes: dict[str, int] = {}
    for place in (subject.gpu, subject.target_gpu, subject.previous_gpu):
        missing = more_than(more_than(subject.wholes(place), own), held)
        if place is not None and (place == subject.gpu or any(gpu in held for gpu in missing)):
            sizes[place] = 0 if any(missing.values()) else subject.driver_bytes + subject.storage_reservation_bytes
    named = {gpu for place in sizes for gpu in gpus_of(place)}
    return {**sizes, **{gpu: size_bytes for gpu, size_bytes in held.items() if gpu not in named}}


def out_of_memory(
    subject: MigratedProcess, gpu: str, needed_bytes: int, there_bytes: int | None, what: str
) -> OutOfMemory:
    """That so little is there; `what` says how: held, or free."""
    there = "it is not known how much is" if there_bytes is None else f"{there_bytes // MIB} MiB are"
    return OutOfMemory(
        f"process {subject.pid} needs {needed_bytes // MIB} MiB on {gpu} and {there} {what} for it",
        f"free video memory on {gpu}: it stays off its GPU with all its bytes, and comes back when there is room",
        {"pid": subject.pid, "gpu": gpu, "needed_bytes": needed_bytes, "there_bytes": there_bytes},
    )


def unsafe(subject: MigratedProcess, gpu: str, free_bytes: int | None, loose: Sequence[tuple[int, int]]) -> OutOfMemory:
    """That some go on there all the same, and too little is free besides for that to do no harm."""
    pids = [pid for pid, _ in loose]
    free = "nobody knows how much" if free_bytes is None else f"{free_bytes // MIB} MiB"
    return OutOfMemory(
        f"on {gpu}, where {free} is free besides the room of process {subject.pid}, {len(pids)} cannot be held still",
        f"let pid {', '.join(map(str, pids))} come to an end, or have {CALM_BYTES // MIB} MiB free: it could take the "
        f"room in the moment of the restore; process {subject.pid} stays off its GPU with all its bytes until then",
        {"pid": subject.pid, "gpu": gpu, "pids": pids, "needed_bytes": CALM_BYTES, "there_bytes": free_bytes},
    )
