"""One command for a machine with two NVIDIA GPUs: how long are jobs paused when they are moved, and what takes it?

    PYTHONPATH=.:client python3 -m tests.gpu.bench_moves [--state FILE] [--budget-s N] [--quick] [--rows]
                                                         [--sizes 32,100,8,1,0]
                                                         [--wheel FILE] [TASK...]

A training that holds so many GiB in 64 storages, or 10 MiB for 0, is moved by a real hegmd, by each carrier beside the
driver alone. What counts is what the training sees: from the end of its last step before to the end of the first one
after, beyond what a step takes. A suspension ends when hegmctl would say so, with nothing on any GPU; a resume begins
when it is asked for. Beside that the split by the daemon's own story and log, whose each moment was, the limit of the
link and the share of it, and the estimate; and for each aim whether it is kept.

Tasks: `peer`, `host`, `host-migrate`, `worker`, `driver`, `arm` (until all is held, with and without a helper there),
`idle` (what the agent costs a step, paired), `commands` (whole commands), `swap` (two exchange their GPUs), `killed`
(the daemon in mid-move), `client` (daemon start and `hegmctl gpus`), `adamw` (an AdamW training, by peer and by the
driver), `hegm` (HeGM 0.3.3 from its wheel on the same training), `helper` (helper_run); without any, all of them, the
most telling first. `--rows`: what the table of the targets needs.
With --state, a file with a line for every figure, it continues where it was cut. Prints every figure as it comes, and
Markdown at the end. With one GPU it suspends and resumes, and migrates nothing. Runs over the stub driver too, where
its figures say nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.gpu.bench_beside import ALONE, SIZE_GIB, run_adamw, run_arm, run_hegm, run_helper, run_idle
from tests.gpu.bench_commands import RUNS, TAKES_S, ready_settings
from tests.gpu.bench_held import Held
from tests.gpu.bench_record import Record, huge_pages, unwinding, warm
from tests.gpu.bench_ways import MoveCounts
from tests.gpu.moves_jobs import on_stub
from tests.gpu.moves_node import Node

MOVES = ("peer", "host", "host-migrate", "worker", "driver")
TASKS = (*MOVES, *RUNS, "arm", "idle", "adamw", "hegm", "helper")
# The rows of `rows_table`, by size; the driver last, since memory that it restored cannot be exported.
ROWS = {32: ("peer", "host-migrate", "worker", "driver"), 0: ("peer", "driver"), 100: ("peer",)}
# The sizes for the slow carriers, if none is given.
SLOW_GIB = 8
FEW_GIB = 64


@dataclass
class Task:
    """The measurements of one size, and their number."""

    name: str
    size_gib: int
    repeat: int


def plan_of(options: argparse.Namespace) -> list[tuple[int, list[Task]]]:
    """Return the order of measurements: the most informative of each size first. Each entry is one training."""
    sizes = [int(text) for text in options.sizes.split(",")]
    wanted = options.tasks or TASKS
    if options.rows:
        return [
            (size_gib, [Task(name, size_gib, _repeat(name, size_gib, options.repeat)) for name in names])
            for size_gib, names in ROWS.items()
        ]

    def tasks(size_gib: int, *names: str) -> list[Task]:
        return [Task(name, size_gib, _repeat(name, size_gib, options.repeat)) for name in names if name in wanted]

    first = [(size_gib, tasks(size_gib, "peer", "host")) for size_gib in sizes]
    then = [
        (size_gib, tasks(size_gib, *(("host-migrate",) if size_gib < FEW_GIB else ()), *_slow(size_gib)))
        for size_gib in sizes
    ]
    return [(size_gib, several) for size_gib, several in (*first, *then) if several]


def _slow(size_gib: int) -> tuple[str, ...]:
    """The driver last: what it has brought back cannot be shown any more."""
    return ("worker", "driver") if size_gib < FEW_GIB else ()


def _repeat(name: str, size_gib: int, repeat: int) -> int:
    if size_gib >= FEW_GIB and name != "peer":  # each has to have its pool first
        return min(repeat, 3)
    return min(repeat, 1) if name == "driver" and size_gib > SLOW_GIB else repeat


class Bench:
    """The measuring, as far as the time goes."""

    def __init__(self, node: Node, record: Record, ends: float) -> None:
        self.node, self.record, self.ends = node, record, ends
        self.ways = MoveCounts(node, record, ends)

    def run_moves(self, plan: list[tuple[int, list[Task]]], memory: Callable[[], None]) -> None:
        """Measure what is missing of each size; failed measurements are not repeated."""
        left = [(size_gib, [task for task in tasks if self._is_left(task)]) for size_gib, tasks in plan]
        left = [(size_gib, tasks) for size_gib, tasks in left if tasks]
        while left:
            left = self._run_until_wrong(left, memory)

    def _run_until_wrong(
        self, plan: list[tuple[int, list[Task]]], memory: Callable[[], None]
    ) -> list[tuple[int, list[Task]]]:
        """Start all trainings at once; each allocates at its turn. Return what is left."""
        with ExitStack() as held:
            waiting = [Held(self.node, size_gib) for size_gib, _ in plan]
            for job in waiting:
                held.callback(job.close)
            for number, (job, (size_gib, tasks)) in enumerate(zip(waiting, plan, strict=True), 1):
                if self.is_over(5.0):
                    self.record.say(f"cut before {size_gib} GiB: the time is over", keep=False)
                    return []
                if any(task.name.startswith("host") for task in tasks):
                    memory()
                if not guarded(self, f"{size_gib} GiB", partial(self._run_size, job, tasks)):
                    return plan[number:]  # by others: the daemon is another one now, which these do not know
        return []

    def _is_left(self, task: Task) -> bool:
        return not self.ways.is_done(task.name, task.size_gib, task.repeat)

    def _run_size(self, job: Held, tasks: list[Task]) -> None:
        job.begin()
        self.record.say(
            f"{job.size_gib} GiB: {sum(self.node.gpus.account().places(job.pid).values()):.0f} MiB by NVML", keep=False
        )
        for task in tasks:
            while not self.ways.is_done(task.name, task.size_gib, task.repeat):
                if self.is_over(5.0 + self.ways.needed_s(task.name, task.size_gib)):
                    self.record.say(f"{task.name} at {task.size_gib} GiB was cut: the time is over", keep=False)
                    break
                self.ways.once(job, task.name, task.repeat)
        job.leave()

    def is_over(self, needed_s: float) -> bool:
        return time.monotonic() + needed_s > self.ends


def guarded(bench: Bench, what: str, work: Callable[[], object]) -> bool:
    """Return whether it succeeded. A failed part does not end the others."""
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the time on such a machine is too dear for less
        bench.record.went_wrong(what, error)
        traceback.print_exc()
        print(bench.node.log_tail(), flush=True)
        bench.node.renew()
        return False
    return True


def run_beside(bench: Bench, options: argparse.Namespace) -> None:
    """Run the measurements that are not moves: each once, and recorded as done."""
    node, record = bench.node, bench.record
    works: dict[str, Callable[[], object]] = {
        **{name: partial(run, node, record, options.repeat) for name, run in RUNS.items()},
        "arm": partial(run_arm, bench.ways, options.repeat),
        "idle": partial(run_idle, node, record, options.repeat),
        "adamw": partial(run_adamw, node, record, options.hegm_gib, options.repeat),
        "hegm": partial(run_hegm, node, record, options.wheel, options.hegm_gib, bench.ends),
        "helper": partial(run_helper, node, record, quick=options.quick),
    }
    if options.wheel is None:
        record.say("HeGM is left out: no --wheel", keep=False)
        del works["hegm"]
    wanted = list(RUNS) if options.rows else options.tasks or TASKS
    for name, work in works.items():
        if name not in wanted or record.is_done(name):
            continue
        takes_s = TAKES_S.get(name) or ALONE[name]
        if bench.is_over(0.0 if on_stub() else takes_s):
            record.say(f"{name} was left for another time: it takes about {takes_s:.0f} s", keep=False)
        elif guarded(bench, name, work):
            record.done(name)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks", nargs="*", choices=[[], *TASKS], metavar="TASK")
    sizes = "in GiB, 0 for 10 MiB; from 64 on three times each, but for peer"
    parser.add_argument("--sizes", default="32,100,8,1,0", help=sizes)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="8 GiB, twice, and the helper with 8 GiB")
    parser.add_argument("--budget-s", type=float, default=540.0, help="begin nothing that would end after so long")
    parser.add_argument("--state", type=Path, help="a file of what is measured, a line of JSON each; made if not there")
    parser.add_argument("--wheel", type=Path, help="HeGM's wheel as pip downloads it; without it HeGM is left out")
    parser.add_argument("--hegm-gib", type=float, default=SIZE_GIB, help="what the training beside HeGM holds")
    parser.add_argument("--warm-gib", type=int, default=0, help="touch so much host memory first, beside the rest")
    parser.add_argument("--rows", action="store_true", help="only what the table of rows_table shows")
    parser.add_argument("--table", action="store_true", help="the tables of the state, and nothing else")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.repeat = "8", 2
    return options


def main() -> int:
    options = parsed()
    ends = time.monotonic() + options.budget_s
    record = Record(options.state)
    if options.table:
        print(record.markdown())
        return 0
    plan = plan_of(options)
    largest_gib = max((size for size, tasks in plan if any(task.name.startswith("host") for task in tasks)), default=0)
    settings = ready_settings() if options.rows or not options.tasks or "commands" in options.tasks else ""
    with ExitStack() as held:
        held.enter_context(unwinding())
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="hegm-bench-")))
        held.enter_context(huge_pages(record, largest_gib))
        warming = threading.Thread(target=warm, args=(options.warm_gib,), daemon=True)
        warming.start()
        node = held.enter_context(Node(folder, log_level="debug", settings=settings))
        record.say(f"driver {node.gpus.driver}, {len(node.gpus)} GPUs", keep=False)
        bench = Bench(node, record, ends)
        bench.run_moves(plan, warming.join)
        run_beside(bench, options)
    print("\n" + record.markdown())
    return record.wrong


if __name__ == "__main__":
    sys.exit(main())
