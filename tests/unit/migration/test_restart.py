"""An operation whose worker leaves by ending: which process ends when, which continues in its place, and what is held
meanwhile.

Longer than 400 lines because all of it is reported one operation, from its first step to the next process's boundary.
"""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.memory.pool import Key, Pool
from hegmd.migration.carriers.prestart import PrestartService
from hegmd.migration.carriers.state import StateCarrier
from hegmd.migration.journal import records
from hegmd.migration.machine import events
from hegmd.migration.machine.describe import description, doing, waiting, way_of
from hegmd.migration.machine.effects import Inspect, Restore
from hegmd.migration.machine.next_effects import MAX_RETURNS
from hegmd.migration.machine.operation import BY_STATE, RESTART, Operation, Respawn
from hegmd.migration.run.executor import EffectExecutor
from hegmd.protocol import operations as told
from hegmd.workers.supervisors import Supervisors
from hegmd.workers.workers import Workers
from tests.unit.migration.operations import DrivenOperation, operation, tags, worker

OLD, NEW = (197, 7, "token-a"), (300, 9, "token-new")


def restart(to: str = "gpu1") -> Operation:
    leaving = worker(to=to, method=RESTART, carrier=BY_STATE, run="run-1", must_exit=True)
    return operation(leaving, respawn=Respawn(set={"A": "1"}))


def reborn(
    drive: DrivenOperation, gpu: str = "gpu1", who: tuple[int, int, str] = NEW, *, is_earlier: bool = False
) -> None:
    """End the restore with another process, parked at the boundary at which the state was saved."""
    pid, start_ticks, token = who
    fields = {"landed": gpu, "run": "run-1", "boundary": 5, "is_earlier": is_earlier}
    drive.end(pid=pid, start_ticks=start_ticks, token=token, **fields)


def found(drive: DrivenOperation, gpu: str = "gpu1", **facts: Any) -> None:
    drive.end(**{"parked": False, "boundary": 5, "gpu": gpu, "reservations": {gpu: 10}, "pool_bytes": 10, **facts})


def left() -> DrivenOperation:
    """Its process has ended as it was to, and another is wanted."""
    drive = DrivenOperation(restart()).until("checkpointing")
    drive.feed(events.WorkerExited(worker="a", why="it left"))
    drive.wanted = [effect for effect in drive.wanted if isinstance(effect, Restore)]
    return drive


def test_another_process_continues_in_its_place_and_proves_its_identity() -> None:
    drive = left()
    assert drive.op.phase == "restoring"
    reborn(drive)
    assert drive.op.phase == "settling"
    found(drive)
    drive.until("done")
    member = drive.op.workers[0]
    assert (member.pid, member.start_ticks, member.token, member.gpu) == (*NEW, "gpu1")
    assert drive.phases[:7] == [
        "reserving",
        "readying",
        "quiescing",
        "measuring",
        "offloading",
        "checkpointing",
        "restoring",
    ]
    assert drive.phases[-3:] == ["verifying", "tidying", "done"]


def test_no_part_of_the_state_is_released_before_the_next_boundary() -> None:
    drive = left()
    reborn(drive)
    found(drive)
    assert "release-pool" not in [tag for *_, wanted in drive.taken for tag in tags(wanted)]
    drive.until("tidying")
    assert drive.op.workers[0].verified


def test_a_process_may_be_restarted_where_it_is() -> None:
    """With another environment or Python: it has to leave although it is where it is to be."""
    drive = DrivenOperation(restart("gpu0")).until("offloading")
    assert tags(drive.wanted) == ["offload"]


@pytest.mark.parametrize("phase", ["reserving", "quiescing", "measuring", "offloading"])
def test_a_job_continues_after_a_failure_before_it_left_its_gpu(phase: str) -> None:
    drive = DrivenOperation(restart()).until(phase)
    drive.fail()
    while drive.wanted:
        found(drive, "gpu0", parked=True) if tags(drive.wanted)[0] == "inspect" else drive.end()
    assert drive.op.phase == "rolled-back"
    assert (drive.op.workers[0].pid, drive.op.workers[0].gpu) == (OLD[0], "gpu0")


