"""Kills while a job goes into images and comes out of them, one after the other; and what has to be true after each.

After each kill the operation ends or waits in a state that its cell allows. There is a whole image, which is verified,
or none; the job trains unless such an image has it, and there are never two of it. From every whole image it is brought
back. Nothing is left but the image: no memory, no file, no process. What the job has written is in the end what an
undisturbed run writes, bit for bit, each line once.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from hegmd.node.processes.process_set import ProcessSet, end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from hegmd.protocol.operations import Operation
from tests.chaos.campaign import HALT_LIMIT_S, Say, Tally
from tests.chaos.cells import DAEMON
from tests.chaos.halts import BEGUN, Trap
from tests.chaos.image_cells import AT_CRIU, CHECKPOINT, LEFT, READING, RESTORE, REVIVED, WORKER, ImageCell
from tests.chaos.image_node import ImageNode
from tests.chaos.node import OVER, REST_LIMIT_S, Client, mentioning
from tests.e2e.handed_job import ENDS_WITHIN_S, ImageJob
from tests.e2e.moved_job import environment
from tests.looks import pause

#: More than any campaign takes; its schedule goes by it, so it is one number for all.
STEPS = 1_000_000


@dataclass(slots=True)
class ImageTally(Tally):
    """The same of images."""

    whole: int = 0
    restored: int = 0
    ended_jobs: int = 0


class ImageCampaign:
    """Plays cells with one training at a time, on one node."""

    def __init__(self, node: ImageNode, *, say: Say) -> None:
        self._node = node
        self._say = say
        self._image = node.images / "image"
        self._jobs = 0
        self._job: ImageJob | None = None
        self._tree = ProcessSet({})
        self._said: list[list[str]] = []
        self.tally = ImageTally()

    def run(self, cells: Iterable[ImageCell]) -> ImageTally:
        """Run the whole campaign, to the last comparison."""
        try:
            for cell in cells:
                self._play(cell)
        finally:
            self._end_job()
        self._node.await_video_memory_of([])
        self._await_nothing_left(0, alive=False)
        self._compare()
        return self.tally

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _play(self, cell: ImageCell) -> None:
        began = monotonic()
        job = self._job_that_trains()
        if cell.command == RESTORE:
            self._tree = population_of(read_tree(job.pid).pids)
            self._command("checkpoint", str(job.pid), str(self._image))
            job.process.wait(ENDS_WITHIN_S)
        else:
            self._tree = population_of(read_tree(job.pid).pids)
        known = {op.id for op in self._node.rest().values()}
        with self._client(cell, job) as client:
            killed = self._strike(cell, client, job)
            if killed and cell.victim == DAEMON:
                self._node.heal(DAEMON, job.pid)
            client.process.wait(REST_LIMIT_S)
        op = self._rested(cell, job, known)
        end = "nothing" if op is None else op.phase
        try:
            end += self._see(cell, job, op)
        except AssertionError as error:
            story = "" if op is None else self._node.story(op.id)
            raise AssertionError(f"{cell}, {end}: {error}; hegmctl: {client.output_tail}\n{story}") from error
        self.tally.rounds += 1
        self.tally.kills[cell.victim] += killed
        self.tally.ends[f"{cell.command} {end}"] += 1
        took_s = monotonic() - began
        missed = "" if killed else ", was over before it was struck"
        self._say(
            f"{cell.victim:13}{cell.command:14}{cell.state:14} {cell.moment:11} -> {end}{missed} ({took_s:.1f} s)"
        )

    def _client(self, cell: ImageCell, job: ImageJob) -> _RecordedClient:
        node = self._node
        if cell.command == RESTORE:
            words = ["restore", str(self._image), "--to", f"gpu{self._jobs % 2}"]
        else:
            words = ["checkpoint", *(["--leave-running"] if cell.command == LEFT else [])]
            words += [str(job.pid), str(self._image)]
        if cell.state != READING:
            node.halts.set(Trap(job.workers[0], cell.state, cell.moment))
        node.daemon.read_notices()
        return _RecordedClient(words, node.daemon.socket_path)

    def _strike(self, cell: ImageCell, client: Client, job: ImageJob) -> int:
        node = self._node
        if cell.moment == AT_CRIU:
            return self._hit(cell, client, job) if node.await_criu(job.pid, client) else 0
        if cell.moment == REVIVED:
            job.await_revived()
            return self._hit(cell, client, job)
        try:
            node.halts.wait(HALT_LIMIT_S)
        except AssertionError as error:
            raise AssertionError(f"{cell}: {error}; hegmctl said: {client.output()}") from error
        if cell.moment == BEGUN:
            node.halts.go()
            return self._hit(cell, client, job)
        struck = self._hit(cell, client, job)
        if cell.victim == DAEMON:
            node.halts.forget()
        else:
            node.halts.go()
        return struck

    def _hit(self, cell: ImageCell, client: Client, job: ImageJob) -> int:
        """Kill the victim; how many processes that were."""
        return self._node.strike(cell.victim, client, job.pid)

    def _rested(self, cell: ImageCell, job: ImageJob, known: set[str]) -> Operation | None:
        """Return the operation of that command once it has ended or waits; None if there is none and nothing runs."""
        until = monotonic() + REST_LIMIT_S
        while True:
            new = [op for op in self._node.rest().values() if op.id not in known]
            if new and new[-1].phase in (*OVER, "suspended"):
                return new[-1]
            if not new and not self._node.under_way(job.pid):
                return None
            assert monotonic() < until, f"{cell}: {new or 'what CRIU does'} does not come to rest"
            pause()

    # -- what is to be true --------------------------------------------------------------------------------------------

    def _see(self, cell: ImageCell, job: ImageJob, op: Operation | None) -> str:
        """See that it is, and have the job train again; other facts about its end."""
        assert op is None or op.phase in cell.ends, f"it ended {op.phase}"
        assert op is not None or cell.state in (READING, "planned"), "there is no operation"
        if op is not None and op.phase == "suspended":
            self._command("resume", str(job.pid))
        whole, alive = self._is_whole(), self._is_alive(job)
        assert len(list(mentioning(job.folder))) == alive * job.size, (
            "there are two of the job, or something is left of it"
        )
        self.tally.whole += whole
        if cell.command != RESTORE:
            # The lost job is one that was killed while the rest of its image was written.
            ends_whole = {"done", "lost"} if (cell.command, cell.victim) == (LEFT, WORKER) else {"done"}
            assert not whole or (op is not None and op.phase in ends_whole), f"{whole=}"
            assert whole or op is None or op.phase != "done", "there is no image"
            self._see_who_lives(cell, alive=alive, whole=whole)
        else:
            assert whole, "a restore has changed its image"
        if not alive:
            self._await_gone()
        if not alive and not whole:
            return self._lose(job)
        return self._go_on(cell, job, alive=alive)

    def _see_who_lives(self, cell: ImageCell, *, alive: bool, whole: bool) -> None:
        if cell.command == CHECKPOINT and whole:
            assert not alive, "the job is in an image, and lives"
        elif not cell.may_end_the_job:
            assert alive, "the job has ended, and was not to"

    def _go_on(self, cell: ImageCell, job: ImageJob, *, alive: bool) -> str:
        """Bring it back from the image where there is one, and see it train."""
        message = ""
        if self._image.is_dir() and (cell.command == LEFT or not alive):
            if alive:
                end_all(population_of(read_tree(job.pid).pids))
            job.process.wait(ENDS_WITHIN_S)
            self._await_gone()
            self._command("restore", str(self._image), "--truncate-outputs")
            self.tally.restored += 1
            message = ", restored"
        job.await_steps(len(job.losses) + 2)
        self._node.await_video_memory_of(job.workers)
        if self._image.is_dir():
            shutil.rmtree(self._image)
        self._await_nothing_left(job.pid, alive=True)
        return message

    def _lose(self, job: ImageJob) -> str:
        """It was killed itself before there was an image: that is so with any program."""
        self.tally.ended_jobs += 1
        self._end_job()
        self._await_nothing_left(job.pid, alive=False)
        return ", job killed"

    def _is_whole(self) -> bool:
        """Whether there is an image; an existing one has to be valid to the last byte."""
        if not self._image.exists():
            return False
        self._command("images", "verify", str(self._image))
        return True

    def _is_alive(self, job: ImageJob) -> bool:
        return job.pid in population_of([job.pid]).start_ticks

    def _await_gone(self) -> None:
        """Wait for the children too: no process would ever resume a stopped one."""
        until = monotonic() + REST_LIMIT_S
        while left := [pid for pid, ticks in self._now().items() if ticks == self._tree.start_ticks[pid]]:
            assert monotonic() < until, f"of the job, processes {left} do not end"
            pause()

    def _now(self) -> Mapping[int, int]:
        return population_of(self._tree.start_ticks).start_ticks

    def _await_nothing_left(self, root: int, *, alive: bool) -> None:
        until = monotonic() + REST_LIMIT_S
        while left := self._node.left_of(root, alive=alive):
            assert monotonic() < until, f"there is still {left}"
            pause()

    # -- the job -------------------------------------------------------------------------------------------------------

    def _job_that_trains(self) -> ImageJob:
        if self._job is None:
            self._jobs += 1
            folder = self._node.folder / f"job-{self._jobs}"
            self._job = self._start(folder, self._node.daemon.socket_path)
        job = self._job
        job.await_steps(len(job.losses) + 2)
        self._node.await_jobs(job.workers, agents=job.workers)
        return job

    def _start(self, folder: Path, socket_path: Path | None) -> ImageJob:
        """Start a job of this campaign's kind. Without a socket it runs without hegmd, undisturbed."""
        return ImageJob(folder, socket_path, steps=STEPS, forks=False)

    def _end_job(self) -> None:
        job, self._job = self._job, None
        if job is not None:
            with ExitStack() as ended:
                ended.push(job)
            self._said.append(job.losses[:-1])  # it may have been killed in the middle of a line
            self.tally.steps += len(self._said[-1])

    def _compare(self) -> None:
        """Each job with as much of an undisturbed run."""
        longest = max(map(len, self._said), default=0)
        with self._start(self._node.folder / "alone", None) as alone:
            alone.await_steps(longest + 1)
            wanted = alone.losses
        for number, printed in enumerate(self._said, 1):
            other = next((at for at, line in enumerate(printed) if line != wanted[at]), None)
            assert other is None, f"line {other} of job {number} is {printed[other or 0]}, not {wanted[other or 0]}"

    def _command(self, *words: str) -> dict[str, Any]:
        """Return the reply to a command, run as a person would. Raises AssertionError when it fails."""
        self._node.daemon.read_notices()
        ran = subprocess.run(
            [sys.executable, "-m", "hegmctl", *words, "--json"],
            env=environment(self._node.daemon.socket_path),
            capture_output=True,
            text=True,
            timeout=REST_LIMIT_S,
            check=False,
        )
        assert ran.returncode == 0, f"hegmctl {' '.join(words)}: {ran.stdout[-1500:]}{ran.stderr}"
        answer: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
        return answer


class _RecordedClient(Client):
    """A client whose output is kept after it is closed."""

    output_tail = ""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.output_tail = self.output()[-1500:]
        super().__exit__(kind, error, tb)
