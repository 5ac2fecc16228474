"""A training that is written into images and brought back: its processes, with any parent, and its output.

Its output is a file, because the reader of a pipe is gone after a restore. It goes slowly while a file says so, so
that a command finds it in the middle, however slow the machine is, and then at its full speed to its end.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any

from typing_extensions import Self

from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import end_all, population_of
from hegmd.node.processes.process_tree import read_tree
from tests.e2e.daemon import RunningDaemon
from tests.e2e.forked import not_forked, started
from tests.e2e.moved_job import BARE, environment
from tests.e2e.real_criu import criu_or_skip
from tests.e2e.references import output_of
from tests.patience import HANG_S

SCRIPT = Path(__file__).with_name("training") / "handed.py"
STEPS = 400
ENDS_WITHIN_S = HANG_S


def daemon_with_criu(folder: Path, *arguments: str, **environ: str) -> RunningDaemon:
    """Start a daemon with the CRIU of these tests; skip the test if there is none."""
    return daemon_by(criu_or_skip(), folder, *arguments, **environ)


def daemon_by(criu: Criu, folder: Path, *arguments: str, **environ: str) -> RunningDaemon:
    """A daemon with that CRIU."""
    config = folder / "hegmd.toml"
    locks = folder / "locks"
    locks.mkdir(mode=0o755, exist_ok=True)
    config.write_text(f'[images]\ncriu = "{criu.path}"\nlock_dir = "{locks}"\n')
    return RunningDaemon(folder, "--config", str(config), *arguments, environ=environ)


def as_user(uid: int) -> list[str]:
    """Return the prefix of a command that runs as that user and group; it becomes the command."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]


def losses_alone(folder: Path, *, workers: int = 0, steps: int = STEPS) -> list[str]:
    """The output of the undisturbed script."""
    folder.mkdir()
    more = {"LOADER_WORKERS": str(workers)} if workers else {}
    output_of([str(SCRIPT), str(folder), str(steps)], {**environment(None), **more})
    return (folder / "losses").read_text().splitlines()


class ImageJob:
    """The script under `hegmctl run`. The context ends it, in whatever state it is."""

    # How many processes it has while it trains.
    size = 1

    def __init__(
        self,
        folder: Path,
        socket_path: Path | None,
        *,
        workers: int = 0,
        options: Sequence[str] = (),
        steps: int = STEPS,
        uid: int | None = None,
        piped: bool = False,
        script: Sequence[str] = (),
        bare: bool = True,
        forks: bool = True,
    ) -> None:
        """`uid`: whose it is; else it belongs to the user who runs the test. `piped`: it says what it says into a pipe.
        `script`: another one than that of these tests, with its arguments. `bare`: without PyTorch's compiler. `forks`:
        forked from the Python with PyTorch and its compiler, where tests have one. Else its parent is the process of
        the test, and /proc has its environment."""
        self.folder = folder
        self.folder.mkdir(exist_ok=True)
        if uid is not None:
            os.chown(self.folder, uid, uid)
        self.environ = {**environment(socket_path), **(BARE if bare else {})}
        if workers:
            self.environ["LOADER_WORKERS"] = str(workers)
        words = [sys.executable, *(script or (str(SCRIPT), str(folder), str(steps)))]
        if socket_path is not None:
            (folder / "slow").touch()
            words = [sys.executable, "-m", "hegmctl", "run", "--gpu", "gpu0", *options, "--", *words]
        if uid is not None:
            words = [*as_user(uid), *words]
        with (folder / "errors").open("a") as errors:
            if uid is not None:
                os.fchown(errors.fileno(), uid, uid)
            start = started if forks else not_forked
            self.process = start(words, env=self.environ, stdout=subprocess.PIPE if piped else errors, stderr=errors)
        self.pid = self.process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with suppress(ProcessLookupError):
            end_all(population_of(read_tree(self.pid).pids))
        self.process.wait(ENDS_WITHIN_S)
        if self.process.stdout is not None:
            self.process.stdout.close()

    @property
    def workers(self) -> list[int]:
        """The pids of the processes that train."""
        return [self.pid]

    @property
    def losses(self) -> list[str]:
        """Its output so far."""
        try:
            return (self.folder / "losses").read_text().splitlines()
        except FileNotFoundError:
            return []

    def await_steps(self, count: int) -> None:
        """Until it has made so many; no event reports the growth of a file, so this polls."""
        until = monotonic() + ENDS_WITHIN_S
        while len(self.losses) < count:
            assert monotonic() < until, (self.folder / "errors").read_text()
            self._pause()

    def output(self) -> list[str]:
        """Its whole output, once it has ended, with any parent."""
        (self.folder / "slow").unlink(missing_ok=True)
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return self.losses
        try:
            assert select.select([pidfd], [], [], ENDS_WITHIN_S)[0], "it does not end"
        finally:
            os.close(pidfd)
        return self.losses

    def await_image_begun(self, image: Path) -> None:
        """Until something of an image is there, under the name that it has while it is written."""
        until = monotonic() + ENDS_WITHIN_S
        while not image.exists() and not list(image.parent.glob(f".{image.name}.hegm-new-*")):
            assert monotonic() < until, "no image is begun"
            self._pause()

    def await_revived(self) -> None:
        """Until its process is there again with its own memory."""
        until = monotonic() + ENDS_WITHIN_S
        while not self._is_revived():
            assert monotonic() < until, "it does not come back"
            select.select([], [], [], 0.002)

    def _is_revived(self) -> bool:
        with suppress(OSError):
            return b"HEGM_RUN=" in Path(f"/proc/{self.pid}/environ").read_bytes()
        return False

    def _pause(self) -> None:
        """A moment before the next look, or until it ends."""
        pidfd = os.pidfd_open(self.pid)
        try:
            assert not select.select([pidfd], [], [], 0.002)[0], (self.folder / "errors").read_text()
        finally:
            os.close(pidfd)

    def command(self, *words: str, status: int | None = 0) -> dict[str, Any]:
        """Return the command's last reply."""
        ran = subprocess.run(
            [sys.executable, "-m", "hegmctl", *words, "--json"],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=ENDS_WITHIN_S,
            check=False,
        )
        assert status is None or ran.returncode == status, f"{ran.returncode}: {ran.stdout}{ran.stderr}"
        answer: dict[str, Any] = json.loads((ran.stdout or ran.stderr).splitlines()[-1])
        return answer

    def operation(self, *words: str, status: int | None = 0) -> dict[str, Any]:
        """How the operation of a command ended."""
        ended: dict[str, Any] = self.command(*words, status=status)["operation"]
        return ended
