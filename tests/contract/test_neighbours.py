"""Other processes on a GPU, paused for a moment: over the stub driver, with processes that really stop."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from hegmd.gpu_helper.link import Link
from hegmd.migration.methods.other_processes import FILE_NAME, OtherProcesses
from hegmd.migration.methods.progress_probe import is_stopped
from hegmd.node.processes.procfs import ProcessGone, Unreadable, read_start
from tests.contract.helped import Owner, ask, linked
from tests.patience import HANG_S
from tests.stubs.cuda.node import CudaNode


def start_ticks(pid: int) -> int | None:
    try:
        return read_start("/proc", pid)[0]
    except (ProcessGone, Unreadable):
        return None


def who(owner: Owner) -> tuple[int, int]:
    ticks = start_ticks(owner.pid)
    assert ticks is not None
    return owner.pid, ticks


@pytest.fixture
def node(tmp_path: Path) -> CudaNode:
    return CudaNode.make(tmp_path / "node")


@pytest.fixture
def owner(node: CudaNode) -> Iterator[Owner]:
    made = Owner(node, 0, 1)
    yield made
    made.close()


@pytest.fixture
def other(node: CudaNode) -> Iterator[Owner]:
    made = Owner(node, 0, 1)
    yield made
    made.close()


@pytest.mark.thorough
async def test_processes_are_stopped_briefly_after_a_record_is_on_disk(
    node: CudaNode, owner: Owner, other: Owner, tmp_path: Path
) -> None:
    async with linked(node) as link:
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=lambda _: False)
        async with other_processes.paused([who(owner), who(other)]):
            assert [await _state(link, one) for one in (owner, other)] == ["locked", "locked"]
            noted = json.loads((tmp_path / FILE_NAME).read_text())
            assert sorted(noted) == sorted([list(who(owner)), list(who(other))])
        assert [await _state(link, one) for one in (owner, other)] == ["running", "running"]
        assert not (tmp_path / FILE_NAME).exists()
    assert owner.ask("step") == "step 1"


@pytest.mark.thorough
async def test_a_full_disk_prevented_every_restore_beside_other_processes(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    """The job stayed parked, and the daemon ended when it could not write at its start."""
    (tmp_path / "file").touch()
    async with linked(node) as link:
        folder = tmp_path / "file"  # nothing can be written below it
        other_processes = OtherProcesses(link, folder, start_ticks=start_ticks, is_stopped=lambda _: False)
        async with other_processes.paused([who(owner)]) as loose:
            assert list(loose) == [who(owner)]
            assert await _state(link, owner) == "running"
        async with other_processes.excluded(who(owner)):
            pass


async def _state(link: Link, owner: Owner) -> str:
    return str((await ask(link, "state", pid=owner.pid))["state"])


@pytest.mark.thorough
async def test_a_process_locked_by_another_program_stays_locked(node: CudaNode, owner: Owner, tmp_path: Path) -> None:
    """Unlocking it would let a process continue that another operation is about to checkpoint."""
    async with linked(node) as link:
        await ask(link, "lock", pid=owner.pid, timeout_s=1)
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=lambda _: False)
        async with other_processes.paused([who(owner)]):
            pass
        assert await _state(link, owner) == "locked"
        await ask(link, "unlock", pid=owner.pid)


@pytest.mark.thorough
async def test_processes_that_cannot_be_locked_quickly_are_stopped_or_are_ours_are_left_alone(
    node: CudaNode, owner: Owner, other: Owner, tmp_path: Path
) -> None:
    node.order(f"error cuCheckpointProcessLock@{owner.pid} 600")
    async with linked(node) as link:
        other_processes = OtherProcesses(
            link, tmp_path, start_ticks=start_ticks, is_stopped=lambda pid: pid == other.pid
        )
        async with other_processes.paused([who(owner), who(other), (owner.pid, 1)]):
            assert [await _state(link, one) for one in (owner, other)] == ["running", "running"]
        node.mend()
        async with other_processes.paused([who(owner)], but_for={who(owner)}):
            assert await _state(link, owner) == "running"
    assert [call.subject for call in node.calls("cuCheckpointProcessLock")] == [owner.pid]


@pytest.mark.thorough
async def test_processes_paused_by_a_killed_daemon_are_resumed_by_the_next(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    async with linked(node) as link:
        await ask(link, "lock", pid=owner.pid, timeout_s=1)
        (tmp_path / FILE_NAME).write_text(json.dumps([who(owner), (owner.pid, 1), (2**22 + 1, 5)]))
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=lambda _: False)
        await other_processes.resume_all()
        assert await _state(link, owner) == "running"
        assert not (tmp_path / FILE_NAME).exists()
        await other_processes.resume_all()


@pytest.mark.thorough
async def test_when_the_helper_is_lost_all_paused_processes_resume(
    node: CudaNode, owner: Owner, tmp_path: Path
) -> None:
    async with linked(node) as link:
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=lambda _: False)
        async with other_processes.paused([who(owner)]):
            link.kill("the test says so")
        assert await _state(link, owner) == "running"


async def test_a_note_that_means_nothing_stops_nothing(node: CudaNode, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(os.urandom(20))
    async with linked(node) as link:
        await OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=lambda _: False).resume_all()


async def test_with_pauses_disabled_no_process_is_paused(node: CudaNode, owner: Owner, tmp_path: Path) -> None:
    async with linked(node) as link:
        other_processes = OtherProcesses(
            link, tmp_path, start_ticks=start_ticks, is_stopped=lambda _: False, max_pause_s=0
        )
        async with other_processes.paused([who(owner)]):
            assert owner.ask("alloc 1") == "allocated"
    assert not node.calls("cuCheckpointProcessLock")


@pytest.mark.thorough
async def test_a_paused_process_that_is_stopped_does_not_end_the_helper_of_others(
    node: CudaNode, owner: Owner, other: Owner, tmp_path: Path
) -> None:
    """The state was queried once a second, and each query ended the helper after ten."""
    async with linked(node) as link, anyio.create_task_group() as tasks:
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=is_stopped)
        tasks.start_soon(other_processes.run)
        async with other_processes.paused([who(owner)]):
            helper = link.pid
            owner.pause()
        assert (tmp_path / FILE_NAME).exists(), "that it may stand is on disk until it is let go"
        count = len(node.calls("cuCheckpointProcessGetState"))
        for _ in range(3):
            assert await _state(link, other) == "running"
        assert len(node.calls("cuCheckpointProcessGetState")) == count + 3, "it was asked about all the same"
        owner.go_on()
        with anyio.fail_after(HANG_S):
            await other_processes.wait_until_unpaused(who(owner))
        assert await _state(link, owner) == "running"
        assert link.pid == helper
        tasks.cancel_scope.cancel()


@pytest.mark.thorough
async def test_a_process_stopped_during_its_lock_counts_as_running(
    node: CudaNode, owner: Owner, other: Owner, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with linked(node) as link, anyio.create_task_group() as tasks:
        other_processes = OtherProcesses(link, tmp_path, start_ticks=start_ticks, is_stopped=is_stopped)
        tasks.start_soon(other_processes.run)
        helper = (await link.start())["pid"]
        node.order(f"hold cuCheckpointProcessLock@{owner.pid} {gate}")

        async def stop() -> None:
            file = await anyio.to_thread.run_sync(gate.open, "w")
            owner.pause()
            file.close()

        tasks.start_soon(stop)
        async with other_processes.paused([who(owner), who(other)]) as loose:
            assert loose == [who(owner)]
            assert await _state(link, other) == "locked"
        assert link.pid == helper
        node.mend()
        owner.go_on()
        with anyio.fail_after(HANG_S):
            await other_processes.wait_until_unpaused(who(owner))
        assert await _state(link, owner) == "running"
        tasks.cancel_scope.cancel()
