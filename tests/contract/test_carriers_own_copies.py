"""The process copies itself what the helper cannot copy: every carrier brings every storage back, whatever fails.

Over the stub driver, which lets no process open memory that it has restored, as the real one does (800, 580.159.04).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hegmd.memory.pool import Key
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.carriers.peer import MIN_WINDOW_BYTES, PeerCarrier, windows
from hegmd.migration.contracts import Carrier, MigratedProcess
from tests.contract.carried import POOL_BYTES, IpcAgent, Rig, ignored, rigged
from tests.contract.helped import MIB, SIZE_BYTES, SIZES_MIB, Owner
from tests.stubs.cuda.node import CudaNode

STAYS = 1


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[tuple[CudaNode, Owner]]:
    node = CudaNode.make(tmp_path / "node")
    made = Owner(node, 0, *SIZES_MIB)
    assert made.ask(f"stay {STAYS}") == "staying"
    yield node, made
    made.close()


def peer(rig: Rig) -> Carrier:
    return PeerCarrier(rig.link, rig.gpus, rig.memory, rig.pool)


def host(rig: Rig) -> Carrier:
    return HostCarrier(rig.link, rig.gpus, rig.pool, rig.memory)


either = pytest.mark.parametrize("make", [peer, host], ids=lambda make: make.__name__)


@dataclass
class Job:
    """A process, one of whose storages lies in memory that never leaves it."""

    rig: Rig
    node: CudaNode
    agent: IpcAgent
    subject: MigratedProcess
    carrier: Carrier

    async def take_out(self) -> None:
        await self.carrier.reserve(self.subject, SIZE_BYTES)
        assert await self.carrier.offload(self.subject, ignored) == SIZE_BYTES

    async def change_gpus(self) -> None:
        """The driver takes the rest to the other GPU."""
        devices = (await self.rig.link.call("devices", deadline_s=20)).values["devices"]
        one, other = (device["uuid"] for device in devices)
        for op, more in (
            ("lock", {"timeout_s": 5}),
            ("checkpoint", {}),
            ("restore", {"pairs": [[one, other], [other, one]]}),
            ("unlock", {}),
        ):
            await self.rig.link.call(op, {"pid": self.agent.pid, **more}, deadline_s=20)
        self.subject = replace(self.subject, gpu="gpu1", previous_gpu="gpu0")

    async def put_back(self) -> None:
        counts: list[int] = []
        back_bytes = await self.carrier.reload(self.subject, counts.append, lambda: nullcontext(lambda: False))
        assert back_bytes == SIZE_BYTES
        assert counts == sorted(counts)
        assert counts[-1] == SIZE_BYTES
        self.is_whole()

    def is_whole(self) -> None:
        assert self.rig.owner.ask("digest") == self.rig.owner.digest


@asynccontextmanager
async def a_job(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Callable[[Rig], Carrier], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Job]:
    async with rigged(tmp_path, *owner, monkeypatch) as rig:
        agent = IpcAgent(rig.workers, rig.owner)
        job = Job(rig, owner[0], agent, await rig.subject_of(agent), make(rig))
        yield job
        job.is_whole()
        await job.carrier.release(job.subject)


@pytest.mark.thorough
@either
async def test_a_job_was_stuck_for_ever_whose_storage_lay_in_memory_that_the_driver_had_restored(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Callable[[Rig], Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 14, row 1: a cuDNN LSTM stayed parked forever after a migration by peer; every resume failed with 800."""
    async with a_job(tmp_path, owner, make, monkeypatch) as job:
        await job.take_out()
        await job.change_gpus()
        await job.put_back()
        assert job.agent.copied == [("in", STAYS)], "and the others go by the helper still"


