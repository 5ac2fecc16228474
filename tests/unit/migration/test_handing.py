"""An operation that writes an image: the process ends only once the image is whole, and is rolled back from every
earlier stage.
"""

from __future__ import annotations

from typing import Any

import pytest

from hegmd.errors import Refused
from hegmd.migration.machine import effects, events
from hegmd.migration.machine.describe import busy_message
from hegmd.migration.machine.operation import CHECKPOINT, SUSPEND, ImageRequest, Operation
from hegmd.migration.machine.stages import lets_train
from hegmd.migration.run.executor import EffectExecutor
from hegmd.workers.workers import Workers
from tests.unit.migration.operations import DrivenOperation, operation, worker


def checkpoint(*names: str, leave_running: bool = False, **values: Any) -> Operation:
    handoff = ImageRequest(path="/images/one", uid=1000, gid=1000, leave_running=leave_running)
    workers = [worker(name, to=None, kept_gpu="gpu0", **values) for name in names or ("a",)]
    return operation(*workers, kind=CHECKPOINT, image=handoff, is_distributed=len(workers) > 1)


def effect_tags(drive: DrivenOperation) -> list[str]:
    return [effect.tag for *_, wanted in drive.taken for effect in wanted]


def test_a_checkpoint_ends_the_process_after_its_image_is_whole() -> None:
    drive = DrivenOperation(checkpoint()).until("done")
    assert drive.phases == [
        "reserving",
        "quiescing",
        "measuring",
        "offloading",
        "checkpointing",
        "handing",
        "ending",
        "tidying",
        "done",
    ]
    assert effect_tags(drive)[-4:] == ["dump", "end", "release-reservation", "release-pool"]
    assert drive.op.failure is None
    assert not drive.op.workers[0].lost


def test_a_job_left_running_is_reloaded_and_verified() -> None:
    drive = DrivenOperation(checkpoint(leave_running=True)).until("done")
    assert "end" not in effect_tags(drive)
    assert drive.phases[-7:] == ["restoring", "reloading", "releasing", "verifying", "sealing", "tidying", "done"]
    assert effect_tags(drive)[-2:] == ["seal", "release-pool"]
    assert drive.op.workers[0].gpu == "gpu0"
    assert not drive.op.workers[0].has_exited


def test_a_job_left_running_is_not_parked_while_its_image_is_written_and_read_back() -> None:
    """The write needs the pool's bytes and nothing of the job, which was parked for four times as long as necessary."""
    drive = DrivenOperation(checkpoint(leave_running=True)).until("sealing")
    assert effect_tags(drive).index("dump") < effect_tags(drive).index("release") < effect_tags(drive).index("seal")
    assert drive.op.image is not None
    assert not drive.op.image.whole, "nobody has read it yet"
    drive.until("done")
    assert drive.op.image.whole


def test_a_job_is_expected_to_train_from_the_release_on_and_not_before() -> None:
    """A training that hung while its image was sealed, or at its first step after it was released, was not found."""
    ops = _passed(checkpoint("a", "b", leave_running=True))
    assert {op.phase for op in ops if lets_train(op)} == {"verifying", "sealing", "tidying"}
    suspend = operation(worker("a", to=None), kind=SUSPEND)
    assert not any(lets_train(op) for op in _passed(suspend, "suspended"))


def _passed(op: Operation, phase: str = "done") -> list[Operation]:
    """Each state of an operation on its way to that phase."""
    return [after for *_, after, _ in DrivenOperation(op).until(phase).taken]


def sealing(*names: str) -> DrivenOperation:
    return DrivenOperation(checkpoint(*names, leave_running=True)).until("sealing")


def test_a_request_for_a_job_whose_image_is_being_written_names_the_options() -> None:
    message, hint = busy_message(sealing().op, 4711)
    assert message == "the image of process 4711 is being written by operation op1 while it trains"
    assert hint == "wait for it: hegmctl op op1 --follow; or discard the image: hegmctl cancel op1"
    suspended = operation(worker(), phase="suspended")
    assert busy_message(suspended, 4711)[1] == "run: hegmctl resume 4711"


@pytest.mark.parametrize("how", ["it is whole", "it fails", "it is cancelled"])
def test_the_pool_keeps_the_bytes_of_an_image_until_they_are_written(how: str) -> None:
    """The state of the job does not matter then."""
    drive = sealing("a", "b")
    drive.feed(events.WorkerExited(worker="b", why="it has ended"))
    seal = drive.wanted.pop(0)
    drive.on(lambda: not drive.wanted)  # the only request that is possible now
    assert (seal.tag, drive.op.phase) == ("seal", "sealing")
    drive.wanted = [seal]
    if how == "it fails":
        drive.fail("refused")
    elif how == "it is cancelled":
        drive.feed(events.CancelRequested(by="somebody"))
        drive.wanted.remove(seal)
    assert "release-pool" not in effect_tags(drive)
    drive.until("done" if how == "it is whole" else "rolled-back")
    assert effect_tags(drive)[-2:] == ["release-pool", "release-pool"]


