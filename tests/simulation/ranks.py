"""Lives of jobs whose ranks have communicators: these are live until all ranks have taken them down together.

The trap that was measured: **a driver's checkpoint while a communicator of the job is live, and the job is lost.** So
no rank may be checkpointed before all of them are disconnected and locked. A collective is waited in until every rank
has joined it, so a rank that is told to connect while the driver holds it hangs the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hegmd.migration.machine import events
from hegmd.migration.machine.events import BROKEN, REFUSED, Event
from tests.simulation.driver import CallRefused, Driver, HelperLost
from tests.simulation.hands import NodeActions, Running, failure
from tests.simulation.node import CHECKPOINTED, LOCKED, RUNNING, Node, Process, Violation

UP, DOWN = "up", "down"
COLLECTIVES = {"disconnect": DOWN, "reconnect": UP}


def drawn_node(random: Random) -> Node:
    """Draw one job of two or three ranks, perhaps next to another; GPUs have memory for one more rank, or for many."""
    processes: dict[str, Process] = {}
    holds: dict[str, dict[str, int]] = {"gpu0": {}, "gpu1": {}, "gpu2": {}}
    jobs = random.choice((1, 1, 2))
    mechanism = random.choice(("suspend", "replace"))
    for job in range(jobs):
        for rank in range(random.choice((2, 2, 3))):
            pid, size = 100 + len(processes), random.randrange(1, 16)
            gpu = f"gpu{rank}"
            process = Process(str(pid), pid, f"agent of {pid}", job, gpu, size, communicators=mechanism)
            process.groups = process.live_groups = 1 + job
            processes[str(pid)] = process
            holds[gpu][str(pid)] = size
    capacity = random.choice((20, 90)) if jobs == 1 else 90
    driven = random.random() < 0.7
    keeper = driven or random.random() < 0.5
    return RankNode(
        dict.fromkeys(holds, capacity),
        processes,
        dict.fromkeys(range(jobs), True),
        pool_free=random.choice((30, 120, 120)),
        driven=driven,
        keeper=keeper,
        holds=holds,
    )


@dataclass
class RankNode(Node):
    """Ranks that wait for one another in collectives, and what must not be done to them meanwhile."""

    #: Gets each rank that resumes by itself, with its connection: the connection ends.
    alone_too: Callable[[str], None] = field(default=lambda name: None)

    def crew(self, name: str) -> list[Process]:
        """All ranks of that one's job, those too that have ended."""
        job = self.processes[name].job
        return [process for process in self.processes.values() if process.job == job]

    def is_broken(self, name: str) -> bool:
        """Whether a rank of the job has ended, so that its communicators never come up again."""
        return not all(process.alive for process in self.crew(name))

    def join(self, name: str, what: str, generation: int) -> bool:
        """Take part in a collective; whether it is over for this rank."""
        process = self.processes[name]
        if what == DOWN and not process.parked:
            raise Violation(f"{name} was disconnected while it trains")
        if what == UP and (process.gpu is None or process.driver != RUNNING):
            raise Violation(f"{name} was told to connect while the driver has it {process.driver}: the others hang")
        process.joining = (what, generation)
        waits = what == UP or process.communicators == "suspend"  # each aborts its own by itself
        is_met = not self.is_broken(name) and all(
            self._has_joined(other, what, generation) for other in self.crew(name)
        )
        if waits and not is_met:
            return False
        process.joining, process.live_groups = None, process.groups if what == UP else 0
        if what == UP:
            process.generation = generation
        return True

    def _has_joined(self, process: Process, what: str, generation: int) -> bool:
        if what == DOWN:
            return not process.linked or (process.joining is not None and process.joining[0] == DOWN)
        return process.joining == (what, generation) or (process.linked and process.generation == generation)

    def must_be_apart(self, name: str) -> None:
        """Check what the driver's checkpoint of that rank requires."""
        for other in self.crew(name):
            if other.alive and other.linked:
                raise Violation(
                    f"{name} was checkpointed while communicators of {other.name} are live: the job is lost"
                )
            if other.alive and self.driven and other.driver not in (LOCKED, CHECKPOINTED):
                raise Violation(f"{name} was checkpointed while {other.name} is not locked: the job is lost")

    def leave(self, name: str) -> None:
        self.must_be_apart(name)
        super().leave(name)

    def release(self, name: str) -> None:
        process = self.processes[name]
        if process.parked and not self.is_broken(name) and not all(other.linked for other in self.crew(name)):
            raise Violation(f"{name} was let go while communicators of its job are down")
        super().release(name)

    def train(self, name: str) -> bool:
        process = self.processes[name]
        if process.runs and not process.linked and not self.is_broken(name):
            raise Violation(f"{name} trains, and its communicators are down")
        return super().train(name)

    def come_back_alone(self, name: str) -> bool:
        """A rank with disconnected communicators resumes only with all the others, which connect as it does."""
        crew = [process for process in self.crew(name) if process.alive]
        if self.is_broken(name) or all(process.linked and process.joining is None for process in crew):
            return super().come_back_alone(name)
        if not all(self._can_come_back(process) for process in crew):
            return False
        generation = 1 + max(process.generation for process in crew)
        for process in crew:
            process.joining, process.live_groups, process.generation = None, process.groups, generation
            super().come_back_alone(process.name)
            if process.name != name:
                self.unclaimed.discard(process.name)
                self.alone_too(process.name)
        return True

    def _can_come_back(self, process: Process) -> bool:
        held = process.size_bytes if process.gpu is None else self.held(process.name, process.gpu)
        has_copy = held >= process.size_bytes and self.copies.get(process.name) == process.step
        is_free = process.parked and not process.under_way and not process.stopped and process.driver == RUNNING
        return is_free and (process.gpu is not None or not self.driven) and (process.has_bytes or has_copy)

    def die(self, name: str) -> None:
        super().die(name)
        self.processes[name].joining = None


