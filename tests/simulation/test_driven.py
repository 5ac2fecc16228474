"""Lives of processes without an agent, which only the driver has a hold on, with room that is lost at the worst time.

The trap is real in this model: who is restored where no room is held for it is lost. Room may go although it was held,
as when somebody is quicker at the one moment in which it changes hands; then the method refuses, and the machine has to
bring the process back later.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from hegmd.migration import events, machine
from hegmd.migration.events import Event
from hegmd.migration.operation import MIGRATE, SUSPEND, Operation, Worker
from tests.simulation import mutants, seeds
from tests.simulation.daemon import Daemon, Handle, Running, _perform
from tests.simulation.node import Node, Process, Violation

SEEDS = 1500
CHUNK = 150


class DrivenNode(Node):
    """Its processes stand only while they are off their GPU."""

    def checkpoint(self, name: str) -> None:
        self.processes[name].gpu = None

    def train(self, name: str) -> bool:
        return self.processes[name].gpu is not None and super().train(name)


class DrivenDaemon(Daemon):
    """There are no agents, so no connection ends; but a helper is killed while the driver's step goes on by itself."""

    def perform(self, running: Running) -> None:
        effect: Any = running.effect
        process = self.node.processes[effect.worker]
        if not process.alive and effect.in_worker:
            self._finish(running, None)
            self.post(events.WorkerGone(worker=process.name))
        elif process.under_way and effect.tag not in {"inspect", "verify"}:
            raise Violation(f"{process.name} got {effect.tag} during {process.under_way}")
        elif effect.tag == "restore" and self.luck("snatch") and process.gpu is None:
            self.node.holds[effect.gpu].pop(process.name, None)
            self.node.take_room("other0", effect.gpu, self.node.free(effect.gpu))
            self._finish(running, self._failure(effect, "no-room"))
        elif effect.tag in {"take-room", "restore"} and not self._has_room(effect):
            self._finish(running, self._failure(effect, "no-room"))
        elif effect.tag in {"checkpoint", "restore"} and self.luck("helper"):
            self._lose_helper(running, process)
        else:
            event = self._done(effect, process)
            if event is not None:
                self._finish(running, event)

    def _has_room(self, effect: Any) -> bool:
        held = self.node.holds.get(effect.gpu, {}).get(effect.worker, 0)
        if effect.tag == "restore":  # what the machine believes is held and never was, is the machine's mistake
            worker = self.op.worker(effect.worker)
            return held > 0 or worker is None or worker.rooms.get(effect.gpu, 0) == 0
        return effect.size_bytes - held <= self.node.free(effect.gpu)

    def _lose_helper(self, running: Running, process: Process) -> None:
        """The step is begun or not; where it is, the driver ends it by itself."""
        effect: Any = running.effect
        if self.random.random() < 0.5:
            if effect.tag == "restore":
                self.node.restore(process.name, effect.gpu)
            elif process.gpu is not None:
                process.under_way = "checkpoint"
        self._finish(running, self._failure(effect, "broken"))

    def _done(self, effect: Any, process: Process) -> Event | None:
        ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
        if effect.tag == "checkpoint":
            left = process.gpu
            self.node.checkpoint(process.name)
            if left is not None and self.luck("unkept"):  # somebody was quicker than the room for the way back
                self.node.holds[left].pop(process.name, None)
                return events.Checkpointed(**ends, room_bytes=0, rest_bytes=process.size_bytes)
            return events.Checkpointed(**ends, rest_bytes=process.size_bytes)
        if effect.tag == "verify":
            return events.Verified(**ends, boundary=effect.beyond) if process.gpu is not None else None
        event = _perform(self, effect, process)
        return event.replace(boundary=0) if isinstance(event, events.Inspected) else event

    def crash(self, unsynced: bytes) -> None:
        super().crash(unsynced)
        for process in self.node.processes.values():
            process.connected = process.alive

    def _leave(self, process: Process, running: Running) -> None:
        if running.effect.tag == "checkpoint" and process.gpu is not None and self.random.random() < 0.5:
            process.under_way = "checkpoint"
        elif running.effect.tag == "restore" and self._has_room(running.effect) and self.random.random() < 0.5:
            self.node.restore(process.name, running.effect.gpu)


