"""One command for a machine with an NVIDIA GPU: how soon is its memory free, and what do ready memory and kept contexts
save?

    PYTHONPATH=.:client python3 -m tests.gpu.bench_suspend [--sizes 32,1] [--repeat 5] [--modes keep-context,whole]
                                                           [--ready off,on,contexts]

A training that holds so many GiB is suspended and resumed by a real hegmd: with --keep-context and with the driver's
checkpoint, each without ready memory, with enough of it (`pool.ready_bytes`), and with contexts of the GPU helper
beside it (`pool.ready_helper`). Of each suspend it prints the seconds until the pool's memory is reserved, by the
daemon's own story; from the request until NVML shows the memory free; until the reply; and of the resume, from the
request until the training's next step. What the training prints, losses bit for bit and digests of all that it holds,
is compared with an undisturbed run. Ends with status 1 if anything differs, if the memory is not free, or if more stays
than the plan says. Runs over the stub driver too, where its figures say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES, whole_size
from hegmd.protocol.messages import OperationReply, Resume, Suspend
from tests.gpu.moves_jobs import Job, Kind, Lines, command_of, on_stub, visible
from tests.gpu.moves_node import MIB, Node, WentWrongError

GIB = 1 << 30
POLL_S = 0.002
FREE_WITHIN_S = 30.0
STEPS = 20000
MODES = ("keep-context", "whole")


@dataclass
class Row:
    """The measurements of one size, in one way."""

    size_gib: int
    mode: str
    ready: str
    prepared_s: list[float] = field(default_factory=list[float])
    free_s: list[float] = field(default_factory=list[float])
    replied_s: list[float] = field(default_factory=list[float])
    resumed_s: list[float] = field(default_factory=list[float])
    stays_mib: float = 0.0
    planned_mib: float | None = None

    def text(self) -> str:
        """The row as Markdown: medians, and of the first two the longest as well."""
        planned = "unknown" if self.planned_mib is None else f"{self.planned_mib:.0f}"
        figures = [f"{statistics.median(one):.3f}" for one in (self.replied_s, self.resumed_s)]
        spread = [f"{statistics.median(one):.3f} ({max(one):.3f})" for one in (self.prepared_s, self.free_s)]
        stays = f"{self.stays_mib:.0f} ({planned})"
        return " | ".join((f"| {self.size_gib}", self.mode, self.ready, *spread, *figures, stays)) + " |"


HEAD = (
    "| GiB | mode | ready memory | prepared s (max) | free s (max) | replied s | next step s | stays MiB (planned) |\n"
    "|---|---|---|---|---|---|---|---|"
)


class Watch:
    """When NVML showed that a process had no more than so much. A thread, since commands wait meanwhile."""

    def __init__(self, node: Node, pid: int, limit_mib: float) -> None:
        self._node, self._pid, self._limit_mib = node, pid, limit_mib
        self.at: float | None = None
        self.left_mib = 0.0
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        pause, deadline = threading.Event(), time.monotonic() + FREE_WITHIN_S
        while time.monotonic() < deadline:
            self.left_mib = sum(self._node.gpus.account().places(self._pid).values())
            if self.left_mib <= self._limit_mib:
                self.at = time.monotonic()
                return
            pause.wait(POLL_S)  # NVML does not report changes

    def wait(self) -> float:
        """When it was. Raises WentWrongError if it was not."""
        self._thread.join()
        if self.at is None:
            raise WentWrongError(f"process {self._pid} has {self.left_mib:.0f} MiB, over {self._limit_mib:.0f} MiB")
        return self.at


def once(node: Node, job: Job, row: Row) -> None:
    """Suspend it and resume it once. Raises WentWrongError where anything is not as it was to be."""
    held_mib = sum(node.gpus.account().places(job.pid).values())
    keeps = row.mode == "keep-context"
    planned = node.ask(Suspend(pids=(job.pid,), keep_context=keeps, dry_run=True)).plan
    assert planned is not None
    stays_bytes = planned.workers[0].stays_bytes
    row.planned_mib = None if stays_bytes is None else stays_bytes / MIB
    carried_mib = planned.size_bytes / MIB
    watch = Watch(node, job.pid, held_mib - 0.9 * carried_mib if keeps else 0.0)
    asked_at = time.monotonic()
    reply = node.ask(Suspend(pids=(job.pid,), keep_context=keeps))
    row.replied_s.append(time.monotonic() - asked_at)
    row.free_s.append(max(0.0, watch.wait() - asked_at))
    op_id = _is(reply, "suspended")
    row.stays_mib = sum(node.gpus.account().places(job.pid).values())
    if keeps and stays_bytes is not None and row.stays_mib > (stays_bytes + RESTORE_MARGIN_BYTES) / MIB:
        raise WentWrongError(f"{row.stays_mib:.0f} MiB stay, and {stays_bytes / MIB:.0f} MiB were planned")
    row.prepared_s.append(_prepared_s(node, op_id))
    steps = len(job.lines)
    asked_at = time.monotonic()
    _is(node.ask(Resume(pid=job.pid)), "done")
    job.wait_for(lambda: len(job.lines) > steps, "it does not train", 60.0)
    row.resumed_s.append(job.times[steps] - asked_at)
    job.is_whole()


def _is(reply: OperationReply, phase: str) -> str:
    operation = reply.operation
    if operation is None or operation.phase != phase:
        raise WentWrongError(f"it is not {phase}: {operation}")
    return operation.id


def _prepared_s(node: Node, op_id: str) -> float:
    """From the operation's first record until its pool memory was reserved and the copies were prepared."""
    lines = node.story(op_id).story
    reserved = [line.utc for line in lines if line.event == "pool-reserved"]
    return reserved[0] - lines[0].utc


def run_size(node: Node, folder: Path, size_gib: int, rows: Sequence[Row], repeat: int, wanted_bytes: int) -> None:
    """Measure all rows of that size with one training and its undisturbed run."""
    kind = Kind(f"held-{size_gib}", "peer", pad_mib=size_gib << 10, steps=STEPS)
    environ = {**node.environ(), **visible(len(node.gpus) - 1, 1)}
    del environ["HEGM_SOCKET"]
    with ExitStack() as held:
        reference = held.enter_context(closing(Lines(command_of(kind, folder, 0.0), environ)))
        job = held.enter_context(closing(Job(node, kind, reference, folder)))
        job.ready()
        for row in rows:
            for _ in range(repeat):
                node.wait_until_ready()
                once(node, job, row)
            print(row.text(), flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="32,1", help="in GiB")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--ready", default="off,on,contexts")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    sizes = [int(text) for text in options.sizes.split(",")]
    print(HEAD, flush=True)
    for ready in options.ready.split(","):
        held_gib = 0 if on_stub() else max(sizes)
        most_bytes = 0 if ready == "off" else whole_size(held_gib * GIB + GIB)
        helper = "contexts" if ready == "contexts" else "started"
        with tempfile.TemporaryDirectory(prefix="hegm-suspend-") as name:
            folder = Path(name)
            with Node(folder, settings=f'ready_bytes = {most_bytes}\nready_helper = "{helper}"\n') as node:
                for size_gib in sizes:
                    rows = [Row(size_gib, mode, ready) for mode in options.modes.split(",")]
                    try:
                        run_size(node, folder, size_gib, rows, options.repeat, most_bytes)
                    except WentWrongError as error:
                        print(f"{size_gib} GiB, ready memory {ready}: {error}\n{node.log_tail()}", flush=True)
                        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
