"""Disturbances in the run over moves: cancellation, kills in a stage, and other programs that want the memory.

After each, the job has to run with all its bytes, and nothing may be left over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator

from hegmd.errors import HegmError
from hegmd.protocol.messages import CancelOperation, OperationReply, Resume, Suspend
from tests.gpu.moves_jobs import KINDS, Job
from tests.gpu.moves_node import OVER, ROOT, WentWrongError, until
from tests.gpu.moves_trial import Trial

GRABBER = ROOT / "tests/stubs/cuda/program.py"
# A job without memory waits longer and longer before the next attempt; it is watched for so long.
GRABBED_S = 6.0

Act = Callable[[Trial, str], None]


# ---- interruptions --------------------------------------------------------------------------------------------------


def interrupted(trial: Trial, stage: str, act: Act, carrier: str | None = None, kind: str = "plain") -> None:
    """A migration to which something happens when it is in that stage."""
    job = trial.job(kind)
    source, before = job.gpu, trial.look()
    op_id = trial.begin_migrate(job, 1 - source, carrier)
    _happens(trial, op_id, stage, act)
    trial.brought_home(job, trial.node.rest(op_id), source, 1 - source, before)
    _forget_if_driven(trial, job, carrier)


def interrupted_out(
    trial: Trial, stage: str, act: Act, carrier: str | None = None, *, keep_context: bool = False
) -> None:
    """The same to a suspension."""
    job = trial.job()
    source, before = job.gpu, trial.look()
    op_id = trial.begin(Suspend(pids=(job.pid,), carrier=carrier, keep_context=keep_context, wait=False))
    _happens(trial, op_id, stage, act)
    trial.brought_home(job, trial.node.rest(op_id), source, source, before)
    _forget_if_driven(trial, job, carrier)


def interrupted_in(
    trial: Trial, stage: str, act: Act, carrier: str | None = None, *, keep_context: bool = False
) -> None:
    """The same to a resume. With the stage `suspended` it happens before that, while the job is nowhere."""
    job = trial.job()
    source, before = job.gpu, trial.look()
    suspended = trial.suspend(job, carrier, keep_context=keep_context)
    op_id = suspended.id
    if stage == "suspended":
        act(trial, op_id)
        if keep_context:
            trial.kept(job, suspended, before)
        else:
            trial.gone(job, before)
        began = time.monotonic()
        until(lambda: _begins_to_resume(trial, job), "that it can be resumed")
        trial.note(f"resumed {time.monotonic() - began:.2f} s after that")
    else:
        op_id = trial.begin_resume(job)
        _happens(trial, op_id, stage, act)
    trial.brought_home(job, trial.node.rest(op_id), source, source, before)
    _forget_if_driven(trial, job, carrier)


def _begins_to_resume(trial: Trial, job: Job) -> bool:
    """Only once a new daemon has inspected it."""
    try:
        trial.begin_resume(job)
    except HegmError:
        return False
    return True


def _happens(trial: Trial, op_id: str, stage: str, act: Act) -> None:
    trial.note(f"in {trial.node.reach(op_id, stage)}")
    act(trial, op_id)


def _forget_if_driven(trial: Trial, job: Job, carrier: str | None) -> None:
    """Memory that the driver has brought back cannot be shown: cases that show theirs want a new one."""
    if carrier == "driver" and KINDS[job.kind.name].agent:
        trial.jobs.end(job.kind.name)


def cancel(trial: Trial, op_id: str) -> None:
    """As `hegmctl cancel` does; refused is an answer too."""
    try:
        with trial.node.connect() as connection:
            connection.call(CancelOperation(id=op_id), OperationReply)
    except HegmError as error:
        trial.note(f"not cancelled: {error.message[:60]}")


def kill_helper(trial: Trial, _: str) -> None:
    pid = trial.node.helper_pid()
    if pid is None:
        trial.note("there was no helper")
    else:
        os.kill(pid, signal.SIGKILL)


def kill_daemon(trial: Trial, _: str) -> None:
    trial.node.kill()
    held = len(trial.node.keeper.stored())
    trial.note(f"{held} descriptors kept without it")
    trial.node.start()


# ---- others on the GPUs ---------------------------------------------------------------------------------------------


def beside_neighbour(trial: Trial, kind: str, neighbour: str) -> None:
    """Another training is on the target GPU, and is delayed at most for the duration of the restore."""
    job, other = trial.job(kind), trial.job(neighbour)
    source = job.gpu
    if other.gpu == source:
        trial.migrate(other, 1 - source)
    before, began = trial.look(), time.monotonic()
    trial.migrate(job, 1 - source)
    trial.arrived(job, 1 - source, before)
    trial.found.gap_s = job.longest_gap_s(began)
    trial.arrived(other, 1 - source, before)
    trial.note(f"the neighbour's longest gap {other.longest_gap_s(began) * 1e3:.0f} ms")


@contextlib.contextmanager
def hoarding(trial: Trial, gpu: int) -> Generator[Callable[[], None]]:
    """Start a process that takes all memory on that GPU, in a loop, from its command on."""
    trial.jobs.settle()  # those on their way, and the undisturbed ones, would find no memory
    environ = {**trial.node.environ(), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    process = subprocess.Popen(
        [sys.executable, str(GRABBER), str(gpu), "8"],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def tell(word: str) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{word}\n")
        trial.note(process.stdout.readline().strip())

    try:
        process.stdout.readline()
        yield lambda: tell("hoard")
    finally:
        process.kill()
        process.communicate()
        until(lambda: not trial.node.gpus.account().places(process.pid), "that the grabber has nothing any more")


def grabbed(trial: Trial, kind: str, stage: str) -> None:
    """Have another process take all free memory of the target GPU, repeatedly, from that stage on. When it has exited,
    the job has to run without help.
    """
    job = trial.job(kind)
    source, before = job.gpu, trial.look()
    with hoarding(trial, 1 - source) as hoard:
        op_id = trial.begin_migrate(job, 1 - source, None)
        trial.note(f"in {trial.node.reach(op_id, stage)}")
        hoard()
        try:
            until(lambda: trial.node.story(op_id).operation.phase in OVER, "that it ends beside that", GRABBED_S)
            job.is_whole()
            trial.note("whole beside that")
        except WentWrongError as error:
            trial.note(str(error)[:100])
    ended = trial.node.rest(op_id)
    trial.brought_home(job, ended, source, 1 - source, before)
    if ended.phase == "suspended":
        raise WentWrongError("it is whole after a resume by hand, and should have come back by itself")


def grabbed_while_away(trial: Trial, kind: str) -> None:
    """All that was free is taken while the job is suspended: it stays, loses nothing, and comes back after that."""
    job = trial.job(kind)
    source, before = job.gpu, trial.look()
    trial.suspend(job)
    with hoarding(trial, source) as hoard:
        hoard()
        until(lambda: trial.node.gpus.account().used_mib[source] > 0.97 * _total_mib(trial, source), "that it is full")
        try:
            trial.node.ask(Resume(pid=job.pid, to=f"gpu{source}"))
            trial.note("resumed beside it")
        except HegmError as error:
            trial.note(f"refused: {error.message[:80]}")
    reply = trial.node.story(trial.node.hegmctl("ops")["operations"][-1]["id"]).operation
    if reply.phase == "suspended":
        trial.resume(job, source)
    else:
        trial.node.rest(reply.id)
    trial.arrived(job, source, before)


def _total_mib(trial: Trial, gpu: int) -> float:
    with trial.node.connect() as connection:
        return (connection.gpus().gpus[gpu].memory_total_bytes or 0) / (1 << 20)
