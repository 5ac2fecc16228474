"""Hands for processes without an agent: the real performer, method and neighbours, over a model of helper and driver.

Their calls are in flight in the model helper. Each effect is a task on a loop that halts in between, so a daemon may be
killed between any two calls of the driver.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from hegmd.migration.carriers.driver import DriverCarrier
from hegmd.migration.contracts import Carrier, Method
from hegmd.migration.machine.effects import FINISH
from hegmd.migration.machine.next_effects import TERMINAL
from hegmd.migration.machine.operation import Operation
from hegmd.migration.methods.driver import DriverMethod
from hegmd.migration.methods.driver_calls import Steps
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.other_processes import OtherProcesses, ProcessKey
from hegmd.migration.run.executor import EffectExecutor
from hegmd.protocol.snapshots import Gpu, GpuProcess, GpuUse, Vendor
from hegmd.workers.workers import Workers
from tests.simulation.hands import NodeActions, Running
from tests.simulation.loop import StillLoop
from tests.simulation.model_helper import ModelHelper, ModelMemory
from tests.simulation.node import Node, Process

if TYPE_CHECKING:
    from hegmd.migration.machine.events import Event

START_TICKS = 7


class ModelOtherProcesses(OtherProcesses):
    """Records on disk are in the node, and exist as soon as they are written."""

    def __init__(self, helper: ModelHelper, node: Node) -> None:
        super().__init__(
            helper,
            Path("/model"),
            start_ticks=lambda pid: None if node.find(pid) is None else START_TICKS,
            is_stopped=lambda pid: (found := node.find(pid)) is not None and found.stopped,
        )
        self._node = node

    async def _note(self, whom: dict[ProcessKey, ProcessKey | None]) -> bool:
        self._noted = whom
        self._node.noted = dict(whom)
        return True

    def _noted_before(self) -> Mapping[ProcessKey, ProcessKey | None]:
        return dict(self._node.noted)


@dataclass(frozen=True)
class NvmlReading:
    """NVML's readings of one moment."""

    gpus: Sequence[Gpu]
    processes: Sequence[GpuProcess]
    vendors: Sequence[Vendor]


@dataclass(frozen=True)
class RealParts:
    """The real parts; a mutant has one of them with a bug in it."""

    method: type[DriverMethod] = DriverMethod
    steps: type[Steps] = Steps
    other_processes: type[ModelOtherProcesses] = ModelOtherProcesses
    gpus: type[Gpus] = Gpus
    memory: type[ModelMemory] = ModelMemory
    performer: type[EffectExecutor] = EffectExecutor


