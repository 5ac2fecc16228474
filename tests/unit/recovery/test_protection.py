"""One protected job: what ends a snapshot early, which processes are its own, and when it leaves its GPU.

Longer than 400 lines because one rig of a job and its node serves all of it.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.to_thread
import pytest

from hegmd.migration.methods import launchers
from hegmd.migration.methods.restore_lock import lock_path
from hegmd.node.processes.procfs import TICKS_PER_S, start_ticks_of
from hegmd.protocol.agents import UNSEEN
from hegmd.protocol.messages import Supervise
from hegmd.protocol.recovery import FAILED, INTERRUPTED, UNDER_WAY, RecoveryAttempt
from hegmd.protocol.snapshots import Gpu, Health
from hegmd.protocol.supervision import BACK, DAMAGED, EDITED
from hegmd.recovery.job import Node, ProtectedJob
from hegmd.recovery.policy import Budget
from hegmd.recovery.protection import GONE_LOOKS, Protection
from hegmd.recovery.records import JobSnapshots
from hegmd.recovery.snapshots import BesideImage, SnapshotRounds
from hegmd.recovery.starts import Starts
from hegmd.system.condition import Condition
from hegmd.system.process_ends import until_ended
from hegmd.workers.supervisors import SupervisorAway
from tests.patience import HANG_S


def worker(run: str, *, ended: bool = False, gpu: str | None = "gpu0", pid: int = 7) -> Any:
    description = SimpleNamespace(run=run, rank=None)
    identity = SimpleNamespace(uid=1000, start_ticks=3)
    return SimpleNamespace(
        about=description, identity=identity, ended=ended, gpu=gpu, pid=pid, boundary=5, on_cpu=False, parked=False
    )


class Unkillable(ProtectedJob):
    """A protected job that records the reason of a kill instead of killing."""

    killed_for = ""
    killed_pids: Sequence[int] = ()
    snapshots: Sequence[Any] = ()

    async def whole(self) -> list[Any]:
        return [one for one in self.snapshots if one.generation not in self.record.bad]

    async def kill(self, own: Any, why: str, stacks: str | None, event: str) -> None:
        self.killed_for, self.killed_pids = f"{event}: {why}", [one.pid for one in own]


class Rig:
    """A job on gpu0 of a node whose GPUs have `conditions`."""

    def __init__(
        self, *workers: Any, former_workers: tuple[Any, ...] = (), conditions: str = "healthy healthy"
    ) -> None:
        self.events: list[str] = []
        self.gpus = [
            Gpu(id=f"gpu{index}", index=index, uuid=f"{index}", vendor="nvidia", health=_health(condition))
            for index, condition in enumerate(conditions.split())
        ]
        self.node = SimpleNamespace(
            workers=workers,
            workers_of=lambda _job: [*workers, *former_workers],
            changed=Condition(),
            gpus=lambda: self.gpus,
            is_in_hand=lambda _pid: False,
            is_kept_from_training=lambda _pid: False,
            is_being_written=lambda _job: False,
            end_of=lambda _job, _since_ticks: None,
            save=lambda _record: None,
            events=SimpleNamespace(record=lambda kind, *_more, **_facts: self.events.append(kind)),
            pool=None,
            utc=lambda: 1.0,
        )
        offer = Supervise(run="now", pid=7, python=True)
        self.supervisor = cast(
            "Any", SimpleNamespace(uid=1000, run="now", pid=os.getpid(), start_ticks=1, offer=offer, is_alive=True)
        )
        record = JobSnapshots(job="j1", uid=1000, ranks=1, gpus=("gpu0",))
        self.job = Unkillable(cast("Node", self.node), record, "train", self.supervisor)


def _health(condition: str) -> Health:
    return Health(state="ok", condition=condition, reason="XID 79")


class Stuck(Protection):
    """A protection whose ranks never answer."""

    began: anyio.Event

    async def _take(self) -> None:
        self.began.set()
        await anyio.sleep_forever()


async def test_a_snapshot_ends_when_its_command_fails() -> None:
    """The daemon waited for the snapshot up to its limit of ten minutes before it recovered the job."""
    rig = Rig()
    protection = Stuck(rig.job)
    protection.began = anyio.Event()
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(protection._take_while_it_runs)
            await protection.began.wait()
            rig.supervisor.offer = rig.supervisor.offer.replace(pid=None, fell=-9)
            rig.node.changed.notify_all()


async def test_a_supervisor_that_was_away_at_the_first_snapshot_let_its_job_end_when_it_failed() -> None:
    rig = Rig()
    told: list[str] = []

    async def tell(do: str, job: str) -> None:
        if not rig.supervisor.connected:
            raise SupervisorAway("now", job, f"it cannot get the order {do}")
        told.append(do)

    rig.supervisor.tell, rig.supervisor.connected = tell, False
    protection = Protection(rig.job)
    rig.job.snapshots = [SimpleNamespace(generation=1, step=5)]
    await protection._find_newest()
    rig.supervisor.connected, rig.supervisor.offer = True, rig.supervisor.offer.replace(pid=None)
    for _ in range(2):
        await protection._turn()
    assert told == ["protect"]


def test_processes_that_a_killed_supervisor_started_still_belong_to_the_job() -> None:
    """The old processes continued to train together with the new ones."""
    own_worker, former_worker, ended_worker = (
        worker("now"),
        worker("before", pid=8),
        worker("before", ended=True, pid=9),
    )
    rig = Rig(own_worker, former_workers=(former_worker, ended_worker))
    assert rig.job.own_workers() == [own_worker]
    assert rig.job.rest() == [own_worker, former_worker]


@pytest.mark.parametrize(
    ("conditions", "has_snapshot", "expected"),
    [
        ("gone healthy", True, "job.gpu-gone: was on gpu0, which is gone (XID 79), and was killed"),
        ("gone failing", True, ""),
        ("gone healthy", False, ""),
        ("failing healthy", True, ""),
        ("healthy gone", True, ""),
    ],
)
async def test_a_job_whose_gpu_is_lost_is_killed_once_if_another_gpu_can_run_it(
    conditions: str, has_snapshot: bool, expected: str
) -> None:
    rig = Rig(worker("now"), conditions=conditions)
    rig.job.newest = cast("Any", SimpleNamespace(step=3)) if has_snapshot else None
    protection = Stuck(rig.job)
    missing_count = 0
    for number in range(2 * GONE_LOOKS):
        assert number > GONE_LOOKS or not rig.job.killed_for
        missing_count = await protection._look_at_gpus(missing_count)
    assert rig.job.killed_for == expected
    assert rig.events == (["job.gpu-gone"] if conditions.startswith("gone") and not expected else [])


async def test_a_migrated_job_is_recovered_on_its_last_gpu() -> None:
    rig = Rig(worker("now", gpu="gpu1"))
    await Stuck(rig.job)._look_at_gpus(0)
    assert rig.job.record.gpus == ("gpu1",)


class Rank:
    """A real process with an agent."""

    gpu, boundary, on_cpu, parked = "gpu0", 5, False, False

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.about = SimpleNamespace(run="before", rank=None)
        self.identity = SimpleNamespace(uid=1000, start_ticks=start_ticks_of(process.pid))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


@pytest.mark.thorough
async def test_a_rank_that_connects_while_old_processes_are_killed_is_killed_too(
    process: subprocess.Popen[bytes], second_process: subprocess.Popen[bytes]
) -> None:
    """The rank was importing when its launcher was killed. The recovery waited for ever for the rank to exit."""
    connected, late_rank = Rank(process), Rank(second_process)
    rig = Rig()
    rig.node.workers_of = lambda _job: [connected, *([late_rank] if connected.ended else [])]
    with anyio.fail_after(HANG_S):
        await Starts(rig.job)._end_rest()
    assert second_process.poll() == -9


async def test_the_user_of_a_job_that_is_killed_for_a_hang_is_notified(process: subprocess.Popen[bytes]) -> None:
    """The daemon killed a job without a snapshot, and hegmctl printed no reason."""
    rig = Rig()
    messages: list[str] = []

    async def notify(_do: str, _operation: str, *, message: str, hint: str) -> None:
        messages.append(f"{message}; {hint}")

    rig.supervisor.tell = notify
    rank = cast("Any", Rank(process))
    await ProtectedJob.kill(rig.job, [rank], "completed no step for 61 s, and was killed", None, "job.hung")
    assert process.wait(HANG_S) == -9
    assert messages == ["job j1 (train) completed no step for 61 s, and was killed; see: hegmctl recovery j1"]


async def test_the_daemon_learns_the_time_to_a_jobs_first_step(process: subprocess.Popen[bytes]) -> None:
    rig, fresh = Rig(), cast("Any", Rank(process))
    protection = Protection(rig.job)
    protection._learn_start([fresh], [fresh])  # the job may have trained for days before this daemon started
    assert rig.job.record.longest_start_s == 0.0
    protection._learn_start([fresh], [])
    fresh.identity.start_ticks -= 90 * TICKS_PER_S
    protection._learn_start([fresh], [fresh])
    assert rig.job.record.longest_start_s >= 90.0
    fresh.identity.start_ticks = 0
    protection._learn_start([fresh], [fresh])
    assert rig.job.record.longest_start_s < 90.0 + HANG_S


class Hanging(Starts):
    """Starts that hang at once."""

    def is_under_way(self) -> bool:
        return True


async def test_a_start_that_hangs_before_its_first_step_is_killed_with_its_command(
    second_process: subprocess.Popen[bytes],
) -> None:
    """The recovery waited for ever. The command may have no agent yet."""
    rig = Rig()
    rig.supervisor.pid = os.getpid()
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=second_process.pid, started=True, operation="j1")
    with anyio.fail_after(HANG_S):
        await Hanging(rig.job, least_start_s=0.0)._await_start(RecoveryAttempt(failed_utc=0.0, why=""))
    assert await anyio.to_thread.run_sync(second_process.wait) == -9
    assert rig.job.killed_for == ("job.hung: completed no step within 0 s of its start from a snapshot, and was killed")


class AnsweringRank:
    """A rank that answers after all ranks have received the request. It has then made `steps` more steps."""

    gpu, ended, on_cpu, parked = "gpu0", False, False, False
    all_asked: anyio.Event
    asked_ranks = 0

    def __init__(self, pid: int, world: int, steps: int = 0) -> None:
        self.pid, self._world, self._steps = pid, world, steps
        self.about = SimpleNamespace(run="now", rank=pid, restarted="j1", boundary=3)
        self.identity = SimpleNamespace(uid=1000, start_ticks=3)
        self.boundary = 4

    async def order(self, _do: str, **_how: Any) -> Any:
        AnsweringRank.asked_ranks += 1
        if AnsweringRank.asked_ranks == self._world:
            AnsweringRank.all_asked.set()
        await AnsweringRank.all_asked.wait()
        self.boundary += self._steps
        return SimpleNamespace(stacks=["in sleep"])


class StartedElsewhere(Starts):
    """The start of a job whose GPU was replaced by gpu1."""

    async def _end_rest(self) -> None: ...

    async def _await_room(self, why: str = "", quiet_s: float = 0.0) -> None: ...

    async def _gpus(self, snapshot: Any) -> tuple[str, ...]:
        return ("gpu1",)

    async def _start(self, snapshot: Any, gpus: Sequence[str]) -> None: ...

    async def _await_start(self, attempt: RecoveryAttempt) -> None: ...


async def test_gpus_of_a_job_that_is_starting_were_not_its_own_yet() -> None:
    """Until its first batch the record had the GPUs of before: others were placed on the new one."""
    rig = Rig()
    rig.job.snapshots = [SimpleNamespace(step=3, generation=2)]
    await StartedElsewhere(rig.job)._recover()
    assert rig.job.record.gpus == ("gpu1",)


@pytest.mark.parametrize("steps", [0, 9])
async def test_ranks_of_a_hung_start_get_the_request_together_and_survive_if_they_train(
    second_process: subprocess.Popen[bytes], steps: int
) -> None:
    """The daemon asked one rank after the other for five seconds each. It killed them although they had trained."""
    AnsweringRank.all_asked, AnsweringRank.asked_ranks = anyio.Event(), 0
    rig = Rig(*(AnsweringRank(pid, 3, steps) for pid in range(3)))
    rig.job.record = rig.job.record.replace(ranks=3)
    rig.supervisor.pid = os.getpid()
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=second_process.pid, started=True, operation="j1")
    with anyio.fail_after(HANG_S):
        assert await Hanging(rig.job)._end_start(1.0) == (not steps)
    assert (second_process.poll() is None) == bool(steps)
    assert bool(rig.job.killed_for) == (not steps)


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_job_that_completes_a_step_while_its_stacks_are_read_is_not_killed(steps: int) -> None:
    AnsweringRank.all_asked, AnsweringRank.asked_ranks = anyio.Event(), 0
    rig = Rig(AnsweringRank(0, 1, steps))
    rig.job.newest, rig.job.boundary = cast("Any", SimpleNamespace(step=3)), 4
    with anyio.fail_after(HANG_S):
        await Protection(rig.job)._end_hung(rig.job.own_workers(), 60.0)
    assert bool(rig.job.killed_for) == (not steps)


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_job_that_an_operation_takes_while_its_stacks_are_read_is_not_killed(*, is_taken: bool) -> None:
    AnsweringRank.all_asked, AnsweringRank.asked_ranks = anyio.Event(), 0
    rig = Rig(AnsweringRank(0, 1, 0))
    rig.supervisor.pid = os.getpid()
    rig.job.newest, rig.job.boundary = cast("Any", SimpleNamespace(step=3)), 4
    rig.node.is_kept_from_training = lambda _pid: is_taken and AnsweringRank.asked_ranks == 1
    with anyio.fail_after(HANG_S):
        await Protection(rig.job)._end_hung(rig.job.own_workers(), 60.0)
    assert bool(rig.job.killed_for) == (not is_taken)


@pytest.fixture
def restarted_ranks() -> Iterator[subprocess.Popen[bytes]]:
    """A launcher whose rank it has started again, with no batch yet. The rank ends with its standard input."""
    rank = f"TORCHELASTIC_RESTART_COUNT=1 {sys.executable} -c 'input()' <&3 & wait"
    read, write = os.pipe()
    with subprocess.Popen(["sh", "-c", f"exec 3<&0; {rank}"], stdin=read) as launcher:
        os.close(read)
        yield launcher
        launcher.kill()
        os.close(write)


async def test_ranks_that_torchrun_started_again_hung_for_ever_before_their_first_batch(
    restarted_ranks: subprocess.Popen[bytes],
) -> None:
    """The daemon watched ranks with a boundary only."""
    rig = Rig()
    rig.job.newest = cast("Any", SimpleNamespace(step=3))
    rig.job.record = rig.job.record.replace(ranks=2, launched=True)
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=restarted_ranks.pid)
    protection = Protection(rig.job)
    protection._starts = Starts(rig.job, least_start_s=0.0)
    with anyio.fail_after(HANG_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(protection._watch)
            await until_ended(os.pidfd_open(restarted_ranks.pid))
            tasks.cancel_scope.cancel()
    assert rig.job.killed_for == "job.hung: reached no batch within 0 s of its restart by torchrun, and was killed"


def test_time_while_a_job_is_stopped_does_not_count_as_start_time(second_process: subprocess.Popen[bytes]) -> None:
    """The daemon killed a job that Ctrl-Z or Slurm had stopped for ten minutes during its start."""
    rig = Rig()
    rig.supervisor.pid = second_process.pid
    starts = Starts(rig.job)
    assert not starts._is_paused()
    second_process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, second_process.pid, os.WSTOPPED)
    assert starts._is_paused()


def test_only_the_child_of_the_given_parent_is_killed(second_process: subprocess.Popen[bytes]) -> None:
    launchers.end_child(second_process.pid, os.getpid() + 1)
    assert second_process.poll() is None


async def test_a_job_continued_by_its_user_gets_a_new_recovery_budget() -> None:
    """After `--max-recoveries`, the daemon gave up a job continued by `--resume` at its first failure."""
    rig = Rig()
    rig.job.record = rig.job.record.spending(Budget(recoveries=3, fruitless=3, furthest_step=40))
    rig.supervisor.offer = rig.supervisor.offer.replace(pid=None, resumes="j1")
    Starts(rig.job)._begun_attempt()
    assert rig.job.record.budget == Budget(furthest_step=40)


class FailedStarts(StartedElsewhere):
    """Starts that end before their state is restored, and a supervisor that records why it gave up."""

    async def _gpus(self, snapshot: Any) -> tuple[str, ...]:
        return ("gpu0",)


async def _fail_starts(rig: Rig, tmp_path: Path, *ends: int | None, snapshots: int = 1, gpu: str = "healthy") -> str:
    """Have the command and then its starts end so. Return the message of giving up; empty if it was started again."""
    messages: list[str] = []
    times = itertools.count(100 * len(rig.job.record.attempts))

    async def tell(do: str, _job: str, *, message: str = "", **_hint: str) -> None:
        messages.extend([message] if do == "give-up" else [])

    async def look() -> Any:
        return SimpleNamespace(gpus=rig.gpus)

    rig.supervisor.tell = tell
    rig.node.look, rig.node.state_dir, rig.node.utc = look, tmp_path, lambda: float(next(times))
    rig.job.snapshots = [SimpleNamespace(step=9 + number, generation=number) for number in range(snapshots, 0, -1)]
    starts = FailedStarts(rig.job)
    for end in ends:
        rig.supervisor.offer = rig.supervisor.offer.replace(pid=None, fell=end, resumes=None if end else "j1")
        await starts.recover()
        rig.gpus[0] = rig.gpus[0].replace(health=_health(gpu))
    return "".join(messages)


@pytest.mark.parametrize("end", [-signal.SIGKILL, 128 + signal.SIGKILL, None])
async def test_starts_that_were_killed_from_outside_do_not_make_a_snapshot_bad(tmp_path: Path, end: int | None) -> None:
    """Two kills during starts from the only snapshot ended the job: it had "no complete snapshot to start from"."""
    rig = Rig()
    assert await _fail_starts(rig, tmp_path, -signal.SIGSEGV, end, end) == ""
    assert [one.result for one in rig.job.record.attempts] == [INTERRUPTED, INTERRUPTED, UNDER_WAY]
    assert rig.job.record.bad == ()


async def test_starts_on_a_gpu_that_fails_do_not_make_a_snapshot_bad(tmp_path: Path) -> None:
    rig = Rig()
    assert await _fail_starts(rig, tmp_path, -signal.SIGSEGV, 1, 98, gpu="gone") == ""
    assert rig.job.record.bad == ()


@pytest.mark.parametrize(("snapshots", "bad"), [(1, ()), (2, (2,))])
async def test_a_suspect_snapshot_is_left_only_for_an_older_one(
    tmp_path: Path, snapshots: int, bad: tuple[int, ...]
) -> None:
    """Two failed starts ended a job that had one snapshot."""
    rig = Rig()
    assert await _fail_starts(rig, tmp_path, -signal.SIGSEGV, 1, 1, snapshots=snapshots) == ""
    assert rig.job.record.bad == bad


async def test_a_job_whose_only_snapshot_cannot_be_restored_is_given_up_for_that(tmp_path: Path) -> None:
    """The message said that there was no complete snapshot."""
    message = await _fail_starts(Rig(), tmp_path, -signal.SIGSEGV, 98)
    assert "its last snapshot, of step 10, could not be restored, and it has no other" in message


@pytest.mark.parametrize("status", [98, 1], ids=["one process", "ranks behind their launcher"])
async def test_a_start_of_an_edited_script_ends_the_recovery_and_leaves_the_snapshot_usable(
    tmp_path: Path, status: int
) -> None:
    """Each snapshot was tried, and none was used again."""
    rig = Rig()
    lock_path(tmp_path, rig.job.record.job).write_bytes(EDITED)
    message = await _fail_starts(rig, tmp_path, -signal.SIGSEGV, status, snapshots=2)
    assert "its script was edited after the snapshot" in message
    await _fail_starts(rig, tmp_path, None, status, snapshots=2)
    assert rig.job.record.bad == (), "a second start, before the script was put back, took its snapshot for suspect"


async def test_a_damaged_snapshot_of_ranks_was_tried_twice(tmp_path: Path) -> None:
    """Their launcher hides the exit status of a rank."""
    rig = Rig()
    await _fail_starts(rig, tmp_path, -signal.SIGSEGV, snapshots=2)
    lock_path(tmp_path, rig.job.record.job).write_bytes(bytes(len(BACK)) + DAMAGED)
    await _fail_starts(rig, tmp_path, 1, snapshots=2)
    assert rig.job.record.bad == (2,)
    assert [one.generation for one in rig.job.record.attempts] == [2, 1]


async def test_a_start_that_hung_counts_against_its_snapshot(tmp_path: Path) -> None:
    """The daemon itself kills it."""
    rig = Rig()
    await _fail_starts(rig, tmp_path, -signal.SIGSEGV)
    rig.job.killed = "completed no step", None
    await _fail_starts(rig, tmp_path, -signal.SIGKILL)
    assert [one.result for one in rig.job.record.attempts][-2:] == [FAILED, UNDER_WAY]


class NumberedRounds(SnapshotRounds):
    """Rounds that hand out one number for each image."""

    operations: list[str]

    async def beside_image(self, operation: str, generation: int, bad: Any) -> BesideImage:
        self.operations.append(operation)
        return BesideImage(operation, 1, generation)

    async def slot_of(self, worker: Any, beside: BesideImage) -> tuple[int, int] | None:
        return worker.pid, beside.generation


def _protected(*workers: Any) -> tuple[Rig, Protection, NumberedRounds]:
    rig = Rig(*workers)
    rig.job.newest = cast("Any", SimpleNamespace(step=3))
    protection, rounds = Protection(rig.job), NumberedRounds(rig.job)
    rounds.operations, protection._rounds = [], rounds
    return rig, protection, rounds


async def test_all_ranks_take_a_due_snapshot_with_an_image() -> None:
    """One boundary serves the image and the snapshot: the training is parked once."""
    ranks = worker("now"), worker("now", pid=8)
    rig, protection, rounds = _protected(*ranks)
    assert [await protection.slot_beside_image("op1", rank) for rank in ranks] == [(7, 1), (8, 1)]
    assert rounds.operations == ["op1"]
    rig.job.snapshots = [SimpleNamespace(generation=1, step=9)]
    due = protection._due
    await protection._take()
    assert (rig.job.newest, protection.taken, rig.job.record.generation) == (rig.job.snapshots[0], 1, 1)
    assert protection._due > due
    assert not await protection._took_beside_image(), "the snapshot counts once"


async def test_the_slot_of_an_image_is_not_read_before_its_operation_ends() -> None:
    rig, protection, _ = _protected(worker("now"))
    rig.node.is_in_hand = lambda _pid: True
    await protection.slot_beside_image("op1", rig.node.workers[0])
    rig.node.workers[0].connected = False
    await protection._take()
    assert protection._beside is not None


@pytest.mark.parametrize(
    "why", ["no snapshot yet", "unprotected", "recovering", "taken just now", "only one rank has it"]
)
async def test_an_incomplete_snapshot_with_an_image_does_not_count(why: str) -> None:
    rig, protection, _ = _protected(worker("now"))
    if why == "no snapshot yet":
        rig.job.newest = None
    elif why == "unprotected":
        protection.why = "its state cannot be saved"
    elif why == "recovering":
        protection._starts.is_recovering = True
    elif why == "taken just now":
        protection.taken = 1
        protection._rounds.costs.append((10.0, 0.0))
        protection._wait(1000.0)
    slot = await protection.slot_beside_image("op1", rig.node.workers[0])
    assert (slot is None) == (why != "only one rank has it")
    rig.job.snapshots = [SimpleNamespace(generation=0, step=3)]
    newest = rig.job.newest
    assert not await protection._took_beside_image()
    assert (rig.job.newest, rig.job.record.generation) == (newest, 0)


class Ready(Protection):
    """A protection whose only process is ready for a snapshot."""

    async def _processes(self) -> tuple[list[Any], bool]:
        about = SimpleNamespace(images=None)
        return [SimpleNamespace(about=about, cuda=None, gpu="gpu0", pid=7, on_cpu=False)], False


class RoundsOfGenerators(SnapshotRounds):
    """Rounds whose snapshots do not keep these variables."""

    unkept: list[tuple[str, ...]]

    async def take(self, ranks: Sequence[Any], generation: int, bad: Sequence[int] = ()) -> Any:
        self.begins_anew = self.unkept.pop(0)
        return SimpleNamespace(generation=generation, step=9)


async def test_a_schedule_that_starts_over_was_announced_only_after_the_recovery() -> None:
    """The first snapshot shows it: an event and the user's terminal name each variable once."""
    rig = Rig()
    protection, rounds = Ready(rig.job), RoundsOfGenerators(rig.job)
    lrs, log = "lrs (generator) in main() at train.py:9", "log (TextIOWrapper) in main() at train.py:3"
    rounds.unkept = [(lrs, f"{UNSEEN}a list"), (lrs,), (log, lrs)]
    protection._rounds, messages = rounds, list[str]()

    async def notify(do: str, _operation: str, **said: str) -> None:
        messages.extend([said["message"]] if do == "note" else [])

    rig.supervisor.tell = notify
    for _ in range(3):
        await protection._take()
    assert messages == [f"a recovery of job j1 (train) starts over with: {name}" for name in (lrs, log)]
    assert rig.events == ["job.protected"] * 3, "the first says that there is a snapshot"
