"""The only module that runs other programs: their environment, deadline, output and end.

Every program gets an environment that inherits nothing, an absolute path from a fixed search path, no shell, a session
and process group of its own, and a limit on the output that is kept. All processes in that group are ended with the
call. A deadline is required.

A thread owns the child from fork to reaping, its pipes and its pidfd; the event loop waits for the thread only. So a
child that ignores SIGTERM, a grandchild that keeps a pipe open, an exec that hangs on a dead disk, or a process that
survives SIGKILL blocks only that thread, which the loop can abandon.

Callers use a function for each program, further down. `run` is for programs whose path is data, such as a Python found
on the node. The caller interprets the output. `Companion` is for a process of ours that the daemon talks to over a
descriptor.

Longer than 400 lines because all starts of programs are in one module.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import anyio

from hegmd.errors import ExternalError
from hegmd.system.descriptors import Descriptors
from hegmd.system.resource_errors import scarcity
from hegmd.system.threads import run_detached

SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
OUTPUT_TAIL_BYTES = 64 * 1024
KEEPER_START_S = 20.0
ERROR_TAIL_BYTES = 4096  # how much of it goes into an error

_TERM_GRACE_S = 0.5
_KILL_GRACE_S = 2.0
_DRAIN_BYTES = 1024 * 1024  # the size of a pipe: a grandchild that keeps writing must not block us

_log = logging.getLogger(__name__)


class ProgramMissing(ExternalError):
    """No such program is on the search path; nothing was run."""


class Completed(NamedTuple):
    """A program that ended. A negative status is the signal that ended it."""

    argv: tuple[str, ...]
    status: int
    stdout: str
    stderr: str
    duration_s: float

    @property
    def output_tail(self) -> str:
        """Return the end of its output, standard error first."""
        return _end_of(self.stdout, self.stderr)

    def require(self, hint: str) -> Completed:
        """Return self. Raises ExternalError with that hint if the program reported a failure."""
        if self.status == 0:
            return self
        message = f"{_shown(self.argv)} {_ending(self.status)}"
        raise ExternalError(message, hint, argv=self.argv, status=self.status, output_tail=self.output_tail)


def find_program(name: str, path: str = SYSTEM_PATH) -> str | None:
    """Return the program's absolute path. Skips relative entries: the working directory is not trusted."""
    for directory in path.split(":"):
        if not directory.startswith("/"):
            continue
        candidate = os.path.join(directory, name)
        with suppress(OSError):
            if stat.S_ISREG(os.stat(candidate).st_mode) and os.access(candidate, os.X_OK):
                return candidate
    return None


