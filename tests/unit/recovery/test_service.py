"""All protected jobs of a node: what goes wrong for one of them ends neither its protection nor the daemon."""

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
    """A protection that fails, as where the disk is full."""

    job = "job j1"

    async def run(self) -> None:
        raise OSError(28, "No space left on device")


async def test_a_protection_that_fails_does_not_end_the_daemon(caplog: pytest.LogCaptureFixture) -> None:
    """Its error ends nothing but that run of it, and is in the log."""
    with caplog.at_level(logging.ERROR):
        await run_once(cast("Protection", FailingProtection()), pause_s=0.0)
    assert "failed, and starts again" in caplog.text
    assert "No space left" in caplog.text


class Jobs:
    """The one job of another user."""

    job = SimpleNamespace(id="j1", name="train", uid=ANOTHER_UID)

    def named(self, _wanted: str, _may: object) -> Any:
        return self.job

    def of_run(self, _uid: int, _run: str) -> Any:
        return self.job

    def with_id(self, job_id: str) -> Any:
        return self.job if job_id == self.job.id else None

    def __iter__(self) -> Iterator[Any]:
        return iter([self.job])


def _listen(*_: object, **_facts: object) -> None:
    pass


@pytest.fixture
def pool() -> Iterator[Pool]:
    made = Pool(64 * MIB, huge_free_bytes=lambda: 0)
    yield made
    made.close()


def recoveries(pool: Pool, state_dir: Path, *supervisors: Any) -> Recoveries:
    """Return those of a daemon that has read what an earlier one has left."""
    nobody: Any = SimpleNamespace(record=_listen)
    rest = dict.fromkeys(("take_snapshot", "variables"), nobody)
    made = Recoveries(
        workers=cast("Any", Connected(())),
        supervisors=cast("Any", Connected(supervisors)),
        jobs=cast("Any", Jobs()),
        pool=pool,
        events=nobody,
        state_dir=state_dir,
        gpus=list,
        is_in_hand=lambda _pid: False,
        is_kept_from_training=lambda _pid: False,
        **rest,
    )
    made.open()
    return made


class Connected(tuple[Any, ...]):
    """The workers or supervisors that are connected."""

    __slots__ = ()

    def listen(self, _listener: object) -> None:
        pass


def supervisor(run: str = "now", *, is_alive: bool = True, **offer: Any) -> Any:
    asked = Supervise(run=run, python=True, recover=RecoveryWish(), **offer)
    return SimpleNamespace(uid=ANOTHER_UID, run=run, offer=asked, is_alive=is_alive, connected=False, pid=os.getpid())


async def held_slots(pool: Pool) -> JobSlots:
    """Hold a slot for the job."""
    slots = JobSlots(pool, "j1")
    write((await slots.take(0, 0, 8192, Source(os.geteuid(), 1))).fd, generation=1, step=7)
    return slots


async def test_the_slots_of_another_user_are_neither_shown_nor_used_nor_deleted(pool: Pool, tmp_path: Path) -> None:
    slots = JobSlots(pool, "j1")
    memory = await slots.take(0, 0, 8192, Source(os.geteuid(), 1))
    write(memory.fd, generation=1, step=7)
    attempt = RecoveryAttempt(failed_utc=1.0, why="ended by signal 9")
    record = JobSnapshots(
        job="j1", uid=ANOTHER_UID, ranks=1, attempts=(attempt,), begins_anew=("secret",), kept="given up", kept_utc=1.0
    )
    SnapshotFiles(tmp_path).save({record.job: record})
    made = recoveries(pool, tmp_path)
    (view,) = (await made.show([], lambda _uid: False)).jobs
    assert (view.state, view.held_bytes > 0) == (KEPT, True)
    assert (view.slots, view.recoveries, view.begins_anew, view.why) == ((), (), (), None)
    with pytest.raises(HegmError, match=f"belongs to uid {ANOTHER_UID}") as refused:
        made.require_kept("j1", ANOTHER_UID + 1, os.getpid())
    assert refused.value.code is DENIED
    with pytest.raises(HegmError, match=f"belongs to uid {ANOTHER_UID}") as refused:
        await made.drop("j1", lambda _uid: False)
    assert refused.value.code is DENIED
    assert slots.held()
    made.require_kept("j1", ANOTHER_UID, os.getpid())
    (shown,) = (await made.show([], lambda _uid: True)).jobs
    assert [slot.step for slot in shown.slots] == [7]
    assert await made.drop("j1", lambda _uid: True) > 0
    assert not slots.held()


async def test_a_new_daemon_says_which_snapshots_are_left_and_whose_run_has_yet_to_connect(
    pool: Pool, tmp_path: Path
) -> None:
    """It said "kept" of a job that ran, and of one whose memory a reboot had taken."""
    await held_slots(pool)
    records = {
        "j1": JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1),
        "j2": JobSnapshots(job="j2", uid=ANOTHER_UID, ranks=1, images="/images", kept="given up", kept_utc=1.0),
    }
    SnapshotFiles(tmp_path).save(records)
    made = recoveries(pool, tmp_path)
    views = (await made.show([], lambda _uid: True)).jobs
    assert [(view.id, view.state) for view in views] == [("j1", AWAITED), ("j2", LOST)]
    assert views[0].why == "its hegmctl run has not connected since hegmd has started"
    assert "hegmctl restore --newest /images" in (views[1].why or "")
    assert made.tally.states == {AWAITED: 1, LOST: 1}
    await made._look_at(records["j2"])
    (view,) = (await made.show([], lambda _uid: True)).jobs
    assert view.id == "j1"


