"""All protected jobs of a node. An error of one job ends neither its protection nor the daemon."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest

from hegmd.errors import DENIED, HegmError, Refused
from hegmd.memory.pool import Pool, Source
from hegmd.memory.sizes import MIB
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.protocol.messages import Supervise
from hegmd.protocol.recovery import AWAITED, KEPT, LOST, RecoveryAttempt
from hegmd.protocol.supervision import RecoveryWish
from hegmd.recovery.job import ProtectedJob
from hegmd.recovery.protection import Protection
from hegmd.recovery.records import JobSnapshots, SnapshotFiles
from hegmd.recovery.service import Recoveries, run_once
from hegmd.recovery.slots import JobSlots
from hegmd.recovery.starts import Starts
from tests.unit.recovery.test_snapshots import write

ANOTHER_UID = 54321


class FailingProtection:
    """A protection that fails as if the disk were full."""

    job = "job j1"

    async def run(self) -> None:
        raise OSError(28, "No space left on device")


async def test_a_protection_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """The error ends one run of the protection and is logged."""
    with caplog.at_level(logging.ERROR):
        await run_once(cast("Protection", FailingProtection()), pause_s=0.0)
    assert "failed, and starts again" in caplog.text
    assert "No space left" in caplog.text


class Jobs:
    """A table of one job, which belongs to another user."""

    job = SimpleNamespace(id="j1", name="train", uid=ANOTHER_UID)

    def named(self, _wanted: str, _may: object) -> Any:
        return self.job

    def of_run(self, _uid: int, _run: str) -> Any:
        return self.job

    def with_id(self, job_id: str) -> Any:
        return self.job if job_id == self.job.id else None

    def is_being_written(self, _job_id: str) -> bool:
        return False

    def end_of(self, _job_id: str, _since_ticks: int) -> str | None:
        return None

    def __iter__(self) -> Iterator[Any]:
        return iter([self.job])


def _listen(*_: object, **_facts: object) -> None:
    pass


@pytest.fixture
def pool() -> Iterator[Pool]:
    created = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield created
    created.close()


def recoveries(pool: Pool, state_dir: Path, *supervisors: Any, **clock: Any) -> Recoveries:
    """Return the recoveries of a daemon that has read the files of an earlier one."""
    listener: Any = SimpleNamespace(record=_listen)
    callbacks = dict.fromkeys(("take_snapshot", "variables"), listener)
    service = Recoveries(
        workers=cast("Any", Connected(())),
        supervisors=cast("Any", Connected(supervisors)),
        jobs=cast("Any", Jobs()),
        pool=pool,
        events=listener,
        state_dir=state_dir,
        gpus=list,
        is_in_hand=lambda _pid: False,
        is_kept_from_training=lambda _pid: False,
        **callbacks,
        **clock,
    )
    service.open()
    return service


class Connected(tuple[Any, ...]):
    """The workers or supervisors that are connected."""

    __slots__ = ()

    def listen(self, _listener: object) -> None:
        pass


def supervisor(run: str = "now", *, is_alive: bool = True, **offer: Any) -> Any:
    registration = Supervise(run=run, python=True, recover=RecoveryWish(), **offer)
    return SimpleNamespace(
        uid=ANOTHER_UID, run=run, offer=registration, is_alive=is_alive, connected=False, pid=os.getpid()
    )


async def held_slots(pool: Pool) -> JobSlots:
    slots = JobSlots(pool, "j1")
    write((await slots.take(0, 0, 8192, Source(os.geteuid(), 1))).fd, generation=1, step=7)
    return slots


async def test_the_slots_of_another_user_are_neither_shown_nor_used_nor_deleted(pool: Pool, tmp_path: Path) -> None:
    slots = JobSlots(pool, "j1")
    memory = await slots.take(0, 0, 8192, Source(os.geteuid(), 1))
    write(memory.fd, generation=1, step=7)
    attempt = RecoveryAttempt(failed_utc=1.0, why="ended by signal 9")
    record = JobSnapshots(
        job="j1",
        uid=ANOTHER_UID,
        ranks=1,
        attempts=(attempt,),
        begins_anew=("secret",),
        kept="given up",
        kept_boot_s=-1e6,
    )
    SnapshotFiles(tmp_path).save({record.job: record})
    service = recoveries(pool, tmp_path)
    (view,) = (await service.show([], lambda _uid: False)).jobs
    assert (view.state, view.held_bytes > 0) == (KEPT, True)
    assert (view.slots, view.recoveries, view.begins_anew, view.why) == ((), (), (), None)
    with pytest.raises(HegmError, match=f"belongs to uid {ANOTHER_UID}") as refused:
        service.require_kept("j1", ANOTHER_UID + 1, os.getpid())
    assert refused.value.code is DENIED
    with pytest.raises(HegmError, match=f"belongs to uid {ANOTHER_UID}") as refused:
        await service.drop("j1", lambda _uid: False)
    assert refused.value.code is DENIED
    assert slots.held()
    service.require_kept("j1", ANOTHER_UID, os.getpid())
    (shown,) = (await service.show([], lambda _uid: True)).jobs
    assert [slot.step for slot in shown.slots] == [7]
    assert await service.drop("j1", lambda _uid: True) > 0
    assert not slots.held()


async def test_a_new_daemon_reports_lost_snapshots_and_runs_that_have_not_connected(pool: Pool, tmp_path: Path) -> None:
    """The daemon showed "kept" for a running job, and for one whose memory was lost in a reboot."""
    await held_slots(pool)
    records = {
        "j1": JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1),
        "j2": JobSnapshots(job="j2", uid=ANOTHER_UID, ranks=1, images="/images", kept="given up", kept_boot_s=-1e6),
    }
    SnapshotFiles(tmp_path).save(records)
    service = recoveries(pool, tmp_path)
    views = (await service.show([], lambda _uid: True)).jobs
    assert [(view.id, view.state) for view in views] == [("j1", AWAITED), ("j2", LOST)]
    assert views[0].why == "its hegmctl run has not connected since hegmd has started"
    assert "hegmctl restore --newest /images" in (views[1].why or "")
    assert service.tally.states == {AWAITED: 1, LOST: 1}
    await service._look_at(records["j2"])
    (view,) = (await service.show([], lambda _uid: True)).jobs
    assert view.id == "j1"


async def test_a_job_whose_snapshots_are_lost_was_forgotten_at_once(pool: Pool, tmp_path: Path) -> None:
    """Its user had 15 s to read that it is lost, and where its newest image is."""
    job = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, generation=4, images="/images")
    old = job.replace(job="j2", kept="given up", kept_boot_s=-1e6)
    SnapshotFiles(tmp_path).save({"j1": job, "j2": old})
    service = recoveries(pool, tmp_path)
    for record in (job, old):
        await service._look_at(record)
    (view,) = (await service.show([], lambda _uid: True)).jobs
    assert (view.id, view.state) == ("j1", LOST)
    assert "hegmctl restore --newest /images" in (view.why or "")
    (kept,) = service._records.values()
    await service._look_at(kept)
    assert list(service._records) == ["j1"]


async def test_a_clock_that_jumped_forward_by_two_days_deleted_a_kept_state(pool: Pool, tmp_path: Path) -> None:
    """The age of a state is counted from the node's start, which no setting of the clock changes."""
    slots = await held_slots(pool)
    job = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, generation=1, kept="given up")
    SnapshotFiles(tmp_path).save({"j1": job})
    clock = {"utc": 1e9, "boot_s": 1000.0}
    service = recoveries(pool, tmp_path, utc=lambda: clock["utc"], boot_s=lambda: clock["boot_s"])
    for changes, is_held in (({}, True), ({"utc": 1e9 + 2 * 86400}, True), ({"boot_s": 90000.0}, False)):
        clock |= changes
        await service._look_at(service._records["j1"])
        assert bool(slots.held()) is is_held
    assert not service._records


