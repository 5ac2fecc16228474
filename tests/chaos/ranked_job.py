"""Two ranks of torchrun that train over gloo, and whom it hits when one of them, or their launcher, is killed.

Owns the processes and the files that they write their losses to. All such jobs compute the same, so one undisturbed run
is what each of them is compared with.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from time import monotonic
from types import TracebackType

import psutil
from typing_extensions import Self

from hegmctl.connection import Connection
from tests.chaos.jobs import PATIENCE_S
from tests.e2e.agented import SCRIPTS, undisturbed
from tests.e2e.forked import started
from tests.e2e.moved_job import BARE, environment
from tests.e2e.references import TWO_RANKS
from tests.looks import pause

SCRIPT = str(SCRIPTS / "ranks.py")
RANKS = 2


class RankedJob:
    """Both ranks with their launcher. A context manager that leaves none of them."""

    def __init__(self, folder: Path, socket_path: Path) -> None:
        self._losses = folder / "losses"
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the job
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        words = [sys.executable, "-m", "hegmctl", "run", "--gpu", "gpu0,gpu1", "--", sys.executable, *launcher]
        self.process = started(
            [*words, SCRIPT, str(self._losses)],
            env={**environment(socket_path), **BARE},
            stdout=self._errors,
            stderr=self._errors,
        )
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.living():
            process.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._errors.close()

    # -- how far it is -------------------------------------------------------------------------------------------------

    def places(self, hegmd: Connection) -> list[str]:
        """The GPU of each rank in their order, once all are on one."""
        until = monotonic() + PATIENCE_S
        while True:
            agents = [process for process in hegmd.processes().processes if process.agent and process.gpus]
            own = self._family()
            ranks = {process.agent.rank: process for process in agents if process.agent and process.pid in own}
            if ranks.keys() == set(range(RANKS)):
                self.pids = [ranks[rank].pid for rank in range(RANKS)]
                return [ranks[rank].gpus[0].gpu for rank in range(RANKS)]
            assert monotonic() < until, f"there are no {RANKS} ranks on GPUs: {agents}; {self.errors()}"
            pause()

    def _family(self) -> set[int]:
        """The pids of the ranks that were ever seen, and of what the launcher has now."""
        try:
            below = {child.pid for child in psutil.Process(self.process.pid).children()}
        except psutil.NoSuchProcess:
            below = set()
        return below | set(self.pids)

    def losses(self) -> list[list[str]]:
        """Return the whole lines that each rank has written."""
        texts = [Path(f"{self._losses}.{rank}").read_text() for rank in range(RANKS)]
        return [text[: text.rfind("\n") + 1].splitlines() for text in texts]

    def await_steps(self, count: int) -> None:
        """Wait until each rank has made so many more."""
        wanted = [len(lines) + count for lines in self.losses()]
        until = monotonic() + PATIENCE_S
        while any(len(lines) < least for lines, least in zip(self.losses(), wanted, strict=True)):
            assert monotonic() < until, f"ranks {self.pids} make no step: {self.errors()}"
            pause()

    def living(self) -> list[psutil.Process]:
        """The ranks that have not ended."""
        found: list[psutil.Process] = []
        for pid in self.pids:
            try:
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and SCRIPT in process.cmdline():
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    # -- what is done to it --------------------------------------------------------------------------------------------

    def kill_launcher(self) -> None:
        self.process.kill()
        self.process.wait()

    def signal_rank(self, number: signal.Signals) -> None:
        """Send a signal to the last rank."""
        os.kill(self.pids[-1], number)

    def await_end(self) -> None:
        """Wait until all ranks have ended, as they do without hegmd when one of them has."""
        until = monotonic() + PATIENCE_S
        while self.living():
            assert monotonic() < until, f"ranks {self.living()} do not end: {self.errors()}"
            pause()
        self.process.wait(PATIENCE_S)

    def tell_to_end(self) -> None:
        """Have all ranks end at one step, if they train."""
        Path(f"{self._losses}.stop").touch()

    def end(self) -> None:
        """Have it end, well."""
        self.tell_to_end()
        assert self.process.wait(PATIENCE_S) == 0, self.errors()

    def errors(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]


def check(made: list[list[list[str]]]) -> int:
    """See that each of these jobs has the losses of an undisturbed one, as far as it came; how many steps that were."""
    steps = max(len(lines) for job in made for lines in job)
    with tempfile.TemporaryDirectory() as folder:
        undisturbed([*TWO_RANKS, SCRIPT, f"{folder}/expected", str(steps)])
        wanted = [Path(f"{folder}/expected.{rank}").read_text().splitlines() for rank in range(RANKS)]
    for job in made:
        for rank, lines in enumerate(job):
            assert lines == wanted[rank][: len(lines)], f"rank {rank} has other losses than an undisturbed run"
    return sum(len(lines) for job in made for lines in job)
