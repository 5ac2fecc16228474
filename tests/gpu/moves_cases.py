"""The cases of the run over moves: what is done to which trainings, and what has to be so afterwards.

Each case moves real jobs by real commands, and ends with the same questions: does the job go on with all its bytes, has
NVML it where it is to be and nowhere else, and is nothing held for it any more. `CASES` is in the order of importance;
the suffix of a name is the training, the carrier or the stage.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hegmd.errors import HegmError
from hegmd.protocol import operations as told
from hegmd.protocol.messages import CancelOperation, Migrate, OperationReply, Resume, Suspend
from tests.gpu.moves_jobs import KINDS, Job, Jobs, on_stub
from tests.gpu.moves_node import OVER, ROOT, Account, Node, WentWrongError, until

GRABBER = ROOT / "tests/stubs/cuda/program.py"
# What has no room waits longer and longer before the next attempt; so long it is watched while there is none.
GRABBED_S = 6.0
CARRIERS = ("peer", "host", "worker", "driver")
# Where an operation is interrupted; those between are over within a few milliseconds.
STAGES = ("arming", "quiescing", "evacuating", "checkpointing", "restoring", "refilling", "verifying")


@dataclass
class Findings:
    """What a case has seen, for the table."""

    carrier: str = ""
    blackout_s: float | None = None
    gap_s: float | None = None
    account: str = ""
    notes: list[str] = field(default_factory=list)


class Trial:
    """One case under way: the node, the jobs, and what was seen."""

    def __init__(self, node: Node, jobs: Jobs) -> None:
        self.node, self.jobs = node, jobs
        self.found = Findings()

    def job(self, kind: str = "plain") -> Job:
        return self.jobs.ready(kind)

    def note(self, text: str) -> None:
        self.found.notes.append(text)

    # -- what is asked -------------------------------------------------------------------------------------------------

    def migrate(self, job: Job, to: int, carrier: str | None = None) -> told.Operation:
        """By the command, or by the library where the carrier is not to be chosen."""
        if carrier is not None:
            reply = self.node.ask(Migrate(pids=(job.pid,), to=f"gpu{to}", carrier=carrier))
            return self._ended(reply, "done")
        return self._told(self.node.hegmctl("migrate", str(job.pid), "--to", f"gpu{to}"), "done")

    def suspend(self, job: Job, carrier: str | None = None) -> told.Operation:
        if carrier is not None:
            return self._ended(self.node.ask(Suspend(pids=(job.pid,), carrier=carrier)), "suspended")
        return self._told(self.node.hegmctl("suspend", str(job.pid)), "suspended")

    def resume(self, job: Job, to: int | None = None) -> told.Operation:
        words = [] if to is None else ["--to", f"gpu{to}"]
        return self._told(self.node.hegmctl("resume", str(job.pid), *words), "done")

    def begin(self, job: Job, to: int, carrier: str | None) -> str:
        """Have it moved without waiting for that; the operation."""
        reply = self.node.ask(Migrate(pids=(job.pid,), to=f"gpu{to}", carrier=carrier, wait=False))
        assert reply.operation is not None
        return reply.operation.id

    def _told(self, answer: dict[str, Any], phase: str) -> told.Operation:
        return self._ended(OperationReply.from_plain(answer, "what hegmctl said"), phase)

    def _ended(self, reply: OperationReply, phase: str) -> told.Operation:
        operation = reply.operation
        assert operation is not None
        if reply.plan is not None:
            self.found.carrier = reply.plan.workers[0].carrier
        if operation.phase != phase:
            raise WentWrongError(f"operation {operation.id} is {operation.phase}: {operation.failure}")
        if operation.blackout_s is not None:
            self.found.blackout_s = operation.blackout_s
        return operation

    # -- what has to be so ---------------------------------------------------------------------------------------------

    def arrived(self, job: Job, gpu: int, before: Account) -> None:
        """It runs on that GPU with all it had, and there alone; nothing is held, here or there."""
        job.is_whole()
        after = self.node.settle(before)
        places = after.places(job.pid)
        if list(places) != [gpu]:
            raise WentWrongError(f"process {job.pid} is on the GPUs {places}, and was to be on {gpu} alone")
        self._say_account(job, before, after)

    def _say_account(self, job: Job, before: Account, after: Account) -> None:
        was, now = before.places(job.pid), after.places(job.pid)
        places = [f"{mib:.0f}@{gpu}" for where in (was, now) for gpu, mib in where.items()]
        unowned = [after.unowned_mib(gpu) - before.unowned_mib(gpu) for gpu in range(len(after.used_mib))]
        self.found.account = "→".join(places) + " " + "/".join(f"{more:+.1f}" for more in unowned)

    def gone(self, job: Job, before: Account) -> None:
        """It has nothing on any GPU, and nobody has anything for it there."""
        places = self.node.gpus.account().places(job.pid)
        if places:
            raise WentWrongError(f"suspended, process {job.pid} has {places} MiB")
        self.node.settle_gpus(before)

    def brought_home(self, job: Job, ended: told.Operation, source: int, to: int, before: Account) -> None:
        """After an interruption: wherever it ended, the job has to go on; one that waits is let go on first."""
        self.note(ended.phase + (f": {ended.failure.message[:150]}" if ended.failure else ""))
        if ended.phase == "suspended":
            self.note("resumed by hand")
            self.resume(job)
        elif ended.phase not in {"done", "undone"}:
            raise WentWrongError(f"operation {ended.id} ended as {ended.phase}: {ended.failure}")
        gpu = to if ended.phase == "done" else source if ended.phase == "undone" else job.gpu
        self.arrived(job, gpu, before)
        if ended.blackout_s is not None:
            self.found.blackout_s = ended.blackout_s


# ---- operations -----------------------------------------------------------------------------------------------------


def move(trial: Trial, kind: str, carrier: str | None = None) -> None:
    """To the other GPU, by the carrier that is asked for, or else by the one that is right for this training."""
    job = trial.job(kind)
    source, before, began = job.gpu, trial.node.gpus.account(), time.monotonic()
    trial.migrate(job, 1 - source, carrier)
    trial.arrived(job, 1 - source, before)
    trial.found.gap_s = job.longest_gap_s(began)
    wanted = carrier or KINDS[kind].carrier
    if trial.found.carrier != wanted:
        raise WentWrongError(f"carried by {trial.found.carrier}, and {wanted} would have been right")


def rest(trial: Trial, kind: str, carrier: str | None = None, *, elsewhere: bool = False) -> None:
    """Off its GPU, with nothing left on any, and back, or on to the other."""
    job = trial.job(kind)
    source, before = job.gpu, trial.node.gpus.account()
    suspended = trial.suspend(job, carrier)
    trial.gone(job, before)
    to = 1 - source if elsewhere else None
    carried = trial.found.carrier
    resumed = trial.resume(job, to)
    trial.found.carrier = carried
    trial.arrived(job, source if to is None else to, before)
    if resumed.blackout_s is not None:
        trial.note(f"{suspended.size_bytes >> 20} MiB, resumed in {resumed.blackout_s * 1e3:.0f} ms")
    wanted = carrier or KINDS[kind].suspended_by
    if carried != wanted:
        raise WentWrongError(f"carried by {carried}, and {wanted} would have been right")


def swap(trial: Trial) -> None:
    """Two jobs change places."""
    one, other = trial.job("plain"), trial.job("amp")
    if one.gpu == other.gpu:
        trial.migrate(other, 1 - one.gpu)
    before, places = trial.node.gpus.account(), (one.gpu, other.gpu)
    trial.node.hegmctl("swap", str(one.pid), str(other.pid))
    trial.arrived(one, places[1], before)
    trial.arrived(other, places[0], before)


def drain(trial: Trial) -> None:
    """Everything off a GPU: with an agent and without."""
    trial.jobs.end_all(but=("plain", "amp", "cuda"))
    jobs = [trial.job("plain"), trial.job("amp"), trial.job("cuda")]
    gpu = jobs[0].gpu
    for job in jobs[1:]:
        if job.gpu != gpu:
            trial.migrate(job, gpu)
    trial.jobs.wait_for_references()
    before = trial.node.gpus.account()
    trial.node.hegmctl("drain", f"gpu{gpu}")
    for job in jobs:
        trial.arrived(job, 1 - gpu, before)
    left = trial.node.gpus.account()
    if left.by_process[gpu]:
        raise WentWrongError(f"gpu{gpu} was drained, and has {left.by_process[gpu]} MiB")
    trial.note(f"drained: {left.used_mib[gpu]:.1f} MiB in use")


# ---- interruptions --------------------------------------------------------------------------------------------------


def interrupted(trial: Trial, stage: str, act: Callable[[Trial, str], None], carrier: str | None = None) -> None:
    """A migration to which something happens when it is in that stage."""
    job = trial.job()
    source, before = job.gpu, trial.node.gpus.account()
    op_id = trial.begin(job, 1 - source, carrier)
    trial.note(f"in {trial.node.reach(op_id, stage)}")
    act(trial, op_id)
    trial.brought_home(job, trial.node.rest(op_id), source, 1 - source, before)
    trial.found.carrier = carrier or "peer"


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
    trial.node.start()


# ---- others want the memory -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def hoarding(trial: Trial, gpu: int) -> Generator[Callable[[], None]]:
    """A process that is ready to take all that there is on that GPU, in a loop, from the moment that it is told to."""
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
    """Somebody takes all that is free where the job goes, again and again, from that stage on."""
    job = trial.job(kind)
    source, before = job.gpu, trial.node.gpus.account()
    with hoarding(trial, 1 - source) as hoard:
        op_id = trial.begin(job, 1 - source, None)
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
    trial.found.carrier = KINDS[kind].carrier


def grabbed_while_away(trial: Trial, kind: str) -> None:
    """All that was free is taken while the job is suspended: it stays, loses nothing, and comes back after that."""
    job = trial.job(kind)
    source, before = job.gpu, trial.node.gpus.account()
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


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """What is done, with which trainings, and whether it belongs to the short run."""

    run: Callable[[Trial], None]
    kinds: tuple[str, ...] = ("plain",)
    core: bool = True
    carrier: str = ""

    @property
    def here(self) -> bool:
        """Whether it can be done on this node: nothing on a stub node copies its storages by itself."""
        by_worker = self.carrier == "worker" or any(KINDS[kind].carrier == "worker" for kind in self.kinds)
        return not (on_stub() and by_worker)


def _table() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for carrier in CARRIERS:
        cases[f"migrate-plain-{carrier}"] = Case(partial(move, kind="plain", carrier=carrier), carrier=carrier)
    cases["migrate-plain"] = Case(partial(move, kind="plain"))
    cases["suspend-plain"] = Case(partial(rest, kind="plain"))
    cases["resume-elsewhere-plain"] = Case(partial(rest, kind="plain", elsewhere=True))
    for kind in ("cuda", "graph", "expandable", "async", "amp"):
        cases[f"migrate-{kind}"] = Case(partial(move, kind=kind), (kind,))
        cases[f"suspend-{kind}"] = Case(partial(rest, kind=kind), (kind,))
    interruptions = {"daemon": kill_daemon, "helper": kill_helper, "cancel": cancel}
    for stage in ("evacuating", "checkpointing", "restoring", "refilling", "arming", "quiescing", "verifying"):
        for name, act in interruptions.items():
            core = stage == "checkpointing" or (stage in STAGES[2:6] and name != "cancel")
            cases[f"{name}-{stage}"] = Case(partial(interrupted, stage=stage, act=act), core=core)
    cases["grabbed-plain"] = Case(partial(grabbed, kind="plain", stage="quiescing"))
    cases["grabbed-cuda"] = Case(partial(grabbed, kind="cuda", stage="checkpointing"), ("cuda",))
    cases["grabbed-away"] = Case(partial(grabbed_while_away, kind="plain"))
    cases["swap"] = Case(swap, ("plain", "amp"))
    for kind in ("jax", "small", "streams", "workers", "compiled", "jax-boundary"):
        cases[f"migrate-{kind}"] = Case(partial(move, kind=kind), (kind,))
        cases[f"suspend-{kind}"] = Case(partial(rest, kind=kind), (kind,), core=kind in {"jax", "workers", "compiled"})
    for carrier in ("worker", "driver"):
        cases[f"suspend-plain-{carrier}"] = Case(
            partial(rest, kind="plain", carrier=carrier), ("plain",), False, carrier
        )
    for name, act in interruptions.items():
        for stage in ("evacuating", "refilling"):
            run = partial(interrupted, stage=stage, act=act, carrier="host")
            cases[f"{name}-{stage}-host"] = Case(run, core=False)
    cases["drain"] = Case(drain, ("plain", "amp", "cuda"))
    cases["migrate-large"] = Case(partial(move, kind="large"), ("large",))
    cases["suspend-large"] = Case(partial(rest, kind="large"), ("large",), core=False)
    return cases


CASES = _table()
LAST = "nothing-left"


def nothing_left(node: Node, jobs: Jobs, idle: Account) -> str:
    """With every job ended, each GPU has what it had before the first, to the MiB. Raises WentWrongError."""
    jobs.end_all()
    jobs.wait_for_references()

    def more() -> list[float]:
        account = node.gpus.account()
        return [now - was for now, was in zip(account.used_mib, idle.used_mib, strict=True)]

    until(lambda: all(abs(mib) < 1 for mib in more()), "that the GPUs are as they were at first")
    if node.keeper.stored():
        raise WentWrongError(f"the keeper still has {node.keeper.stored()}")
    pool = [os.readlink(f"/proc/{node.daemon.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{node.daemon.pid}/fd")]
    if any("memfd:hegm" in target or "anon_inode:nv" in target for target in pool):
        raise WentWrongError(f"the daemon still has {pool}")
    return f"{'/'.join(f'{mib:+.1f}' for mib in more())} MiB beside the start{' (stub)' if on_stub() else ''}"
