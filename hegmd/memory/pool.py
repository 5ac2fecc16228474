"""The pool: host memory for the bytes of jobs in flight. Each segment has one owner and one name, within one budget.

Pages are present before anything relies on them: several threads touch them off the loop (`pool_memory`), in 2 MiB
pages if the node has enough free ones. A segment that cannot be allocated whole is released and refused with numbers. A
segment outlives the daemon, however that ends: it is a file in memory (`pool_places`), or memory that a store holds by
descriptor (`descriptor_store`). While its job is suspended it can be on disk instead (`spill_file`), and then needs no
budget. Callers need not know which of these it is: they use `take`, `fetch` and `release`.

Segments found at the start that belong to no operation are kept apart, and only touched by name (`drop_unclaimed`,
`claim`): another operation may get the same number. The pool knows only names of operations and workers, and releases
what it is told to: the machine decides what is no longer needed. Longer than 400 lines because all paths of a segment
share one lock and one budget.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import anyio
import anyio.to_thread

from hegmd.errors import BUSY, CANCELLED, NOT_FOUND, UNAVAILABLE, HegmError, Refused
from hegmd.memory.pool_checksums import COMPARED_FOR_S, COMPARING_THREADS, SUMMING_THREADS, compare, sums_of
from hegmd.memory.pool_memory import Memory, make_memory, read_available_bytes, read_huge_free_bytes
from hegmd.memory.pool_names import NONCE_BYTES, Key, PieceName, Source
from hegmd.memory.pool_piece import MemoryKeeping, Piece
from hegmd.memory.ready_memory import LOOK_S, RETRY_S, ReadyMemory
from hegmd.memory.sizes import MIB, whole_size, with_margin
from hegmd.memory.spill_file import SpillFolder
from hegmd.memory.spilling import Progress, ignore_progress, read_into, with_memory, write_out
from hegmd.telemetry.log import fields

__all__ = ["Key", "MemoryKeeping", "Memory", "Piece", "Pool", "Source", "read_available_bytes"]

logger = logging.getLogger(__name__)

# Without a configured budget, the pool may use this share of the memory that is available at the time.
SHARE_OF_AVAILABLE = 0.5


class Pool:
    """All bytes that the daemon holds for jobs outside of them. Belongs to the event loop.

    `budget_bytes` 0 means half of the memory that is available when it is needed. `make_room` is asked to free that
    many bytes before a request is refused; it raises nothing.
    """

    def __init__(
        self,
        budget_bytes: int = 0,
        *,
        keep: MemoryKeeping | None = None,
        ready: ReadyMemory | None = None,
        available_bytes: Callable[[], int | None] = read_available_bytes,
        huge_free_bytes: Callable[[], int] = read_huge_free_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keep = keep or MemoryKeeping()
        self.ready = ready or ReadyMemory()
        self.free_memory: Callable[[int], Awaitable[object]] | None = None
        self._given_budget_bytes = budget_bytes
        self._available_bytes = available_bytes
        self._huge_free_bytes = huge_free_bytes
        self._clock = clock
        self._held: dict[Key, Piece] = {}
        self._unclaimed: dict[str, Piece] = {}
        self._coming: dict[Key, int] = {}  # taken from the budget, pages not there yet
        self._taking = anyio.Lock()

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """Return the bytes of memory that it holds for owners, or is about to."""
        pieces = (*self._held.values(), *self._unclaimed.values())
        return sum(_memory_bytes(piece) for piece in pieces) + sum(self._coming.values())

    @property
    def spilled_bytes(self) -> int:
        pieces = (*self._held.values(), *self._unclaimed.values())
        return sum(piece.size_bytes for piece in pieces if piece.spilled)

    def budget_bytes(self) -> int:
        """Return how much it may hold in all now."""
        if self._given_budget_bytes:
            return self._given_budget_bytes
        available = self._available_bytes()
        return self.held_bytes + self.ready.size_bytes + int((available or 0) * SHARE_OF_AVAILABLE)

    def free_bytes(self) -> int:
        """Return how much more it may hold; ready memory is free."""
        return max(0, self.budget_bytes() - self.held_bytes)

    def figures(self) -> Mapping[str, int]:
        """Return bytes by use, for monitoring."""
        return {
            "memory": self.held_bytes,
            "disk": self.spilled_bytes,
            "budget": self.budget_bytes(),
            "ready": self.ready.size_bytes,
        }

    def held_for(self, key: Key) -> int:
        """Return for how many bytes of storages the owner's segment was made, wherever it is; 0 without one."""
        piece = self._held.get(key)
        return 0 if piece is None else piece.usable_bytes

    def outlives(self, key: Key) -> bool:
        """Return True if the owner's bytes outlive the daemon."""
        piece = self._held.get(key)
        if piece is None:
            return False
        return piece.memory is None or piece.memory.place is not None or self.keep.store is not None

    def by_owner(self) -> Mapping[Key, Piece]:
        """Return every segment that has an owner."""
        return dict(self._held)

    def was_claimed_from(self, key: Key) -> bool:
        """Return True if a segment of another operation was this one's before: its content may still name this one."""
        own = [piece.name for piece in self._held.values()]
        return any(name.key.worker == key.worker and key.operation in name.before for name in own)

    def unclaimed(self) -> Mapping[str, Piece]:
        """Return every segment that was found and belongs to no operation, by its name."""
        return dict(self._unclaimed)

    def memory(self, key: Key) -> Memory:
        """Return the memory of the owner's segment. Raises Refused without one."""
        piece = self._held.get(key)
        if piece is None:
            raise Refused(
                f"the pool holds nothing for {key.worker} in operation {key.operation}",
                "its memory was lost with its file or its keeper; the worker may have its own descriptor",
            )
        if piece.memory is None:
            raise Refused(f"the bytes of {key.worker} are on disk, in {self._file_of(piece)}", "fetch them first")
        return piece.memory

    # -- taking and giving ---------------------------------------------------------------------------------------------

    async def take(self, key: Key, size_bytes: int, source: Source | None = None) -> Memory:
        """Hold that much for the owner from now on, with pages present. It replaces the owner's segment, unless that is
        enough.

        `source` is the process that the bytes are from; without it a segment belongs to no process if its operation is
        lost. Raises Refused over the budget or if the pages cannot be allocated; then the former segment stays. If
        cancelled, it finishes first and releases what it took.
        """
        await self.fetch(key)
        known = self._held.get(key)
        if known is not None and known.usable_bytes >= size_bytes and known.memory is not None:
            return known.memory
        name, memory = await self._make_with_margin(key, size_bytes, source)
        whole_bytes = whole_size(name.usable_bytes)
        try:
            await self.release(key)
        except BaseException:
            await self._give_back(Piece(name, whole_bytes, memory))
            raise
        self._held[key] = Piece(name, whole_bytes, memory)
        return memory

    async def release(self, key: Key) -> None:
        """Return the owner's bytes to the node, wherever they are. Does nothing without any.

        Raises HegmError if that fails; then they are still held, and the call can be repeated.
        """
        piece = self._held.get(key)
        if piece is None:
            return
        if piece.spilling is not None:
            piece.spilling.cancel()
        async with piece.lock:
            await self._forget(piece)
            if self._held.get(key) is piece:
                del self._held[key]

    async def to_fill(self, key: Key) -> Memory:
        """Return the owner's memory for writing: a copy of its former content on disk becomes invalid."""
        memory = self.memory(key)
        piece = self._held[key]
        if piece.spilling is not None:
            piece.spilling.cancel()
        async with piece.lock:
            await self._forget_sums(piece)
            await self._forget_file(piece)
        return memory

    def close(self) -> None:
        """Close every descriptor. Memory with a name or in a store remains for the next daemon."""
        for piece in (*self._held.values(), *self._unclaimed.values()):
            if piece.memory is not None:
                piece.memory.close()
        self._held.clear()
        self._unclaimed.clear()
        self.ready.close()
        for place in self.keep.places:
            place.leave()

    # -- memory that is ready ------------------------------------------------------------------------------------------

    async def adjust_ready(self, *, may_grow: bool = True) -> bool:
        """Do one step towards the ready memory that the settings, the budget and the node allow; True if there
        are more."""
        async with self._taking:
            return await self.ready.adjust(self.budget_bytes() - self.held_bytes, self.keep, may_grow=may_grow)

    async def keep_ready(self, is_busy: Callable[[], bool]) -> None:
        """Fill the ready memory while the daemon is not busy, and give it back if the node needs it."""
        while await self.adjust_ready(may_grow=not is_busy()) or self.ready.wanted_bytes:
            while not is_busy() and await self.adjust_ready():
                pass
            await anyio.sleep(RETRY_S if self.ready.is_short else LOOK_S)

    async def with_memory_at_rest(
        self, is_at_rest: Callable[[Key], bool], use: Callable[[Sequence[tuple[int, int]]], Awaitable[bool]]
    ) -> bool:
        """Return the result of `use`, called with descriptors and sizes of ready memory and of these owners' memory.

        None of it is resized during the call. While ready memory grows, `use` is not called: False.
        """
        async with self._taking:
            if not self.ready.is_settled:
                return False
            found = [segment.memory for segment in self.ready.segments]
            at_rest = [piece for key, piece in self._held.items() if is_at_rest(key) and not piece.is_leaving]
            found += [piece.memory for piece in at_rest if piece.memory is not None]
            return await use([(memory.fd, memory.size_bytes) for memory in found])

    # -- on disk -------------------------------------------------------------------------------------------------------

    async def spill(self, key: Key, progress: Progress = ignore_progress) -> None:
        """Have the owner's bytes on disk as well, synced and read back. Fine when they are. Raises HegmError."""
        folder = self._folder()
        piece = self._held.get(key)
        if piece is None:
            raise Refused(f"the pool holds nothing for {key.worker} in operation {key.operation}", "run: hegmctl ops")
        async with piece.lock:
            if not piece.spilled and piece.memory is not None:
                await self._write(folder, piece, piece.memory, progress)

    async def free_memory_of(self, key: Key) -> None:
        """Free the memory of a segment that is on disk. Does nothing if it is already freed. Raises HegmError."""
        piece = self._held.get(key)
        if piece is None:
            return
        async with piece.lock:
            if piece.spilled and piece.memory is not None:
                await self._forget_memory(piece)

    async def fetch(self, key: Key, progress: Progress = ignore_progress) -> None:
        """Load the owner's bytes into memory, every chunk verified; the file on disk stays. Does nothing if they are
        loaded.

        Bytes that stayed in memory are compared with their checksums, if there are any. Raises Refused over the budget,
        and HegmError for a damaged file or memory; then they stay where they were.
        """
        piece = self._held.get(key)
        if piece is None:
            return
        if piece.spilling is not None:
            piece.spilling.cancel()
        async with piece.lock:
            if piece.memory is not None:
                await self._compare(piece, piece.memory, COMPARING_THREADS)
            elif self._held.get(key) is piece:
                folder, name = self._folder(), str(piece.name)
                piece.memory = await read_into(
                    lambda fill: self._make(piece.name, piece.size_bytes, piece.usable_bytes, fill),
                    folder,
                    name,
                    piece.size_bytes,
                    progress,
                )

    async def compare_ahead(self, key: Key) -> None:
        """Compare the owner's bytes with their checksums before they are used: a `fetch` soon after need not.

        Ends early if the bytes are needed. Raises HegmError if they have changed, or cannot be read.
        """
        piece = self._held.get(key)
        if piece is None:
            return
        async with piece.lock:
            if piece.memory is not None:
                try:
                    with anyio.CancelScope() as piece.spilling:
                        await self._compare(piece, piece.memory, SUMMING_THREADS)
                finally:
                    piece.spilling = None

    async def sum_up(self, key: Key) -> None:
        """Compute checksums of the owner's bytes while its job is suspended. Does nothing if it has them.

        Ends early if the bytes are needed. Raises HegmError for memory that cannot be read.
        """
        piece, sums = self._held.get(key), self.keep.sums
        if piece is None or sums is None or not piece.mark:
            return
        async with piece.lock:
            memory, piece.compared_at = piece.memory, -math.inf
            if memory is None or piece.sums is not None:
                return
            name, size_bytes = str(piece.name), piece.size_bytes
            try:
                with anyio.CancelScope() as piece.spilling:
                    piece.sums = await with_memory(
                        memory.fd,
                        lambda fd, is_over: sums_of(fd, size_bytes, is_over),
                        name=name,
                        unwanted="is not summed any further",
                    )
            finally:
                piece.spilling = None
            if piece.sums is not None:
                await anyio.to_thread.run_sync(sums.keep, piece.mark, piece.sums)
                logger.info("%s is known by its sums", name, extra=fields(size_bytes=size_bytes))

    # -- segments of earlier daemons -----------------------------------------------------------------------------------

    def enter(self, found: Iterable[Piece], owned: Callable[[Key], bool]) -> None:
        """Add the segments that an earlier daemon left. Those that no operation owns are kept apart."""
        for piece in sorted(found, key=lambda one: -one.size_bytes):
            key = piece.name.key
            if self.ready.enter(piece):
                continue
            if owned(key) and key not in self._held:
                self._held[key] = piece
            else:
                self._unclaimed[str(piece.name)] = piece

    async def drop_unclaimed(self, name: str) -> int:
        """Return the bytes of an unclaimed segment to the node, and their number. Raises HegmError."""
        piece = self._orphan(name)
        async with piece.lock:
            self._orphan(name)  # another task may have claimed it meanwhile
            await self._forget(piece)
            self._unclaimed.pop(name, None)
        return piece.size_bytes

    async def beginning(self, name: str, size_bytes: int) -> bytes:
        """Return the first bytes of an unclaimed segment. Raises HegmError."""
        piece, spill = self._orphan(name), self.keep.spill
        if piece.memory is not None:
            return await anyio.to_thread.run_sync(os.pread, piece.memory.fd, size_bytes, 0)
        if spill is None:
            return b""
        return await anyio.to_thread.run_sync(spill.beginning, name, size_bytes)

    async def claim(self, name: str, key: Key) -> None:
        """Give an ownerless segment an owner. Raises HegmError; then the segment stays without an owner."""
        piece = self._orphan(name)
        new = piece.name.claimed_by(key)
        async with piece.lock:
            self._orphan(name)  # another task may have dropped it meanwhile
            if key in self._held:
                raise HegmError(
                    BUSY, f"{key.worker} in operation {key.operation} already has a segment", "run: hegmctl ops"
                )
            await anyio.to_thread.run_sync(self._rename, piece, str(new))
            if piece.memory is not None and piece.memory.place is None:
                await self._put(str(new), piece.memory)
                await self._drop(name)
            piece.name = new
            del self._unclaimed[name]
            self._held[key] = piece

    def _orphan(self, name: str) -> Piece:
        piece = self._unclaimed.get(name)
        if piece is None:
            raise HegmError(NOT_FOUND, f"there is no orphaned segment {name[:80]!r}", "run: hegmctl adopt")
        return piece

    # -- parts ---------------------------------------------------------------------------------------------------------

    async def _make_with_margin(self, key: Key, size_bytes: int, source: Source | None) -> tuple[PieceName, Memory]:
        """Return memory for a job that may grow until it is parked, or without a margin if there is none for it."""
        try:
            return await self._make_named(key, with_margin(size_bytes), size_bytes, source)
        except HegmError:
            if with_margin(size_bytes) == size_bytes:
                raise
            return await self._make_named(key, size_bytes, size_bytes, source)

    async def _make_named(
        self, key: Key, usable_bytes: int, asked_bytes: int, source: Source | None
    ) -> tuple[PieceName, Memory]:
        name = PieceName(key, usable_bytes, secrets.token_hex(NONCE_BYTES), source)
        return name, await self._make(name, whole_size(usable_bytes), asked_bytes)

    async def _make(
        self, name: PieceName, whole_bytes: int, asked_bytes: int, fill: Callable[[Memory], None] | None = None
    ) -> Memory:
        """Return memory within the budget that outlives the daemon. Raises HegmError."""
        key = name.key
        await self._request_memory(key, whole_bytes)
        async with self._taking:
            self._refuse_over_budget(key, asked_bytes, whole_bytes)
            limit_bytes = self.budget_bytes() - self._others_bytes(key) - whole_bytes
            self._coming[key] = whole_bytes
            try:
                memory = await self.ready.take(name, whole_bytes, fill, self.keep)
                await self.ready.give_back(self.ready.size_bytes - limit_bytes, self.keep)
                if memory is None:
                    memory = await self._make_new(name, whole_bytes, fill)
            finally:
                del self._coming[key]
        try:
            if memory.place is None:
                await self._put(str(name), memory)
        except BaseException:
            await self._give_back(Piece(name, whole_bytes, memory))
            raise
        logger.info(
            "pool holds %d MiB for %s in %s",
            whole_bytes // MIB,
            key.worker,
            memory.place or "nameless memory",
            extra=fields(size_bytes=whole_bytes, huge=memory.huge),
        )
        return memory

    async def _make_new(self, name: PieceName, whole_bytes: int, fill: Callable[[Memory], None] | None) -> Memory:
        await self.ready.pinning.unpin()
        huge, places = self._huge_free_bytes() >= whole_bytes, self.keep.places
        return await anyio.to_thread.run_sync(
            lambda: make_memory(name, whole_bytes, places=places, huge=huge, fill=fill)
        )

    async def _put(self, name: str, memory: Memory) -> None:
        """Have the store hold it. Without one the worker's own descriptor keeps its bytes if the daemon ends."""
        if self.keep.store is None:
            return
        try:
            await self.keep.store.put(name, memory.fd)
        except HegmError as error:
            logger.warning("%s lives by the descriptors of hegmd and its worker alone: %s", name, error.message)

    async def _drop(self, name: str) -> None:
        if self.keep.store is not None:
            await self.keep.store.drop(name)

    async def _write(self, folder: SpillFolder, piece: Piece, memory: Memory, progress: Progress) -> None:
        name = str(piece.name)
        piece.may_have_file = True
        try:
            with anyio.CancelScope() as piece.spilling:
                await write_out(folder, name, memory.fd, piece.size_bytes, progress, piece.sums)
                piece.spilled = True
        finally:
            piece.spilling = None
            if not piece.spilled:  # it may have been given up when the file was whole already
                with anyio.CancelScope(shield=True), contextlib.suppress(HegmError):
                    await anyio.to_thread.run_sync(folder.remove, name)
        if not piece.spilled:
            worker = piece.name.key.worker
            raise HegmError(
                CANCELLED,
                f"the bytes of {worker} were requested while they were being written to disk",
                "run: hegmctl ops",
            )
        logger.info("%s is on disk", name, extra=fields(size_bytes=piece.size_bytes))

    async def _compare(self, piece: Piece, memory: Memory, threads: int) -> None:
        """Raise HegmError unless the bytes equal those summed at suspension. Skipped if just compared."""
        known, worker = piece.sums, piece.name.key.worker
        if known is None or self.keep.sums is None or self._clock() - piece.compared_at < COMPARED_FOR_S:
            return
        size_bytes, whose = piece.size_bytes, f"the bytes of process {worker}"
        is_equal = await with_memory(
            memory.fd,
            lambda fd, is_over: compare(fd, size_bytes, known, is_over, whose, threads),
            name=str(piece.name),
            unwanted="is not compared any further",
        )
        if is_equal:
            piece.compared_at = self._clock()

    async def _forget_sums(self, piece: Piece) -> None:
        if piece.sums is not None and self.keep.sums is not None:
            await anyio.to_thread.run_sync(self.keep.sums.drop, piece.mark)
        piece.sums, piece.compared_at = None, -math.inf

    async def _give_back(self, piece: Piece) -> None:
        """Drop a segment that has no owner yet, cancelled or not."""
        with anyio.CancelScope(shield=True), contextlib.suppress(HegmError):
            await self._forget(piece)

    async def _forget(self, piece: Piece) -> None:
        await self._forget_memory(piece)
        await self._forget_file(piece)

    async def _forget_memory(self, piece: Piece) -> None:
        memory, name = piece.memory, str(piece.name)
        if memory is None:
            return
        await self._forget_sums(piece)
        if memory.place is None:
            await self._drop(name)
        piece.is_leaving = True
        try:
            self.ready.pinning.unpin_later(memory.fd)
            # Runs in a thread: freeing 32 GiB takes seconds.
            await anyio.to_thread.run_sync(memory.remove, name)
        except OSError as error:
            raise HegmError(
                UNAVAILABLE, f"{name} cannot be removed: {error.strerror or error}", "read the log of hegmd"
            ) from error
        finally:
            piece.is_leaving = False
        piece.memory = None

    async def _forget_file(self, piece: Piece) -> None:
        if piece.may_have_file:
            await anyio.to_thread.run_sync(self._folder().remove, str(piece.name))
            piece.spilled = piece.may_have_file = False

    def _rename(self, piece: Piece, new_name: str) -> None:
        old_name = str(piece.name)
        if piece.spilled:
            self._folder().rename(old_name, new_name)
        if piece.memory is not None and piece.memory.place is not None:
            try:
                piece.memory.place.rename(old_name, new_name)
            except OSError as error:
                if piece.spilled:
                    self._folder().rename(new_name, old_name)
                raise HegmError(
                    UNAVAILABLE, f"{old_name} cannot be renamed: {error.strerror or error}", "read the log of hegmd"
                ) from error

    def _folder(self) -> SpillFolder:
        if self.keep.spill is None:
            raise Refused("this daemon has no directory for bytes on disk", "set pool.spill_dir in its configuration")
        return self.keep.spill

    def _file_of(self, piece: Piece) -> str:
        return str(self._folder().path(str(piece.name)))

    async def _request_memory(self, key: Key, whole_bytes: int) -> None:
        missing_bytes = self._others_bytes(key) + whole_bytes - self.budget_bytes()
        if missing_bytes > 0 and self.free_memory is not None:
            await self.free_memory(missing_bytes)

    def _others_bytes(self, key: Key) -> int:
        known = self._held.get(key)
        return self.held_bytes - (0 if known is None else _memory_bytes(known))

    def _refuse_over_budget(self, key: Key, size_bytes: int, whole_bytes: int) -> None:
        others_bytes = self._others_bytes(key)
        budget_bytes = self.budget_bytes()
        if others_bytes + whole_bytes <= budget_bytes:
            return
        first = "raise" if self._given_budget_bytes else "free memory on the node, set"
        raise Refused(
            f"the pool may hold {budget_bytes // MIB} MiB, holds {others_bytes // MIB} MiB for others, and "
            f"{whole_bytes // MIB} MiB are needed",
            f"{first} pool.budget_bytes, resume a suspended job, or have it on disk with: hegmctl suspend --spill PID",
            {
                "budget_bytes": budget_bytes,
                "held_bytes": others_bytes,
                "asked_bytes": size_bytes,
                "needed_bytes": whole_bytes,
            },
        )


def _memory_bytes(piece: Piece) -> int:
    return 0 if piece.memory is None else piece.memory.size_bytes
