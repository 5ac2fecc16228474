"""One piece of the pool, and the means by which it outlives the daemon: values for the pool, which owns the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import anyio

from hegmd.memory.descriptor_store import Store
from hegmd.memory.pool_checksums import SumFolder
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PieceName
from hegmd.memory.pool_places import Place
from hegmd.memory.spill_file import SpillFolder


@dataclass(frozen=True, slots=True)
class MemoryKeeping:
    """Where pieces can be: places with names, a store for what has none, a directory on disk. And where sums are."""

    places: Sequence[Place] = ()
    store: Store | None = None
    spill: SpillFolder | None = None
    sums: SumFolder | None = None


class Piece:
    """One owner's bytes: in memory, on disk, or for a while in both. Only the pool changes it."""

    def __init__(
        self, name: PieceName, size_bytes: int, memory: Memory | None = None, *, spilled: bool = False
    ) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self.memory = memory
        self.spilled = spilled
        #: Whether one was ever begun: a copy that was dropped may be whole, and its file be there, all the same.
        self.may_have_file = spilled
        self.lock = anyio.Lock()
        #: What reads it while it rests, and ends as soon as it is wanted: a copy to disk, or the taking of its sums.
        self.spilling: anyio.CancelScope | None = None
        #: The sums of its chunks in memory, if they were taken since it was written, and whether it was compared with
        #: them since it came to rest.
        self.sums: tuple[int, ...] | None = None
        self.compared = False

    @property
    def mark(self) -> str:
        """What is its own, whoever owns it or did before; empty for one of an earlier release, which has no nonce."""
        name = self.name
        return f"{name.usable_bytes}.{name.nonce}" if name.nonce else ""

    @property
    def usable_bytes(self) -> int:
        """How many bytes of storages it was made for; the rest is for the agent's table."""
        return self.name.usable_bytes
