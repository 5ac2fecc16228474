"""Leak check: a test may leave nothing behind. Records this process's resources before a test and lists the new ones
after it.

Looks at descriptors, threads, child processes, environment variables, signal handlers and the working directory. Owns
no fixture (tests/conftest.py does) and does not judge a test that is still running. Built to be run around every test:
one pass costs some 0.2 ms, and the slow questions (garbage collection, psutil) are asked only once something differs.

Also ends what is left of a whole run. A run that is interrupted cannot tear every test down: its workers are ended, and
a launcher that a test kills leaves its own processes. Each process of a run has the run's mark in its environment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import psutil

# Threads end shortly after the request; this is how long that may take on a busy machine.
GRACE_S = 30.0

# Set by pytest and its plugins themselves, around each phase.
_NOT_OURS = (b"PYTEST_", b"HYPOTHESIS_", b"COV_")

# In the environment of every process of a run.
RUN_MARK = "PYTEST_MARK_OF_RUN"
# A process that is being ended may start one more; each pass finds what the one before it missed.
_PASSES = 20

_WATCHED_SIGNALS = (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGUSR1, signal.SIGUSR2)


def end_run(mark: str) -> list[int]:
    """Kill every process that has this mark in its environment, and is not this one; which it were."""
    ended: list[int] = []
    for _ in range(_PASSES):
        found = _marked(mark)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        if not found:
            break
        ended += [process.pid for process in found]
        psutil.wait_procs(found, timeout=GRACE_S)
    return ended


def _marked(mark: str) -> list[psutil.Process]:
    wanted = f"{RUN_MARK}={mark}".encode()
    found: list[psutil.Process] = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if int(name) != os.getpid() and wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                found.append(psutil.Process(int(name)))
    return found


def _descriptors() -> dict[int, str]:
    found: dict[int, str] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def _has_children() -> bool:
    """Whether there is any child at all, dead or alive: one call, and most tests have none."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _children() -> dict[int, str]:
    if not _has_children():
        return {}
    found: dict[int, str] = {}
    for child in _child_processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = f"{child.name()} ({child.status()})"
    return found


def _child_processes() -> list[psutil.Process]:
    """As the kernel lists them, by thread; psutil reads every process of the node, twice for each test."""
    found: list[psutil.Process] = []
    for thread in Path("/proc/self/task").iterdir():
        try:
            listed = (thread / "children").read_text().split()
        except FileNotFoundError:
            if thread.exists():  # a kernel without these lists, and no thread that has ended meanwhile
                return psutil.Process().children()
            continue
        for pid in map(int, listed):
            with contextlib.suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(pid))
    return found


def _environment() -> dict[bytes, bytes]:
    """In the interpreter's own count: decoding all of it took half of the time."""
    return os.environb._data.copy()  # type: ignore[attr-defined]  # what is public decodes


@dataclass(frozen=True, slots=True)
class ProcessResources:
    descriptors: dict[int, str]
    threads: frozenset[threading.Thread]
    children: dict[int, str]
    environment: dict[bytes, bytes]
    handlers: tuple[object, ...]
    folder: Path

    @classmethod
    def take(cls) -> ProcessResources:
        return cls(
            descriptors=_descriptors(),
            threads=frozenset(threading.enumerate()),
            children=_children(),
            environment=_environment(),
            handlers=tuple(signal.getsignal(number) for number in _WATCHED_SIGNALS),
            folder=Path.cwd(),
        )

    def leaks(self, grace_s: float = GRACE_S) -> list[str]:
        """Return the new resources, one line each. Waits up to `grace_s` for threads that are about to end. Children
        get no such time: an unreaped child is as much of a leak as a living one.
        """
        if not self._differences():
            return []
        gc.collect()  # what only a cycle keeps alive is no leak
        for thread in frozenset(threading.enumerate()) - self.threads:
            thread.join(grace_s)
        return self._differences()

    def _differences(self) -> list[str]:
        now = ProcessResources.take()
        return [
            *(
                f"descriptor {number}: {target}"
                for number, target in now.descriptors.items()
                if self.descriptors.get(number) != target and not _is_kept_by_a_library(target)
            ),
            *(f"thread {thread.name}" for thread in now.threads - self.threads),
            *(f"child {pid}: {what}" for pid, what in now.children.items() if pid not in self.children),
            *_environment_changes(self.environment, now.environment),
            *(
                f"handler of {number.name}: {after}"
                for number, before, after in zip(_WATCHED_SIGNALS, self.handlers, now.handlers, strict=True)
                if before != after
            ),
            *([f"working directory: {now.folder}"] if now.folder != self.folder else []),
        ]

    def clear_children(self) -> None:
        """End the children that are not in this stock, so that the next test is not blamed for them."""
        fresh = [psutil.Process(pid) for pid in _children() if pid not in self.children and psutil.pid_exists(pid)]
        for child in fresh:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(fresh, timeout=GRACE_S)


def _is_kept_by_a_library(target: str) -> bool:
    # Opened once for the life of the process: the random source, and hypothesis' own database.
    return target in {"/dev/urandom", "/dev/random"} or "/.hypothesis/" in target


def _environment_changes(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> list[str]:
    if before == after:
        return []
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    return [
        f"environment: {os.fsdecode(name)} was {_shown(before.get(name))}, is {_shown(after.get(name))}"
        for name in changed
        if not name.startswith(_NOT_OURS)
    ]


def _shown(value: bytes | None) -> str:
    return repr(None if value is None else os.fsdecode(value))
