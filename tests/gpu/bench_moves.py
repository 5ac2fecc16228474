"""One command for a machine with two NVIDIA GPUs: how long do jobs stand when they are moved, and what takes it?

    PYTHONPATH=.:client python3 -m tests.gpu.bench_moves [--sizes 32,1,8,100] [--repeat 5] [--budget-s 240] [TASK...]

A training that holds so many GiB in 64 storages is moved by a real hegmd, by each carrier beside the driver alone. What
counts is what the training sees: from the end of its last step before to the end of the first one after, beyond what a
step takes. A suspension ends when hegmctl would say so, with nothing on any GPU; a resume begins when it is asked for.
Beside that the split by the daemon's own story and log, the limit of the link, and the plan's estimate. Tasks: `peer`,
`host`, `host-migrate`, `worker`, `driver`, `idle` (what the agent costs a step) and `arm` (until all is held, with and
without a helper there); without any, all of them, the most telling first, as far as the time goes. Every figure is
printed as it comes. Runs over the stub driver too, where its figures say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hegmd.protocol.messages import Migrate, OperationReply, Request, Resume, Suspend
from tests.gpu.moves_jobs import TRAINING, Lines, on_stub
from tests.gpu.moves_node import Node, WentWrongError, until
from tests.gpu.moves_timing import Measured, split_of, table

GIB = 1 << 30
STARTS_WITHIN_S = 120.0
PAUSE_WITHIN_S = 120.0
STEPS = 2000
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
TASKS = ("peer", "host", "host-migrate", "worker", "driver", "idle", "arm")
# What the driver carries by itself goes at 2.8 GB/s out and 8 back.
DRIVER_BYTES_PER_S = 2.0e9


class Held(Lines):
    """The training that holds so much."""

    def __init__(self, node: Node, size_gib: int, *, gpu: int = 0, agent: bool = True, steps: int = 0) -> None:
        self.node, self.size_gib = node, size_gib
        environ = {**node.environ(), "CUDA_VISIBLE_DEVICES": str(gpu), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        run = [sys.executable, "-m", "hegmctl", "run", "--no-daemon-start", "--"] if agent else []
        script = ["-m", "tests.gpu.training.pretended_held"] if on_stub() else [str(TRAINING / "held.py")]
        super().__init__([*run, sys.executable, *script, str(size_gib), *([str(steps)] if steps else [])], environ)

    def ready(self) -> str:
        """Wait until it steps and its agent attends; the digest of what it holds."""
        self.wait_for(lambda: bool(self.lines), "it did not begin", STARTS_WITHIN_S)
        until(self._attends, "that its agent attends")
        return self.lines[0]

    def _attends(self) -> bool:
        with self.node.connect() as connection:
            return any(there.pid == self.pid and there.agent for there in connection.processes().processes)

    def pause_since(self, asked_at: float) -> tuple[float, float]:
        """When the longest pause ended that was over after that moment, and how long it was.

        What the training holds has to be what it was. Others of the machine may hold it up too, but not so long.
        """
        self.wait_for(lambda: bool(self._pauses(asked_at)), "it did not stand", PAUSE_WITHIN_S)
        if len({line for line in self.lines if line.startswith("digest")}) > 1:
            raise WentWrongError(f"it holds something else than {self.lines[0]!r} by now")
        return max(self._pauses(asked_at), key=lambda pause: pause[1])

    def _pauses(self, asked_at: float) -> list[tuple[float, float]]:
        """Those after which its digest was told."""
        lines = self.lines[: len(self.lines) - (self.lines[-1:] != [] and self.lines[-1].startswith("pause"))]
        told = [line.split() for line in lines if line.startswith("pause")]
        return [(float(ended), float(took)) for _, ended, took in told if float(ended) >= asked_at]

    def wait_for_lines(self, count: int) -> None:
        """Wait until it has told so many."""
        self.wait_for(lambda: len(self.lines) >= count, f"{count} lines did not come", STARTS_WITHIN_S)


@dataclass
class Task:
    """What is measured of one size."""

    name: str
    size_gib: int
    repeat: int


class Bench:
    """The measuring, as far as the time goes."""

    def __init__(self, node: Node, ends: float) -> None:
        self.node, self._ends = node, ends
        self.measured: list[Measured] = []
        self.told: list[str] = []

    def time_is_over(self, needed_s: float) -> bool:
        return time.monotonic() + needed_s > self._ends

    def say(self, text: str) -> None:
        self.told.append(text)
        print(text, flush=True)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def run_size(self, size_gib: int, tasks: list[Task]) -> None:
        """All that is measured of one size, with one training."""
        with contextlib.closing(Held(self.node, size_gib)) as job:
            job.ready()
            self.say(f"{size_gib} GiB: {sum(self.node.gpus.account().places(job.pid).values()):.0f} MiB by NVML")
            for task in tasks:
                by_itself = size_gib * GIB / DRIVER_BYTES_PER_S if task.name == "driver" else 0.0
                for _ in range(task.repeat):
                    if self.time_is_over(5.0 + by_itself):
                        self.say(f"{task.name} at {size_gib} GiB was cut: the time is over")
                        return
                    self._once(job, task.name)

    def _once(self, job: Held, name: str) -> None:
        carrier = name.partition("-")[0]
        if name != "host":
            self._migrate(job, carrier)
        if name in {"host", "worker", "driver"}:
            self._suspend_and_resume(job, carrier)

    def _migrate(self, job: Held, carrier: str) -> None:
        (source,) = self.node.gpus.account().places(job.pid)
        asked_at = time.monotonic()
        reply, _, began_utc = self._ask(Migrate(pids=(job.pid,), to=f"gpu{1 - source}", carrier=carrier), "done")
        _, took_s = job.pause_since(asked_at)
        self._note(job, reply, "migrate", carrier, took_s, began_utc)

    def _suspend_and_resume(self, job: Held, carrier: str) -> None:
        out, out_at, out_utc = self._ask(Suspend(pids=(job.pid,), carrier=carrier), "suspended")
        asked_at = time.monotonic()
        back, _, back_utc = self._ask(Resume(pid=job.pid), "done")
        ended_at, took_s = job.pause_since(asked_at)
        self._note(job, out, "suspend", carrier, out_at - (ended_at - took_s), out_utc, until_utc=back_utc)
        self._note(job, back, "resume", carrier, ended_at - asked_at, back_utc)

    def _ask(self, request: Request, phase: str) -> tuple[OperationReply, float, float]:
        """The reply, when it came, and when it was asked for. Raises WentWrongError for one that went wrong."""
        began_utc = time.time()
        reply = self.node.ask(request)
        operation = reply.operation
        if operation is None or operation.phase != phase:
            raise WentWrongError(f"{request.op}: {operation}")
        return reply, time.monotonic(), began_utc

    def _note(
        self,
        job: Held,
        reply: OperationReply,
        action: str,
        carrier: str,
        took_s: float,
        since_utc: float,
        until_utc: float = float("inf"),
    ) -> None:
        assert reply.operation is not None
        story = self.node.story(reply.operation.id)
        story = story.replace(story=tuple(line for line in story.story if line.utc < until_utc))
        split = split_of(story, self.node.log_since(since_utc, until_utc), job.pid, since_utc)
        estimate_s = reply.plan.estimate_s if reply.plan is not None else None
        self.measured.append(Measured(job.size_gib, action, carrier, took_s, estimate_s, split))
        parts = ", ".join(f"{name} {value:.3f}" for name, value in split.items())
        print(f"  {job.size_gib} GiB {action} {carrier}: {took_s:.3f} s ({parts})", flush=True)

    # -- others --------------------------------------------------------------------------------------------------------

    def run_idle(self, repeat: int) -> None:
        """What a step takes with the agent in the process and without, side by side on two GPUs, places changing."""
        found: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(repeat):
            if self.time_is_over(25.0):
                break
            jobs = {
                agent: Held(self.node, 1, gpu=(turn + agent) % 2, agent=agent, steps=STEPS) for agent in (True, False)
            }
            for agent, job in jobs.items():
                with contextlib.closing(job):
                    job.wait_for_lines(6)
                    found[agent] += [float(line.split()[1]) for line in job.lines if line.startswith("step")]
        if found[True]:
            medians = {agent: statistics.median(values) * 1e6 for agent, values in found.items()}
            self.say(
                f"a step: {medians[False]:.1f} µs without the agent, {medians[True]:.1f} µs with it"
                f" ({medians[True] / medians[False] - 1:+.2%}; medians of {len(found[True])} of {STEPS} steps each)"
            )

    def run_arm(self, repeat: int) -> None:
        """From a move's being asked for until all is held and the helper is ready, when there is none yet."""
        with contextlib.closing(Held(self.node, 1)) as job:
            job.ready()
            took: dict[str, list[float]] = {"no helper": [], "a helper": []}
            for _ in range(repeat):
                helper = self.node.helper_pid()
                if helper is not None:
                    os.kill(helper, 9)
                    until(lambda: self.node.helper_pid() is None, "that the helper is gone")
                for several in took.values():
                    if self.time_is_over(5.0):
                        break
                    self._migrate(job, "peer")
                    several.append(self.measured.pop().split["arm"])
            for name, values in took.items():
                if values:
                    self.say(f"arming with {name} there: {statistics.median(values):.3f} s (median of {len(values)})")


