"""The slots of a job in the pool: two for each of its processes, used in turn.

A slot is named by job, rank and number, so that a later daemon finds it. Its own record describes its contents, and
is read each time: the agent that writes it may be killed at any moment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.memory.pool import Key, Memory, Pool, Source
from hegmd.protocol.slots import RECORD_BYTES, SlotRecord, slot_bytes, unpacked

SLOTS = 2


class JobSlots:
    """Those of one job."""

    def __init__(self, pool: Pool, job: str) -> None:
        self._pool = pool
        self._job = job

    def key(self, rank: int, slot: int) -> Key:
        """Return the pool's key of that slot."""
        return Key(self._job, f"{rank}.{slot}")

    def held(self) -> Mapping[tuple[int, int], int]:
        """Return the bytes of each existing slot, by rank and slot."""
        pieces = self._pool.by_owner().items()
        found = {key.worker: piece.size_bytes for key, piece in pieces if key.operation == self._job}
        return {_place_of(name): size_bytes for name, size_bytes in sorted(found.items())}

    async def take(self, rank: int, slot: int, state_bytes: int, source: Source) -> Memory:
        """Hold memory for a state of that size. Raises Refused if the pool has none."""
        key = self.key(rank, slot)
        await self._pool.take(key, slot_bytes(state_bytes), source)
        return await self._pool.to_fill(key)

    async def memory(self, rank: int, slot: int) -> Memory:
        """Return the memory of a slot. Raises HegmError if it is gone."""
        key = self.key(rank, slot)
        await self._pool.fetch(key)
        return self._pool.memory(key)

    async def read(self) -> Mapping[tuple[int, int], SlotRecord | None]:
        """Return the record of each existing slot; None for one without a whole snapshot."""
        found: dict[tuple[int, int], SlotRecord | None] = {}
        for rank, slot in self.held():
            try:
                memory = await self.memory(rank, slot)
                data = await anyio.to_thread.run_sync(_record_of, memory)
                found[rank, slot] = unpacked(data)
            except (HegmError, OSError):
                found[rank, slot] = None
        return found

    async def release(self) -> int:
        """Give all of them back to the node; how many bytes. Raises HegmError."""
        freed_bytes = 0
        for (rank, slot), size_bytes in self.held().items():
            await self._pool.release(self.key(rank, slot))
            freed_bytes += size_bytes
        return freed_bytes


def _record_of(memory: Memory) -> bytes:
    return os.pread(memory.fd, RECORD_BYTES, os.fstat(memory.fd).st_size - RECORD_BYTES)


def _place_of(worker: str) -> tuple[int, int]:
    rank, _, slot = worker.partition(".")
    return int(rank), int(slot)


def by_rank(slots: Mapping[tuple[int, int], SlotRecord | None]) -> dict[int, list[SlotRecord]]:
    """Return the whole records of each rank."""
    found: dict[int, list[SlotRecord]] = {}
    for (rank, _slot), record in slots.items():
        if record is not None:
            found.setdefault(rank, []).append(record)
    return found
