"""A model of the daemon around the real machine and the real journal: events in, fsync, effects out, and crashes.

What a runner promises is kept here and nothing beyond it. Effects take time, events may be lost, late, doubled or out
of order, and a crash between any two steps leaves what was synced and perhaps a part of what was not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from hegmd.errors import Refused
from hegmd.migration import events, journal, machine
from hegmd.migration.effects import Effect
from hegmd.migration.events import DISCONNECTED, Event, Failed
from hegmd.migration.operation import Operation
from tests.simulation.node import Node, Process, Violation

Handle = Callable[[Operation, Event, float], tuple[Operation, tuple[Effect, ...]]]


@dataclass
class Running:
    """An effect that is being performed, and the connection that it goes by."""

    effect: Any  # one of the classes in effects.py, each with fields of its own
    connection: int
    since: float
    begun: bool = False


@dataclass
class Daemon:
    """One operation, its journal, and what is under way. `odds` are those of each kind of bad luck."""

    node: Node
    op: Operation
    random: Random
    odds: dict[str, float]
    handle: Handle = machine.handle
    acts_before_sync: bool = False
    now: float = 0.0
    queue: list[Event] = field(default_factory=list)
    ghosts: list[Event] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    disk: bytes = b""
    story: list[str] = field(default_factory=list)
    crashes: int = 0
    # The connection of each worker that the machine has heard of last; orders go over no other.
    known: dict[str, int] = field(default_factory=dict)
    inspected: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.known = {name: process.connection for name, process in self.node.processes.items()}
        self.disk = journal.MAGIC + journal.opening(self.op, 0.0)
        self.node.check(self.op)

    def luck(self, kind: str) -> bool:
        odds = self.odds.get(kind, 0.0)
        return odds > 0 and self.random.random() < odds

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now:8.2f} {text}")

    # ---- events -----------------------------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """The event is on its way. Requests are never lost: whoever asks waits for the answer."""
        if self.luck("lose") and not isinstance(event, events.CancelAsked | events.ResumeAsked | events.Begin):
            self.tell(f"lost: {event}")
            return
        self.queue.append(event)
        if self.luck("double"):
            self.ghosts.append(event)

    def haunt(self) -> None:
        """An event of long ago comes once more."""
        if self.ghosts and self.luck("ghost"):
            self.queue.append(self.random.choice(self.ghosts))

    def take(self, event: Event) -> None:
        """One event, as the runner takes it, with a crash at each of its steps."""
        before = self.op
        self._hear(event)
        try:
            after, wanted = self.handle(before, event, self.now)
        except Refused as refusal:
            self.tell(f"{event.tag}: refused: {refusal.message}")
            return
        if after is before:
            self.tell(f"{event.tag}: ignored in {before.phase}")
            return
        self.tell(
            f"{event}\n{'':9}{before.phase} -> {after.phase}, {after.heading}; {[(e.tag, e.worker) for e in wanted]}"
        )
        record, _ = journal.step(before, event, after, wanted, now=self.now, utc=self.now)
        started = [Running(effect, self._connection(effect), self.now) for effect in wanted]
        if self.acts_before_sync:
            self.running += started
        if self.luck("crash"):
            self.crash(record[: self.random.randrange(len(record) + 1)])
            return
        self.disk += record
        self.op = after
        if self.luck("crash"):
            self.crash(b"")
            return
        if not self.acts_before_sync:
            self.running += started

    def _hear(self, event: Event) -> None:
        if isinstance(event, events.AgentBack):
            self.known[event.worker] = self.node.processes[event.worker].connection
        elif isinstance(event, events.Inspected) and event.effect in self.inspected:
            self.known[event.worker] = self.inspected.pop(event.effect)

    def _connection(self, effect: Effect) -> int:
        return self.known[effect.worker]

    # ---- effects ----------------------------------------------------------------------------------------------------

    def perform(self, running: Running) -> None:
        """One effect comes to its end, or its worker is not there, or it fails; a park only begins.

        What is for one worker begins in the order in which it was wanted.
        """
        running = next((r for r in self.running if r.effect.worker == running.effect.worker and not r.begun), running)
        running.begun = True
        effect, process = running.effect, self.node.processes[running.effect.worker]
        if effect.in_worker:
            if not process.alive:
                self._finish(running, None)
                self.post(events.WorkerGone(worker=process.name))
                return
            if effect.tag == "inspect":
                running.connection = self.inspected[effect.number] = process.connection
            if not process.connected or process.connection != running.connection:
                self._finish(running, self._failure(effect, DISCONNECTED))
                return
            if process.under_way and effect.tag != "inspect":
                raise Violation(f"{process.name} got the order {effect.tag} during {process.under_way}")
        if effect.tag in FAILING and self.luck("fail"):
            if effect.tag in {"evacuate", "refill"} and self.random.random() < 0.3:
                self._give_up(running, process)
                return
            half_done = effect.in_worker and self.random.random() < 0.5
            if half_done:
                _perform(self, effect, process)
            self._finish(running, self._failure(effect, "broken" if half_done else "refused"))
            return
        event = _perform(self, effect, process)
        if event is not None:
            self._finish(running, event)

    def _give_up(self, running: Running, process: Process) -> None:
        """An agent that fails within an order brings everything back, lets the script go on, and attends anew."""
        _perform(self, running.effect, process)
        self._finish(running, self._failure(running.effect, "broken"))
        if self.node.come_back_alone(process.name):
            self.tell(f"{process.name} gives up and goes on alone")
            self.disconnect(process, goes_on=False)

    def overdue_parks(self) -> None:
        """The agent itself gives up on a park whose limit has passed."""
        for running in list(self.running):
            process = self.node.processes[running.effect.worker]
            if running.effect.tag == "park" and self.now > running.since + running.effect.limit_s and process.alive:
                process.asked_at = None if not process.parked else process.asked_at
                if not process.parked:
                    self._finish(running, self._failure(running.effect, "refused"))

    def _finish(self, running: Running, event: Event | None) -> None:
        if running in self.running:
            self.running.remove(running)
        if event is not None:
            self.post(event)

    def _failure(self, effect: Effect, fault: str) -> Failed:
        message = f"{effect.tag} of {effect.worker} failed: {fault}"
        return Failed(effect=effect.number, worker=effect.worker, fault=fault, message=message, hint="try again")

    # ---- bad luck ---------------------------------------------------------------------------------------------------

    def disconnect(self, process: Process, *, goes_on: bool = True) -> None:
        """The agent's connection ends. What was ordered may be dropped, or go on without anybody hearing of its end."""
        for running in list(self.running):
            if running.effect.worker == process.name and running.effect.in_worker:
                if goes_on:
                    self._leave(process, running)
                self._finish(running, self._failure(running.effect, DISCONNECTED))
        process.connected = False
        self.post(events.AgentLost(worker=process.name))

    def reconnect(self, process: Process) -> None:
        process.connected = True
        process.connection += 1
        self.post(events.AgentBack(worker=process.name, token=process.token))

    def _leave(self, process: Process, running: Running) -> None:
        effect = running.effect
        reached = process.alive and running.connection == process.connection and not process.under_way
        if effect.tag not in _ORDERS or not reached or self.random.random() < 0.5:
            return
        if effect.tag == "restore":
            self.node.restore(process.name, effect.gpu)  # from its first moment on, the room is the driver's
        else:
            process.under_way = effect.tag

    def go_on_alone(self, process: Process) -> None:
        """The end of an order that nobody waits for any more."""
        what, process.under_way = process.under_way, None
        {
            "evacuate": lambda: self.node.evacuate(process.name),
            "checkpoint": lambda: self.node.checkpoint(process.name),
            "refill": lambda: self.node.refill(process.name),
        }[what or ""]()

    def crash(self, unsynced: bytes) -> None:
        """The daemon dies and is started again: the journal is read, connections and the room it held are gone."""
        self.crashes += 1
        self.tell("crash")
        for running in self.running:
            process = self.node.processes[running.effect.worker]
            if running.effect.in_worker:
                if process.connected:
                    self._leave(process, running)
            elif self.random.random() < 0.5:
                _perform(self, running.effect, process)
        self.running.clear()
        self.queue.clear()
        self.ghosts = [event for event in self.ghosts if isinstance(event, events.Ending)]
        for process in self.node.processes.values():
            process.connected = False
        if self.random.random() < 0.5:
            self._lose_room()
        reading = journal.read(self.disk + unsynced)
        self.disk = (self.disk + unsynced)[: reading.sound_bytes]
        if self.random.random() < 0.3:
            self.disk = journal.compacted(reading.histories.values())
        self.op = reading.histories[self.op.id].operation
        if self.op.phase not in machine.TERMINAL:
            self.take(events.Recovered())

    def _lose_room(self) -> None:
        """Room that only the daemon held is gone with it, as on simulated GPUs."""
        for gpu, held in self.node.holds.items():
            for name in list(held):
                process = self.node.processes.get(name)
                if process is not None and (process.gpu != gpu or not process.alive):
                    del held[name]


