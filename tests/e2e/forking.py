"""Has `os.posix_spawn` fork where it would start this Python again, so that a child has imported what its parent has.

For a supervisor that was forked from a Python with PyTorch: each process that it starts took a second to import that.
The child looks as if it had been started: its command and its environment are in /proc, it has only the descriptors
that are inherited, its signals are as at a start, and its search path is that of its environment. If the kernel does
not allow that, it is started.
"""

import ctypes
import fcntl
import gc
import mmap
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any

_PR_SET_MM, _PR_SET_MM_MAP = 35, 14
# Eleven addresses, then none of the auxiliary vector, and no other program file; see prctl(2).
_MAP = struct.Struct("=11QQIi")
# Fields of /proc/PID/stat, counted from the state: code, stack, data, heap, and the command with the environment.
_CODE, _STACK, _DATA, _HEAP, _WORDS = 23, 25, 42, 44, 45
# The words of torchrun before the number of ranks, its other options and the script.
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node")
# Names a pipe. While there is one, a prestarted child reads a line from it before it begins.
READY_GATE = "READY_GATE"
_IGNORED_AT_START = (signal.SIGPIPE, signal.SIGXFSZ)
_start: Any = os.posix_spawn


def spawn_by_forking(run: Callable[[dict], None], frames_of_nobody: set[str]) -> None:
    """From here on. `run` becomes a script; files whose frames are below that script are added to the set."""

    own = ([sys.executable, "-m", "hegmctl"], dict(os.environ))

    def spawn(path: Any, words: Sequence[str], environ: Mapping[str, str], **more: Any) -> int:
        launched, script = {}, list(words[1:])
        if tuple(words[1:4]) == TORCHRUN:
            first = next(index for index, word in enumerate(script) if word.endswith(".py"))
            launched, script = {"ranks": int(words[4])}, script[first:]
        if path != sys.executable or not script or not script[0].endswith(".py") or "file_actions" in more:
            return int(_start(path, words, environ, **more))
        environ = dict(environ)  # it may be that of this process, which is emptied
        try:
            show(words, environ)  # already inherited: the child is visible from its first moment
        except OSError:
            return int(_start(path, words, environ, **more))
        pid = os.fork()
        if pid:
            show(*own)
            return pid
        try:
            _begin(words, environ, more.get("setsigmask", ()))
            frame: FrameType | None = sys._getframe()
            while frame is not None:
                frames_of_nobody.add(frame.f_code.co_filename)
                frame = frame.f_back
            wanted: dict[str, Any] = {
                "argv": script,
                "environment": {},
                "folder": os.getcwd(),
                "record": None,
                "at": None,
            }
            if "HEGM_READY_FD" in environ and os.path.exists(environ.get(READY_GATE, "")):
                with open(environ[READY_GATE], "rb") as gate:
                    gate.readline()
            run({**wanted, **launched, "agent": "HEGM_SOCKET" in environ, "hides_torch": True})
        finally:
            os._exit(127)
        return 0

    os.posix_spawn = spawn  # type: ignore[assignment] # it takes what is used here


def _begin(words: Sequence[str], environ: Mapping[str, str], mask: Iterable[int]) -> None:
    """Be as after a start."""
    gc.freeze()  # the sockets of its parent are not to close what has their numbers now
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if fcntl.fcntl(int(name), fcntl.F_GETFD) & fcntl.FD_CLOEXEC:
                os.close(int(name))
    for number in signal.valid_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            with suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _IGNORED_AT_START:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(environ)
    sys.orig_argv = list(words)
    ours = [path for path in sys.path if path not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *ours]


def show(words: Sequence[str], environ: Mapping[str, str]) -> None:
    """Have the kernel show these in /proc. Raises OSError."""
    command = b"".join(os.fsencode(word) + b"\0" for word in words)
    values = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environ.items())
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # the only kind that is shown
    shown = mmap.mmap(-1, len(command) + len(values) + 1, private)
    shown.write(command + values)
    at = ctypes.addressof(ctypes.c_char.from_buffer(shown))
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b") ")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sbrk.restype = ctypes.c_uint64
    code, data = (list(map(int, fields[first : first + 2])) for first in (_CODE, _DATA))
    heap = int(fields[_HEAP]), libc.sbrk(0)
    middle = at + len(command)
    areas = _MAP.pack(*code, *data, *heap, int(fields[_STACK]), at, middle, middle, middle + len(values), 0, 0, -1)
    kept = ctypes.create_string_buffer(areas)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, kept, ctypes.c_ulong(len(areas)), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), "prctl")
    _shown[:] = [shown]  # what was shown before may go now


_shown: list[mmap.mmap] = []
