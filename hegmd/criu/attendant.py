"""What stands before and behind CRIU: a small program of its own, by path, with the standard library alone.

attendant.py spare -- PROGRAM ARGUMENTS...
    Becomes the program, as one that the kernel does not choose when memory is short, and that gets its turn before
    others: CRIU in the middle of a dump works inside the job's processes, and its end there can be theirs.

attendant.py start [--open FD:MODE:PATH]... -- PROGRAM ARGUMENTS...
    Opens those files under those numbers and becomes the program. A unit of the service manager gets no descriptors
    from the daemon; it opens them by the daemon's /proc entries, which lead to the very same files. Instead of a
    file, mode `t` gives one side of a new terminal, and a process that copies what is said there into the file: a
    job that had a terminal would not be restored without one, and asks it for its size and modes.

attendant.py tend FD PID [--open FD:MODE:PATH]... -- PROGRAM ARGUMENTS...
    The same, and stays as the parent of what the program leaves behind: without a service manager somebody has to
    wait for a restored job, whether or not a daemon lives. Says on FD that the program has succeeded, reaps whoever
    ends, until nobody is left, and ends as PID did, the job's root. If the program fails, everybody who came of it
    is ended: being their nearest reaper, it knows who they are, where a number alone could by then be a stranger's.
    On SIGTERM before that, the program has some time to come to its end, since CRIU leaves files behind when it is
    cut off, and then the same is done.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

MODES = {"r": os.O_RDONLY, "a": os.O_WRONLY | os.O_APPEND, "u": os.O_RDWR}
PR_SET_CHILD_SUBREAPER = 36
ASKED_GRACE_S = 20


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


def tend(told: int, root: int, words: list[str]) -> int:
    """See the program through and stay with what it leaves; the root's exit status, as a shell would have it."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []
    signal.signal(signal.SIGALRM, lambda _number, _frame: _end_descendants())
    signal.signal(signal.SIGTERM, lambda _number, _frame: asked.append(signal.alarm(ASKED_GRACE_S)))
    program = os.fork()
    if program == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(told)
        start(words)
    status = _status(os.waitpid(program, 0)[1])
    signal.alarm(0)
    if asked or status != 0:
        _end_descendants()
        _reap(root)
        return status or 128 + signal.SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir("/")
    os.write(told, b"restored")
    os.closerange(3, 1 << 16)
    return _reap(root)


def _reap(root: int) -> int:
    """Until there is nobody left; how the root ended."""
    ended = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            return ended
        if pid == root:
            ended = _status(status)


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    """Stop them first, so that none can make another that is not seen; then end them all."""
    seen: set[int] = set()
    while fresh := _descendants() - seen:
        seen |= fresh
        _signal(fresh, signal.SIGSTOP)
    _signal(seen, signal.SIGKILL)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parents[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {os.getpid()}} - found:
        found |= more
    return found


# ---- what is opened -------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    if sys.argv[1] == "spare":
        spare(sys.argv[2:])
    if sys.argv[1] == "tend":
        sys.exit(tend(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
    start(sys.argv[2:])
