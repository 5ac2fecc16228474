"""The daemon's own memory: what a burst of work used goes back to the node when the burst is over.

Python keeps small objects in arenas of 1 MiB, and frees an arena only when its last object is gone. After 2,000
connections had come and gone, 16 MiB of empty pages stayed in arenas that each held a few old objects, for as long as
the daemon lived (CPython 3.11). The C library gives back every page that is free, wherever it lies, when it is asked to
(`malloc_trim`, glibc). So the daemon has Python take its memory from there, which can be chosen only before Python
starts: the daemon starts itself once more, in the same process.

Imports nothing large, because `hegmd.__main__` runs it before everything else.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from runpy import run_module

# Few arenas of the C library: each thread would otherwise have one, and keep what is free in it.
CHOICES = {"PYTHONMALLOC": "malloc", "MALLOC_ARENA_MAX": "2"}
PROGRAM = "hegmd"
_ISOLATED = {"PYTHONSAFEPATH": "1"}
# So many connections that ended since the last time are a reason to give memory back, and so is so much time.
CONNECTIONS = 100
BETWEEN_S = 5.0
PAUSE_S = 600.0


def main() -> None:
    """The daemon, as it is installed: the program that `python -m hegmd` is, which starts itself again."""
    run_module("hegmd", run_name="__main__")


def start_again_if_useful() -> None:
    """Start this program again in this process if Python then takes memory that can be given back.

    Returns where it cannot, and in the program that was started again, which does not hand the choice to its children.
    """
    again = started_again(
        sys.orig_argv[1:], os.environ, isolated=bool(sys.flags.isolated), ignores=bool(sys.flags.ignore_environment)
    )
    if again is not None and _gives_back():
        try:
            os.execve(sys.executable, [sys.executable, *again[0]], again[1])
        except OSError:
            return  # as good as before: only what a burst used stays
    for name, value in {**CHOICES, **_ISOLATED}.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    if os.path.basename(sys.argv[0]) == PROGRAM:  # the kernel calls a process that was started again after Python
        with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
            comm.write(PROGRAM)


def started_again(
    words: Sequence[str], environ: Mapping[str, str], *, isolated: bool, ignores: bool
) -> tuple[list[str], dict[str, str]] | None:
    """The words after Python's name and the environment to start with; None where the choice was made, or cannot be.

    An isolated Python (`-I`) does not read its choice either. It is started without that option, with nothing in its
    environment that it would have ignored, and with the two parts of `-I` that remain: no path of the user's (`-s`),
    and none of the script's (PYTHONSAFEPATH, Python 3.11).
    """
    if "PYTHONMALLOC" in environ and not ignores:
        return None
    if not ignores:
        return [*words], {**CHOICES, **environ}
    options, *rest = words
    letters = set(options.removeprefix("-"))
    if not isolated or not hasattr(sys.flags, "safe_path") or not options.startswith("-") or letters - set("IB"):
        return None
    kept = {name: value for name, value in environ.items() if not name.startswith("PYTHON")}
    return [f"-s{'B' if 'B' in letters else ''}", *rest], {**kept, **CHOICES, **_ISOLATED}


def _gives_back() -> bool:
    """Whether the C library has `malloc_trim`, and this Python a choice: one without the GIL has none."""
    try:
        return bool(sys.executable) and bool(os.confstr("CS_GNU_LIBC_VERSION")) and "t" not in sys.abiflags
    except (OSError, ValueError):
        return False


class MemoryReturn:
    """Decides when memory is given back: it takes some 20 ms, in which the daemon answers no request."""

    def __init__(self, give_back: Callable[[], object], now: float) -> None:
        self._give_back = give_back
        self._ended = 0
        self._last = now
        self._burst = False

    def look(self, ended: int, now: float) -> None:
        """`ended` is how many connections have ended so far, and `now` a monotonic instant.

        In a burst the first time comes in its middle, when not all is free yet, so another one follows.
        """
        more = ended - self._ended
        paused_s = now - self._last
        due = paused_s >= BETWEEN_S and (self._burst or more >= CONNECTIONS)
        if due or paused_s >= PAUSE_S:
            gc.collect()  # drops Python's lists of spare tuples: thousands of them, each in a page that it keeps
            self._give_back()
            self._burst = more >= CONNECTIONS
            self._ended, self._last = ended, now
