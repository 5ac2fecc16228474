"""Facts that have to be waited for: command lines and names of users.

A command line takes the lock of the process's memory map; a user's name comes from the node's directory server. Either
can hang for hours. So a thread that can be abandoned reads them, and callers continue without them.

Two threads share the data without a lock: only `read` writes, in one thread at a time; others read single entries. A
command line is stored by pid and start time. The start time is read again afterwards, so that no process gets its
successor's command line.
"""

from __future__ import annotations

import pwd
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from hegmd.node.processes.procfs import ProcessGone, Unreadable, read_command, read_start

REREAD_PER_ROUND = 32
USER_NAME_MAX_AGE_S = 600.0
NO_USER_NAME_MAX_AGE_S = 60.0

NOTE_UNREAD = "its command line is not read yet"
NOTE_STUCK = "its command line cannot be read: the process holds the lock of its memory map"
NOTE_UNREADABLE = "hegmd has no permission to read its command line"


class LookupRequest(NamedTuple):
    """A request to look up: processes as (pid, start ticks, name), users as uids, and what to keep."""

    commands: tuple[tuple[int, int, str], ...]
    uids: tuple[int, ...]
    known: frozenset[tuple[int, int]]
    urgent: bool


class _Command(NamedTuple):
    text: str | None
    name: str


class Lookups:
    """Command lines by process and names by uid, as far as they are known."""

    def __init__(
        self,
        proc_root: str = "/proc",
        *,
        user_name: Callable[[int], str] = lambda uid: pwd.getpwuid(uid).pw_name,
        read_command: Callable[[str, int], str] = read_command,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proc_root = proc_root
        self._user_name = user_name
        self._read_command = read_command
        self._monotonic = monotonic
        self._commands: dict[tuple[int, int], _Command] = {}
        self._users: dict[int, tuple[str | None, float]] = {}
        self._next_reread = 0
        self._reading: tuple[int, int] | None = None

    def request_for(self, processes: Iterable[tuple[int, int, str, int]]) -> LookupRequest:
        """Return what to look up for these processes, each given as (pid, start ticks, name, uid).

        Everything unknown is looked up, the command lines of processes whose name changed (by exec), and a limited
        share of the others. It is urgent if a caller would miss it.
        """
        now = self._monotonic()
        missing: list[tuple[int, int, str]] = []
        read: list[tuple[int, int, str]] = []
        uids: set[int] = set()
        for pid, start_ticks, name, uid in processes:
            command = self._commands.get((pid, start_ticks))
            fresh = command is not None and command.name == name
            (read if fresh else missing).append((pid, start_ticks, name))
            uids.add(uid)
        first = self._next_reread if self._next_reread < len(read) else 0
        again = read[first : first + REREAD_PER_ROUND]
        self._next_reread = first + len(again)
        due = tuple(uid for uid in uids if self._is_due(uid, now))
        return LookupRequest(
            commands=(*missing, *again),
            uids=due,
            known=frozenset((pid, start_ticks) for pid, start_ticks, _ in (*missing, *read)),
            urgent=bool(missing) or any(uid not in self._users for uid in due),
        )

    def read(self, request: LookupRequest) -> None:
        """Look up each of them, and forget other processes. May block without limit."""
        for key in self._commands.keys() - request.known:
            del self._commands[key]
        for pid, start_ticks, name in request.commands:
            self._reading = (pid, start_ticks)
            self._read_one(pid, start_ticks, name)
        self._reading = None
        for uid in request.uids:
            try:
                name = self._user_name(uid)
            except (KeyError, OSError):
                self._users[uid] = (None, self._monotonic() + NO_USER_NAME_MAX_AGE_S)
            else:
                self._users[uid] = (name, self._monotonic() + USER_NAME_MAX_AGE_S)

    def command(self, pid: int, start_ticks: int) -> tuple[str | None, str | None]:
        """Return the command line, and a note if there is none."""
        command = self._commands.get((pid, start_ticks))
        if command is None:
            return None, NOTE_STUCK if self._reading == (pid, start_ticks) else NOTE_UNREAD
        return command.text, NOTE_UNREADABLE if command.text is None else None

    def user(self, uid: int) -> str | None:
        """Return the user's name; None if there is none or it is not yet known."""
        return self._users.get(uid, (None, 0.0))[0]

    def _read_one(self, pid: int, start_ticks: int, name: str) -> None:
        try:
            text: str | None = self._read_command(self._proc_root, pid)
            if read_start(self._proc_root, pid)[0] != start_ticks:
                return
        except ProcessGone:
            return
        except Unreadable:
            text = None
        old = self._commands.get((pid, start_ticks))
        new = _Command(text, name)
        if old != new:
            self._commands[(pid, start_ticks)] = new

    def _is_due(self, uid: int, now: float) -> bool:
        known = self._users.get(uid)
        return known is None or now >= known[1]
