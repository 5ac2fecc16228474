"""Kills during restarts, one after the other, on one node; and what has to be true after each.

After each kill the operation ends or waits in a state that its cell allows. The printed command continues from a held
state. The training continues bit for bit, by one process at a time; only a process that was killed itself ends a
job, and only as long as nothing of it was saved. At the end nothing is left of it all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from hegmctl.connection import Connection
from hegmd.errors import HegmError
from hegmd.protocol.operations import Operation
from tests.chaos.campaign import HALT_LIMIT_S, Say, Tally
from tests.chaos.cells import DAEMON
from tests.chaos.halts import BEGUN, Trap
from tests.chaos.node import OVER, REST_LIMIT_S, Client, Node
from tests.chaos.restart_cells import ENDING, ENDING_ALONE, LOADING, ON_ITS_WAY, SINCE, SUPERVISOR, WORKER, RestartCell
from tests.chaos.restarted_job import RestartedJob
from tests.looks import pause


@dataclass(slots=True)
class RestartTally(Tally):
    """The same of restarts."""

    resumed: int = 0
    ended_jobs: int = 0


class RestartCampaign:
    """Plays cells with one training at a time, which is restarted from GPU to GPU."""

    def __init__(self, node: Node, *, say: Say) -> None:
        self._node = node
        self._say = say
        self._job: RestartedJob | None = None
        self._jobs = 0
        self.tally = RestartTally()

    def run(self, cells: Iterable[RestartCell]) -> RestartTally:
        """Run the whole campaign, to the last check."""
        try:
            for cell in cells:
                self._play(cell)
            self._end_job()
        finally:
            if self._job is not None:
                self._job.__exit__(None, None, None)
        self._see_that_nothing_is_held()
        return self.tally

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _play(self, cell: RestartCell) -> None:
        job = self._job_that_trains()
        pid, gpu = self._await_restartable(job)
        other = "gpu1" if gpu == "gpu0" else "gpu0"
        began = monotonic()
        with self._node.client(["migrate", str(pid), "--via", "restart", "--to", other, "--allow-restart"]) as client:
            strike = self._strike_on_its_way if cell.moment in ON_ITS_WAY else self._strike_at_halt
            op_id, killed = strike(cell, client, job, pid)
        op = self._rested(op_id, job)
        assert op.phase in cell.ends, f"{cell}: operation {op_id} ended {op.phase}\n{self._node.story(op_id)}"
        phase = op.phase
        if phase == "suspended":
            phase = f"suspended, then {self._go_on(op, job)}"
        self.tally.rounds += 1
        self.tally.kills[cell.victim] += killed
        self.tally.ends[phase] += 1
        took_s = monotonic() - began
        self._say(f"{cell.victim:15} {cell.state:14} {cell.moment:11} -> {phase} ({took_s:.1f} s)")
        self._see_it_train_or_ended(cell, job)

    def _strike_at_halt(self, cell: RestartCell, client: Client, job: RestartedJob, pid: int) -> tuple[str, int]:
        """Strike at a record of the journal, or just after it."""
        node = self._node
        node.halts.set(Trap(pid, cell.state, cell.moment, since=SINCE.get(cell.state, "")))
        try:
            op_id = node.halts.wait(HALT_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}; hegmctl said: {client.output()}; {job.errors()}") from error
        if cell.moment == BEGUN:
            node.halts.go()
        killed = self._kill(cell.victim, client, job, pid)
        if cell.moment != BEGUN:
            if cell.victim in (DAEMON, ENDING_ALONE):
                node.halts.forget()
            else:
                node.halts.go()
        self._heal(cell, job)
        return op_id, killed

    def _strike_on_its_way(self, cell: RestartCell, client: Client, job: RestartedJob, pid: int) -> tuple[str, int]:
        """Strike while the process that was started is there."""
        job.note_starts()
        job.hold_at(cell.moment)
        job.await_held(cell.moment)
        with self._node.connection() as hegmd:
            op_id = hegmd.operations().operations[-1].id
        killed = self._kill(cell.victim, client, job, pid)
        if cell.victim == ENDING_ALONE:
            job.let_in(cell.moment)
        self._heal(cell, job)
        if cell.victim != ENDING_ALONE:
            job.let_in(cell.moment)
        return op_id, killed

    def _heal(self, cell: RestartCell, job: RestartedJob) -> None:
        """Have a daemon again; where the job is to end without one, once it has."""
        if cell.victim == ENDING_ALONE:
            job.end()
        self._node.heal(DAEMON if cell.victim == ENDING_ALONE else cell.victim, 0)

    def _kill(self, victim: str, client: Client, job: RestartedJob, pid: int) -> int:
        if victim == SUPERVISOR:
            return job.kill_supervisor()
        if victim in (WORKER, LOADING):
            return job.kill()
        if victim in (ENDING, ENDING_ALONE):
            job.tell_to_end()
            return 0 if victim == ENDING else self._node.strike(DAEMON, client, pid)
        return self._node.strike(victim, client, pid)

    def _rested(self, op_id: str, job: RestartedJob) -> Operation:
        """The operation, once it has ended or waits. If a living process has the state, wait for its report."""
        until = monotonic() + REST_LIMIT_S
        while True:
            op = self._node.rest()[op_id]
            if op.phase in OVER or (op.phase == "suspended" and job.process() is None):
                return op
            pause()
            assert monotonic() < until, f"{op_id} does not go on\n{self._node.story(op_id)}\n{job.errors()}"

    def _go_on(self, op: Operation, job: RestartedJob) -> str:
        """Continue from the held state with the printed command; how the operation ended."""
        text = "" if op.failure is None else f"{op.failure.message} {op.failure.hint}"
        job.go_on(text)
        self.tally.resumed += 1
        until = monotonic() + REST_LIMIT_S
        while True:
            op = self._node.rest()[op.id]
            if op.phase in OVER:  # any other may have been found just when it was asked to continue
                assert op.phase == "done", self._node.story(op.id)
                return op.phase
            pause()
            assert monotonic() < until, f"{op.id} does not go on\n{self._node.story(op.id)}\n{job.errors()}"

    def _see_it_train_or_ended(self, cell: RestartCell, job: RestartedJob) -> None:
        """It makes further steps; or it was killed itself before anything of it was saved.

        A killed process may be listed for a while as if it lived: on a busy node a round then waited for its next step.
        """
        pid = job.await_steps_or_end(2, may_end=cell.may_end_the_job)
        if pid is None:
            self.tally.ended_jobs += 1
        else:
            self._node.await_video_memory_of([pid])
        if job.supervisor.poll() is not None:
            self._end_job()

    # -- the job -------------------------------------------------------------------------------------------------------

    def _job_that_trains(self) -> RestartedJob:
        if self._job is None:
            self._jobs += 1
            folder: Path = self._node.folder / f"job-{self._jobs}"
            folder.mkdir()
            self._job = RestartedJob(folder, "gpu0", self._node.daemon.socket_path)
            self._job.await_steps(2)
        return self._job

    def _end_job(self) -> None:
        """Have it end, and see that what it did is what an undisturbed run does."""
        job, self._job = self._job, None
        if job is not None:
            with job:
                job.end()
                self.tally.steps += job.check()

    def _await_restartable(self, job: RestartedJob) -> tuple[int, str]:
        """The process that trains and its GPU, once a restart of it would be begun."""
        pid = job.await_steps(1)
        until = monotonic() + REST_LIMIT_S
        while True:
            gpu = self._node.await_jobs([pid], agents=[pid])[pid]
            with self._node.connection() as hegmd:
                why_not = _why_not(hegmd, pid, gpu)
            if why_not is None:
                return pid, gpu
            pause()
            assert monotonic() < until, why_not

    # -- afterwards ----------------------------------------------------------------------------------------------------

    def _see_that_nothing_is_held(self) -> None:
        node = self._node
        node.await_jobs_gone()
        with node.connection() as hegmd:
            assert {op.phase for op in hegmd.operations().operations} <= {"done", "rolled-back"}
        node.await_nothing_left()
        assert not list(node.state_dir.glob("restart-*.lock"))


def _why_not(hegmd: Connection, pid: int, gpu: str) -> str | None:
    try:
        hegmd.migrate(pid, "gpu1" if gpu == "gpu0" else "gpu0", via="restart", dry_run=True)
    except HegmError as error:
        return f"{error.message}; {error.hint}"
    return None
