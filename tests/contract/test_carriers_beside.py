"""The host carrier through GPU staging memory: concurrent with the driver's calls, and with kills on the way.

Tests prove where bytes are read from by corrupting the other copy.

Longer than 400 lines because all tests follow one job through offload and reload.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, pack_mark
from hegmd.memory.pool_memory import Memory
from hegmd.memory.pool_names import PieceName
from hegmd.memory.pool_piece import Piece
from hegmd.memory.video_memory import VideoMemory
from hegmd.migration.carriers.host import HostCarrier
from hegmd.migration.contracts import Made, MigratedProcess, ProcessState
from hegmd.migration.machine.effects import Inspect, Verify
from hegmd.migration.machine.events import Inspected, Verified
from hegmd.migration.methods.gpus import staging_in_owner, staging_out_owner
from hegmd.migration.methods.pool_keys import key_of
from hegmd.migration.methods.simulated import SimulatedMethod
from hegmd.migration.methods.simulated_memory import SimulatedMemory
from hegmd.migration.run.executor import EffectExecutor
from hegmd.node.devices.simulated import SimulatedProvider
from hegmd.node.devices.topology import parse_topology
from tests.contract.carried import CarriedProcess, Moving, ignored
from tests.contract.helped import MIB, SIZE_BYTES
from tests.patience import HANG_S
from tests.unit.descriptor_store import DescriptorStore
from tests.unit.migration.operations import operation, worker
from tests.unit.moving_node import start_ticks


@pytest.mark.thorough
async def test_bytes_pass_through_gpu_staging_and_are_in_the_pool_after_the_checkpoint(moving: Moving) -> None:
    async with moving() as job:
        await job.take_out()
        assert job.marked()
        assert job.carrier.staged(job.subject) is not None
        assert job.in_pool() == bytes(SIZE_BYTES), "not there yet"
        assert job.held() == {staging_out_owner(job.subject)}
        async with job.carrier.overlap_checkpoint(job.subject) as passed:
            assert job.carrier.is_staged(job.subject)
        assert passed.size_bytes == SIZE_BYTES
        assert (job.marked(), job.held()) == (False, set())
        async with job.carrier.overlap_checkpoint(job.off) as again:
            assert again.size_bytes == 0, "it is done"
        await job.carrier.abandon(job.off)
        await job.carrier.prepare(job.off)
        await job.put_back()


@pytest.mark.thorough
async def test_a_preparation_ahead_and_the_resume_share_one_copy_session(moving: Moving) -> None:
    """The second would close the session of the first, which may be copying."""
    async with moving() as job:
        await job.take_out()
        async with job.carrier.overlap_checkpoint(job.subject):
            pass
        await job.carrier.abandon(job.off)
        assert job.carrier.routes == {}
        found: list[object] = []

        async def prepare() -> None:
            await job.carrier.prepare(job.off)
            found.extend(job.carrier.routes.values())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(prepare)
            tasks.start_soon(prepare)
        assert len(set(map(id, found))) == 1
        await job.put_back()


@pytest.mark.thorough
async def test_a_suspension_waited_for_the_helpers_contexts_after_the_driver_was_done(moving: Moving) -> None:
    """The contexts are released during the driver's call. A job that returns soon, as with an image, keeps them."""
    async with moving() as job:
        for keeps_room in (True, False):
            await job.take_out()
            async with job.carrier.overlap_checkpoint(replace(job.subject, keeps_reservation=keeps_room)):
                pass
            assert bool(job.carrier.routes) is keeps_room
            await job.carrier.prepare(job.off)
            await job.put_back()


class HelperKeepsProcess(HostCarrier):
    """The helper does not release a process while this is set."""

    clings = False
    refused = 0

    async def abandon(self, subject: MigratedProcess) -> None:
        if self.clings:
            self.refused += 1
            raise HegmError(UNAVAILABLE, "the helper keeps its contexts", "ask again")
        await super().abandon(subject)