def test_a_bad_image_is_reported_and_the_job_continues() -> None:
    drive = sealing()
    drive.fail("broken")
    drive.until("rolled-back")
    assert effect_tags(drive)[-2:] == ["scrap", "release-pool"]
    assert drive.op.workers[0].gpu == "gpu0"
    assert drive.op.failure is not None
    assert drive.op.failure.message == "seal failed"


def test_an_image_cancelled_while_it_is_read_back_is_removed_and_needs_no_person() -> None:
    drive = sealing()
    drive.feed(events.CancelRequested(by="somebody"))
    assert [pending.effect for pending in drive.op.pending] == ["scrap"]
    with pytest.raises(Refused, match="is being removed"):
        drive.feed(events.CancelRequested(by="somebody"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "seal"]
    drive.until("rolled-back")
    assert effect_tags(drive)[-3:] == ["seal", "scrap", "release-pool"]


def test_an_image_not_read_back_in_time_is_removed() -> None:
    drive = sealing()
    drive.now = drive.op.deadline or 0.0
    drive.feed(events.DeadlinePassed())
    assert drive.op.failure is not None
    assert "did not write and verify the image within" in drive.op.failure.message
    assert (drive.op.deadline or 0.0) > drive.now, "it would ask at once again, and again"
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "seal"]
    drive.until("rolled-back")


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_job_that_ends_while_its_image_is_read_back_has_an_image(names: tuple[str, ...]) -> None:
    """Its agent is gone a moment before it is; the image needs neither."""
    drive = sealing(*names)
    for name in names:
        drive.feed(events.AgentLost(worker=name))
        drive.feed(events.WorkerExited(worker=name, why="it has ended"))
    assert "release-reservation" in effect_tags(drive), "what was held for it is given back meanwhile"
    drive.until("done")
    assert drive.op.failure is None
    assert effect_tags(drive).count("seal") == 1


def test_a_late_agent_does_not_make_an_image_be_read_twice() -> None:
    """Otherwise the running transfer would be cut, and a partly read image is useless."""
    drive = sealing()
    drive.feed(events.AgentLost(worker="a"))
    assert drive.op.phase == "settling"
    drive.now = drive.op.deadline or 0.0
    drive.feed(events.DeadlinePassed())
    assert "seal" in [pending.effect for pending in drive.op.pending]


def test_an_image_is_completed_even_if_its_job_cannot_resume() -> None:
    drive = DrivenOperation(checkpoint(leave_running=True)).until("restoring")
    drive.feed(events.WorkerExited(worker="a", why="it was killed"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "restore"]
    drive.until("lost")
    assert effect_tags(drive)[-2:] == ["seal", "release-pool"]
    assert drive.op.image is not None
    assert drive.op.image.whole


def test_an_image_that_was_written_just_when_it_was_dropped_was_left_over() -> None:
    """The image was forgotten, and its lock was held until the daemon ended."""
    drive = DrivenOperation(checkpoint(leave_running=True)).until("handing")
    drive.feed(events.CancelRequested(by="somebody"))
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "dump"]
    drive.until("rolled-back")
    assert effect_tags(drive)[-1] == "scrap"


def test_the_reservation_on_the_old_gpu_is_kept_until_the_image_is_whole() -> None:
    drive = DrivenOperation(checkpoint()).until("handing")
    assert "release-reservation" not in effect_tags(drive)
    assert drive.op.workers[0].reservations == {"gpu0": 10}


def test_one_dump_is_for_all_ranks_and_each_is_ended() -> None:
    drive = DrivenOperation(checkpoint("a", "b")).until("done")
    assert effect_tags(drive).count("dump") == 1
    assert effect_tags(drive).count("end") == 2


@pytest.mark.parametrize("leave_running", [True, False])
def test_an_image_that_cannot_be_made_leads_back(leave_running: bool) -> None:
    drive = DrivenOperation(checkpoint(leave_running=leave_running)).until("handing")
    drive.fail("refused")
    drive.until("rolled-back")
    assert "end" not in effect_tags(drive)
    assert drive.op.workers[0].gpu == "gpu0"
    assert drive.op.failure is not None
    assert drive.op.failure.message == "dump failed"


def test_a_cancel_during_an_image_drops_the_image_and_resumes_the_job() -> None:
    drive = DrivenOperation(checkpoint()).until("handing")
    drive.feed(events.CancelRequested(by="somebody"))
    assert [pending.effect for pending in drive.op.pending] == ["restore"]
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "dump"]
    drive.until("rolled-back")


