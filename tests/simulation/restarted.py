"""Lives of jobs that are moved by restart: a process leaves by ending, and another continues from the state in the
pool.

The node's truth is who lives, from which step, and whether somebody still owes the job a process: from when one has
left, or has ended without having passed a boundary on its state, until another is there or the training has come to its
end. Each job is of one process; tests/chaos has ranks and launchers, with real processes.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

from hegmd.migration.machine import events
from hegmd.migration.machine.events import BROKEN, REFUSED, Event
from tests.simulation.hands import NodeActions, Running, failure
from tests.simulation.node import Node, Process, Violation

if TYPE_CHECKING:
    from hegmd.migration.machine.operation import JobProcess, Operation

# A pid is not used twice in a life.
_NEXT = 1000
# How often the next process is ready before its turn.
READY = 0.7


def drawn_node(random: Random) -> Node:
    """Draw one or two jobs of one process each, on simulated GPUs, with a keeper for the pool."""
    processes: dict[str, Process] = {}
    holds: dict[str, dict[str, int]] = {"gpu0": {}, "gpu1": {}, "gpu2": {}}
    for job in range(random.choice((1, 1, 2))):
        name, size = str(100 + job), random.randrange(1, 16)
        gpu = random.choice(("gpu0", "gpu1"))
        processes[name] = Process(name, 100 + job, f"agent of {100 + job}", job, gpu, size, restarts=True)
        holds[gpu][name] = size
    is_distributed = dict.fromkeys(range(len(processes)), False)
    pool_free = random.choice((30, 120))
    return Node(dict.fromkeys(holds, 90), processes, is_distributed, pool_free, driven=False, keeper=True, holds=holds)


def draw_odds(random: Random) -> dict[str, float]:
    """Beside those of every life: what may happen to processes that are on their way, and to who starts them."""
    stormy = random.choice((0.0, 0.3, 1.0, 1.0))
    return {
        "fall": random.choice((0.0, 0.05, 0.3)) * stormy,
        "finish": random.choice((0.0, 0.0, 0.01)) * stormy,
        "orphan": random.choice((0.0, 0.0, 0.02)) * stormy,
        "exec": 0.0,
        "begin": 0.05,
    }


def strike(hands: RestartNodeActions) -> None:
    """Perhaps disturb one of these jobs."""
    daemon = hands.daemon
    for process in daemon.node.processes.values():
        if process.alive and process.runs and daemon.luck("finish"):
            hands.finish(process)
        if daemon.luck("orphan"):
            process.supervised = not process.supervised
            daemon.tell(f"{process.name} has {'a supervisor again' if process.supervised else 'no supervisor now'}")


class RestartNodeActions(NodeActions):
    """The effects that exit and start processes, and the effects of their agents."""

    # ---- reports -----------------------------------------------------------------------------------------------------

    def is_stale(self, op: Operation, event: Event) -> bool:
        """Return whether the report is of a process that another has replaced: the runner ignores it by its agent's
        name.
        """
        if not isinstance(event, events.WorkerExited | events.AgentBack):
            return False
        worker = op.worker(event.worker)
        reason = event.why if isinstance(event, events.WorkerExited) else event.token
        return worker is not None and reason != worker.token

    def is_of(self, op: Operation, process: Process) -> bool:
        """Whether news of the process that lives there now are news for the operation."""
        worker = op.worker(process.name)
        return worker is not None and worker.pid == process.pid

    def end(self, process: Process) -> None:
        """Its process ends, however."""
        token = process.token
        self.daemon.node.die(process.name)
        process.gpu = None
        self.daemon.on_event(
            process.name, events.WorkerExited(worker=process.name, why=token, finished=process.finished)
        )

    def finish(self, process: Process) -> None:
        """It ends its training: no process may continue from its states, and its supervisor reports that."""
        self.daemon.tell(f"{process.name} has come to the end of its training")
        process.finished = True
        self.end(process)
        self.daemon.on_event(process.name, events.TrainingEnded(worker=process.name))

    # ---- effects -----------------------------------------------------------------------------------------------------

    def _reaches(self, running: Running, process: Process) -> bool:
        effect, daemon = running.effect, self.daemon
        if effect.tag == "restore":
            return True
        worker = daemon.ops[running.op_id].worker(process.name)
        if worker is not None and (not process.alive or worker.pid != process.pid):
            daemon.finish(running, None)
            self._tell_gone(running, process.name, worker)
            return False
        return super()._reaches(running, process)

    def _tell_gone(self, running: Running, name: str, worker: JobProcess) -> None:
        """Report that it is gone; the inspection also finds whether the pool has anything of it."""
        is_looked_for = running.effect.tag == "inspect" and worker.state_saved and not worker.verified
        stateless = is_looked_for and name not in self.daemon.node.pool
        self.daemon.post(running.op_id, events.WorkerExited(worker=name, why=worker.token, stateless=stateless))

    def do(self, running: Running, process: Process) -> Event | None:
        worker = self.daemon.ops[running.op_id].worker(process.name)
        if running.effect.tag == "await-successor":  # how it is made ready is the method's own; here it is, or is not
            ready = self.random.random() < READY
            return events.SuccessorAwaited(effect=running.effect.number, worker=process.name, ready=ready)
        if (
            running.effect.tag == "release-reservation"
            and worker is not None
            and worker.pid != process.pid
            and process.alive
        ):
            # The operation no longer owns it: a process that it has not heard of took it.
            return events.ReservationReleased(effect=running.effect.number, worker=process.name)
        return super().do(running, process)

    def checkpoint(self, effect: Any, process: Process) -> Event:
        """It leaves, with its state written."""
        node = self.daemon.node
        if not process.parked:
            raise Violation(f"{process.name} left while it trains")
        if node.copies.get(process.name) != process.step:
            raise Violation(f"{process.name} left, and the pool has not what it comes to")
        process.owed = True
        self.end(process)
        return events.Checkpointed(effect=effect.number, worker=effect.worker)

    def restore(self, effect: Any, process: Process) -> Event:
        node, name = self.daemon.node, process.name
        if process.finished:
            return events.TrainingEnded(worker=name, cause=effect.tag)
        worker = next((op.worker(name) for op in self.daemon.live_ops(name)), None)
        if self.sees_who_lives(process):
            is_another = worker is not None and worker.pid != process.pid
            return self._reborn(effect, process) if is_another else failure(effect, BROKEN)
        if name not in node.pool:
            return failure(effect, REFUSED)
        for held in node.holds.values():  # the new process takes it by itself
            held.pop(name, None)
        if not process.supervised or node.free(effect.gpu) < process.size_bytes:
            return failure(effect, REFUSED)
        self.start(process, effect.gpu)
        if self.daemon.luck("fall"):
            self.daemon.tell(f"{name} falls on its way up")
            self.end(process)
            return failure(effect, REFUSED)
        return self._reborn(effect, process)

    def sees_who_lives(self, process: Process) -> bool:
        """Whether there is a process already, which has the lock: one that an earlier daemon had started."""
        return process.alive

    def start(self, process: Process, gpu: str) -> None:
        """Another process, from the state."""
        node, name = self.daemon.node, process.name
        if process.alive:
            raise Violation(f"two processes of {name} at once")
        if name not in node.copies:
            raise Violation(f"{name} was started again, and its state is nowhere")
        process.pid += _NEXT
        process.token = f"agent of {process.pid}"
        process.alive = process.connected = process.has_bytes = True
        process.proven = process.owed = False
        process.connection += 1
        process.gpu, process.step, process.boundary = gpu, node.copies[name], node.saved_at[name]
        node.holds[gpu][name] = process.size_bytes
        self.daemon.tell(f"{name} is process {process.pid} on {gpu} now, at step {process.step}")

    def _reborn(self, effect: Any, process: Process) -> Event:
        return events.Restored(
            effect=effect.number,
            worker=effect.worker,
            landed=process.gpu,
            pid=process.pid,
            start_ticks=7,
            token=process.token,
            run="run",
            boundary=self.daemon.node.saved_at[process.name],
        )

    def calm_down(self) -> None:
        """Run the command that continues from a held state."""
        for process in self.daemon.node.processes.values():
            process.supervised = True