def test_a_process_that_ends_before_its_state_is_saved_has_ended_and_nothing_is_lost_by_us() -> None:
    drive = DrivenOperation(restart()).until("offloading")
    drive.feed(events.WorkerExited(worker="a", why="killed"))
    drive.until("rolled-back")
    assert drive.op.workers[0].has_exited
    assert not drive.op.workers[0].lost


def test_a_process_killed_after_its_state_is_saved_is_replaced_all_the_same() -> None:
    """Killed between the end of saving and its own leaving: what it was is in the pool."""
    drive = DrivenOperation(restart()).until("checkpointing")
    drive.feed(events.AgentLost(worker="a"))
    drive.feed(events.WorkerExited(worker="a", why="killed"))
    assert drive.op.phase == "restoring"
    assert drive.op.workers[0].is_absent


def test_the_exit_of_a_process_that_has_left_requests_no_second_start() -> None:
    """The restart method reported the exit, and then the pidfd did: the daemon started two processes."""
    drive = DrivenOperation(restart()).until("checkpointing")
    drive.end(reserved_bytes=0)
    assert tags(drive.wanted) == ["restore"]
    assert drive.feed(events.WorkerExited(worker="a", why="it left")) == ()
    assert tags(drive.wanted) == ["restore"]


def test_a_process_that_has_ended_no_longer_counts_as_parked() -> None:
    """The order's end came before the kernel's word: the next one was mistaken for the first, continued by itself."""
    drive = DrivenOperation(restart()).until("checkpointing")
    drive.end()
    drive.feed(events.WorkerExited(worker="a", why="it left"))
    reborn(drive)
    found(drive)
    drive.until("done")
    assert drive.op.failure is None


def test_a_start_that_fails_has_it_started_where_it_was() -> None:
    drive = left()
    drive.fail("refused")
    drive.feed(events.WorkerExited(worker="a", why="it is not there any more"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "inspect"]
    assert drive.op.direction == "back"
    while drive.op.phase != "restoring":
        drive.end()
    assert drive.wanted[0].to_plain()["gpu"] == "gpu0"
    reborn(drive, "gpu0")
    found(drive, "gpu0")
    drive.until("rolled-back")
    assert drive.op.workers[0].gpu == "gpu0"


def test_if_no_process_can_be_started_the_state_is_held_and_resumed() -> None:
    drive = _held()
    assert drive.op.phase == "suspended"
    waits = waiting(drive.op)
    assert waits is not None
    assert waits.next == "hegmctl run --allow-restart --resume op1 -- COMMAND"
    member = drive.op.workers[0]
    assert member.is_absent
    assert member.pool_bytes == 10
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    assert drive.op.respawn is None  # the caller of the resume names what is different now
    while drive.wanted[0].tag != "restore":
        drive.end()
    reborn(drive)
    found(drive)
    drive.until("done")


def _held() -> DrivenOperation:
    """Return an operation whose state no process could continue from."""
    drive = left()
    for _ in range(1 + MAX_RETURNS):
        drive.fail("refused")
        ended(drive, "it is not there any more")
    return drive


def ended(drive: DrivenOperation, why: str) -> None:
    """Its process is gone; go on until another is to be started, or the state is held."""
    drive.feed(events.WorkerExited(worker="a", why=why))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "inspect"]
    while drive.op.phase != "suspended" and tags(drive.wanted)[:1] != ["restore"]:
        if drive.wanted:
            drive.end()
        else:  # it waits before another start
            drive.now = drive.op.deadline or 0.0
            drive.feed(events.DeadlinePassed())
            drive.wanted = [effect for effect in drive.wanted if effect.tag != "inspect"]


