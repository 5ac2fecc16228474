"""Lives of jobs that are suspended with their CUDA contexts kept: storages leave, the process stays on its GPU.

No driver call is made, so nothing holds the memory: it is free once the storages have left, and what the daemon
promises to a process is forgotten with the daemon. A reload without enough memory fails and loses nothing. The trap:
**a job that is restored on another GPU than that of its context**, where its bytes would be of no use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

from hegmd.migration.machine import events
from hegmd.migration.machine.events import REFUSED, Event
from tests.simulation.hands import NodeActions, Running, failure
from tests.simulation.node import RUNNING, Node, Process, Violation


def drawn_node(random: Random) -> Node:
    """Draw one or two jobs of one to three ranks, on GPUs with memory for all of them at once."""
    processes: dict[str, Process] = {}
    holds: dict[str, dict[str, int]] = {"gpu0": {}, "gpu1": {}, "gpu2": {}}
    is_distributed: dict[int, bool] = {}
    for job in range(random.choice((1, 1, 2))):
        ranks = random.choice((1, 1, 2, 3))
        is_distributed[job] = ranks > 1 and random.random() < 0.7
        for _ in range(ranks):
            pid, size = 100 + len(processes), random.randrange(1, 16)
            gpu = random.choice(("gpu0", "gpu0", "gpu1"))
            processes[str(pid)] = Process(str(pid), pid, f"agent of {pid}", job, gpu, size)
            holds[gpu][str(pid)] = size
    driven = random.random() < 0.7
    return KeptNode(
        dict.fromkeys(holds, 90),
        processes,
        is_distributed,
        pool_free=random.choice((30, 120, 120)),
        driven=driven,
        keeper=driven or random.random() < 0.5,
        holds=holds,
    )


def draw_odds(random: Random) -> dict[str, float]:
    """The odds of what matters here: others take memory that is free, and jobs are suspended often."""
    return {"grab": random.choice((0.0, 0.5)), "fill": random.choice((0.0, 0.0, 0.05)), "begin": 0.1, "resume": 0.2}


@dataclass
class KeptNode(Node):
    """Processes whose storages are off the GPU on which their contexts are."""

    #: The GPU of the context, of each process whose storages have left it without the driver.
    contexts: dict[str, str] = field(default_factory=dict)

    def offload(self, name: str, memory_bytes: int | None = None) -> None:
        super().offload(name, memory_bytes)
        process = self.processes[name]
        if process.keeps_context and self.driven and process.gpu is not None and not process.has_bytes:
            self.leave(name)
            self.holds[self.contexts[name]].pop(name, None)

    def release_reservation(self, name: str, gpu: str) -> None:
        """End a promise. The memory of a process that has returned by itself is its own."""
        process = self.processes[name]
        if not (process.keeps_context and self.driven and process.alive and process.gpu == gpu):
            super().release_reservation(name, gpu)

    def leave(self, name: str) -> None:
        process = self.processes[name]
        if process.keeps_context and process.gpu is not None:
            self.contexts[name] = process.gpu
        super().leave(name)

    def arrive(self, name: str, gpu: str) -> None:
        home = self.contexts.get(name)
        if home not in (None, gpu):
            raise Violation(f"{name} was restored on {gpu}, and its context is on {home}")
        if home is None or not self.driven:  # else it is there once its bytes are
            super().arrive(name, gpu)
            self.contexts.pop(name, None)

    def reload(self, name: str) -> None:
        """Leaves all as it is where the memory is not free."""
        process, home = self.processes[name], self.contexts.get(name)
        if home is not None and self.driven and not process.has_bytes:
            if not self.reserve(name, home, process.size_bytes):
                return
            process.gpu = home
            self.contexts.pop(name)
        super().reload(name)

    def come_back_alone(self, name: str) -> bool:
        process, home = self.processes[name], self.contexts.get(name)
        if home is None or not self.driven:
            is_back = super().come_back_alone(name)
            if is_back:
                self.contexts.pop(name, None)
            return is_back
        may = process.parked and not process.under_way and not process.stopped
        if not may or self.copies.get(name) != process.step or not self.reserve(name, home, process.size_bytes):
            return False
        process.gpu = home
        self.contexts.pop(name)
        return super().come_back_alone(name)

    def dump(self, op_id: str, names: Any, *, goes_on: bool) -> None:
        for name in names:
            if name in self.contexts:
                raise Violation(f"an image was made of {name}, whose context is on {self.contexts[name]}")
        super().dump(op_id, names, goes_on=goes_on)

    def die(self, name: str) -> None:
        super().die(name)
        self.contexts.pop(name, None)

    def lose_daemon(self, *, kept: bool, random: Random) -> None:
        """Promises are only in the daemon: any process may take the memory until it is promised again."""
        super().lose_daemon(kept=kept, random=random)
        for name, home in self.contexts.items() if self.driven else ():
            self.holds[home].pop(name, None)


class KeptContextActions(NodeActions):
    """The method that keeps contexts, for operations that have it; all others as they are."""

    node: KeptNode

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.daemon.node, KeptNode)
        self.node = self.daemon.node

    def do(self, running: Running, process: Process) -> Event | None:
        effect: Any = running.effect
        home = self.node.contexts.get(process.name)
        if effect.tag == "reload":
            self.node.reload(process.name)
            return super().do(running, process) if process.has_bytes else failure(effect, REFUSED)
        if effect.tag == "offload":
            done = super().do(running, process)
            left = self.node.contexts.get(process.name)
            if left is not None and self.daemon.luck("grab"):
                self.node.reserve("quicker", left, self.node.free(left))
            return done
        if home is not None and effect.tag == "checkpoint" and self.node.driven:
            self.node.reserve(process.name, home, process.size_bytes)  # a promise, unless another process was quicker
            return events.Checkpointed(effect=effect.number, worker=effect.worker)
        if home is not None and effect.tag == "restore":
            return self.restore_kept(effect, process, home)
        return super().do(running, process)

    def restore_kept(self, effect: Any, process: Process, home: str) -> Event:
        """Nothing has to be done on the GPU of its context, and nothing is done on another one."""
        if effect.gpu != home:
            return failure(effect, REFUSED)
        self.node.arrive(process.name, effect.gpu)
        return events.Restored(effect=effect.number, worker=effect.worker)

    def inspect(self, op_id: str, effect: Any, process: Process) -> Event:
        """It has left if its operation has recorded that and its bytes are out."""
        result = super().inspect(op_id, effect, process)
        worker = self.daemon.ops[op_id].worker(process.name)
        if not isinstance(result, events.Inspected) or worker is None or process.driver != RUNNING:
            return result
        if process.name not in self.node.contexts or not self.node.driven:
            return result
        gpu = worker.gpu if worker.gpu is not None or not process.has_bytes else worker.previous_gpu
        held = dict(result.reservations)
        if gpu is not None:
            held[gpu] = max(held.get(gpu, 0), process.size_bytes)
        return result.replace(gpu=gpu, reservations=held)