def test_cancelling_is_refused_once_the_image_is_whole() -> None:
    drive = DrivenOperation(checkpoint()).until("ending")
    with pytest.raises(Refused, match="it has already done what was requested"):
        drive.feed(events.CancelRequested(by="somebody"))
    home = DrivenOperation(checkpoint(leave_running=True)).until("restoring")
    with pytest.raises(Refused, match="no longer be rolled back"):
        home.feed(events.CancelRequested(by="somebody"))


def test_an_agent_that_steps_aside_for_the_dump_is_not_waited_for() -> None:
    drive = DrivenOperation(checkpoint()).until("handing")
    drive.feed(events.AgentLost(worker="a"))
    assert drive.op.phase == "handing"
    drive.end()
    assert drive.op.phase == "ending"


def test_a_process_that_exits_once_its_image_is_complete_is_not_lost() -> None:
    drive = DrivenOperation(checkpoint()).until("ending")
    drive.feed(events.WorkerExited(worker="a", why="it was killed"))
    drive.until("done")
    assert drive.op.failure is None


def test_a_process_that_ends_while_its_image_is_made_is_lost_and_the_dump_is_dropped() -> None:
    drive = DrivenOperation(checkpoint()).until("handing")
    drive.feed(events.WorkerExited(worker="a", why="it was killed"))
    assert "dump" not in [pending.effect for pending in drive.op.pending]
    drive.wanted = [effect for effect in drive.wanted if effect.tag != "dump"]
    drive.until("lost")


def test_after_a_restart_the_image_is_searched_before_agents_are_queried() -> None:
    """A dump whose client has left may still pause the processes: no agent would answer."""
    drive = DrivenOperation(checkpoint()).until("handing")
    drive.wanted.clear()
    (found,) = drive.feed(events.Recovered())
    assert found.tag == "dump"
    assert found.to_plain()["find"] is True
    drive.end()
    assert [effect.tag for effect in drive.wanted] == ["end"]


def test_after_a_restart_processes_in_an_image_are_ended_without_an_inspection() -> None:
    drive = DrivenOperation(checkpoint()).until("ending")
    drive.wanted.clear()
    (end,) = drive.feed(events.Recovered())
    assert end.tag == "end"


def test_a_process_that_does_not_exit_is_signalled_again() -> None:
    drive = DrivenOperation(checkpoint()).until("ending")
    drive.fail("broken")
    drive.now = drive.op.deadline or 0.0
    (again,) = drive.feed(events.DeadlinePassed())
    assert again.tag == "end"
    assert drive.op.phase == "ending"


def test_a_late_image_rolls_back() -> None:
    drive = DrivenOperation(checkpoint()).until("handing")
    drive.now = drive.op.deadline or 0.0
    drive.feed(events.DeadlinePassed())
    assert drive.op.direction == "back"
    assert drive.op.failure is not None
    assert "did not finish handing within" in drive.op.failure.message


class DroppedDumps:
    """Makes images; of that it is only known whose dump was dropped."""

    def __init__(self) -> None:
        self.abandoned: list[str] = []

    async def abandon(self, op: Operation) -> None:
        self.abandoned.append(op.phase)


async def test_a_job_resumes_after_its_dump_was_cancelled_by_a_daemon_that_was_then_killed() -> None:
    """Or the dump had just finished.

    The daemon waited for the disconnected agent, and nothing made it connect again.
    """
    imager: Any = DroppedDumps()
    performer = EffectExecutor(Workers(), {}, {}, start_ticks=lambda _pid: None, imager=imager)
    drive = DrivenOperation(checkpoint()).until("handing")

    async def look() -> None:
        look_at = effects.Inspect(number=99, worker="a", cause=1)
        assert (await performer.perform(drive.op, look_at, lambda _: None, None)).tag == "worker-exited"

    await look()
    assert imager.abandoned == [], "it is to be written, or looked for"
    drive.feed(events.CancelRequested(by="somebody"))
    await look()
    assert imager.abandoned == ["restoring"]
    drive = DrivenOperation(checkpoint()).until("ending")
    await look()
    drive = DrivenOperation(checkpoint(leave_running=True)).until("restoring")
    await look()
    assert imager.abandoned == ["restoring"], "nobody has given that up"
    drive = DrivenOperation(checkpoint()).until("handing")
    drive.feed(events.WorkerExited(worker="a", why="it was killed"))
    release_pool = effects.ReleasePool(number=99, worker="a", cause=1)
    await performer.perform(drive.op, release_pool, lambda _: None, None)
    assert imager.abandoned == ["restoring", "tidying"], "its children stand"
