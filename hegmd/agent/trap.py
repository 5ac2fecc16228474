"""Stops the script's other threads at their next Python instruction, while the training thread is parked.

A thread that sleeps or waits cannot be asked to stop. But it runs no Python code before it wakes up, and then it is
stopped. From Python 3.12 on `sys.monitoring` does that, which debuggers, profilers and coverage tools can use at the
same time. Before that it is the interpreter's trace function, of which each thread has one: a thread that has one
already, such as a debugger's, is left alone and is not held by the trap.

Installs nothing while the trap is not set. Stops no thread in the standard library, while it imports a module, or while
it writes to a log: it would keep a lock that the agent may need.
"""

from __future__ import annotations

import gc
import os
import sys
from _operator import attrgetter
from _thread import get_ident
from itertools import accumulate, chain, compress, repeat, takewhile, tee

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import CodeType, FrameType
    from typing import Any

LIBRARY = os.path.dirname(os.__file__) + "/"
OURS = os.path.dirname(os.path.abspath(__file__)) + "/"
_FOREIGN = ("site-packages/", "dist-packages/")
# Functions of the standard library that call code of others, or a given C function, without holding a lock.
_CALLERS = frozenset(
    (
        ("asyncio/events.py", "_run"),
        ("concurrent/futures/thread.py", "run"),
        ("multiprocessing/pool.py", "worker"),
        ("threading.py", "run"),
    )
)
# A thread in these files holds a lock that others may need.
_LOCKED = ("importlib/", "logging/", "warnings.py")
_FROZEN_IMPORT = "<frozen importlib"


def library_path(path: str) -> str | None:
    """Return the path of a file of the standard library within it; None for any other file."""
    if path.startswith("<frozen "):
        return path
    if not path.startswith(LIBRARY):
        return None
    within = path[len(LIBRARY) :]
    return None if within.startswith(_FOREIGN) else within


def is_ours(frame: FrameType) -> bool:
    """Return True if the frame's thread is one of the agent's."""
    first: FrameType = frame
    while first.f_back is not None:
        first = first.f_back
    return first.f_code.co_filename.startswith(OURS)


def _may_stop_in(code: CodeType) -> bool:
    if code.co_filename.startswith(OURS):
        return False
    within = library_path(code.co_filename)
    return within is None or (within, code.co_name) in _CALLERS


def _has_lock(frame: FrameType | None) -> bool:
    while frame is not None:
        within = library_path(frame.f_code.co_filename)
        if within is not None and within.startswith((*_LOCKED, _FROZEN_IMPORT)):
            return True
        frame = frame.f_back
    return False


class Trap:
    """`stop` is called in a thread that was caught, and returns when it may run on. One thread sets and lifts it."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._spared: frozenset[int] = frozenset()
        self._hook: _Monitoring | _Tracing | None = None
        self._is_set = False
        self._pid = 0

    def set(self, spared: frozenset[int]) -> frozenset[int]:
        """Catch every thread except those in `spared` and the agent's. Returns the threads that run no code of the
        script until it is lifted.

        Can be called again for new threads.
        """
        self._spared = spared | {get_ident()}
        self._pid = os.getpid()
        hook = self._begun()
        if hook is None:
            return frozenset()
        with NoCollection():
            frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - it is documented
            threads = {at: frame for at, frame in frames.items() if at not in self._spared and not is_ours(frame)}
            # This function's frame is among them, and would keep itself and all variables of every thread.
            frames.clear()
            try:
                return hook.watch(threads)
            finally:
                threads.clear()

    def _begun(self) -> _Monitoring | _Tracing | None:
        """Return this Python's hook; None if there is none: without ctypes, or without a free tool number."""
        if self._is_set:
            return self._hook
        try:
            if self._hook is None:
                self._hook = _Monitoring(self._caught) if sys.version_info >= (3, 12) else _Tracing(self._caught)
            self._is_set = True
            self._hook.begin()
        except Exception as error:  # noqa: BLE001 - threads are then judged by where they are, as without a trap
            note(f"threads cannot be stopped when they wake: {error!r}")
            self._is_set = False
            return None
        return self._hook

    def lift(self) -> None:
        """Stop catching threads. Caught ones stay until `stop` returns."""
        if self._is_set and self._hook is not None:
            self._is_set = False
            self._hook.end()

    def _caught(self, frame: FrameType) -> None:
        if not self._is_set or get_ident() in self._spared or not _may_stop_in(frame.f_code):
            return
        if os.getpid() != self._pid:  # a forked child, which no agent lets run again
            return
        if not _has_lock(frame) and not is_ours(frame):
            self._stop()


