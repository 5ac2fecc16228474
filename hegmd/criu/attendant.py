"""What stands before and behind a restore: a small program of its own, by path, with the standard library alone.

attendant.py start [--open FD:MODE:PATH]... -- PROGRAM ARGUMENTS...
    Opens those files under those numbers and becomes the program. A unit of the service manager gets no descriptors
    from the daemon; it opens them by the daemon's /proc entries, which lead to the very same files. Instead of a
    file, mode `t` gives one side of a new terminal, and a process that copies what is said there into the file: a
    job that had a terminal would not be restored without one, and asks it for its size and modes.

attendant.py stay FD PID
    Becomes the parent of a restored job: says on FD that it was restored, then reaps its children until there are
    none and ends as PID did, the job's root. CRIU starts it in its own place (--exec-cmd), so without a service
    manager somebody waits for the job, whether or not a daemon lives, and none of it stays as a zombie.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MODES = {"r": os.O_RDONLY, "a": os.O_WRONLY | os.O_APPEND, "u": os.O_RDWR}


def spare(words: list[str]) -> NoReturn:
    """Become the program, spared as far as the rights go: without them it is as any other."""
    for path, value in (("/proc/self/oom_score_adj", "-1000"), ("/proc/self/autogroup", "-10")):
        with suppress(OSError), open(path, "w") as file:
            file.write(value)
    with suppress(OSError):
        os.nice(-10)
    os.execv(words[1], words[1:])


def start(words: list[str]) -> NoReturn:
    """Open what is asked for and become the program that follows."""
    at = words.index("--")
    wanted = [word.split(":", 2) for word in words[:at] if word != "--open"]
    # Opened far above first: none of the numbers may be taken by another of these files.
    opened = [(int(number), _far(_opened(mode, path))) for number, mode, path in wanted]
    for number, descriptor in opened:
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    os.execv(words[at + 1], words[at + 1 :])


def _opened(mode: str, path: str) -> int:
    if mode != "t":
        return os.open(path, MODES[mode])
    ours, theirs = os.openpty()
    said = os.open(path, MODES["a"])
    if os.fork() == 0:
        os.close(theirs)
        os.setsid()
        _copy(ours, said)
        os._exit(0)
    os.close(ours)
    os.close(said)
    return theirs


def _copy(ours: int, said: int) -> None:
    """Until nobody has the other side any more. Nobody types anything."""
    keep = sorted((ours, said))
    os.closerange(3, keep[0])
    os.closerange(keep[0] + 1, keep[1])
    os.closerange(keep[1] + 1, 1 << 16)
    while True:
        try:
            data = os.read(ours, 65536)
        except OSError:
            return
        while data:
            try:
                data = data[os.write(said, data) :]
            except OSError:  # a full disk: the job's words are lost, and the job is not kept waiting
                data = b""


def _far(descriptor: int) -> int:
    far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512)
    os.close(descriptor)
    return far


def stay(told: int, root: int) -> int:
    """Say that it is there, and wait for whoever is ours; the root's exit status, as a shell would have it."""
    os.chdir("/")
    os.write(told, b"restored")
    os.closerange(3, 1 << 16)
    ended = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return ended
        if pid == root:
            code = os.waitstatus_to_exitcode(status)
            ended = code if code >= 0 else 128 - code


if __name__ == "__main__":
    if sys.argv[1] == "stay":
        sys.exit(stay(int(sys.argv[2]), int(sys.argv[3])))
    if sys.argv[1] == "spare":
        spare(sys.argv[2:])
    start(sys.argv[2:])