@pytest.mark.thorough
async def test_a_suspension_that_was_done_failed_by_a_helper_that_kept_its_contexts(moving: Moving) -> None:
    async with moving() as job:
        rig = job.rig
        carrier = job.carrier = HelperKeepsProcess(rig.link, rig.gpus, rig.pool, rig.memory)
        await job.take_out()
        carrier.clings = True
        async with carrier.overlap_checkpoint(replace(job.subject, keeps_reservation=False)):
            pass
        carrier.clings = False
        assert (carrier.refused, job.marked(), job.held()) == (1, False, set())
        await carrier.abandon(job.off)
        await carrier.prepare(job.off)
        await job.put_back()


@pytest.mark.thorough
async def test_staged_bytes_are_read_from_the_staging_memory(moving: Moving) -> None:
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)
        assert not job.held(), "others of the operation have yet to find room"
        async with job.carrier.overlap_restore(job.off) as ahead:
            assert job.held() == {staging_in_owner(job.subject)}
        assert ahead.size_bytes >= SIZE_BYTES
        staged = job.carrier.staged(job.subject)
        assert staged is not None
        await job.shifted()
        job.spoil_pool()
        await job.put_back()
        assert staged.took_s > 0
        assert job.carrier.staged(job.subject) is None


@pytest.mark.thorough
async def test_a_job_does_not_stay_parked_for_the_release_of_staging_memory_if_memory_is_plentiful(
    moving: Moving,
) -> None:
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)
        async with job.carrier.overlap_restore(job.off):
            pass
        await job.put_back(has_spare_memory=True)


@pytest.mark.thorough
async def test_a_failed_restore_gets_the_memory_reserved_next_to_it(moving: Moving) -> None:
    """It may have been what was missing. A copy that fails is no failure of the restore, nor of what comes after."""
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)

        async def restore() -> None:
            async with job.carrier.overlap_restore(job.off):
                assert job.held() == {staging_in_owner(job.subject)}
                raise Refused("no room", "ask the test")

        with pytest.raises(Refused, match="no room"):
            await restore()
        assert not job.held()
        await job.carrier.prepare(job.off)
        job.node.order("error cuMemcpyHtoDAsync_v2 1")
        async with job.carrier.overlap_restore(job.off):
            pass
        with pytest.raises(DriverFailed, match="cuMemcpyHtoDAsync"):
            await job.shifted()
        job.node.mend()
        await job.put_back()


@pytest.mark.thorough
async def test_other_memory_on_the_same_route_does_not_count_as_staged(moving: Moving) -> None:
    async with moving() as job:
        await job.settle()
        await job.carrier.prepare(job.off)
        async with job.carrier.overlap_restore(job.off):
            pass
        await job.shifted()
        await job.rig.memory.reserve(staging_out_owner(job.subject), job.node.uuids[0], SIZE_BYTES)
        await job.carrier.prepare(job.off)  # that is attached now
        await job.put_back()


@pytest.mark.thorough
async def test_memory_was_released_before_the_staging_copy_into_it_had_ended(moving: Moving, gate: Path) -> None:
    """A restore that failed had five seconds for it, and was cut off while it waited for the end."""
    async with moving() as job:
        await job.settle()
        await job.carrier.prepare(job.off)
        job.node.order(f"hold cuMemcpyHtoDAsync_v2 {gate}")
        async with job.carrier.overlap_restore(job.off):
            held = await anyio.to_thread.run_sync(os.open, gate, os.O_WRONLY)  # returns when it has begun
        job.node.mend()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.carrier.abandon, job.off)
            with anyio.move_on_after(HANG_S):
                while job.held():
                    await anyio.lowlevel.checkpoint()
            left = job.held()
            os.close(held)
        assert not left
        await job.put_back()


