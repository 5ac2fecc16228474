"""One segment of the pool, and the means by which it outlives the daemon. Values only; the pool owns the rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import anyio

from hegmd.memory.descriptor_store import Store
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PieceName
from hegmd.memory.pool_places import PoolDirectory
from hegmd.memory.spill_file import SpillFolder


class MemoryKeeping(NamedTuple):
    """The places of segments: named memory, a store for nameless memory, a directory on disk; and checksums."""

    places: Sequence[PoolDirectory] = ()
    store: Store | None = None
    spill: SpillFolder | None = None
    sums: SumFolder | None = None


class Piece:
    """An owner's bytes: in memory, on disk, or temporarily in both. Only the pool changes it."""

    def __init__(
        self, name: PieceName, size_bytes: int, memory: Memory | None = None, *, spilled: bool = False
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.memory = memory
        #: True while a thread frees the memory: its descriptor may be closed by now.
        self.is_leaving = False
        self.spilled = spilled
        #: True if a copy to disk was ever started. An abandoned copy may still be complete, with its file on disk.
        self.may_have_file = spilled
        self.lock = anyio.Lock()
        #: The task that reads the memory while the job is suspended: a copy to disk or the checksums. It is cancelled
        #: when the job resumes.
        self.spilling: anyio.CancelScope | None = None
        #: The checksums of the chunks in memory, if they were computed since the last write, and when they were last
        #: compared since the job was suspended.
        self.sums: tuple[int, ...] | None = None
        self.compared_at = -math.inf

    @property
    def mark(self) -> str:
        """Return the nonce, which stays the same when the owner changes. Empty for a segment of an earlier release,
        which has none.
        """
        name = self.name
        return f"{name.usable_bytes}.{name.nonce}" if name.nonce else ""

    @property
    def usable_bytes(self) -> int:
        """Return how many bytes of storages fit. The rest is for the agent's table."""
        return self.name.usable_bytes
