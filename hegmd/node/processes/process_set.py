"""The processes of a job that CRIU has to do with: seen, let go on, or ended, each known by number and start time.

A number alone is nobody: between a look and a signal the process may have ended and another have its number. So signals
go through a pidfd that was opened before the start time was compared.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hegmd.node.processes.procfs import Scarce, Unreadable, Vanished, read_start

__all__ = [
    "DescriptorHolder",
    "ProcessSet",
    "ask",
    "end_all",
    "holders_of",
    "let_go",
    "population_of",
    "wait_for_thread_numbers",
    "wait_until_free",
]

_log = logging.getLogger(__name__)

# One that is told to end does so within half a second; a disk that does not answer keeps it, and it is told of then.
_TOLD_GRACE_S = 30.0
_DUMPER_GRACE_S = 900.0
_END_GRACE_S = 30.0
_REAPED_WITHIN_S = 10.0
_POLL_INTERVAL_S = 0.01


@dataclass(frozen=True, slots=True)
class ProcessSet:
    """Processes by number with their start times; who stood still by a signal when looked at."""

    start_ticks: Mapping[int, int]
    stopped: frozenset[int] = frozenset()


def population_of(pids: Iterable[int]) -> ProcessSet:
    """Those of them that live. Blocks no longer than reading /proc does.

    Raises OSError where that cannot be looked at now: nobody is taken for gone for want of a descriptor.
    """
    ticks: dict[int, int] = {}
    stopped: set[int] = set()
    for pid in pids:
        try:
            ticks[pid] = read_start("/proc", pid)[0]
            if _state(pid) == "T":
                stopped.add(pid)
        except Scarce as error:
            raise OSError(error.number, str(error)) from error
        except (Vanished, Unreadable):
            continue
    return ProcessSet(ticks, frozenset(stopped))


@dataclass(frozen=True, slots=True)
class DescriptorHolder:
    """Who has a number, as its process, its group or its session; a zombie waits for its parent to reap it."""

    number: int
    pid: int
    what: str
    is_zombie: bool


def holders_of(numbers: Iterable[int], proc_root: str = "/proc") -> tuple[DescriptorHolder, ...]:
    """Whoever has one of these numbers now: until nobody does, no process can be made under it again."""
    wanted = frozenset(numbers)
    found: list[DescriptorHolder] = []
    for name in os.listdir(proc_root):
        if not name.isdigit():
            continue
        try:
            fields = Path(proc_root, name, "stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        held = {int(name): "process", int(fields[3]): "session", int(fields[2]): "group"} | {int(name): "process"}
        found += [
            DescriptorHolder(number, int(name), what, fields[0] == b"Z")
            for number, what in held.items()
            if number in wanted
        ]
    return tuple(found)


def wait_until_free(numbers: Collection[int], limit_s: float = _REAPED_WITHIN_S) -> tuple[DescriptorHolder, ...]:
    """Give whoever has to reap the zombies under those numbers the time to do so; who has one of them then. Blocks.

    Nobody is told when somebody else's child is reaped, so it is looked at again and again.
    """
    end = time.monotonic() + limit_s
    while True:
        found = holders_of(numbers)
        if not found or not all(each.is_zombie for each in found) or time.monotonic() >= end:
            return found
        time.sleep(_POLL_INTERVAL_S)


def wait_for_thread_numbers(numbers: Collection[int], limit_s: float = _REAPED_WITHIN_S) -> tuple[int, int] | None:
    """Wait for some time until nobody's thread has any of these numbers; one that is had then, and the process. Blocks.

    Strangers take numbers in their turn, mostly for moments, and there is no other way to hear that one is free.
    """
    end = time.monotonic() + limit_s
    while True:
        held = ((number, _status_field(number, "Tgid")) for number in numbers)
        found = next(((number, int(process)) for number, process in held if process is not None), None)
        if found is None or time.monotonic() >= end:
            return found
        time.sleep(_POLL_INTERVAL_S)


def let_go(people: ProcessSet) -> None:
    """Have everybody go on who did not stand still by a signal when they were looked at. Blocks; raises nothing.

    A CRIU that is still at work on them is told to end, and waited for, since it would stop them again: a daemon that
    was killed in the middle of a dump has left one behind. Nobody else is, whoever may trace them. The signal is sent
    to all of them, because one that CRIU has just let go of may not have come to its stop yet.
    """
    try:
        for dumper in dumpers_of(people.start_ticks):
            _see_off(dumper)
    except OSError as error:
        _log.warning("hegmd cannot find out whether CRIU still works on process %s: %s", [*people.start_ticks], error)
    for pid, ticks in people.start_ticks.items():
        if pid not in people.stopped:
            _let_one_go(pid, ticks)


def _let_one_go(pid: int, start_ticks: int) -> None:
    try:
        with _held(pid, start_ticks) as pidfd:
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    except ProcessLookupError:
        pass
    except OSError:  # no descriptor to be had, not even to look at who it is: this signal does strangers no harm
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def stop_all(people: ProcessSet) -> None:
    """Have those very processes stand still, the last first named; fine for who has ended. Does not wait for it."""
    for pid, ticks in people.start_ticks.items():
        with _held(pid, ticks) as pidfd:
            if pidfd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)


def ask(pid: int, start_ticks: int, number: signal.Signals) -> None:
    """Send that very process a signal, and wait until it has ended, for some time. Blocks."""
    with _held(pid, start_ticks) as pidfd:
        if pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            _ended(pidfd, _END_GRACE_S)


def dumpers_of(pids: Iterable[int], proc_root: str = "/proc", *, uid: int | None = None) -> tuple[int, ...]:
    """The processes that dump a tree with one of these for its root, or are about to: by their command lines.

    Only those of the daemon's own user and of the processes' own, or of that one: CRIU has the rights of who asks, and
    anybody else can call a program so, and would be waited for. Not those that stand still: CRIU makes some for a
    moment, to try what the kernel can, and when it is killed just then they stand there for good.
    """
    wanted: dict[bytes, set[int]] = {}
    for pid in pids:
        owners = wanted[b"\0dump\0--tree\0%d\0" % pid] = {os.geteuid() if uid is None else uid}
        with suppress(OSError):
            owners.update([os.stat(f"{proc_root}/{pid}").st_uid] if uid is None else [])
    found: list[int] = []
    for name in os.listdir(proc_root):
        if name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                command = Path(proc_root, name, "cmdline").read_bytes()
                owner = Path(proc_root, name).stat().st_uid
                is_one = any(words in command and owner in owners for words, owners in wanted.items())
                if is_one and _state(int(name)) not in {"T", "t"}:
                    found.append(int(name))
    return tuple(found)


def end_all(people: ProcessSet) -> None:
    """End them for good and wait until they are gone. Blocks; raises nothing for who has ended already."""
    with_fds: list[int] = []
    try:
        for pid, ticks in people.start_ticks.items():
            with _held(pid, ticks) as pidfd:
                if pidfd is not None:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    with_fds.append(os.dup(pidfd))
        for pidfd in with_fds:
            _ended(pidfd, _END_GRACE_S)
    finally:
        for pidfd in with_fds:
            os.close(pidfd)


@contextmanager
def _held(pid: int, start_ticks: int) -> Generator[int | None, None, None]:
    """A pidfd of that very process; None when it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        yield None
        return
    try:
        try:
            is_same = read_start("/proc", pid)[0] == start_ticks
        except Scarce as error:
            raise OSError(error.number, str(error)) from error
        except (Vanished, Unreadable):
            is_same = False
        yield pidfd if is_same else None
    finally:
        os.close(pidfd)


