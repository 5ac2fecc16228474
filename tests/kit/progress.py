"""The code distinguishes a busy driver from one that hangs by the progress of a step's bytes, which must be visible.

A row as in driver.py, in the same table, of which this is the door.
"""

from __future__ import annotations

from hegmd.gpu_helper import cuda
from hegmd.migration.methods.progress_probe import ProgressLimits, ProgressSample, has_moved, look_at
from tests.kit.driver import MIB, Rig, begin, eventually, goes_on, must, row
from tests.kit.several_gpus import ROWS

__all__ = ["ROWS"]

# A step of this size takes seconds on any GPU, so its progress is visible.
LONG_MIB = 1024
LOOK_S = 0.05


def sight_of(rig: Rig, pid: int) -> ProgressSample:
    """Return the daemon's view of a call in progress."""
    return look_at(pid, -sum(rig.look().used_bytes.values()))


@row()
def progress_of_a_copy_is_visible_during_the_step(rig: Rig) -> None:
    target, digest = begin(rig, rig.large_mib)
    cuda.lock(target.pid, 10_000)
    for step in ("checkpoint", "restore"):
        least_bytes = min(ProgressLimits().moved_bytes, rig.large_mib * MIB // 2)
        first = last = sight_of(rig, target.pid)
        caller, moves = rig.call(step, target.pid), 0
        while not caller.has_ended(LOOK_S):
            now = sight_of(rig, target.pid)
            if has_moved(last, now, least_bytes):
                last, moves = now, moves + 1
        _must_have_moved(rig, target.pid, first, least_bytes, step)
        must(moves > 1 or rig.large_mib < LONG_MIB, f"of {rig.large_mib} MiB only {moves} moves were seen in a {step}")
    cuda.unlock(target.pid)
    goes_on(target, digest)


def _must_have_moved(rig: Rig, pid: int, before: ProgressSample, least_bytes: int, step: str) -> None:
    eventually(
        lambda: has_moved(before, sight_of(rig, pid), least_bytes),
        f"neither the process's memory nor any GPU has changed by its {step}",
    )
