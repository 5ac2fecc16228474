"""The identity of the process with a pid: identity is pid and start time together, held by a pidfd.

Owns one descriptor for each process that a driver reports, and its facts from /proc. Used from one thread at a time.
Never reads what could block on another process (see `lookups`).

The pidfd is opened first, then /proc is read, then the pidfd shows whether the process still lives: if so, all that was
read is of one process. Later one poll over all descriptors shows every end, without /proc, and a reused pid is a new
process. Without a pidfd (an old kernel, a seccomp filter, too few descriptors, another namespace's /proc), the start
time is read again at every refresh, and the note says so.

A process changes under the same identity: exec changes name and command, and a job moves to its control group. So each
refresh reads a limited share of the known ones again.
"""

from __future__ import annotations

import enum
import errno
import os
import resource
import select
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hegmd.node.processes.lookups import Lookups
from hegmd.node.processes.procfs import (
    TICKS_PER_S,
    KernelFacts,
    ProcessGone,
    Unreadable,
    boot_time_utc,
    read_kernel_facts,
)
from hegmd.node.workloads import workload_of
from hegmd.protocol.snapshots import Workload
from hegmd.system.descriptors import is_readable

REREAD_PER_REFRESH = 32
# The inode of the first pid namespace is a constant of the kernel: PROC_PID_INIT_INO in include/linux/proc_ns.h.
FIRST_PID_NAMESPACE = 0xEFFFFFFC
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")

_GONE = (errno.ESRCH, errno.EINVAL, errno.ENOENT)

NOTE_ENDED = "it has ended, and the driver still lists it"
NOTE_HELD = "it has ended and hegmd keeps its state; run: hegmctl ops"
NOTE_OTHER_NAMESPACE = "it runs in a pid namespace that hegmd cannot see into; run hegmd in the node's own"
NOTE_HIDDEN = "/proc hides it from hegmd's user; run hegmd as root, or in the group of the mount option gid="
NOTE_GONE_OR_HIDDEN = "it is not in /proc: it has ended, or is hidden from hegmd's user"
NOTE_NO_PID = "the driver does not report its pid"


class Visibility(enum.Enum):
    """The visibility of a process from here."""

    VISIBLE = enum.auto()
    ENDED = enum.auto()
    UNSEEN = enum.auto()


class ProcessFacts(NamedTuple):
    """The known facts about the process of a pid; None for the rest, with a note that gives the reason."""

    pid: int
    presence: Visibility
    start_ticks: int | None = None
    started_utc: float | None = None
    uid: int | None = None
    name: str | None = None
    workload: Workload | None = None
    note: str | None = None


@dataclass(slots=True, eq=False, repr=False)
class _Entry:
    """A pid that a driver reports: its facts, its pidfd, and the text of its control groups."""

    facts: ProcessFacts
    pidfd: int | None = None
    cgroup_text: str = ""


