"""A real hegmd as a child process, ready when it says so, and gone with its context."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import psutil
from typing_extensions import Self

from tests.e2e.forked import PreloadedPython, forks_daemon, hegmd_python, started_daemon
from tests.patience import HANG_S

READY_WITHIN_S = HANG_S


class RunningDaemon:
    """Starts `hegmd` on a socket of its own; it says itself when it is ready, by the service manager's protocol."""

    # Whether it may be forked from a Python that has imported hegmd.
    forks = True

    def __init__(
        self, folder: Path, *arguments: str, environ: dict[str, str] | None = None, simulate: bool = True
    ) -> None:
        self.folder = folder
        self.socket_path = folder / "hegmd.sock"
        self._arguments = arguments
        self._simulate = simulate and "--simulate" not in arguments
        self._environ = environ or {}
        self._was_started = False
        self._python: PreloadedPython | None = None
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the daemon

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()
        if error is not None:  # pytest shows it with the failure
            sys.stderr.write(self.log_text())
        self.log.close()
        if self._python is not None:
            self._python.close()
        self._give_back_memory()

    def _give_back_memory(self) -> None:
        """Free the memory of suspended jobs, which outlives its daemon on purpose: no next daemon on this state
        directory will find it.
        """
        with contextlib.suppress(FileNotFoundError):
            identity = (self.folder / "state" / "identity").read_text()[:16]
            shutil.rmtree(f"/dev/shm/hegmd-{os.geteuid()}-{identity}")

    def command(self) -> list[str]:
        """Return the daemon's command; with two simulated GPUs of 8 GiB by default."""
        gpus = ("--simulate", "2x8GiB") if self._simulate else ()
        paths = ("--socket", str(self.socket_path), "--state-dir", str(self.folder / "state"))
        return [sys.executable, "-m", "hegmd", *paths, *gpus, *self._arguments]

    def start(self) -> None:
        """Start it and wait until it serves. Raises RuntimeError with its log when it ends instead."""
        address = self.folder / "notify.sock"
        with contextlib.suppress(FileNotFoundError):
            address.unlink()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(address))
        environ = {**os.environ, **self._environ, "NOTIFY_SOCKET": str(address)}
        if self._was_started and self._python is None and self.forks and not forks_daemon(environ):
            self._python = hegmd_python(environ)  # which takes as long as one start, and there may be twenty
        self._was_started = True
        python = self._python
        self.process = started_daemon(self.command(), env=environ, stderr=self.log, forks=self.forks, python=python)
        watch = os.pidfd_open(self.process.pid)
        try:
            self._await_ready(self._notify, watch)
        except BaseException:
            self.stop()
            raise
        finally:
            os.close(watch)

    def _await_ready(self, notify: socket.socket, watch: int) -> None:
        poll = select.poll()
        poll.register(notify, select.POLLIN)
        poll.register(watch, select.POLLIN)
        while True:
            ready = dict(poll.poll(READY_WITHIN_S * 1000))
            if notify.fileno() in ready and b"READY=1" in notify.recv(4096):
                return
            if not ready or watch in ready:
                raise RuntimeError(f"hegmd did not come up: {self.log_text()}")

    def read_notices(self) -> None:
        """Read the notifications since the last call, as a service manager does: the queue holds few datagrams."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._notify.recv(4096, socket.MSG_DONTWAIT)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End the daemon, by SIGTERM unless asked otherwise; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(HANG_S)
        finally:
            self._notify.close()

    def log_text(self) -> str:
        """Return what it has logged so far."""
        self.log.seek(0)
        return self.log.read()

    def configured(self, text: str) -> Self:
        """The same with that in its configuration file."""
        path = self.folder / "hegmd.toml"
        path.write_text(text)
        self._arguments = (*self._arguments, "--config", str(path))
        return self

    def open_fds(self) -> int:
        return psutil.Process(self.process.pid).num_fds()

    def resident_bytes(self) -> int:
        return psutil.Process(self.process.pid).memory_info().rss
