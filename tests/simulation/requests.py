"""Users' requests in a life: operations on jobs, resumes, cancels, and adoption of orphans."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.migration.machine import events
from hegmd.migration.machine.adoption import ParkedProcess, adopted
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.operation import (
    BY_STATE,
    CHECKPOINT,
    MIGRATE,
    QUIESCE,
    RESTART,
    SIMULATED,
    SUSPEND,
    ImageRequest,
    JobProcess,
    Limits,
    Operation,
)
from hegmd.migration.methods.driver import DriverMethod
from hegmd.protocol.operations import BY_DRIVER, KEEP_CONTEXT
from tests.simulation.daemon import Daemon
from tests.simulation.kept import KeptNode
from tests.simulation.node import Process

IMAGE = ImageRequest(path="/images/one", uid=1000, gid=1000)
LIMITS = Limits(
    arm_s=20.0, park_s=20.0, connect_s=20.0, move_s=30.0, hand_s=30.0, verify_s=20.0, settle_s=5.0, retry_s=5.0
)


def jobs(daemon: Daemon) -> list[list[Process]]:
    """The living processes of each job that has any."""
    found: dict[int, list[Process]] = {}
    for process in daemon.node.processes.values():
        if process.alive:
            found.setdefault(process.job, []).append(process)
    return list(found.values())


def ask(daemon: Daemon, random: Random) -> None:
    """Perhaps make a request."""
    for op in list(daemon.live_ops()):
        if daemon.luck("cancel"):
            daemon.take(op.id, events.CancelRequested(by="somebody"))
        elif op.phase == HOLDING and daemon.luck("resume"):
            _go_on_from(daemon, random, op)
        elif op.phase == "suspended" and daemon.luck("resume"):
            if random.random() < 0.2 and not daemon.node.alone and _may_be_written(op):
                daemon.take(op.id, events.ImageRequested(handoff=IMAGE))
            else:
                daemon.take(op.id, events.ResumeRequested(to={w.name: _goal(daemon, random, w) for w in op.workers}))
    for members in jobs(daemon):
        if any(process.name in daemon.node.unclaimed for process in members):
            if daemon.luck("adopt") and all(process.connected for process in members):
                adopt(daemon, members)
        elif daemon.luck("begin"):
            begin(daemon, random, members)


def _may_be_written(op: Operation) -> bool:
    return all(worker.gpu is None and worker.is_parked and not worker.keeps_context for worker in op.live)


def _goal(daemon: Daemon, random: Random, worker: JobProcess) -> str:
    """Any GPU; of one that keeps its context there, the one that it was on: a plan refuses all others."""
    home = worker.previous_gpu or worker.first_gpu
    return home if worker.keeps_context and home is not None else _any_gpu(daemon, random)


def _go_on_from(daemon: Daemon, random: Random, op: Operation) -> None:
    """Have a held operation continue, or become a suspension."""
    if random.random() < 0.5:
        daemon.take(op.id, events.ResumeRequested(to={}))
        return
    workers = [_worker(daemon.node.processes[worker.name], None) for worker in op.workers]
    into = _operation(daemon, SUSPEND, workers, is_distributed=op.is_distributed)
    daemon.take(op.id, events.Repurposed(into=into))


def begin(daemon: Daemon, random: Random, members: list[Process]) -> None:
    """Request a move of a job, if no operation has it and all of it trains."""
    if not all(p.runs and p.connected and p.gpu and p.has_bytes and not p.under_way for p in members):
        return
    if any(True for process in members for _ in daemon.live_ops(process.name)):
        return
    if any(process.asked_at is not None for process in members):
        return
    if members[0].communicators and len(members) < _world_size(daemon, members[0]):
        return  # a plan refuses a job of which a rank is missing
    kind = random.choice((MIGRATE, MIGRATE, MIGRATE, SUSPEND, SUSPEND, CHECKPOINT))
    if kind == SUSPEND and random.random() < 0.2 and not daemon.node.alone:
        kind = QUIESCE
    if kind == CHECKPOINT and daemon.node.alone:
        kind = SUSPEND
    if any(process.restarts for process in members):
        kind = MIGRATE
    if isinstance(daemon.node, KeptNode) and random.random() < 0.8:
        kind = SUSPEND
    same = _any_gpu(daemon, random)
    apart = random.random() < 0.2
    workers = []
    for process in members:
        goal = (
            process.gpu if kind == QUIESCE else None if kind != MIGRATE else _any_gpu(daemon, random) if apart else same
        )
        workers.append(_worker(process, goal))
    if isinstance(daemon.node, KeptNode):
        keeps = kind == SUSPEND and random.random() < 0.9
        for process in members:
            process.keeps_context = keeps
        workers = [worker.replace(method=KEEP_CONTEXT) if keeps else worker for worker in workers]
    is_distributed = daemon.node.is_distributed[members[0].job]
    if kind == MIGRATE and members[0].communicators and random.random() < 0.5:  # each where another one is
        goals = [worker.gpu for worker in workers]
        workers = [worker.replace(target_gpu=goal) for worker, goal in zip(workers, goals[1:] + goals[:1], strict=True)]
    op = _operation(daemon, kind, workers, is_distributed=is_distributed)
    op = op.replace(reserves_late=bool(members[0].communicators) and random.random() < 0.7)
    daemon.begin(_with_image(op, leave_running=random.random() < 0.5) if kind == CHECKPOINT else op)


def adopt(daemon: Daemon, members: list[Process]) -> None:
    """Have the daemon take the processes of a job that stand and that no operation has, and bring them back."""
    standing = [process for process in members if process.parked or not process.has_bytes]
    daemon.node.unclaimed.difference_update(p.name for p in members if p not in standing)
    if not standing:
        return
    op = adopted(_next_id(daemon), [_standing(daemon, process) for process in standing], utc=float(len(daemon.story)))
    if daemon.begin(op.replace(limits=LIMITS)):
        daemon.node.unclaimed.difference_update(process.name for process in standing)
        daemon.take(op.id, events.ResumeRequested(to=place(daemon, standing)))


def _standing(daemon: Daemon, process: Process) -> ParkedProcess:
    return ParkedProcess(
        pid=process.pid,
        start_ticks=7,
        uid=1000,
        token=process.token,
        world_size=_world_size(daemon, process),
        gpu=process.gpu,
        boundary=process.boundary,
        size_bytes=process.size_bytes,
        held_bytes=0 if process.has_bytes else process.size_bytes,
        communicators=process.communicators,
    )


def _world_size(daemon: Daemon, process: Process) -> int:
    if process.communicators:
        return sum(1 for other in daemon.node.processes.values() if other.job == process.job)
    return 2 if daemon.node.is_distributed[process.job] else 1


def place(daemon: Daemon, members: Iterable[Process]) -> dict[str, str]:
    """A GPU with room for each, or the one that it is on."""
    node = daemon.node
    free = {gpu: node.free(gpu) for gpu in node.capacity}
    to: dict[str, str] = {}
    for process in members:
        held = {gpu: node.held(process.name, gpu) for gpu in free}
        home = node.contexts.get(process.name) if isinstance(node, KeptNode) else None
        gpu = process.gpu or home or max(free, key=lambda gpu: free[gpu] + held[gpu])
        free[gpu] -= process.size_bytes - held[gpu]
        to[process.name] = gpu
    return to


def resume_what_is_suspended(daemon: Daemon) -> None:
    """In calm weather: every suspended job is resumed, one after the other, and every orphan one is adopted."""
    for op in list(daemon.live_ops()):
        members = [daemon.node.processes[worker.name] for worker in op.live]
        if op.phase == "suspended" and all(_can_go_on(p) for p in members):
            daemon.take(
                op.id, events.ResumeRequested(to={**dict.fromkeys(_names(op), "gpu0"), **place(daemon, members)})
            )
            return
    for members in jobs(daemon):
        if any(p.name in daemon.node.unclaimed for p in members) and all(p.connected for p in members):
            adopt(daemon, members)
            return


def _can_go_on(process: Process) -> bool:
    """Return whether it can answer, needs no process, or is to be another process."""
    return process.connected or not process.has_agent or (process.restarts and not process.alive)


def _names(op: Operation) -> list[str]:
    return [worker.name for worker in op.workers]


def _any_gpu(daemon: Daemon, random: Random) -> str:
    return random.choice(list(daemon.node.capacity))


def _worker(process: Process, goal: str | None) -> JobProcess:
    gpu = process.gpu
    alone = not process.has_agent
    by_restart = {"method": RESTART, "carrier": BY_STATE, "must_exit": True, "run": "run"} if process.restarts else {}
    worker = JobProcess(
        name=process.name,
        pid=process.pid,
        start_ticks=7,
        token=process.token,
        method=DriverMethod.name if alone else SIMULATED,
        carrier=BY_DRIVER if alone else "worker",
        origin_gpu=gpu,
        first_gpu=gpu,
        target_gpu=goal,
        gpu=gpu,
        size_bytes=0 if alone else process.size_bytes,
        driver_bytes=process.size_bytes + RESTORE_MARGIN_BYTES if alone else 0,
        reservations={} if gpu is None else {gpu: process.size_bytes},
        communicators=process.communicators,
    )
    return worker.replace(**by_restart)


def _with_image(op: Operation, *, leave_running: bool) -> Operation:
    """The operation as the plan of a checkpoint makes it."""
    handoff = ImageRequest(path="/images/one", uid=1000, gid=1000, leave_running=leave_running)
    workers = tuple([worker.replace(kept_gpu=worker.gpu) for worker in op.workers])
    return op.replace(image=handoff, workers=workers)


def _next_id(daemon: Daemon) -> str:
    return str(1 + max((int(op_id) for op_id in daemon.ops), default=0))


def _operation(daemon: Daemon, kind: str, workers: list[JobProcess], *, is_distributed: bool) -> Operation:
    return Operation(
        id=_next_id(daemon),
        kind=kind,
        is_distributed=is_distributed,
        workers=tuple(workers),
        limits=LIMITS,
        created_utc=float(len(daemon.story)),
    )
