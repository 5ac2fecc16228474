"""One command with two desks: the launcher's files, and the daemon where one runs, which may want it elsewhere.

Decides whose turn an end of the command is, and nothing else. A state that has come into the launcher's file is the
launcher's, whatever the daemon expected; else the daemon is heard first. Behind a lock there is no connection to the
daemon: an image that CRIU makes of the waiting launcher must not have one in it.
"""

from __future__ import annotations

import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hegmcompat.launcher import Launcher
    from hegmctl.supervisor import Desk, GiveUp, Start


class BothDesks:
    """The two of them as one. `meet` makes the daemon's, anew after each lock."""

    def __init__(self, files: Launcher, meet: Callable[[], Desk]) -> None:
        self._files = files
        self._meet = meet
        self._daemon: Desk | None = None
        self._lent: Start | None = None  # what the daemon has it started with

    def turn(self, now: float, pid: int | None) -> float | None:
        """Look after both."""
        looks = [self._files.turn(now, pid)]
        if self._daemon is not None:
            looks.append(self._daemon.turn(now, pid))
        return min((look for look in looks if look is not None), default=None)

    def expected(self) -> None:
        """Nothing is made ready under a launcher."""

    def is_ready(self, pid: int | None) -> None:
        """Nothing is."""

    def started(self, pid: int, *, was_ready: bool = False) -> None:
        """The command runs, by whosever wish."""
        if self._daemon is None:
            self._daemon = self._meet()
        if self._lent is not None:
            self._files.settle(self._lent.command, self._lent.environ)
            self._lent = None
        self._files.started(pid)
        self._daemon.started(pid)

    def not_started(self, why: str) -> None:
        """It could not be, as one of them wanted."""
        self._lent = None
        if self._daemon is not None and self._files.wanted() is None:
            self._daemon.not_started(why)
        else:
            self._files.not_started(why)

    def wanted(self) -> Start | GiveUp | None:
        """What either wants while no command runs."""
        from hegmctl.supervisor import Start

        wanted = self._files.wanted()
        if wanted is None and self._daemon is not None:
            wanted = self._daemon.wanted()
            self._lent = wanted if isinstance(wanted, Start) else None
        return wanted

    def ended(self, status: int, *, told: int | None) -> bool:
        """Whether the command is to be started again. Raises HegmError."""
        daemon = self._daemon
        if self._files.has_new_state():
            if daemon is not None:
                daemon.ended(status, told=told or signal.SIGUSR1)  # nothing that it would wait for
                daemon.close()
                self._daemon = None
        elif daemon is not None and daemon.ended(status, told=told):
            self._files.left_to_daemon()
            return True
        return self._files.ended(status, told=told)

    def close(self) -> None:
        """All is over."""
        self._files.close()
        if self._daemon is not None:
            self._daemon.close()
