"""Ready memory: pool memory whose pages are present before a job asks for them (`pool.ready_bytes`).

To get 32 GiB from the kernel takes 1.5 to 6.5 s, and a suspend begins after that. So the daemon takes pages in advance,
in steps of 256 MiB while no operation runs, and a piece is made by renaming and resizing one of these segments. Owns
the segments and the rules for their sizes; the pool has the budget and the lock under which it calls.

A segment belongs to no job and is empty. Memory that a job had is never made ready again: it has that job's bytes, and
the job may have a descriptor of it. So a segment may be given back at any moment: when the budget is needed for a
piece, or when the node is short of memory. A segment is stored like a piece, under the operation `ready`, and the next
daemon finds it. Nameless memory leaves the store before a piece is made of it: a daemon killed in between finds it
under no name, and never under two.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.gpu_helper.ready_helper import Pinning
from hegmd.memory.pool_memory import Fill, Memory, make_memory
from hegmd.memory.pool_names import NONCE_BYTES, Key, PieceName
from hegmd.memory.pool_piece import MemoryKeeping, Piece
from hegmd.memory.sizes import HUGE_PAGE_BYTES, MIB, whole_size, with_margin
from hegmd.telemetry.log import fields, limited

logger = logging.getLogger(__name__)

#: The operation in the names of segments. Real operations have numbers.
OPERATION = "ready"
# A take waits for a step that is being made: 256 MiB of huge pages take 0.02 to 0.1 s.
STEP_BYTES = 256 * MIB
STEP_THREADS = 2
MAX_SEGMENTS = 16
# A segment that is more than this many times larger than the request is kept for a larger one, because the part that is
# cut off is no longer ready.
MAX_TIMES_LARGER = 2
# Below this share of the node's memory, segments are given back until twice as much is available again.
LOW_SHARE = 0.05
# Pauses of the background task: between looks, and after the node had no memory.
LOOK_S = 2.0
RETRY_S = 30.0

_KEY = Key(OPERATION, "pool")
_MEMINFO = Path("/proc/meminfo")


class NodeMemory(NamedTuple):
    """Memory of the node as the kernel reports it; None where it does not."""

    total_bytes: int | None
    available_bytes: int | None


def read_node_memory(meminfo: Path = _MEMINFO) -> NodeMemory:
    found: dict[str, int] = {}
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found[name] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return NodeMemory(None, None)
    return NodeMemory(found.get("MemTotal"), found.get("MemAvailable"))


def layout(wanted_bytes: int, job_bytes: Iterable[int], smallest_bytes: int = STEP_BYTES) -> list[int]:
    """Return the sizes of the segments, largest first: one for each job, as far as they fit, and one of the rest.

    A piece is one file, so segments cannot be joined: with one for each rank, all ranks find theirs. Jobs smaller than
    `smallest_bytes` have none: pages for them are quickly made.
    """
    left_bytes = wanted_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    sizes: list[int] = []
    for size_bytes in sorted(job_bytes, reverse=True)[: MAX_SEGMENTS - 1]:
        whole_bytes = min(whole_size(with_margin(size_bytes)), left_bytes)
        if size_bytes >= smallest_bytes and whole_bytes:
            sizes.append(whole_bytes)
            left_bytes -= whole_bytes
    return sorted([*sizes, left_bytes] if left_bytes else sizes, reverse=True)


def allowed_bytes(has_bytes: int, node: NodeMemory) -> int:
    """Return how much the node can spare for ready memory, which has `has_bytes` now."""
    if node.total_bytes is None or node.available_bytes is None:
        return has_bytes
    low_bytes = int(node.total_bytes * LOW_SHARE)
    spare_bytes = node.available_bytes - 2 * low_bytes
    if low_bytes <= node.available_bytes < 2 * low_bytes:  # no growth and no loss, so that it does not flap
        return has_bytes
    return max(0, has_bytes + spare_bytes)


@dataclass(slots=True, eq=False, repr=False)
class Segment:
    """Ready memory under its name."""

    name: PieceName
    memory: Memory

    @property
    def size_bytes(self) -> int:
        return self.memory.size_bytes


class ReadyMemory:
    """The segments and their planned sizes. Every awaiting call is made under the pool's lock."""

    def __init__(
        self,
        wanted_bytes: int = 0,
        *,
        node_memory: Callable[[], NodeMemory] = read_node_memory,
        huge_free_bytes: Callable[[], int] = lambda: 0,
        step_bytes: int = STEP_BYTES,
    ) -> None:
        self.wanted_bytes = wanted_bytes
        self._step_bytes = step_bytes
        #: Bytes of the storages of each job that may be suspended; set by the owner of the jobs.
        self.job_bytes: Callable[[], Iterable[int]] = tuple
        self.pinning = Pinning()  # set by the owner of the helper
        #: True after the node had no memory for the last step.
        self.is_short = False
        #: True if the segments have the sizes of the layout, as far as the node has memory.
        self.is_settled = False
        self._node_memory = node_memory
        self._huge_free_bytes = huge_free_bytes
        self._found: list[Segment] = []
        self.segments: list[Segment] = []  # for the pool and its tests to look at

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self.segments)

    def enter(self, piece: Piece) -> bool:
        """Take over a segment that an earlier daemon left; False if this is none.

        Its last step may lack pages: it does not count, and the next `adjust` gives it back.
        """
        if piece.name.key.operation != OPERATION or piece.memory is None or piece.spilled:
            return False
        piece.memory.size_bytes = (
            max(0, piece.memory.size_bytes - self._step_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        )
        self.segments.append(Segment(piece.name, piece.memory))
        self._found.append(self.segments[-1])
        return True

    def close(self) -> None:
        """Close every descriptor. Memory with a name or in a store remains for the next daemon."""
        for segment in self.segments:
            segment.memory.close()
        self.segments.clear()

    # -- handing out ---------------------------------------------------------------------------------------------------

    async def take(self, name: PieceName, whole_bytes: int, fill: Fill | None, keep: MemoryKeeping) -> Memory | None:
        """Make a segment from the ready memory that fits best. None if none fits or the node lacks the rest.

        Runs to its end if cancelled. The caller owns the memory.
        """
        segment = self._best(whole_bytes)
        if segment is None:
            return None
        ready_bytes = min(segment.size_bytes, whole_bytes)
        with anyio.CancelScope(shield=True):
            if not await self._leave_store(segment, keep):
                return None
            self.segments.remove(segment)
            try:
                await anyio.to_thread.run_sync(
                    segment.memory.hand_over, str(segment.name), name, whole_bytes, fill, abandon_on_cancel=False
                )
            except BaseException as error:
                self.pinning.unpin_later(segment.memory.fd)
                segment.memory.close()
                if not isinstance(error, OSError):
                    raise
                logger.warning("ready memory cannot be used for %s: %s", name, error)
                return None
        logger.debug("%s has %d bytes of ready memory", name, ready_bytes, extra=fields(size_bytes=ready_bytes))
        return segment.memory

    def _best(self, whole_bytes: int) -> Segment | None:
        """The smallest that is large enough, else the largest; none that would lose more pages than needed."""
        if whole_bytes < self._step_bytes:  # pages for it are quickly made
            return None
        fitting = [one for one in self.segments if one.size_bytes <= MAX_TIMES_LARGER * whole_bytes]
        ordered = sorted(fitting, key=lambda one: one.size_bytes)
        return next((one for one in ordered if one.size_bytes >= whole_bytes), ordered[-1] if ordered else None)

    async def _leave_store(self, segment: Segment, keep: MemoryKeeping) -> bool:
        """Remove a segment from the store; False if the store may still hold it."""
        if segment.memory.place is not None or keep.store is None:
            return True
        try:
            await keep.store.drop(str(segment.name))
        except HegmError as error:
            logger.warning("%s stays ready memory: %s", segment.name, error.message)
            return False
        return True

    # -- its size ------------------------------------------------------------------------------------------------------

    async def give_back(self, size_bytes: int, keep: MemoryKeeping) -> None:
        """Free at least that many bytes, as far as ready memory exists. Raises nothing."""
        goal_bytes = max(0, self.size_bytes - size_bytes)
        with anyio.CancelScope(shield=True):
            for segment in sorted(self.segments, key=lambda one: (one.memory.huge, one.size_bytes)):
                if self.size_bytes <= goal_bytes and goal_bytes:
                    return
                excess_bytes = self.size_bytes - goal_bytes
                await self._shrink(segment, max(0, segment.size_bytes - excess_bytes), keep)

    async def adjust(self, limit_bytes: int, keep: MemoryKeeping, *, may_grow: bool) -> bool:
        """Make one step towards the layout, within `limit_bytes`; True if more steps are needed. Raises nothing.

        `limit_bytes` is the unused part of the budget.
        """
        self.is_settled = not await self._adjust(limit_bytes, keep, may_grow=may_grow)
        return not self.is_settled

    async def _adjust(self, limit_bytes: int, keep: MemoryKeeping, *, may_grow: bool) -> bool:
        while self._found:
            segment = self._found.pop()
            if segment in self.segments:
                await self._shrink(segment, segment.size_bytes, keep)
        has_bytes = self.size_bytes
        # The kernel sets pages of hugetlbfs apart: they are never available to others.
        huge_bytes = sum(segment.size_bytes for segment in self.segments if segment.memory.huge)
        spare_bytes = huge_bytes + allowed_bytes(has_bytes - huge_bytes, self._node_memory())
        goal_bytes = max(0, min(self.wanted_bytes, limit_bytes, spare_bytes))
        if has_bytes > goal_bytes or (self.segments and not goal_bytes):
            logger.info("ready memory shrinks from %d to %d MiB", has_bytes // MIB, goal_bytes // MIB)
            await self.give_back(has_bytes - goal_bytes, keep)
            return False
        self.is_short = False
        if not may_grow:
            return False
        sizes = layout(goal_bytes, self.job_bytes(), self._step_bytes)
        if await self._shrink_one(sizes, keep):
            return True
        return await self._grow_one(sizes, keep)

    async def _shrink_one(self, sizes: Sequence[int], keep: MemoryKeeping) -> bool:
        """Free what a segment has beyond the layout, if that is at least one step."""
        ordered = sorted(self.segments, key=lambda one: one.size_bytes, reverse=True)
        for number, segment in enumerate(ordered):
            size_bytes = sizes[number] if number < len(sizes) else 0
            if segment.size_bytes - size_bytes >= self._step_bytes or number >= len(sizes):
                await self._shrink(segment, size_bytes, keep)
                return True
        return False

    async def _grow_one(self, sizes: Sequence[int], keep: MemoryKeeping) -> bool:
        """Add a step to the first segment that is smaller than in the layout."""
        await self.pinning.unpin()  # what was removed is free only then, huge pages above all
        room_bytes = sum(sizes) - self.size_bytes
        ordered = sorted(self.segments, key=lambda one: one.size_bytes, reverse=True)
        for number, size_bytes in enumerate(sizes):
            had_bytes = ordered[number].size_bytes if number < len(ordered) else 0
            step_bytes = min(self._step_bytes, size_bytes - had_bytes, room_bytes)
            if step_bytes <= 0:
                continue
            try:
                if number < len(ordered):
                    resize = partial(ordered[number].memory.resize, had_bytes + step_bytes, max_threads=STEP_THREADS)
                    await anyio.to_thread.run_sync(resize)
                else:
                    await self._begin(step_bytes, size_bytes, keep)
            except (OSError, HegmError) as error:
                self.is_short = True
                text = "the node lacks memory to keep ready: %d of %d MiB are ready: %s"
                limited(logger, "ready-memory", logging.WARNING, text, *self._figures(), error)
                return False
            if self.size_bytes == sum(sizes):
                logger.info("%d of %d MiB of memory are ready", *self._figures())
            return self.size_bytes < sum(sizes)
        return False

    async def _begin(self, step_bytes: int, size_bytes: int, keep: MemoryKeeping) -> None:
        """Make a new segment with its first step. Raises HegmError."""
        name = PieceName(_KEY, 0, secrets.token_hex(NONCE_BYTES))
        huge = self._huge_free_bytes() >= size_bytes
        with anyio.CancelScope(shield=True):
            memory = await anyio.to_thread.run_sync(
                lambda: make_memory(name, step_bytes, places=keep.places, huge=huge, sealed=False)
            )
            self.segments.append(Segment(name, memory))
            if memory.place is None and keep.store is not None:
                try:
                    await keep.store.put(str(name), memory.fd)
                except HegmError as error:
                    logger.warning("ready memory ends with this daemon: %s", error.message)

    async def _shrink(self, segment: Segment, size_bytes: int, keep: MemoryKeeping) -> None:
        memory, name = segment.memory, str(segment.name)
        whole_bytes = size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        try:
            await self.pinning.unpin(memory.fd)
            if whole_bytes:
                await anyio.to_thread.run_sync(memory.resize, whole_bytes)
            elif await self._leave_store(segment, keep):
                self.segments.remove(segment)
                await anyio.to_thread.run_sync(memory.remove, name)
        except OSError as error:
            logger.warning("%s cannot be released: %s", name, error)

    def _figures(self) -> tuple[int, int]:
        return self.size_bytes // MIB, self.wanted_bytes // MIB