class ProcessTable:
    """The processes of the drivers' pids. Call `refresh` from one thread at a time; `close` closes the descriptors."""

    def __init__(
        self,
        proc_root: str = "/proc",
        *,
        open_pidfd: Callable[[int], int] = os.pidfd_open,
        pidfd_limit: int | None = None,
        lookups: Lookups | None = None,
    ) -> None:
        self._proc_root = proc_root
        self._open_pidfd = open_pidfd
        self._pidfd_limit = pidfd_limit
        self._max_pidfds = 0
        self._entries: dict[int, _Entry] = {}
        self._pid_of: dict[int, int] = {}
        self._poll: select.epoll | None = None
        self._next_reread = 0
        self._root_is_ours = _is_own_proc(proc_root)
        self.in_first_namespace = _is_first_namespace(proc_root)
        #: Processes that the last refresh removed without knowing them to have ended.
        self.departed: frozenset[int] = frozenset()
        #: Slow facts: command lines and users' names. Read in another thread.
        self.lookups = Lookups(proc_root) if lookups is None else lookups

    def refresh(self, pids: Iterable[int], unproven: frozenset[int] = frozenset()) -> Mapping[int, ProcessFacts]:
        """Return what is known about exactly these pids now; closes descriptors of others.

        An object that is the same as before has not changed. `unproven` are pids of a driver that may count in another
        pid namespace: outside the first namespace they count only for processes with an open GPU device.
        """
        requested = set(pids)
        self._max_pidfds = _half_of_the_descriptors() if self._pidfd_limit is None else self._pidfd_limit
        self._mark_ended()
        leavers = self._entries.keys() - requested
        self.departed = frozenset(pid for pid in leavers if self._entries[pid].facts.presence is not Visibility.ENDED)
        for pid in leavers:
            self._drop(pid)
        doubted: frozenset[int] = frozenset() if self.in_first_namespace else unproven
        for pid in requested:
            entry = self._entries.get(pid)
            if entry is None or entry.pidfd is None:
                self._admit(pid, entry, pid in doubted)
        self._read_some_again(doubted)
        return {pid: entry.facts for pid, entry in self._entries.items()}

    @property
    def pidfd_count(self) -> int:
        """Return how many processes are held by a pidfd."""
        return len(self._pid_of)

    def close(self) -> None:
        """Close everything. The table can be used again afterwards."""
        for pid in tuple(self._entries):
            self._drop(pid)
        if self._poll is not None:
            self._poll.close()
            self._poll = None

    def _mark_ended(self) -> None:
        if self._poll is None or not self._pid_of:
            return
        for pidfd, _ in self._poll.poll(0, len(self._pid_of)):
            pid = self._pid_of[pidfd]
            entry = self._entries[pid]
            self._release(entry)
            entry.facts = ProcessFacts(pid=pid, presence=Visibility.ENDED, note=NOTE_ENDED)

    def _admit(self, pid: int, known: _Entry | None, doubted: bool) -> None:
        """Find the process of a pid that is new, whose process just ended, or that has no pidfd."""
        if pid <= 0:
            self._enter(pid, known, _unseen(pid, NOTE_NO_PID))
            return
        pidfd, why_none = self._hold(pid)
        cgroup_text = ""
        try:
            if pidfd is None and why_none is None:
                raise ProcessGone
            kernel_facts = read_kernel_facts(self._proc_root, pid)
            if pidfd is not None and is_readable(pidfd):
                raise ProcessGone
        except ProcessGone:
            facts = self._absent(pid, known, pidfd, why_none)
        except Unreadable as reason:
            facts = _unseen(pid, f"/proc/{pid} cannot be read: {reason}")
        else:
            if doubted and not _holds_gpu_device(self._proc_root, pid):
                facts = _unseen(pid, NOTE_OTHER_NAMESPACE)
            else:
                facts, cgroup_text = self._visible(pid, kernel_facts, known, why_none)
        self._enter(pid, known, facts, cgroup_text, pidfd)

    def _hold(self, pid: int) -> tuple[int | None, str | None]:
        """Return a pidfd; or None with the reason; or None twice if the process does not exist here."""
        if not self._root_is_ours:
            return None, "this /proc belongs to another pid namespace"
        if len(self._pid_of) >= self._max_pidfds:
            return None, "hegmd's limit of open files is reached, raise LimitNOFILE="
        try:
            return self._open_pidfd(pid), None
        except OSError as error:
            if error.errno in _GONE:
                return None, None
            return None, f"a pidfd cannot be opened ({error.strerror})"

    def _absent(self, pid: int, known: _Entry | None, pidfd: int | None, why_no_pidfd: str | None) -> ProcessFacts:
        """Return the facts of a pid that /proc lacks: it ended, is hidden, or was never in this namespace."""
        if pidfd is not None and not is_readable(pidfd):
            return _unseen(pid, NOTE_HIDDEN)
        seen_before = known is not None and known.facts.presence is not Visibility.UNSEEN
        if pidfd is not None or seen_before or (self.in_first_namespace and why_no_pidfd is None):
            return ProcessFacts(pid=pid, presence=Visibility.ENDED, note=NOTE_ENDED)
        return _unseen(pid, NOTE_GONE_OR_HIDDEN if self.in_first_namespace else NOTE_OTHER_NAMESPACE)

    def _visible(
        self, pid: int, kernel_facts: KernelFacts, known: _Entry | None, why_no_pidfd: str | None
    ) -> tuple[ProcessFacts, str]:
        """Return the facts of a process that was read, and the text of its control groups."""
        note = _note(pid, kernel_facts, why_no_pidfd)
        before = None if known is None else known.facts
        if before is not None and before.start_ticks == kernel_facts.start_ticks:
            started_utc = before.started_utc
        else:
            started_utc = round(boot_time_utc() + kernel_facts.start_ticks / TICKS_PER_S, 2)
        if known is not None and before is not None and known.cgroup_text == kernel_facts.cgroup_text:
            workload = before.workload
        else:
            workload = workload_of(kernel_facts.cgroup_text)
        facts = ProcessFacts(
            pid=pid,
            presence=Visibility.VISIBLE,
            start_ticks=kernel_facts.start_ticks,
            started_utc=started_utc,
            uid=kernel_facts.uid,
            name=kernel_facts.name,
            workload=workload,
            note=note,
        )
        return facts, kernel_facts.cgroup_text

    def _enter(
        self, pid: int, known: _Entry | None, facts: ProcessFacts, cgroup_text: str = "", pidfd: int | None = None
    ) -> None:
        """Store the facts. The descriptor is closed unless it holds a living process."""
        if pidfd is not None and facts.presence is Visibility.ENDED:
            os.close(pidfd)
            pidfd = None
        if known is None:
            known = self._entries[pid] = _Entry(facts)
        elif known.facts != facts:
            known.facts = facts
        known.cgroup_text = cgroup_text
        known.pidfd = pidfd
        if pidfd is not None:
            if self._poll is None:
                self._poll = select.epoll()
            self._poll.register(pidfd, select.EPOLLIN)
            self._pid_of[pidfd] = pid

    def _read_some_again(self, doubted: frozenset[int]) -> None:
        """Read the next few with a pidfd again, in turn; the others were read in this refresh."""
        held = list(self._pid_of.values())
        first = self._next_reread if self._next_reread < len(held) else 0
        for pid in held[first : first + REREAD_PER_REFRESH]:
            self._read_again(pid, self._entries[pid], pid in doubted)
        self._next_reread = first + REREAD_PER_REFRESH

    def _read_again(self, pid: int, entry: _Entry, doubted: bool) -> None:
        """Read a process again. The result counts only if it still lives afterwards."""
        try:
            kernel_facts = read_kernel_facts(self._proc_root, pid)
        except (ProcessGone, Unreadable):
            return  # it is about to end, which the next refresh sees; or it is as hidden as before
        if entry.pidfd is None or is_readable(entry.pidfd):
            return
        if doubted and entry.facts.presence is Visibility.UNSEEN and not _holds_gpu_device(self._proc_root, pid):
            return
        facts, entry.cgroup_text = self._visible(pid, kernel_facts, entry, None)
        if facts != entry.facts:
            entry.facts = facts

    def _drop(self, pid: int) -> None:
        self._release(self._entries.pop(pid))

    def _release(self, entry: _Entry) -> None:
        pidfd, entry.pidfd = entry.pidfd, None
        if pidfd is not None:
            del self._pid_of[pidfd]
            if self._poll is not None:
                self._poll.unregister(pidfd)
            os.close(pidfd)


