"""A protected job: its present state, and the interfaces to the rest of the daemon.

Shared by the code that takes its snapshots and the code that starts it from them, which never act at the same time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.memory.pool import Pool
from hegmd.migration.methods import launchers
from hegmd.node.inventory import NodeSnapshot
from hegmd.protocol.slots import SlotRecord
from hegmd.protocol.snapshots import Gpu
from hegmd.protocol.supervision import RecoveryWish
from hegmd.recovery.policy import complete_generations
from hegmd.recovery.records import JobSnapshots
from hegmd.recovery.slots import JobSlots, by_rank
from hegmd.system.condition import Condition
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import fields
from hegmd.workers.supervisors import Supervisor, SupervisorAway
from hegmd.workers.workers import AgentConnection, Workers

logger = logging.getLogger(__name__)

# The agent's own thread answers, if it has the interpreter.
COUNT_S = 2.0
# How long the agents of a training that hangs have to say where its threads are.
STACKS_S, MAX_STACKS_CHARS = 5.0, 20_000


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """The parts of the daemon that a protection uses. `gpus` returns those of the last look; `look` reads them again.

    `variables` returns what a start needs in its environment for GPUs, `workers_of` the processes of all runs of a job.
    Sharing replaces the defaults of those that have one.
    """

    workers: Workers
    pool: Pool
    events: EventLog
    state_dir: Path
    gpus: Callable[[], Sequence[Gpu]]
    look: Callable[[], Awaitable[NodeSnapshot]]
    variables: Callable[[Sequence[str]], dict[str, Any]]
    #: Whether an operation may give orders to the agent of that process; and whether it keeps it from its next step.
    is_in_hand: Callable[[int], bool]
    is_kept_from_training: Callable[[int], bool]
    save: Callable[[JobSnapshots], object]
    until_saved: Callable[[], Awaitable[object]]
    workers_of: Callable[[str], Sequence[AgentConnection]]
    changed: Condition
    #: Whether the job, by its id, was off its GPUs when it failed: then it waits until they have room again.
    must_wait: Callable[[str], bool] = lambda _job: False
    #: Whether an operation writes the job, by its id, into an image and then ends it; and how one has ended it, if so.
    is_being_written: Callable[[str], bool] = lambda _job: False
    end_of: Callable[[str, int], str | None] = lambda _job, _since_ticks: None
    #: Whether memory of these GPUs is leased to others than that process.
    is_leased: Callable[[int, Sequence[str]], bool] = lambda _pid, _gpus: False
    #: Has the job wait for room of that size in all, on these GPUs or in place of them, and why.
    queue_for_room: Callable[[str, Sequence[str], int, str], object] = lambda _job, _gpus, _size_bytes, _why: None
    utc: Callable[[], float] = time.time


class ProtectedJob:
    """A protected job, from its first agent to its end."""

    def __init__(self, node: Node, record: JobSnapshots, name: str, supervisor: Supervisor) -> None:
        self.node = node
        self.record = record
        self.name = name
        self.supervisor = supervisor
        self.slots = JobSlots(node.pool, record.job)
        #: The snapshot that it would be started from now.
        self.newest: SlotRecord | None = None
        #: The step of boundary 0 of its processes, and the last boundary that is known of.
        self.first_step = 0
        self.boundary = 0
        #: Why its processes were killed; for a hung job also where its threads were.
        self.killed: tuple[str, str | None] | None = None

    def __str__(self) -> str:
        return f"job {self.record.job} ({self.name})"

    @property
    def wish(self) -> RecoveryWish:
        """The recovery that its user asked for."""
        return self.supervisor.offer.recover or RecoveryWish()

    @property
    def known_step(self) -> int | None:
        """The last step that the training is known to have reached."""
        steps = [] if self.newest is None else [self.newest.step]
        steps += [self.first_step + self.boundary] if self.boundary else []
        return max(steps, default=None)

    def put(self, record: JobSnapshots) -> None:
        """Record that, also for a later daemon."""
        self.record = record
        self.node.save(record)

    async def whole(self) -> list[SlotRecord]:
        """Return the snapshots that it can be started from, the newest first."""
        return complete_generations(by_rank(await self.slots.read()), max(1, self.record.ranks), self.record.bad)

    def own_workers(self) -> list[AgentConnection]:
        """Return its processes with an agent."""
        who = self.supervisor.uid, self.supervisor.run
        return [one for one in self.node.workers if (one.identity.uid, one.about.run) == who and not one.ended]

    def rest(self) -> list[AgentConnection]:
        """Return its processes of this run and of former ones, whose `hegmctl run` may have been killed."""
        own = self.own_workers()
        return [*own, *(one for one in self.node.workers_of(self.record.job) if not one.ended and one not in own)]

    async def count(self, workers: Sequence[AgentConnection]) -> None:
        """Ask each for its count of boundaries. One that does not answer in time is left out."""

        async def one(worker: AgentConnection) -> None:
            with anyio.move_on_after(COUNT_S):
                try:
                    await worker.order("count", limit_s=COUNT_S)
                except HegmError as error:  # its end is reported, or it returns
                    logger.debug("%s", error.message)

        async with anyio.create_task_group() as tasks:
            for worker in workers:
                tasks.start_soon(one, worker)

    async def end_in_image(self) -> str | None:
        """Return how an operation has ended the job, which is no failure: its image is complete. None if none has."""
        while self.supervisor.is_alive and self.node.is_being_written(self.record.job):
            with anyio.move_on_after(COUNT_S):
                await self.node.changed.wait()
        return self.node.end_of(self.record.job, self.supervisor.start_ticks)  # not one of an earlier run

    async def note(self, message: str, hint: str) -> None:
        """Have the supervisor print it for the user."""
        try:
            await self.supervisor.tell("note", "", message=message, hint=hint)
        except SupervisorAway as error:
            logger.debug("%s", error.message)

    async def kill(self, own: Sequence[AgentConnection], why: str, stacks: str | None, event: str) -> None:
        """End these processes of it. Its command then fails, and it is recovered."""
        self.killed = why, stacks
        self.record_event(event, "warning", f"{self} {why}")
        await self.note(f"{self} {why}", f"see: hegmctl recovery {self.record.job}")
        for worker in own:
            await anyio.to_thread.run_sync(launchers.end_one, worker.pid, worker.identity.start_ticks)

    def record_event(self, kind: str, severity: str, message: str) -> None:
        facts = {"job": self.record.job, "uid": self.record.uid}
        self.node.events.record(kind, severity, message, facts=facts)
        logger.info("%s", message, extra=fields(job=self.record.job))


async def stacks_of(own: Sequence[AgentConnection]) -> str:
    """Return where the threads of these processes are. All are asked at one time."""
    found = dict.fromkeys(own, "")

    async def one(worker: AgentConnection) -> None:
        found[worker] = await _stacks_of(worker)

    async with anyio.create_task_group() as tasks:
        for worker in own:
            tasks.start_soon(one, worker)
    return "\n".join([f"process {worker.pid}: {stacks}" for worker, stacks in found.items()])


async def _stacks_of(worker: AgentConnection) -> str:
    """The stacks of its threads. A C call that holds the interpreter keeps its agent from reporting them."""
    with anyio.move_on_after(STACKS_S):
        try:
            report = await worker.order("stacks", limit_s=STACKS_S)
            return "\n".join(report.stacks)[:MAX_STACKS_CHARS]
        except HegmError as error:
            return error.message
    return "its agent does not answer: it is stopped, or a C call keeps the interpreter to itself"
