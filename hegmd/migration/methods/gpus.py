"""The GPUs of the node for the methods: their names, their UUIDs, their free memory and a lock for each.

A caller that reserves or releases memory on a GPU holds its lock: otherwise one operation would take what another has
just released. Answers of a driver that has stopped answering are not used.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol

import anyio

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.memory.video_memory import Piece
from hegmd.migration.contracts import MigratedProcess
from hegmd.protocol.snapshots import Gpu, GpuProcess, Vendor

logger = logging.getLogger(__name__)

# Suffixes of owner names for memory that holds bytes: for peer, and for host on their way to the pool.
BYTES, PASSING = "bytes", "passing"


class Node(Protocol):
    """A snapshot of the node."""

    @property
    def gpus(self) -> Sequence[Gpu]: ...
    @property
    def processes(self) -> Sequence[GpuProcess]: ...
    @property
    def vendors(self) -> Sequence[Vendor]: ...


class VideoMemory(Protocol):
    """Video memory that is held by descriptor, by owner and by the GPU's UUID: `hegmd.memory.video_memory`."""

    async def reserve(self, who: str, gpu: str, size_bytes: int, *, spare: bool = False, start: int = 0) -> None: ...
    async def keep(self, who: str, gpu: str) -> bool: ...
    async def release(self, who: str, gpu: str) -> None: ...
    async def give_first(self, who: str, gpu: str, count: int) -> int: ...
    def of(self, who: str) -> Mapping[str, int]: ...
    def pieces(self, who: str, gpu: str) -> Sequence[Piece]: ...


class Gpus:
    """Reads the node through `snapshot`, never from an old result; `changed` is called when a value changes."""

    def __init__(self, snapshot: Callable[[], Awaitable[Node]], changed: Callable[[], object] = lambda: None) -> None:
        self._snapshot = snapshot
        self.changed = changed
        self._turns: dict[str, anyio.Lock] = {}
        self._names: dict[str, str] = {}

    async def node(self) -> Node:
        """The current state of the node. Raises HegmError when a driver does not answer: an old figure is none."""
        began = anyio.current_time()
        node = await self._snapshot()
        logger.debug("node: look took %.1f ms", (anyio.current_time() - began) * 1e3)
        for vendor in node.vendors:
            if vendor.state in {"stale", "failed"}:
                raise HegmError(
                    UNAVAILABLE,
                    f"the library of {vendor.vendor} does not answer: {vendor.message}",
                    "run: hegmctl doctor; hegmd acts only on its answer, and asks again",
                )
        self._names.update({gpu.uuid: gpu.id for gpu in node.gpus})
        return node

    async def gpu(self, name: str) -> Gpu:
        """Return the GPU of that name. Raises Refused if there is none."""
        found = next((gpu for gpu in (await self.node()).gpus if gpu.id == name), None)
        if found is None:
            raise Refused(
                f"{name} is no longer available", "check hegmctl gpus, and dmesg for a GPU that fell off the bus"
            )
        return found

    async def uuid_of(self, name: str) -> str:
        """Return the driver's UUID of the GPU, which is fixed while the daemon runs. Raises Refused."""
        known = next((uuid for uuid, known in self._names.items() if known == name), None)
        return known or (await self.gpu(name)).uuid

    def name_of(self, uuid: str) -> str:
        """Return the name of the GPU if it is known; otherwise its UUID."""
        return self._names.get(uuid, uuid)

    def turn(self, name: str) -> anyio.Lock:
        """Return the GPU's lock, held while memory there is reserved or passes to a process."""
        return self._turns.setdefault(name, anyio.Lock())

    @asynccontextmanager
    async def turns(self, names: Iterable[str]) -> AsyncGenerator[None]:
        """Hold the locks of all these GPUs, taken in sorted order."""
        async with AsyncExitStack() as held:
            for name in sorted(set(names)):
                await held.enter_async_context(self.turn(name))
            yield


def driver_owner(subject: MigratedProcess) -> str:
    return f"{subject.operation}.{subject.name}.rest"


def storage_owner(subject: MigratedProcess) -> str:
    return f"{subject.operation}.{subject.name}.storages"


def pool_owner(subject: MigratedProcess) -> str:
    """Under what name the memory is held that its bytes are in while they are out."""
    return bytes_name(subject.operation, subject.name, subject.start_ticks)


def bytes_name(operation: str, worker: str, start_ticks: int) -> str:
    """Return the owner name of that worker's bytes in that operation. It identifies the process without a journal."""
    return f"{operation}.{worker}.{BYTES}@{start_ticks}"


def staging_out_owner(subject: MigratedProcess) -> str:
    """Under what name the memory is held that its bytes go through on their way to the pool."""
    return passing_name(subject.operation, subject.name)


def passing_name(operation: str, worker: str) -> str:
    return f"{operation}.{worker}.{PASSING}"


def staging_in_owner(subject: MigratedProcess) -> str:
    """Return the owner name of memory for a copy of its bytes that arrives before it; the pool has them as well."""
    return f"{subject.operation}.{subject.name}.ahead"


def pairs_from(elsewhere: Sequence[str], to: Sequence[str], here: Sequence[str]) -> list[list[str]]:
    """Map the GPUs of another node to those of this one.

    `elsewhere` starts with the process's own GPUs, which are mapped to `to`. A GPU that exists on both nodes is mapped
    to itself if possible. GPUs without a partner are left out: a map that the driver rejects changes nothing.
    """
    own, others = elsewhere[: len(to)], elsewhere[len(to) :]
    left = [uuid for uuid in here if uuid not in to]
    spare = [uuid for uuid in left if uuid not in others]
    pairs = [list(pair) for pair in zip(own, to, strict=True)]
    for uuid in others:
        if uuid in left:
            pairs.append([uuid, uuid])
        elif spare:
            pairs.append([uuid, spare.pop(0)])
    return pairs