@pytest.mark.thorough
@either
async def test_the_process_copies_a_storage_that_shares_memory_with_others_from_the_start(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Callable[[Rig], Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 14, row 1: predicted, so nothing is tried that the driver would refuse."""
    async with a_job(tmp_path, owner, make, monkeypatch) as job:
        job.agent.own = {STAYS}
        for _ in range(2):  # what was restored once is so the next time, too
            job.agent.copied.clear()
            await job.take_out()
            await job.change_gpus() if job.subject.gpu == "gpu0" else None
            await job.put_back()
            assert job.agent.copied == [("out", STAYS), ("in", STAYS)]
            await job.carrier.release(job.subject)


@pytest.mark.thorough
@either
async def test_a_job_whose_memory_cannot_be_opened_copies_it_itself_in_both_directions(
    tmp_path: Path, owner: tuple[CudaNode, Owner], make: Callable[[Rig], Carrier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 14, row 1: the same of a driver that refuses CUDA IPC for another reason, such as in some containers."""
    async with a_job(tmp_path, owner, make, monkeypatch) as job:
        job.node.order("error cuIpcOpenMemHandle_v2 800")
        await job.take_out()
        await job.put_back()
        everything = list(range(len(SIZES_MIB)))
        assert sorted({number for _, number in job.agent.copied}) == everything
        assert {way for way, _ in job.agent.copied} == {"out", "in"}


@pytest.mark.thorough
async def test_a_helper_that_fails_at_every_copy_left_a_suspended_job_where_it_was(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 14, row 1: its bytes are in the pool, from where the process brings them back without any helper."""
    async with a_job(tmp_path, owner, host, monkeypatch) as job:
        await job.take_out()
        async with job.carrier.overlap_checkpoint(job.subject):
            pass
        await job.carrier.abandon(job.subject)
        job.node.order("error cuDevicePrimaryCtxRetain 999")
        off = replace(job.subject, gpu=None, previous_gpu="gpu0", target_gpu="gpu0")
        await job.carrier.prepare(off)
        await job.put_back()
        job.node.mend()
        assert [way for way, _ in job.agent.copied] == ["in"] * len(SIZES_MIB)


@pytest.mark.thorough
async def test_bytes_in_gpu_staging_reach_the_pool_before_the_process_copies(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 14, row 1: a suspension that turned back; the process reaches the pool alone."""
    async with a_job(tmp_path, owner, host, monkeypatch) as job:
        job.subject = replace(job.subject, target_gpu=None)
        await job.take_out()
        assert job.carrier.is_staged(job.subject)
        job.node.order("error cuIpcOpenMemHandle_v2 800")
        await job.put_back()
        job.node.mend()
        assert not job.carrier.is_staged(job.subject)


@pytest.mark.thorough
async def test_bytes_go_through_a_small_window_if_the_pool_is_full(
    tmp_path: Path, owner: tuple[CudaNode, Owner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Issue 14, row 1: the bytes are in video memory, and no host memory is left to stage them."""
    async with a_job(tmp_path, owner, peer, monkeypatch) as job:
        full = Key("another", "1")
        await job.rig.pool.take(full, POOL_BYTES - 8 * MIB)
        await job.take_out()
        await job.change_gpus()
        await job.put_back()
        await job.rig.pool.release(full)
        parts = SIZES_MIB[STAYS] * MIB // MIN_WINDOW_BYTES
        assert job.agent.copied == [("in", STAYS)] * parts


def test_a_window_is_filled_to_its_end_and_every_byte_goes_through_it_once() -> None:
    spans = [(4, 0, 5, 512), (7, 0, 3, 1024), (9, 0, 12, 1536)]
    by_process = [span for part, _ in windows(spans, 8) for span in part]
    assert by_process == [(4, 0, 5, 0), (7, 0, 3, 5), (9, 0, 8, 0), (9, 8, 4, 0)]
    by_helper = [shift for _, part in windows(spans, 8) for shift in part]
    assert by_helper == [(512, 0, 5), (1024, 5, 3), (1536, 0, 8), (1544, 0, 4)]
