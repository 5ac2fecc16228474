"""Kills, one after the other, on one node with jobs that train all the while; and what has to be true after each.

After each kill every operation comes to rest, in a state that its cell allows; whatever is suspended is resumed; and
every job makes further steps. At the end each job has printed what an undisturbed run prints, bit for bit, and nothing
is left of it all: no memory, descriptor, process or file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field

from tests.chaos.cells import BOTH, DAEMON, DRAIN, MIGRATE, RESUME, SUSPEND, Cell
from tests.chaos.halts import BEGUN, Trap
from tests.chaos.jobs import BY_HAND, WITH_TORCH, Job, descriptors, resident_bytes, undisturbed
from tests.chaos.node import Client, Node

HALT_LIMIT_S = 60.0
#: A daemon may have grown by so much over all rounds of its life; caches and the story of each operation are in it.
GROWTH_BYTES = 24 << 20
Say = Callable[[str], object]


@dataclass(slots=True)
class Tally:
    """What was done: processes killed, by victim, and how the operations ended that were struck."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    steps: int = 0


class Campaign:
    """Plays cells. A context manager: entering starts the jobs and waits until they train."""

    def __init__(self, node: Node, *, with_torch: int, by_hand: int, say: Say) -> None:
        self._node = node
        self._say = say
        self._scripts = [WITH_TORCH] * with_torch + [BY_HAND] * by_hand
        self._jobs: list[Job] = []
        self._turn = 0
        self.tally = Tally()

    def run(self, cells: Iterable[Cell]) -> Tally:
        """All of it, from the jobs' start to the last check."""
        node = self._node
        alone = descriptors(node.daemon.process.pid)
        with ExitStack() as stack:
            for index, script in enumerate(self._scripts):
                job = Job(script, seed=100 + index, gpu=f"gpu{index % 2}", socket_path=node.daemon.socket_path)
                self._jobs.append(stack.enter_context(job))
            self._await_all(steps=3)
            self._warm_up()
            before = {job.pid: job.descriptors() for job in self._jobs}
            pid, size_bytes = node.daemon.process.pid, resident_bytes(node.daemon.process.pid)
            for cell in cells:
                self._play(cell)
                if node.daemon.process.pid != pid:
                    pid, size_bytes = node.daemon.process.pid, resident_bytes(node.daemon.process.pid)
            assert resident_bytes(pid) - size_bytes < GROWTH_BYTES, f"hegmd has grown from {size_bytes} bytes"
            for job in self._jobs:
                assert job.descriptors() == before[job.pid], f"job {job.seed} has other descriptors than before"
            assert not node.left()
            self._end_jobs()
        self._see_that_nothing_is_held(alone)
        return self.tally

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _play(self, cell: Cell) -> None:
        node, job = self._node, self._jobs[self._turn % len(self._jobs)]
        self._turn += 1
        places = node.await_agents({one.pid for one in self._jobs}, on_gpu=True)
        if cell.command == RESUME:
            self._suspend(job)
        node.halts.set(Trap(job.pid, cell.state, cell.moment))
        with node.client(_words(cell.command, job.pid, places[job.pid])) as client:
            try:
                op = node.halts.wait(HALT_LIMIT_S)
            except AssertionError as error:
                raise AssertionError(f"{cell}: {error}; hegmctl said: {client.said()}") from error
            killed = self._strike(cell, client, job)
        ended = node.rest()
        phase = ended[op].phase
        assert phase in cell.ends, f"{cell}: operation {op} ended {phase}\n{node.story(op)}"
        self._bring_back()
        self._await_all(steps=2)
        self.tally.rounds += 1
        self.tally.kills[cell.victim] += killed
        self.tally.ends[f"{cell.command} {phase}"] += 1
        self._say(f"{cell.victim:17} {cell.command:8} {cell.state:14} {cell.moment:11} -> {phase}")

    def _strike(self, cell: Cell, client: Client, job: Job) -> int:
        """Strike at the halt, or just after it; and have a daemon and a worker again."""
        node = self._node
        if cell.moment == BEGUN:
            node.halts.go()
        struck = node.strike(cell.victim, client, job.pid)
        if cell.moment != BEGUN:
            if cell.victim in (DAEMON, BOTH):
                node.halts.forget()
            else:
                node.halts.go()
        node.heal(cell.victim, job.pid)
        return struck

    def _suspend(self, job: Job) -> None:
        with self._node.asked() as hegmd:
            operation = hegmd.suspend(job.pid).operation
        assert operation is not None
        assert operation.phase == "suspended", self._node.story(operation.id)

    def _bring_back(self) -> None:
        """Resume whatever is suspended, as its operator would."""
        for op in self._node.rest().values():
            assert op.phase != "lost", self._node.story(op.id)
            if op.phase == "suspended":
                pids = [process.pid for process in op.processes]
                self._node.await_agents(set(pids), on_gpu=False)
                self._node.rest()  # an agent that comes back is looked at first
                with self._node.asked() as hegmd:
                    resumed = hegmd.resume(pids[0]).operation
                assert resumed is not None
                assert resumed.phase == "done", self._node.story(resumed.id)

    # -- before and after ----------------------------------------------------------------------------------------------

    def _await_all(self, steps: int) -> None:
        for job in self._jobs:
            job.make_steps(steps)

    def _warm_up(self) -> None:
        """Each job out and back once, so that what is loaded on first use is there before anything is counted."""
        self._node.await_agents({job.pid for job in self._jobs}, on_gpu=True)
        for job in self._jobs:
            self._suspend(job)
        self._bring_back()
        self._await_all(steps=1)

    def _end_jobs(self) -> None:
        for job in self._jobs:
            lines = job.output()
            self.tally.steps += len(lines)
            assert lines == undisturbed(job.script, job.seed, len(lines)), f"job {job.seed} printed other numbers"

    def _see_that_nothing_is_held(self, alone: Counter[str]) -> None:
        """The daemon is as it was before there was any job."""
        node = self._node
        with node.asked() as hegmd:
            while hegmd.processes().processes:  # it sees their ends in its own time
                hegmd.ping()
            assert all(gpu.memory_used_bytes == 0 for gpu in hegmd.gpus().gpus)
            assert not hegmd.operations().strays
        node.daemon.stop()
        node.daemon.start()
        assert not node.left()
        assert descriptors(node.daemon.process.pid).keys() == alone.keys()


def _words(command: str, pid: int, gpu: str) -> list[str]:
    other = "gpu1" if gpu == "gpu0" else "gpu0"
    return {
        MIGRATE: ["migrate", str(pid), "--to", other],
        SUSPEND: ["suspend", str(pid)],
        RESUME: ["resume", str(pid), "--to", other],
        DRAIN: ["drain", gpu],
    }[command]
