"""Two ranks of torchrun that train over gloo, and whom it hits when one of them, or their launcher, is killed.

Owns the processes and the files that they write their losses to. All such jobs compute the same, so one undisturbed run
is what each of them is compared with, once it has ended or after any kill: `Undisturbed`.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType

import psutil
from typing_extensions import Self

from hegmctl.connection import Connection
from tests.chaos.jobs import PATIENCE_S
from tests.chaos.node import mentioning
from tests.e2e.agented import SCRIPTS, undisturbed
from tests.e2e.forked import TORCHRUN, started
from tests.e2e.handed_job import ImageJob
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
        launcher = [*TORCHRUN, str(RANKS)]
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
        return losses_of(str(self._losses))

    def await_steps(self, count: int) -> None:
        """Wait until each rank has made so many more."""
        wanted = [len(lines) + count for lines in self.losses()]
        until = monotonic() + PATIENCE_S
        while any(len(lines) < least for lines, least in zip(self.losses(), wanted, strict=True)):
            assert monotonic() < until, f"ranks {self.pids} make no step: {self.errors()}"
            pause()

    def living(self) -> list[psutil.Process]:
        """The ranks that have not ended."""
        return living(self.pids, SCRIPT)

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


class Undisturbed:
    """The losses of undisturbed ranks. If too few are known, it computes them again for twice the steps."""

    def __init__(self) -> None:
        self._steps = 256
        self._wanted: list[list[str]] = []

    def compare(self, losses: list[list[str]]) -> int:
        """See that each rank of a job has these, as far as it came; how many steps that were."""
        most = max(map(len, losses))
        if not self._wanted or most > self._steps:
            while self._steps < most:
                self._steps *= 2
            with tempfile.TemporaryDirectory() as folder:
                undisturbed([*TWO_RANKS, SCRIPT, f"{folder}/expected", str(self._steps)])
                self._wanted = losses_of(f"{folder}/expected")
        for rank, lines in enumerate(losses):
            assert lines == self._wanted[rank][: len(lines)], f"rank {rank} has other losses than an undisturbed run"
        return sum(map(len, losses))


def living(pids: list[int], word: str) -> list[psutil.Process]:
    """Return the running ones of these processes whose command contains that text.

    They are looked up again: of a pid that is used again, as after a restore, `psutil.process_iter` shows the former
    process once more, and then none.
    """
    found: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE and word in process.cmdline():
                found.append(process)
    return found


def losses_of(path: str) -> list[list[str]]:
    """Return the whole lines that each rank has written."""
    texts = [Path(f"{path}.{rank}").read_text() for rank in range(RANKS)]
    return [text[: text.rfind("\n") + 1].splitlines() for text in texts]


class HandedRanks(ImageJob):
    """Both ranks with their launcher, which is the root of what goes into an image."""

    size = RANKS + 1

    def __init__(self, folder: Path, socket_path: Path | None) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        super().__init__(folder, socket_path, script=[*launcher, SCRIPT, str(folder)])
        self._workers: list[int] = []

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for process in self.living():
            process.kill()
        super().__exit__(kind, error, tb)

    @property
    def workers(self) -> list[int]:
        """The pids of the ranks in their order; once both were seen, these are kept, as an image keeps them."""
        if not self._workers:
            found = {int(one.environ()["RANK"]): one.pid for one in mentioning(self.folder) if one.pid != self.pid}
            if found.keys() == set(range(RANKS)):
                self._workers = [found[rank] for rank in range(RANKS)]
        return self._workers

    def living(self) -> list[psutil.Process]:
        """The ranks that have not ended."""
        return living(self.workers, str(self.folder))

    def tell_to_end(self) -> None:
        """Have both ranks end at one step, if they train."""
        self.stop_file.touch()

    @property
    def stop_file(self) -> Path:
        return Path(f"{self.folder}.stop")

    @property
    def losses(self) -> list[str]:
        """The losses of both ranks, step by step, as far as both came."""
        with suppress(FileNotFoundError):
            return [" ".join(step) for step in zip(*losses_of(str(self.folder)), strict=False)]
        return []
