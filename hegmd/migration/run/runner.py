"""Runs the operations: one task each, which journals an event before it performs what follows from it.

Owns the order on which recovery depends: an event is handled, its consequences are synced to disk, and only then are
its effects performed. The machine decides, `executor` acts, `migration/journal/file` stores; this module connects them
to the clock and the clients that follow operations. After a start of the daemon, every operation that has not ended
receives `recovered`.

If the machine no longer waits for an effect, the effect is cancelled where that is allowed. Otherwise it runs to its
end, and its number shows that its result is obsolete. While the journal cannot be written, operations stop where they
are: nothing is done that is not on disk.

Longer than 400 lines because everything that reads or changes running operations is here.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel

from hegmd.errors import Bug, HegmError
from hegmd.migration.journal import records
from hegmd.migration.journal.disk import Disk
from hegmd.migration.journal.history import Ledger
from hegmd.migration.journal.records import History
from hegmd.migration.machine import events
from hegmd.migration.machine.describe import description, happenings, state_of, way_of
from hegmd.migration.machine.downtime import timed
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.machine import handle
from hegmd.migration.machine.next_effects import PLANNED, SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import RESTART, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.run.executor import EffectExecutor
from hegmd.migration.run.task import (
    AT_REST,
    SETTLED,
    EndedWell,
    OperationTask,
    PendingEffect,
    QueuedEvent,
    exit_unknown,
)
from hegmd.protocol import operations as protocol
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.process_ends import ended
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import fields
from hegmd.telemetry.step_timings import StepTimings, collected
from hegmd.workers.workers import BACK, CAME, ENDED, LEFT, AgentConnection

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0


class Runner(BackgroundTasks):
    """Every operation of the node. `run` has to be running before any is begun."""

    def __init__(
        self,
        folder: Path,
        performer: EffectExecutor,
        log: EventLog,
        *,
        disk: Disk | None = None,
        ended_well: EndedWell = exit_unknown,
    ) -> None:
        self._ledger = Ledger(folder, log, disk=disk)
        self._performer = performer
        self._log = log
        self._ended_well = ended_well
        self._running: dict[str, OperationTask] = {}
        self._ended: dict[str, OperationTask] = {}
        #: Operations that ended under this daemon, by kind, method and result.
        self.ended_counts: Counter[tuple[str, str, str]] = Counter()
        self.over: Callable[[], object] = lambda: None  # called whenever an operation has ended
        #: Returns why a suspended operation waits if its job resumes by itself; sharing sets it.
        self.resumes_by_itself: Callable[[Operation], protocol.Wait | None] = lambda _op: None
        super().__init__()

    # -- up and down ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the journal. Blocks. Raises HegmError if it cannot be trusted."""
        self._ledger.open()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Continue unfinished operations and run new ones, until cancelled."""
        try:
            await super().run(task_status=task_status)
        finally:
            await self._ledger.end()

    def _on_start(self) -> None:
        for history in tuple(self._ledger.histories.values()):
            if history.operation.phase not in TERMINAL:
                self._start(OperationTask(history), events.Recovered(cause="hegmd was started"))

    def _start(self, running: OperationTask, first: Event) -> None:
        tasks = self._open_tasks()
        self._running[running.op.id] = running
        running.enqueue(first)
        tasks.start_soon(self._drive, running, name=f"operation {running.op.id}")

    # -- requests ------------------------------------------------------------------------------------------------------

    def next_id(self) -> str:
        return self._ledger.next_id()

    def reserve_id(self) -> str:
        """Return an id for an operation that starts later. It is not used again during this run of the daemon."""
        return self._ledger.reserve_id()

    async def begin(self, op: Operation) -> None:
        """Put an operation in the journal and start it. Raises HegmError; nothing has been done then.

        If hegmd stops meanwhile, the next daemon rolls back a planned one, which is refused, and continues any other.
        """
        self._open_tasks()  # before anything is journalled
        utc = time.time()
        history = History(op).after(op, records.Line(utc=utc, event="", phase=op.phase))
        running = OperationTask(history)
        for member in op.workers:
            running.note_connection(member.name, self._performer.connection(member))
        self._running[op.id] = running  # takes the processes, before anything is waited for
        try:
            await self._ledger.enter(history, records.opening(op, utc))
        except BaseException:
            del self._running[op.id]
            raise
        pids = ", ".join(str(worker.pid) for worker in op.workers)
        way = way_of(op)
        message = f"operation {op.id}: {op.kind} of {pids}{' by restart' if way == RESTART else ''}"
        self._log.record("operation.began", "info", message, facts={"id": op.id, "way": way})
        if op.phase == PLANNED or self._tasks is not None:
            self._start(running, events.Begin(cause="request"))

    async def remember(self, op: Operation) -> None:
        """Put an operation into the journal that failed before it could begin. Raises nothing."""
        utc = time.time()
        history = History(op).after(op, records.Line(utc=utc, event="", phase=op.phase))
        try:
            await self._ledger.enter(history, records.opening(op, utc))
        except HegmError as error:
            logger.warning("operation %s failed and is not remembered: %s; %s", op.id, error.message, error.hint)
            return
        self._publish_end(op)

    async def ask(self, op_id: str, event: Event) -> None:
        """Have an operation take an event. Raises Refused when it cannot be granted, and NOT_FOUND."""
        running = self._running.get(op_id)
        if running is None:
            op = self.history(op_id).operation
            handle(op, event, time.monotonic())  # it has ended, and raises the refusal
            raise Bug(f"operation {op_id} is {op.phase} and has no task")
        asking = running.enqueue(event)
        await asking.settled.wait()
        if asking.refusal is not None:
            raise asking.refusal

    def on_event(self, event: str, worker: AgentConnection) -> None:
        """Handle an event of the workers: pass on what concerns an operation."""
        for running in tuple(self._running.values()):
            for member in running.op.live:
                identity = (worker.pid, worker.identity.start_ticks)
                if not member.has_agent or member.key != identity:
                    continue
                if event == ENDED and member.restarts and not member.state_saved and self._tasks is not None:
                    self._tasks.start_soon(self._on_exit, running, member, worker)
                else:
                    running.enqueue(_news_event(event, worker, member), worker.connection, process=member.key)

    async def _on_exit(self, running: OperationTask, member: Member, worker: AgentConnection) -> None:
        """Report the exit of a worker, after asking its supervisor whether it finished its training."""
        event = _news_event(ENDED, worker, member)
        if isinstance(event, events.WorkerExited) and await self._ended_well(
            worker.identity.uid, worker.about.run, worker.pid
        ):
            event = event.replace(finished=True, why="it ended")
        running.enqueue(event, worker.connection, process=member.key)

    # -- views ---------------------------------------------------------------------------------------------------------

    def history(self, op_id: str) -> History:
        """Return one operation and its story. Raises NOT_FOUND."""
        return self._ledger.history(op_id)

    def operations(self) -> tuple[Operation, ...]:
        return tuple(history.operation for history in self._ledger.histories.values())

    def under_way(self) -> tuple[Operation, ...]:
        """Return the operations that have not ended, including suspended ones."""
        return tuple(running.op for running in self._running.values())

    def find(self, op_id: str) -> Operation | None:
        """Return that operation; None if it has ended or is not known."""
        running = self._running.get(op_id)
        return None if running is None else running.op

    def as_held(self) -> tuple[Operation, ...]:
        """Return the running operations with the reservations and pool memory that the daemon holds for them."""
        return tuple(self._performer.as_held(op) for op in self.under_way())

    def of_process(self, pid: int) -> Operation | None:
        return next((op for op in self.under_way() if any(member.pid == pid for member in op.live)), None)

    def last_place(self, pid: int, start_ticks: int) -> Member | None:
        """Return the worker record of the newest operation on that process, or None."""
        for op in reversed(self.operations()):
            for member in op.workers:
                if member.key == (pid, start_ticks):
                    return member
        return None

    def states(self) -> Counter[str]:
        """Count the operations that have not ended by state: moving, quiesced, suspended, or waiting for a person."""
        return Counter(state_of(self.describe(op.id)) for op in self.under_way())

    def held_bytes(self) -> Mapping[int, int]:
        """Bytes that are out of their processes, by pid."""
        held: dict[int, int] = {}
        for op in self.under_way():
            held.update({member.pid: member.size_bytes if member.offloaded else 0 for member in op.live})
        return held

    def describe(self, op_id: str) -> protocol.Operation:
        """Return the operation's public record. Raises NOT_FOUND."""
        running = self._running.get(op_id) or self._ended.get(op_id)
        history = self.history(op_id)
        op = history.operation
        described = description(
            op,
            moved_bytes=0 if running is None else sum(running.moved.values()),
            last_utc=history.story[-1].utc if history.story else None,
            trouble=self._ledger.trouble,
            stopped=() if op.phase in AT_REST else self._performer.stopped(op),
            ending=self._performer.ending(op),
            awaits=None if running is None else self._performer.doing(op),
        )
        is_suspended = op.phase == SUSPENDED and op.failure is None
        by_itself = self.resumes_by_itself(op) if is_suspended else None
        return described if by_itself is None else described.replace(waits=by_itself)

    async def follow(self, op_id: str) -> AsyncIterator[protocol.OperationProgress]:
        """Yield the progress of an operation until its job is suspended or held, or it has ended. Raises NOT_FOUND."""
        last: protocol.OperationProgress | None = None
        while True:
            running = self._running.get(op_id)
            changed = None if running is None else running.progress.next
            described = self.describe(op_id)
            progress = protocol.OperationProgress(
                id=op_id,
                phase=described.phase,
                moved_bytes=described.moved_bytes,
                size_bytes=described.size_bytes,
                doing=described.doing,
                waits=described.waits,
            )
            if progress != last:
                yield progress
                last = progress
            if running is None or changed is None:
                return
            if described.phase in SETTLED and not running.inbox and not running.taking:
                return
            with anyio.move_on_after(_POLL_INTERVAL_S):  # no event reports that one of its processes was stopped
                await changed.wait()

    async def changed(self, op_id: str) -> None:
        """Wait until the operation changes. Returns at once if it has ended."""
        running = self._running.get(op_id)
        if running is not None:
            await running.progress.wait()

    # -- one operation -------------------------------------------------------------------------------------------------

    async def _drive(self, running: OperationTask) -> None:
        """Take one event after the other until the operation is over."""
        async with anyio.create_task_group() as tasks:
            for member in running.op.live:
                if not member.has_agent:
                    tasks.start_soon(self._watch, running, member)
            watches_stopped = False
            while running.op.phase not in TERMINAL:
                asking = await running.next(time.monotonic)
                if running.is_outdated(asking):
                    asking.settle()
                    continue
                running.taking = True
                try:
                    effects = await self._handle(running, asking)
                except HegmError as refusal:
                    asking.settle(refusal)
                    continue
                finally:
                    running.taking = False
                    running.progress.notify_all()
                asking.settle()
                if isinstance(asking.event, events.Restored) and asking.event.pid is not None:
                    running.forget_connection(asking.event.worker)
                if isinstance(asking.event, (events.AgentBack, events.Inspected)):
                    running.note_connection(asking.event.worker, asking.connection)
                running.drop_what_is_not_awaited()
                for effect in effects:
                    tasks.start_soon(self._perform, running, running.start(effect))
                running.progress.notify_all()
                if running.op.attempts and not watches_stopped:
                    watches_stopped = True
                    tasks.start_soon(self._watch_stopped, running)
            tasks.cancel_scope.cancel()
        self._finish(running)

    async def _watch_stopped(self, running: OperationTask) -> None:
        """Have a worker inspected once it runs again that was stopped while the operation waits for another attempt.

        The attempt may be minutes away. Runs until cancelled.
        """
        before: tuple[int, ...] = ()
        while True:
            if not running.op.attempts or running.op.phase in AT_REST:
                before = ()
                await running.progress.wait()
                continue
            stopped = self._performer.stopped(running.op)
            for member in running.op.live:
                if member.pid in before and member.pid not in stopped:
                    again = events.AgentBack(worker=member.name, token=member.token, cause="it runs again")
                    running.enqueue(again, process=member.key)
            before = stopped
            await anyio.sleep(_POLL_INTERVAL_S)

    async def _watch(self, running: OperationTask, member: Member) -> None:
        """Wait for the end of a process without an agent, whose connection would report it."""
        await ended(member.pid, lambda: self._performer.is_alive(member))
        running.enqueue(events.WorkerExited(worker=member.name, cause="the process"))

    async def _handle(self, running: OperationTask, asking: QueuedEvent) -> tuple[Effect, ...]:
        """Handle one event and have what follows on disk. Raises Refused, with nothing changed."""
        now = time.monotonic()
        before, event = running.op, asking.event
        after, effects = handle(before, event, now)
        if after is before:
            return ()
        after = timed(event, after, now)
        utc, timings = time.time(), asking.timings
        record, line = records.step(before, event, after, effects, now=now, utc=utc, timings=timings)
        history = running.history.after(after, line)
        await self._ledger.write(history, record)
        took_ms = (time.monotonic() - now) * 1e3
        logger.debug("operation %s: %s after %s is on disk, in %.1f ms", after.id, after.phase, event.tag, took_ms)
        running.history = history
        self._note(running, event, before, after)
        return effects

    def _note(self, running: OperationTask, event: Event, before: Operation, after: Operation) -> None:
        """Publish what changed, and forget the progress of an ended operation."""
        facts = {"id": after.id, "uid": after.owner_uid}  # a message can quote the script, which others are not to see
        for happening in happenings(before, event, after):
            self._log.record(happening.kind, happening.severity, happening.message, facts=facts)
        if before.phase != after.phase:
            running.moved.clear()
            logger.info("operation %s: %s", after.id, after.phase, extra=fields(operation=after.id, phase=after.phase))

    async def _perform(self, running: OperationTask, errand: PendingEffect) -> None:
        effect = errand.effect

        def on_progress(moved_bytes: int) -> None:
            running.moved[effect.worker] = moved_bytes
            running.progress.notify_all()

        try:
            with errand.scope:
                for earlier in running.before(effect):
                    await earlier.over.wait()
                await anyio.lowlevel.checkpoint_if_cancelled()
                began, subject = time.monotonic(), running.op.worker(effect.worker)
                with collected() as found:
                    ending = await self._performer.perform(running.op, effect, on_progress, errand.heard)
                took_ms = (time.monotonic() - began) * 1e3
                logger.debug("operation %s: %s took %.1f ms", running.op.id, effect.tag, took_ms)
                member = running.op.worker(effect.worker)
                connection = None if member is None else self._performer.connection(member)
                is_news = isinstance(ending, events.WorkerExited)
                process = subject.key if is_news and subject is not None else None
                running.enqueue(ending, connection, self._timings(found), process)
        finally:
            running.end(errand)

    def _timings(self, found: StepTimings) -> tuple[protocol.Timing, ...]:
        """Return the steps with the wall time of their begin."""
        offset_s = time.time() - time.monotonic()
        return tuple(
            [
                protocol.Timing(
                    lane=step.lane,
                    name=step.name,
                    began_utc=step.began + offset_s,
                    took_s=max(0.0, step.ended - step.began),
                    size_bytes=step.size_bytes,
                )
                for step in found.steps
            ]
        )

    def _finish(self, running: OperationTask) -> None:
        op = running.op
        del self._running[op.id]
        self._ended[op.id] = running
        self.over()
        for old in tuple(self._ended)[: -records.REMEMBERED]:
            del self._ended[old]
        for asking in running.inbox:
            try:
                handle(op, asking.event, time.monotonic())
                asking.settle()
            except HegmError as refusal:
                asking.settle(refusal)
        self._publish_end(op)
        running.progress.notify_all()

    def _publish_end(self, op: Operation) -> None:
        """Count and publish its end, and forget the oldest ended operations."""
        self.ended_counts[op.kind, way_of(op), op.phase] += 1
        self._ledger.forget_oldest()
        severity, why = ("info", "") if op.failure is None else ("warning", f": {op.failure.message}")
        facts = {"id": op.id, "uid": op.owner_uid}
        self._log.record(f"operation.{op.phase}", severity, f"operation {op.id}: {op.phase}{why}", facts=facts)


def _news_event(event: str, worker: AgentConnection, member: Member) -> Event:
    if event == ENDED and worker.token == member.token:
        return events.WorkerExited(worker=member.name, cause="the process", why=worker.how_ended or "it ended")
    if event in (CAME, BACK):
        return events.AgentBack(worker=member.name, token=worker.token, cause="the agent")
    if event in (LEFT, ENDED):
        return events.AgentLost(worker=member.name, cause="the agent")
    raise Bug(f"workers have no news {event!r}")
