"""Halts of a daemon at a record of its journal, before the write or after the sync.

The daemon runs unchanged with tests/stubs/halt loaded, which connects here before every write to the journal and after
every sync of it. Owns that socket and the thread that answers; the caller decides what happens at a halt. Without a
trap, the daemon continues immediately.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from hegmd.migration.journal import records

#: When it is halted, relative to a state. The record of the state is on disk, and nothing was done about it yet.
RECORDED = "recorded"
#: The same, but the daemon continues before the kill: somewhere within the effects of the state.
BEGUN = "begun"
#: The work of the state is done, and the record that leaves the state is not yet written.
UNRECORDED = "unrecorded"
MOMENTS = (RECORDED, BEGUN, UNRECORDED)

#: States that an operation skips if their work was done within the state before, and the states before and after them:
#: ranks that have connected before the last of their bytes is back. The daemon is halted where it passes the place.
_SKIPPED = {"reconnecting": ("reloading", "releasing")}

_HEAD = struct.Struct("=cI")
_WRITE, _SYNC = b"W", b"S"


@dataclass(frozen=True, slots=True)
class Trap:
    """One moment of the operation that has this process."""

    pid: int
    phase: str
    moment: str
    since: str = ""  # only where this was the state before it, for one that comes more than once


@dataclass(frozen=True, slots=True)
class Step:
    """One record: its operation, and the states before and after it."""

    op: str
    before: str
    after: str


class Halts:
    """The other end of every daemon's halts; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(8)
        self._ending, self._end = socket.socketpair()
        self._lock = threading.Condition()
        self._trap: Trap | None = None
        self._halted: tuple[Step, socket.socket] | None = None
        self._phases: dict[str, str] = {}
        self._since: dict[str, str] = {}
        self._pids: dict[str, frozenset[int]] = {}
        self._written = Step("", "", "")
        self._thread = threading.Thread(target=self._answer, name="halts")
        self.reached: set[str] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end.close()
        self._thread.join()
        self._ending.close()
        self._listening.close()
        self.path.unlink()

    # -- for the test --------------------------------------------------------------------------------------------------

    def set(self, trap: Trap) -> None:
        """Halt the daemon there, once."""
        with self._lock:
            assert self._halted is None, "a daemon is halted already"
            self._trap = trap

    def wait(self, limit_s: float) -> str:
        """Until the daemon is halted; the id of the operation."""
        with self._lock:
            trap = self._trap
            if not self._lock.wait_for(lambda: self._halted is not None, limit_s):
                self._trap = None
                raise AssertionError(f"{trap} did not come within {limit_s} s; the states: {self._phases}")
            assert self._halted is not None
            return self._halted[0].op

    def go(self) -> None:
        """Let the halted daemon continue. Fine when it was killed meanwhile."""
        with self._lock:
            assert self._halted is not None
            step, connection = self._halted
            self._halted = None
            self._release(connection, step)

    def forget(self) -> None:
        """The halted daemon was killed: what was not written never will be."""
        with self._lock:
            assert self._halted is not None
            self._halted = None  # the thread sees the end of the connection

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        connections: list[socket.socket] = []
        while True:
            ready, _, _ = select.select([self._listening, self._ending, *connections], [], [])
            if self._ending in ready:
                break
            for one in ready:
                if one is self._listening:
                    connections.append(one.accept()[0])
                elif not self._serve(one):
                    connections.remove(one)
                    one.close()
        for connection in connections:
            connection.close()

    def _serve(self, connection: socket.socket) -> bool:
        """Answer one frame; whether there was a whole one."""
        try:
            head = connection.recv(_HEAD.size, socket.MSG_WAITALL)
            if len(head) < _HEAD.size:
                return False
            what, size = _HEAD.unpack(head)
            data = connection.recv(size, socket.MSG_WAITALL) if size else b""
            if len(data) < size:
                return False  # it was killed in the middle of a line
        except OSError:
            return False
        with self._lock:
            if what == _WRITE:
                self._written = self._read(data)
            if self._trap is not None and self._is_there(self._trap, what, self._written):
                self._trap = None
                self._halted = (self._written, connection)
                self._lock.notify_all()
            else:
                self._release(connection, self._written)
        return True

    def _read(self, record: bytes) -> Step:
        (entry,) = records.entries(records.MAGIC + record)
        before = self._phases.get(entry.op, "")
        workers = entry.values.get("workers")
        if entry.whole and isinstance(workers, (list, tuple)):
            self._pids[entry.op] = frozenset(worker["pid"] for worker in workers)
        return Step(entry.op, before, str(entry.values.get("phase", before)))

    def _is_there(self, trap: Trap, what: bytes, step: Step) -> bool:
        if trap.pid not in self._pids.get(step.op, ()) or step.before == step.after:
            return False
        is_past = _SKIPPED.get(trap.phase) == (step.before, step.after)
        if trap.moment == UNRECORDED:
            is_its = step.before == trap.phase and trap.since in ("", self._since.get(step.op))
            return what == _WRITE and (is_its or is_past)
        return what == _SYNC and (is_past or (step.after == trap.phase and trap.since in ("", step.before)))

    def _release(self, connection: socket.socket, step: Step) -> None:
        """Answer; what it wrote counts from then on. Under the lock."""
        before = self._phases.get(step.op, "")
        if before != step.after:
            self._since[step.op] = before
        self._phases[step.op] = step.after
        self.reached.add(step.after)
        with contextlib.suppress(OSError):  # it was killed; the thread sees the end of the connection
            connection.sendall(b"g")
