"""The promises as checks: some hold between any two steps, some at the end of a life."""

from __future__ import annotations

from hegmd.migration.journal import records
from hegmd.migration.journal.file import NAME
from hegmd.migration.machine import machine
from hegmd.migration.machine.next_effects import DONE
from hegmd.migration.machine.operation import CHECKPOINT
from tests.simulation.daemon import Daemon
from tests.simulation.driven import START_TICKS
from tests.simulation.node import RUNNING, Process, Violation


def check(daemon: Daemon) -> None:
    """Check the invariants."""
    node = daemon.node
    for gpu, capacity in node.capacity.items():
        if sum(node.holds.get(gpu, {}).values()) > capacity:
            raise Violation(f"more is held on {gpu} than it has")
    claimed: dict[str, str] = {}
    for op in daemon.ops.values():
        if op.phase in machine.TERMINAL:
            continue
        for worker in op.workers:
            if not worker.has_exited and claimed.setdefault(worker.name, op.id) != op.id:
                raise Violation(f"{worker.name} is in the hands of {claimed[worker.name]} and of {op.id}")
    for stranger in node.strangers.values():
        if stranger.driver != RUNNING and (stranger.pid, START_TICKS) not in node.noted:
            raise Violation(f"{stranger.name} is held still, and nobody will know after a crash")
    for process in node.processes.values():
        if process.alive:
            _check_process(daemon, process, claimed.get(process.name))


def _check_process(daemon: Daemon, process: Process, claimed_by: str | None) -> None:
    node, name = daemon.node, process.name
    if process.owed and name not in node.copies:
        raise Violation(f"{name} is to be gone on from, and its state is nowhere")
    if not process.has_bytes and node.copies.get(name) != process.step:
        raise Violation(f"the bytes of {name} are nowhere")
    if process.gpu and node.held(name, process.gpu) < process.size_bytes:
        raise Violation(f"{name} is on {process.gpu} without room that is its own")
    if process.ruined or (process.pid, START_TICKS) in node.noted:  # the disk names who has to release it
        return
    is_stopped = process.parked or process.asked_at is not None or process.driver != RUNNING
    if is_stopped and claimed_by is None and name not in node.unclaimed:
        raise Violation(f"{name} stands, and no operation has it that would bring it back")


def judge(daemon: Daemon) -> None:
    """At the end: every worker trains where its operation says, and nothing is held without a need."""
    node = daemon.node
    last: dict[str, str] = {}
    for op in daemon.ops.values():
        for worker in op.workers:
            last[worker.name] = op.id
    for name, process in node.processes.items():
        if process.alive:
            _judge_living(daemon, process, last.get(name))
        elif process.owed:
            raise Violation(f"{name} has left, and no process goes on in its place")
        elif any(name in held for held in node.holds.values()):
            raise Violation(f"room of {name} is held though it has ended")
    if node.written:
        raise Violation(f"images that nobody has read back are left: {sorted(node.written)}")
    for op in daemon.ops.values():
        if op.phase == DONE and op.image is not None and op.kind == CHECKPOINT and op.id not in node.images:
            raise Violation(f"operation {op.id} is done, and its image is not whole")
    pieces = {owner for held in node.holds.values() for owner in held if "." in owner}
    if pieces:
        raise Violation(f"video memory is still held: {sorted(pieces)}")
    standing = [stranger.name for stranger in node.strangers.values() if stranger.driver != RUNNING]
    if standing:
        raise Violation(f"others are still held still: {standing}")
    if node.pool or node.copies or node.own_copies:
        raise Violation(f"the pool still holds {node.pool}, agents {sorted(node.own_copies)}")
    _judge_journal(daemon)


def _judge_living(daemon: Daemon, process: Process, op_id: str | None) -> None:
    node, name = daemon.node, process.name
    if process.ruined:
        _judge_ruined(daemon, process, op_id)
        return
    if not (process.runs and process.has_bytes):
        raise Violation(f"{name} does not train at the end")
    if process.gpu is None and not node.driven and op_id is None:
        return  # it continued alone when the journal was lost; on a GPU that is imagined, it is counted in later
    if process.gpu is None:
        raise Violation(f"{name} is on no GPU at the end")
    reserved = {gpu for gpu, held in node.holds.items() if name in held}
    if reserved != {process.gpu}:
        raise Violation(f"memory of {name}, which is on {process.gpu}, is held on {sorted(reserved)}")
    worker = None if op_id is None else daemon.ops[op_id].worker(name)
    if worker is None:
        return
    if worker.has_exited:
        raise Violation(f"{name} is alive and {op_id} takes it for gone")
    if process.gpu not in (worker.target_gpu, worker.gpu) or worker.target_gpu != worker.gpu:
        raise Violation(
            f"{name} is on {process.gpu}; {op_id} has it on {worker.gpu} and wants it on {worker.target_gpu}"
        )
    proven = process.proven or not process.has_agent
    if daemon.ops[op_id or ""].phase == "done" and worker.was_offloaded and not proven:
        raise Violation(f"{name} was called done before it had passed a boundary")


def _judge_ruined(daemon: Daemon, process: Process, op_id: str | None) -> None:
    """The driver has lost it, unpredictably: the operation reports that, and nothing is held for it."""
    worker = None if op_id is None else daemon.ops[op_id].worker(process.name)
    if worker is None or not worker.lost:
        raise Violation(f"{process.name} can never come back, and {op_id} does not say so")
    if any(process.name in owner.split(".") for held in daemon.node.holds.values() for owner in held):
        raise Violation(f"room is held for {process.name}, which can never come back")


def _judge_journal(daemon: Daemon) -> None:
    try:
        found = records.read(daemon.disk.read(daemon.file.path)).histories
    except FileNotFoundError:  # lost, and nothing was asked for since
        found = {}
    except records.JournalBroken as broken:
        raise Violation(f"the journal cannot be read any more: {broken.message}") from broken
    known = {op_id: history.operation for op_id, history in found.items()}
    refused = [op_id for op_id, op in known.items() if op.phase == "planned"]  # the disk failed after it had taken it
    if {op_id: op for op_id, op in known.items() if op_id not in refused} != daemon.ops:
        raise Violation("the journal does not lead to the operations as they are")
    if not daemon.file.is_due and not daemon.disk.is_durable(NAME):
        raise Violation("the journal is not on the disk")
