"""A training under `hegmctl run --recover` that hangs while hegmd does something else with it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from typing_extensions import Self

from hegmctl.connection import connect
from hegmd.protocol.messages import Operations, OperationsReply
from hegmd.protocol.recovery import JobRecovery
from tests.e2e.daemon import RunningDaemon
from tests.e2e.handed_job import daemon_with_criu
from tests.e2e.moved_job import BARE, SCRIPTS, SLOWLY_MS, environment
from tests.needs import need_torch

pytestmark = [pytest.mark.e2e]
need_torch()

FAILING = str(SCRIPTS / "failing.py")
# Between the dump of a job that trains on and the end of its image. Its writer has nothing to do in the first four.
AFTER_DUMP = ("restoring", "reloading", "releasing", "verifying", "sealing")


class Watched:
    """A training that is protected, and its daemon."""

    def __init__(self, daemon: RunningDaemon, folder: Path) -> None:
        self.daemon, self._folder = daemon, folder
        self.environ = {**environment(daemon.socket_path), **BARE, "STEPS": "100000", "PACE_S": "0.02"}
        run = [sys.executable, "-m", "hegmctl", "run", "--recover=0.1s", "--hang-limit", "2s", "--gpu", "gpu0"]
        words = [*run, "--no-daemon-start", "--", sys.executable, FAILING]
        out = subprocess.DEVNULL
        self.process = subprocess.Popen(words, env=self.environ, cwd=folder, stdout=out, start_new_session=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.process.kill()
        self.process.wait()
        self.signal_training(signal.SIGKILL)

    def signal_training(self, number: signal.Signals) -> None:
        """Send it to the newest process."""
        pid = int((self._folder / "starts").read_text().splitlines()[-1].split()[0])
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def recovery(self) -> JobRecovery | None:
        assert self.process.poll() is None, self.daemon.log_text()
        with connect(str(self.daemon.socket_path)) as hegmd:
            return next(iter(hegmd.recovery().jobs), None)

    def has_hung(self) -> int:
        """How often it was killed."""
        found = self.recovery()
        return 0 if found is None else len(found.recoveries)

    def is_in(self, *phases: str) -> bool:
        """Whether an operation is."""
        with connect(str(self.daemon.socket_path)) as hegmd:
            return any(op.phase in phases for op in hegmd.call(Operations(), OperationsReply).operations)

    def stop_writer(self) -> None:
        """Stop the daemon's process that writes images: it does not answer then, and hegmd gives it up later."""
        for process in psutil.Process(self.daemon.process.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "hegmd.images.files.child" in " ".join(process.cmdline()):
                    process.suspend()

    def image(self, folder: Path) -> subprocess.Popen[bytes]:
        """Have one written while it trains on."""
        words = [sys.executable, "-m", "hegmctl", "checkpoint", "j1", str(folder), "--leave-running"]
        return subprocess.Popen(words, env=self.environ, stdout=subprocess.DEVNULL)


@pytest.mark.wide
def test_a_training_that_hangs_while_its_image_is_sealed_is_recovered_before_that_has_ended(tmp_path: Path) -> None:
    """It had not been watched until the image was whole, which may take an hour."""
    folder = tmp_path / "job"
    folder.mkdir()
    number, is_found = 0, False
    with daemon_with_criu(tmp_path) as daemon, Watched(daemon, folder) as job:
        while (found := job.recovery()) is None or found.state != "protected":
            select.poll().poll(SLOWLY_MS)
        while not is_found:  # the writer may have been given up too early
            number += 1
            with job.image(tmp_path / f"image-{number}") as image:
                while image.poll() is None and not job.is_in(*AFTER_DUMP):
                    pass
                job.stop_writer()
                while job.is_in(*AFTER_DUMP[:-1]):
                    select.poll().poll(SLOWLY_MS)
                before = job.has_hung()
                job.signal_training(signal.SIGSTOP)
                while job.is_in("sealing") and not is_found:
                    is_found = job.has_hung() > before and job.is_in("sealing")
                    select.poll().poll(SLOWLY_MS)
                job.signal_training(signal.SIGCONT)
        while (found := job.recovery()) is None or all(recovery.result != "recovered" for recovery in found.recoveries):
            select.poll().poll(SLOWLY_MS)
