"""Kills, one after the other, on one node whose jobs train; and the conditions that must hold after each.

After each kill every operation ends or waits in a state that its cell allows; the campaign resumes suspended jobs;
every job makes further steps; and only jobs hold video memory. At the end the output of each job equals that of an
undisturbed run bit for bit, and no memory, descriptor, process or file remains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from time import monotonic

from tests.chaos.cells import BOTH, DAEMON, DRAIN, MIGRATE, RESUME, SUSPEND, Cell
from tests.chaos.halts import BEGUN, Trap
from tests.chaos.jobs import BY_HAND, WITH_TORCH, Job, Trainee, descriptors, resident_bytes
from tests.chaos.node import REST_LIMIT_S, Client, Node
from tests.looks import pause

HALT_LIMIT_S = 120.0
#: A daemon may have grown by so much over all rounds of its life; caches and the story of each operation are in it.
GROWTH_BYTES = 24 << 20
Say = Callable[[str], object]


@dataclass(slots=True)
class Tally:
    """The counts: killed processes by victim, and how the struck operations ended."""

    rounds: int = 0
    kills: Counter[str] = field(default_factory=Counter[str])
    ends: Counter[str] = field(default_factory=Counter[str])
    steps: int = 0


def trainings(node: Node, *, with_torch: int, by_hand: int) -> list[Callable[[], Trainee]]:
    """Scripts that train on simulated GPUs, on each of the two in turn, started when they are called."""
    scripts = [WITH_TORCH] * with_torch + [BY_HAND] * by_hand
    return [
        partial(Job, script, seed=100 + index, gpu=f"gpu{index % 2}", socket_path=node.daemon.socket_path)
        for index, script in enumerate(scripts)
    ]


def _await_descriptors(job: Trainee, wanted: Counter[str]) -> None:
    """Until it has those, and no others: its agent comes back some steps after its socket was cut."""
    until = monotonic() + HALT_LIMIT_S
    while (found := job.descriptors()) != wanted:
        assert monotonic() < until, f"job {job.pid} has other descriptors than before: {found} and not {wanted}"
        job.make_steps(1)


class Campaign:
    """Plays cells, with the jobs in turn. `jobs` start them."""

    def __init__(self, node: Node, jobs: Sequence[Callable[[], Trainee]], *, say: Say) -> None:
        self._node = node
        self._say = say
        self._starts = jobs
        self._jobs: list[Trainee] = []
        self._turn = 0
        self.tally = Tally()

    def run(self, cells: Iterable[Cell]) -> Tally:
        """Run the whole campaign, from the jobs' start to the last check."""
        node = self._node
        alone = _lasting(node)
        with ExitStack() as stack:
            for start in self._starts:
                self._jobs.append(stack.enter_context(start()))
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
                _await_descriptors(job, before[job.pid])
            node.await_nothing_left()
            self.tally.steps = sum(job.end() for job in self._jobs)
        self._see_that_nothing_is_held(alone)
        return self.tally

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _play(self, cell: Cell) -> None:
        node, job = self._node, self._next(cell)
        places = self._places()
        if cell.command == RESUME:
            self._suspend(job)
        node.halts.set(Trap(job.pid, cell.state, cell.moment))
        with node.client(_words(cell.command, job.pid, places[job.pid])) as client:
            try:
                op = node.halts.wait(HALT_LIMIT_S)
            except AssertionError as error:
                raise AssertionError(f"{cell}: {error}; hegmctl said: {client.output()}") from error
            killed = self._strike(cell, client, job)
        ended = node.rest()
        node.release()
        phase = ended[op].phase
        assert phase in cell.ends, f"{cell}: operation {op} ended {phase}\n{node.story(op)}"
        self._bring_back()
        self._await_all(steps=2)
        node.await_video_memory_of(job.pid for job in self._jobs)
        self.tally.rounds += 1
        self.tally.kills[cell.victim] += killed
        self.tally.ends[f"{cell.command} {phase}"] += 1
        kind = "agent" if job.has_agent else "bare"
        self._say(f"{cell.victim:17} {kind:6}{cell.command:8} {cell.state:14} {cell.moment:11} -> {phase}")

    def _next(self, cell: Cell) -> Trainee:
        """Return the next cell that fits the jobs."""
        for turn in range(self._turn, self._turn + len(self._jobs)):
            job = self._jobs[turn % len(self._jobs)]
            if cell.fits(has_agent=job.has_agent):
                self._turn = turn + 1
                return job
        raise AssertionError(f"{cell} fits none of the jobs")

    def _strike(self, cell: Cell, client: Client, job: Trainee) -> int:
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

    def _places(self) -> dict[int, str]:
        """The GPU of each job, by pid, once all are there."""
        agents = [job.pid for job in self._jobs if job.has_agent]
        return self._node.await_jobs([job.pid for job in self._jobs], agents=agents)

    def _suspend(self, job: Trainee) -> None:
        with self._node.connection() as hegmd:
            operation = hegmd.suspend(job.pid).operation
        assert operation is not None
        assert operation.phase == "suspended", self._node.story(operation.id)

    def _bring_back(self) -> None:
        """Resume all suspended jobs, as an operator would."""
        for op in self._node.rest().values():
            assert op.phase != "lost", self._node.story(op.id)
            if op.phase == "suspended":
                pids = [process.pid for process in op.processes]
                agents = [job.pid for job in self._jobs if job.has_agent and job.pid in pids]
                self._node.await_jobs(agents, agents=agents, on_gpu=False)
                self._node.rest()  # a reconnected agent is inspected first
                with self._node.connection() as hegmd:
                    resumed = hegmd.resume(pids[0]).operation
                assert resumed is not None
                assert resumed.phase == "done", self._node.story(resumed.id)

    # -- before and after ----------------------------------------------------------------------------------------------

    def _await_all(self, steps: int) -> None:
        for job in self._jobs:
            job.make_steps(steps)

    def _warm_up(self) -> None:
        """Each job out and back once, so that what is loaded on first use is there before anything is counted."""
        self._places()
        for job in self._jobs:
            self._suspend(job)
        self._bring_back()
        self._await_all(steps=1)

    def _see_that_nothing_is_held(self, alone: set[str]) -> None:
        """The daemon is as it was before there was any job."""
        node = self._node
        node.await_jobs_gone()
        node.daemon.stop()
        node.daemon.start()
        node.await_nothing_left()
        until = monotonic() + REST_LIMIT_S
        while (found := _lasting(node)) != alone:
            assert monotonic() < until, (found, alone)
            pause()


def _lasting(node: Node) -> set[str]:
    """Return the daemon's open descriptors by kind, without those of reads in progress."""
    return {kind for kind in descriptors(node.daemon.process.pid) if not kind.startswith("/proc")}


def _words(command: str, pid: int, gpu: str) -> list[str]:
    other = "gpu1" if gpu == "gpu0" else "gpu0"
    return {
        MIGRATE: ["migrate", str(pid), "--to", other],
        SUSPEND: ["suspend", str(pid)],
        RESUME: ["resume", str(pid), "--to", other],
        DRAIN: ["drain", gpu],
    }[command]
