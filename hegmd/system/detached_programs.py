"""Programs that outlive the call that starts them, and the daemon.

The parent of a job that is restored without a service manager must not end with a request or with the daemon. It has a
session of its own, only one pipe to us, on which it reports that it is ready, and a thread that reaps it if it ends
while the daemon lives. All other programs run through `hegmd.system.programs`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import anyio

from hegmd.errors import ExternalError
from hegmd.system.descriptors import is_readable
from hegmd.system.programs import SYSTEM_PATH
from hegmd.system.threads import run_detached

_FIRST_FD = 256  # above the numbers that the program opens itself
_END_GRACE_S = 30.0


class StartResult(NamedTuple):
    """The result of a start: ready, with its message; ended, with its status; or neither within the deadline."""

    pid: int
    word: bytes
    status: int | None


async def start_apart(
    argv_for: Callable[[int], Sequence[str]], *, deadline_s: float, end: Callable[[], object]
) -> StartResult:
    """Start the program and wait until it reports on a descriptor that it is ready, or ends.

    `argv_for` gets that descriptor's number. After the deadline, or if the caller is cancelled, the program gets
    SIGTERM, on which it has to end what it started, and then SIGKILL. If it becomes ready just then, `end`, which may
    block, ends what it started. Raises ExternalError if it cannot be started.
    """
    came: list[StartResult] = []
    try:
        return await run_detached(
            lambda unwanted: _kept(came, _start(argv_for, time.monotonic() + deadline_s, unwanted)),
            name="program apart",
            linger_s=_END_GRACE_S,
        )
    except anyio.get_cancelled_exc_class():
        if came and came[0].word:
            with anyio.CancelScope(shield=True):
                await run_detached(lambda _: end(), name="end a detached program")
        raise


def _kept(came: list[StartResult], started: StartResult) -> StartResult:
    """Keep the result before the thread ends: a result that nobody receives is dropped, but its program runs."""
    came.append(started)
    return started


def _start(argv_for: Callable[[int], Sequence[str]], deadline: float, unwanted: socket.socket) -> StartResult:
    import fcntl

    read_end, write_end = os.pipe()
    try:
        passed = fcntl.fcntl(write_end, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    except OSError as error:  # EINVAL if the limit of descriptors is below that number
        os.close(read_end)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
    finally:
        os.close(write_end)
    try:
        argv = argv_for(passed)
        process = _begun(argv, passed)
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(passed)
    try:
        word = _first_word(read_end, unwanted, deadline)
    finally:
        os.close(read_end)
    if word:
        threading.Thread(target=process.wait, name=f"reaper {process.pid}", daemon=True).start()
        return StartResult(process.pid, word, None)
    # The kernel closes its end of the pipe before it can be reaped.
    ended = not is_readable(unwanted.fileno()) and _wait(process, max(0.0, deadline - time.monotonic()))
    if not ended:
        process.terminate()
        if not _wait(process, _END_GRACE_S):
            process.kill()
            process.wait()
    return StartResult(process.pid, b"", process.returncode if ended else None)


def _begun(argv: Sequence[str], passed: int) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": SYSTEM_PATH, "LC_ALL": "C"},
            start_new_session=True,
            pass_fds=(passed,),
        )
    except OSError as error:
        message = f"{argv[0]} cannot be started: {error.strerror or error}"
        hint = "run it by hand as the daemon's user"
        raise ExternalError(message, hint, argv=argv, status=None, output_tail="") from error


def _first_word(read_end: int, unwanted: socket.socket, deadline: float) -> bytes:
    """Return its message; empty if it closed its end, the caller was cancelled, or the deadline passed."""
    left_ms = max(0, int((deadline - time.monotonic()) * 1000))
    poll = select.poll()
    poll.register(read_end, select.POLLIN)
    poll.register(unwanted, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(left_ms)}
    return os.read(read_end, 256) if read_end in ready else b""


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True
