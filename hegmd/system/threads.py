"""Blocking work in a thread that can be abandoned.

Some calls can hang forever: a program on a dead network disk, a process that the kernel cannot end, a statvfs. They
run in a daemon thread. When the loop stops waiting, the thread blocks neither the loop nor the end of the process.
anyio's worker threads are not used, because the interpreter waits for them at exit.

Loop and thread share a socket pair; each closes only its own end. So neither can close a descriptor that the other
uses.
"""

from __future__ import annotations

import contextvars
import socket
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from hegmd.errors import TIMEOUT, UNAVAILABLE, HegmError

T = TypeVar("T")
_SERVED = "check its file server (findmnt -T FILE, ps): a network disk or a FUSE program may have ended"


class _Outcome(Generic[T]):
    """The result of the work; the thread fills it before it closes its end."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self.error: BaseException | None = None

    def unwrap(self) -> T:
        if self.error is not None:
            raise self.error
        return self.values[0]


async def run_detached(work: Callable[[socket.socket], T], *, name: str, linger_s: float = 0.0) -> T:
    """Return the result of `work`, or raise its error. `work` gets a socket that becomes readable when the caller is
    cancelled.

    Then the work has `linger_s` to end; after that it continues alone and its result is dropped. Raises HegmError if
    the node has no free descriptor or thread.
    """
    try:
        loop_end, thread_end = socket.socketpair()
    except OSError as error:
        raise _no_resources(error) from error
    outcome: _Outcome[T] = _Outcome()
    context = contextvars.copy_context()

    def body() -> None:
        try:
            outcome.values.append(context.run(work, thread_end))
        except BaseException as error:  # noqa: BLE001 - it is raised again where the result is awaited
            outcome.error = error
        finally:
            thread_end.close()

    try:
        threading.Thread(target=body, name=name, daemon=True).start()
    except RuntimeError as error:  # raised by `threading` for EAGAIN
        thread_end.close()
        loop_end.close()
        raise _no_resources(error) from error
    with loop_end:
        try:
            await anyio.wait_readable(loop_end)
        except anyio.get_cancelled_exc_class():
            loop_end.shutdown(socket.SHUT_WR)
            with anyio.move_on_after(linger_s, shield=True):
                await anyio.wait_readable(loop_end)
            raise
    return outcome.unwrap()


class BoundedReads:
    """Reads of files that others name, such as those of a job: limited in time, and in the number that may hang.

    A read that hangs keeps its thread; repeated requests must not start one each.
    """

    def __init__(self, limit_s: float = 20.0, most: int = 8) -> None:
        self._limit_s = limit_s
        self._most = most
        self._under_way: dict[int, str] = {}  # what each thread reads now
        self._last = 0

    async def at(self, work: Callable[[Callable[[str], object]], T], *, name: str) -> T:
        """Return the result of `work`, which reports each file before it reads it. Raises HegmError."""
        if len(self._under_way) >= self._most:
            raise HegmError(
                UNAVAILABLE, f"{len(self._under_way)} reads of files have not ended, at {self._now()}", _SERVED
            )
        self._last += 1
        number = self._last
        self._under_way[number] = "what was asked for"

        def whole(_: socket.socket) -> T:
            try:
                return work(lambda what: self._under_way.__setitem__(number, what))
            finally:
                self._under_way.pop(number, None)

        with anyio.move_on_after(self._limit_s):
            try:
                return await run_detached(whole, name=name)
            except HegmError:  # also if no thread could be started
                self._under_way.pop(number, None)
                raise
        what = self._under_way.get(number, "what was asked for")
        raise HegmError(TIMEOUT, f"{what} does not answer within {self._limit_s:g} s", _SERVED)

    def _now(self) -> str:
        return ", ".join(sorted(set(dict(self._under_way).values()))[:3])


def _no_resources(error: Exception) -> HegmError:
    return HegmError(
        UNAVAILABLE,
        f"hegmd cannot start a thread: {error}",
        "raise TasksMax= and LimitNOFILE= of hegmd.service, or find what uses the node's threads and files",
    )
