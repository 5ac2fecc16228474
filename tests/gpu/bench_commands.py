"""The waiting times of an operator: whole commands from their start, swaps, and a daemon that is killed during a move.

`bench_moves` measures how long a training is paused. Here the clock begins with the command, or with the kill. Each
training is asked afterwards whether it still holds what it held.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing

from hegmd.memory.sizes import whole_size
from hegmd.protocol.messages import Migrate
from tests.gpu.bench_held import Held
from tests.gpu.bench_record import GIB, Record
from tests.gpu.bench_suspend import Watch
from tests.gpu.moves_jobs import on_stub
from tests.gpu.moves_node import Node, WentWrongError
from tests.gpu.moves_timing import Measured

# About what each takes with 32 GiB, so that none is begun that would not end.
TAKES_S = {"commands": 90.0, "swap": 60.0, "killed": 60.0, "client": 20.0}
SIZE_GIB = 32
# The step in which the daemon is killed: the bytes are under way, and the process is on no GPU.
KILLED_IN = "checkpointing"


def ready_settings() -> str:
    """Settings of the pool with which pinned memory for a suspend, and the helper's contexts, are ready before it."""
    return f'ready_bytes = {_ready_bytes()}\nready_helper = "pinned"\n'


def _ready_bytes() -> int:
    return 0 if on_stub() else whole_size(SIZE_GIB * GIB + GIB)


def run_commands(node: Node, record: Record, repeat: int) -> None:
    """`migrate` (with two GPUs), `suspend` and `resume` from the start of the command; for `suspend` also until the
    memory is free."""
    with closing(Held(node, SIZE_GIB)) as job:
        job.begin()
        for _ in range(repeat):
            if len(node.gpus) > 1:
                words = ("migrate", str(job.pid), "--to", f"gpu{1 - node.gpu_of(job.pid)}", "--carrier", "peer")
                _note(record, "migrate, whole command", "peer", _command(node, job, *words))
            node.wait_until_ready()
            watch, began = Watch(node, job.pid, 0.0), time.monotonic()
            _note(
                record, "suspend, whole command", "host", _command(node, job, "suspend", str(job.pid), makes_step=False)
            )
            _note(record, "suspend, until free", "host", watch.wait() - began)
            _note(record, "resume, whole command", "host", _command(node, job, "resume", str(job.pid)))


def run_swap(node: Node, record: Record, repeat: int) -> None:
    """Two trainings exchange their GPUs: how long each of them is paused."""
    with ExitStack() as held:
        jobs = [held.enter_context(closing(Held(node, SIZE_GIB, gpu=gpu))) for gpu in (0, 1)]
        for job in jobs:
            job.begin()
        for _ in range(repeat):
            before = [node.gpu_of(job.pid) for job in jobs]
            asked_at = time.monotonic()
            node.hegmctl("swap", *(str(job.pid) for job in jobs))
            for job, gpu in zip(jobs, before, strict=True):
                _note(record, "swap", "", job.pause_since(asked_at)[1])
                if node.gpu_of(job.pid) == gpu:
                    raise WentWrongError(f"process {job.pid} is still on gpu{gpu}")


def run_killed(node: Node, record: Record, repeat: int) -> None:
    """The daemon is killed in mid-move and started at once: from the kill until the training has made a step."""
    with closing(Held(node, SIZE_GIB)) as job:
        job.begin()
        for _ in range(repeat):
            there = f"gpu{1 - node.gpu_of(job.pid)}"
            asked_at = time.monotonic()
            reply = node.ask(Migrate(pids=(job.pid,), to=there, carrier="peer", wait=False))
            assert reply.operation is not None
            node.reach(reply.operation.id, KILLED_IN)
            node.kill()
            killed_at = time.monotonic()
            node.start()
            _note(record, "daemon started again", "", time.monotonic() - killed_at)
            if (phase := node.rest(reply.operation.id).phase) not in {"done", "rolled-back"}:
                raise WentWrongError(f"after a kill in {KILLED_IN} the migration is {phase}")
            _note(record, "daemon killed in mid-move", "", job.pause_since(asked_at)[0] - killed_at)
            job.wait_for_agent()


def run_client(node: Node, record: Record, repeat: int) -> None:
    """A start of the daemon, with its first snapshot of the GPUs; `hegmctl gpus` beside Python that does nothing."""
    for _ in range(repeat):
        node.end()
        began = time.monotonic()
        node.start()
        _note(record, "daemon start", "", time.monotonic() - began, size_gib=0)
        for name, words in (("hegmctl gpus", ("-m", "hegmctl", "gpus")), ("python -c pass", ("-c", "pass"))):
            _note(record, name, "", _process_s(node, words), size_gib=0)


def _process_s(node: Node, words: Sequence[str]) -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, *words], env=node.environ(), stdout=subprocess.DEVNULL, check=True)
    return time.monotonic() - began


def _command(node: Node, job: Held, *words: str, makes_step: bool = True) -> float:
    """How long it took. With `makes_step`, the training has made a step after the command."""
    began = time.monotonic()
    node.hegmctl(*words)
    took_s = time.monotonic() - began
    if makes_step:
        job.pause_since(began)
    return took_s


def _note(record: Record, action: str, carrier: str, took_s: float, size_gib: int = SIZE_GIB) -> None:
    record.measure(Measured(size_gib, action, carrier, "", took_s, None, {}, {}))


RUNS = {"commands": run_commands, "swap": run_swap, "killed": run_killed, "client": run_client}