async def test_a_queued_job_starts_on_the_gpu_that_the_sharing_policy_chose(pool: Pool, tmp_path: Path) -> None:
    """The recovery started the job where most memory was free, although that may be reserved for others."""
    service = recoveries(pool, tmp_path)
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, gpus=("gpu0",))
    job = ProtectedJob(service.node, record, "train", supervisor())
    service._running["j1"] = Protection(job)
    service.start_on("j1", ("gpu1",))
    service.start_on("j2", ("gpu1",))
    assert job.record.gpus == ("gpu1",)


async def test_slots_are_not_deleted_while_the_launcher_runs(pool: Pool, tmp_path: Path) -> None:
    """`hegmctl recovery --drop` released memory that the launcher still wrote to."""
    slots = await held_slots(pool)
    own_pid = os.getpid()
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, launcher_pid=own_pid, launcher_start_ticks=start_ticks_of(own_pid))
    SnapshotFiles(tmp_path).save({"j1": record})
    service = recoveries(pool, tmp_path)
    with pytest.raises(HegmError, match="job j1 has not ended"):
        await service.drop("j1", lambda _uid: True)
    assert slots.held()


async def test_a_kept_state_survives_a_resume_that_ends_before_its_start(pool: Pool, tmp_path: Path) -> None:
    """Ctrl-C while `hegmctl run --resume` waited for its start deleted the state."""
    slots = await held_slots(pool)
    service = recoveries(pool, tmp_path)
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, kept="given up", kept_boot_s=-1e6)
    job = ProtectedJob(service.node, record, "train", supervisor(resumes="j1"))
    Starts(job)._begun_attempt()
    service.require_kept("j1", ANOTHER_UID, os.getpid())  # the run connects again if the daemon is restarted now
    job.supervisor = supervisor(resumes="j1", is_alive=False)
    service._running["j1"] = protection = Protection(job)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        await service._protect(protection)
        tasks.cancel_scope.cancel()
    assert slots.held()
    service.require_kept("j1", ANOTHER_UID, os.getpid())