@pytest.mark.thorough
async def test_staged_copies_of_another_daemon_are_not_read(moving: Moving) -> None:
    """Nor what this one had, once the helper is another."""
    async with moving() as job:
        await job.settle()
        right = job.in_pool()
        for end in ("daemon", "helper"):
            await job.carrier.prepare(job.off)
            job.spoil_pool()
            async with job.carrier.overlap_restore(job.off):
                pass
            await job.shifted()
            job.put_in_pool(right)
            if end == "helper":
                job.rig.link.kill("the test says so")
                continue
            job.carrier = HostCarrier(job.rig.link, job.rig.gpus, job.rig.pool, job.rig.memory)
        await job.put_back()


@pytest.mark.thorough
async def test_a_failed_checkpoint_refills_the_storages_from_the_staging_copy(moving: Moving) -> None:
    async with moving() as job:
        await job.take_out()
        job.node.order("error cuMemcpyDtoHAsync_v2 1")
        with pytest.raises(HegmError, match="cuMemcpyDtoHAsync"):
            async with job.carrier.overlap_checkpoint(job.subject):
                pass
        assert job.marked()
        job.node.mend()
        with pytest.raises(Refused, match="the driver does not"):
            async with job.carrier.overlap_checkpoint(job.subject):
                raise Refused("the driver does not want to", "ask the test")
        job.spoil_pool()
        await job.put_back()


@pytest.mark.thorough
@pytest.mark.parametrize("dies", ["helper", "daemon"])
async def test_a_daemon_killed_during_staging_leaves_the_bytes_to_the_next(
    moving: Moving, gate: Path, dies: str
) -> None:
    store = DescriptorStore()
    async with moving() as job:
        job.rig.memory.store = store
        await job.take_out()
        job.node.order(f"hold cuMemcpyDtoHAsync_v2 {gate}")
        async with anyio.create_task_group() as tasks:

            async def settle() -> None:
                async with job.carrier.overlap_checkpoint(job.subject):
                    pass

            tasks.start_soon(settle)
            held = await anyio.to_thread.run_sync(os.open, gate, os.O_WRONLY)  # returns when it has begun
            job.node.mend()
            if dies == "daemon":
                tasks.cancel_scope.cancel()
            job.rig.link.kill("the test says so")
            os.close(held)
        if dies == "daemon":
            assert job.marked()
            job.rig.memory.close()
            fresh = VideoMemory(job.rig.link, store)
            for name, fd in await store.found():
                assert fresh.adopt(name, fd)
            job.rig.memory = fresh
            job.carrier = HostCarrier(job.rig.link, job.rig.gpus, job.rig.pool, fresh)
            async with job.carrier.overlap_checkpoint(job.off):
                pass
        assert (job.marked(), job.held(), store.kept) == (False, set(), {})
        await job.put_back()


@pytest.mark.thorough
async def test_bytes_of_lost_video_memory_are_not_read_from_the_pool(moving: Moving) -> None:
    """The pool had pages of zeros for them, in a file that outlives a node's service manager."""
    async with moving() as job:
        await job.take_out()
        job.rig.memory.close()
        job.carrier = HostCarrier(job.rig.link, job.rig.gpus, job.rig.pool, job.rig.memory)
        with pytest.raises(Refused, match="the staging copy with the bytes of process"):
            await job.put_back()
        with pytest.raises(Refused, match="the staging copy with the bytes of process"):
            async with job.carrier.overlap_checkpoint(job.off):
                pass
        await job.carrier.release(job.subject)


@pytest.mark.thorough
@pytest.mark.parametrize(("taken_mib", "passes"), [(5632, False), (3686, True)])
async def test_bytes_go_directly_to_the_pool_and_back_without_gpu_staging_memory(
    moving: Moving, taken_mib: int, passes: bool
) -> None:
    """Two GiB are left to others; beside a restore, which asks for these by itself, as much again."""
    async with moving() as job:
        memory, gpu = job.rig.memory, job.node.uuids[0]
        await memory.reserve("others", gpu, taken_mib * MIB)
        await job.take_out()
        assert job.marked() is passes
        async with job.carrier.overlap_checkpoint(job.subject) as passed:
            pass
        assert passed.size_bytes == (SIZE_BYTES if passes else 0)
        await job.carrier.prepare(job.off)
        async with job.carrier.overlap_restore(job.off) as ahead:
            assert job.held() == {"others"}
        assert ahead.size_bytes == 0
        await memory.release("others", gpu)
        await job.put_back()