def test_a_process_that_fell_once_on_its_way_back_was_held() -> None:
    """As for a supervisor that was connecting again. Ranks are started up to three times."""
    drive = left()
    drive.fail("refused")
    ended(drive, "it is not there any more")
    drive.fail("refused")
    ended(drive, "it is not there any more")
    reborn(drive, "gpu0")
    ended(drive, "its GPU has failed")
    reborn(drive, "gpu0")
    found(drive, "gpu0")
    drive.until("rolled-back")
    assert drive.op.workers[0].gpu == "gpu0"


def test_a_held_state_could_not_be_dropped() -> None:
    drive = _held()
    assert drive.op.phase == "suspended"
    with pytest.raises(Refused) as refused:
        drive.feed(events.CancelRequested(by="ada"))
    assert "hegmctl cancel op1 --drop" in refused.value.hint
    drive.feed(events.DropRequested(by="ada"))
    drive.until("rolled-back")
    assert drive.op.failure is not None
    assert drive.op.failure.message == "ada dropped its saved state"
    member = drive.op.workers[0]
    assert (member.pool_bytes, member.reservations, member.lost) == (0, {}, False)


def test_held_bytes_of_a_living_process_are_not_dropped() -> None:
    drive = DrivenOperation(operation(worker(to=None, origin_gpu="gpu0"), kind="suspend")).until("suspended")
    with pytest.raises(Refused, match="process 197 is running and owns its saved state"):
        drive.feed(events.DropRequested(by="ada"))
    with pytest.raises(Refused) as refused:
        drive.feed(events.CancelRequested(by="ada"))
    assert "--drop" not in refused.value.hint


def test_a_process_that_falls_before_its_boundary_is_replaced_where_it_was_and_then_held() -> None:
    """Each start ends immediately: the daemon restarted the job for ever."""
    drive = left()
    for gpu in ("gpu1", *["gpu0"] * MAX_RETURNS):
        reborn(drive, gpu)
        ended(drive, "it ended")
    assert drive.op.phase == "suspended"
    assert drive.op.workers[0].pool_bytes == 10
    assert not drive.op.workers[0].lost


