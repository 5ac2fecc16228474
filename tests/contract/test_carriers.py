"""The carriers, each held to one contract: over the stub driver where the helper copies, over real memory elsewhere.

A contract that cannot fail proves nothing, so a broken carrier violates each of its promises once.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from hegmd.errors import HegmError
from hegmd.migration.carriers.driver import DriverCarrier
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.carriers.peer import PeerCarrier
from hegmd.migration.carriers.worker import WorkerCarrier
from hegmd.migration.contracts import Carrier, DriverOutOfMemory, Made, Making, MigratedProcess, Progress
from hegmd.protocol.messages import Order
from hegmd.workers.workers import Workers
from tests.contract.carried import POOL_BYTES, IpcAgent, Rig, pool_in, rigged
from tests.contract.helped import GIB, MIB, SIZE_BYTES, SIZES_MIB, Owner
from tests.kit.carriers import check_carrier
from tests.kit.contracts import ContractBroken
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode
from tests.unit.descriptor_store import DescriptorStore
from tests.unit.model_agent import ModelAgent
from tests.unit.moving_node import start_ticks


class CountingAgent(ModelAgent):
    """Copies by itself, and counts how often it brought its bytes back."""

    made = 0

    def _do(self, order: Order, fds: list[int]) -> None:
        self.made += order.do == "reload"
        super()._do(order, fds)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[CudaNode, Owner]]:
    node = CudaNode.make(tmp_path / "node")
    made = Owner(node, 0, *SIZES_MIB)
    yield node, made
    made.close()


def peer(rig: Rig) -> Carrier:
    return PeerCarrier(rig.link, rig.gpus, rig.memory, rig.pool)


def host(rig: Rig) -> Carrier:
    return HostCarrier(rig.link, rig.gpus, rig.pool, rig.memory)


@pytest.mark.thorough
@pytest.mark.parametrize("make", [peer, host], ids=lambda make: make.__name__)
async def test_carriers_with_helper_copies_keep_the_contract(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Callable[[Rig], Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The helper is killed while the bytes are out: they are held by descriptor, and the next one carries them."""
    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        agent = IpcAgent(rig.workers, rig.owner)
        subject = await rig.subject_of(agent)

        async def lose_the_helper(_: Carrier) -> None:
            rig.link.kill("the test says so")

        await check_carrier(
            make(rig),
            subject,
            size_bytes=SIZE_BYTES,
            too_many_bytes=64 * GIB,
            made=lambda: agent.made,
            while_out=lose_the_helper,
        )
        assert rig.owner.ask("digest") == rig.owner.digest


