"""Checkpoint and resume in HeGM's words: SIGUSR1 to workers, and the locks of their launchers.

Returns a short result for each process and raises nothing: the command line and the REST interface pass these on.
Unlike HeGM's, it signals only workers of a launcher, and none that the signal would end.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

from hegmcompat import private_files, workers
from hegmcompat.surroundings import LOCK, REFUSED, LauncherSettings

SIGNALLED = "signalled"
READY = "checkpoint-ready"
NO_PROCESS = "no-such-process"
DENIED = "permission-denied"
EXITED = "launcher-exited"
LATE = "timeout-waiting-lock"
NO_GPU = "skipped-no-gpu"
NO_LOCK = "no-lock"
LOCK_REMOVED = "lock-removed"
# From a Python's start to its agent, on a machine that is busy; counted from the asking.
BEGINNING_S = 10.0
_POLL_INTERVAL_S = 0.02
_REASON_BYTES = 2000
_PID_BYTES = 32
_MAX_PID = 2**22


@dataclass(slots=True)
class _AwaitedLauncher:
    """A launcher whose lock is awaited, with descriptors that tell when it and its worker end."""

    launcher_pid: int
    pidfd: int
    worker_fd: int
    refused_before: tuple[int, int, int, int] | None
    lock_before: tuple[int, int, int, int] | None

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.worker_fd)


class Control:
    """The operations of a controller. Blocks; safe in several threads."""

    def __init__(
        self,
        surroundings: LauncherSettings,
        uses_gpu: Callable[[int], bool] = workers.uses_gpu,
        survives_request: Callable[[int], bool] = workers.survives_request,
        beginning_s: float = BEGINNING_S,
    ) -> None:
        self._at = surroundings
        self._uses_gpu = uses_gpu
        self._survives_request = survives_request
        self._beginning_s = beginning_s

    def checkpoint(self, pids: Iterable[int]) -> dict[int, str]:
        """Ask these workers for their state, and wait until their launchers hold it."""
        launchers = workers.registered(self._at.folder)
        results: dict[int, str] = {}
        awaited: dict[int, _AwaitedLauncher] = {}
        begun_by = monotonic() + self._beginning_s
        try:
            for pid in dict.fromkeys(pids):
                results[pid] = self._signal(pid, launchers, awaited, begun_by)
            for pid, became in self._await(awaited).items():
                results[pid] = became if became == READY or became.startswith("error: ") else f"{SIGNALLED} ({became})"
        finally:
            for one in awaited.values():
                one.close()
        return results

    def checkpoint_all(self) -> dict[int, str]:
        found = workers.registered(self._at.folder).values()
        using = {pid: self._uses_gpu(pid) for pid in found}
        results = self.checkpoint(pid for pid, uses in using.items() if uses)
        results.update({pid: NO_GPU for pid, uses in using.items() if not uses})
        return results

    def pending(self) -> list[int]:
        found: set[int] = set()
        if self._at.path is not None:
            text = private_files.read(self._at.path.with_name(LOCK), _PID_BYTES) or b""
            found.update([int(text)] if text.strip().isdigit() else [])
        with suppress(OSError):
            for name in os.listdir(self._at.folder):
                if private_files.is_number(name) and os.path.lexists(self._at.folder / name / LOCK):
                    found.add(int(name))
        return sorted(found)

    def resume(self, launcher_pids: Iterable[int]) -> dict[int, str]:
        results: dict[int, str] = {}
        for pid in dict.fromkeys(launcher_pids):
            try:
                self._at.lock_of(pid).unlink()
                results[pid] = LOCK_REMOVED
            except (FileNotFoundError, NotADirectoryError):
                results[pid] = NO_LOCK
            except OSError as error:
                results[pid] = f"error: {error.strerror}"
        return results

    def resume_all(self) -> dict[int, str]:
        return self.resume(self.pending())

    def _signal(
        self, pid: int, launchers: dict[int, int], awaited: dict[int, _AwaitedLauncher], begun_by: float
    ) -> str:
        """Ask one, which has until then to have its agent; whom to wait for then is added to `awaited`."""
        if not 0 < pid <= _MAX_PID:  # to the kernel 0 is our own group, and -1 everybody
            return NO_PROCESS
        try:
            worker_fd = os.pidfd_open(pid)
        except ProcessLookupError:
            return NO_PROCESS
        except OSError as error:
            return f"error: {error.strerror}"
        try:
            launcher_pid = workers.launcher_of(pid, launchers)
            if launcher_pid is None:
                return "error: it is not a worker of a hegm-launcher"
            while not self._survives_request(pid):
                if _ends_within(worker_fd, _POLL_INTERVAL_S):
                    return NO_PROCESS
                if monotonic() >= begun_by:
                    return "error: SIGUSR1 would kill it: its agent is not loaded (yet)"
            awaited[pid] = self._watched(launcher_pid, pid)
            signal.pidfd_send_signal(worker_fd, signal.SIGUSR1)
        except ProcessLookupError:
            return SIGNALLED if pid in awaited else NO_PROCESS
        except PermissionError:
            return self._forgotten(pid, awaited, DENIED)
        except OSError as error:
            return self._forgotten(pid, awaited, f"error: {error.strerror}")
        finally:
            os.close(worker_fd)
        return SIGNALLED

    @staticmethod
    def _forgotten(pid: int, awaited: dict[int, _AwaitedLauncher], result: str) -> str:
        if pid in awaited:
            awaited.pop(pid).close()
        return result

    def _watched(self, launcher_pid: int, worker_pid: int) -> _AwaitedLauncher:
        """Open the launcher and its worker before the signal. Raises OSError."""
        refused = private_files.identity(self._at.state_of(launcher_pid).with_name(REFUSED))
        lock = private_files.identity(self._at.lock_of(launcher_pid))
        launcher_fd = os.pidfd_open(launcher_pid)
        try:
            return _AwaitedLauncher(launcher_pid, launcher_fd, os.pidfd_open(worker_pid), refused, lock)
        except OSError:
            os.close(launcher_fd)
            raise

    def _await(self, awaited: dict[int, _AwaitedLauncher]) -> dict[int, str]:
        """Return the result of each, within the limit."""
        pending = dict(awaited)
        became: dict[int, str] = {}
        deadline = monotonic() + self._at.checkpoint_limit_s
        while pending:
            for pid, one in list(pending.items()):
                found = self._seen(one)
                if found is not None:
                    became[pid] = found
                    del pending[pid]
            left_s = deadline - monotonic()
            if not pending or left_s <= 0:
                break
            sleep(min(self._at.poll_interval_s, left_s))
        return {**became, **dict.fromkeys(pending, LATE)}

    def _seen(self, one: _AwaitedLauncher) -> str | None:
        # Checked before the lock: a launcher may make one and end.
        has_ended = _ends_within(one.pidfd, 0)
        if self._has_own_lock(one):
            return READY
        path = self._at.state_of(one.launcher_pid).with_name(REFUSED)
        now = private_files.identity(path)
        if now is not None and now != one.refused_before:
            reason = private_files.read(path, _REASON_BYTES) or b"the worker refused"
            return f"error: {reason.decode('utf-8', 'replace').strip()}"
        return EXITED if has_ended else None

    def _has_own_lock(self, one: _AwaitedLauncher) -> bool:
        """Return True if the launcher has made a lock: another process may have made a file of that name."""
        path = self._at.lock_of(one.launcher_pid)
        now = private_files.identity(path)
        if now is None or now == one.lock_before or not _ends_within(one.worker_fd, 0):
            return False
        return (private_files.read(path, _PID_BYTES) or b"").strip() == str(one.launcher_pid).encode()


def _ends_within(pidfd: int, wait_s: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(wait_s * 1000))
