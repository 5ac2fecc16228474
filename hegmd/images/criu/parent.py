"""The parent of CRIU and of a restored job: a separate program, run by path, with the standard library alone.

Longer than 400 lines because it is one file that is run by its path, and imports nothing of ours.

parent.py start [WISHES] -- PROGRAM ARGUMENTS...
    Applies the wishes and becomes the program.

parent.py unit PID_FILE PID [WISHES] -- PROGRAM ARGUMENTS...
    The same, and when the program has succeeded, tells the service manager the main process of the unit, which the
    program leaves behind: CRIU itself, with a user's rights, could not write there.

parent.py tend FD PID [WISHES] -- PROGRAM ARGUMENTS...
    The same, and stays as the parent of what the program leaves behind: without a service manager, a restored job
    needs a parent that reaps it, whether or not a daemon lives. Reports the program's success on FD, reaps all
    processes until none is left, and exits like PID, the job's root. If the program fails, all its descendants are
    killed: as their reaper it knows them, while a pid alone could be another process by then.
    The program is killed with it: its restored processes would belong to no one.
    On SIGTERM before that, the program has some time to finish, since CRIU leaves files behind when it is killed, and
    then the same is done. SIGUSR1 does so at any time, and so does a closed FD.

In both, the program is killed if PID or one of --ranks has ended and the program does not: CRIU can wait for a killed
process for ever.

The wishes, each applied before the program starts:

--spare
    The kernel's OOM killer does not choose it, and it has a higher priority: CRIU works inside the job's processes
    during a dump, and killing it there can kill them.
--ranks PID,PID
    These processes do not end by themselves either, while the program runs.
--open FD:MODE:PATH
    Opens that file as that descriptor. A unit of the service manager gets no descriptors from the daemon; they are
    opened by the daemon's /proc entries, which lead to the same files. Mode `t` opens one end of a new terminal
    instead, `p` of a pipe and `s` of a socket, with a process that appends its output to the file: a job that had a
    terminal is not restored without one, and asks it for its size and modes; and CRIU reopens a file from its
    beginning, with the flags of the job. Mode `d` is a directory of the daemon, which is given to the program's user
    with its files.
--as UID:GID:GROUPS:CAPABILITIES
    Gives it this user, group, further groups and capabilities, by number, and nothing else. Its limits are raised as
    far as possible, since a restored job keeps those that it had.
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

# A terminal opened for output must not become the controlling terminal.
MODES = {"r": os.O_RDONLY | os.O_NOCTTY, "a": os.O_WRONLY | os.O_APPEND | os.O_NOCTTY, "u": os.O_RDWR | os.O_NOCTTY}
PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 47, 2
CAPABILITY_VERSION = 0x20080522  # the third, with two words a set
LIMITS = 16  # the number of limits on Linux
# A processor's tiles (AMX), for which every program has to ask: arch/x86/kernel/fpu/xstate.c of Linux, from 5.16 on.
ARCH_PRCTL, ARCH_GET_XCOMP_SUPP, ARCH_REQ_XCOMP_PERM, TILES = 158, 0x1021, 0x1023, 18
PTRACE_TRACEME, PTRACE_PEEKTEXT, PTRACE_POKETEXT, PTRACE_CONT = 0, 1, 4, 7
PTRACE_SINGLESTEP, PTRACE_GETREGS, PTRACE_SETREGS = 9, 12, 13
# The places of those registers in what PTRACE_GETREGS gives.
REGISTERS, RAX, RSI, RDI, ORIG_RAX, RIP = 27, 10, 13, 14, 15, 16
SYSCALL = 0x050F
PTRACE = 101
WORD = (1 << 64) - 1
ASKED_GRACE_S = 20
# CRIU is killed if it still runs this long after the root or a rank of the job has ended. The root gets longer, because
# it may end by itself right after its restore. This program then exits with JOB_ENDED.
ROOT_GRACE_S, RANK_GRACE_S = 20.0, 2.0
JOB_ENDED = 121
_AGAIN_S = 0.05
_NOBODY = 65534


def start(words: list[str], parent: int | None = None) -> NoReturn:
    """See to the wishes and become the program that follows, which ends with that parent if one is named."""
    at = words.index("--")
    wanted: list[list[str]] = []
    user: str | None = None
    wishes = iter(words[:at])
    for wish in wishes:
        if wish == "--spare":
            _spare()
        elif wish == "--as":
            user = next(wishes)
        elif wish == "--ranks":
            next(wishes)
        else:
            wanted.append(next(wishes).split(":", 2))
    uid = None if user is None else int(user.split(":")[0])
    # Opened far above first: none of the numbers may be taken by another of these files.
    opened = [(int(number), _far(_opened(mode, path, uid))) for number, mode, path in wanted]
    for number, descriptor in opened:
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    if user is not None:
        _become(user)
    # A limit on the size of files is an error to it then, from which it cleans up, and not its end: see
    # hegmd/node/processes/process_set.py.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if parent is not None:
        _end_with(parent)
    os.execv(words[at + 1], words[at + 1 :])


def run_to_end(pid_file: str, root: int, words: list[str]) -> int:
    """See the program to its end, and name the process that is to be looked after; the program's status."""
    program = os.fork()
    if program == 0:
        _be_followed()
        start(words)
    status = _see_through(program, _graces(root, words, ROOT_GRACE_S, RANK_GRACE_S))
    if status == 0:
        fd = os.open(pid_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        os.write(fd, b"%d\n" % root)
        os.close(fd)
    return status


def tend(
    control: int, root: int, words: list[str], root_grace_s: float = ROOT_GRACE_S, rank_grace_s: float = RANK_GRACE_S
) -> int:
    """Run the program and stay with the processes that it leaves. Returns the root's exit status as a shell would."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked: list[int] = []
    signal.signal(signal.SIGALRM, lambda _number, _frame: _end_descendants())  # again and again, once it has begun
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda _number, _frame: asked.append(signal.alarm(ASKED_GRACE_S)))
    attendant, program = os.getpid(), os.fork()
    if program == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        os.close(control)
        _be_followed()
        start(words, attendant)
    status = _see_through(program, _graces(root, words, root_grace_s, rank_grace_s))
    signal.alarm(0)
    if asked or status != 0:
        _end_descendants()
        _reap(root)
        return status or 128 + signal.SIGTERM
    signal.signal(signal.SIGUSR1, lambda _number, _frame: _end_descendants())
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if asked:  # just now
        _end_descendants()
    os.chdir("/")
    try:
        os.write(control, b"restored")
    except BrokenPipeError:  # the daemon has exited, and no other process knows this job
        _end_descendants()
    os.closerange(3, 1 << 16)
    return _reap(root)


def _graces(root: int, words: list[str], root_grace_s: float, rank_grace_s: float) -> dict[int, float]:
    """Return how long each process of the job may have ended while the program still runs."""
    wishes = words[: words.index("--")]
    ranks = wishes[wishes.index("--ranks") + 1].split(",") if "--ranks" in wishes else []
    return {root: root_grace_s, **{int(rank): rank_grace_s for rank in ranks}}


def _see_through(program: int, graces: dict[int, float]) -> int:
    """Wait for the program to end, and kill it if a process of the job ends long before it. Returns its status."""
    import threading

    ended, was_killed = threading.Event(), threading.Event()
    held = os.pidfd_open(program)

    def watch() -> None:
        looks, has_ended = dict.fromkeys(graces, 0), Ends()
        while all(seen < graces[pid] / pause_s for pid, seen in looks.items()) and not ended.wait(pause_s):
            looks = {pid: seen + 1 if has_ended(pid) else 0 for pid, seen in looks.items()}
        if not ended.is_set():
            was_killed.set()
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(held, signal.SIGKILL)

    pause_s = min(graces.values()) / 10
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    status = _status(_follow(program))
    ended.set()
    watcher.join()
    os.close(held)
    return JOB_ENDED if was_killed.is_set() and status != 0 else status


class Ends:
    """Tells whether a process has ended: a zombie, or one that was seen and is gone, since its parent has reaped it."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def __call__(self, pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state = file.read().rpartition(b")")[2].split()[0]
        except OSError:  # CRIU has not made it yet, unless it was seen
            return pid in self._seen
        self._seen.add(pid)
        return state == b"Z"