@pytest.mark.thorough
@pytest.mark.parametrize("make", [peer, host], ids=lambda make: make.__name__)
async def test_a_driver_without_memory_for_itself_does_not_fail_the_job_and_the_next_attempt_continues(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Callable[[Rig], Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """hegmd took the error for memory that cannot be exported, or for a broken driver, and the job stayed suspended."""

    @asynccontextmanager
    async def making() -> AsyncIterator[Made]:
        yield lambda: False

    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        node, carrier = owner[0], make(rig)
        subject = await rig.subject_of(IpcAgent(rig.workers, rig.owner))
        await carrier.reserve(subject, SIZE_BYTES)
        node.order("error cuIpcOpenMemHandle_v2 2")
        with pytest.raises(DriverOutOfMemory, match="no memory left to copy"):
            await carrier.offload(subject, lambda _: None)
        assert rig.owner.ask("digest") == rig.owner.digest
        node.mend()
        await carrier.offload(subject, lambda _: None)
        node.order("error cuIpcOpenMemHandle_v2 2")
        await carrier.reload(subject, lambda _: None, making)  # by the process's own copies, which need no more
        node.mend()
        assert rig.owner.ask("digest") == rig.owner.digest
        await carrier.release(subject)


class SlowStore(DescriptorStore):
    """Takes a descriptor only once the carrier has opened its copy session."""

    def __init__(self, carrier: PeerCarrier) -> None:
        super().__init__()
        self._carrier = carrier

    async def put(self, name: str, fd: int) -> None:
        while not self._carrier.routes:
            await anyio.lowlevel.checkpoint()
        await super().put(name, fd)


async def test_a_copy_session_is_opened_while_its_memory_is_stored(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes up to a tenth of a second, before a job stops."""
    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        carrier = PeerCarrier(rig.link, rig.gpus, rig.memory, rig.pool)
        store = rig.memory.store = SlowStore(carrier)
        subject = await rig.subject_of(IpcAgent(rig.workers, rig.owner))
        with anyio.fail_after(HANG_S):
            await carrier.reserve(subject, SIZE_BYTES)
        assert store.kept
        await carrier.release(subject)
        assert not store.kept


async def test_a_reservation_that_is_not_stored_leaves_no_copy_session(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        carrier = PeerCarrier(rig.link, rig.gpus, rig.memory, rig.pool)
        store = rig.memory.store = DescriptorStore()
        store.fails = True
        subject = await rig.subject_of(IpcAgent(rig.workers, rig.owner))
        with pytest.raises(HegmError, match="the store does not take"):
            await carrier.reserve(subject, SIZE_BYTES)
        assert (carrier.routes, carrier.held_bytes(subject)) == ({}, 0)
        store.fails = False
        await carrier.reserve(subject, SIZE_BYTES)
        await carrier.release(subject)


async def test_the_process_s_own_copies_keep_the_contract(tmp_path: Path) -> None:
    workers, pool = Workers(start_ticks), pool_in(tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = CountingAgent(workers, os.getpid(), data=os.urandom(3 * MIB))
        agent.parked, before = True, agent.data
        subject = await _plain(agent, tasks, workers)
        await check_carrier(
            WorkerCarrier(pool),
            subject,
            size_bytes=agent.size_bytes,
            too_many_bytes=2 * POOL_BYTES,
            made=lambda: agent.made,
        )
        assert agent.data == before
        tasks.cancel_scope.cancel()
    pool.close()


async def test_bytes_left_to_the_driver_keep_the_contract() -> None:
    subject = MigratedProcess("1", "1", 1, 1, gpu="gpu0", target_gpu="gpu1", previous_gpu=None)
    await check_carrier(DriverCarrier(), subject, size_bytes=0, too_many_bytes=0, made=lambda: 0)


class ReleasesMemoryTooEarly(WorkerCarrier):
    """Releases the memory as soon as no process is ready to copy."""

    async def abandon(self, subject: MigratedProcess) -> None:
        await self.release(subject)


class AllocatesWithoutReservation(WorkerCarrier):
    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        return await super().reload(subject, on_progress, lambda: nullcontext(lambda: False))


class OverstatesOffloadedBytes(WorkerCarrier):
    """Says that more was taken out than there is."""

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        return await super().offload(subject, on_progress) + 1


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (ReleasesMemoryTooEarly, "held bytes stay held while no process is ready to copy"),
        (AllocatesWithoutReservation, "0 of them where their room is seen to"),
        (OverstatesOffloadedBytes, "by its word"),
    ],
)
async def test_a_broken_promise_is_found(tmp_path: Path, kind: type[WorkerCarrier], says: str) -> None:
    workers, pool = Workers(start_ticks), pool_in(tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(workers.run)
        agent = CountingAgent(workers, os.getpid(), data=b"x" * MIB)
        agent.parked = True
        subject = await _plain(agent, tasks, workers)
        with pytest.raises(ContractBroken, match=says):
            await check_carrier(
                kind(pool), subject, size_bytes=agent.size_bytes, too_many_bytes=2 * POOL_BYTES, made=lambda: agent.made
            )
        tasks.cancel_scope.cancel()
    pool.close()


async def _plain(agent: ModelAgent, tasks: anyio.abc.TaskGroup, workers: Workers) -> MigratedProcess:
    await agent.attend(tasks)
    ticks = start_ticks(agent.pid)
    assert ticks is not None
    worker = workers.find(agent.pid)
    return MigratedProcess("1", "1", agent.pid, ticks, gpu="gpu0", target_gpu="gpu1", previous_gpu=None, agent=worker)
