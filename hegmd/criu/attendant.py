"""What stands before and behind a restore: a small program of its own, by path, with the standard library alone.

attendant.py start [--open FD:MODE:PATH]... -- PROGRAM ARGUMENTS...
    Opens those files under those numbers and becomes the program. A unit of the service manager gets no descriptors
    from the daemon; it opens them by the daemon's /proc entries, which lead to the very same files.

attendant.py stay FD
    Becomes the parent of a restored job: says on FD that it was restored, then reaps its children until there are
    none and ends as the first of them did, the job's root. CRIU starts it in its own place (--exec-cmd), so without
    a service manager somebody waits for the job, whether or not a daemon lives, and none of it stays as a zombie.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MODES = {"r": os.O_RDONLY, "a": os.O_WRONLY | os.O_APPEND, "u": os.O_RDWR}


def start(words: list[str]) -> NoReturn:
    """Open what is asked for and become the program that follows."""
    at = words.index("--")
    wanted = [word.split(":", 2) for word in words[:at] if word != "--open"]
    # Opened far above first: none of the numbers may be taken by another of these files.
    opened = [(int(number), _far(os.open(path, MODES[mode]))) for number, mode, path in wanted]
    for number, descriptor in opened:
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    os.execv(words[at + 1], words[at + 1 :])


def _far(descriptor: int) -> int:
    import fcntl

    far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512)
    os.close(descriptor)
    return far


def stay(told: int) -> int:
    """Say that it is there, and wait for whoever is ours; the root's exit status, as a shell would have it."""
    os.chdir("/")
    os.write(told, b"restored")
    os.closerange(3, 1 << 16)
    first: int | None = None
    while True:
        try:
            status = os.waitstatus_to_exitcode(os.wait()[1])
        except ChildProcessError:
            return first or 0
        if first is None:
            first = status if status >= 0 else 128 - status


if __name__ == "__main__":
    if sys.argv[1] == "stay":
        sys.exit(stay(int(sys.argv[2])))
    start(sys.argv[2:])
