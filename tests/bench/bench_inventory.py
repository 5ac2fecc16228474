"""Measures what it costs the daemon to look at 8 GPUs and 2,000 processes, in CPU time of all its threads.

The processes are real: children that sleep, with their own pids, pidfds, control groups and command lines, read from
the real /proc. The benchmark leaves out the vendor's library: the provider gives prepared snapshots, new objects each
time as a real one would, so NVML's own time comes on top (tests/gpu measures that on hardware). Times are CPU of this
process by the kernel's count, over all threads; `wall` is what a caller waits.
"""

from __future__ import annotations

import os
import resource
import signal
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from hegmd.node.devices.base import ProcessUse, VendorSnapshot
from hegmd.node.inventory import Inventory
from hegmd.node.inventory.vendors import VendorWatch
from hegmd.node.processes import ProcessTable
from hegmd.protocol.snapshots import Gpu, GpuUse, Health
from hegmd.telemetry.events import EventLog

Row = tuple[str, float, str, "float | None"]

GPUS = 8
PROCESSES = 2000
ROUNDS = 30
BUDGET_MS = 50.0

_START = 'i=0; while [ $i -lt "$0" ]; do sleep 3600 & echo $!; i=$((i+1)); done; exec cat'


class Prepared:
    """A library with 8 GPUs whose processes' memory changes from one look to the next for a share of them."""

    vendor = "nvidia"

    def __init__(self, pids: list[int], changing: int) -> None:
        self._pids = pids
        self._changing = changing
        self._looks = 0

    def open(self) -> None:
        pass

    def close(self) -> None:
        pass

    def snapshot(self) -> VendorSnapshot:
        self._looks += 1
        gpus = tuple(self._gpu(index) for index in range(GPUS))
        uses = tuple(
            ProcessUse(pid, GpuUse(gpu=f"GPU-{number % GPUS}", vram_bytes=self._vram_bytes(number)))
            for number, pid in enumerate(self._pids)
        )
        return VendorSnapshot(gpus, uses, driver_version="580.1", library_version="13", compute_version="13.0")

    def _vram_bytes(self, number: int) -> int:
        return (1 << 28) + (self._looks if number < self._changing else 0)

    def _gpu(self, index: int) -> Gpu:
        return Gpu(
            id=str(index),
            index=index,
            uuid=f"GPU-{index}",
            name="NVIDIA H200",
            vendor="nvidia",
            chip="H200",
            memory_total_bytes=150 << 30,
            memory_used_bytes=self._looks,
            driver_version="580.1",
            health=Health(state="ok"),
        )


@contextmanager
def sleeping(count: int) -> Iterator[list[int]]:
    """Start that many idle processes in a process group of their own."""
    argv = ["sh", "-c", _START, str(count)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as group:
        assert group.stdout is not None
        try:
            yield [int(group.stdout.readline()) for _ in range(count)]
        finally:
            os.killpg(group.pid, signal.SIGKILL)


def _cpu_s() -> float:
    """CPU of all threads. The clock for it counts in nanoseconds, unlike getrusage on kernels that count in ticks."""
    return time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)


async def _measure(pids: list[int], changing: int) -> tuple[list[float], list[float]]:
    """CPU and wall time in milliseconds of the first refresh and those after it."""
    provider, table = Prepared(pids, changing), ProcessTable()
    cpu_ms: list[float] = []
    wall_ms: list[float] = []
    async with Inventory([VendorWatch(provider)], query_deadline_s=30, events=EventLog(), table=table) as inventory:
        for _ in range(1 + ROUNDS):
            cpu, wall = _cpu_s(), time.perf_counter()
            found = await inventory.refresh()
            cpu_ms.append(1000 * (_cpu_s() - cpu))
            wall_ms.append(1000 * (time.perf_counter() - wall))
            known = sum(process.command is not None for process in found.processes)
            if (len(found.gpus), known) != (GPUS, len(pids)):
                raise AssertionError(f"{len(found.gpus)} GPUs and {known} of {len(pids)} processes were found")
        if table.pidfd_count != len(pids):
            raise AssertionError(f"only {table.pidfd_count} processes are held by pidfd; raise the limit of open files")
    return cpu_ms, wall_ms


def run() -> list[Row]:
    """The rows for docs/benchmarks.md."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    with sleeping(PROCESSES) as pids:
        quiet_cpu, quiet_wall = anyio.run(_measure, pids, 0)
        busy_cpu, _ = anyio.run(_measure, pids, PROCESSES)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    what = f"inventory of {GPUS} GPUs and {PROCESSES} processes"
    return [
        (f"{what}: refresh, nothing new, CPU p50", statistics.median(quiet_cpu[1:]), "ms", BUDGET_MS),
        (f"{what}: refresh, nothing new, CPU max", max(quiet_cpu[1:]), "ms", BUDGET_MS),
        (f"{what}: refresh, nothing new, wall p50", statistics.median(quiet_wall[1:]), "ms", None),
        (f"{what}: refresh, memory of all changed, CPU p50", statistics.median(busy_cpu[1:]), "ms", BUDGET_MS),
        (f"{what}: first look, all processes new, CPU", quiet_cpu[0], "ms", None),
    ]


if __name__ == "__main__":
    for name, value, unit, budget in run():
        print(f"{name:75} {value:8.2f} {unit}" + ("" if budget is None else f"   (budget {budget:g})"))
