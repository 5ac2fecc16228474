"""One blocking call in a thread that may never return, and whose answer counts even if it is late.

The loop waits for a job for a limited time, leaves it, and checks it again later. So a vendor's library that takes two
seconds where one was allowed still delivers its answer, and one that hangs costs one thread and two descriptors.
`hegmd.system.threads` is for work whose late answer is useless. anyio's worker threads suit neither, because the
interpreter waits for them at exit.

Each call gets a new thread: nothing has to be stopped at the end, and a start costs 0.1 ms.
"""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from hegmd.errors import Bug

T = TypeVar("T")


_NO_MORE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
SHORTAGE_HINT = "raise LimitNOFILE= of hegmd.service, or check what it has open in /proc/PID/fd; hegmd tries again"


def shortage(error: BaseException) -> str | None:
    """Return the kernel's words if a job failed for lack of files or threads; else None."""
    return error.strerror if isinstance(error, OSError) and error.errno in _NO_MORE else None


class Job(Generic[T]):
    """`work` in a daemon thread of its own. Created, awaited and taken in the event loop's thread.

    Loop and thread hold one end each of a socket pair, and each closes its own. The loop waits for the thread's end to
    close.
    """

    def __init__(self, work: Callable[[], T], *, name: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._monotonic = monotonic
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._ours: socket.socket | None = None
        self.started = monotonic()
        #: When the work ended; None while it runs.
        self.ended: float | None = None
        self._start(name)

    @property
    def done(self) -> bool:
        """Return True if the work has ended, with a result or an error."""
        return self.ended is not None

    async def wait(self) -> None:
        """Wait for the end of the work. Cancellation leaves it running. One task waits at a time."""
        while not self.done and self._ours is not None:
            await anyio.wait_readable(self._ours)

    def result(self) -> T:
        """Return the result of the work, or raise its error. Call it once."""
        if not self.done:
            raise Bug("the result of a job was taken before its end")
        self.abandon()
        if self._error is not None:
            raise self._error
        return self._values[0]

    def abandon(self) -> None:
        """Abandon the job: the thread ends with its work, and the result is dropped. Twice is fine."""
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    def _start(self, name: str) -> None:
        try:
            self._ours, thread_end = socket.socketpair()
        except OSError as error:  # too many open files: an outcome like any other
            self._error, self.ended = error, self.started
            return
        try:
            threading.Thread(target=self._run, args=(thread_end,), name=name, daemon=True).start()
        except RuntimeError as error:  # too many threads
            thread_end.close()
            self._error, self.ended = error, self.started

    def _run(self, thread_end: socket.socket) -> None:
        try:
            self._values.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            self._error = error
        finally:
            self.ended = self._monotonic()
            thread_end.close()