@pytest.mark.thorough
async def test_unusable_reserved_memory_is_released(moving: Moving) -> None:
    async with moving() as job:
        await job.carrier.reserve(job.subject, SIZE_BYTES)
        assert job.held() == {staging_out_owner(job.subject)}
        await job.carrier.abandon(job.subject)
        assert not job.held()
        await job.carrier.reserve(job.subject, SIZE_BYTES)
        job.rig.link.kill("the test says so")
        job.node.order("error cuMemMap 2")
        await job.carrier.offload(job.subject, ignored)
        assert (job.marked(), job.held()) == (False, set())
        job.node.mend()
        await job.put_back()


@pytest.mark.thorough
async def test_a_mark_that_names_another_jobs_video_memory_has_nothing_read_from_it(moving: Moving) -> None:
    """A job can write to its piece, and so could who made the image that it came from."""
    async with moving() as job:
        victim, uuid = "7.4321.bytes", job.node.uuids[0]
        await job.rig.memory.reserve(victim, uuid, SIZE_BYTES)
        await job.settle()
        memory = job.rig.pool.memory(key_of(job.subject))
        forged = pack_mark(Mark(victim, SIZE_BYTES))
        os.pwrite(memory.fd, forged, memory.size_bytes - MARK_BYTES)
        with pytest.raises(Refused, match=r"7\.4321\.bytes', which is not its own"):
            await job.put_back()
        with pytest.raises(Refused, match="not its own"):
            async with job.carrier.overlap_checkpoint(job.off):
                pass
        await job.carrier.release(job.subject)
        assert job.held() == {victim}, "not given back either"
        await job.rig.memory.release(victim, uuid)


@pytest.mark.thorough
async def test_bytes_in_flight_of_a_lost_operation_belong_to_the_operation_that_claims_them(moving: Moving) -> None:
    async with moving() as job:
        await job.take_out()
        found = job.rig.pool.memory(key_of(job.subject))
        name = PieceName(key_of(job.subject), SIZE_BYTES, "ab")
        piece = Piece(name, found.size_bytes, Memory(os.dup(found.fd), found.size_bytes, huge=False))
        job.rig.pool.enter([piece], lambda _: False)
        later = replace(job.off, operation="9")
        await job.rig.pool.claim(str(name), key_of(later))
        async with job.carrier.overlap_checkpoint(later) as passed:
            pass
        assert passed.size_bytes == SIZE_BYTES
        assert (job.marked(), job.held()) == (False, set())
        await job.carrier.release(later)
        await job.put_back()


class Books(SimulatedMethod):
    """A method that says of the process that it is off its GPU, whatever else is so."""

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        return ProcessState(gpu=None)


def _performer(job: CarriedProcess, books: type[Books] = Books) -> EffectExecutor:
    simulated = SimulatedMemory(SimulatedProvider(parse_topology("1x1GiB")))
    carriers = {job.carrier.name: job.carrier}
    return EffectExecutor(job.rig.workers, {"driver": books(simulated)}, carriers, start_ticks=start_ticks)


class SilentDriver(Books):
    """A driver that does not report a restore in progress."""

    async def verify(self, subject: MigratedProcess) -> None:
        raise Refused("nothing can be seen", "ask again")


