"""The machine with a process that only the driver can move, and with memory that is no longer free."""

from __future__ import annotations

from typing import Any

from hegmd.migration.machine import events
from hegmd.migration.machine.describe import waiting
from hegmd.migration.machine.operation import BACK, SUSPEND, JobProcess
from tests.unit.migration.operations import DrivenOperation, ending, operation, tags, worker


def bare(to: str | None = "gpu1", **values: Any) -> JobProcess:
    """A process without an agent: all it has goes with the driver."""
    plain: dict[str, Any] = {"token": "", "method": "driver", "carrier": "driver", "size_bytes": 0, "driver_bytes": 10}
    return worker(to=to, **{**plain, **values})


def _effects(drive: DrivenOperation) -> list[str]:
    return [effect.tag for _, _, _, wanted in drive.taken for effect in wanted]


def test_a_process_without_an_agent_gets_no_order() -> None:
    drive = DrivenOperation(operation(bare())).until("done")
    assert _effects(drive) == ["reserve", "checkpoint", "restore", "verify", "release-reservation"]
    assert drive.op.workers[0].previous_gpu == "gpu0"


def test_it_is_suspended_and_resumed_by_the_driver_alone() -> None:
    drive = DrivenOperation(operation(bare(to=None), kind=SUSPEND)).until("suspended")
    assert _effects(drive) == ["checkpoint", "release-reservation"]
    before = len(_effects(drive))
    drive.feed(events.ResumeRequested(to={"a": "gpu1"}))
    drive.until("done")
    assert _effects(drive)[before:] == ["reserve", "restore", "verify"]


def test_an_agents_process_is_parked_though_the_driver_carries_everything() -> None:
    drive = DrivenOperation(operation(bare(token="t"))).until("done")
    assert _effects(drive) == "reserve park survey checkpoint restore release verify release-reservation".split()
    assert drive.op.workers[0].size_bytes == 0, "what its agent counts would be held twice"


def test_a_restore_reserves_the_memory_measured_at_the_checkpoint() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "checkpoint" in tags(drive.wanted))
    (wanted,) = drive.end(driver_bytes=25, reserved_bytes=25)
    assert (wanted.tag, wanted.to_plain()["size_bytes"]) == ("reserve", 25)
    assert tags(drive.end()) == ["restore"]


def test_a_lost_rollback_reservation_is_made_again_before_its_use() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "checkpoint" in tags(drive.wanted))
    drive.end(driver_bytes=10, reserved_bytes=4)
    assert drive.op.direction != BACK
    wanted = drive.fail("out-of-memory")
    assert drive.op.direction == BACK
    assert [(effect.tag, effect.to_plain().get("gpu")) for effect in wanted] == [("inspect", None)]
    (wanted_room,) = drive.end(parked=False, gpu=None, reservations={"gpu0": 4})
    assert (wanted_room.tag, wanted_room.to_plain()["gpu"]) == ("reserve", "gpu0")


def test_an_interrupted_checkpoint_counted_as_a_kept_reservation_and_cost_a_pause() -> None:
    """The restore was refused, the reservation counted as kept, and everything tried again 5 s later, with the job off
    its GPU.
    """
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "checkpoint" in tags(drive.wanted))
    assert tags(drive.fail("broken")) == ["inspect"]
    (wanted,) = drive.end(parked=False, gpu=None, reservations={"gpu1": 10})
    assert (wanted.tag, wanted.to_plain()["gpu"]) == ("reserve", "gpu0")


def test_without_memory_for_the_reload_it_waits_and_reports_why() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "restore" in tags(drive.wanted))
    drive.fail("out-of-memory")
    drive.end(parked=False, gpu=None)
    for wanted in ["restore", *["reserve"] * 5]:
        assert tags(drive.wanted) == [wanted]
        drive.fail("out-of-memory")
        assert drive.op.waiting_for is not None
        assert (drive.op.phase, drive.wanted) == ("settling", [])
        assert drive.op.deadline is not None
        drive.now = drive.op.deadline
        drive.feed(events.DeadlinePassed())
        drive.end(parked=False, gpu=None)
    drive.until("rolled-back")
    assert drive.op.waiting_for is None
    assert "restore" in _effects(drive)
    assert drive.op.workers[0].gpu == "gpu0"


def _reloaded_without_room(**values: Any) -> DrivenOperation:
    """Return an operation that rolls back because its target had no memory, and finds none on the source either."""
    plain = {"token": "t", "carrier": "host", "size_bytes": 8, "driver_bytes": 2, **values}
    drive = DrivenOperation(operation(worker(method="driver", **plain)))
    drive.on(lambda: "reload" in tags(drive.wanted))
    drive.fail("broken")
    drive.end(parked=True, out_bytes=8, gpu="gpu1")
    drive.on(lambda: "reload" in tags(drive.wanted))
    assert (drive.op.direction, drive.op.workers[0].gpu) == (BACK, "gpu0")
    drive.fail("out-of-memory")
    return drive


def _after_a_while(drive: DrivenOperation) -> None:
    assert (drive.op.phase, drive.wanted) == ("settling", [])
    assert drive.op.deadline is not None
    drive.now = drive.op.deadline
    drive.feed(events.DeadlinePassed())
    drive.end(parked=True, out_bytes=8, gpu="gpu0")