def _reap(root: int) -> int:
    """Reap processes until none is left. Returns the status of the root."""
    ended = 0
    while True:
        try:
            pid, status = os.wait()
        except ChildProcessError:
            signal.signal(signal.SIGALRM, signal.SIG_IGN)  # a signal during Python's exit would kill this process
            return ended
        if pid == root:
            ended = _status(status)


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _end_descendants() -> None:
    """Stop all descendants first, so that none can create an unseen one; then kill them.

    A process that was stopped while it created another one may have it a moment later. So SIGALRM repeats this until no
    descendant is left.
    """
    seen: set[int] = set()
    while fresh := _descendants() - seen:
        seen |= fresh
        _signal(fresh, signal.SIGSTOP)
    _signal(seen, signal.SIGKILL)
    signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


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


# ---- what a processor grants to those who ask ------------------------------------------------------------------------


def _has_tiles() -> bool:
    """True if a job may have requested the processor's tiles, and we can have a program request them.

    Without CAP_SYS_PTRACE it is False: a traced program would get no rights from its file.
    """
    import ctypes

    granted = ctypes.c_uint64()
    if os.geteuid() != 0 or os.uname().machine != "x86_64":
        return False
    failed = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_GET_XCOMP_SUPP, ctypes.byref(granted))
    return failed == 0 and bool(granted.value >> TILES & 1)