async def test_a_job_that_waited_for_room_is_started_where_the_policy_of_sharing_has_found_it(
    pool: Pool, tmp_path: Path
) -> None:
    """It was started where the recovery itself found most memory free, which may be kept for others."""
    made = recoveries(pool, tmp_path)
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, gpus=("gpu0",))
    job = ProtectedJob(made._node, record, "train", supervisor())
    made._running["j1"] = Protection(job)
    made.start_on("j1", ("gpu1",))
    made.start_on("j2", ("gpu1",))
    assert job.record.gpus == ("gpu1",)


async def test_the_slots_of_a_job_whose_launcher_runs_are_not_deleted(pool: Pool, tmp_path: Path) -> None:
    """`hegmctl recovery --drop` released memory that the launcher went on writing to."""
    slots = await held_slots(pool)
    me = os.getpid()
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, launcher_pid=me, launcher_start_ticks=start_ticks_of(me))
    SnapshotFiles(tmp_path).save({"j1": record})
    made = recoveries(pool, tmp_path)
    with pytest.raises(HegmError, match="job j1 has not ended"):
        await made.drop("j1", lambda _uid: True)
    assert slots.held()


async def test_a_kept_state_is_kept_if_the_run_that_continues_from_it_ends_before_it_starts(
    pool: Pool, tmp_path: Path
) -> None:
    """Ctrl-C while `hegmctl run --resume` waited for its start deleted the state."""
    slots = await held_slots(pool)
    made = recoveries(pool, tmp_path)
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, kept="given up", kept_utc=1.0)
    job = ProtectedJob(made._node, record, "train", supervisor(resumes="j1"))
    Starts(job)._begun_attempt()
    made.require_kept("j1", ANOTHER_UID, os.getpid())  # it connects again if the daemon is restarted now
    job.supervisor = supervisor(resumes="j1", is_alive=False)
    made._running["j1"] = protection = Protection(job)
    async with anyio.create_task_group() as tasks:
        await tasks.start(made.run)
        await made._protect(protection)
        tasks.cancel_scope.cancel()
    assert slots.held()
    made.require_kept("j1", ANOTHER_UID, os.getpid())


async def test_of_two_runs_that_continue_from_one_state_the_second_is_refused(pool: Pool, tmp_path: Path) -> None:
    """It waited in silence until the first one had ended, and then found no state any more."""
    made = recoveries(pool, tmp_path)
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, kept="given up", kept_utc=1.0)
    job = ProtectedJob(made._node, record, "train", supervisor(resumes="j1"))
    job.put(record)
    made._running["j1"] = Protection(job)
    made.require_kept("j1", ANOTHER_UID, job.supervisor.pid)  # the first one, which connects again
    for _ in range(2):
        with pytest.raises(Refused, match=f"process {os.getpid()} runs job j1 already"):
            made.require_kept("j1", ANOTHER_UID, job.supervisor.pid + 1)
        job.put(record.replace(kept=None))  # it has been started from its state meanwhile
    job.put(record)
    job.supervisor = supervisor(is_alive=False)
    made.require_kept("j1", ANOTHER_UID, os.getpid() + 1)


async def test_a_job_that_is_back_after_its_state_was_kept_is_protected_as_any_other(
    pool: Pool, tmp_path: Path
) -> None:
    """Its `hegmctl run` was stopped while the daemon was restarted. Its state was kept for a day after it had ended."""
    record = JobSnapshots(job="j1", uid=ANOTHER_UID, ranks=1, kept="its hegmctl run was killed", kept_utc=1.0)
    SnapshotFiles(tmp_path).save({record.job: record})
    made = recoveries(pool, tmp_path)
    async with anyio.create_task_group() as tasks:
        await tasks.start(made.run)
        made._on_supervisor_change(supervisor(pid=7))
        assert made._running["j1"].job.record.kept is None
        tasks.cancel_scope.cancel()


async def test_a_run_that_comes_as_another_one_ends_keeps_its_protection(pool: Pool, tmp_path: Path) -> None:
    """The slots of the former run were released after the protection of the new one had begun."""
    await held_slots(pool)
    made = recoveries(pool, tmp_path, supervisor("new", pid=8))
    ended = ProtectedJob(made._node, JobSnapshots(job="j1", uid=ANOTHER_UID), "train", supervisor(is_alive=False))
    async with anyio.create_task_group() as tasks:
        await tasks.start(made.run)
        made._running["j1"] = protection = Protection(ended)
        await made._protect(protection)
        await anyio.wait_all_tasks_blocked()
        assert made.job_ids == {"j1"}
        tasks.cancel_scope.cancel()