async def test_a_second_run_cannot_continue_from_the_same_state(pool: Pool, tmp_path: Path) -> None:
    """The second run waited silently until the first had ended, and then found no state."""
    service = recoveries(pool, tmp_path)
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, kept="given up", kept_boot_s=-1e6)
    job = ProtectedJob(service.node, record, "train", supervisor(resumes="j1"))
    job.put(record)
    service._running["j1"] = Protection(job)
    service.require_kept("j1", ANOTHER_UID, job.supervisor.pid)  # the first run connects again
    for _ in range(2):
        with pytest.raises(Refused, match=f"process {os.getpid()} runs job j1 already"):
            service.require_kept("j1", ANOTHER_UID, job.supervisor.pid + 1)
        job.put(record.replace(kept=None))  # the job has started from its state
    job.put(record)
    job.supervisor = supervisor(is_alive=False)
    service.require_kept("j1", ANOTHER_UID, os.getpid() + 1)


async def test_a_returned_job_is_protected_again_after_its_state_was_kept(pool: Pool, tmp_path: Path) -> None:
    """`hegmctl run` was stopped while the daemon restarted. The daemon kept the state for a day after the job's end."""
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, kept="its hegmctl run was killed", kept_boot_s=-1e6)
    SnapshotFiles(tmp_path).save({record.job: record})
    service = recoveries(pool, tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        service._on_supervisor_change(supervisor(pid=7))
        assert service._running["j1"].job.record.kept is None
        tasks.cancel_scope.cancel()


async def test_a_new_run_stays_protected_when_the_former_one_ends(pool: Pool, tmp_path: Path) -> None:
    """The daemon released the slots of the former run after it had begun to protect the new one."""
    await held_slots(pool)
    service = recoveries(pool, tmp_path, supervisor("new", pid=8))
    ended = ProtectedJob(service.node, JobSnapshots(job="j1", uid=ANOTHER_UID), "train", supervisor(is_alive=False))
    async with anyio.create_task_group() as tasks:
        await tasks.start(service.run)
        service._running["j1"] = protection = Protection(ended)
        await service._protect(protection)
        await anyio.wait_all_tasks_blocked()
        assert service.job_ids == {"j1"}
        tasks.cancel_scope.cancel()
