"""Reservations on real GPUs for processes that the driver checkpoints and restores: memory that is really allocated.

There are two for each GPU: the driver's, released for the restore call, and the storages', released when the agent
allocates them. Owns the memory under these names and its total. The method decides when to release it, since a wrong
moment can lose a job. Reports changes to clients that plan with free memory.
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

logger = logging.getLogger(__name__)

MIB = 1 << 20
# Pauses between checks that released memory is free; other processes are paused meanwhile.
_FREED_AFTER_S = (0.003, 0.006, 0.012, 0.025, 0.05, 0.1, 0.2, 0.0)


class GpuReservation:
    """Reservations in `memory`, by descriptor; they outlive the helper, and end with the daemon."""

    def __init__(self, memory: VideoMemory, gpus: Gpus) -> None:
        self._memory = memory
        self._gpus = gpus

    async def reserve_by_gpu(
        self, subject: MigratedProcess, rests: Mapping[str, int], storages: Mapping[str, int]
    ) -> None:
        """Reserve these amounts for the driver and for storages; on all of these GPUs or on none."""
        uuids = {gpu: await self._gpus.uuid_of(gpu) for gpu in rests}
        async with self._gpus.turns(rests):
            owners = driver_owner(subject), storage_owner(subject)
            held = {owner: self._memory.of(owner) for owner in owners}
            fresh = [(owner, uuid) for owner in owners for uuid in uuids.values() if not held[owner].get(uuid)]
            try:
                for gpu, driver_bytes in rests.items():
                    await self._memory.reserve(driver_owner(subject), uuids[gpu], driver_bytes)
                    await self._memory.reserve(storage_owner(subject), uuids[gpu], storages.get(gpu, 0))
            except BaseException as error:
                with anyio.CancelScope(shield=True):  # half a reservation is useless, and nothing would release it
                    for owner, uuid in fresh:
                        await self._memory.release(owner, uuid)
                if isinstance(error, Refused):
                    raise OutOfMemory(error.message, error.hint, error.facts) from error
                raise
            finally:
                self._gpus.changed()

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        """Reserve that much there in total, including what the process has there already."""
        missing = more_than(subject.needs(gpu), subject.needs(subject.gpu))
        rests = {name: min(driver_bytes, size_bytes) for name, driver_bytes in missing.items()}
        # A process on several GPUs has memory for its storages where it is.
        own = subject.storages(subject.gpu) if is_several(subject.gpu) else {}
        storages = more_than(subject.storages(gpu), own)
        await self.reserve_by_gpu(
            subject, rests, {name: min(storage_bytes, size_bytes) for name, storage_bytes in storages.items()}
        )

    async def reserve_for_rollback(self, subject: MigratedProcess) -> int:
        """Reserve memory on the source GPU for a rollback. Best effort: returns 0 if another process took it first.

        Reserves first what the next step needs on GPUs that it was already using.
        """
        back, onward = subject.needs(subject.gpu), subject.needs(subject.target_gpu)
        again = {gpu: size_bytes for gpu, size_bytes in onward.items() if gpu in back}
        try:
            await self.reserve_by_gpu(subject, again, subject.storages(subject.target_gpu))
            if subject.gpu is None or not subject.keeps_reservation:
                return 0
            await self.reserve_by_gpu(subject, back, subject.storages(subject.gpu))
        except HegmError as error:
            logger.warning("hegmd could not reserve memory on %s for a rollback: %s", subject.gpu, error.message)
            return 0
        return subject.driver_bytes + subject.storage_reservation_bytes

    def require(self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int]) -> None:
        """Raises NoRoom unless as much is held for the driver on these GPUs, by name with their UUIDs."""
        for gpu, uuid in uuid_by_gpu.items():
            held_bytes = self._memory.of(driver_owner(subject)).get(uuid, 0)
            if held_bytes < needs[gpu]:
                raise out_of_memory(subject, gpu, needs[gpu], held_bytes, "held")

    async def release_for_restore(self, subject: MigratedProcess, uuids: Iterable[str]) -> None:
        """Release the driver's reservation. Until the restore call returns, another process can take this memory."""
        for uuid in uuids:
            await self._memory.release(driver_owner(subject), uuid)

    async def wait_until_free(self, gpu: str, wanted_bytes: int) -> int | None:
        """Wait until `wanted_bytes` are free on the GPU, or about 0.4 s have passed, and return what is free.

        Released memory shows as free 2.5 ms later, and the helper may need longer to close it.
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
        """True if every GPU of that place has `times` its storages' reservation and `spare_bytes` free, by `free`."""
        held = self._memory.of(storage_owner(subject))
        if not held:
            return False
        needed = {gpu: times * held.get(await self._gpus.uuid_of(gpu), 0) + spare_bytes for gpu in gpus_of(place)}
        return all((free.get(gpu) or 0) >= size_bytes for gpu, size_bytes in needed.items())

    async def release_for_storages(self, subject: MigratedProcess, place: str) -> None:
        """Release the reservation for its storages, which it is about to allocate. Fine if already released."""
        for gpu in gpus_of(place):
            await self._memory.release(storage_owner(subject), await self._gpus.uuid_of(gpu))

    async def reserve_again(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int]
    ) -> None:
        """Reserve again what was released without a restore. Best effort: a failure is logged."""
        for gpu, uuid in uuid_by_gpu.items():
            try:
                await self._memory.reserve(driver_owner(subject), uuid, needs[gpu])
            except HegmError as error:
                logger.warning("the reservation for process %d was lost: %s", subject.pid, error.message)
        self._gpus.changed()

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        for name in gpus_of(gpu):
            uuid = await self._gpus.uuid_of(name)
            await self._memory.release(driver_owner(subject), uuid)
            await self._memory.release(storage_owner(subject), uuid)
        self._gpus.changed()

    def of(self, subject: MigratedProcess) -> Mapping[str, int]:
        """Return the reservations by GPU. Its own memory on its present GPU counts, offloaded storages are added."""
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
    """Return the reservations of a process on several GPUs by place; 0 for a place with a part missing."""
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
    """Return the error for too little memory; `what` names its kind: held, or free."""
    there = "an unknown amount is" if there_bytes is None else f"{there_bytes // MIB} MiB are"
    return OutOfMemory(
        f"process {subject.pid} needs {needed_bytes // MIB} MiB on {gpu} and {there} {what} for it",
        f"free GPU memory on {gpu}: the process stays checkpointed, and hegmd restores it when memory is free",
        {"pid": subject.pid, "gpu": gpu, "needed_bytes": needed_bytes, "there_bytes": there_bytes},
    )


def unsafe(subject: MigratedProcess, gpu: str, free_bytes: int | None, loose: Sequence[tuple[int, int]]) -> OutOfMemory:
    """Return the error for processes that cannot be paused while too little memory is free besides."""
    pids = [pid for pid, _ in loose]
    free = "an unknown amount" if free_bytes is None else f"{free_bytes // MIB} MiB"
    return OutOfMemory(
        f"cannot restore process {subject.pid} on {gpu}: {len(pids)} other processes there cannot be paused, and only "
        f"{free} is free beyond the reservation",
        f"end pid {', '.join(map(str, pids))}, or free {CALM_BYTES // MIB} MiB there: it could allocate that memory "
        f"during the restore; process {subject.pid} stays checkpointed until then",
        {"pid": subject.pid, "gpu": gpu, "pids": pids, "needed_bytes": CALM_BYTES, "there_bytes": free_bytes},
    )
