"""Stops the script's other threads at their next Python instruction, while the training thread is parked.

A thread that sleeps, or waits for something, cannot be asked to stop; but it runs no Python before it comes out of
that, and then it is stopped. From Python 3.12 on `sys.monitoring` does that, which every debugger, profiler and
coverage tool can use at the same time. Before, it is the interpreter's own trace function, which each thread has one
of: a thread that has one already (a debugger's) is left alone, and is not held by the trap.

Owns the hooks, and nothing else: nothing is installed while the trap is not set. No thread is stopped in the standard
library, nor while it imports a module or writes to a log: it would keep a lock that the agent may need.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType
    from typing import Any

LIBRARY = os.path.dirname(os.__file__) + "/"
OURS = os.path.dirname(os.path.abspath(__file__)) + "/"
_FOREIGN = ("site-packages/", "dist-packages/")
# Where the standard library calls what others wrote, or the C function that was given to it, and has no lock.
_CALLERS = frozenset(
    (
        ("asyncio/events.py", "_run"),
        ("concurrent/futures/thread.py", "run"),
        ("multiprocessing/pool.py", "worker"),
        ("threading.py", "run"),
    )
)
# Who is in there has a lock that others may need.
_LOCKED = ("importlib/", "logging/", "warnings.py")
_FROZEN_IMPORT = "<frozen importlib"


def library_path(path: str) -> str | None:
    """Of a file of the standard library its path within it; None for any other file."""
    if path.startswith("<frozen "):
        return path
    if not path.startswith(LIBRARY):
        return None
    within = path[len(LIBRARY) :]
    return None if within.startswith(_FOREIGN) else within


def is_ours(frame: FrameType) -> bool:
    """Whether the thread of that frame began in the agent."""
    first: FrameType = frame
    while first.f_back is not None:
        first = first.f_back
    return first.f_code.co_filename.startswith(OURS)


def _may_stop_in(code: CodeType) -> bool:
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

    def set(self, spared: frozenset[int]) -> frozenset[int]:
        """Catch every thread but those and the agent's; the threads that run no more Python of the script's.

        May be called again, for threads that have begun since then.
        """
        self._spared = spared | {get_ident()}
        hook = self._begun()
        held: set[int] = set()
        for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage] - it is documented
            if hook is not None and ident not in self._spared and not is_ours(frame) and hook.watch(ident, frame):
                held.add(ident)
        return frozenset(held)

    def _begun(self) -> _Monitoring | _Tracing | None:
        """The hook of this Python. None where there is none: no ctypes, or no free place among the tools."""
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
        """Catch no thread any more. Those that were caught stay where they are until `stop` returns."""
        if self._is_set and self._hook is not None:
            self._is_set = False
            self._hook.end()

    def _caught(self, frame: FrameType) -> None:
        if not self._is_set or get_ident() in self._spared or not _may_stop_in(frame.f_code):
            return
        if not _has_lock(frame) and not is_ours(frame):
            self._stop()


class _Monitoring:
    """`sys.monitoring`: each instruction of what the threads are in now, and the beginning of everything else."""

    def __init__(self, caught: Callable[[FrameType], None]) -> None:
        self._caught = caught
        self._monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore] # from Python 3.12 on
        self._codes: dict[int, CodeType] = {}
        self._tool = 0
        events = self._monitoring.events
        self._instruction = events.INSTRUCTION
        self._kinds = (events.PY_START, events.PY_RESUME, events.PY_THROW)

    def begin(self) -> None:
        """Raises RuntimeError where all tools are taken."""
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

    def watch(self, _ident: int, frame: FrameType | None) -> bool:
        """Have the thread that is there caught; whether it will be."""
        while frame is not None:
            code = frame.f_code
            if id(code) not in self._codes and _may_stop_in(code):
                self._codes[id(code)] = code
                self._monitoring.set_local_events(self._tool, code, self._instruction)
            frame = frame.f_back
        return True

    def end(self) -> None:
        """Nothing is left of it."""
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
    """The trace function of each thread, below Python's: CPython 3.9, 3.10 and 3.11, whose structures do not change.

    Where in a thread's structure things are is found out from this thread's own.
    """

    _WORDS = 32

    def __init__(self, caught: Callable[[FrameType], None]) -> None:
        import ctypes

        self._caught = caught
        self._ctypes = ctypes
        api = ctypes.pythonapi
        for function in (api.PyThreadState_Get, api.PyThreadState_Next, api.PyInterpreterState_Get):
            function.restype = ctypes.c_void_p
        api.PyInterpreterState_ThreadHead.restype = ctypes.c_void_p
        api.PyInterpreterState_ThreadHead.argtypes = api.PyThreadState_Next.argtypes = (ctypes.c_void_p,)
        self._set_trace = api._PyEval_SetTrace  # pyright: ignore[reportPrivateUsage] - there is no other way
        self._set_trace.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        self._set_trace.restype = ctypes.c_int
        kind = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.py_object, ctypes.c_int, ctypes.c_void_p)
        self._function = kind(self._on_event)
        self._address = ctypes.cast(self._function, ctypes.c_void_p).value or 0
        self._thread_word, self._trace_word = self._places()
        self._frames: list[FrameType] = []

    def _places(self) -> tuple[int, int]:
        """At which words of a thread's structure its identifier and its trace function are. Raises RuntimeError."""

        def probe(*_what: object) -> None:
            return None

        own = self._ctypes.pythonapi.PyThreadState_Get()
        sys.settrace(probe)
        try:
            traced = self._words(own)
        finally:
            sys.settrace(None)
        untraced = self._words(own)
        objects = [at for at in range(4, self._WORDS) if traced[at] == id(probe)]
        idents = [at for at in range(self._WORDS) if traced[at] == untraced[at] == get_ident()]
        # Two functions, for profiles and for traces, come before their two objects.
        if len(objects) != 1 or len(idents) != 1 or not traced[objects[0] - 2] or untraced[objects[0] - 2]:
            raise RuntimeError("the structure of a thread is not known")
        return idents[0], objects[0] - 2

    def _words(self, address: int) -> list[int]:
        return list((self._ctypes.c_size_t * self._WORDS).from_address(address))

    def _states(self) -> dict[int, tuple[int, int]]:
        """Of each thread the address of its structure, and that of its trace function."""
        api = self._ctypes.pythonapi
        found: dict[int, tuple[int, int]] = {}
        state = api.PyInterpreterState_ThreadHead(api.PyInterpreterState_Get())
        while state:
            words = self._words(state)
            found[words[self._thread_word]] = state, words[self._trace_word]
            state = api.PyThreadState_Next(state)
        return found

    def begin(self) -> None:
        """Nothing is common to all threads."""

    def watch(self, ident: int, frame: FrameType | None) -> bool:
        """Have that thread caught; whether it will be."""
        state, function = self._states().get(ident, (0, 0))
        if function == self._address:
            return True
        if not state or function:
            return False
        while frame is not None:
            if not frame.f_trace_opcodes:
                frame.f_trace_opcodes = True
                self._frames.append(frame)
            frame = frame.f_back
        self._set_trace(state, self._address, None)
        return True

    def end(self) -> None:
        """Nothing is left of it."""
        for state, function in self._states().values():
            if function == self._address:
                self._set_trace(state, None, None)
        for frame in self._frames:
            frame.f_trace_opcodes = False
        self._frames.clear()

    def _on_event(self, _object: object, frame: FrameType, _what: int, _argument: object) -> int:
        try:
            self._caught(frame)
        except BaseException as error:  # noqa: BLE001 - nothing can be raised through here
            # What another thread has raised in this one is raised in it once more.
            identifier, kind = self._ctypes.c_ulong(get_ident()), self._ctypes.py_object(type(error))
            self._ctypes.pythonapi.PyThreadState_SetAsyncExc(identifier, kind)
        return 0