def _be_followed() -> None:
    """Have our parent see each program that we become before its first instruction."""
    import ctypes

    if _has_tiles():
        ctypes.CDLL(None).ptrace(PTRACE_TRACEME, 0, None, None)


def _follow(program: int) -> int:
    """Wait for the program to end, and have it request the processor's tiles, since CRIU does not. Returns its status.

    A fork inherits that permission, which is how CRIU recreates a job; an exec drops it, which is how CRIU is started.
    A job with the permission would die of SIGILL at its next such instruction; PyTorch requests it at its first
    bfloat16 product on a CPU. A job without it is not harmed, except that an alternative signal stack too small for
    tiles is dropped by Linux.
    """
    while True:
        status = os.waitpid(program, 0)[1]
        if not os.WIFSTOPPED(status):
            return status
        number = os.WSTOPSIG(status)
        if number == signal.SIGTRAP:  # it has just become a program
            number = 0
            if (ended := _have_it_ask(program)) is not None:
                return ended
        _trace(PTRACE_CONT, program, 0, number)


def _have_it_ask(program: int) -> int | None:
    """Have it make one call of the system, and leave no trace of that; its status if it has ended by then."""
    import ctypes

    as_they_were = (ctypes.c_ulong * REGISTERS)()
    _trace(PTRACE_GETREGS, program, 0, ctypes.addressof(as_they_were))
    asking = (ctypes.c_ulong * REGISTERS)(*as_they_were)
    asking[RAX], asking[RDI], asking[RSI], asking[ORIG_RAX] = ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, TILES, WORD
    at = asking[RIP]
    code = ctypes.c_ulong()
    ctypes.CDLL(None).syscall(PTRACE, PTRACE_PEEKTEXT, program, ctypes.c_ulong(at), ctypes.byref(code))
    _trace(PTRACE_POKETEXT, program, at, code.value & ~0xFFFF | SYSCALL)
    _trace(PTRACE_SETREGS, program, 0, ctypes.addressof(asking))
    came: list[int] = []
    while not came or came[-1] != signal.SIGTRAP:
        _trace(PTRACE_SINGLESTEP, program, 0, 0)
        status = os.waitpid(program, 0)[1]
        if not os.WIFSTOPPED(status):
            return status
        came.append(os.WSTOPSIG(status))
    _trace(PTRACE_POKETEXT, program, at, code.value)
    _trace(PTRACE_SETREGS, program, 0, ctypes.addressof(as_they_were))
    for number in came[:-1]:  # meant for the program
        os.kill(program, number)
    return None


def _trace(request: int, program: int, address: int, data: int) -> None:
    import ctypes

    ctypes.CDLL(None).ptrace(request, program, ctypes.c_void_p(address), ctypes.c_void_p(data))


# ---- opening files --------------------------------------------------------------------------------------------------


