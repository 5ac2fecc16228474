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
from hegmd.helper.link import Link
from hegmd.inventory import Inventory, NodeSnapshot
from hegmd.lookout import Lookout
from hegmd.methods.base import Carrier, Method
from hegmd.methods.driver import DriverCarrier, DriverMethod, is_stopped
from hegmd.methods.gpus import Gpus
from hegmd.methods.host import HostCarrier
from hegmd.methods.neighbours import Neighbours
from hegmd.methods.peer import PeerCarrier
from hegmd.methods.simulated import SimulatedMethod
from hegmd.methods.worker import WorkerCarrier
from hegmd.migration.performer import Performer
from hegmd.migration.runner import Runner, rooms_to_restore
from hegmd.operations import Operations
from hegmd.pool import STORE_PREFIX, Pool
from hegmd.protocol.snapshots import Gpu
from hegmd.rooms import Rooms
from hegmd.sequences import Sequences
from hegmd.service import PassedDescriptors, ServiceManager
from hegmd.vram import STORE_PREFIX as VRAM_PREFIX
from hegmd.vram import VideoMemory
from hegmd.workers import Workers


class Moving:
    """Made once, opened once, then run for as long as the daemon serves."""

    def __init__(
        self,
        *,
        state_dir: Path,
        budget_bytes: int,
        simulator: SimulatedProvider | None,
        inventory: Inventory,
        workers: Workers,
        manager: ServiceManager,
        events: EventLog,
        start_ticks: Callable[[int], int | None],
    ) -> None:
        self._workers = workers
        self._start_ticks = start_ticks
        self._inventory = inventory
        self.pool = Pool(budget_bytes, store=manager)
        self.rooms = Rooms(simulator, gpus=self._gpus, changed=inventory.expire)
        self.helper = Link()
        self.memory = VideoMemory(self.helper, manager)
        self._neighbours = Neighbours(self.helper, state_dir, start_ticks=start_ticks, is_stopped=is_stopped)
        methods: dict[str, Method] = {SimulatedMethod.name: SimulatedMethod(self.rooms)}
        carriers: dict[str, Carrier] = {WorkerCarrier.name: WorkerCarrier(self.pool)}
        if simulator is None:
            gpus = Gpus(self._look, inventory.expire)
            methods = {DriverMethod.name: DriverMethod(self.helper, self.memory, gpus, self._neighbours)}
            for carrier in (
                DriverCarrier(),
                HostCarrier(self.helper, gpus, self.pool),
                PeerCarrier(self.helper, gpus, self.memory),
            ):
                carriers[carrier.name] = carrier
        performer = Performer(workers, methods, carriers, start_ticks=start_ticks)
        self.runner = Runner(state_dir, performer, events)
        self.attendance = Attendance(
            workers,
            self.rooms,
            in_hand=lambda pid: self.runner.of_process(pid) is not None,
            last_place=self.runner.last_place,
            out_bytes=self.runner.held_bytes,
            changed=inventory.expire,
        )
        lookout = Lookout(
            inventory,
            workers,
            self.pool,
            count=self.attendance.count,
            running=self.runner.under_way,
            rates=performer.paces.rates,
            outlived=manager.present,
        )
        self.operations = Operations(inventory, workers, lookout, self.runner)
        self.sequences = Sequences(lookout, self.operations)
        workers.listen(self.attendance.hear)
        workers.listen(self.runner.hear)

    async def _look(self) -> NodeSnapshot:
        """What is done to real processes rests on what is so now."""
        self._inventory.expire()
        return await self._inventory.fresh(0.0)

    def _gpus(self) -> tuple[Gpu, ...]:
        latest = self._inventory.latest
        return () if latest is None else latest.gpus

    def adopt(self, passed: PassedDescriptors) -> None:
        """Take back the bytes that an earlier run of the daemon left with the service manager."""
        for name in passed.names:
            if name.startswith(STORE_PREFIX):
                for descriptor in passed.take(name):
                    self.pool.adopt(name, descriptor)
            elif name.startswith(VRAM_PREFIX):
                for descriptor in passed.take(name):
                    self.memory.adopt(name, descriptor)

    async def open(self) -> None:
        """Read the journal, and hold again what it says is held. Raises HegmError for one that cannot be trusted.

        A simulated driver forgets with the daemon what was held on its GPUs.
        """
        await anyio.to_thread.run_sync(self.runner.open)
        for member, gpu, size_bytes in rooms_to_restore(self.runner.operations()):
            if self._start_ticks(member.pid) == member.start_ticks:
                self.rooms.hold_what_fits((member.pid, member.start_ticks), gpu, size_bytes)

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Watch the workers and run the operations, until cancelled."""
        over = anyio.Event()
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._keep_helper, over)
            try:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(self._neighbours.let_go)
                    await inner.start(self._workers.run)
                    await inner.start(self.runner.run)
                    await inner.start(self.sequences.run)
                    inner.start_soon(self.attendance.run)
                    task_status.started()
            finally:
                over.set()

    async def _keep_helper(
        self, over: anyio.Event, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """The helper outlives the operations: one that is cut off has a process to unlock before it is gone."""
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                await tasks.start(self.helper.run)
                task_status.started()
                await over.wait()
                tasks.cancel_scope.cancel()

    def close(self) -> None:
        """Let go of all that is held here; what the service manager keeps, it keeps."""
        self.pool.close()
        self.memory.close()

    @property
    def busy(self) -> bool:
        """Whether there is a job, or an operation that is not over."""
        return any(True for _ in self._workers) or bool(self.runner.under_way())
