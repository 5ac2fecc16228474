"""The processes of a job that CRIU handles, each identified by pid and start time: inspected, continued, or ended.

A pid alone may be reused between a check and a signal. So signals go through a pidfd that was opened before the start
time was compared.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import time
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from hegmd.node.processes.procfs import ProcessGone, Scarce, Unreadable, read_start
from hegmd.system.descriptors import is_readable

_log = logging.getLogger(__name__)

# CRIU ends within half a second after it is stopped, unless a disk hangs; then that is logged.
_TOLD_GRACE_S = 30.0
_DUMPER_GRACE_S = 900.0
_END_GRACE_S = 30.0
_REAPED_WITHIN_S = 10.0
_POLL_INTERVAL_S = 0.01


class ProcessSet(NamedTuple):
    """Processes by pid with their start times, and which of them were stopped by a signal."""

    start_ticks: Mapping[int, int]
    stopped: frozenset[int] = frozenset()


def population_of(pids: Iterable[int]) -> ProcessSet:
    """Return those that live. Blocks no longer than reading /proc.

    Raises OSError if that cannot be read now, so that a lack of descriptors does not make a process look ended.
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
        except (ProcessGone, Unreadable):
            continue
    return ProcessSet(ticks, frozenset(stopped))


class DescriptorHolder(NamedTuple):
    """A process that uses a number as its pid, its group or its session. A zombie waits to be reaped."""

    number: int
    pid: int
    what: str
    is_zombie: bool


def holders_of(numbers: Iterable[int]) -> tuple[DescriptorHolder, ...]:
    """Return the processes that use one of these numbers; a restore needs all of them free."""
    wanted_numbers = frozenset(numbers)
    found: list[DescriptorHolder] = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        held = {int(name): "process", int(fields[3]): "session", int(fields[2]): "group"} | {int(name): "process"}
        found += [
            DescriptorHolder(number, int(name), what, fields[0] == b"Z")
            for number, what in held.items()
            if number in wanted_numbers
        ]
    return tuple(found)


def wait_until_free(numbers: Collection[int], limit_s: float = _REAPED_WITHIN_S) -> tuple[DescriptorHolder, ...]:
    """Wait for zombies with these numbers to be reaped; return who still has one. Blocks.

    There is no notification for another process's child, so this polls.
    """
    end = time.monotonic() + limit_s
    while True:
        found = holders_of(numbers)
        if not found or not all(each.is_zombie for each in found) or time.monotonic() >= end:
            return found
        time.sleep(_POLL_INTERVAL_S)


def wait_for_thread_numbers(numbers: Collection[int], limit_s: float = _REAPED_WITHIN_S) -> tuple[int, int] | None:
    """Wait briefly until no thread has one of these numbers; return one that is used and its process. Blocks.

    Other processes take numbers for moments, and there is no notification.
    """
    end = time.monotonic() + limit_s
    while True:
        held = ((number, _status_field(number, "Tgid")) for number in numbers)
        found = next(((number, int(process)) for number, process in held if process is not None), None)
        if found is None or time.monotonic() >= end:
            return found
        time.sleep(_POLL_INTERVAL_S)


def continue_all(people: ProcessSet) -> None:
    """Continue all processes that were not stopped by a signal before. Blocks; raises nothing.

    A CRIU that still works on them is ended first, because it would stop them again: a daemon killed during a dump
    leaves one. Other tracers are left alone. All processes get the signal, because one that CRIU just released may not
    have stopped yet.
    """
    try:
        for dumper in dumpers_of(people.start_ticks):
            _end_dump(dumper)
    except OSError as error:
        _log.warning("hegmd cannot find out whether CRIU still works on process %s: %s", [*people.start_ticks], error)
    for pid, ticks in people.start_ticks.items():
        if pid not in people.stopped:
            _continue_one(pid, ticks)


def _continue_one(pid: int, start_ticks: int) -> None:
    try:
        with _held(pid, start_ticks) as pidfd:
            if pidfd is not None:
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    except ProcessLookupError:
        pass
    except OSError:  # no descriptor is available to verify the process; this signal is harmless to another one
        with suppress(OSError):
            os.kill(pid, signal.SIGCONT)


