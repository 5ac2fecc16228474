"""A private node to kill things on: a daemon that can be halted, its keeper, its clients, and what is left of them.

Owns the processes and knows where each victim is found. Asks nothing of jobs. Its GPUs are simulated; `gpu_node` has
one with a driver.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from time import monotonic
from types import TracebackType

import psutil
from typing_extensions import Self

from hegmctl.connection import Connection, connect
from hegmd.errors import HegmError
from hegmd.protocol.messages import Story, StoryReply
from hegmd.protocol.operations import Operation
from tests.chaos import faults
from tests.chaos.cells import BOTH, CLIENT, CUT, DAEMON, HALF, KEEPER, SPOILT, STOPPED
from tests.chaos.halts import Halts
from tests.e2e.daemon import RunningDaemon
from tests.e2e.moved_job import environment
from tests.looks import pause, still_there
from tests.stubs.build import build_stub

REST_LIMIT_S = 120.0
SHARED_MEMORY = Path("/dev/shm")
OVER = frozenset({"done", "rolled-back", "lost"})
_NAMELESS = '[pool]\nmemory = "nameless"\n'
_UNDER_SYSTEMD = "INVOCATION_ID"
_TO_THE_SOCKET = {CUT: faults.cut, HALF: faults.cut_within_a_frame, SPOILT: faults.spoil}


class Client:
    """One `hegmctl` with a command, as an operator would run it."""

    def __init__(self, words: list[str], socket_path: Path) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the client
        self.process = subprocess.Popen(
            [sys.executable, "-m", "hegmctl", *words, "--json"],
            env=environment(socket_path),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )

    def output(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None and kind is not None:
            self.process.kill()
        self.process.wait(REST_LIMIT_S)
        self._log.close()


class Node:
    """The daemon and what belongs to it; a context manager that leaves nothing."""

    def __init__(
        self,
        folder: Path,
        *,
        nameless: bool,
        environ: Mapping[str, str] | None = None,
        simulate: bool = True,
        settings: str = "",
    ) -> None:
        """With `nameless` memory a keeper has the bytes in flight; else they are files, where memory can be one.
        `settings` are further ones of the daemon's."""
        self.folder = folder
        self.state_dir = folder / "state"
        self.halts = Halts(folder / "halt.sock")
        arguments: list[str] = []
        if nameless or settings:
            (folder / "hegmd.toml").write_text((_NAMELESS if nameless else "") + settings)
            arguments = ["--config", str(folder / "hegmd.toml")]
        halted = {"LD_PRELOAD": str(build_stub("halt", folder)), "HEGM_TEST_HALT": str(self.halts.path)}
        alone = {_UNDER_SYSTEMD: ""} if _UNDER_SYSTEMD in os.environ else {}
        around = {**(environ or {}), **halted, **alone}
        self.daemon = RunningDaemon(folder, *arguments, environ=around, simulate=simulate)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.halts)
            stack.callback(self._kill_keepers)
            stack.enter_context(self.daemon)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stack.close()

    # -- asking --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        self.daemon.read_notices()
        with connect(str(self.daemon.socket_path), timeout_s=REST_LIMIT_S) as hegmd:
            yield hegmd

    def client(self, words: list[str]) -> Client:
        self.daemon.read_notices()
        return Client(words, self.daemon.socket_path)

    def rest(self) -> dict[str, Operation]:
        """Every operation, once all have ended or wait."""
        with self.connection() as hegmd:
            for known in hegmd.operations().operations:
                if known.phase not in OVER:  # one that was suspended may have been found and not been looked at yet
                    hegmd.call(Story(id=known.id, follow=True), StoryReply)
            return {op.id: op for op in hegmd.operations().operations}

    def await_jobs(self, pids: Iterable[int], *, agents: Iterable[int] = (), on_gpu: bool = True) -> dict[int, str]:
        """The GPU of each of these, once they are counted, and the agents of those that have one are there."""
        wanted, agented = set(pids), set(agents)
        until = monotonic() + REST_LIMIT_S
        with self.connection() as hegmd:
            while True:
                processes = hegmd.processes().processes
                found = {process.pid: process for process in processes if process.pid not in agented or process.agent}
                if wanted <= found.keys() and (not on_gpu or all(found[pid].gpus for pid in wanted)):
                    return {pid: found[pid].gpus[0].gpu if found[pid].gpus else "" for pid in wanted}
                pause()
                assert monotonic() < until, f"of {wanted}, there are {found}\n{self.daemon.log_text()[-4000:]}"

    def await_video_memory_of(self, pids: Iterable[int]) -> None:
        """Wait until only these hold video memory; the daemon's figures may be some refreshes late."""
        known = set(pids)
        until = monotonic() + REST_LIMIT_S
        with self.connection() as hegmd:
            while True:
                used = {gpu.id: gpu.memory_used_bytes or 0 for gpu in hegmd.gpus().gpus}
                owned = dict.fromkeys(used, 0)
                for process in hegmd.processes().processes:
                    for use in process.gpus if process.pid in known else ():
                        owned[use.gpu] += use.vram_bytes or 0
                if used == owned:
                    return
                pause()
                assert monotonic() < until, f"{used} is in use, of which {owned} is the jobs'"

    def story(self, op: str) -> str:
        """The record of an operation, for the report of a failed round."""
        try:
            with self.connection() as hegmd:
                reply = hegmd.call(Story(id=op), StoryReply)
        except HegmError as error:
            return f"{error.message}\n{self.daemon.log_text()[-4000:]}"
        lines = [f"{line.utc:.3f} {line.phase}: {line.event} {line.detail} {line.effects}" for line in reply.story]
        return "\n".join([repr(reply.operation), *lines, self.daemon.log_text()[-4000:]])

    # -- killing -------------------------------------------------------------------------------------------------------

    def keepers(self) -> list[psutil.Process]:
        return [process for process in mentioning(self.state_dir) if "hegmd.memory.keeper" in process.info["cmdline"]]

    def strike(self, victim: str, client: Client, pid: int) -> int:
        """Kill it, or do that to the worker; how many that were. A daemon is not started again by this."""
        struck = len(self._kill_keepers()) if victim in (KEEPER, BOTH) else 0
        if victim in (DAEMON, BOTH):
            self.daemon.stop(signal.SIGKILL)
            struck += 1
        elif victim == CLIENT:
            client.process.kill()
            client.process.wait()
            struck += 1
        elif victim == STOPPED:
            os.kill(pid, signal.SIGSTOP)
            struck += 1
        elif victim in _TO_THE_SOCKET:
            struck += _TO_THE_SOCKET[victim](pid, self.daemon.socket_path)
        return struck

    def heal(self, victim: str, pid: int) -> None:
        """Do what is needed to continue, after the daemon was released."""
        if victim in (DAEMON, BOTH):
            self.daemon.start()
        elif victim == STOPPED:
            with self.connection() as hegmd:
                hegmd.operations()  # it answers others meanwhile
            os.kill(pid, signal.SIGCONT)

    def release(self) -> None:
        """Once nothing runs: resume what was stopped and has not ended."""

    def _kill_keepers(self) -> list[psutil.Process]:
        keepers = self.keepers()
        for keeper in keepers:
            keeper.kill()
        return keepers

    # -- what is left --------------------------------------------------------------------------------------------------

    def await_jobs_gone(self) -> None:
        """Wait until the daemon knows that all jobs have ended, and no GPU memory is held for them."""
        until = monotonic() + REST_LIMIT_S
        with self.connection() as hegmd:
            while left := hegmd.processes().processes:  # it sees their ends in its own time
                assert monotonic() < until, f"there are still {left}"
                pause()
            assert not hegmd.operations().orphans
        self.await_video_memory_of([])

    def await_nothing_left(self) -> None:
        """Wait until there are no leftovers: the daemon may be writing a new version of one of its files just now."""
        until = monotonic() + REST_LIMIT_S
        while left := self.left():
            assert monotonic() < until, left
            pause()

    def left(self) -> list[str]:
        """Return leftovers that an idle daemon must not have: pieces of memory, files on disk, and other processes."""
        files = [*(self.state_dir / "spill").glob("*"), *self.state_dir.glob("*.new")]
        known = self.state_dir / "identity"  # drawn when there is the first file to be named
        if known.exists():
            files += SHARED_MEMORY.glob(f"hegmd-*-{known.read_text()[:16]}/*")
        keepers = still_there(self.keepers(), 10)
        return [str(path) for path in files] + [f"keeper {keeper.pid}" for keeper in keepers]


def mentioning(path: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cmdline"]):
        if str(path) in (process.info["cmdline"] or ()):
            yield process
