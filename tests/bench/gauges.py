"""Readings of a running process, and statistics of many readings.

CPU is the kernel's own count for the whole process, threads that have ended included: the same that /proc/PID/stat
shows as utime and stime, but in nanoseconds where that counts in hundredths of a second. Memory is summed by the kernel
over the page tables when it is asked (smaps_rollup); VmRSS in /proc/PID/status is kept in parts for each core since
Linux 6.2, and may be off by more than what a benchmark looks for.
"""

from __future__ import annotations

import math
import os
import select
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from tests.e2e.daemon import RunningDaemon

MIB = 1 << 20
_CPUCLOCK_SCHED = 2


def cpu_s(pid: int) -> float:
    """CPU time that the process has used so far, in all its threads."""
    # The result of clock_getcpuclockid(3) for a pid; Python has that function for threads only.
    return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a process.

    `resident_bytes` counts every page it maps, `proportional_bytes` a shared page in equal parts for all who map it,
    and `anonymous_bytes` pages without a file, which no other process shares.
    """

    resident_bytes: int
    proportional_bytes: int
    anonymous_bytes: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
        kib = {key: int(rest.split()[0]) for key, _, rest in (line.partition(":") for line in lines)}
        return cls(kib["Rss"] << 10, kib["Pss"] << 10, kib["Anonymous"] << 10)


def wakeups(pid: int) -> int:
    """How often the threads that it has now gave up the processor to wait for something."""
    count = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                count += int(line.split()[1])
    return count


def machine_busy_s() -> float:
    """How long the processors of the machine were busy so far, all together; time stolen by other guests counts too."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    user, nice, system, _idle, _waiting, hard_interrupts, soft_interrupts, stolen = map(int, fields)
    return (user + nice + system + hard_interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


def let_run(daemon: RunningDaemon, seconds: float) -> None:
    """Leave the daemon alone for so long. Raises RuntimeError when it ends in that time."""
    watch = os.pidfd_open(daemon.process.pid)
    try:
        poll = select.poll()
        poll.register(watch, select.POLLIN)
        if poll.poll(seconds * 1000):
            raise RuntimeError(f"hegmd ended while it was measured: {daemon.log_text()}")
    finally:
        os.close(watch)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest of the values that at least so many percent of them do not exceed."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(percent / 100 * len(ranked)) - 1)]


def slope(values: Sequence[float]) -> float:
    """How much the values grow from one to the next: the median over all pairs, which single jumps do not move."""
    pairs = combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (right - left) for (left, earlier), (right, later) in pairs)