def test_a_job_without_memory_for_its_storages_stayed_parked_until_a_manual_resume() -> None:
    """It waits with a reason, reserves memory for all processes once it is free, and resumes automatically."""
    drive = _reloaded_without_room()
    for _ in range(3):
        waits = waiting(drive.op)
        assert waits is not None
        assert "failed" in waits.why
        assert waits.next == "free GPU memory on gpu0: hegmd then restores it automatically"
        _after_a_while(drive)
        (taken,) = drive.wanted
        assert (taken.tag, taken.to_plain()["gpu"], taken.to_plain()["size_bytes"]) == ("reserve", "gpu0", 12)
        drive.fail("out-of-memory")
    _after_a_while(drive)
    drive.until("rolled-back")
    assert (drive.op.waiting_for, drive.op.workers[0].gpu, drive.op.workers[0].offloaded) == (None, "gpu0", False)


def test_storages_allocated_in_rounds_need_no_memory_for_all_at_once() -> None:
    """Some processes have their bytes already. The daemon would have requested their memory again, for ever."""
    drive = _reloaded_without_room(overlap_bytes=5)
    _after_a_while(drive)
    assert tags(drive.wanted) == ["reload"]
    drive.until("rolled-back")


def test_a_failed_checkpoint_in_a_rollback_leaves_the_job_waiting_for_memory() -> None:
    """Error 999 on two H200, while another process took all memory: the job was held, and a person had to resume it."""
    drive = DrivenOperation(operation(worker(token="t", method="driver", carrier="host", size_bytes=8, driver_bytes=2)))
    drive.on(lambda: "reload" in tags(drive.wanted))
    drive.fail("out-of-memory")
    drive.end(parked=True, out_bytes=8, gpu="gpu1")
    drive.on(lambda: "checkpoint" in tags(drive.wanted))
    drive.fail("broken")
    drive.end(parked=True, out_bytes=8, gpu="gpu1")
    drive.on(lambda: "reload" in tags(drive.wanted))
    drive.fail("out-of-memory")
    assert (drive.op.phase, drive.op.direction) == ("settling", BACK)
    assert drive.op.deadline is not None
    drive.now = drive.op.deadline
    drive.feed(events.DeadlinePassed())
    drive.end(parked=True, out_bytes=8, gpu="gpu1")
    drive.until("rolled-back")
    assert drive.op.workers[0].gpu == "gpu1"


def test_a_restore_without_driver_memory_is_retried_without_reserving_memory_twice() -> None:
    """It was held after the first attempt, and had to be resumed by hand while its storages were there."""
    drive = DrivenOperation(operation(worker(token="t", method="driver", carrier="host", size_bytes=8, driver_bytes=2)))
    drive.on(lambda: "reload" in tags(drive.wanted))
    drive.fail("driver-out-of-memory")
    assert drive.op.direction == BACK
    drive.end(parked=True, out_bytes=8, gpu="gpu1")
    drive.on(lambda: "reload" in tags(drive.wanted))
    for _ in range(3):
        drive.fail("driver-out-of-memory")
        assert (drive.op.phase, drive.wanted) == ("settling", [])
        waits = waiting(drive.op)
        assert waits is not None
        assert waits.next == "free GPU memory on gpu0: hegmd then restores it automatically"
        assert drive.op.deadline is not None
        drive.now = drive.op.deadline
        drive.feed(events.DeadlinePassed())
        drive.end(parked=True, out_bytes=8, gpu="gpu0")
        assert tags(drive.wanted) == ["reload"]
    drive.until("rolled-back")
    assert (drive.op.waiting_for, drive.op.workers[0].gpu, drive.op.workers[0].offloaded) == (None, "gpu0", False)


def test_a_process_that_the_driver_failed_is_lost_and_its_reservations_are_freed() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "restore" in tags(drive.wanted))
    drive.fail("broken")
    drive.end(parked=False, gpu=None, failed="the driver says so")
    drive.until("lost")
    assert drive.op.failure is not None
    assert drive.op.workers[0].reservations == {}


def test_a_process_restored_by_another_program_stays_on_its_gpu() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "restore" in tags(drive.wanted))
    drive.fail("broken")
    drive.end(parked=False, gpu="gpu1", reservations={"gpu0": 10, "gpu1": 10})
    drive.until("rolled-back")
    assert drive.op.workers[0].gpu == "gpu1"


def test_an_inspection_knows_the_gpu_of_a_process_checkpointed_during_a_crash() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "checkpoint" in tags(drive.wanted))
    drive.wanted.clear()
    drive.feed(events.Recovered())
    (inspect,) = drive.wanted
    drive.wanted.clear()
    drive.feed(ending(inspect, parked=False, gpu=None, reservations={}))
    assert drive.op.workers[0].previous_gpu == "gpu0"


def test_a_grown_process_is_journalled_and_has_its_reservation_before_its_checkpoint() -> None:
    drive = DrivenOperation(operation(bare()))
    drive.on(lambda: "checkpoint" in tags(drive.wanted))
    (checkpoint,) = drive.wanted
    (wanted,) = drive.feed(events.GrewBeyondPlan(effect=checkpoint.number, worker="a", driver_bytes=25))
    assert (drive.op.workers[0].driver_bytes, drive.op.workers[0].gpu) == (25, "gpu0")
    assert (wanted.tag, wanted.to_plain()["size_bytes"]) == ("reserve", 25)
    drive.wanted.remove(checkpoint)
    assert tags(drive.end()) == ["checkpoint"]