def born(seed: int) -> DrivenDaemon:
    random = Random(seed)
    kind = random.choice((MIGRATE, MIGRATE, SUSPEND))
    processes: dict[str, Process] = {}
    workers: list[Worker] = []
    holds: dict[str, dict[str, int]] = {"gpu0": {}, "gpu1": {}}
    for index in range(random.choice((1, 1, 2))):
        name, size = f"w{index}", random.randrange(1, 20)
        processes[name] = Process(name, 100 + index, "", "gpu0", size)
        holds["gpu0"][name] = size
        workers.append(
            Worker(
                name=name,
                pid=100 + index,
                start_ticks=7,
                token="",
                method="driver",
                carrier="driver",
                origin="gpu0",
                was_on="gpu0",
                goal=None if kind == SUSPEND else "gpu1",
                at="gpu0",
                size_bytes=0,
                rest_bytes=size,
                rooms={"gpu0": size},
            )
        )
    node = DrivenNode({"gpu0": 70, "gpu1": 70}, processes, False, pool_free=80, imagined=False, holds=holds)
    op = Operation(id="op1", kind=kind, workers=tuple(workers), limits=seeds.LIMITS)
    odds = {
        "lose": 0.02,
        "double": 0.1,
        "ghost": 0.2,
        "late": 0.3,
        "crash": random.choice((0.0, 0.03)),
        "die": random.choice((0.0, 0.0, 0.004)),
        "fill": 0.02,
        "cancel": random.choice((0.0, 0.02)),
        "resume": 0.05,
        "helper": random.choice((0.0, 0.2)),
        "snatch": random.choice((0.0, 0.3)),
        "unkept": random.choice((0.0, 0.3)),
    }
    return DrivenDaemon(node, op, random, odds)


def lived(seed: int, handle: Handle = machine.handle) -> tuple[DrivenDaemon, str | None]:
    daemon = born(seed)
    daemon.handle = handle
    try:
        daemon.take(events.Begin())
        seeds._storm(daemon, daemon.random)
        for held in daemon.node.holds.values():  # by and by, others leave
            for name in [name for name in held if name.startswith("other")]:
                del held[name]
        seeds._calm(daemon, daemon.random)
        seeds._judge(daemon)
    except Violation as violation:
        return daemon, str(violation)
    return daemon, None


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_process_is_ever_restored_without_room_and_each_comes_back(first: int) -> None:
    for seed in range(first, first + CHUNK):
        daemon, violation = lived(seed)
        assert violation is None, "\n".join([f"seed {seed}", *daemon.story, str(violation), str(daemon.op)])


def test_the_lives_see_what_they_are_for() -> None:
    stories = "\n".join("\n".join(lived(seed)[0].story) for seed in range(300))
    assert "fault='no-room'" in stories
    assert "crash" in stories
    assert all(f"-> {phase}" in stories for phase in ("suspended", "undone", "done", "restoring"))


def forgets_that_the_room_is_gone(op: Operation, event: Event, now: float) -> machine.Result:
    """Room that was found missing at a restore is taken for held all the same."""
    after, wanted = machine.handle(op, event, now)
    if not isinstance(event, events.Failed) or event.fault != "no-room" or after is op:
        return after, wanted
    before = {worker.name: worker.rooms for worker in op.workers}
    return after.replace(workers=tuple([w.replace(rooms=before[w.name]) for w in after.workers])), wanted


@pytest.mark.parametrize("mutant", [mutants.believes_in_room, forgets_that_the_room_is_gone])
def test_a_bug_that_would_lose_a_job_is_found(mutant: Handle) -> None:
    assert any(lived(seed, mutant)[1] is not None for seed in range(300))