def _see_off(dumper: int) -> None:
    """Have a dump that nobody wants any more end, and wait for that.

    A signal that kills could come while CRIU has a process of the job make a system call, and that process ends with
    it. So its next write is made to fail, as on a disk that is full: it takes its hands off the job by itself then.
    """
    try:
        pidfd = os.pidfd_open(dumper)
    except ProcessLookupError:
        return
    try:
        is_told = _let_writes_fail(dumper)
        how = "told to end" if is_told else "waited for, because to tell it to end takes CAP_SYS_RESOURCE"
        _log.warning("CRIU (process %d) writes an image that is no longer wanted: it is %s", dumper, how)
        within_s = 0.0
        # Not given up before: it would leave the job standing as it ends, and nobody would let that go on any more.
        for limit_s in (_TOLD_GRACE_S, _DUMPER_GRACE_S - _TOLD_GRACE_S):
            if _ended(pidfd, limit_s):
                return
            within_s += limit_s
            _log.error(
                "CRIU (process %d) has not ended within %d s, and its job is stopped; check the disk it writes to, "
                "and whether a signal has stopped it",
                dumper,
                within_s,
            )
    finally:
        os.close(pidfd)


def _let_writes_fail(pid: int) -> bool:
    """Whether that process cannot make any file larger any more, and is told so by an error and by no signal."""
    if not int(_status_field(pid, "SigIgn") or "0", 16) >> (signal.SIGXFSZ - 1) & 1:
        return False  # the signal would kill it
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    except ProcessLookupError:
        return True
    except OSError:  # another user's, and we lack CAP_SYS_RESOURCE
        return False
    return True


def _ended(pidfd: int, limit_s: float) -> bool:
    return bool(select.select([pidfd], [], [], limit_s)[0])


def _state(pid: int) -> str:
    return (_status_field(pid, "State") or "X")[0]


def _status_field(pid: int, name: str) -> str | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), None)
