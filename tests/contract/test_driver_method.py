"""The moment of a restore by the driver, over its stub: other processes on that GPU, and interrupted restores.

Longer than 400 lines because all tests follow a reservation from before the restore until the job resumes.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost
from hegmd.memory.sizes import CALM_BYTES
from hegmd.migration.contracts import GrewBeyondPlan, MigratedProcess, OutOfMemory
from hegmd.migration.methods.driver import DriverMethod
from hegmd.migration.methods.driver_calls import Steps
from hegmd.migration.methods.gpus import Gpus, driver_owner, pairs_from, storage_owner
from hegmd.migration.methods.other_processes import FILE_NAME
from hegmd.node.inventory import NodeSnapshot
from tests.cells import in_one_test
from tests.contract.driven import REST_BYTES, Parts, Rig, rigged, standing_in
from tests.contract.helped import GIB, MIB, Owner, ask
from tests.patience import HANG_S
from tests.unit.moving_node import start_ticks


@pytest.mark.thorough
async def test_a_rank_stays_locked_until_it_is_unlocked_or_checkpointed(parts: Parts) -> None:
    """Another rank of its job may be on its way off; one that needs more than is on disk is known before that."""
    async with rigged(parts) as rig:
        rank = replace(rig.subject, stays_locked=True)
        await rig.method.lock(rank)
        assert (await rig.method.inspect(rank)).locked
        assert await rig.state(rig.moved) == "locked"
        await rig.method.unlock(rank)
        assert await rig.state(rig.moved) == "running"
        with pytest.raises(GrewBeyondPlan):
            await rig.method.lock(replace(rank, driver_bytes=MIB))
        assert await rig.state(rig.moved) == "running"
        stays = replace(rank, driver_bytes=MIB, target_gpu="gpu0")
        await rig.method.lock(stays)
        await rig.method.unlock(stays)
        await rig.method.lock(rank)
        await rig.method.reserve(rank, "gpu1", REST_BYTES)
        await rig.method.checkpoint(rank)
        await rig.method.restore(replace(rank, gpu=None, previous_gpu="gpu0"), "gpu1")
        assert not (await rig.method.inspect(replace(rank, gpu="gpu1"))).locked
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_a_repeated_checkpoint_reports_the_reservation(parts: Parts) -> None:
    async with rigged(parts) as rig:
        await rig.method.reserve(rig.subject, "gpu1", REST_BYTES)
        first = await rig.method.checkpoint(rig.subject)
        again = await rig.method.checkpoint(rig.subject)
        held_bytes = rig.method.reservations(replace(rig.subject, gpu=None))["gpu0"]
        assert first.reserved_bytes is not None
        assert again.reserved_bytes == held_bytes >= first.reserved_bytes > 0


@pytest.mark.thorough
async def test_ranks_that_take_one_anothers_gpu_reserve_it_when_they_have_left(parts: Parts) -> None:
    """The checkpoint of a rank made sure of its target once more, where the other rank still was."""
    async with rigged(parts) as rig:
        rank = replace(rig.subject, stays_locked=True, reserves_late=True)
        await rig.method.lock(rank)
        await rig.method.checkpoint(rank)
        off = replace(rank, gpu=None, previous_gpu="gpu0")
        assert "gpu1" not in rig.method.reservations(off)
        await rig.method.reserve(off, "gpu1", REST_BYTES)
        await rig.method.restore(off, "gpu1")
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_with_plenty_free_other_processes_are_paused_too_during_the_handover(parts: Parts, gate: Path) -> None:
    """Once no process was paused with 2 GiB free, and another process took 6 GiB between the check and the call."""
    async with rigged(parts) as rig:
        off = await rig.take_off()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.method.restore, off, "gpu1")
            async with standing_in(rig, "cuCheckpointProcessRestore", gate):
                await rig.stands(rig.other)
        assert [await rig.state(owner) for owner in (rig.moved, rig.other)] == ["running", "running"]
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["the operation is cut off", "the helper is killed"])
async def test_an_interrupted_restore_keeps_other_processes_paused_until_the_driver_is_done(
    parts: Parts, gate: Path, how: str
) -> None:
    """Once they were let go at once, into a restore that was still taking its room."""
    async with rigged(parts) as rig:
        off = await rig.take_off()
        scope = anyio.CancelScope()

        async def restore() -> None:
            with scope, contextlib.suppress(HelperLost):
                await rig.method.restore(off, "gpu1")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restore)
            async with standing_in(rig, "step:restore", gate):
                if how == "the helper is killed":
                    rig.link.kill("the test says so")
                else:
                    scope.cancel()
                await rig.stands(rig.other)
        assert await rig.state(rig.other) == "running"
        assert (await rig.method.inspect(off)).gpu == "gpu1"
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_on_a_full_gpu_no_process_is_restored_next_to_an_unpausable_one(parts: Parts) -> None:
    """Once it was skipped and the restore continued: whatever it took in that moment, the job was lost for."""
    async with rigged(parts) as rig:
        off = await rig.take_off()
        assert rig.other.ask(f"alloc {6 * GIB // MIB - 512}") == "allocated"
        rig.node.order(f"error cuCheckpointProcessLock@{rig.other.pid} 600")
        with pytest.raises(OutOfMemory, match="cannot be paused"):
            await rig.method.restore(off, "gpu1")
        assert await rig.state(rig.moved) == "checkpointed"
        assert rig.method.reservations(off)["gpu1"] >= REST_BYTES, "its room was given away"
        assert not rig.node.calls("cuCheckpointProcessRestore")
        rig.node.mend()
        await rig.method.restore(off, "gpu1")
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_released_memory_that_nvml_shows_late_does_not_count_as_missing(parts: Parts) -> None:
    """The helper had not closed yet what it had handed over; where nothing else was free, the job waited in vain."""
    async with rigged(parts) as rig:
        off = await rig.take_off()
        uuid = rig.node.uuids[1]
        late = [os.dup(piece.fd) for piece in rig.memory.pieces(driver_owner(off), uuid)]
        assert rig.other.ask("grab").startswith("grabbed")
        observed: list[int] = []

        async def take_snapshot() -> NodeSnapshot:
            node = await rig.inventory.refresh()
            if uuid not in rig.memory.of(driver_owner(off)):
                observed.append(node.gpus[1].memory_free_bytes or 0)
                if len(observed) == 2:
                    for fd in late:
                        os.close(fd)
            return node

        gpus = Gpus(take_snapshot)
        steps = Steps(rig.link, gpus, rig.other_processes)
        await DriverMethod(steps, rig.memory, gpus, rig.other_processes).restore(off, "gpu1")
        assert max(observed[:2]) < REST_BYTES <= observed[2]
        assert rig.moved.ask("digest") == rig.moved.digest


@pytest.mark.thorough
async def test_an_unpausable_process_blocks_nothing_if_memory_is_plentiful(parts: Parts) -> None:
    async with rigged(parts) as rig:
        off = await rig.take_off()
        rig.node.order(f"error cuCheckpointProcessLock@{rig.other.pid} 600")
        await rig.method.restore(off, "gpu1")
        assert await rig.state(rig.moved) == "running"


@pytest.mark.thorough
async def test_a_job_does_not_stay_parked_for_repeated_inspections(
    parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    """Each question takes a way to the helper and back, or a look at all GPUs and processes; the job waits for it."""
    async with rigged(parts) as rig:
        rig.other.close()
        caplog.set_level("INFO", "hegmd.migration.methods.driver_calls")
        await rig.method.reserve(rig.subject, "gpu1", REST_BYTES)
        rig.looks.clear()
        off = await rig.take_off()
        assert _driver_calls(caplog) == ["state", "lock", "checkpoint", "state"]
        assert len(rig.looks) == 1, "what it has; whether its GPU is free of it is nothing that it waits for elsewhere"
        rig.looks.clear()
        await rig.method.restore(off, "gpu1")
        assert _driver_calls(caplog) == ["state", "restore", "state", "unlock", "state"]
        assert len(rig.looks) == 2, "who is there, and what is free once its room was let go of"
        mine = await _with_room_for_storages(rig)
        rig.looks.clear()
        async with rig.method.storage_allocation(mine):
            assert len(rig.looks) == 1


def _driver_calls(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the driver calls on the process since the last time."""
    calls = [
        record.getMessage().split()[0]
        for record in caplog.records
        if record.name == "hegmd.migration.methods.driver_calls"
    ]
    caplog.clear()
    return calls


