"""Kills while a job of two ranks is moved, one after the other, beside another job; and what has to be true after each.

After each kill the operation ends or waits within its limits, in a state that its cell allows. A job that can train on
does so; one whose rank or launcher was killed ends or is ended here, and nothing of it remains. The other job
never notices. After each kill all ranks have the losses of an undisturbed run, as far as they came.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from hegmd.errors import HegmError
from hegmd.migration.run.task import AT_REST
from hegmd.protocol.operations import Operation
from tests.chaos.campaign import HALT_LIMIT_S, Say, Tally
from tests.chaos.cells import DAEMON
from tests.chaos.halts import BEGUN, Trap
from tests.chaos.jobs import WITH_TORCH, Job
from tests.chaos.node import REST_LIMIT_S, Client, Node
from tests.chaos.rank_cells import EXCHANGE, LAUNCHER, PART, RANK, RESUME, STUCK, SUSPEND, SWAP, RankCell
from tests.chaos.ranked_job import RankedJob, Undisturbed
from tests.looks import pause

#: A rank that is stopped is waited for no longer than this.
STUCK_LIMIT_S = "3"


@dataclass(slots=True)
class RankTally(Tally):
    """The same of ranks."""

    ended_jobs: int = 0


class RankCampaign:
    """Plays cells with one job of two ranks at a time, beside a training of one process."""

    def __init__(self, node: Node, *, say: Say) -> None:
        self._node = node
        self._say = say
        self._job: RankedJob | None = None
        self._undisturbed = Undisturbed()
        self.tally = RankTally()

    def run(self, cells: Iterable[RankCell]) -> RankTally:
        """Run the whole campaign, from the start of the other job to the last comparison."""
        node = self._node
        with Job(WITH_TORCH, 100, "gpu1", node.daemon.socket_path) as other:
            node.await_jobs([other.pid], agents=[other.pid])
            try:
                for cell in cells:
                    self._play(cell, other)
                self._end_job()
            finally:
                if self._job is not None:
                    self._job.__exit__(None, None, None)
            node.await_video_memory_of([other.pid])
            self.tally.steps += other.end()
        self._see_that_nothing_is_held()
        return self.tally

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _play(self, cell: RankCell, other: Job) -> None:
        began = monotonic()
        job = self._job_that_trains()
        pids = [*job.pids, other.pid]
        self._node.await_jobs(pids, agents=pids)  # the daemon may have been started again for the cell before
        words = self._words(cell, job, other)
        self._node.halts.set(Trap(job.pids[0], cell.state, cell.moment))
        with self._node.client(words) as client:
            op_id = self._halted(cell, client, job)
            self._strike(cell, client, job)
            if cell.victim == STUCK:
                self._continue_stuck(cell, op_id, job)
            op = self._node.rest()[op_id]
        assert op.phase in cell.ends, f"{cell}: operation {op_id} ended {op.phase}\n{self._node.story(op_id)}"
        if cell.command == SWAP and op.phase == "done" and cell.victim != DAEMON:
            self._await_second_step(other, op)
        if cell.ends_the_job:
            self._see_it_end(cell, job)
        else:
            self._see_it_train(job, other)
            self._undisturbed.compare(job.losses())
        other.make_steps(2)
        self.tally.rounds += 1
        self.tally.kills[cell.victim] += 1
        self.tally.ends[f"{cell.command} {op.phase}"] += 1
        took_s = monotonic() - began
        self._say(f"{cell.victim:11} {cell.command:15} {cell.state:14} {cell.moment:11} -> {op.phase} ({took_s:.1f} s)")

    def _words(self, cell: RankCell, job: RankedJob, other: Job) -> list[str]:
        """The command, once the job is where that command begins."""
        with self._node.connection() as hegmd:
            places = job.places(hegmd)
            pid = job.pids[0]
            if cell.command == SWAP and len(set(places)) > 1:
                hegmd.migrate(pid, "gpu0,gpu0")
                places = job.places(hegmd)
            elif cell.command in (EXCHANGE, PART) and len(set(places)) == 1:
                hegmd.migrate(pid, "gpu0,gpu1")
                places = job.places(hegmd)
            if cell.command == SWAP:
                there = self._node.await_jobs([other.pid], agents=[other.pid])[other.pid]
                if there == places[0]:  # the last swap was cut after its first step
                    hegmd.migrate(other.pid, "gpu1" if there == "gpu0" else "gpu0")
            if cell.command == RESUME:
                hegmd.suspend(pid)
        limit = ["--timeout", STUCK_LIMIT_S] if cell.victim == STUCK and cell.command != SWAP else []
        return {
            EXCHANGE: ["migrate", str(pid), "--to", ",".join(reversed(places)), *limit],
            SUSPEND: ["suspend", str(pid), *limit],
            RESUME: ["resume", str(pid), "--to", ",".join(reversed(places)), *limit],
            PART: ["migrate", str(pid), "--to", f"{places[0]}={places[1]}", *limit],
            SWAP: ["swap", str(pid), str(other.pid)],
        }[cell.command]

    def _halted(self, cell: RankCell, client: Client, job: RankedJob) -> str:
        try:
            return self._node.halts.wait(HALT_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}; hegmctl said: {client.output()}; {job.errors()}") from error

    def _strike(self, cell: RankCell, client: Client, job: RankedJob) -> None:
        """Strike at the halt, or just after it, and have a daemon again."""
        halts = self._node.halts
        if cell.moment == BEGUN:
            halts.go()
        if cell.victim == RANK:
            job.signal_rank(signal.SIGKILL)
        elif cell.victim == LAUNCHER:
            job.kill_launcher()
        elif cell.victim == STUCK:
            job.signal_rank(signal.SIGSTOP)
        else:
            self._node.strike(cell.victim, client, job.pids[0])
        if cell.moment != BEGUN:
            if cell.victim == DAEMON:
                halts.forget()
            else:
                halts.go()
        self._node.heal(cell.victim, job.pids[0])

    def _continue_stuck(self, cell: RankCell, op_id: str, job: RankedJob) -> None:
        """Continue the stopped rank once the operation has given up its wait, and says what it still waits for."""
        until = monotonic() + HALT_LIMIT_S
        while True:
            with self._node.connection() as hegmd:
                op = hegmd.story(op_id).operation
            if op.phase in AT_REST:
                break
            if op.phase != cell.state and op.waits is not None:
                assert op.waits.next == f"kill -CONT {job.pids[-1]}", op.waits
                break
            assert monotonic() < until, f"{cell}: the wait does not end\n{self._node.story(op_id)}"
            pause()
        job.signal_rank(signal.SIGCONT)

    def _await_second_step(self, other: Job, first: Operation) -> None:
        """A swap runs to its end: the other job goes where the ranks were, unless there is no daemon that knows it."""
        until = monotonic() + REST_LIMIT_S
        while self._node.await_jobs([other.pid], agents=[other.pid])[other.pid] != first.processes[0].began_on:
            assert monotonic() < until, f"the other job stays where it is\n{self._node.story(first.id)}"
            pause()
        self._node.rest()

    # -- what has to be true -------------------------------------------------------------------------------------------

    def _see_it_train(self, job: RankedJob, other: Job) -> None:
        """Resume all suspended jobs, as an operator would, and wait until every rank makes steps."""
        for op in self._node.rest().values():
            if op.phase == "suspended":
                pids = [process.pid for process in op.processes]
                self._node.await_jobs(pids, agents=pids, on_gpu=False)
                self._node.rest()  # an agent that comes back is inspected first
                with self._node.connection() as hegmd:
                    resumed = hegmd.resume(pids[0]).operation
                assert resumed is not None
                assert resumed.phase == "done", self._node.story(resumed.id)
        job.await_steps(2)
        self._node.await_video_memory_of([*job.pids, other.pid])

    def _see_it_end(self, cell: RankCell, job: RankedJob) -> None:
        """Without a rank the others end by themselves. Without a launcher they train on, or are ended here."""
        if cell.victim == LAUNCHER:
            self._bring_back_without_launcher(job)
        job.await_end()
        self._leave(job)

    def _bring_back_without_launcher(self, job: RankedJob) -> None:
        """Have the ranks train to their end; or kill them, if they are held because they cannot meet again."""
        with suppress(HegmError), self._node.connection() as hegmd:
            hegmd.resume(job.pids[0])
        held = [op for op in self._node.rest().values() if op.phase == "suspended"]
        if held:
            assert all(op.failure is not None and op.failure.hint for op in held), held
            for process in job.living():
                process.kill()
        job.tell_to_end()

    # -- the job -------------------------------------------------------------------------------------------------------

    def _job_that_trains(self) -> RankedJob:
        if self._job is None:
            folder = self._node.folder / f"ranks-{self.tally.ended_jobs}"
            folder.mkdir()
            self._job = RankedJob(folder, self._node.daemon.socket_path)
            with self._node.connection() as hegmd:
                self._job.places(hegmd)
        self._job.await_steps(1)
        return self._job

    def _end_job(self) -> None:
        if self._job is not None:
            self._job.end()
            self._leave(self._job)

    def _leave(self, job: RankedJob) -> None:
        """Compare the job's output, and check that no operation holds any of it."""
        self.tally.steps += self._undisturbed.compare(job.losses())
        job.__exit__(None, None, None)
        self._job = None
        self.tally.ended_jobs += 1
        until = monotonic() + REST_LIMIT_S
        while held := [op for op in self._node.rest().values() if op.phase == "suspended"]:
            assert monotonic() < until, [self._node.story(op.id) for op in held]
            pause()

    def _see_that_nothing_is_held(self) -> None:
        self._node.await_jobs_gone()
        self._node.await_nothing_left()