def test_a_process_restarted_by_its_supervisor_is_reported_at_its_actual_place() -> None:
    """Its supervisor had restarted it by itself, before the rollback's order."""
    drive = left()
    reborn(drive)
    drive.feed(events.WorkerExited(worker="a", why="it was killed"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "inspect"]
    assert drive.op.direction == "back"
    drive.on(lambda: drive.wanted[0].tag == "restore")
    reborn(drive, "gpu1", (301, 11, "token-again"), is_earlier=True)
    found(drive)
    drive.until("done")
    assert (drive.op.workers[0].pid, drive.op.workers[0].gpu, drive.op.failure) == (301, "gpu1", None)


@pytest.mark.parametrize("phase", ["checkpointing", "restoring"])
def test_a_new_daemon_starts_another_process_if_the_prestarted_one_is_gone(phase: str) -> None:
    drive = DrivenOperation(restart()).until("checkpointing") if phase == "checkpointing" else left()
    again = DrivenOperation(drive.op)
    again.feed(events.Recovered())
    assert tags(again.wanted) == ["inspect"]
    again.wanted.clear()
    again.feed(events.WorkerExited(worker="a", why="it is not there any more"))
    assert tags(again.wanted) == ["restore"]


def test_a_daemon_that_finds_the_next_one_training_after_a_start_is_done() -> None:
    drive = left()
    reborn(drive)
    again = DrivenOperation(drive.op)
    again.feed(events.Recovered())
    found(again, boundary=9)
    again.until("done")
    assert again.op.workers[0].pid == NEW[0]


@pytest.mark.parametrize("phase", ["restoring", "settling", "verifying"])
def test_a_training_that_finishes_before_its_next_boundary_is_done(phase: str) -> None:
    """It ended with 0 at once, and its operation was suspended: there was nothing left to continue for."""
    drive = left()
    if phase != "restoring":
        reborn(drive)
    if phase == "verifying":
        found(drive)
        drive.until("verifying")
    drive.feed(events.TrainingEnded(worker="a"))
    assert drive.op.workers[0].reservations.keys() >= {
        "gpu1"
    }  # also of a process whose memory has not been surveyed yet
    drive.until("done")
    assert drive.op.failure is None
    assert (drive.op.workers[0].has_exited, drive.op.workers[0].lost) == (True, False)
    assert drive.op.workers[0].pool_bytes == 0


def test_an_exit_that_counted_as_a_failure_before_its_status_was_known_still_counts() -> None:
    """The kernel reports the exit of a process sooner than its parent does."""
    drive = left()
    reborn(drive)
    found(drive)
    drive.feed(events.WorkerExited(worker="a", why="it ended"))
    assert drive.op.direction == "back"
    drive.feed(events.TrainingEnded(worker="a"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag == "reserve" or effect.tag.startswith("release-")]
    drive.until("done")
    assert drive.op.failure is None


def test_the_held_state_of_a_finished_training_is_released() -> None:
    drive = _held()
    assert drive.op.phase == "suspended"
    drive.feed(events.TrainingEnded(worker="a"))
    drive.until("done")
    assert drive.op.workers[0].pool_bytes == 0


@pytest.mark.parametrize(("begins", "other"), [(told.IMPORTING, told.READIED), (told.READIED, told.IMPORTING)])
def test_the_steps_of_the_next_process_are_reported_before_it_connects(begins: str, other: str) -> None:
    """The only visible phase of a restart, for most of its time, was `settling`."""
    drive = DrivenOperation(restart()).until("offloading")
    steps = [doing(drive.op)]
    drive.until("checkpointing")
    steps.append(doing(drive.op))
    drive.feed(events.WorkerExited(worker="a", why="it left"))
    drive.wanted = [effect for effect in drive.wanted if isinstance(effect, Restore)]
    steps.append(doing(drive.op))
    for news in (begins, told.LOADING):
        drive.feed(events.SuccessorProgress(worker="a", doing=news))
        steps.append(doing(drive.op))
    before = drive.op
    drive.feed(events.SuccessorProgress(worker="a", doing=told.LOADING))
    assert drive.op is before  # nothing that is known is written down again
    reborn(drive)
    steps.append(doing(drive.op))
    assert steps == [step for step in told.RESTART_STEPS if step != other]
    found(drive)
    drive.until("done")
    assert doing(drive.op) is None
    assert way_of(drive.op) == RESTART


def test_the_exit_of_a_training_with_an_incomplete_state_is_not_a_restart() -> None:
    drive = DrivenOperation(restart()).until("offloading")
    before = drive.op
    drive.feed(events.TrainingEnded(worker="a"))
    assert drive.op is before


@pytest.mark.parametrize("how", ["failed", "late", "crash"])
def test_a_job_is_parked_even_if_its_next_process_does_not_become_ready(how: str) -> None:
    """Nothing rests on that process: neither a failure nor a limit that passes is one of the restart, nor is it waited
    for a second time."""
    drive = DrivenOperation(restart()).until("readying")
    assert tags(drive.wanted) == ["await-successor"]
    if how == "failed":
        drive.fail()
    elif how == "late":
        drive.now = drive.op.deadline or 0.0
        drive.feed(events.DeadlinePassed())
    else:
        drive.feed(events.Recovered())
        drive.wanted = [effect for effect in drive.wanted if effect.tag == "inspect"]
        found(drive, "gpu0", reservations={"gpu0": 10, "gpu1": 10})
    assert (drive.op.phase, tags(drive.wanted)[-1], drive.op.direction) == ("quiescing", "park", "forward")


def test_a_cancel_does_not_wait_for_the_next_process() -> None:
    drive = DrivenOperation(restart()).until("readying")
    drive.feed(events.CancelRequested(by="somebody"))
    assert not any(pending.effect == "await-successor" for pending in drive.op.pending)
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "await-successor"]
    drive.until("rolled-back")
    assert "park" not in [tag for *_, wanted in drive.taken for tag in tags(wanted)]


@pytest.mark.parametrize("phase", ["reserving", "readying", "quiescing", "offloading"])
def test_a_training_that_ends_of_itself_before_it_was_moved_is_done(phase: str) -> None:
    """It had trained on until the next process was ready, and its last batch came first: the restart had failed."""
    drive = DrivenOperation(restart()).until(phase)
    drive.feed(events.WorkerExited(worker="a", why="it ended", finished=True))
    drive.wanted = [effect for effect in drive.wanted if drive.op.pending_numbered(effect.number)]
    drive.until("done")
    assert drive.op.failure is None
    assert drive.op.workers[0].reservations == {}
    assert description(drive.op).note == "process 197 finished its training before it was moved"


def test_a_process_that_ends_during_its_return_is_reported_where_it_was() -> None:
    drive = DrivenOperation(restart()).until("readying")
    drive.feed(events.CancelRequested(by="somebody"))
    drive.feed(events.WorkerExited(worker="a", finished=True))
    drive.wanted = [effect for effect in drive.wanted if drive.op.pending_numbered(effect.number)]
    drive.until("rolled-back")


def test_it_survives_the_journal() -> None:
    op = left().op
    assert Operation.from_plain(op.to_plain(), "op") == op
    assert records.opening(op, 0.0)


def test_a_state_that_a_reboot_took_along_was_waited_for_for_ever() -> None:
    drive = left()
    drive.fail("refused")
    drive.feed(events.WorkerExited(worker="a", why="it is not there any more", stateless=True))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "inspect"]
    while drive.wanted:
        drive.end()
    assert drive.op.phase == "lost"
    assert drive.op.failure is not None
    assert "no copy of its state is left" in drive.op.failure.message
    assert not drive.op.workers[0].pool_bytes


