"""The host carrier: the helper copies the storages to a pool segment and back, through CUDA IPC, over PCIe.

Its pinned memory is in the helper and not in the process, where it would add a second to the driver's checkpoint.

If a GPU has enough memory (`gpu_staging`), the bytes cross the link during the driver's call. On the way out they are
copied to staging memory beside the storages, which takes almost no time, and from there to the pool during the
checkpoint (`overlap_checkpoint`). On the way back they are copied into staging memory on the target during the restore
(`overlap_restore`) and while the storages are allocated, and from there into these. Otherwise they are copied over the
link, before and after.

The place of the bytes is never guessed. While they are in staging memory and not in the pool, a mark in their segment
says so (`gpu_helper/mark`), from before the first copy until the pool has them all; the descriptor store keeps the
staging memory as it keeps peer's. So a daemon killed on the way leaves a mark that names the memory with the bytes, and
the next one copies them to the pool or into the process. Without that memory, the pool's content is not used as the
bytes. The job can write to its segment, and so could the writer of an image: a mark only counts if it names memory of
the process itself. A copy staged on the target is never the only one. Only this daemon reads it, by the copy client
that wrote it.

Nothing is staged for a process on several GPUs: every GPU's link copies its part at the same time.

Longer than 400 lines because every path out and back exists with and without staging memory, and each has to match what
the other leaves.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress

import anyio

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.copy_client import HOST, VIDEO, CopyClient
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link
from hegmd.gpu_helper.mark import MARK_BYTES, Mark
from hegmd.memory.pool import Pool
from hegmd.memory.sizes import FLAT_BYTES, staging_in_needed_bytes, staging_out_needed_bytes
from hegmd.migration.carriers.copying import IN, CopyingCarrier, Span, lane_of
from hegmd.migration.carriers.gpu_staging import StagedBytes, StagingMemory, StagingUse
from hegmd.migration.carriers.location_record import LocationRecords
from hegmd.migration.contracts import Making, MigratedProcess, NoContext, OverlappedCopy, Progress
from hegmd.migration.methods.concurrently import beside
from hegmd.migration.methods.gpus import Gpus, VideoMemory, staging_in_owner, staging_out_owner
from hegmd.migration.methods.pool_keys import key_of, source_of
from hegmd.node.gpu_sets import gpus_of, is_several
from hegmd.protocol.operations import HOST as BY_HOST
from hegmd.workers.workers import OrderFailed

logger = logging.getLogger(__name__)

# Time for the last request of a cancelled operation. Its remains end with the helper, and with the daemon.
_LAST_WORD_S = 5.0


class HostCarrier(CopyingCarrier):
    """Copies through the pool's memory, and through staging memory on the GPUs if they have enough."""

    name = BY_HOST
    crosses = HOST

    def __init__(self, helper: Link, gpus: Gpus, pool: Pool, memory: VideoMemory) -> None:
        super().__init__(helper, gpus)
        self._pool = pool
        self._staging = StagingMemory(gpus, memory)
        self._marks = LocationRecords(pool)
        # Processes that may have staging memory, and whether it is in use, by copy session.
        self._staging_use: dict[str, StagingUse] = {}
        # The copy from the pool into staging memory, in progress or finished, by copy session.
        self._staged_bytes: dict[str, StagedBytes] = {}

    # -- memory --------------------------------------------------------------------------------------------------------

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        if self._pool.held_for(key_of(subject)) < size_bytes:
            await self.abandon(subject)  # a larger segment replaces the attached one
        await self._pool.take(key_of(subject), size_bytes, source_of(subject))
        async with self._using(subject):
            await self._take_passing(
                subject, size_bytes + FLAT_BYTES, staging_out_needed_bytes(size_bytes, at_rest=False)
            )
        await self.prepare_or_release(subject)

    async def release(self, subject: MigratedProcess) -> None:
        await self.abandon(subject)
        for owner in self._marks.owners(subject):
            await self._staging.release(owner)
        self._staging_use.pop(lane_of(subject), None)
        await self._pool.release(key_of(subject))

    def held_bytes(self, subject: MigratedProcess) -> int:
        return self._pool.held_for(key_of(subject))

    async def fetch(self, subject: MigratedProcess, on_progress: Progress) -> None:
        await self._pool.fetch(key_of(subject), on_progress)

    async def prepare(self, subject: MigratedProcess) -> None:
        """Prepare the copies.

        The process copies its bytes itself if its GPU has no room for the helper's context, which may take more than
        was measured. A process with its bytes in the pool does so whenever the helper fails.
        """
        try:
            await self.prepare_sessions(subject, self._have_likely)
        except HegmError as error:
            can_do_without = subject.gpu is None or isinstance(error, NoContext)
            if not can_do_without or not self._marks.is_unmarked(subject):
                raise
            logger.warning("process %d copies its bytes itself: %s", subject.pid, error.message)

    async def abandon(self, subject: MigratedProcess) -> None:
        self._staged_bytes.pop(lane_of(subject), None)
        # First, since the lane's end waits for what goes ahead; until then the memory is mapped there.
        await self._staging.release(staging_in_owner(subject))
        await super().abandon(subject)
        if self._marks.is_unmarked(subject):
            for owner in self._marks.owners(subject):
                await self._staging.release(owner)

    def space_bytes(self, subject: MigratedProcess) -> int:
        return self._pool.memory(key_of(subject)).size_bytes - MARK_BYTES

    async def reach(self, subject: MigratedProcess) -> list[str]:
        """Return the source GPU, the target and the GPU with its bytes: their contexts are created ahead."""
        places = [gpus_of(place) for place in (subject.gpu, subject.target_gpu)]
        names = dict.fromkeys(place[subject.device or 0] for place in places if place)
        uuids = [await self.gpus.uuid_of(name) for name in names]
        mark = self._marks.of(subject)
        where = None if mark is None else self._staging.where(mark.owner)
        return list(dict.fromkeys([*uuids, *([] if where is None else [where])]))

    def piece(self, subject: MigratedProcess) -> tuple[int, int] | None:
        memory = self._pool.memory(key_of(subject))
        return memory.fd, memory.size_bytes

    # -- out -----------------------------------------------------------------------------------------------------------

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        self._staged_bytes.pop(lane_of(subject), None)
        await self._pool.to_fill(key_of(subject))
        return await super().offload(subject, on_progress)

    async def before_copy_out(self, subject: MigratedProcess, end_bytes: int) -> None:
        """Choose staging memory, reserved earlier or now that the job is parked; without it use the pool."""
        async with self._using(subject):
            await self._begin_out(subject, end_bytes)

    async def _begin_out(self, subject: MigratedProcess, end_bytes: int) -> None:
        owner = staging_out_owner(subject)

        async def begin(route: CopyClient) -> None:
            await self._attach_staging(route, subject, owner)
            await route.mark(owner, end_bytes)

        if await self._take_passing(subject, end_bytes, staging_out_needed_bytes(end_bytes, at_rest=True)):
            try:
                await self.with_route(subject, begin)
                return
            except HegmError as error:
                logger.warning(
                    "process %d is copied to the pool without a staging copy: %s", subject.pid, error.message
                )
        if self._marks.of(subject) is not None:
            await self.with_route(subject, lambda route: route.mark(None))
        await self._release_staging(subject)

    async def _take_passing(self, subject: MigratedProcess, size_bytes: int, needed_bytes: int) -> bool:
        """Reserve that much staging memory for the way out; True if it is reserved. Never while the bytes are in it."""
        owner, gpu = staging_out_owner(subject), subject.gpu
        if gpu is None or is_several(gpu) or subject.keeps_context or not self._marks.is_unmarked(subject):
            return False
        if self._staging.where(owner) == await self.gpus.uuid_of(gpu) and self._staging.held_bytes(owner) >= size_bytes:
            # other processes may have taken memory since it was reserved
            if await self._staging.fits(owner, gpu, needed_bytes):
                return True
            await self._release_staging(subject)
            return False
        await self._release_staging(subject)
        async with self.gpus.turn(gpu):
            return await self._staging.take(owner, gpu, size_bytes, needed_bytes, keep=True)

    def is_staged(self, subject: MigratedProcess) -> bool:
        return self._marks.of(subject) is not None

    @asynccontextmanager
    async def overlap_checkpoint(self, subject: MigratedProcess) -> AsyncGenerator[OverlappedCopy]:
        done = OverlappedCopy()
        mark = self._marks.of(subject)
        if mark is None:
            yield done
            return
        async with beside(lambda: self._settle(subject, mark, done)):
            yield done

    async def _settle(self, subject: MigratedProcess, mark: Mark, done: OverlappedCopy) -> None:
        began = anyio.current_time()
        if mark.owner != staging_out_owner(subject):
            logger.info(
                "bytes of process %d that are staged for %s are copied to its pool segment", subject.pid, mark.owner
            )

        async def drain(route: CopyClient) -> None:
            await self._attach_staging(route, subject, mark.owner)
            copied = await route.copy_regions("out", mark.size_bytes)
            logger.info("copied out during the checkpoint: %s", copied)

        await self.with_route(subject, drain)
        done.size_bytes, done.took_s = mark.size_bytes, anyio.current_time() - began
        await self.with_route(subject, lambda route: route.mark(None))
        await self._release_staging(subject, *self._marks.owners(subject))
        if (
            subject.target_gpu is None and not subject.keeps_reservation
        ):  # nothing is kept for a rollback, as for an image
            await self._disarm_early(subject)

    async def _disarm_early(self, subject: MigratedProcess) -> None:
        """Close the copy contexts during the driver's call, and not after it. Raises nothing."""
        try:
            await self.abandon(subject)
        except HegmError as error:  # it is asked again when the operation ends
            logger.warning("the GPU helper still copies for process %d: %s", subject.pid, error.message)

    # -- and back ------------------------------------------------------------------------------------------------------

    def _may_copy_early(self, subject: MigratedProcess) -> bool:
        """Return True if the bytes are in the pool, and it is known where they go."""
        is_to_come = subject.gpu is None and subject.target_gpu is not None and not subject.gpu_unknown
        return is_to_come and not subject.keeps_context and subject.size_bytes > 0 and self._marks.of(subject) is None

    async def _take_early_copy(self, subject: MigratedProcess, gpu: str) -> bool:
        size_bytes = self._reach_bytes(subject)
        async with self.gpus.turn(gpu):
            is_held = await self._staging.take(
                staging_in_owner(subject), gpu, size_bytes, staging_in_needed_bytes(size_bytes), keep=False
            )
        if not is_held and self._staging.held_bytes(
            staging_in_owner(subject)
        ):  # left by an earlier attempt, when more memory was free
            await self._release_staging(subject)
        return is_held

    def _reach_bytes(self, subject: MigratedProcess) -> int:
        """Return the end of its storages in the pool, at most. The agent reports each place only on allocation."""
        return min(subject.size_bytes + FLAT_BYTES, self.space_bytes(subject))

    def staged(self, subject: MigratedProcess) -> OverlappedCopy | None:
        if self._marks.of(subject) is not None:
            return OverlappedCopy()
        staged = self._staged_bytes.get(lane_of(subject))
        return None if staged is None else staged.done

    @asynccontextmanager
    async def overlap_restore(self, subject: MigratedProcess) -> AsyncGenerator[OverlappedCopy]:
        """Stage the bytes on the target during the block, if its memory allows.

        Reserved here and not in `prepare`, since other processes of the operation may still need reservations.
        """
        done = OverlappedCopy()
        gpu, route = subject.target_gpu, self.routes.get(lane_of(subject))
        if gpu is None or route is None or not self._may_copy_early(subject):
            yield done
            return
        try:
            async with self._using(subject):
                if await self._take_early_copy(subject, gpu):
                    await self._start_early_copy(subject, route, done)
            yield done
        except HegmError:  # staging memory may have taken what was missing
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LAST_WORD_S), suppress(HegmError):
                await self.abandon(subject)
            raise

    async def _start_early_copy(self, subject: MigratedProcess, route: CopyClient, done: OverlappedCopy) -> None:
        """Start copying into GPU staging memory while the driver restores.

        Uses the open copy session; a new one would wait for the GPU lock that the restore holds. The copy continues
        while the storages are allocated: `through` waits for its end.
        """
        size_bytes, known = self._reach_bytes(subject), self._staged_bytes.get(lane_of(subject))
        if known is not None and known.is_in(route) and known.size_bytes >= size_bytes:
            return
        try:
            await self._attach_staging(route, subject, staging_in_owner(subject))
            await route.start_copy("in", size_bytes)
        except HegmError as error:
            logger.warning("no staging copy for process %d: %s", subject.pid, error.message)
            await self.abandon(subject)
            return
        done.size_bytes = size_bytes
        self._staged_bytes[lane_of(subject)] = StagedBytes(route, route.attached, size_bytes, done)

    async def _has_early_copy(self, subject: MigratedProcess, route: CopyClient, end_bytes: int) -> bool:
        """Return True if video memory of this route has those bytes, once that is certain."""
        staged = self._staged_bytes.get(lane_of(subject))
        if staged is None or not staged.is_in(route) or staged.size_bytes < end_bytes:
            return False
        try:
            copied = await route.finish_copy(staged.size_bytes)
        except HelperLost:
            raise
        except HegmError as error:
            logger.warning("the staging copy for process %d failed: %s", subject.pid, error.message)
            del self._staged_bytes[lane_of(subject)]
            return False
        logger.info("copied in during the restore: %s", copied)
        staged.done.took_s = copied.copy_s
        return True

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Reload the bytes, and release the staging memory as soon as the storages have them.

        If plenty of memory is free, it is released when the process resumes. If the storages cannot be allocated for
        lack of memory, it is released before, and the bytes cross the link.
        """
        async with self._using(subject):
            try:
                return await super().reload(subject, on_progress, making)
            except OrderFailed as error:
                if error.lacks_bytes is None or not self._staging.held_bytes(staging_in_owner(subject)):
                    raise
                logger.warning(
                    "the staging copy for process %d is dropped to free memory: %s", subject.pid, error.message
                )
                await self._release_staging(subject)
                return await super().reload(subject, on_progress, making)

    async def returned(self, subject: MigratedProcess, *, has_spare_memory: bool) -> None:
        """Release the staging memory, and the mark, which says that the staging memory has the bytes."""
        if not has_spare_memory or not self._marks.is_unmarked(subject):
            await self._put_away(subject)

    async def resumed(self, subject: MigratedProcess) -> None:
        if self._staging.held_bytes(staging_in_owner(subject)):
            async with self._using(subject):
                await self._put_away(subject)

    async def _put_away(self, subject: MigratedProcess) -> None:
        try:
            mark = self._marks.of(subject)
            if mark is not None:
                await self.with_route(subject, lambda route: route.mark(None))
            await self._release_staging(subject, None if mark is None else mark.owner)
        except HegmError as error:  # it is given back with the rest
            logger.warning("the staging memory of process %d is still reserved: %s", subject.pid, error.message)

    # -- video memory beside -------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _using(self, subject: MigratedProcess) -> AsyncGenerator[None]:
        """Hold the block in which no other task releases the staging memory of that process."""
        known = self._staging_use.setdefault(lane_of(subject), StagingUse(subject))
        async with known.in_use:
            yield

    async def free_memory(self, gpu: str) -> bool:
        """Release unused staging memory on that GPU, given by UUID, unless it has the only copy of bytes.

        For a caller that is short of memory there. Returns True if any was released; raises nothing.
        """
        spared = [await self._spare(known, gpu) for known in tuple(self._staging_use.values())]
        return any(spared)

    async def _spare(self, known: StagingUse, gpu: str) -> bool:
        subject = known.subject
        held = [
            owner
            for owner in (staging_out_owner(subject), staging_in_owner(subject))
            if self._staging.where(owner) == gpu
        ]
        if not held or known.in_use.locked() or not self._marks.is_unmarked(subject):
            return False
        async with known.in_use:
            logger.info("the staging memory of process %d on %s is released: other jobs need it", subject.pid, gpu)
            try:
                staged, route = self._staged_bytes.get(lane_of(subject)), self.routes.get(lane_of(subject))
                if staged is not None and staged.route is route:  # released once no copy writes to it
                    with suppress(DriverFailed):
                        await staged.route.finish_copy(staged.size_bytes)
                await self._release_staging(subject)
            except HegmError as error:
                logger.warning("the staging memory of process %d is still reserved: %s", subject.pid, error.message)
                return False
        return True

    async def through(self, subject: MigratedProcess, route: CopyClient, end_bytes: int) -> str:
        """Return GPU memory if a mark names it or the bytes are staged there; otherwise the pool."""
        mark = self._marks.of(subject)
        if mark is not None:
            await self._attach_staging(route, subject, mark.owner)
            return VIDEO
        return VIDEO if await self._has_early_copy(subject, route, end_bytes) else HOST

    async def prepare_own_copies(self, subject: MigratedProcess, direction: str) -> None:
        """Do nothing: the process can reach the pool, and no bytes are in GPU memory."""
        mark = self._marks.of(subject)
        if mark is None:
            return

        async def drain(route: CopyClient) -> None:
            if direction == IN:
                await self._attach_staging(route, subject, mark.owner)
                await route.copy_regions("out", mark.size_bytes)
            await route.mark(None)

        await self.with_route(subject, drain)
        await self._release_staging(subject, mark.owner)

    async def own_copies(
        self, subject: MigratedProcess, direction: str, spans: list[Span], on_progress: Progress
    ) -> None:
        await self.order_copy(subject, direction, self._pool.memory(key_of(subject)).fd, spans, on_progress)

    async def _have_likely(self, subject: MigratedProcess, route: CopyClient) -> None:
        """Attach the memory that will be copied through, if it is reserved, so that this adds no downtime."""
        mark = self._marks.of(subject)
        if mark is not None:
            await self._attach_staging(route, subject, mark.owner)
            return
        for owner in (staging_out_owner(subject), staging_in_owner(subject)):
            if self._staging.held_bytes(owner):
                try:
                    await self._attach_staging(route, subject, owner)
                except HelperLost:
                    raise
                except HegmError as error:
                    logger.warning(
                        "process %d is copied without its staging copy %s: %s", subject.pid, owner, error.message
                    )
                    await self._staging.release(owner)
                return

    async def _attach_staging(self, route: CopyClient, subject: MigratedProcess, owner: str) -> None:
        """Attach all of that owner's staging memory to the session. Raises HegmError."""
        where, version = self._staging.where(owner), self._staging.version(owner)
        if where is None:
            raise Refused(
                f"the staging copy with the bytes of process {subject.pid} is lost",
                "read the log of the service manager around hegmd's last start; these bytes cannot be recovered",
                {"pid": subject.pid, "owner": owner},
            )
        if route.attached == version:
            return
        if route.attached is not None:
            await route.detach_video()
            route.attached = None
        await route.attach_video(where, self._staging.pieces(owner))
        route.attached = version

    async def _release_staging(self, subject: MigratedProcess, *others: str | None) -> None:
        """Release staging memory, whose bytes also exist elsewhere. Raises HegmError."""
        self._staged_bytes.pop(lane_of(subject), None)
        route = self.routes.get(lane_of(subject))
        if route is not None and route.attached is not None:
            route.attached = None
            try:
                await route.detach_video()
            except HelperLost:
                self.routes.pop(lane_of(subject), None)
        for owner in (staging_out_owner(subject), staging_in_owner(subject), *others):
            if owner is not None:
                await self._staging.release(owner)
