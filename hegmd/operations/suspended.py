"""Suspended operations: their workers stay suspended, and their bytes are spilled to disk on request.

Each call compares the current state with the wanted one and does what is missing: when an operation begins
or resumes, when an agent reconnects, and after a start. So a daemon killed at any point needs no special case. The
order keeps the bytes: first they are on disk, synced and verified; then the agent gets the order to rely on that, and
closes its descriptor; only then is their memory freed.

The journal only has the wish; where the bytes are is found by looking. `stop_spilling` waits for an operation that is
to resume, so that nothing is spilled meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Collection

import anyio

from hegmd.errors import CANCELLED, INTERNAL, HegmError, Refused
from hegmd.gpu_helper.mark import MARK_BYTES
from hegmd.memory.pool import Key, Piece, Pool
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation
from hegmd.migration.model import PoolMemory
from hegmd.migration.run.executor import EffectExecutor
from hegmd.migration.run.runner import Runner
from hegmd.protocol.operations import HOST
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.condition import Condition
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import limited
from hegmd.workers.agent_orders import AgentAway, OrderFailed
from hegmd.workers.workers import BACK, CAME, AgentConnection, Workers

logger = logging.getLogger(__name__)

# How long the answer to a suspension waits for the checksums of its bytes. Those of 100 MB take less.
MOMENT_S = 0.1

ASKED, FULL, ALWAYS = "asked", "full", "always"


class SpillTask:
    """The spilling of one operation, in progress."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()
        self.changed = Condition()
        self.moved: dict[str, int] = {}
        self.again = True
        self.failure: HegmError | None = None


class Preparation:
    """The preparation of one operation for its resume, in progress. Cancelling `scope` ends the comparison of bytes."""

    def __init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()