@pytest.mark.thorough
async def test_a_process_in_the_drivers_failed_state_is_not_waited_for(parts: Parts) -> None:
    async with rigged(parts) as rig:
        off = await rig.take_off()
        rig.node.order(f"fail step:state@{rig.moved.pid}")
        standing = await rig.method.inspect(off)
        assert standing.gpu is None
        assert "permanent failure" in standing.failed


@pytest.mark.thorough
@pytest.mark.parametrize(("own", "gpu"), [(0, "gpu0"), (0, "gpu1"), (1, "gpu0"), (1, "gpu1")])
async def test_a_process_of_another_node_is_restored_on_the_requested_gpu_by_a_map_of_all(
    parts: Parts, own: int, gpu: str
) -> None:
    """Once the method passed no map if the process's GPU is not on this node. Its answer is not measured."""
    async with rigged(parts) as rig:
        if own:
            rig.moved.close()
            rig.moved = Owner(rig.node, 1, 12, 4)
        before = replace(rig.subject, gpu=f"gpu{own}", target_gpu=None)
        await rig.method.checkpoint(before)
        then = [f"GPU-{number:08d}-0000-0000-0000-000000000000" for number in range(2)]
        rig.node.order(*(f"was {number} {uuid}" for number, uuid in enumerate(then)))
        off = replace(before, gpu=None, target_gpu=gpu, previous_gpu=None, source_gpu_uuids=(then[own], then[1 - own]))
        await rig.method.reserve(off, gpu, REST_BYTES)
        await rig.method.restore(off, gpu)
        assert (await rig.method.inspect(off)).gpu == gpu
        assert rig.moved.ask("digest") == rig.moved.digest
        rig.moved.close()