def stop_all(people: ProcessSet) -> None:
    """Stop exactly these processes, the last first. Ended ones are fine. Does not wait."""
    for pid, ticks in people.start_ticks.items():
        with _held(pid, ticks) as pidfd:
            if pidfd is not None:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(pidfd, signal.SIGSTOP)


def ask(pid: int, start_ticks: int, number: signal.Signals) -> None:
    """Send exactly that process a signal and wait some time for its end. Blocks."""
    with _held(pid, start_ticks) as pidfd:
        if pidfd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, number)
            is_readable(pidfd, _END_GRACE_S)


def dumpers_of(pids: Iterable[int], *, uid: int | None = None) -> tuple[int, ...]:
    """Return the processes that dump, or will dump, a tree with one of these as its root, by their command lines.

    Only processes of the daemon's user and of the job's users count: any user can give a program such a command line.
    Stopped ones do not count: CRIU creates some for kernel tests, and if it is killed then, they stay stopped.
    """
    wanted_numbers: dict[bytes, set[int]] = {}
    for pid in pids:
        owners = wanted_numbers[b"\0dump\0--tree\0%d\0" % pid] = {os.geteuid() if uid is None else uid}
        with suppress(OSError):
            owners.update([os.stat(f"/proc/{pid}").st_uid] if uid is None else [])
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                command = Path("/proc", name, "cmdline").read_bytes()
                owner = Path("/proc", name).stat().st_uid
                is_one = any(words in command and owner in owners for words, owners in wanted_numbers.items())
                if is_one and _state(int(name)) not in {"T", "t"}:
                    found.append(int(name))
    return tuple(found)


def end_all(people: ProcessSet) -> None:
    """Kill them and wait until they have ended. Blocks; already ended ones are allowed."""
    with_fds: list[int] = []
    try:
        for pid, ticks in people.start_ticks.items():
            with _held(pid, ticks) as pidfd:
                if pidfd is not None:
                    with suppress(ProcessLookupError):
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    with_fds.append(os.dup(pidfd))
        for pidfd in with_fds:
            is_readable(pidfd, _END_GRACE_S)
    finally:
        for pidfd in with_fds:
            os.close(pidfd)


@contextmanager
def _held(pid: int, start_ticks: int) -> Generator[int | None, None, None]:
    """Return a pidfd of exactly that process; None if it has ended."""
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
        except (ProcessGone, Unreadable):
            is_same = False
        yield pidfd if is_same else None
    finally:
        os.close(pidfd)


def _end_dump(dumper: int) -> None:
    """End an abandoned dump, and wait for its end.

    A fatal signal could hit CRIU while a process of the job makes a system call for it, and end that process. So CRIU's
    next write is made to fail, as on a full disk: then it releases the job by itself.
    """
    try:
        pidfd = os.pidfd_open(dumper)
    except ProcessLookupError:
        return
    try:
        is_told = _make_writes_fail(dumper)
        how = "told to end" if is_told else "waited for, because ending it needs CAP_SYS_RESOURCE"
        _log.warning("CRIU (process %d) writes an image that is no longer needed: it is %s", dumper, how)
        within_s = 0.0
        # Never abandoned before: CRIU would leave the job stopped, and nothing would continue it.
        for limit_s in (_TOLD_GRACE_S, _DUMPER_GRACE_S - _TOLD_GRACE_S):
            if is_readable(pidfd, limit_s):
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


def _make_writes_fail(pid: int) -> bool:
    """Set the process's file size limit so that writes fail with an error, not a signal. True if it worked."""
    if not int(_status_field(pid, "SigIgn") or "0", 16) >> (signal.SIGXFSZ - 1) & 1:
        return False  # the signal would kill it
    try:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, 0))
    except ProcessLookupError:
        return True
    except OSError:  # another user's, and we lack CAP_SYS_RESOURCE
        return False
    return True


def _state(pid: int) -> str:
    return (_status_field(pid, "State") or "X")[0]


def _status_field(pid: int, name: str) -> str | None:
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(f"{name}:")), None)
