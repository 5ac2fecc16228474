"""Check whether a Python started with the same arguments would read the same script again.

Checked before a training exits. A script from a pipe was read once: the next Python would read nothing, end with 0, and
look as if the training had finished. In a script that was edited while it ran, the loops are not at their lines.
The training is parked meanwhile, and a network file system can hang: files are read in a thread of their own, for a
limited time.
"""

from __future__ import annotations

import dis
import os
import sys
import time
from _thread import allocate_lock, start_new_thread
from binascii import crc32

from ..values.refusals import Refusal
from .position import script_frames
from .reentry import known_by

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import CodeType, FrameType
    from typing import Any

_BY_INPUT = ("<stdin>", "<python-input")
_HINT = "start it from a file: hegmctl run --allow-restart -- python3 FILE"
_PUT_BACK = "put the file back as it was"
_NS = 1_000_000_000
_START_TICKS = 19  # its place after the name in /proc/self/stat
#: Files, each with the time of its last change, its checksum, and the code in it.
_files: dict[str, _File] = {}
#: How long the training is kept for its files. After that it counts as not edited, until its file system answers.
_LOOK_S = 1.0
#: Held by the thread that looks at files, and so by one that hangs.
_looking = allocate_lock()


def refusals() -> Iterator[Refusal]:
    """Yield why the script could not be started again."""
    yield from _unreadable()
    yield from _edited()


def checksums(frames: list[FrameType]) -> dict[str, int]:
    """Return a checksum of each file that these frames run."""
    files = _read(frame.f_code.co_filename for frame in frames)
    return {path: file.checksum for path, file in files.items()}


def edited_since(checked: dict[str, int]) -> list[str]:
    """Return which of these files have changed since `checksums`, in words."""
    changed = [path for path, file in _read(checked).items() if file.checksum != checked[path]]
    return [f"{path} was edited after the state was saved: {_PUT_BACK}" for path in changed]


def _unreadable() -> Iterator[Refusal]:
    frame = _first_frame()
    if frame is not None and frame.f_code.co_filename.startswith(_BY_INPUT):
        yield Refusal("the script came from standard input, which cannot be read again", _HINT)
        return
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None)
    # With a spec it is a module (`-m`) or an archive. A relative path says too little about how it was started.
    if getattr(main, "__spec__", None) is not None or not isinstance(path, str) or not os.path.isabs(path):
        return
    found: list[bool | OSError] = []
    _in_time(lambda: found.append(_is_file(path)))
    is_file = found[0] if found else True
    if isinstance(is_file, OSError):
        yield Refusal(f"the script {path} cannot be read again: {is_file.strerror}", "put it back where it was")
    elif not is_file:
        yield Refusal(f"the script came from {path}, which cannot be read again", _HINT)


def _edited() -> Iterator[Refusal]:
    """Yield the files in which a function under way is not what it was when the file was read.

    Lines after the place may change: a new process finds it all the same.
    """
    began_ns = _began_ns()
    edited: dict[str, None] = {}
    tops = sys._current_frames()  # pyright: ignore[reportPrivateUsage] - documented all the same
    frames = [frame for top in tops.values() for frame in script_frames(top)]
    tops.clear()  # this function's frame is among them, and would keep itself and all variables of every thread
    files = _read(frame.f_code.co_filename for frame in frames)
    for frame in frames:
        path, last = frame.f_code.co_filename, frame.f_lasti
        file = files.get(path)
        if file is not None and file.changed_ns >= began_ns:
            here = _identity_of(frame.f_code, last)
            if not any(_identity_of(code, last) == here for code in file.codes()):
                edited[path] = None
    for path in edited:
        yield Refusal(
            f"{path} was edited after the script began, and a new process would not find its place", _PUT_BACK
        )


class _File:
    """The source code of a file, as last read, and its compiled functions."""

    def __init__(self, path: str, changed_ns: int) -> None:
        """Raises OSError."""
        self.changed_ns = changed_ns
        self._path = path
        with open(path, "rb") as file:
            self._content = file.read()
        self.checksum = crc32(self._content)
        self._codes: list[CodeType] | None = None

    def codes(self) -> list[CodeType]:
        """Return the code of its module and of all functions in it; nothing if it cannot be compiled."""
        if self._codes is None:
            self._codes = []
            try:
                self._codes.append(compile(self._content, self._path, "exec", dont_inherit=True))
            except (ValueError, SyntaxError):
                pass
            for code in self._codes:
                self._codes += [inner for inner in code.co_consts if isinstance(inner, type(code))]
        return self._codes


def _read(paths: Iterable[str]) -> dict[str, _File]:
    """Return those of the files that have source code and can be read; as last read, if they cannot be in time."""
    wanted = [path for path in dict.fromkeys(paths) if os.path.isabs(path) and path.endswith((".py", ".pyw"))]
    found: dict[str, _File] = {}

    def look() -> None:
        for path in wanted:
            try:
                changed_ns = os.stat(path).st_mtime_ns
                known = _files.get(path)
                found[path] = known if known and known.changed_ns == changed_ns else _File(path, changed_ns)
            except OSError:
                pass

    if not _in_time(look):
        return {path: _files[path] for path in wanted if path in _files}
    _files.update(found)
    return found


def _is_file(path: str) -> bool | OSError:
    try:
        os.stat(path)
    except OSError as error:
        return error
    return os.path.isfile(path)


def _in_time(look: Callable[[], object]) -> bool:
    """Have a thread look. Return False if it takes too long, or if an earlier one has not come back."""
    if not _looking.acquire(False):
        return False
    over = allocate_lock()
    over.acquire()

    def live() -> None:
        try:
            look()
        finally:
            _looking.release()
            over.release()

    try:
        start_new_thread(live, ())
    except RuntimeError:  # no more threads are allowed
        live()
    return over.acquire(timeout=_LOOK_S)


def _identity_of(code: CodeType, last: int) -> list[Any]:
    """Return what identifies a function and the lines of its instructions up to the one at that offset."""
    return [*known_by(code).values(), [found for found in dis.findlinestarts(code) if found[0] <= last]]


def _began_ns() -> int:
    """Return when this process began, as files tell time."""
    with open("/proc/self/stat", "rb") as file:
        ticks = int(file.read().rpartition(b")")[2].split()[_START_TICKS])
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return booted_ns + ticks * _NS // os.sysconf("SC_CLK_TCK")


def _first_frame() -> FrameType | None:
    """Return the main thread's first frame."""
    threading = sys.modules.get("threading")
    if threading is None:
        return None
    # Not all frames in a variable: this function would keep itself and all variables of every thread.
    ident = threading.main_thread().ident
    frame = sys._current_frames().get(ident)  # pyright: ignore[reportPrivateUsage] - documented all the same
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame
