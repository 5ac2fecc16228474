"""The parts that move jobs, put together: pool, rooms, performer, runner, attendance and the desk at which it is asked.

Owns their order on the way up (the journal is read before anybody can ask, the rooms it names are held before an agent
attends) and on the way down. Holds no rule of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc
import anyio.to_thread

from hegmd.attendance import Attendance
from hegmd.devices.simulated import SimulatedProvider
from hegmd.events import EventLog
from hegmd.inventory import Inventory
from hegmd.migration.course import TERMINAL
from hegmd.migration.performer import Performer
from hegmd.migration.runner import Runner, rooms_to_restore
from hegmd.operations import Operations
from hegmd.outlook import Outlook
from hegmd.pool import Key, Pool
from hegmd.pool_found import find_pieces
from hegmd.protocol.snapshots import Gpu
from hegmd.resting import ASKED, Resting
from hegmd.rooms import Rooms
from hegmd.strays import DistrustedStrays, PieceStrays, StandingStrays, Strays
from hegmd.workers import Workers


class Moving:
    """Made once, opened once, then run for as long as the daemon serves."""

    def __init__(
        self,
        *,
        state_dir: Path,
        pool: Pool,
        simulator: SimulatedProvider | None,
        inventory: Inventory,
        workers: Workers,
        events: EventLog,
        start_ticks: Callable[[int], int | None],
        spill: str = ASKED,
    ) -> None:
        self._workers = workers
        self._start_ticks = start_ticks
        self._inventory = inventory
        self.pool = pool
        self.rooms = Rooms(simulator, gpus=self._gpus, changed=inventory.expire)
        performer = Performer(workers, self.rooms, self.pool, start_ticks=start_ticks)
        self.runner = Runner(state_dir, performer, events)
        self.attendance = Attendance(
            workers,
            self.rooms,
            in_hand=lambda pid: self.runner.of_process(pid) is not None,
            last_place=self.runner.last_place,
            out_bytes=self.runner.held_bytes,
            changed=inventory.expire,
        )
        self._standing = StandingStrays(workers, lambda pid: self.runner.of_process(pid) is not None)
        self._distrusted = DistrustedStrays()
        self.strays = Strays([PieceStrays(pool, self._why_stray), self._distrusted, self._standing], events)
        self.resting = Resting(workers, pool, self.runner, events, when=spill)
        self.operations = Operations(
            inventory,
            workers,
            pool,
            self.runner,
            resting=self.resting,
            standing=self._standing,
            outlook=Outlook(
                inventory,
                workers,
                pool,
                self.runner,
                resting=self.resting,
                standing=self._standing,
                count=self.attendance.count,
            ),
        )
        for listener in (self.attendance.hear, self.runner.hear, self.resting.hear, self.strays.hear):
            workers.listen(listener)

    def _gpus(self) -> tuple[Gpu, ...]:
        latest = self._inventory.latest
        return () if latest is None else latest.gpus

    async def open(self) -> None:
        """Read the journal, and hold again what it says is held. Raises HegmError for one that cannot be trusted.

        A simulated driver forgets with the daemon what was held on its GPUs. Bytes that no operation owns are kept.
        """
        await anyio.to_thread.run_sync(self.runner.open)
        findings = await find_pieces(self.pool.keep)
        self.pool.enter(findings.pieces, self._owned)
        self._distrusted.found = findings.distrusted
        self.strays.tell()
        for member, gpu, size_bytes in rooms_to_restore(self.runner.operations()):
            if self._start_ticks(member.pid) == member.start_ticks:
                self.rooms.hold_what_fits((member.pid, member.start_ticks), gpu, size_bytes)

    def _owned(self, key: Key) -> bool:
        """Whether an operation that is not over has that piece."""
        return any(
            op.id == key.operation and op.worker(key.worker) is not None
            for op in self.runner.operations()
            if op.phase not in TERMINAL
        )

    def _why_stray(self, op_id: str) -> str:
        for op in self.runner.operations():
            if op.id == op_id:
                return f"operation {op_id} is {op.phase} and does not have it"
        return f"operation {op_id} is not in the journal"

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the workers and run the operations, until cancelled."""
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._workers.run)
            await tasks.start(self.runner.run)
            await tasks.start(self.resting.run)
            tasks.start_soon(self.attendance.run)
            if self.pool.keep.store is not None:
                tasks.start_soon(self.pool.keep.store.run)
            task_status.started()

    @property
    def busy(self) -> bool:
        """Whether there is a job, or an operation that is not over."""
        return any(True for _ in self._workers) or bool(self.runner.under_way())