def _note(pid: int, kernel_facts: KernelFacts, why_no_pidfd: str | None) -> str | None:
    """Return the notes about a visible process."""
    notes: list[str] = []
    if kernel_facts.stopped:
        notes.append(f"it is stopped by a signal or a debugger; run: kill -CONT {pid}")
    if why_no_pidfd is not None:
        notes.append(f"identified by its start time only: {why_no_pidfd}")
    return "; ".join(notes) or None


def _unseen(pid: int, note: str) -> ProcessFacts:
    return ProcessFacts(pid=pid, presence=Visibility.UNSEEN, note=note)


def _holds_gpu_device(proc_root: str, pid: int) -> bool:
    """Return True if the process has a GPU device open, as far as that is readable."""
    try:
        descriptors = os.listdir(f"{proc_root}/{pid}/fd")
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.readlink(f"{proc_root}/{pid}/fd/{descriptor}").startswith(_GPU_DEVICES):
                return True
        except OSError:
            continue
    return False


def _is_own_proc(proc_root: str) -> bool:
    """Return True if the pids in this /proc are those of our own pid namespace, as pidfds are."""
    try:
        return os.readlink(f"{proc_root}/self") == str(os.getpid())
    except OSError:
        return False


def _is_first_namespace(proc_root: str) -> bool:
    try:
        return os.stat(f"{proc_root}/self/ns/pid").st_ino == FIRST_PID_NAMESPACE
    except OSError:
        return False


def _half_of_the_descriptors() -> int:
    """Return how many pidfds leave half of the descriptors for clients and for reading /proc."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 30 if soft == resource.RLIM_INFINITY else soft // 2
