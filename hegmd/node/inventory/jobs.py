"""One blocking call in a thread that may never come back, and whose answer is welcome however late it comes.

The loop waits for a job as long as it likes, leaves it, and looks again later: a vendor's library that takes two
seconds where one was allowed still gets its answer in, and one that hangs in the driver costs one thread and two
descriptors for good, no more. `hegmd.system.threads` is for work whose late answer nobody wants; anyio's worker threads
are for neither, because the interpreter waits for them when it exits.

A thread for each call and not one that is kept: there is nothing to stop at the end, and starting one costs 0.1 ms.
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

__all__ = ["SHORTAGE_HINT", "Job", "shortage"]

T = TypeVar("T")


_NO_MORE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN))
SHORTAGE_HINT = "raise LimitNOFILE= of hegmd.service, or check what it has open in /proc/PID/fd; hegmd tries again"


def shortage(error: BaseException) -> str | None:
    """What the kernel gives hegmd no more of, in its words, where that is why a job came to nothing; else None."""
    return error.strerror if isinstance(error, OSError) and error.errno in _NO_MORE else None


class Job(Generic[T]):
    """`work` running in a daemon thread of its own. Made, waited for and taken in the event loop's thread.

    Loop and thread hold one end each of a socket pair, and each closes its own: that the thread closed its end is
    what the loop waits for, and no descriptor is closed under anybody's hands.
    """

    def __init__(self, work: Callable[[], T], *, name: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._work = work
        self._monotonic = monotonic
        self._values: list[T] = []
        self._error: BaseException | None = None
        self._ours: socket.socket | None = None
        self.started = monotonic()
        #: When the work ended; None while it has not.
        self.ended: float | None = None
        self._start(name)

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self.ended is not None

    async def wait(self) -> None:
        """Wait for the end of the work. Being cancelled here leaves it running. One waits at a time."""
        while not self.done and self._ours is not None:
            await anyio.wait_readable(self._ours)

    def result(self) -> T:
        """What the work returned; raises what it raised. The job is over with that."""
        if not self.done:
            raise Bug("the result of a job was taken before its end")
        self.let_go()
        if self._error is not None:
            raise self._error
        return self._values[0]

    def let_go(self) -> None:
        """Stop caring. The thread ends when its work does; its result is dropped. Doing this twice is fine."""
        if self._ours is not None:
            self._ours.close()
            self._ours = None

    def _start(self, name: str) -> None:
        try:
            self._ours, theirs = socket.socketpair()
        except OSError as error:  # too many open files: an outcome like any other
            self._error, self.ended = error, self.started
            return
        try:
            threading.Thread(target=self._run, args=(theirs,), name=name, daemon=True).start()
        except RuntimeError as error:  # too many threads
            theirs.close()
            self._error, self.ended = error, self.started

    def _run(self, theirs: socket.socket) -> None:
        try:
            self._values.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised again where the result is taken
            self._error = error
        finally:
            self.ended = self._monotonic()
            theirs.close()