@pytest.mark.thorough
@pytest.mark.parametrize("books", [Books, SilentDriver])
async def test_a_resumed_job_gets_the_memory_that_was_still_reserved(moving: Moving, books: type[Books]) -> None:
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)
        async with job.carrier.overlap_restore(job.off):
            pass
        await job.carrier.reload(job.subject, ignored, lambda: nullcontext(lambda: True))
        assert job.held() == {staging_in_owner(job.subject)}
        performer = _performer(job, books)
        who: dict[str, Any] = {"pid": job.subject.pid, "start_ticks": job.subject.start_ticks, "token": ""}
        member = worker(job.subject.name, "gpu0", method="driver", carrier="host", **who)
        op = operation(member, id=job.subject.operation)
        event = await performer.perform(op, Verify(number=1, worker=member.name, cause=1, beyond=0), ignored, None)
        assert isinstance(event, Verified) is (books is Books), event
        assert not job.held()
        await job.carrier.release(job.subject)


@pytest.mark.thorough
async def test_a_kept_context_has_its_copy_session_before_it_resumes(moving: Moving) -> None:
    """Opening it took a turn of two jobs 40 ms while none of them trained."""
    async with moving() as job:
        await job.suspend()
        who: dict[str, Any] = {"pid": job.subject.pid, "start_ticks": job.subject.start_ticks, "token": "a" * 32}
        out: dict[str, Any] = {"carrier": "host", "offloaded": True, "gpu": None, "previous_gpu": "gpu0", **who}
        performer = _performer(job)
        whole = worker(job.subject.name, None, method="driver", **out)
        await performer.prepare_ahead(operation(whole, id=job.subject.operation), whole)
        assert job.carrier.routes == {}, "a job without a context may resume on any GPU"
        kept = worker(job.subject.name, None, method="keep-context", **out)
        op = operation(kept, id=job.subject.operation)
        await performer.prepare_ahead(op, kept)
        (route,) = job.carrier.routes.values()
        await job.carrier.prepare(job.off)
        assert list(job.carrier.routes.values()) == [route]
        await performer.undo_preparation(op, kept)
        assert job.carrier.routes == {}
        await job.carrier.release(job.subject)


@pytest.mark.thorough
async def test_an_untrusted_location_record_does_not_matter_once_the_bytes_are_reloaded(moving: Moving) -> None:
    async with moving() as job:
        await job.suspend()
        await job.carrier.prepare(job.off)
        memory = job.rig.pool.memory(key_of(job.subject))

        @asynccontextmanager
        async def making() -> AsyncGenerator[Made]:
            yield lambda: True
            os.pwrite(memory.fd, pack_mark(Mark("7.4321.bytes", SIZE_BYTES)), memory.size_bytes - MARK_BYTES)

        assert await job.carrier.reload(job.subject, ignored, making) == SIZE_BYTES
        assert job.rig.owner.ask("digest") == job.rig.owner.digest
        await job.carrier.release(job.subject)


@pytest.mark.thorough
@pytest.mark.parametrize("is_copied", [False, True])
async def test_recovery_copies_staged_bytes_of_a_checkpointed_process_to_the_pool(
    moving: Moving, is_copied: bool
) -> None:
    """A daemon was killed during the copy, and the next one found the job suspended: off its GPU, which was full. Or
    the copy was complete, and the descriptor store still held the staging memory without a location record.
    """
    async with moving() as job:
        await job.take_out()
        if is_copied:
            async with job.carrier.overlap_checkpoint(job.subject):
                pass
            await job.rig.memory.reserve(staging_out_owner(job.subject), job.node.uuids[0], SIZE_BYTES)
        performer = _performer(job)
        who: dict[str, Any] = {"pid": job.subject.pid, "start_ticks": job.subject.start_ticks, "token": "a" * 32}
        member = worker(job.subject.name, None, method="driver", carrier="host", offloaded=True, **who)
        op = operation(member, id=job.subject.operation)
        event = await performer.perform(op, Inspect(number=1, worker=member.name, cause=1), ignored, None)
        assert isinstance(event, Inspected), event
        assert (event.gpu, event.out_bytes) == (None, SIZE_BYTES)
        assert (job.marked(), job.held()) == (False, set())
        await job.put_back()