async def test_the_inspection_of_an_exited_process_reports_whether_its_state_exists() -> None:
    pool = Pool(64 << 20)
    supervisors = Supervisors(lambda _pid: None)
    carrier = StateCarrier(pool, supervisors, PrestartService(supervisors, lambda _subject, _gpu: {}))
    performer = EffectExecutor(Workers(), {}, {BY_STATE: carrier}, start_ticks=lambda _pid: None)
    op = left().op
    inspection = Inspect(number=1, worker="a", cause=1)
    for piece in (0, 4096):
        if piece:
            await pool.take(Key(op.id, "a"), piece)
        event = await performer.perform(op, inspection, lambda _: None, None)
        assert isinstance(event, events.WorkerExited)
        assert event.stateless is (piece == 0)
    pool.close()


def test_a_process_that_exits_for_a_restart_is_not_reported_as_disconnected() -> None:
    """The operation failed. It has to wait for the exit, and then for the report of the successor."""
    drive = DrivenOperation(restart()).until("offloading")
    drive.feed(events.AgentLost(worker="a"))
    waits = waiting(drive.op)
    assert waits is not None
    assert "agent of process 197 is not connected" in waits.why
    drive = DrivenOperation(restart()).until("checkpointing")
    drive.feed(events.AgentLost(worker="a"))
    waits = waiting(drive.op)
    assert waits is not None
    assert waits.why == "process 197 has saved its state and is exiting"
    drive = left()
    reborn(drive)
    drive.feed(events.AgentLost(worker="a"))
    waits = waiting(drive.op)
    assert waits is not None
    assert waits.why == "process 300, which continues from the saved state, has not reported its progress yet"
    drive.feed(events.AgentBack(worker="a", token=NEW[2]))
    found(drive)
    drive.until("tidying")
    drive.feed(events.AgentLost(worker="a"))
    waits = waiting(drive.op)
    assert waits is not None
    assert "agent of process 300 is not connected" in waits.why