class RankDriver(Driver):
    """Which loses a job whose ranks are not all apart."""

    def lock(self, process: Process) -> None:
        node = self.node
        if isinstance(node, RankNode) and any(other.alive and other.linked for other in node.crew(process.name)):
            raise Violation(f"{process.name} was locked while communicators of its job are live: they hang")
        super().lock(process)

    def _take_off(self, process: Process) -> None:
        if isinstance(self.node, RankNode):
            self.node.must_be_apart(process.name)
        super()._take_off(process)


class RankNodeActions(NodeActions):
    """The effects on ranks besides those on every process."""

    node: RankNode

    def __post_init__(self) -> None:
        super().__post_init__()
        assert isinstance(self.daemon.node, RankNode)
        self.node = self.daemon.node
        self.driver = RankDriver(self.node, self.random, self.daemon.luck)
        self.node.alone_too = self._is_alone_too

    def _is_alone_too(self, name: str) -> None:
        process = self.node.processes[name]
        self.daemon.tell(f"{name} goes on alone with it")
        if process.connected:
            self.daemon.disconnect(process, goes_on=False)

    def do(self, running: Running, process: Process) -> Event | None:
        effect: Any = running.effect
        ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
        match effect.tag:
            case "disconnect":
                is_done = not process.linked or self.node.join(process.name, DOWN, 0)
                return events.Disconnected(**ends) if is_done else None
            case "reconnect":
                is_done = process.linked and process.generation == effect.generation
                is_done = is_done or self.node.join(process.name, UP, effect.generation)
                return events.Reconnected(**ends) if is_done else None
            case "lock":
                return self.lock(effect, process)
            case "unlock":
                return self.unlock_rank(effect, process)
        return super().do(running, process)

    def lock(self, effect: Any, process: Process) -> Event:
        done = events.Locked(effect=effect.number, worker=effect.worker)
        if not self.node.driven:
            return done
        try:
            if self.driver.state(process) == RUNNING:
                self.driver.lock(process)
        except CallRefused:
            return failure(effect, REFUSED)
        except HelperLost:
            return failure(effect, BROKEN)
        return done

    def unlock_rank(self, effect: Any, process: Process) -> Event:
        try:
            if self.node.driven and self.driver.state(process) == LOCKED:
                self.driver.unlock(process)
        except HelperLost:
            return failure(effect, BROKEN)
        return events.Unlocked(effect=effect.number, worker=effect.worker)

    def unlock(self, process: Process) -> None:
        """An inspection leaves a rank locked: another rank may be about to leave."""

    def inspect(self, op_id: str, effect: Any, process: Process) -> Event:
        result = super().inspect(op_id, effect, process)
        is_locked = process.driver == LOCKED
        return result.replace(locked=is_locked) if isinstance(result, events.Inspected) else result

    def is_busy(self, process: Process) -> bool:
        return process.joining is not None or super().is_busy(process)

    def overdue_parks(self) -> None:
        """An agent gives up on what the others have not joined in time."""
        super().overdue_parks()
        daemon = self.daemon
        for running in list(daemon.running):
            if running.effect.tag in COLLECTIVES and daemon.now > running.since + running.effect.limit_s:
                process = daemon.node.processes[running.effect.worker]
                if process.alive and not process.stopped and running.begun:
                    process.joining = None
                    daemon.finish(running, failure(running.effect, BROKEN))

    def go_on(self) -> None:
        """Ranks in a collective check whether the others have joined. An agent without a daemon also finishes the
        collective, or gives it up.
        """
        collectives = [running for running in self.daemon.running if running.effect.tag in COLLECTIVES]
        if collectives and self.random.random() < 0.5:
            self.daemon.perform(self.random.choice(collectives))
        waited_for = {running.effect.worker for running in self.daemon.running if running.effect.tag in COLLECTIVES}
        for name, process in self.node.processes.items():
            if process.joining is None or name in waited_for or process.stopped or self.random.random() < 0.7:
                continue
            what, generation = process.joining
            may_join = process.parked and (what == DOWN or (process.gpu is not None and process.driver == RUNNING))
            if not may_join or not self.node.join(name, what, generation):
                process.joining = None
