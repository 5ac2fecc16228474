"""The machine adopts a process that the driver has checkpointed and no journal mentions, and brings it to a GPU."""

from __future__ import annotations

from hegmd.memory.sizes import LAST_BYTES, UNSEEN_BYTES
from hegmd.migration.machine import events
from hegmd.migration.machine.adoption import DriverProcess, adopted_of_driver, driver_bytes_bound
from tests.unit.migration.operations import DrivenOperation, tags

GIB = 1 << 30


def driven(gpu: str | None) -> DrivenOperation:
    state = "checkpointed" if gpu is None else "locked"
    driver_bytes = 3 * GIB if gpu is None else 0
    found = DriverProcess(pid=7, start_ticks=1, uid=0, name="x", state=state, gpu=gpu, driver_bytes=driver_bytes)
    return DrivenOperation(adopted_of_driver("1", found, utc=0.0), phases=["suspended"])


def inspected(drive: DrivenOperation, gpu: str | None) -> None:
    """Inspect the process first, with these findings."""
    assert tags(drive.wanted) == ["inspect"]
    drive.end(gpu=gpu, parked=False, boundary=0, reservations={})


def test_the_reservation_of_an_unmeasured_process_is_its_upper_bound() -> None:
    assert driver_bytes_bound(10 * GIB, [80 * GIB, 80 * GIB]) == 10 * GIB + UNSEEN_BYTES
    assert driver_bytes_bound(400 * GIB, [40 * GIB, 80 * GIB]) == 80 * GIB - LAST_BYTES, "no GPU could ever hold it"
    assert driver_bytes_bound(10 * GIB, [None]) == 10 * GIB + UNSEEN_BYTES


def test_a_process_restored_elsewhere_is_on_its_target() -> None:
    drive = driven(None)
    drive.feed(events.ResumeRequested(to={"7": "gpu0"}))
    inspected(drive, None)
    assert tags(drive.wanted) == ["reserve"]
    drive.end()
    assert tags(drive.wanted) == ["restore"], "it is restored with room held"
    drive.end(landed="gpu1")
    assert (drive.op.workers[0].gpu, drive.op.workers[0].target_gpu) == ("gpu1", "gpu1")
    drive.until("done")
    assert "checkpoint" not in {pending.effect for _, _, op, _ in drive.taken for pending in op.pending}


def test_an_orphan_that_another_program_restored_meanwhile_is_not_moved() -> None:
    drive = driven(None)
    drive.feed(events.ResumeRequested(to={"7": "gpu0"}))
    inspected(drive, "gpu1")
    assert tags(drive.wanted) == ["verify"]
    drive.until("done")
    assert drive.op.workers[0].gpu == "gpu1"


def test_the_inspection_unlocks_a_locked_process_and_nothing_else() -> None:
    drive = driven("gpu1")
    drive.feed(events.ResumeRequested(to={"7": "gpu1"}))
    inspected(drive, "gpu1")
    assert tags(drive.wanted) == ["verify"]
    drive.until("done")
