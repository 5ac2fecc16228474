"""Programs that are to outlive the call that starts them, and the daemon.

Whoever restores a job without a service manager starts its first process's parent, and that is no child to be ended
with a request or a restart: it has a session of its own, no pipe to us but the one on which it says that it is ready,
and a thread that does nothing but reap it, should it end while we live. For all else there is `hegmd.system.programs`.
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
from dataclasses import dataclass

import anyio

from hegmd.errors import ExternalError
from hegmd.system.programs import SYSTEM_PATH
from hegmd.system.threads import run_detached

__all__ = ["Started", "start_apart"]

_FIRST_FD = 256  # above whatever the program wants to open under numbers of its own
_END_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class Started:
    """How it began: ready, with what it said; or ended before that, with its status; or neither within the time."""

    pid: int
    word: bytes
    status: int | None


async def start_apart(
    argv_for: Callable[[int], Sequence[str]], *, deadline_s: float, end: Callable[[], object]
) -> Started:
    """Start the program and wait until it says on a descriptor that it is ready, or ends.

    `argv_for` gets that descriptor's number. Without either within the deadline, or on cancellation, it gets SIGTERM,
    on which it has to end what it has started, and SIGKILL, alone, if it does not end. One that is ready just when
    nobody wants it any more has nothing to end it: then `end`, which may block, ends what it has made. Raises
    ExternalError when it cannot be started.
    """
    came: list[Started] = []
    try:
        return await run_detached(
            lambda unwanted: _kept(came, _start(argv_for, time.monotonic() + deadline_s, unwanted)),
            name="program apart",
            linger_s=_END_GRACE_S,
        )
    except anyio.get_cancelled_exc_class():
        if came and came[0].word:
            with anyio.CancelScope(shield=True):
                await run_detached(lambda _: end(), name="end what is apart")
        raise


def _kept(came: list[Started], started: Started) -> Started:
    """In the thread, before it ends: a result that nobody waits for is dropped, and what it tells of is there."""
    came.append(started)
    return started


def _start(argv_for: Callable[[int], Sequence[str]], deadline: float, unwanted: socket.socket) -> Started:
    import fcntl

    ours, theirs = os.pipe()
    try:
        passed = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD)
    except OSError as error:  # EINVAL, where no number as high as that may be had at all
        os.close(ours)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE)) from error
    finally:
        os.close(theirs)
    try:
        argv = argv_for(passed)
        process = _begun(argv, passed)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(passed)
    try:
        word = _first_word(ours, unwanted, deadline)
    finally:
        os.close(ours)
    if word:
        threading.Thread(target=process.wait, name=f"reaper {process.pid}", daemon=True).start()
        return Started(process.pid, word, None)
    # Its end of the pipe is closed a moment before it has ended.
    ended = not _is_readable(unwanted) and _wait(process, max(0.0, deadline - time.monotonic()))
    if not ended:
        process.terminate()
        if not _wait(process, _END_GRACE_S):
            process.kill()
            process.wait()
    return Started(process.pid, b"", process.returncode if ended else None)


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


def _first_word(ours: int, unwanted: socket.socket, deadline: float) -> bytes:
    """What it says; nothing when its end is closed first, or nobody waits, or the time is over."""
    left_ms = max(0, int((deadline - time.monotonic()) * 1000))
    poll = select.poll()
    poll.register(ours, select.POLLIN)
    poll.register(unwanted, select.POLLIN)
    ready = {fd for fd, _ in poll.poll(left_ms)}
    return os.read(ours, 256) if ours in ready else b""


def _is_readable(unwanted: socket.socket) -> bool:
    return bool(select.select([unwanted], [], [], 0)[0])


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> bool:
    try:
        process.wait(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return True
