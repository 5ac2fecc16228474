"""The driver method: NVIDIA's own checkpoint of a process, and the memory that every restore needs.

The driver's measured behaviour (580.159.04) shapes this module:

- A restore onto a GPU with too little memory fails, and so does every later one: the job is lost. So a reservation is
  video memory that is really allocated, from before the job is touched until the restore call. It is then released and
  checked once more, and only memory that is really free counts. Restores and reservations on one GPU are serialised.
- The GPU memory of a process is only certain once it is locked, and unknown once it is checkpointed. So it is measured
  between the two. If it exceeds the journal's figure, the process is unlocked and has lost nothing; the checkpoint is
  retried when the new figure is on disk and reserved. Otherwise a daemon killed here would leave a process of unknown
  size.
- A caller that is killed leaves a locked process locked, and a call that had begun finishes in the driver. So a later
  inspection unlocks what it finds locked, which is right before a checkpoint and after a restore.
- The driver continues a restore whose caller was killed, and allocates memory meanwhile. So the lock on that GPU and
  the pause of other processes there end with the driver's work and not with the call.

Owns no bytes: `memory` holds the reservations by descriptor. They outlive the helper, and end with the daemon; the next
one reserves again. `driver_calls` makes and checks a single call, `gpu_reservation` owns the reservations.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager

import anyio

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost
from hegmd.memory.sizes import CALM_BYTES, RESTORE_MARGIN_BYTES
from hegmd.migration.contracts import CheckpointResult, GrewBeyondPlan, Made, MigratedProcess, ProcessState
from hegmd.migration.methods.concurrently import beside
from hegmd.migration.methods.driver_calls import (
    CHECKPOINTED,
    DRIVER_CALL_TIMEOUT_S,
    FAILED,
    LOCKED,
    RUNNING,
    StateMismatch,
    Steps,
    longest_s,
)
from hegmd.migration.methods.gpu_reservation import GpuReservation, out_of_memory, unsafe
from hegmd.migration.methods.gpus import Gpus, VideoMemory, driver_owner, pairs_from
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.migration.methods.storage_handover import StorageHandover, free_bytes_of, others_on
from hegmd.node.gpu_sets import exchange, gpus_of, is_several, place_of

logger = logging.getLogger(__name__)

NAME = "driver"
_POLL_INTERVAL_S = 0.05
# Between the first checks whether NVML lists a process. NVML's list is 3 ms late.
_SHOWN_AFTER_S = (0.003, 0.006, 0.012, 0.025)
_LAST_WORD_S = 5.0


class DriverMethod:
    """The driver's checkpoint and restore."""

    name = NAME

    def __init__(self, steps: Steps, memory: VideoMemory, gpus: Gpus, other_processes: OtherProcesses) -> None:
        self._steps = steps
        self._memory = memory
        self._reservations = GpuReservation(memory, gpus)
        self._gpus = gpus
        self._other_processes = other_processes
        self._in_hand: set[tuple[int, int]] = set()
        self._driver_locked: set[tuple[int, int]] = set()
        #: Ranks that are locked between two steps of their operation.
        self._locked: set[tuple[int, int]] = set()
        self._making = StorageHandover(steps, self._reservations, gpus, other_processes, self._in_hand)

    # -- reservations --------------------------------------------------------------------------------------------------

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        await self._reservations.reserve(subject, gpu, size_bytes)

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        await self._reservations.release(subject, gpu)

    def reservations(self, subject: MigratedProcess) -> Mapping[str, int]:
        return self._reservations.of(subject)

    def note_size(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Nothing to record: a real GPU knows what a process uses."""

    # -- away ----------------------------------------------------------------------------------------------------------

    async def lock(self, subject: MigratedProcess) -> None:
        """Lock a rank and measure it, so that growth beyond the plan is known before any rank of its job has left."""
        with self._marked_in_progress(subject):
            await self._other_processes.wait_until_unpaused(subject.owner_key)
            if (state := await self._steps.state(subject)) == CHECKPOINTED:
                return
            if state != LOCKED:
                await self._steps.lock(subject)
            if subject.target_gpu != subject.gpu:  # one that stays needs no reservation
                async with self._unlocked_unless_done(subject):
                    await self._measured(subject)
            self._locked.add(subject.owner_key)

    async def unlock(self, subject: MigratedProcess) -> None:
        async with self._other_processes.excluded(subject.owner_key):
            await self._steps.unlock(subject)
        self._locked.discard(subject.owner_key)

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        """Lock the process, measure it, check the reservation, checkpoint it, and reserve its memory for a rollback."""
        with self._marked_in_progress(subject):  # first, so that an inspection reports it as busy
            await self._other_processes.wait_until_unpaused(subject.owner_key)
            state = await self._steps.state(subject)
            if state == CHECKPOINTED:
                off = dataclasses.replace(subject, gpu=None)
                return CheckpointResult(reserved_bytes=self.reservations(off).get(subject.gpu or "", 0))
            if is_several(subject.gpu):
                await self._steps.unlock(subject)
                await subject.worker.order("part")
            if state != LOCKED or is_several(subject.gpu):  # as one is that an earlier caller has locked when it ended
                await self._steps.lock(subject)
            self._driver_locked.add(subject.owner_key)
            async with self._unlocked_unless_done(subject):
                subject = await self._measured(subject)
                if subject.target_gpu is not None and not subject.reserves_late:
                    await self.reserve(
                        subject, subject.target_gpu, subject.driver_bytes + subject.storage_reservation_bytes
                    )
                await self._steps.checkpoint(subject)
                reserved_bytes = await self._confirm_checkpointed(subject)
            self._locked.discard(subject.owner_key)
            return CheckpointResult(
                reserved_bytes=reserved_bytes,
                driver_bytes=subject.driver_bytes,
                driver_bytes_by_gpu=subject.driver_bytes_by_gpu,
            )

    async def _measured(self, subject: MigratedProcess) -> MigratedProcess:
        """Return the locked process with its measured need. Raises GrewBeyondPlan if the journal has less."""
        needs = await self._needed(subject)
        need_bytes, driver_bytes_by_gpu = sum(needs), tuple(needs) if is_several(subject.gpu) else ()
        planned = subject.needs(subject.gpu).values()
        if any(need > size_bytes for need, size_bytes in zip(needs, planned, strict=True)):
            raise GrewBeyondPlan(subject.pid, subject.driver_bytes, need_bytes, driver_bytes_by_gpu)
        return dataclasses.replace(subject, driver_bytes=need_bytes, driver_bytes_by_gpu=driver_bytes_by_gpu)

    @asynccontextmanager
    async def _unlocked_unless_done(self, subject: MigratedProcess) -> AsyncGenerator[None]:
        """After any failure of the block, unlock the process if we locked it, even while the daemon stops."""
        try:
            yield
        except HelperLost:
            raise  # the driver may still finish the call; an inspection then unlocks the process
        except BaseException:
            self._driver_locked.discard(subject.owner_key)
            self._locked.discard(subject.owner_key)
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LAST_WORD_S):
                try:
                    await self._steps.unlock_at_once(subject)
                except HegmError as error:
                    logger.warning("process %d is still locked: %s", subject.pid, error.message)
            raise

    async def _needed(self, subject: MigratedProcess) -> list[int]:
        """Return what the locked process needs on each GPU, with the margin. Raises Refused if unknown."""
        gpus = gpus_of(subject.gpu)
        node = await self._gpus.node()
        uses = [use for process in node.processes if process.pid == subject.pid for use in process.gpus]
        shown = {use.gpu: use.vram_bytes for use in uses}
        sizes = [size_bytes for gpu in gpus if (size_bytes := shown.get(gpu)) is not None]
        if len(uses) != len(gpus) or len(sizes) != len(gpus):
            raise Refused(
                f"the driver does not say how much process {subject.pid} holds on {subject.gpu}",
                "run: hegmctl ps; hegmd cannot reserve GPU memory without that figure",
                {"pid": subject.pid, "gpus": [use.gpu for use in uses]},
            )
        return [size_bytes + RESTORE_MARGIN_BYTES for size_bytes in sizes]

    async def _confirm_checkpointed(self, subject: MigratedProcess) -> int:
        """Confirm the checkpoint: the driver reports `checkpointed`, and NVML no longer lists the process.

        Meanwhile reserves memory on the source GPU, before another process takes it, and returns how much. If all
        targets are other GPUs and that reservation succeeded, it does not wait for NVML.
        """
        await self._steps.expect(subject, "checkpoint", CHECKPOINTED)
        if subject.target_gpu is not None and set(gpus_of(subject.target_gpu)).isdisjoint(gpus_of(subject.gpu)):
            reserved_bytes = await self._reservations.reserve_for_rollback(subject)
            if reserved_bytes:
                return reserved_bytes
        kept: list[int] = []

        async def keep() -> None:
            kept.append(await self._reservations.reserve_for_rollback(subject))

        async with beside(keep):
            await self._wait_until_unlisted(subject)
        return kept[0] or await self._reservations.reserve_for_rollback(
            subject
        )  # memory that did not show as free yet may not have been free

    async def _wait_until_unlisted(self, subject: MigratedProcess) -> None:
        with anyio.move_on_after(DRIVER_CALL_TIMEOUT_S):
            await self._until_shown(subject, there=False)
            return
        raise HegmError(
            UNAVAILABLE,
            f"the driver reports process {subject.pid} as checkpointed, but NVML still lists it on the GPU",
            "check hegmctl op, and dmesg for an Xid; hegmd inspects the process again",
            {"pid": subject.pid, "gpu": subject.gpu, "waited_s": DRIVER_CALL_TIMEOUT_S},
        )

    # -- and back ------------------------------------------------------------------------------------------------------

    async def restore(self, subject: MigratedProcess, gpu: str) -> str | None:
        """Restore the process on that GPU. Its memory is reserved, and checked to be free, until the driver's call."""
        with self._marked_in_progress(subject):
            await self._other_processes.wait_until_unpaused(subject.owner_key)
            uuid_by_gpu = {name: await self._gpus.uuid_of(name) for name in gpus_of(gpu)}
            state = await self._steps.state(subject)
            if state != CHECKPOINTED:
                await self._steps.unlock(subject, state)
                self._locked.discard(subject.owner_key)
                return await self._place(subject) if subject.gpu_unknown else None
            if subject.gpu_unknown:
                return await self._restore_where_it_was(subject, gpu)
            pairs = await self._pairs(subject, list(uuid_by_gpu.values()))
            async with self._gpus.turns(uuid_by_gpu):
                state = await self._restore_reserved(subject, uuid_by_gpu, subject.needs(gpu), pairs)
                await self._steps.unlock(subject, state)  # before other processes rely on its state
            self._locked.discard(subject.owner_key)
            return None

    async def _restore_where_it_was(self, subject: MigratedProcess, gpu: str) -> str:
        """Restore the process without a GPU map, with every possible GPU reserved. Returns the GPU it is on."""
        uuids = await self._steps.uuids()
        await self._gpus.node()
        uuid_by_gpu = {self._gpus.name_of(uuid): uuid for uuid in uuids}
        needs = dict.fromkeys(uuid_by_gpu, subject.driver_bytes)
        try:
            await self._reservations.reserve_by_gpu(subject, needs, {})
            async with self._gpus.turns(uuid_by_gpu):
                await self._steps.unlock(subject, await self._restore_reserved(subject, uuid_by_gpu, needs, []))
        finally:
            with anyio.CancelScope(shield=True):
                for name, uuid in uuid_by_gpu.items():
                    if name not in gpus_of(gpu):  # the operation owns the reservation on the target
                        await self._memory.release(driver_owner(subject), uuid)
        return await self._place(subject)

    async def _place(self, subject: MigratedProcess) -> str:
        """The GPU that it is on, as soon as NVML shows it."""
        while True:
            if places := await self._places(subject):
                break
            await anyio.sleep(_POLL_INTERVAL_S)
        self._gpus.changed()
        return place_of(places)

    async def _restore_reserved(
        self, subject: MigratedProcess, uuid_by_gpu: Mapping[str, str], needs: Mapping[str, int], pairs: list[list[str]]
    ) -> str:
        """Restore the process on the GPUs in `uuid_by_gpu`, each with the reservation in `needs`. Returns its state."""
        self._reservations.require(subject, uuid_by_gpu, needs)
        node = await self._gpus.node()
        others = others_on(node, subject, uuid_by_gpu, self._steps.helper_pid)
        ours = self._in_hand | self._locked
        async with self._other_processes.paused(others, but_for=ours, restored=subject.owner_key) as going:
            # a process of ours that is not locked yet also runs
            loose = [*going, *(who for who in others if who in self._in_hand - self._driver_locked - self._locked)]
            spare_bytes = CALM_BYTES if loose else 0
            free = free_bytes_of(await self._gpus.node() if loose else node)
            for gpu in uuid_by_gpu:  # still held: nothing is risked by looking
                free_bytes = free.get(gpu)
                if free_bytes is None or free_bytes < spare_bytes:
                    raise unsafe(subject, gpu, free_bytes, loose)
            await self._reservations.release_for_restore(subject, uuid_by_gpu.values())
            for gpu in uuid_by_gpu:
                free_bytes = await self._reservations.wait_until_free(gpu, needs[gpu] + spare_bytes)
                if free_bytes is None or free_bytes < needs[gpu] + spare_bytes:
                    await self._reservations.reserve_again(subject, uuid_by_gpu, needs)
                    raise out_of_memory(subject, gpu, needs[gpu] + spare_bytes, free_bytes, "free")
            await self._restore_shielded(subject, pairs)
            try:
                return await self._steps.expect(subject, "restore", LOCKED, RUNNING)
            except StateMismatch:
                await self._reservations.reserve_again(subject, uuid_by_gpu, needs)
                raise

    async def _restore_shielded(self, subject: MigratedProcess, pairs: list[list[str]]) -> None:
        """Call the driver's restore, and return only once the driver has finished, even if the call was interrupted.

        The driver allocates memory until then, so other processes must stay paused, and the lock on the GPU held.
        """
        try:
            await self._steps.restore(subject, pairs)
        except DriverFailed:
            raise  # it is over
        except BaseException:
            with anyio.CancelScope(shield=True), anyio.move_on_after(longest_s(subject.driver_bytes)):
                await self._steps.until_over(subject)
            raise

    async def _pairs(self, subject: MigratedProcess, to: list[str]) -> list[list[str]]:
        """Return the GPU map for the driver: old and new GPUs exchanged, all others unchanged; empty if it stays.

        A process from another node has that node's GPUs on the old side, until it is checkpointed on this node.
        """
        if subject.source_gpu_uuids and subject.previous_gpu is None and subject.gpu is None:
            return pairs_from(subject.source_gpu_uuids, to, await self._steps.uuids())
        source = subject.previous_gpu or subject.gpu
        old = to if source is None else [await self._gpus.uuid_of(gpu) for gpu in gpus_of(source)]
        if old == to:
            return []
        changed = exchange(old, to)
        return [[uuid, changed.get(uuid, uuid)] for uuid in await self._steps.uuids()]

    def storage_allocation(self, subject: MigratedProcess) -> AbstractAsyncContextManager[Made]:
        return self._making.block(subject)

    # -- state ---------------------------------------------------------------------------------------------------------

    async def verify(self, subject: MigratedProcess) -> None:
        """Confirm the restore by the driver's state and by NVML, and release the process's reservation there.

        The release waits for neither: the process has allocated its storages and trains by then, and on some nodes NVML
        lists a process late or never.
        """
        try:
            async with self._other_processes.excluded(subject.owner_key):
                await self._steps.unlock(subject)
        finally:
            if subject.gpu is not None:
                await self.release(subject, subject.gpu)
        await self._until_shown(subject, there=True)

    async def note_resumed(self, subject: MigratedProcess) -> None:
        """Nothing depends on it."""

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        if subject.owner_key in self._in_hand:
            return ProcessState(gpu=subject.gpu, busy=True)
        async with self._other_processes.excluded(subject.owner_key):
            state = await self._steps.state(subject)
            if state == LOCKED and not subject.stays_locked:
                await self._steps.unlock(subject)
        is_locked = state == LOCKED and subject.stays_locked
        (self._locked.add if is_locked else self._locked.discard)(subject.owner_key)
        if state == CHECKPOINTED:
            return ProcessState(gpu=None)
        if state == FAILED:
            return ProcessState(gpu=None, failed="the driver reports a permanent failure of its checkpoint or restore")
        places = await self._places(subject)
        known = [place for place in (subject.gpu, subject.target_gpu, subject.previous_gpu) if place is not None]
        likely = [place for place in known if set(gpus_of(place)).issubset(places)]
        place = likely[0] if likely else place_of(places) if places else subject.gpu
        if place is None:
            raise HegmError(
                UNAVAILABLE,
                f"process {subject.pid} runs, but the driver does not list it on any GPU",
                "run: hegmctl ps; hegmd looks for it again",
                {"pid": subject.pid},
            )
        return ProcessState(gpu=place, locked=is_locked)

    async def _until_shown(self, subject: MigratedProcess, *, there: bool) -> None:
        """Wait until NVML lists the process on its GPU, or no longer lists it; the driver sends no notification."""
        for pause_s in itertools.chain(_SHOWN_AFTER_S, itertools.repeat(_POLL_INTERVAL_S)):
            places = await self._places(subject)
            if all((gpu in places) is there for gpu in gpus_of(subject.gpu)):
                break
            await anyio.sleep(pause_s)
        self._gpus.changed()

    async def _places(self, subject: MigratedProcess) -> list[str]:
        node = await self._gpus.node()
        return [use.gpu for process in node.processes if process.pid == subject.pid for use in process.gpus]

    # -- processes with a running step ---------------------------------------------------------------------------------

    @contextmanager
    def _marked_in_progress(self, subject: MigratedProcess) -> Generator[None]:
        """Mark the process during a step: inspections of it are not reliable meanwhile."""
        self._in_hand.add(subject.owner_key)
        try:
            yield
        finally:
            self._in_hand.discard(subject.owner_key)
            self._driver_locked.discard(subject.owner_key)
