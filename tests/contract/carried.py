"""Shared parts of the carriers' tests: a stub node with a process, its agent that exports its memory, and a migrating
job.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from hegmd.gpu_helper.link import Link
from hegmd.gpu_helper.mark import MARK_BYTES, read_mark
from hegmd.memory.pool import MemoryKeeping, Pool
from hegmd.memory.pool_places import PoolDirectory as PoolPlace
from hegmd.memory.spill_file import SpillFolder
from hegmd.memory.video_memory import VideoMemory
from hegmd.migration.carriers.copying import lane_of
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.contracts import MigratedProcess
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.pool_keys import key_of
from hegmd.protocol.agents import NO_HANDLE, packed, unpacked_spans
from hegmd.protocol.messages import Order
from hegmd.workers.workers import Workers
from tests.contract.driven import driven, in_force
from tests.contract.helped import MIB, SIZE_BYTES, SIZES_MIB, Owner
from tests.stubs.cuda.node import CudaNode
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import start_ticks

POOL_BYTES = 64 * MIB


class IpcAgent(ModelAgent):
    """Shows the video memory of a process that it drives from outside, frees it and makes it again."""

    def __init__(self, workers: Workers, owner: Owner) -> None:
        super().__init__(workers, owner.pid)
        self.owner = owner
        self.size_bytes = SIZE_BYTES
        self.made = 0
        #: How often it finds no room for its storages.
        self.crowded = 0
        #: Whether it is of a release that knows nothing of packed places.
        #: The storages that it shows no handle of, and those that it copied itself, each way.
        self.own: set[int] = set()
        #: The UUIDs of its GPUs, if it is on several: its storages lie on them in turn.
        self.gpus: tuple[str, ...] = ()
        self.copied: list[tuple[str, int]] = []

    async def _obey(self, key: object, order: Order, fds: list[int]) -> None:
        assert bool(fds) is (order.do == "copy")
        assert order.do in {"export", "free", "make", "filled", "copy"}
        if order.do == "make" and self.crowded:
            self.crowded -= 1
            self._report(key, order, "failed", message="there is no room", hint="ask the test", lacks_bytes=SIZE_BYTES)
            return
        if order.do == "copy":
            self._copy(order, fds[0])
        self._report(key, order, "done", **self._answer(order))

    def _copy(self, order: Order, fd: int) -> None:
        """Copy by the process itself, which opens the memory it was given."""
        for span in unpacked_spans(order.spans or b""):
            self.copied.append((str(order.direction), span[0]))
            words = " ".join(map(str, span))
            assert self.owner.ask(f"copy {order.direction} /proc/{os.getpid()}/fd/{fd} {words}") == "copied"
        os.close(fd)

    def _answer(self, order: Order) -> dict[str, Any]:
        do = order.do
        if do == "copy":
            return {}
        if do == "free":
            assert self.owner.ask("free") == "freed"
            return {"size_bytes": SIZE_BYTES, "storages": len(SIZES_MIB)}
        if do == "filled":
            return {"held_bytes": 0}
        if do == "make":
            self.made += 1
            assert self.owner.ask("make") == "made"
            assert self.owner.ask("digest") != self.owner.digest, "the bytes never left"
        spots = [(number, 0, mib * MIB) for number, mib in enumerate(SIZES_MIB)]
        shown: dict[str, Any] = {"handles": tuple(self.owner.handles()), "first": 0, "at_bytes": 0, "left": 0}
        if self.gpus:
            shown |= {"gpus": self.gpus, "devices": bytes(spot[0] % len(self.gpus) for spot in spots)}
        spots = [(NO_HANDLE if spot[0] in self.own and order.partly else spot[0], *spot[1:]) for spot in spots]
        return {**shown, "places": packed(spots)}


@dataclass
class Rig:
    """The parts for carriers, on a stub node with one process on its first GPU."""

    link: Link
    gpus: Gpus
    memory: VideoMemory
    pool: Pool
    workers: Workers
    tasks: anyio.abc.TaskGroup
    owner: Owner

    async def subject_of(self, agent: ModelAgent) -> MigratedProcess:
        await agent.attend(self.tasks)
        ticks = start_ticks(agent.pid)
        assert ticks is not None
        about: dict[str, Any] = {
            "gpu": "gpu0",
            "target_gpu": "gpu1",
            "previous_gpu": None,
            "size_bytes": agent.size_bytes,
        }
        return MigratedProcess("1", str(agent.pid), agent.pid, ticks, agent=self.workers.find(agent.pid), **about)


@asynccontextmanager
async def rigged(tmp_path: Path, node: CudaNode, owner: Owner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    scenario = in_force(node, tmp_path, monkeypatch)
    workers, pool = Workers(start_ticks), pool_in(tmp_path)
    async with driven(node, scenario) as parts, anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        yield Rig(parts.link, parts.gpus, parts.memory, pool, workers, tasks, owner)
        assert parts.memory.by_owner() == {}
        tasks.cancel_scope.cancel()
    pool.close()


def pool_in(folder: Path) -> Pool:
    """In pages of any size, which `pwrite` wants."""
    spill = SpillFolder(folder / "spill", spare_bytes=0)
    return Pool(POOL_BYTES, keep=MemoryKeeping([PoolPlace(folder / "memory", huge=False)], None, spill))


def ignored(_: int) -> None:
    """How far it is."""


class CarriedProcess:
    """A process whose bytes the host carrier offloads and reloads, on its own GPU."""

    def __init__(self, rig: Rig, node: CudaNode, subject: MigratedProcess, agent: IpcAgent) -> None:
        self.rig = rig
        self.node = node
        self.agent = agent
        self.subject = subject
        self.carrier = HostCarrier(rig.link, rig.gpus, rig.pool, rig.memory)

    @property
    def off(self) -> MigratedProcess:
        """As it is after its checkpoint."""
        return replace(self.subject, gpu=None, previous_gpu="gpu0", target_gpu="gpu0")

    def held(self) -> set[str]:
        return {who for who, _ in self.rig.memory.by_owner()}

    def marked(self) -> bool:
        memory = self.rig.pool.memory(key_of(self.subject))
        return read_mark(os.pread(memory.fd, MARK_BYTES, memory.size_bytes - MARK_BYTES)) is not None

    def in_pool(self) -> bytes:
        return os.pread(self.rig.pool.memory(key_of(self.subject)).fd, SIZE_BYTES, 0)

    def put_in_pool(self, data: bytes) -> None:
        os.pwrite(self.rig.pool.memory(key_of(self.subject)).fd, data, 0)

    def spoil_pool(self) -> None:
        self.put_in_pool(bytes(SIZE_BYTES))

    async def take_out(self) -> None:
        await self.carrier.reserve(self.subject, SIZE_BYTES)
        assert await self.carrier.offload(self.subject, ignored) == SIZE_BYTES

    async def settle(self) -> None:
        """Taken out, and in the pool."""
        await self.take_out()
        async with self.carrier.overlap_checkpoint(self.subject):
            pass

    async def suspend(self) -> None:
        """The same, and nothing in the helper has to do with it."""
        await self.settle()
        await self.carrier.abandon(self.off)

    async def shifted(self) -> None:
        """Its early copy has ended."""
        await self.rig.link.call("shifted", {"lane": lane_of(self.subject)}, deadline_s=20)

    async def put_back(self, *, has_spare_memory: bool = False) -> None:
        """Into the storages, and everything is given back: with plenty of room when it continues, else before."""
        back_bytes = await self.carrier.reload(self.subject, ignored, lambda: nullcontext(lambda: has_spare_memory))
        assert back_bytes == SIZE_BYTES
        assert self.rig.owner.ask("digest") == self.rig.owner.digest
        assert bool(self.held()) is has_spare_memory
        await self.carrier.resumed(self.subject)
        assert not self.held(), "its GPU has room for it as soon as it has its bytes"
        await self.carrier.release(self.subject)


@asynccontextmanager
async def moved(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[CarriedProcess]:
    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        agent = IpcAgent(rig.workers, rig.owner)
        subject = await rig.subject_of(agent)
        yield CarriedProcess(rig, owner[0], replace(subject, target_gpu=None), agent)


#: A job, for the length of a block that a test's own task opens: a task group ends where it began.
Moving = Callable[[], AbstractAsyncContextManager[CarriedProcess]]