class _Monitoring:
    """`sys.monitoring`: each instruction of running functions, and the start of all others."""

    def __init__(self, caught: Callable[[FrameType], None]) -> None:
        self._caught = caught
        self._monitoring: Any = vars(sys)["monitoring"]  # from Python 3.12 on
        self._codes: dict[int, CodeType] = {}
        self._tool = 0
        events: Any = self._monitoring.events
        self._instruction: int = events.INSTRUCTION
        self._kinds: tuple[int, ...] = (events.PY_START, events.PY_RESUME, events.PY_THROW)

    def begin(self) -> None:
        """Raises RuntimeError if all tool numbers are in use."""
        self._tool = self._taken_tool()
        for kind in (*self._kinds, self._instruction):
            self._monitoring.register_callback(self._tool, kind, self._on_event)
        self._monitoring.set_events(self._tool, sum(self._kinds))

    def _taken_tool(self) -> int:
        for tool in (4, 3):  # the others are for debuggers, coverage, profilers and optimizers
            try:
                self._monitoring.use_tool_id(tool, "hegm")
            except ValueError:
                continue
            return tool
        raise RuntimeError("sys.monitoring has no free tool")

    def watch(self, threads: dict[int, FrameType]) -> frozenset[int]:
        """Have those threads caught; which of them will be."""
        for innermost in threads.values():
            frame: FrameType | None = innermost
            while frame is not None:
                code = frame.f_code
                if id(code) not in self._codes and _may_stop_in(code):
                    self._codes[id(code)] = code
                    self._monitoring.set_local_events(self._tool, code, self._instruction)
                frame = frame.f_back
        return frozenset(threads)

    def end(self) -> None:
        self._monitoring.set_events(self._tool, 0)
        for code in self._codes.values():
            self._monitoring.set_local_events(self._tool, code, 0)
        for kind in (*self._kinds, self._instruction):
            self._monitoring.register_callback(self._tool, kind, None)
        self._monitoring.free_tool_id(self._tool)
        self._codes.clear()

    def _on_event(self, _code: CodeType, _offset: int, _raised: object = None) -> None:
        self._caught(sys._getframe(1))  # pyright: ignore[reportPrivateUsage] - it is documented