FAILING = frozenset("take-room take-pool survey evacuate checkpoint restore refill release verify give-room".split())


def _perform(daemon: Daemon, effect: Any, process: Process) -> Event | None:
    """Do it to the node. None for one that ends later, or not at all."""
    ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
    node, name = daemon.node, effect.worker
    match effect.tag:
        case "take-room":
            done = node.take_room(name, effect.gpu, effect.size_bytes)
            return events.RoomTaken(**ends) if done else daemon._failure(effect, "refused")
        case "give-room":
            node.give_room(name, effect.gpu)
            return events.RoomGiven(**ends)
        case "take-pool":
            done = node.take_pool(name, effect.size_bytes)
            return events.PoolTaken(**ends) if done else daemon._failure(effect, "refused")
        case "give-pool":
            node.give_pool(name)
            return events.PoolGiven(**ends)
        case "survey":
            return events.Surveyed(**ends, boundary=process.boundary, size_bytes=process.size_bytes)
        case "park":
            return _park(daemon, effect, process)
        case "withdraw":
            node.release(name)
            daemon.running = [r for r in daemon.running if r.effect.tag != "park" or r.effect.worker != name]
            return events.Withdrawn(**ends)
        case "evacuate":
            node.evacuate(name)
            return events.Evacuated(**ends, size_bytes=process.size_bytes)
        case "checkpoint":
            node.checkpoint(name)
            return events.Checkpointed(**ends)
        case "restore":
            node.restore(name, effect.gpu)
            return events.Restored(**ends)
        case "refill":
            node.refill(name)
            return events.Refilled(**ends)
        case "release":
            node.release(name)
            daemon.running = [r for r in daemon.running if r.effect.tag != "park" or r.effect.worker != name]
            return events.Released(**ends)
        case "verify":
            return events.Verified(**ends, boundary=process.boundary) if process.boundary > effect.beyond else None
    return _inspect(daemon, effect, process)