@dataclass
class DriverNodeActions(NodeActions):
    """One generation of the real parts after the other: they end with their daemon."""

    means: RealParts = field(default_factory=RealParts)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.rise()

    # ---- generations -------------------------------------------------------------------------------------------------

    def rise(self) -> None:
        daemon = self.daemon
        self._loop = StillLoop(lambda: daemon.now)
        self._endings: list[tuple[Running, Event | None]] = []
        self._scopes: dict[int, anyio.CancelScope] = {}
        self.helper = ModelHelper(daemon, self.random)
        other_processes = self.means.other_processes(self.helper, daemon.node)
        memory, gpus = self.means.memory(self.helper, daemon), self.means.gpus(self._look)
        steps = self.means.steps(self.helper, gpus, other_processes)
        method = self.means.method(steps, memory, gpus, other_processes)
        methods: Mapping[str, Method] = {method.name: method}
        carriers: Mapping[str, Carrier] = {DriverCarrier.name: DriverCarrier()}
        self._performer = self.means.performer(Workers(), methods, carriers, start_ticks=self._start_ticks)
        self._loop.begin(other_processes.run())
        self._loop.settle()

    def fall(self) -> None:
        """The daemon is killed: calls in flight may have been done, and nothing cleans up."""
        self.helper.lose("ends with hegmd")
        self.helper.dead = True
        self._loop.end()

    def close(self) -> None:
        self.helper.dead = True
        self._loop.end()

    def calm_down(self) -> None:
        if any(call.hangs for call in self.helper.calls):
            self.helper.lose("is given up")
            self._settle()

    @property
    def is_idle(self) -> bool:
        return not self.helper.calls and not self.daemon.node.noted

    def _start_ticks(self, pid: int) -> int | None:
        return None if self.daemon.node.find(pid) is None else START_TICKS

    async def _look(self) -> NvmlReading:
        node = self.daemon.node
        blind = self.daemon.luck("blind")
        everybody = [process for process in (*node.processes.values(), *node.strangers.values()) if process.alive]
        return NvmlReading(
            gpus=[
                Gpu(id=gpu, index=index, uuid=gpu, vendor="nvidia", memory_free_bytes=node.free(gpu))
                for index, gpu in enumerate(node.capacity)
            ],
            processes=[_shown(process) for process in everybody if process.gpu is not None],
            vendors=[Vendor(vendor="nvidia", state="stale" if blind else "ok")],
        )

    # ---- effects -----------------------------------------------------------------------------------------------------

    def perform(self, running: Running) -> None:
        """Begin it, if nothing has to be over first; else a call ends."""
        daemon = self.daemon
        own = (r for r in daemon.running if r.op_id == running.op_id and r.effect.worker == running.effect.worker)
        running = next((r for r in own if not r.begun), running)
        if running.begun or self._is_held_up(running):
            self.go_on()
            return
        daemon.must_be_durable(running)
        running.begun = True
        self._loop.begin(self._perform(running, daemon.ops[running.op_id]))
        self._settle()

    def go_on(self) -> None:
        """Calls in flight may end now."""
        strangers = self.daemon.node.strangers.values()
        ending = [stranger.ending for stranger in strangers if stranger.ending is not None]
        if ending and self.random.random() < 0.2:
            self.random.choice(ending)()
        for gpu in list(self.daemon.node.changing):
            if self.daemon.luck("snatch") and (quick := self.daemon.node.snatch(gpu)) is not None:
                self.daemon.tell(f"{quick.name} has been quicker on {gpu}")
        self.helper.go_on()
        self._settle()

    def _settle(self) -> None:
        self._loop.settle()
        endings, self._endings = self._endings, []
        for running, event in endings:
            if event is not None and getattr(event, "code", "") == "internal":
                raise AssertionError(f"a part broke, or a mutant does not fit it any more: {event}")
            self.daemon.finish(running, event)

    async def _perform(self, running: Running, op: Operation) -> None:
        ending: Event | None = None
        with anyio.CancelScope() as scope:
            self._scopes[id(running)] = scope
            ending = await self._performer.perform(op, running.effect, lambda _: None, None)
        del self._scopes[id(running)]
        self._endings.append((running, ending))

    def _is_held_up(self, running: Running) -> bool:
        """As in running.py: room is taken and given one after the other; a new order waits for one that was dropped."""
        later = running.effect
        for other in self.daemon.running:
            own = other.effect
            if other.op_id != running.op_id or own.worker != later.worker or own.number >= later.number:
                continue
            scope = self._scopes.get(id(other))
            dropped = scope is not None and scope.cancel_called
            same_room = not (own.in_worker or later.in_worker) and own.gpu == later.gpu
            if same_room or (own.in_worker and later.in_worker and dropped):
                return True
        return False

    def drop_what_is_not_awaited(self, op: Operation) -> None:
        awaited = {pending.number for pending in op.pending}
        for running in list(self.daemon.running):
            effect = running.effect
            may_be_cut = effect.on_cancel != FINISH or op.phase in TERMINAL
            if running.op_id != op.id or effect.number in awaited or not may_be_cut:
                continue
            if (scope := self._scopes.get(id(running))) is not None:
                self._loop.call_soon(scope.cancel)
            elif not running.begun:
                self.daemon.running.remove(running)
        self._settle()


def _shown(process: Process) -> GpuProcess:
    use = GpuUse(gpu=str(process.gpu), vram_bytes=process.size_bytes)
    return GpuProcess(pid=process.pid, start_ticks=START_TICKS, gpus=(use,))
