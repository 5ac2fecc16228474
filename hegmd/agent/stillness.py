"""Whether every other thread of the process is at rest, so that storages can be taken from under all of them.

PyTorch works on a storage without holding the interpreter, so a thread that is in the middle of an operation cannot be
told from the outside; what can be seen is where each thread's Python stands. A thread is at rest if it is parked at the
gate, or waits inside one of the standard library's waiting places. One that trains has to be parked, and one inside a
loader's iterator is about to get a batch: neither is at rest in a wait. Anything else counts as busy, a thread in a
`sleep` of its own included: what it does when it wakes is not known, and a refusal harms nobody. The threads of
PyTorch's compiler are known: they talk with its worker processes, of source code and never of storages.
"""

from __future__ import annotations

import os
import sys

from .quiesce import stand

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# Relative to the standard library: where its threads wait.
_WAITING_FILES = frozenset(
    ("queue.py", "selectors.py", "socket.py", "socketserver.py", "ssl.py", "subprocess.py", "threading.py")
)
_WAITING_FOLDERS = ("asyncio/", "concurrent/futures/", "multiprocessing/")
_ITERATOR_FILE = "/torch/utils/data/dataloader.py"
_COMPILER_FOLDER = "/torch/_inductor/compile_worker/"
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + "/"
_OURS = os.path.dirname(os.path.abspath(__file__)) + "/"


def busy_thread(parked: frozenset[int], trainers: frozenset[int]) -> str | None:
    """One thread that is not at rest, in words, or None when all are."""
    return next(busy_threads(parked, trainers), None)


def busy_threads(parked: frozenset[int], trainers: frozenset[int]) -> Iterator[str]:
    """Every thread that is not at rest, in words."""
    for ident, frame in sys._current_frames().items():  # pyright: ignore[reportPrivateUsage] - documented all the same
        if ident in parked:
            if frame.f_code is not stand.__code__:  # the handler of a signal may still run in it
                yield f"{_name_of(ident)} has not come to a stand"
        elif _is_ours(frame):
            continue
        elif ident in trainers:
            yield f"{_name_of(ident)}, which trains too, is at {_place(frame)}"
        elif not _is_at_rest(frame) and _COMPILER_FOLDER not in frame.f_code.co_filename:
            yield f"{_name_of(ident)} is at {_place(frame)}"


def _is_ours(frame: FrameType) -> bool:
    """Whether the thread began in the agent."""
    first: FrameType = frame
    while first.f_back is not None:
        first = first.f_back
    return first.f_code.co_filename.startswith(_OURS)


def _is_at_rest(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if not path.startswith(_STANDARD_LIBRARY):
        return False
    within = path[len(_STANDARD_LIBRARY) :]
    if within not in _WAITING_FILES and not within.startswith(_WAITING_FOLDERS):
        return False
    outer: FrameType | None = frame
    while outer is not None:
        if outer.f_code.co_filename.endswith(_ITERATOR_FILE) and outer.f_code.co_name == "__next__":
            return False
        outer = outer.f_back
    return True


def _name_of(ident: int) -> str:
    threading = sys.modules.get("threading")
    known = getattr(threading, "_active", {}).get(ident)
    return f"thread {known.name}" if known is not None else f"thread {ident}"


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