@in_one_test(
    ("elsewhere", "here", "pairs"),
    [
        ("ab", "cd", ["ad", "bc"]),
        ("ab", "bd", ["ad", "bb"]),  # what is here and was there stays itself
        ("ad", "ad", ["ad", "da"]),
        ("ab", "cde", ["ad", "bc"]),  # all of the other node's have a partner
        ("abc", "d", ["ad"]),
    ],
)
def test_the_map_from_another_node_has_each_gpu_once_on_either_side(
    elsewhere: str, here: str, pairs: list[str]
) -> None:
    assert pairs_from(elsewhere, ["d"], here) == [list(pair) for pair in pairs]


@pytest.mark.thorough
@pytest.mark.parametrize("question", ["verify", "inspect"])
async def test_inspecting_a_process_does_not_resume_it_while_another_operation_pauses_it(
    parts: Parts, question: str
) -> None:
    async with rigged(parts) as rig:

        async def take_snapshot() -> None:
            await getattr(rig.method, question)(rig.subject)

        async with anyio.create_task_group() as tasks, rig.other_processes.paused([rig.subject.owner_key]):
            tasks.start_soon(take_snapshot)
            await rig.stands(rig.moved)
        assert await rig.state(rig.moved) == "running"


@pytest.mark.thorough
async def test_other_processes_are_paused_during_allocation_but_not_while_an_agent_is_stopped(parts: Parts) -> None:
    """The room for storages was let go before the agent was asked to make them, and a neighbour took it."""
    async with rigged(parts) as rig:
        mine = await _with_room_for_storages(rig)
        assert rig.other.ask(f"alloc {4 * GIB // MIB}") == "allocated"  # less is free than can be left to chance
        async with rig.method.storage_allocation(mine):
            assert rig.memory.by_owner() == {}
            await rig.stands(rig.other)
            await rig.other_processes.wait_until_unpaused(rig.other_who)
            assert await rig.state(rig.other) == "running"
        rig.looks.clear()
        async with rig.method.storage_allocation(mine):
            assert await rig.state(rig.other) == "running", "nothing is held, so nothing is to be kept from anybody"
            assert not rig.looks, "and nobody is looked for: a job that is filled in rounds stood for it in each"
        with pytest.raises(Refused, match="the agent could not"):
            async with rig.method.storage_allocation(mine):
                raise Refused("the agent could not", "ask again")


async def _with_room_for_storages(rig: Rig) -> MigratedProcess:
    mine = replace(rig.subject, gpu="gpu1", size_bytes=GIB, storage_reservation_bytes=GIB)
    await rig.method.reserve(mine, "gpu1", GIB)
    return mine


@pytest.mark.thorough
async def test_storages_are_allocated_beside_their_reservation_if_memory_is_free(parts: Parts) -> None:
    """The driver clears what is released, and the job waited for that: 0.07 s for 32 GiB."""
    async with rigged(parts) as rig:
        mine = await _with_room_for_storages(rig)
        before = rig.other.free_bytes()
        async with rig.method.storage_allocation(mine) as made:
            assert rig.memory.by_owner() != {}, "the room is let go of before the storages are made"
            await rig.stands(rig.other)
            made()
            await rig.other_processes.wait_until_unpaused(rig.other_who)
            assert await rig.state(rig.other) == "running", "it stands while the storages are filled"
            assert rig.memory.by_owner() != {}, "the room is let go of before the storages are filled"
        assert rig.memory.by_owner() == {}
        assert rig.other.free_bytes() >= before + GIB


