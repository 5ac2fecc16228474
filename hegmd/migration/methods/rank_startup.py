"""A rank during startup: which process it is, and whether it failed before it trained.

Launchers differ when a rank exits: some leave the others waiting, some restart all ranks, and these may wait for former
ones. So a start has failed for a rank that exited once its launcher continues without it: another process took its
place, or none did for some time. If the launcher exits too, after a failed rank or after all finished, its status says
which.

Programs that a rank runs before it trains carry its variables too. The process tree tells them apart: a rank is the
topmost process below its supervisor with these variables, such as the shell around a script. A daemon that was not
running at the start looks for the ranks there itself: a rank that failed earlier never connects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from hegmd.errors import HegmError
from hegmd.node.processes.process_tree import pids_below
from hegmd.node.processes.procfs import ProcessKey, start_ticks_of
from hegmd.node.processes.surroundings import parent_of, variables_of

# torchrun checks its ranks ten times a second, and restarts them at once.
LEFT_BEHIND_S = 10.0
# A shell around a rank exits some time after it, without notice.
POLL_INTERVAL_S = 0.5
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE")

#: The entry of a rank whose process ended before it was found.
NO_PROCESS: ProcessKey = (0, 0)


class RankPosition(NamedTuple):
    """The position of a process: the process started as its rank, and the command of its supervisor above it."""

    rank: ProcessKey
    command: ProcessKey


class StartingRank:
    """A rank of one start, with the processes that claim to be it. `is_alive` tells whether the process exists."""

    def __init__(self, is_alive: Callable[[ProcessKey], bool] | None = None) -> None:
        self._is_alive = _is_alive if is_alive is None else is_alive
        self._known: set[ProcessKey] = set()
        self._line: RankPosition | None = None
        self._is_replaced = False
        self._ended_at: float | None = None

    def knows(self, who: ProcessKey) -> bool:
        return who in self._known

    def note(self, who: ProcessKey, line: RankPosition | None) -> None:
        """Record that a process reports this rank; `line` is its position, None if it is not below the supervisor."""
        self._known.add(who)
        if line is None:
            return
        known = self._line
        if (
            known is None or known.rank == NO_PROCESS or known.command != line.command
        ):  # it was started again, as a whole
            self._line, self._is_replaced, self._ended_at = line, False, None
        elif known.rank != line.rank and not self._is_alive(known.rank):
            self._is_replaced = True

    def note_below(self, command: ProcessKey, ranks: Mapping[int, ProcessKey], number: int) -> None:
        """Record the ranks found below the command, by a daemon that was not running at the start.

        Without any, the command may have started none yet; it starts them together.
        """
        there = ranks.get(number)
        if there is not None:
            self.note(there, RankPosition(there, command))
        elif ranks and self._line is None:
            self._line = RankPosition(NO_PROCESS, command)

    def fallen(self, now: float) -> RankPosition | None:
        """Return the rank's position if it has exited while its command runs on; otherwise None."""
        line = self._line
        if line is None or self._is_alive(line.rank):
            return None
        if not self._is_alive(line.command):
            self._line = None
            return None
        if self._ended_at is None:
            self._ended_at = now
        return line

    def is_left_behind(self, now: float) -> bool:
        """True once it is clear that its launcher continues without it."""
        return self._ended_at is not None and (self._is_replaced or now >= self._ended_at + LEFT_BEHIND_S)

    @property
    def look_again_s(self) -> float | None:
        """Seconds until the next check at the latest; None if there is nothing to check."""
        return None if self._line is None else POLL_INTERVAL_S


def position_of(pid: int, supervisor: int) -> RankPosition | None:
    """Return the position of a process that reports a rank; None if it is not below that supervisor. Blocks."""
    own = variables_of(pid, _OF_A_RANK)
    line, parent = [pid], parent_of(pid)
    while parent is not None and parent > 1 and parent != supervisor:
        line.append(parent)
        parent = parent_of(parent)
    ranks = [one for one in line if one == pid or variables_of(one, _OF_A_RANK) == own]
    rank, command = _who(ranks[-1]), _who(line[-1])
    return RankPosition(rank, command) if parent == supervisor and rank is not None and command is not None else None


def ranks_below(command: int) -> tuple[ProcessKey | None, dict[int, ProcessKey]]:
    """Return that command, and the processes below it by rank; none if it is a rank itself. Blocks."""
    root, *below = pids_below(command)
    found: dict[int, ProcessKey] = {}
    if _rank_of(root) is None:
        for pid in below:  # parents come before their children
            rank, who = _rank_of(pid), _who(pid)
            if rank is not None and who is not None:
                found.setdefault(rank, who)
    return _who(root), found


def _rank_of(pid: int) -> int | None:
    rank = variables_of(pid, _OF_A_RANK).get("RANK", "")
    return int(rank) if rank.isdecimal() else None


def _who(pid: int) -> ProcessKey | None:
    try:
        ticks = start_ticks_of(pid)
    except HegmError:
        return None
    return None if ticks is None else (pid, ticks)


def _is_alive(who: ProcessKey) -> bool:
    try:
        return start_ticks_of(who[0]) == who[1]
    except HegmError:  # /proc cannot be read now
        return True
