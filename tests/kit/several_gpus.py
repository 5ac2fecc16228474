"""Facts that the code relies on about one process on several GPUs: maps, and access from one GPU to another.

Rows as in driver.py and video_memory.py, in the same table.
"""

from __future__ import annotations

from hegmd.gpu_helper import cuda
from tests.kit.driver import Rig, Target, fails, goes_on, must_be, row, swapped, take_off
from tests.kit.video_memory import ROWS

__all__ = ["ROWS"]


def begin_on_both(rig: Rig) -> tuple[Target, str]:
    """The driver initialised, and a program with a piece on each of the first two GPUs."""
    cuda.start()
    target = rig.start("0,1", 64, 32)
    return target, target.ask("digest")


@row(gpus=2)
def a_process_on_two_gpus_changes_them_and_comes_back(rig: Rig) -> None:
    target, digest = begin_on_both(rig)
    identity = [(device.uuid, device.uuid) for device in cuda.devices()]
    for pairs in (swapped(), identity, [], swapped()):
        take_off(target.pid)
        gone = [uuid for pid, uuid in rig.look().by_process if pid == target.pid]
        must_be(gone, [], "where NVML lists it while it is checkpointed")
        cuda.restore(target.pid, pairs)
        cuda.unlock(target.pid)
        goes_on(target, digest)
        must_be(target.ask("across"), "crossed", "a copy between its GPUs")
    shown = {uuid: used for (pid, uuid), used in rig.look().by_process.items() if pid == target.pid}
    must_be(set(shown), {device.uuid for device in cuda.devices()[:2]}, "where NVML lists it")


@row(gpus=2)
def a_restore_loses_a_process_whose_gpus_have_peer_access(rig: Rig) -> None:
    """Why an agent undoes that before; nothing outside of the process shows it."""
    target, _ = begin_on_both(rig)
    must_be(target.ask("reach"), "reached 0 0", "what enabling peer access answers")
    take_off(target.pid)
    with fails(cuda.INVALID_VALUE):
        cuda.restore(target.pid, swapped())
    for pairs in (swapped(), []):
        with fails(cuda.OPERATING_SYSTEM):
            cuda.restore(target.pid, pairs)


@row(gpus=2)
def peer_access_that_was_undone_before_is_no_trouble_and_is_refused_from_then_on(rig: Rig) -> None:
    """The agent of a process on several GPUs relies on this, also for a second move after refused calls."""
    target, digest = begin_on_both(rig)
    must_be(target.ask("part"), "parted 705 705", "what disabling answers where nothing was enabled")
    must_be(target.ask("reach"), "reached 0 0", "what enabling peer access answers")
    must_be(target.ask("part"), "parted 0 0", "what disabling peer access answers")
    for _ in range(2):
        take_off(target.pid)
        cuda.restore(target.pid, swapped())
        cuda.unlock(target.pid)
        goes_on(target, digest)
        must_be(target.ask("reach"), "reached 400 400", "what enabling answers after a restore")
        must_be(target.ask("part"), "parted 705 705", "what disabling answers after that")
        must_be(target.ask("across"), "crossed", "a copy between its GPUs")