@pytest.mark.thorough
async def test_a_job_does_not_stay_parked_for_the_release_of_its_reservation_if_memory_is_plentiful(
    parts: Parts,
) -> None:
    """The driver needs 0.5 ms per GiB for that. A job that does not resume at once gets no reservation to keep."""
    async with rigged(parts) as rig:
        for goes_on in (True, False):
            mine = replace(await _with_room_for_storages(rig), goes_on=goes_on)
            async with rig.method.storage_allocation(mine) as made:
                assert made() is goes_on
            assert bool(rig.memory.by_owner()) is goes_on
            await rig.method.release(mine, "gpu1")


@pytest.mark.thorough
async def test_the_reservation_of_a_resumed_job_was_held_until_nvml_showed_its_memory(parts: Parts) -> None:
    async with rigged(parts) as rig:
        mine = replace(await _with_room_for_storages(rig), goes_on=True)
        held: list[bool] = []

        async def take_snapshot() -> NodeSnapshot:
            held.append(bool(rig.memory.by_owner()))
            if len(held) == 3:
                scope.cancel()
            return await rig.inventory.refresh()

        gpus = Gpus(take_snapshot)
        method = DriverMethod(Steps(rig.link, gpus, rig.other_processes), rig.memory, gpus, rig.other_processes)
        with anyio.CancelScope() as scope:
            await method.verify(mine)  # it is on the other GPU
        assert held == [True, False, False]


@pytest.mark.thorough
async def test_a_resumed_jobs_reservations_are_released_although_its_state_is_unknown(parts: Parts) -> None:
    """The helper was killed at that moment, and no operation owned the reservation until the daemon ended."""
    async with rigged(parts) as rig:
        mine = replace(await _with_room_for_storages(rig), goes_on=True)
        async with rig.method.storage_allocation(mine) as made:
            made()
        rig.node.order("error cuCheckpointProcessGetState 999")
        with pytest.raises(HegmError):
            await rig.method.verify(mine)
        assert rig.memory.by_owner() == {}


@pytest.mark.thorough
async def test_a_move_was_not_reported_for_15_seconds_because_a_helper_was_killed_at_a_question(
    parts: Parts, gate: Path
) -> None:
    async with rigged(parts) as rig, anyio.create_task_group() as tasks:
        tasks.start_soon(rig.method.verify, rig.subject)
        async with standing_in(rig, "step:state", gate):
            rig.link.kill("the test says so")


@pytest.mark.thorough
async def test_a_reservation_that_fits_only_once_is_released_before_the_job_resumes(parts: Parts) -> None:
    async with rigged(parts) as rig:
        mine = replace(await _with_room_for_storages(rig), goes_on=True)
        free_bytes = rig.other.free_bytes()
        assert rig.other.ask(f"alloc {(free_bytes - CALM_BYTES - GIB) // MIB - 256}") == "allocated"
        async with rig.method.storage_allocation(mine) as made:
            assert rig.memory.by_owner() != {}
            assert not made()
        assert rig.memory.by_owner() == {}


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["the agent finds no room", "the operation is cut off"])
async def test_storages_that_were_not_allocated_get_their_reservation_at_the_next_attempt(
    parts: Parts, how: str
) -> None:
    """The method does not release it, and does not wait for free memory a second time."""
    async with rigged(parts) as rig:
        mine = await _with_room_for_storages(rig)
        with contextlib.suppress(OutOfMemory), anyio.CancelScope() as scope:
            async with rig.method.storage_allocation(mine):
                if how == "the operation is cut off":
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
                raise OutOfMemory("somebody was quicker", "ask again")
        assert rig.memory.of(storage_owner(mine)) == {rig.node.uuids[1]: GIB}, "its room is gone"
        assert await rig.state(rig.other) == "running"
        async with rig.method.storage_allocation(mine):
            assert (rig.memory.by_owner() == {}) is (how == "the agent finds no room")
        assert rig.memory.by_owner() == {}


@pytest.mark.thorough
async def test_a_greedy_neighbour_costs_an_attempt_but_no_reservation(parts: Parts) -> None:
    """The other process starts to allocate after the check, when it is no longer paused."""
    async with rigged(parts) as rig:
        mine = await _with_room_for_storages(rig)
        attempts = 0
        while attempts < 2:
            attempts += 1
            with contextlib.suppress(OutOfMemory):
                async with rig.method.storage_allocation(mine):
                    await rig.other_processes.wait_until_unpaused(rig.other_who)
                    if attempts == 1:
                        assert rig.other.ask("hoard 0.001") == "hoarding"
                        assert rig.memory.of(storage_owner(mine)), "and that is for us alone"
                        raise OutOfMemory("nothing is left", "ask again")
                    assert rig.memory.by_owner() == {}
        assert rig.other.ask("ping") == "pong"