def _opened(mode: str, path: str, uid: int | None) -> int:
    if mode == "d":
        return _handed_over(os.open(path, os.O_RDONLY | os.O_DIRECTORY), uid)
    if mode in MODES:
        return os.open(path, MODES[mode])
    own_end, child_end = _ENDS[mode]()
    log = os.open(path, MODES["a"])
    if os.fork() == 0:
        os.close(child_end)
        os.setsid()
        # The job's last output must still be copied when its unit is stopped because it has ended.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if uid is not None:  # it needs no more rights, and must give none to the job
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(uid, uid, uid)
        _copy(own_end, log)
        os._exit(0)
    os.close(own_end)
    os.close(log)
    if uid is not None:
        os.fchown(child_end, uid, -1)  # CRIU opens it again
    return child_end


def _handed_over(folder: int, uid: int | None) -> int:
    """Give that directory to the user and return it. It is inside one of the daemon's own, so no other user can reach
    it.
    """
    if uid is not None:
        os.fchown(folder, uid, -1)
        for name in os.listdir(folder):
            os.chown(name, uid, -1, dir_fd=folder, follow_symlinks=False)
    return folder


def _socketpair() -> tuple[int, int]:
    import socket

    own_end, child_end = socket.socketpair()
    return own_end.detach(), child_end.detach()


# The functions that return our end and the job's end of a copied stream.
_ENDS = {"t": os.openpty, "p": os.pipe, "s": _socketpair}


def _copy(own_end: int, log: int) -> None:
    """Copy the job's output to the file until the last writer closes it. Nothing is written back."""
    keep = sorted((own_end, log))
    os.closerange(3, keep[0])
    os.closerange(keep[0] + 1, keep[1])
    os.closerange(keep[1] + 1, 1 << 16)
    while True:
        try:
            data = os.read(own_end, 65536)
        except OSError:
            return
        if not data:
            return
        while data:
            try:
                data = data[os.write(log, data) :]
            except OSError:  # a full disk: the job's words are lost, and the job is not kept waiting
                data = b""


def _far(descriptor: int) -> int:
    far = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 512)
    os.close(descriptor)
    return far


# ---- with which rights -----------------------------------------------------------------------------------------------


def _spare() -> None:
    """Raise the priority and spare it from the OOM killer, as far as its rights allow."""
    for path, value in (("/proc/self/oom_score_adj", "-1000"), ("/proc/self/autogroup", "-10")):
        with suppress(OSError), open(path, "w") as file:
            file.write(value)
    with suppress(OSError):
        os.nice(-10)


def _become(text: str) -> None:
    """Have that user's rights and those capabilities, and keep the latter through exec. Raises OSError."""
    import ctypes
    import struct

    uid, gid, groups, capabilities = text.split(":")
    wanted_capabilities = [int(each) for each in capabilities.split(",")]
    _raise_limits()
    libc = ctypes.CDLL(None, use_errno=True)

    def ask(done: int) -> None:
        if done != 0:
            raise OSError(ctypes.get_errno(), f"cannot become {text}")

    ask(libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([int(each) for each in groups.split(",") if each])
    os.setresgid(int(gid), int(gid), int(gid))
    os.setresuid(int(uid), int(uid), int(uid))
    low, high = (sum(1 << (each % 32) for each in wanted_capabilities if each // 32 == word) for word in (0, 1))
    ask(libc.capset(struct.pack("=Ii", CAPABILITY_VERSION, 0), struct.pack("=6I", low, low, low, high, high, high)))
    for each in wanted_capabilities:
        ask(libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, each, 0, 0))
    ask(libc.prctl(PR_SET_KEEPCAPS, 0, 0, 0, 0))


def _end_with(parent: int) -> None:
    """Have the kernel end us with that parent. Asked for last: who becomes another user is let off it."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended just before
        os._exit(128 + signal.SIGKILL)


def _raise_limits() -> None:
    import resource

    most = {resource.RLIMIT_NOFILE: 1 << 20}  # the default of fs.nr_open
    with suppress(OSError, ValueError), open("/proc/sys/fs/nr_open") as file:
        most[resource.RLIMIT_NOFILE] = int(file.read())
    for which in range(LIMITS):
        with suppress(OSError, ValueError):
            resource.setrlimit(which, (resource.getrlimit(which)[0], most.get(which, resource.RLIM_INFINITY)))


if __name__ == "__main__":
    if sys.argv[1] == "tend":
        sys.exit(tend(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
    if sys.argv[1] == "unit":
        sys.exit(run_to_end(sys.argv[2], int(sys.argv[3]), sys.argv[4:]))
    start(sys.argv[2:])