@contextlib.contextmanager
def huge_pages(size_gib: int) -> Iterator[int]:
    """As many 2 MiB pages as the pool takes for so much, as far as they can be had; in GiB what there is."""
    if on_stub():
        yield 0
        return
    try:
        before = HUGE_PAGES.read_text()
        HUGE_PAGES.write_text(str((size_gib * GIB + size_gib * GIB // 32 + GIB) >> 21))
    except OSError:
        yield 0
        return
    try:
        yield int(HUGE_PAGES.read_text()) >> 9
    finally:
        HUGE_PAGES.write_text(before)


def warm(size_gib: int) -> None:
    """Touch so much memory once: some machines have it only from then on, and slowly."""
    from hegmd.pool import Key, Pool

    async def take() -> None:
        pool = Pool(size_gib * GIB)
        await pool.take(Key("warm", "0"), size_gib * GIB - size_gib * GIB // 16)
        pool.close()

    import anyio

    anyio.run(take)


def plan_of(asked: argparse.Namespace) -> list[tuple[int, list[Task]]]:
    """What is measured in which order: the most telling of every size first."""
    sizes = [int(text) for text in asked.sizes.split(",")]
    few = {size: asked.repeat if size <= 1 else asked.driver_repeat for size in sizes}
    first = [
        (size, [Task("peer", size, asked.repeat), Task("host", size, asked.repeat)]) for size in sizes if size < 64
    ]
    second = [(size, [Task("peer", size, asked.repeat)]) for size in sizes if size >= 64]
    third = [
        (size, [Task("driver", size, few[size]), Task("host-migrate", size, asked.repeat), Task("worker", size, 3)])
        for size in sizes
        if size < 64
    ]
    last = [(size, [Task("host", size, asked.repeat)]) for size in sizes if size >= 64]
    wanted = asked.tasks or TASKS
    plan = [(size, [task for task in tasks if task.name in wanted]) for size, tasks in (*first, *second, *third, *last)]
    return [(size, tasks) for size, tasks in plan if tasks]


def guarded(bench: Bench, what: str, work: Callable[[], None]) -> None:
    """One part that goes wrong does not end the others."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the time on such a machine is too dear for less
        bench.say(f"{what} WENT WRONG: {error}")
        traceback.print_exc()
        print(bench.node.log_tail(), flush=True)
        bench.node.renew()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], metavar="TASK")
    parser.add_argument("--sizes", default="32,1,8,100", help="in GiB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--driver-repeat", type=int, default=1, help="the same for the driver alone, over 1 GiB")
    parser.add_argument("--budget-s", type=float, default=240.0, help="begin nothing that would end after so long")
    parser.add_argument("--warm-gib", type=int, default=0, help="touch so much host memory first, beside the rest")
    asked = parser.parse_args()
    ends = time.monotonic() + asked.budget_s
    warming = threading.Thread(target=warm, args=(asked.warm_gib,), daemon=True)
    with ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-bench-")))
        node = held.enter_context(Node(folder))
        bench = Bench(node, ends)
        bench.say(f"driver {node.gpus.driver}, {len(node.gpus)} GPUs")
        if asked.warm_gib:
            warming.start()
        for size_gib, tasks in plan_of(asked):
            if any(task.name.startswith("host") for task in tasks):
                if warming.ident is not None:
                    warming.join()
                bench.say(f"{held.enter_context(huge_pages(size_gib))} GiB of 2 MiB pages for {size_gib} GiB")
            guarded(bench, f"{size_gib} GiB", partial(bench.run_size, size_gib, tasks))
            if bench.time_is_over(5.0):
                break
        for name, work in (("arm", bench.run_arm), ("idle", bench.run_idle)):
            if (not asked.tasks or name in asked.tasks) and not bench.time_is_over(10.0):
                guarded(bench, name, partial(work, asked.repeat))
        print("\n".join(["", *bench.told, "", table(bench.measured)]))
    return any("WENT WRONG" in line for line in bench.told)


if __name__ == "__main__":
    sys.exit(main())
