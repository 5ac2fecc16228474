"""The peer carrier: the helper copies the storages straight to GPU memory reserved on the target, over NVLink.

Filling the storages there is then a copy within one GPU. If the target cannot hold copies and storages at once, the
storages are allocated in rounds, and the memory of a finished round is released first.

The process copies some storages itself, through a window: host memory shared by helper and process, filled and emptied
in turn. It is small and comes out of the pool's free memory; if that has little, it is smaller still.

A process on several GPUs has memory on each of its targets. The offset of its first piece names the device whose bytes
are there (`DEVICE_BYTES`), so that a daemon finds this without its journal: GPUs may have been exchanged meanwhile.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from functools import partial

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.copy_client import CopyClient
from hegmd.gpu_helper.link import Link
from hegmd.memory.pool import Pool
from hegmd.memory.sizes import MIB
from hegmd.memory.video_memory import DEVICE_BYTES
from hegmd.migration.carriers.copying import OUT, CopyingCarrier, Span, by_device, lane_of, lanes_of
from hegmd.migration.contracts import MigratedProcess, OutOfMemory, Progress
from hegmd.migration.methods.gpus import Gpus, VideoMemory, pool_owner
from hegmd.node.gpu_sets import gpus_of
from hegmd.protocol.operations import PEER
from hegmd.system.task_group import run_concurrently

MAX_WINDOW_BYTES, MIN_WINDOW_BYTES = 64 * MIB, 2 * MIB
# The process has a descriptor of it as well, and could cut it under the helper.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
#: Offset in the copies, offset in the window, and size.
Shift = tuple[int, int, int]


class Window:
    """Host memory of this carrier's, by descriptor. Closing twice is fine."""

    def __init__(self, size_bytes: int) -> None:
        """Raises OSError."""
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("hegm-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def windows(spans: list[Span], window_bytes: int) -> Iterator[tuple[list[Span], list[Shift]]]:
    """Split the spans into windowfuls: copies between storages and window, and between window and GPU."""
    by_process: list[Span] = []
    by_helper: list[Shift] = []
    filled_bytes = 0
    for storage, start, size_bytes, at in spans:
        done_bytes = 0
        while done_bytes < size_bytes:
            if filled_bytes == window_bytes:
                yield by_process, by_helper
                by_process, by_helper, filled_bytes = [], [], 0
            part_bytes = min(size_bytes - done_bytes, window_bytes - filled_bytes)
            by_process.append((storage, start + done_bytes, part_bytes, filled_bytes))
            by_helper.append((at + done_bytes, filled_bytes, part_bytes))
            done_bytes += part_bytes
            filled_bytes += part_bytes
    if by_process:
        yield by_process, by_helper


class PeerCarrier(CopyingCarrier):
    """Copies in video memory, by descriptor."""

    name = PEER
    has_one_space = False

    def __init__(self, helper: Link, gpus: Gpus, memory: VideoMemory, pool: Pool) -> None:
        super().__init__(helper, gpus)
        self._memory = memory
        self._pool = pool
        self._windows: dict[str, Window] = {}

    async def reserve(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Reserve on the target GPU of each of its devices, or on a GPU where it already has memory for that device."""
        if self.held_bytes(subject) < size_bytes:
            await self.abandon(subject)
        targets, parts = gpus_of(subject.target_gpu), by_device(subject)
        taken: list[str] = []
        for part in parts:
            where = self._where(part) or await self.gpus.uuid_of(targets[part.device or 0] if targets else "")
            if where not in self._memory.of(pool_owner(subject)):
                taken.append(where)
            try:
                await self._reserve_on(where, part, _share_bytes(part, size_bytes))
            except HegmError:
                for gpu in taken:
                    await self._memory.release(pool_owner(subject), gpu)
                raise
        try:  # at once: a keeper may have to be started, which takes as long as opening the sessions
            await run_concurrently(partial(self._keep, subject), partial(self.prepare, subject))
        except HegmError:
            await self.release(subject)
            raise

    async def _keep(self, subject: MigratedProcess) -> None:
        """Have its memory outlive the daemon."""
        for where in tuple(self._memory.of(pool_owner(subject))):
            await self._memory.keep(pool_owner(subject), where)

    async def _reserve_on(self, where: str, part: MigratedProcess, size_bytes: int) -> None:
        owner = pool_owner(part)
        async with self.gpus.turn(self.gpus.name_of(where)):
            try:
                await self._memory.reserve(owner, where, size_bytes, start=_base_of(part))
            except Refused as error:
                raise OutOfMemory(error.message, error.hint, error.facts) from error
        self.gpus.changed()

    async def release(self, subject: MigratedProcess) -> None:
        await self.abandon(subject)
        for where in tuple(self._memory.of(pool_owner(subject))):
            await self._memory.release(pool_owner(subject), where)
            self.gpus.changed()

    def held_bytes(self, subject: MigratedProcess) -> int:
        return sum(self._memory.of(pool_owner(subject)).values())

    async def fetch(self, subject: MigratedProcess, on_progress: Progress) -> None:
        """Do nothing: GPU memory is copied nowhere else."""

    def space_bytes(self, subject: MigratedProcess) -> int:
        where = self._where(subject)
        pieces = () if where is None else self._memory.pieces(pool_owner(subject), where)
        return pieces[-1].at + pieces[-1].size_bytes - _base_of(subject) if pieces else 0

    def session_of(self, subject: MigratedProcess, direction: str, device: int, place: int) -> int:
        """Return the device: on the way back, its bytes are where they were put, wherever it is now."""
        if direction == OUT and device != place:
            raise Refused(
                f"process {subject.pid} is on {subject.gpu}, but its devices are on these GPUs in another order",
                "try again: its GPUs have changed since it was measured",
                {"pid": subject.pid},
            )
        return device

    async def reach(self, subject: MigratedProcess) -> list[str]:
        """Return the source GPU, the target, and the GPU that has the bytes; of several, all of them."""
        names = dict.fromkeys([*gpus_of(subject.gpu), *gpus_of(subject.target_gpu)])
        uuids = [await self.gpus.uuid_of(name) for name in names]
        where = self._where(subject)
        return list(dict.fromkeys([*uuids, *([] if where is None else [where])]))

    async def attach(self, subject: MigratedProcess, route: CopyClient) -> None:
        where = self._where(subject)
        if where is None:
            raise Refused(f"no memory is reserved for the bytes of process {subject.pid}", "run: hegmctl ops")
        await route.attach_video(where, self._memory.pieces(pool_owner(subject), where), _base_of(subject))

    async def passed(self, subject: MigratedProcess, route: CopyClient, at_bytes: int) -> None:
        """Release memory whose bytes are reloaded, for the next round."""
        where = self._where(subject)
        if where is None or not subject.in_rounds:
            return
        pieces = self._memory.pieces(pool_owner(subject), where)
        count = sum(piece.at + piece.size_bytes <= at_bytes for piece in pieces)
        if count:
            await route.detach_first(count)
            await self._memory.give_first(pool_owner(subject), where, count)

    # -- storages that the process copies itself -----------------------------------------------------------------------

    async def abandon(self, subject: MigratedProcess) -> None:
        await super().abandon(subject)
        for lane in lanes_of(subject, self._windows):
            self._windows.pop(lane).close()

    def piece(self, subject: MigratedProcess) -> tuple[int, int] | None:
        window = self._windows.get(lane_of(subject))
        return None if window is None else (window.fd, window.size_bytes)

    async def prepare_own_copies(self, subject: MigratedProcess, direction: str) -> None:
        """Open the copy session again, with a window."""
        if lane_of(subject) in self._windows:
            return
        await self.abandon(subject)
        most_bytes = min(MAX_WINDOW_BYTES, self._pool.free_bytes(), -(-subject.size_bytes // MIB) * MIB)
        try:
            self._windows[lane_of(subject)] = Window(max(MIN_WINDOW_BYTES, most_bytes // MIB * MIB))
        except OSError as error:
            raise Refused(
                f"no host memory is free for the bytes that process {subject.pid} copies: {error.strerror or error}",
                "free memory on the node; hegmd tries again",
            ) from error

    async def own_copies(
        self, subject: MigratedProcess, direction: str, spans: list[Span], on_progress: Progress
    ) -> None:
        window, done_bytes = self._windows[lane_of(subject)], 0
        for by_process, by_helper in windows(spans, window.size_bytes):
            if direction == OUT:
                await self.order_copy(subject, direction, window.fd, by_process, _ignored)
                await self.with_route(subject, partial(_shift, direction="in", shifts=by_helper))
            else:
                await self.with_route(subject, partial(_shift, direction="out", shifts=by_helper))
                await self.order_copy(subject, direction, window.fd, by_process, _ignored)
            done_bytes += sum(span[2] for span in by_process)
            on_progress(done_bytes)

    def _where(self, subject: MigratedProcess) -> str | None:
        """The GPU that its bytes are held on; of several, those of its `device`."""
        owner = pool_owner(subject)
        held = self._memory.of(owner)
        if subject.device is None:
            return next(iter(held), None)
        return next((gpu for gpu in held if _device_at(self._memory.pieces(owner, gpu)[0].at) == subject.device), None)


def _device_at(at_bytes: int) -> int:
    return at_bytes // DEVICE_BYTES


def _base_of(subject: MigratedProcess) -> int:
    """Return the offset at which the memory for its bytes begins."""
    return (subject.device or 0) * DEVICE_BYTES


def _share_bytes(part: MigratedProcess, size_bytes: int) -> int:
    """Return how much of that is to be held for its device. Its growth may be on any of them."""
    if part.device is None:
        return size_bytes
    shares = part.storage_bytes_by_gpu
    return size_bytes if not shares else shares[part.device] + max(0, size_bytes - sum(shares))


async def _shift(route: CopyClient, *, direction: str, shifts: list[Shift]) -> None:
    await route.shift_places(direction, shifts)


def _ignored(_: int) -> None:
    """Ignore the progress of a window."""