class SuspendedOperations(BackgroundTasks):
    """`when` is the setting: asked, full or always. `run` has to be running."""

    def __init__(
        self,
        workers: Workers,
        pool: Pool,
        runner: Runner,
        performer: EffectExecutor,
        events: EventLog,
        *,
        when: str = ASKED,
    ) -> None:
        self._workers = workers
        self._performer = performer
        self._pool = pool
        self._runner = runner
        self._events = events
        self._when = when
        self._spill_tasks: dict[str, SpillTask] = {}
        self._wanted: set[str] = set()
        #: Operations that are being prepared for their resume, or whose preparation is being undone.
        self._preparing: dict[str, Preparation] = {}
        #: Operations that have copy sessions which were opened ahead of their resume.
        self._prepared: set[str] = set()
        #: Operations whose preparation is not wanted any more, while it ends.
        self._unwanted: set[str] = set()
        super().__init__()
        if when != ASKED:
            pool.free_memory = self.free_memory

    def _on_start(self) -> None:
        for op in self._runner.under_way():
            self.start_spilling_when_idle(op.id)

    def on_event(self, event: str, worker: AgentConnection) -> None:
        """Handle an event of the workers: one that reconnects may have missed an order."""
        op = self._runner.of_process(worker.pid) if event in (CAME, BACK) else None
        if op is not None:
            self.start_spilling_when_idle(op.id)

    def start_spilling_when_idle(self, op_id: str) -> None:
        """Start to spill that operation's bytes as soon as it is suspended."""
        known = self._spill_tasks.get(op_id)
        if known is not None and not known.over.is_set():
            known.again = True
        if self._tasks is None or (known is not None and not known.over.is_set()):
            return
        under_way = {op.id for op in self._runner.under_way()}
        self._spill_tasks = {known_id: task for known_id, task in self._spill_tasks.items() if known_id in under_way}
        self._wanted &= under_way
        self._spill_tasks[op_id] = task = SpillTask()
        self._tasks.start_soon(self._live, op_id, task, name=f"spilling of operation {op_id}")

    async def stop_spilling(self, op_id: str) -> None:
        """End the spilling and the preparation of an operation that is to resume, and wait for their end."""
        await self._end_preparation(op_id)
        self._prepared.discard(op_id)
        task = self._spill_tasks.pop(op_id, None)
        self._wanted.discard(op_id)
        if task is not None:
            task.scope.cancel()
            await task.over.wait()

    async def spill(self, op_id: str) -> AsyncIterator[int]:
        """Have a suspended operation's bytes on disk: how many are, until all are. Raises HegmError."""
        self._wanted.add(op_id)
        self.start_spilling_when_idle(op_id)
        async for moved_bytes in self.follow(op_id):
            yield moved_bytes

    async def follow(self, op_id: str) -> AsyncIterator[int]:
        """Return how many bytes of an operation that is to be spilled are on disk, until all are. Raises HegmError."""
        task = self._spill_tasks.get(op_id)
        while task is not None and not task.over.is_set():
            changed = task.changed.next
            yield sum(task.moved.values())
            await changed.wait()
        if task is not None and task.failure is not None:
            raise task.failure

    def prepare_soon(self, op_id: str) -> None:
        """Do now what a resume that is about to come would do first: compare the bytes with their checksums, which
        takes two seconds for 32 GiB, and open the copy sessions.
        """
        if self._tasks is not None and op_id not in self._preparing:
            self._preparing[op_id] = preparing = Preparation()
            self._tasks.start_soon(self._prepare, op_id, preparing, name=f"preparation of operation {op_id}")

    def keep_prepared(self, op_ids: Collection[str]) -> None:
        """Close the copy sessions that were opened ahead for other operations: each has contexts on GPUs."""
        for op_id in self._preparing.keys() - set(op_ids):
            self._unwanted.add(op_id)
            self._preparing[op_id].scope.cancel()
        for op_id in self._prepared.difference(op_ids):
            if self._tasks is not None and op_id not in self._preparing:
                self._preparing[op_id] = preparing = Preparation()
                self._tasks.start_soon(self._undo, op_id, preparing, name=f"end of the preparation of {op_id}")

    async def _undo(self, op_id: str, preparing: Preparation) -> None:
        """Undo a preparation. A resume waits for its end, and opens a session of its own."""
        try:
            await self._close_sessions(op_id)
        except Exception:  # the edge of one preparation: a failure here must not end the daemon
            logger.exception("closing the copy sessions of operation %s failed", op_id)
        finally:
            del self._preparing[op_id]
            self._unwanted.discard(op_id)
            preparing.over.set()

    async def _close_sessions(self, op_id: str) -> None:
        self._prepared.discard(op_id)
        op = self._runner.find(op_id)
        if op is not None and op.phase == SUSPENDED:
            for member in op.live:
                if member.offloaded:
                    await self._performer.undo_preparation(op, member)

    async def _prepare(self, op_id: str, preparing: Preparation) -> None:
        try:
            with preparing.scope:
                for member in self._to_prepare(op_id):
                    await self._pool.compare_ahead(Key(op_id, member.name))
            for member in () if preparing.scope.cancel_called else self._to_prepare(op_id):
                await self._open_session(op_id, member)
            if op_id in self._unwanted & self._prepared:
                await self._close_sessions(op_id)
        except HegmError as error:  # the resume tries again, and its caller gets the error
            limited(logger, op_id, logging.WARNING, "operation %s is not prepared: %s", op_id, error.message)
        except Exception:  # the edge of one preparation: a failure here must not end the daemon
            logger.exception("preparing operation %s failed", op_id)
        finally:
            del self._preparing[op_id]
            self._unwanted.discard(op_id)
            preparing.over.set()

    def _to_prepare(self, op_id: str) -> list[Member]:
        """Return the suspended processes of that operation whose bytes are in memory, and stay there.

        Bytes on disk take memory of the pool once the resume loads them, and are compared by that.
        """
        op = self._runner.find(op_id)
        if op is None or op.phase != SUSPENDED or self._is_to_be_spilled(op):
            return []
        pieces = self._pool.by_owner()
        found = [(member, pieces.get(Key(op_id, member.name))) for member in op.live if member.offloaded]
        return [member for member, piece in found if piece is not None and piece.memory is not None]

    async def _open_session(self, op_id: str, member: Member) -> None:
        """Open its copy session. Close it if the operation has ended meanwhile: no resume would."""
        op = self._runner.find(op_id)
        if op is not None and op.phase == SUSPENDED:
            self._prepared.add(op_id)
            await self._performer.prepare_ahead(op, member)
            if self._runner.find(op_id) is None:
                await self._performer.undo_preparation(op, member)

    async def _end_preparation(self, op_id: str) -> None:
        """Wait until the operation's preparation has ended. A session that is being opened is there then."""
        preparing = self._preparing.get(op_id)
        if preparing is not None:
            preparing.scope.cancel()
            await preparing.over.wait()

    async def wait_a_moment(self, op_id: str) -> None:
        """Wait briefly until background work such as checksums is finished. Raises nothing."""
        with anyio.move_on_after(MOMENT_S), contextlib.suppress(HegmError):
            async for _ in self.follow(op_id):
                pass

    def pool_memory(self) -> PoolMemory:
        """Return the pool's free memory, including what it would free rather than refuse a request."""
        free_bytes = self._pool.free_bytes() + self.reclaimable_bytes()
        budget_bytes, ready_bytes = self._pool.budget_bytes(), self._pool.ready.size_bytes
        return PoolMemory(budget_bytes=budget_bytes, free_bytes=free_bytes, ready_bytes=ready_bytes)

    def reclaimable_bytes(self) -> int:
        """Return the bytes that the pool would free rather than refuse a request."""
        if self._when == ASKED:
            return 0
        suspended = {op.id for op in self._runner.under_way() if op.phase == SUSPENDED}
        pieces = [piece for key, piece in self._pool.by_owner().items() if key.operation in suspended]
        return sum(piece.size_bytes for piece in pieces if piece.memory is not None)

    async def free_memory(self, missing_bytes: int) -> None:
        """Spill bytes of suspended jobs, oldest first, until that many bytes are free or none are left."""
        goal_bytes = self._pool.held_bytes - missing_bytes
        for op in self._runner.under_way():
            if self._pool.held_bytes <= goal_bytes:
                return
            if op.phase == SUSPENDED and any(member.offloaded for member in op.live):
                try:
                    async for _ in self.spill(op.id):
                        pass
                except HegmError as error:
                    logger.warning("spilling operation %s freed no memory: %s", op.id, error.message)

    # -- one operation -------------------------------------------------------------------------------------------------

    async def _live(self, op_id: str, task: SpillTask) -> None:
        try:
            with task.scope:
                while task.again:
                    task.again = False
                    await self._look(op_id, task)
        except HegmError as error:
            self._fail(op_id, task, error)
        # the outermost handler of one operation's spill: an error here must not end the daemon
        except Exception as bug:
            logger.exception("spilling operation %s failed", op_id)
            self._fail(op_id, task, HegmError(INTERNAL, f"{type(bug).__name__}: {bug}", "read the log of hegmd"))
        finally:
            task.over.set()
            task.changed.notify_all()

    def _fail(self, op_id: str, task: SpillTask, error: HegmError) -> None:
        task.failure = error
        if error.code is CANCELLED:  # it was wanted in memory after all
            return
        message = f"the bytes of operation {op_id} stay in memory: {error.message}"
        self._events.record("pool.spill-failed", "warning", message, facts={"id": op_id})
        logger.warning("%s; %s", message, error.hint)

    async def _look(self, op_id: str, task: SpillTask) -> None:
        async for _ in self._runner.follow(op_id):
            pass
        op = self._runner.history(op_id).operation
        if op.phase == SUSPENDED:
            for member in op.live:
                await self._settle(op, member, task)

    async def _settle(self, op: Operation, member: Member, task: SpillTask) -> None:
        key = Key(op.id, member.name)
        if not member.is_parked and not member.offloaded:
            return

        def on_progress(moved_bytes: int) -> None:
            task.moved[member.name] = moved_bytes
            task.changed.notify_all()

        if member.offloaded and self._is_to_be_spilled(op):
            await self._end_preparation(op.id)
            self._prepared.discard(op.id)
            await self._performer.undo_preparation(op, member)
            await self._pool.spill(key, on_progress)
        piece = self._pool.by_owner().get(key)
        if member.offloaded and piece is not None and piece.spilled:
            await self._entrust(key, member, in_memory=piece.memory is not None)
        else:
            with contextlib.suppress(OrderFailed):  # an agent of an older release relies on the clock
                await self._order(member, "rest")
            if member.offloaded and piece is not None and not _is_elsewhere(member, piece):
                await self._sum_up(key, member)

    async def _sum_up(self, key: Key, member: Member) -> None:
        """Compute the checksums of its bytes, which no process writes to from now on."""
        try:
            await self._pool.sum_up(key)
        except HegmError as error:
            message = f"the bytes of process {member.pid} have no checksum: {error.message}"
            self._events.record("pool.damaged", "error", message, pid=member.pid, facts={"id": key.operation})
            logger.error("%s; %s", message, error.hint)

    async def _entrust(self, key: Key, member: Member, *, in_memory: bool) -> None:
        """Free the memory of bytes that are on disk, after the agent has closed its descriptor.

        In a restart no process writes to that memory.
        """
        try:
            if not member.is_absent and not await self._order(member, "entrust"):
                return  # the agent gets the order when it reconnects
        except OrderFailed as error:
            raise Refused(
                f"process {member.pid} also keeps its bytes in memory: {error.message}",
                "resume the job, and restart it when convenient: its agent is of an older release",
            ) from error
        await self._pool.free_memory_of(key)
        if in_memory:
            message = f"the bytes of process {member.pid} are on disk"
            self._events.record("pool.spilled", "info", message, pid=member.pid, facts={"id": key.operation})

    def _is_to_be_spilled(self, op: Operation) -> bool:
        return op.spill or op.id in self._wanted or self._when == ALWAYS

    async def _order(self, member: Member, do: str) -> bool:
        """Return True if the agent did it; false when it is not there now. Raises OrderFailed."""
        worker = self._workers.find(member.pid)
        if worker is None or worker.token != member.token or not worker.connected:
            return False
        try:
            await worker.order(do)
        except AgentAway:
            return False
        return True


def _is_elsewhere(member: Member, piece: Piece) -> bool:
    """True if its bytes must still be copied to its segment, according to the segment's mark."""
    if member.carrier != HOST or piece.memory is None:
        return False
    mark_at = piece.memory.size_bytes - MARK_BYTES
    return any(os.pread(piece.memory.fd, 1, mark_at))