async def run(
    argv: Sequence[str],
    *,
    deadline_s: float,
    path: str = SYSTEM_PATH,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> Completed:
    """Run a program to its end and return its result. A failure that it reports itself is not raised.

    Raises ProgramMissing, and ExternalError if it cannot be started or exceeds `deadline_s`. Then, or if the caller is
    cancelled, its process group gets SIGTERM and SIGKILL, and the child is reaped. If the kernel does not end it, its
    thread keeps waiting alone.
    """
    child = _Child(tuple(argv), path, {"PATH": path, "LC_ALL": "C", **(env or {})}, stdin)
    linger_s = _TERM_GRACE_S + _KILL_GRACE_S
    started = time.monotonic()
    try:
        with anyio.fail_after(deadline_s):
            status = await run_detached(child.live, name=f"program {argv[0]}", linger_s=linger_s)
    except TimeoutError:
        fate = "and did not end after SIGKILL" if child.status is None else "and was ended"
        message = f"{_shown(argv)} was not done after {deadline_s:g} s {fate}"
        _log.warning("%s", message)
        hint = f"run `{_shown(argv)}` by hand to find where it blocks"
        tail = _end_of(child.stdout.text(), child.stderr.text())
        raise ExternalError(message, hint, argv=argv, status=child.status, output_tail=tail) from None
    duration_s = time.monotonic() - started
    _log.debug("%s ended with status %d after %.3f s", child.argv, status, duration_s)
    return Completed(child.argv, status, child.stdout.text(), child.stderr.text(), duration_s)


async def start_keeper(folder: Path) -> None:
    """Start a keeper in that directory, detached from us. Does nothing if one listens there. Raises ExternalError."""
    package = Path(__file__).parent.parent
    # Without site-packages: it uses none, and their .pth files can take longer than all the rest of its start.
    argv = [sys.executable, "-S", "-m", "hegmd.memory.keeper", str(folder)]
    environ = {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    completed = await run(argv, deadline_s=KEEPER_START_S, env=environ)
    completed.require(f"run: python3 -m hegmd.memory.keeper {folder}")


class Rights(NamedTuple):
    """The rights of a program that does not run with the daemon's."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Companion:
    """A program that runs beside the daemon until it ends, or until it is cancelled: then it is killed at once.

    The thread that starts it stays until it is reaped. So the program may ask the kernel to kill it when its parent
    ends (PR_SET_PDEATHSIG): for the kernel the parent is that thread.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        fds: Sequence[int] = (),
        stdin: int | None = None,
        rights: Rights | None = None,
    ) -> None:
        """This object owns the descriptors: it passes them on and closes them.

        `fds` keep their numbers, `stdin` becomes the standard input. Other `rights` than the daemon's need root.
        """
        self._fds = Descriptors([*fds, *(() if stdin is None else (stdin,))])
        data = b"" if stdin is None else stdin
        self._child = _Child(tuple(argv), SYSTEM_PATH, env, data, fds=tuple(fds), grace_s=0.0, rights=rights)

    async def live(self) -> int:
        """Start it, wait for its end and return its status. Raises ExternalError if it cannot be started.

        If the caller is cancelled, it gets SIGKILL and is reaped, unless the kernel does not end it.
        """
        try:
            return await run_detached(self._live, name=f"program {self._child.argv[0]}", linger_s=_KILL_GRACE_S)
        finally:
            self._fds.close()

    @property
    def output_tail(self) -> str:
        """Return the end of its output so far, standard error first."""
        return _end_of(self._child.stdout.text(), self._child.stderr.text())

    def _live(self, unwanted: socket.socket) -> int:
        return self._child.live(unwanted, self._fds.close)


class _Child:
    """A program from fork to reaping. `live` runs in a thread; its results are read when that thread has ended."""

    def __init__(
        self,
        argv: tuple[str, ...],
        path: str,
        env: Mapping[str, str],
        stdin: bytes | int,
        *,
        fds: tuple[int, ...] = (),
        grace_s: float = _TERM_GRACE_S,
        rights: Rights | None = None,
    ) -> None:
        self.argv = argv
        self.stdout = _Tail()
        self.stderr = _Tail()
        self.status: int | None = None
        self._path = path
        self._env = env
        self._stdin = stdin
        self._fds = fds
        self._grace_s = grace_s
        self._rights = rights

    def live(self, unwanted: socket.socket, on_started: Callable[[], object] = lambda: None) -> int:
        """Return the program's status. Ends it once `unwanted` is readable. Reaps it in any case."""
        with ExitStack() as held:
            process, tails = self._start(held)
            on_started()
            pidfd = self._hold(process)
            held.callback(os.close, pidfd)
            self.status = _run_to_end(process, _Watch(pidfd, tails), unwanted, self._grace_s)
        return self.status

    def _start(self, held: ExitStack) -> tuple[subprocess.Popen[bytes], dict[int, _Tail]]:
        """Start the program with pipes for its output, which are closed with `held`."""
        program = self.argv[0] if self.argv[0].startswith("/") else find_program(self.argv[0], self._path)
        if program is None:
            raise missing(self.argv, self._path)
        _log.debug("running %s", self.argv)
        try:
            return self._begun(program, held)
        except OSError as error:
            why, hint = error.strerror or str(error), f"run `{_shown(self.argv)}` by hand as the daemon's user"
            if (scarce := scarcity(error)) is not None:
                why, hint = scarce.message, scarce.hint
            raise self._failure(f"{program} cannot be started: {why}", hint) from error

    def _begun(self, program: str, held: ExitStack) -> tuple[subprocess.Popen[bytes], dict[int, _Tail]]:
        # We create the pipes: Popen leaks its own if it lacks a descriptor for the next.
        tails: dict[int, _Tail] = {}
        rights = self._rights
        with ExitStack() as child_files:
            ends: list[int] = []
            for tail in (self.stdout, self.stderr):
                ours, end = os.pipe()
                held.callback(os.close, ours)
                child_files.callback(os.close, end)
                os.set_blocking(ours, False)
                tails[ours] = tail
                ends.append(end)
            stdin = self._stdin if isinstance(self._stdin, int) else subprocess.DEVNULL
            if isinstance(self._stdin, bytes) and self._stdin:
                stdin = _filled(self._stdin)
                child_files.callback(os.close, stdin)
            process = subprocess.Popen(
                [program, *self.argv[1:]],
                stdin=stdin,
                stdout=ends[0],
                stderr=ends[1],
                bufsize=0,
                cwd="/",
                env=dict(self._env),
                start_new_session=True,
                pass_fds=self._fds,
                user=None if rights is None else rights.uid,
                group=None if rights is None else rights.gid,
                extra_groups=None if rights is None else rights.groups,
            )
        return process, tails

    def _hold(self, process: subprocess.Popen[bytes]) -> int:
        try:
            return os.pidfd_open(process.pid)
        except OSError as error:
            process.kill()
            process.wait()
            scarce = scarcity(error)
            message = f"{_shown(self.argv)} cannot be watched: pidfd_open: {error.strerror}"
            hint = "hegmd needs Linux 5.3 and a sandbox that allows pidfd_open" if scarce is None else scarce.hint
            raise self._failure(message, hint) from error

    def _failure(self, message: str, hint: str) -> ExternalError:
        return ExternalError(message, hint, argv=self.argv, status=None, output_tail="")


def _run_to_end(process: subprocess.Popen[bytes], watch: _Watch, unwanted: socket.socket, grace_s: float) -> int:
    if not watch.until_exit(cut_by=unwanted) and grace_s:
        _signal_group(process.pid, signal.SIGTERM)
        watch.until_exit(limit_s=grace_s)
    # The child may be a zombie but is not reaped: no other process can have the number of its group.
    _signal_group(process.pid, signal.SIGKILL)
    watch.until_exit()
    watch.drain()
    return process.wait()


class _Watch:
    """Waits for a child's end and reads its output meanwhile."""

    def __init__(self, pidfd: int, tails: dict[int, _Tail]) -> None:
        self._pidfd = pidfd
        self._open = tails  # the pipes that still have writers

    def until_exit(self, *, cut_by: socket.socket | None = None, limit_s: float | None = None) -> bool:
        """Return True once the child has exited; False if `cut_by` became readable or the deadline passed first."""
        end = None if limit_s is None else time.monotonic() + limit_s
        while True:
            ready = self._poll(cut_by, end)
            for fd in [fd for fd in self._open if fd in ready]:
                self._take(fd)
            if self._pidfd in ready:
                return True
            if (cut_by is not None and cut_by.fileno() in ready) or (end is not None and time.monotonic() >= end):
                return False

    def drain(self) -> None:
        """Read what an exited child left in its pipes, without waiting for other processes that hold them open."""
        for fd in list(self._open):
            taken_bytes = 0
            while fd in self._open and taken_bytes < _DRAIN_BYTES:
                count = self._take(fd)
                if count == 0:
                    break
                taken_bytes += count

    def _poll(self, cut_by: socket.socket | None, end: float | None) -> set[int]:
        poll = select.poll()
        for fd in (self._pidfd, *self._open, *(() if cut_by is None else (cut_by.fileno(),))):
            poll.register(fd, select.POLLIN)
        left_ms = None if end is None else max(0, int((end - time.monotonic()) * 1000) + 1)
        return {fd for fd, _ in poll.poll(left_ms)}

    def _take(self, fd: int) -> int:
        try:
            data = os.read(fd, 65536)
        except BlockingIOError:
            return 0
        if not data:
            del self._open[fd]
            return 0
        self._open[fd].add(data)
        return len(data)


class _Tail:
    """The end of a stream, limited in size."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * OUTPUT_TAIL_BYTES:
            del self._data[:-OUTPUT_TAIL_BYTES]

    def text(self) -> str:
        return bytes(self._data[-OUTPUT_TAIL_BYTES:]).decode("utf-8", "replace")


def _filled(data: bytes) -> int:
    """Return a descriptor of a file with those bytes, so that nothing has to feed a pipe."""
    fd = os.memfd_create("stdin")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
    except PermissionError:  # a set-uid program, which cannot be signalled: its thread waits for its end
        _log.warning("process group %d may not be signalled; waiting for it to end", group)


def missing(argv: Sequence[str], path: str) -> ProgramMissing:
    """Return the error for a program that is not installed."""
    return ProgramMissing(
        f"{argv[0]} is not installed in {path}", f"install {argv[0]}", argv=argv, status=None, output_tail=""
    )


def _end_of(stdout: str, stderr: str) -> str:
    return (stderr.strip() or stdout.strip())[-ERROR_TAIL_BYTES:]


def _shown(argv: Sequence[str]) -> str:
    """Return the program and its arguments, shortened to one line."""
    text = " ".join(argv)
    return text if len(text) <= 60 else text[:59] + "…"


def _ending(status: int) -> str:
    if status >= 0:
        return f"failed with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"