@pytest.mark.thorough
async def test_a_grown_process_is_left_alone_until_the_journal_has_its_size(parts: Parts) -> None:
    """Once it was checkpointed, and a daemon killed before its record restored it where there was too little memory."""
    async with rigged(parts) as rig:
        assert rig.moved.ask("alloc 64") == "allocated"
        await rig.method.reserve(rig.subject, "gpu1", REST_BYTES)
        with pytest.raises(GrewBeyondPlan) as grown:
            await rig.method.checkpoint(rig.subject)
        assert grown.value.driver_bytes > REST_BYTES
        assert await rig.state(rig.moved) == "running"
        written = replace(rig.subject, driver_bytes=grown.value.driver_bytes)
        assert (await rig.method.checkpoint(written)).driver_bytes == grown.value.driver_bytes


@pytest.mark.thorough
async def test_a_status_request_shows_a_checkpoint_that_waits_for_its_turn(parts: Parts) -> None:
    """Once the process was found running, so that its operation ended; then the waiting checkpoint took it off its GPU,
    and no operation brought it back.
    """
    async with (
        rigged(parts) as rig,
        anyio.create_task_group() as tasks,
        rig.other_processes.excluded(rig.subject.owner_key),
    ):
        tasks.start_soon(rig.method.checkpoint, rig.subject)
        await anyio.wait_all_tasks_blocked()
        assert (await rig.method.inspect(rig.subject)).busy


@pytest.mark.thorough
async def test_a_process_with_a_reused_pid_is_not_touched(parts: Parts) -> None:
    async with rigged(parts) as rig:
        stranger = replace(rig.subject, start_ticks=rig.subject.start_ticks - 1)
        steps = (rig.method.checkpoint(stranger), rig.method.restore(stranger, "gpu1"), rig.method.inspect(stranger))
        for step in steps:
            with pytest.raises(Refused, match="has exited"):
                await step
        assert not [call for call in rig.node.calls() if "Checkpoint" in call.function]


@pytest.mark.thorough
async def test_a_process_that_could_not_be_unlocked_is_tried_again_until_it_runs(parts: Parts) -> None:
    """Once a single failure left the process locked until the next start of the daemon."""
    async with rigged(parts) as rig:
        rig.node.order(f"error cuCheckpointProcessUnlock@{rig.moved.pid} 999")
        who = rig.subject.owner_key
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(rig.other_processes.run)
            async with rig.other_processes.paused([who]):
                pass
            assert await rig.state(rig.moved) == "locked"
            rig.node.mend()
            with anyio.fail_after(HANG_S):
                await rig.other_processes.wait_until_unpaused(who)
            tasks.cancel_scope.cancel()
        assert await rig.state(rig.moved) == "running"


@pytest.mark.thorough
async def test_the_next_daemon_keeps_processes_paused_during_a_restore_in_progress(parts: Parts, gate: Path) -> None:
    """The previous daemon was killed during the restore; the driver continues, and allocates as it goes."""
    async with rigged(parts) as rig:
        off = await rig.take_off()
        other = rig.other.pid, start_ticks(rig.other.pid)
        folder = rig.node.folder.parent
        (folder / FILE_NAME).write_text(json.dumps([[*other, *off.owner_key]]))
        await ask(rig.link, "lock", pid=other[0], timeout_s=1)

        async def restore() -> None:
            with contextlib.suppress(HelperLost):
                await rig.link.call("restore", {"pid": off.pid, "pairs": []}, deadline_s=60)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(restore)
            async with standing_in(rig, "step:restore", gate):
                rig.link.kill("the daemon is killed")
                tasks.start_soon(rig.other_processes.resume_all)
                await rig.stands(rig.other)
        assert await rig.state(rig.other) == "running"
        assert not (folder / FILE_NAME).exists()


@pytest.mark.thorough
async def test_a_restore_that_the_driver_refuses_does_not_count_as_done(parts: Parts) -> None:
    """Issue 14, row 20: without its error the next look says only that the process is in another state."""
    async with rigged(parts) as rig:
        off = await rig.take_off()
        rig.node.order("error step:restore 2 1")
        with pytest.raises(DriverFailed) as failed:
            await rig.method.restore(off, "gpu1")
        assert failed.value.number == 2
        assert await rig.state(rig.moved) == "checkpointed"