def _park(daemon: Daemon, effect: Any, process: Process) -> Event | None:
    """Ask; or, once it stands, say where. A new park lets a worker go on that stands before its boundary."""
    ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
    for running in list(daemon.running):
        if running.effect.tag == "park" and running.effect.worker == process.name and running.effect is not effect:
            if running.effect.number > effect.number:
                return daemon._failure(effect, "refused")
            daemon.running.remove(running)
    if process.parked and (effect.at is None or process.boundary >= effect.at):
        return events.Parked(**ends, boundary=process.boundary)
    if effect.at is not None and process.boundary >= effect.at and process.asked_at is None:
        return events.Overran(**ends, boundary=process.boundary)
    process.asked_at = effect.at if effect.at is not None else process.asked_at or process.boundary + 1
    process.parked = False
    return None


def _inspect(daemon: Daemon, effect: Effect, process: Process) -> Event:
    node = daemon.node
    return events.Inspected(
        effect=effect.number,
        worker=effect.worker,
        parked=process.parked,
        boundary=process.boundary,
        out_bytes=0 if process.has_bytes else process.size_bytes,
        gpu=process.gpu,
        rooms={gpu: held[process.name] for gpu, held in node.holds.items() if process.name in held},
        pool_bytes=node.pool.get(process.name, 0),
        busy=process.under_way is not None
        or any(r.effect.worker == process.name and r.effect.tag in _ORDERS for r in daemon.running),
    )


_ORDERS = frozenset("evacuate checkpoint restore refill".split())
