"""The only reader of /proc/PID: the kernel's files in, plain values out.

Owns the formats and their failures: a process can end between two reads, be hidden by hidepid, or have any bytes in its
name. Knows no pidfds and stores nothing; the table decides whether two reads are of the same process.

`stat`, `status` and `cgroup` never block. `cmdline` takes the lock of the process's memory map, which a process stuck
in a page fault holds. So it has a function of its own, which only `lookups` calls.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import struct
import time
from typing import NamedTuple

from hegmd.errors import UNAVAILABLE, HegmError

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
#: A process by its pid and its start time.
ProcessKey = tuple[int, int]
COMMAND_MAX_CHARS = 2048

_STAT_MAX_BYTES = 4096
# One hierarchy can have a path of PATH_MAX, and cgroup v1 has a dozen of them.
_CGROUP_MAX_BYTES = 65536
_GONE = (errno.ENOENT, errno.ESRCH)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_ENDED_STATES = ("Z", "X", "x")
_STOPPED_STATES = ("T", "t")
# Fields of /proc/PID/stat, counted from the one after the name.
_STATE, _START_TICKS = 0, 19
_EXIT_CODE = 49
# struct pidfd_info of linux/pidfd.h in its first form: the mask, what is not read here, and the exit code.
_PIDFD_INFO = struct.Struct("=Q52si")
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_GET_INFO = (3 << 30) | (_PIDFD_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_SIGNALS = {int(number): number.name for number in signal.Signals}


class ProcessGone(Exception):
    """/proc has no such process: it ended, or is hidden."""


class Unreadable(Exception):
    """/proc has the process but denies reading it; the text says why."""


class Scarce(Unreadable):
    """It cannot be read now, for lack of descriptors or memory."""

    def __init__(self, why: str, number: int) -> None:
        super().__init__(why)
        self.number = number


class KernelFacts(NamedTuple):
    """The kernel's facts about a process, read without its cooperation."""

    start_ticks: int
    name: str
    uid: int
    cgroup_text: str
    #: True if a signal or a debugger has stopped it.
    stopped: bool = False


def read_kernel_facts(proc_root: str, pid: int) -> KernelFacts:
    """Read them. Raises Vanished, also for a process that has ended and waits to be reaped, and Unreadable."""
    start_ticks, name, state = _read_stat(proc_root, pid)
    uid = _owner(_read(proc_root, pid, "status", _STAT_MAX_BYTES))
    try:
        cgroup_text = _text(_read(proc_root, pid, "cgroup", _CGROUP_MAX_BYTES))
    except (ProcessGone, Unreadable):
        cgroup_text = ""  # a kernel without control groups has no such file
    stopped = state in _STOPPED_STATES
    return KernelFacts(start_ticks=start_ticks, name=name, uid=uid, cgroup_text=cgroup_text, stopped=stopped)


def read_start(proc_root: str, pid: int) -> tuple[int, str]:
    """Start time in ticks since boot, and name. Raises as read_kernel_facts does."""
    return _read_stat(proc_root, pid)[:2]


def _read_stat(proc_root: str, pid: int) -> tuple[int, str, str]:
    """Start time, name, and the kernel's letter for the state."""
    stat = _read(proc_root, pid, "stat", _STAT_MAX_BYTES)
    # The name is in parentheses and may contain any byte, including parentheses and newlines; what follows cannot.
    before, _, after = stat.rpartition(b")")
    fields = after.split()
    if len(fields) <= _START_TICKS:
        raise Unreadable(f"{proc_root}/{pid}/stat has an unknown form")
    state = fields[_STATE].decode("ascii", "replace")
    if state in _ENDED_STATES:
        raise ProcessGone
    return int(fields[_START_TICKS]), _text(before.partition(b"(")[2]), state


def start_ticks_of(pid: int) -> int | None:
    """Return the start time of a process, which identifies it with its pid; None if it does not exist or is hidden.

    Raises HegmError if it cannot be read now, so that a lack of descriptors does not make a process look ended.
    """
    try:
        return read_start("/proc", pid)[0]
    except Scarce as error:
        raise HegmError(
            UNAVAILABLE,
            f"hegmd cannot find out whether process {pid} exists: {error}",
            "try again; if it fails again, raise LimitNOFILE= of hegmd.service, or free memory",
            {"pid": pid},
        ) from None
    except (ProcessGone, Unreadable):
        return None


