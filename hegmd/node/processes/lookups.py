"""What can only be known by waiting for somebody else: command lines and the names of users.

A command line waits for the process's own lock on its memory map, a user's name for whatever directory server the
node asks. Either can hang for hours while all else is well. So they are read apart from the table, in a thread that
may be left behind, and everybody goes on without them meanwhile.

Two threads meet here and need no lock: `read` alone writes, in one thread at a time; everybody else looks up single
entries. A command line is kept under pid and start time, and the start time is read once more after it, so that no
process gets the words of its successor.
"""

from __future__ import annotations

import pwd
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hegmd.node.processes.procfs import Unreadable, Vanished, read_command, read_start

__all__ = ["Lookups", "Wanted"]

REREAD_PER_ROUND = 32
USER_NAME_MAX_AGE_S = 600.0
NO_USER_NAME_MAX_AGE_S = 60.0

NOTE_UNREAD = "its command line is not read yet"
NOTE_STUCK = "its command line cannot be read: the process holds the lock of its memory map"
NOTE_UNREADABLE = "its command line may not be read"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a round is to look up: processes as (pid, start ticks, name), users as uids, and what to keep of before."""

    commands: tuple[tuple[int, int, str], ...]
    uids: tuple[int, ...]
    known: frozenset[tuple[int, int]]
    urgent: bool


@dataclass(frozen=True, slots=True)
class _Command:
    text: str | None
    name: str


class Lookups:
    """Command lines by process and names by uid, as far as they could be had."""

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

    def wanted(self, processes: Iterable[tuple[int, int, str, int]]) -> Wanted:
        """What to look up for these processes, each as (pid, start ticks, name, uid).

        That is whatever is not known yet, the command line of those whose name has changed (exec does that), and a
        bounded share of the others. It is urgent if somebody would miss it.
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
        return Wanted(
            commands=(*missing, *again),
            uids=due,
            known=frozenset((pid, start_ticks) for pid, start_ticks, _ in (*missing, *read)),
            urgent=bool(missing) or any(uid not in self._users for uid in due),
        )

    def read(self, wanted: Wanted) -> None:
        """Look all of it up, and forget the processes that are known no more. May block for any length of time."""
        for key in self._commands.keys() - wanted.known:
            del self._commands[key]
        for pid, start_ticks, name in wanted.commands:
            self._reading = (pid, start_ticks)
            self._read_one(pid, start_ticks, name)
        self._reading = None
        for uid in wanted.uids:
            try:
                name = self._user_name(uid)
            except (KeyError, OSError):
                self._users[uid] = (None, self._monotonic() + NO_USER_NAME_MAX_AGE_S)
            else:
                self._users[uid] = (name, self._monotonic() + USER_NAME_MAX_AGE_S)

    def command(self, pid: int, start_ticks: int) -> tuple[str | None, str | None]:
        """The command line, and a note where there is none."""
        command = self._commands.get((pid, start_ticks))
        if command is None:
            return None, NOTE_STUCK if self._reading == (pid, start_ticks) else NOTE_UNREAD
        return command.text, NOTE_UNREADABLE if command.text is None else None

    def user(self, uid: int) -> str | None:
        """The user's name; None if there is none or it is not known yet."""
        return self._users.get(uid, (None, 0.0))[0]

    def _read_one(self, pid: int, start_ticks: int, name: str) -> None:
        try:
            text: str | None = self._read_command(self._proc_root, pid)
            if read_start(self._proc_root, pid)[0] != start_ticks:
                return
        except Vanished:
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
