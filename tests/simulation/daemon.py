"""A model of the daemon around the real machine and the real journal file: events in, fsync, effects out, and crashes.

It keeps the runner's promises and nothing beyond them. Effects take time, events may be lost, late, doubled or out of
order, the disk may be full or fail, and a crash between any two steps leaves what was synced and perhaps a part of what
was not. Several operations are under way at once, on jobs that share the GPUs and the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hegmd.errors import HegmError, Refused
from hegmd.migration.journal import records
from hegmd.migration.journal.file import NAME, OPERATION_BYTES, JournalFile
from hegmd.migration.journal.records import History
from hegmd.migration.machine import events, machine
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import DISCONNECTED, Event
from hegmd.migration.machine.operation import Operation
from tests.simulation.disk import ModelDisk
from tests.simulation.driven import DriverNodeActions, RealParts
from tests.simulation.hands import ORDERS, NodeActions, Running, failure
from tests.simulation.node import Node, Process, Violation

Handle = Callable[[Operation, Event, float], tuple[Operation, tuple[Effect, ...]]]
FOLDER = Path("/model")


@dataclass
class Parts:
    """The parts of a life; a mutant is a set of these with a bug in it."""

    handle: Handle = machine.handle
    hands: type[NodeActions] = NodeActions
    means: RealParts | None = None  # of lives without agents, in place of the hands; all lives are such if it is named
    disk: type[ModelDisk] = ModelDisk
    journal_file: type[JournalFile] = JournalFile
    acts_before_sync: bool = False
    ignores_write_errors: bool = False
    forgets_descriptors: bool = False
    compact_bytes: int = 4_000  # so that a life sees its journal made small several times


@dataclass
class Daemon:
    """Its operations, their journal, and what is under way. `odds` are those of each kind of bad luck."""

    node: Node
    random: Random
    odds: dict[str, float]
    parts: Parts = field(default_factory=Parts)
    ops: dict[str, Operation] = field(default_factory=dict)
    now: float = 0.0
    queue: list[tuple[str, Event]] = field(default_factory=list)
    ghosts: list[tuple[str, Event]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    crashes: int = 0
    struck: set[str] = field(default_factory=set)  # kinds of bad luck that this life has had
    # The connection of each worker that was reported to the operation last; orders go over no other.
    known: dict[tuple[str, str], int] = field(default_factory=dict)
    inspected: dict[tuple[str, int], int] = field(default_factory=dict)
    durable_seq: dict[str, int] = field(default_factory=dict)
    unwritten: dict[str, Event] = field(default_factory=dict)  # the effect before which each operation is halted
    refused: set[float] = field(default_factory=set)  # operations that were, by the moment of their asking
    # Called between the steps of taking an event and around each effect: where a daemon may be killed.
    points: Callable[[Daemon, str], bool] | None = None

    def __post_init__(self) -> None:
        alone = self.node.alone
        self.hands = (
            DriverNodeActions(self, self.random, self.parts.means or RealParts())
            if alone
            else self.parts.hands(self, self.random)
        )
        self.disk = self.parts.disk(self.random)
        self.file = self._opened()

    def _opened(self) -> JournalFile:
        file = self.parts.journal_file(FOLDER, self.disk, compact_bytes=self.parts.compact_bytes)
        try:
            self.reading = file.open()
        except records.JournalBroken as broken:
            raise Violation(f"the journal cannot be read any more: {broken.message}") from broken
        return file

    def luck(self, kind: str) -> bool:
        odds = self.odds.get(kind, 0.0)
        if odds <= 0 or self.random.random() >= odds:
            return False
        self.struck.add(kind)
        return True

    def is_killed(self, point: str) -> bool:
        return self.luck("crash") or (self.points is not None and self.points(self, point))

    def tell(self, text: str) -> None:
        self.story.append(f"{self.now:8.2f} {text}")

    def live_ops(self, name: str | None = None) -> Iterator[Operation]:
        """The operations that are not over; those that have this worker, if one is named."""
        for op in self.ops.values():
            if op.phase not in machine.TERMINAL and (name is None or _has(op, name)):
                yield op

    # ---- events ------------------------------------------------------------------------------------------------------

    def post(self, op_id: str, event: Event) -> None:
        """The event is on its way. Requests are never lost: the caller waits for the answer."""
        if self.luck("lose") and not isinstance(event, events.CancelRequested | events.ResumeRequested | events.Begin):
            self.tell(f"lost: {op_id} {event}")
            return
        self.queue.append((op_id, event))
        if self.luck("double"):
            self.ghosts.append((op_id, event))

    def on_event(self, name: str, event: Event) -> None:
        """An event that a worker causes goes to the operation that has it."""
        for op in list(self.live_ops(name)):
            if not isinstance(event, events.AgentLost | events.AgentBack) or self.hands.is_of(
                op, self.node.processes[name]
            ):
                self.post(op.id, event)

    def haunt(self) -> None:
        """An event of long ago comes once more."""
        if self.ghosts and self.luck("ghost"):
            self.queue.append(self.random.choice(self.ghosts))

    def begin(self, op: Operation) -> bool:
        """A client requests an operation. False if it was refused, because the journal cannot take it."""
        history = History(op)
        self.tell(f"{op.id} is asked for: {op.kind} of {[(w.name, w.gpu, w.target_gpu) for w in op.workers]}")
        if not self._append(history, records.opening(op, self.now), ahead_bytes=OPERATION_BYTES):
            self.refused.add(op.created_utc)
            return False
        if self.is_killed("begun"):
            self.crash(b"")
            return True
        self.know(op)
        self.take(op.id, events.Begin())
        return True

    def know(self, op: Operation) -> None:
        self.ops[op.id] = op
        for worker in op.workers:
            self.known[op.id, worker.name] = self.node.processes[worker.name].connection

    def take(self, op_id: str, event: Event) -> None:
        """Handle one event as the runner does, with a possible crash at each step."""
        before = self.ops.get(op_id)
        if before is None or self.hands.is_stale(before, event):
            return
        if op_id in self.unwritten:  # one after the other: what could not be written comes first
            self.queue.insert(0, (op_id, event))
            event = self.unwritten.pop(op_id)
        self._hear(op_id, event)
        try:
            after, wanted = self.parts.handle(before, event, self.now)
        except Refused as refusal:
            self.tell(f"{op_id} {event.tag}: refused: {refusal.message}")
            return
        if after is before:
            self.tell(f"{op_id} {event.tag}: ignored in {before.phase}")
            return
        self.tell(
            f"{op_id} {event}\n{'':9}{before.phase} -> {after.phase}, {after.direction}; "
            f"{[(effect.tag, effect.worker) for effect in wanted]}"
        )
        record, _ = records.step(before, event, after, wanted, now=self.now, utc=self.now)
        started = [Running(op_id, effect, self.known[op_id, effect.worker], self.now) for effect in wanted]
        if self.parts.acts_before_sync:
            self.running += started
        if self.is_killed("unwritten"):
            self.crash(record[: self.random.randrange(len(record) + 1)])
            return
        if not self._append(History(after), record):
            self.unwritten[op_id] = event
            return
        self.ops[op_id] = after
        if self.is_killed("written"):
            self.crash(b"")
            return
        if not self.parts.acts_before_sync:
            self.running += started
        self.hands.drop_what_is_not_awaited(after)
        if after.created_utc in self.refused and after.phase not in machine.TERMINAL:
            raise Violation(f"{op_id} is {after.phase}, though whoever asked for it was told that it is refused")
        self._must_have_a_path(after)

    def _append(self, history: History, record: bytes, *, ahead_bytes: int = 0) -> bool:
        op = history.operation
        try:
            self.file.append(record, [History(known) for known in self.ops.values()], ahead_bytes=ahead_bytes)
        except HegmError as error:
            self.tell(f"{op.id} stands still: {error.message}")
            return self.parts.ignores_write_errors
        if self.disk.is_durable(NAME):
            self.durable_seq[op.id] = op.seq
        return True

    def must_be_durable(self, running: Running) -> None:
        """Nothing is done before its record would survive a power cut."""
        if running.effect.cause > self.durable_seq.get(running.op_id, -1):
            raise Violation(f"{running.effect.tag} of {running.effect.worker} begins before its record is on disk")

    def _must_have_a_path(self, op: Operation) -> None:
        """A suspended job can be resumed; one under way either waits for an effect or has a deadline."""
        if op.phase == "suspended":
            try:
                self.parts.handle(op, events.ResumeRequested(to={w.name: "gpu0" for w in op.workers}), self.now)
            except Refused as refusal:
                raise Violation(f"{op.id} is suspended and cannot be resumed: {refusal.message}") from refusal
        elif op.phase not in machine.TERMINAL and op.deadline is None:
            raise Violation(f"{op.id} is {op.phase} without a deadline")

    def _hear(self, op_id: str, event: Event) -> None:
        if isinstance(event, events.AgentBack) or (isinstance(event, events.Restored) and event.pid is not None):
            self.known[op_id, event.worker] = self.node.processes[event.worker].connection
        elif isinstance(event, events.Inspected) and (op_id, event.effect) in self.inspected:
            self.known[op_id, event.worker] = self.inspected.pop((op_id, event.effect))

    # ---- effects -----------------------------------------------------------------------------------------------------

    def perform(self, running: Running) -> None:
        """Let an effect come on, with a crash before and after it."""
        if self.is_killed(f"before {running.effect.tag}"):
            self.crash(b"")
            return
        self.hands.perform(running)
        if self.is_killed(f"after {running.effect.tag}"):
            self.crash(b"")

    def finish(self, running: Running, event: Event | None) -> None:
        if running in self.running:
            self.running.remove(running)
        if event is not None:
            self.post(running.op_id, event)

    # ---- connections -------------------------------------------------------------------------------------------------

    def disconnect(self, process: Process, *, goes_on: bool = True) -> None:
        """The agent's connection ends. An order may be dropped, or continue without a report of its end."""
        for running in list(self.running):
            if running.effect.worker == process.name and running.effect.in_worker:
                if goes_on:
                    self._leave(process, running)
                self.finish(running, failure(running.effect, DISCONNECTED))
        process.connected = False
        self.on_event(process.name, events.AgentLost(worker=process.name))

    def reconnect(self, process: Process) -> None:
        if not process.parked:  # an agent withdraws what the connection before has asked for
            process.asked_at = None
        process.connected = True
        process.connection += 1
        self.on_event(process.name, events.AgentBack(worker=process.name, token=process.token))

    def attend_anew(self, process: Process) -> None:
        """The program that runs in the place of a worker has an agent as well, which calls itself otherwise."""
        process.connection += 1
        self.on_event(process.name, events.AgentBack(worker=process.name, token="another"))

    def _leave(self, process: Process, running: Running) -> None:
        effect = running.effect
        reached = process.alive and running.connection == process.connection and not process.under_way
        if effect.tag not in ORDERS or not reached or self.random.random() < 0.5:
            return
        if effect.tag in {"checkpoint", "restore"}:  # the driver's calls end, whoever made them
            if not process.stopped:
                self.hands.do(running, process)
        elif not process.stopped:
            process.under_way = effect.tag
            process.memory_bytes = self.node.pool.get(process.name, 0)

    def go_on_alone(self, process: Process) -> None:
        """The end of an abandoned order."""
        what, process.under_way = process.under_way, None
        if what == "offload":
            self.node.offload(process.name, process.memory_bytes)
        elif what == "reload":
            self.node.reload(process.name)

    # ---- the end of a daemon, and the next one -----------------------------------------------------------------------

    def crash(self, unsynced: bytes, *, power: bool = False) -> None:
        """The daemon dies and is started again: the journal is read, connections and the room it held are gone."""
        self.crashes += 1
        self.tell("the power is cut" if power else "crash")
        self.hands.fall()
        for running in self.running if not self.node.alone else ():
            process = self.node.processes[running.effect.worker]
            if running.effect.in_worker:
                if process.connected:
                    self._leave(process, running)
            elif self.random.random() < 0.5:
                self.hands.do(running, process)
        if unsynced:
            self.disk.scribble(NAME, unsynced)
        self.file.close()
        self._forget()
        for process in self.node.processes.values():
            process.connected = not process.has_agent
        self.node.lose_daemon(kept=self.node.keeper and not self.parts.forgets_descriptors, random=self.random)
        if power:
            self._lose_everybody()
        self.restart()

    def _forget(self) -> None:
        self.running.clear()
        self.queue.clear()
        self.inspected.clear()
        self.unwritten.clear()
        self.ghosts = [ghost for ghost in self.ghosts if isinstance(ghost[1], events.Ending)]
        self.ops, self.durable_seq = {}, {}

    def _lose_everybody(self) -> None:
        """After a power cut no process exists, nothing is held, and the clock starts over."""
        self.disk.cut_power()
        for name, process in self.node.processes.items():
            self.node.die(name)
            for held in self.node.holds.values():
                held.pop(name, None)
            self.node.pool_free += self.node.pool.pop(name, 0)
            self.node.copies.pop(name, None)
            process.connected = process.owed = False
        for held in self.node.holds.values() if self.node.alone else ():
            held.clear()
        self.node.strangers.clear()
        self.now = 0.0

    def restart(self) -> None:
        """Read the journal, and resume every operation that has not ended."""
        self.file = self._opened()
        self.hands.rise()
        for op_id, history in self.reading.histories.items():
            self.know(history.operation)
            self.durable_seq[op_id] = history.operation.seq
        crashes = self.crashes
        for op in list(self.live_ops()):
            if self.crashes == crashes:  # else a later start has resumed them all
                self.take(op.id, events.Recovered())


def _has(op: Operation, name: str) -> bool:
    worker = op.worker(name)
    return worker is not None and not worker.has_exited