def how_ended(pid: int, start_ticks: int) -> str | None:
    """Return how a zombie ended, in words; None if it is not a zombie or may not be read."""
    code = _zombie_status(pid, start_ticks)
    return None if code is None else ending_in_words(code)


def ending_in_words(status: int) -> str:
    """Return in words how a process ended, given its exit status, or minus its signal."""
    if status >= 0:
        return f"it ended with exit status {status}"
    return f"it was ended by signal {-status}" + (f" ({_SIGNALS[-status]})" if -status in _SIGNALS else "")


def exit_status(pidfd: int, pid: int, start_ticks: int) -> int | None:
    """Return the exit status of an ended process, or minus the signal that ended it; None if unknown.

    The kernel reports it for a reaped process from Linux 6.15 on (PIDFD_INFO_EXIT), and for a zombie always. The
    process may be reaped between the two checks.
    """
    status = _reaped_status(pidfd)
    if status is None:
        status = _zombie_status(pid, start_ticks)
    return _reaped_status(pidfd) if status is None else status


def _reaped_status(pidfd: int) -> int | None:
    info = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, bytes(52), 0))
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        return None  # an older kernel, or it was not reaped yet
    mask, _, status = _PIDFD_INFO.unpack(info)
    return os.waitstatus_to_exitcode(status) if mask & _PIDFD_INFO_EXIT else None


def _zombie_status(pid: int, start_ticks: int) -> int | None:
    try:
        fields = _read("/proc", pid, "stat", _STAT_MAX_BYTES).rpartition(b")")[2].split()
        state, ticks = fields[_STATE].decode("ascii", "replace"), int(fields[_START_TICKS])
        status = int(fields[_EXIT_CODE])
        may_look = os.geteuid() in (0, _owner(_read("/proc", pid, "status", _STAT_MAX_BYTES)))
    except (ProcessGone, Unreadable, Scarce, IndexError, ValueError):
        return None
    if state not in _ENDED_STATES or ticks != start_ticks or not may_look:
        return None
    return os.waitstatus_to_exitcode(status)


def read_arguments(proc_root: str, pid: int) -> list[str]:
    """Return the words of its command line, of at most 4 * COMMAND_MAX_CHARS bytes; none if there is no command line.

    Blocks and raises as `read_command` does.
    """
    raw = _read(proc_root, pid, "cmdline", 4 * COMMAND_MAX_CHARS).rstrip(b"\0")
    return [_text(word) for word in raw.split(b"\0")] if raw else []


def read_command(proc_root: str, pid: int) -> str:
    """Return the command line, cut at COMMAND_MAX_CHARS; like ps, the name in brackets if there is none.

    May block while the process holds the lock of its memory map. Raises as read_kernel_facts does.
    """
    text = " ".join(read_arguments(proc_root, pid))
    if not text:
        return f"[{read_start(proc_root, pid)[1]}]"
    return text if len(text) <= COMMAND_MAX_CHARS else text[: COMMAND_MAX_CHARS - 1] + "…"


def seconds_since_boot() -> float:
    """Return this moment on the clock that the kernel uses for start times of processes, and that cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_time_utc() -> float:
    """Return the wall clock time of start_ticks 0, by today's clock."""
    return time.time() - seconds_since_boot()


def _read(proc_root: str, pid: int, name: str, size_bytes: int) -> bytes:
    try:
        descriptor = os.open(f"{proc_root}/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in _GONE:
            raise ProcessGone from None
        why = error.strerror or str(error)
        if error.errno in _SCARCE:
            raise Scarce(why, error.errno) from None
        raise Unreadable(why) from None


def _owner(status: bytes) -> int:
    """Return the user whose permission counts for acting on it.

    A process with several user ids (set-user-ID programs, daemons) belongs to root if one of them is root: the smaller
    user must not act on it through hegmd.
    """
    for line in status.splitlines():
        if line.startswith(b"Uid:"):
            real, effective, saved, _filesystem = (int(word) for word in line.split()[1:5])
            return 0 if 0 in (real, effective, saved) else effective
    raise Unreadable("status has no line Uid")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
