"""The visible state of a process during a driver call, and whether that call makes progress.

A call waits for a driver thread inside the process. If a signal or a debugger has stopped the process, the call never
returns. Otherwise it returns when all bytes are copied, and their progress is visible: into the process's memory, and
off or onto GPUs. So there are two reasons to give up: threads of the process have been stopped for a while, or the call
is far over its expected time and no byte has moved for a while. Slow is not stuck.

Owns these criteria and their messages; the caller of the driver (`driver_calls`) samples and asks. Blocks, and uses no
clock.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from hegmd.gpu_helper.link import Stuck

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_STOPPED = frozenset("Tt")
_ENDED = ("Z", "X")
# Index of the flags after the name in /proc/PID/stat, and its bit PF_EXITING (include/linux/sched.h, since 2.6).
_FLAGS, _EXITING = 6, 0x4
GIB = 1 << 30


class ProgressSample(NamedTuple):
    """A sample: bytes in the process's memory, bytes free on all GPUs, and its threads by their state.

    None means unknown. The letters of the states are those of proc(5).
    """

    resident_bytes: int | None = None
    free_bytes: int | None = None
    threads: Mapping[str, int] = MappingProxyType({})

    @property
    def stopped(self) -> int:
        """Return how many of its threads a signal or a debugger has stopped."""
        return sum(count for state, count in self.threads.items() if state in _STOPPED)


class ProgressLimits(NamedTuple):
    """The time limits. A step gets `floor_s`, and `times` its expected duration."""

    #: Between two looks. Most steps are over before the first.
    look_s: float = 1.0
    #: A debugger that only reads, or a shell's job control, has resumed the process by then.
    stopped_s: float = 2.0
    floor_s: float = 15.0
    times: float = 4.0
    #: Without anything having moved.
    quiet_s: float = 10.0
    #: Memory that may change without progress, such as by other threads of the process.
    moved_bytes: int = 16 << 20


class WatchedCall:
    """A call for one process, with the samples so far."""

    def __init__(self, op: str, pid: int, expected_s: float, patience: ProgressLimits, now: float) -> None:
        self._op, self._pid, self._expected_s, self._patience = op, pid, expected_s, patience
        self._began = self._moved = now
        self._stopped_since: float | None = None
        self._last: ProgressSample | None = None

    def judge(self, sample: ProgressSample, now: float) -> Stuck | None:
        """Why the caller should stop waiting for it, or None."""
        if self._last is None or has_moved(self._last, sample, self._patience.moved_bytes):
            self._last, self._moved = sample, now
        if not sample.stopped:
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        if self._stopped_since is not None and now - self._stopped_since >= self._patience.stopped_s:
            return self._of_stopped(sample, now)
        overdue = now - self._began >= self._patience.floor_s + self._patience.times * self._expected_s
        return self._of_quiet(sample, now) if overdue and now - self._moved >= self._patience.quiet_s else None

    def _of_stopped(self, sample: ProgressSample, now: float) -> Stuck:
        whole = sum(sample.threads.values())
        return Stuck(
            f"`{self._op}` of process {self._pid} is blocked: {sample.stopped} of the {whole} threads of the process "
            "are stopped by a signal or a debugger",
            f"run: kill -CONT {self._pid}; the driver then finishes the call",
            self._op,
            self._facts(sample, now),
        )

    def _of_quiet(self, sample: ProgressSample, now: float) -> Stuck:
        threads = ", ".join(f"{count} {state}" for state, count in sorted(sample.threads.items())) or "none visible"
        memory = "" if sample.resident_bytes is None else f", {sample.resident_bytes / GIB:.1f} GiB in its memory"
        return Stuck(
            f"the driver has been at `{self._op}` of process {self._pid} for {now - self._began:.0f} s, where "
            f"{self._expected_s:.1f} s were expected, and made no progress for {now - self._moved:.0f} s (threads: "
            f"{threads}{memory})",
            f"hegmd asks again for its state; look for an Xid in `dmesg`, and at /proc/{self._pid}/task/*/stack",
            self._op,
            self._facts(sample, now),
        )

    def _facts(self, sample: ProgressSample, now: float) -> dict[str, object]:
        return {
            "pid": self._pid,
            "waited_s": round(now - self._began, 1),
            "expected_s": round(self._expected_s, 1),
            "quiet_s": round(now - self._moved, 1),
            "threads": dict(sample.threads),
        }


def has_moved(before: ProgressSample, after: ProgressSample, least_bytes: int) -> bool:
    """True if at least that many bytes appeared or disappeared between two samples, in the process or on the GPUs."""
    pairs = ((before.resident_bytes, after.resident_bytes), (before.free_bytes, after.free_bytes))
    return any(one is not None and other is not None and abs(other - one) >= least_bytes for one, other in pairs)


def look_at(pid: int, free_bytes: int | None) -> ProgressSample:
    """Return a sample of the process; an empty one if it has exited."""
    threads: Counter[str] = Counter()
    resident_bytes: int | None = None
    proc = Path("/proc", str(pid))
    try:
        resident_bytes = int((proc / "statm").read_text().split()[1]) * _PAGE_BYTES
        for task in os.listdir(proc / "task"):
            threads[_state_of(proc / "task" / task) or "gone"] += 1
    except (OSError, ValueError, IndexError):
        pass  # it has ended, between two of these or before
    del threads["gone"]
    return ProgressSample(resident_bytes, free_bytes, threads)


def is_stopped(pid: int) -> bool:
    """True if a signal or a debugger has stopped the process; False if it has exited."""
    return _state_of(Path(f"/proc/{pid}")) in _STOPPED


def is_ending(pid: int) -> bool:
    """True if the process has ended or is ending: the kernel closes its files before it reports the exit."""
    try:
        fields = _stat_of(Path(f"/proc/{pid}"))
    except OSError:
        return not Path(f"/proc/{pid}").exists()
    return len(fields) > _FLAGS and (fields[0] in _ENDED or bool(int(fields[_FLAGS]) & _EXITING))


def _state_of(folder: Path) -> str:
    """Return the kernel's state letter of a process or thread; empty if it has exited."""
    try:
        return _stat_of(folder)[0]
    except (OSError, IndexError):
        return ""


def _stat_of(folder: Path) -> list[str]:
    """Return the fields after the name, which may be any bytes: the kernel cuts it after 15. Raises OSError."""
    return (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
