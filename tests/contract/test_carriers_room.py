"""Video memory that the host carrier holds beside everything else, where others need the room."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.gpu_helper.mark import MARK_BYTES
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PieceName
from hegmd.memory.pool_piece import Piece
from hegmd.migration.contracts import MigratedProcess, OutOfMemory
from hegmd.migration.machine.effects import Restore
from hegmd.migration.machine.events import Event, Failed, Restored
from hegmd.migration.methods.gpus import staging_in_owner, staging_out_owner
from hegmd.migration.methods.pool_keys import key_of
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.migration.run.executor import EffectExecutor
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from hegmd.workers.workers import OrderFailed
from tests.contract.carried import CarriedProcess, Moving, ignored
from tests.contract.helped import MIB, SIZE_BYTES
from tests.unit.migration.operations import operation, worker
from tests.unit.moving_node import start_ticks

OTHERS = "8.4712.rest"
# Less than what is held beside the job.
SOME_BYTES = 8 * MIB


@pytest.mark.thorough
async def test_memory_that_was_taken_in_time_was_used_when_others_had_taken_the_rest(moving: Moving) -> None:
    """The free memory was checked at reservation only; a minute later it was gone, and no check noticed."""
    async with moving() as job:
        await job.carrier.reserve(job.subject, SIZE_BYTES)
        assert job.held() == {staging_out_owner(job.subject)}
        await job.rig.memory.reserve(OTHERS, job.node.uuids[0], 5 * 1024 * MIB)
        await job.carrier.offload(job.subject, ignored)
        assert (job.marked(), job.held()) == (False, {OTHERS}), "straight to the pool, and the memory given back"
        await _given_back(job, 5 * 1024 * MIB)
        await job.put_back()


@pytest.mark.thorough
async def test_optional_copies_are_freed_before_a_request_is_refused(moving: Moving) -> None:
    async with moving() as job:
        memory, (here, there) = job.rig.memory, job.node.uuids
        memory.free_memory = job.carrier.free_memory
        await job.carrier.reserve(job.subject, SIZE_BYTES)
        assert not await job.carrier.free_memory(there)
        most_bytes = job.rig.owner.free_bytes() + SOME_BYTES
        await memory.reserve(OTHERS, here, most_bytes)
        assert job.held() == {OTHERS}
        await _given_back(job, most_bytes)
        await job.take_out()
        assert job.marked()
        most_bytes = job.rig.owner.free_bytes() + SOME_BYTES
        with pytest.raises(Refused, match="MiB free of the"):
            await memory.reserve(OTHERS, here, most_bytes)
        assert job.held() == {staging_out_owner(job.subject)}, "these are the only bytes there are"
        async with job.carrier.overlap_checkpoint(job.subject):
            pass
        async with job.carrier.overlap_restore(job.off):
            assert job.held() == {staging_in_owner(job.subject)}
        most_bytes = job.rig.owner.free_bytes() + SOME_BYTES
        await memory.reserve(OTHERS, here, most_bytes)
        assert job.held() == {OTHERS}
        await _given_back(job, most_bytes)
        await job.put_back()


async def _given_back(job: CarriedProcess, size_bytes: int) -> None:
    """Wait until the others have freed it; visible once the helper has closed its descriptors of it."""
    await job.rig.memory.release(OTHERS, job.node.uuids[0])
    while job.rig.owner.free_bytes() < size_bytes:
        await job.rig.link.call("devices", deadline_s=20)


@pytest.mark.thorough
async def test_no_memory_is_freed_for_an_optional_copy(moving: Moving) -> None:
    async with moving() as job:
        calls: list[str] = []

        async def free_memory(gpu: str) -> bool:
            calls.append(gpu)
            return False

        memory, here = job.rig.memory, job.node.uuids[0]
        memory.free_memory = free_memory
        with pytest.raises(Refused, match="MiB free of the"):
            await memory.reserve(OTHERS, here, 64 * 1024 * MIB, spare=True)
        assert not calls
        with pytest.raises(Refused, match="MiB free of the"):
            await memory.reserve(OTHERS, here, 64 * 1024 * MIB)
        assert calls == [here]


@pytest.mark.thorough
async def test_storages_get_the_memory_of_their_staging_copy_if_none_else_is_free(moving: Moving) -> None:
    """The job got the message that there is no room, while a copy of what is in the pool lay in it."""
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)
        async with job.carrier.overlap_restore(job.off):
            assert job.held() == {staging_in_owner(job.subject)}
        job.agent.crowded = 1
        await job.put_back()
        await job.suspend()
        job.agent.crowded = 1
        with pytest.raises(OrderFailed, match="there is no room"):
            await job.carrier.reload(job.off, ignored, lambda: nullcontext(lambda: False))
        await job.put_back()


class NeverEnoughMemory(SimulatedMethod):
    """Finds no room for a process as long as any is held beside it; what it was asked is in `asked`."""

    def __init__(self, job: CarriedProcess, *, ever: bool) -> None:
        super().__init__(SimulatedMemory(SimulatedProvider(parse_topology("1x64GiB"))))
        self.job = job
        self.ever = ever
        self.calls: list[str] = []

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        self.calls.append(f"hold {size_bytes}")

    async def restore(self, subject: MigratedProcess, gpu: str) -> None:
        self.calls.append("restore")
        if self.job.held() or self.ever:
            raise OutOfMemory("there is no room", "ask the test")


@pytest.mark.thorough
@pytest.mark.parametrize("ever", [False, True])
async def test_a_restore_without_memory_gets_that_of_the_staging_copy(moving: Moving, ever: bool) -> None:
    """The job reported that memory is missing, and rolled back, although its own staging copy held that memory."""
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)
        method = NeverEnoughMemory(job, ever=ever)
        performer = EffectExecutor(
            job.rig.workers, {"driver": method}, {job.carrier.name: job.carrier}, start_ticks=start_ticks
        )
        event = await _restored(performer, job)
        assert isinstance(event, Failed if ever else Restored), event
        assert method.calls == ["restore", f"hold {SIZE_BYTES}", "restore"]
        assert not job.held()
        await job.put_back()
        await job.suspend()
        method.calls.clear()
        method.ever = True
        assert isinstance(await _restored(performer, job), Failed)
        assert method.calls == ["restore"], "nothing was held beside it"
        await job.put_back()


async def _restored(performer: EffectExecutor, job: CarriedProcess) -> Event:
    who: dict[str, Any] = {"pid": job.subject.pid, "start_ticks": job.subject.start_ticks, "token": "a" * 32}
    member = worker(job.subject.name, "gpu0", method="driver", carrier="host", offloaded=True, **who)
    member = member.replace(gpu=None, previous_gpu="gpu0", size_bytes=SIZE_BYTES)
    op = operation(member, id=job.subject.operation)
    effect = Restore(number=1, worker=member.name, cause=1, gpu="gpu0")
    return await performer.perform(op, effect, ignored, performer.connection(member))


@pytest.mark.thorough
async def test_an_adoption_that_was_cut_off_left_bytes_that_were_refused_ever_after(moving: Moving) -> None:
    """A daemon was killed between adopting the job and moving its bytes to the pool. The segment then belonged to the
    new operation, its record named the old one's memory, and neither was found again.
    """
    async with moving() as job:
        await job.take_out()
        found = job.rig.pool.memory(key_of(job.subject))
        name = PieceName(key_of(job.subject), SIZE_BYTES, "ab").claimed_by(key_of(replace(job.off, operation="8")))
        after = name.claimed_by(key_of(replace(job.off, operation="9")))
        later = replace(job.off, operation="9")
        piece = Piece(after, found.size_bytes, Memory(os.dup(found.fd), found.size_bytes, huge=False))
        job.rig.pool.enter([piece], lambda key: key == key_of(later))
        assert job.rig.pool.was_claimed_from(key_of(job.subject)), "its video memory is no orphan"
        async with job.carrier.overlap_checkpoint(later) as passed:
            pass
        assert passed.size_bytes == SIZE_BYTES
        assert os.pread(found.fd, MARK_BYTES, found.size_bytes - MARK_BYTES)[:1] == b"\0"
        assert not job.held()
        await job.carrier.release(later)
        await job.put_back()
