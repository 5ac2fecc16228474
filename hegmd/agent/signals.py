"""Holds signals back while the main thread is parked, and reports them to the agent at once.

A Python signal handler runs in the main thread between two of its steps, and may do anything: save a checkpoint, raise
KeyboardInterrupt. While the storages are offloaded it would read freed memory. So the main thread blocks every signal
while it is parked. The kernel delivers them to another thread, where Python's C handler only records them and writes
their number to the wakeup descriptor. The agent reads it and can reload everything; the handlers run when the main
thread continues. Signals without a Python handler act as always.

Python runs handlers in the main thread only, so no other thread needs this. A child that another thread forks meanwhile
gets its former wakeup descriptor back: its signals do not concern the agent.
"""

from __future__ import annotations

import os
import sys
from _thread import allocate_lock, get_ident, start_new_thread

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from _thread import LockType
    from collections.abc import Callable

BEGIN_LIMIT_S = 5.0
_NO_DESCRIPTOR = -1
_held: HeldSignals | None = None


def release_in_child() -> None:
    """Release the signals in a forked child, whose only thread is its main one. Never raises."""
    global _held
    held, _held = _held, None
    if held is not None:
        held.close_in_child()


def own_descriptors() -> set[int]:
    """Return the descriptors that exist only while signals are held."""
    held = _held
    return set() if held is None else held.descriptors()


class CannotHoldSignals(Exception):
    """Signals cannot be held back here, so this thread must not be parked. Nothing was changed."""


class HeldSignals:
    """A context manager for the waiting thread. `on_signal` is called from another thread with each signal's number.

    Entering raises CannotHold, and what others raise in this thread; then nothing was changed.
    """

    def __init__(self, on_signal: Callable[[int], None], *, begin_limit_s: float = BEGIN_LIMIT_S) -> None:
        self._on_signal = on_signal
        self._begin_limit_s = begin_limit_s
        self._is_main = False
        self._before: int | None = None
        self._mask: set[int] = set()
        self._reader = self._writer = _NO_DESCRIPTOR
        self._reader_taken = allocate_lock()  # taken by the side that closes it

    def __enter__(self) -> None:
        threading = sys.modules.get("threading")
        self._is_main = threading is None or threading.main_thread().ident == get_ident()
        if not self._is_main:
            return
        import signal

        # Read separately: the call that blocks the signals may raise a handler's exception, and its result is then
        # lost.
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        try:
            self._hold()
        except BaseException as error:
            self._undo()
            # An error that another thread raises in this one has no errno (it may be a TimeoutError), and belongs to
            # the script.
            if isinstance(error, OSError) and error.errno is not None:
                raise CannotHoldSignals(str(error)) from error
            raise

    def __exit__(self, *_exc: object) -> None:
        if self._is_main:
            self._undo()

    def _hold(self) -> None:
        global _held  # noqa: PLW0603 - there is one main thread
        import signal

        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self._reader, True)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _held = self
        begun = allocate_lock()
        begun.acquire()
        try:
            start_new_thread(self._read, (self._reader, begun))
        except (RuntimeError, MemoryError) as error:
            raise CannotHoldSignals(str(error)) from error
        # Up to Python 3.11 a thread that has not started counts as its starter: an exception for the parked thread
        # (PyThreadState_SetAsyncExc) would be raised in the new one. Such an exception has ended it.
        if not begun.acquire(timeout=self._begin_limit_s):
            raise CannotHoldSignals(f"a thread that was started did not begin within {self._begin_limit_s:g} s")

    def _undo(self) -> None:
        """Undo what was done so far. At each line a held handler may raise, or another thread may raise in this one."""
        global _held  # noqa: PLW0603 - there is one main thread
        import signal

        try:
            _held = None
            if self._writer != _NO_DESCRIPTOR:
                before = _NO_DESCRIPTOR if self._before is None else self._before
                current = signal.set_wakeup_fd(before, warn_on_full_buffer=False)
                if current not in (before, self._writer):  # it was not ours yet
                    signal.set_wakeup_fd(current, warn_on_full_buffer=False)
        finally:
            try:
                if self._writer != _NO_DESCRIPTOR:
                    os.close(self._writer)  # the end of the thread that reads
                if self._reader != _NO_DESCRIPTOR and self._reader_taken.acquire(False):
                    os.close(self._reader)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def descriptors(self) -> set[int]:
        return {self._reader, self._writer}

    def close_in_child(self) -> None:
        """Close the forked child's part; the parent's thread continues to wait with its own."""
        import signal

        try:
            if self._before is not None:
                signal.set_wakeup_fd(self._before, warn_on_full_buffer=False)
        except (OSError, ValueError) as error:
            note(f"the wakeup descriptor stays with the parent's: {error}")
        for fd in (self._reader, self._writer):
            try:
                os.close(fd)
            except OSError:
                pass

    def _read(self, reader: int, begun: LockType) -> None:
        """Until the writer closes, report the numbers, and pass them on to the former wakeup descriptor."""
        is_mine = self._reader_taken.acquire(False)
        begun.release()
        if not is_mine:
            return
        import signal

        # This thread, which inherited the mask, is where the kernel may deliver them.
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        before = self._before
        try:
            while True:
                numbers = os.read(reader, 64)
                if not numbers:
                    return
                note(f"signals {list(numbers)} while parked")
                if before is not None and before != _NO_DESCRIPTOR:
                    os.write(before, numbers)
                for number in numbers:
                    self._on_signal(number)
        except OSError as error:
            note(f"signals could not be passed on: {error}")
        finally:
            os.close(reader)