class _Tracing:
    """The trace function of each thread in CPython 3.9 to 3.11, whose structures no longer change.

    The offsets in a thread's structure are found with this thread's own. Another thread's structure vanishes with its
    thread, which can happen whenever this thread releases the interpreter. So all structures are read in one call, of
    iterators in C, with the collector disabled: none of it releases the interpreter.
    """

    _WORDS = 32

    def __init__(self, caught: Callable[[FrameType], None]) -> None:
        import ctypes

        self._caught = caught
        self._ctypes = ctypes
        self._word_bytes = ctypes.sizeof(ctypes.c_size_t)
        self._api = api = ctypes.pythonapi
        for function in (api.PyThreadState_Get, api.PyThreadState_Next, api.PyInterpreterState_Get):
            function.restype = ctypes.c_void_p
        api.PyInterpreterState_ThreadHead.restype = ctypes.c_void_p
        api.PyInterpreterState_ThreadHead.argtypes = api.PyThreadState_Next.argtypes = (ctypes.c_void_p,)
        self._set_trace = api._PyEval_SetTrace  # no other function does it
        self._set_trace.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._set_trace.restype = ctypes.c_int
        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
        self._function = kind(self._on_event)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self._thread_word, self._trace_word = self._places()
        self._frames: list[FrameType] = []

    def _places(self) -> tuple[int, int]:
        """Return the word offsets of a thread's identifier and its trace function. Raises RuntimeError."""

        def probe(*_what: object) -> None:
            return None

        own = self._api.PyThreadState_Get()
        tool = sys.gettrace()  # a debugger's, or a coverage tool's
        try:
            sys.settrace(probe)
            traced = self._words(own)
            sys.settrace(None)
            untraced = self._words(own)
        finally:
            sys.settrace(tool)
        objects = [at for at in range(4, self._WORDS) if traced[at] == id(probe)]
        idents = [at for at in range(self._WORDS) if traced[at] == untraced[at] == get_ident()]
        # Two functions, for profiles and for traces, come before their two objects.
        if len(objects) != 1 or len(idents) != 1 or not traced[objects[0] - 2] or untraced[objects[0] - 2]:
            raise RuntimeError("the structure of a thread is not known")
        return idents[0], objects[0] - 2

    def _words(self, address: int) -> list[int]:
        return list((self._ctypes.c_size_t * self._WORDS).from_address(address))

    def _states(self) -> Iterator[int]:
        """Yield the address of each thread's structure."""
        first = map(self._api.PyInterpreterState_ThreadHead, (self._api.PyInterpreterState_Get(),))
        # Python's functions in C take the argument that they have no use for.
        return takewhile(bool, accumulate(chain(first, repeat(0)), self._api.PyThreadState_Next))

    def _read(self, states: Iterator[int], word: int) -> Iterator[int]:
        return map(_VALUE, map(self._ctypes.c_size_t.from_address, map((word * self._word_bytes).__add__, states)))

    def _functions(self) -> dict[int, int]:
        """Return each thread's trace function, 0 for none."""
        one, other = tee(self._states())
        with NoCollection():
            return dict(zip(self._read(one, self._thread_word), self._read(other, self._trace_word)))

    def _replace(self, idents: frozenset[int], old: int, new: int | None) -> None:
        """Give those threads another trace function, unless they have another one than the old by now."""
        states, one, other = tee(self._states(), 3)
        is_wanted = map(idents.__contains__, self._read(one, self._thread_word))
        is_old = map(old.__eq__, self._read(other, self._trace_word))
        changed = map(self._set_trace, compress(states, map(_AND, is_wanted, is_old)), repeat(new), repeat(None))
        with NoCollection():
            all(map(_IS_ZERO, changed))

    def begin(self) -> None:
        """Do nothing: there is no common setup."""

    def watch(self, threads: dict[int, FrameType]) -> frozenset[int]:
        """Have those threads caught; which of them will be."""
        before = self._functions()
        new = frozenset([ident for ident in threads if before.get(ident) == 0])
        for ident in new:
            frame: FrameType | None = threads[ident]
            while frame is not None:
                if not frame.f_trace_opcodes:
                    frame.f_trace_opcodes = True
                    self._frames.append(frame)
                frame = frame.f_back
        if new:
            self._replace(new, 0, self._address)
            before = self._functions()
        return frozenset([ident for ident in threads if before.get(ident) == self._address])

    def end(self) -> None:
        self._replace(frozenset(self._functions()), self._address, None)
        for frame in self._frames:
            frame.f_trace_opcodes = False
        self._frames.clear()

    def _on_event(self, _object: object, frame: FrameType, _what: int, _argument: object) -> int:
        try:
            self._caught(frame)
        except BaseException as error:  # noqa: BLE001 - nothing can be raised through here
            # An exception that another thread raised in this one is raised again.
            identifier, kind = self._ctypes.c_ulong(get_ident()), self._ctypes.py_object(type(error))
            self._api.PyThreadState_SetAsyncExc(identifier, kind)
        return 0


_VALUE = attrgetter("value")
_IS_ZERO = (0).__eq__
_AND = bool.__and__
#: Whether the collector is to run again.
_is_suspended = False


class NoCollection:
    """Suspends Python's garbage collector: a collection may run Python code, and other threads meanwhile.

    CPython 3.11 creates a frame object when another thread asks for it, and crashes with SIGSEGV if a collection lets
    the frame's thread continue.
    """

    def __enter__(self) -> None:
        global _is_suspended  # noqa: PLW0603 - one collector a process
        self._was_on = gc.isenabled()
        if self._was_on:
            _is_suspended = True
        gc.disable()

    def __exit__(self, *_exc: object) -> None:
        if self._was_on:
            collect_again()


def collect_again() -> None:
    """Resume the collector if it is suspended; also for a forked child, which lacks the thread that would."""
    global _is_suspended  # noqa: PLW0603 - the same
    if _is_suspended:
        gc.enable()
        _is_suspended = False
