"""`hegm-launcher [--debug] COMMAND [ARGUMENT]...`: from the words to the exit status."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from hegmcompat.surroundings import read_surroundings, require_token_off_loopback
from hegmcompat.terminal import complain, explain, say, warn
from hegmd.errors import HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from hegmcompat.launcher import Launcher
    from hegmctl.supervisor import GiveUp, RestartAuthority, Start


SUMMARY = "run a training that can save its state, exit, and continue"
USAGE = (
    "Usage: hegm-launcher [--debug] <command> [args ...]\nExample: hegm-launcher --debug python train.py --epochs 100"
)


class CombinedAuthority:
    """The launcher's files and the daemon as one authority: decides which of them an exit of the command concerns.

    A state in the launcher's file is the launcher's, whatever the daemon expected. Otherwise the daemon is asked first.
    `meet` connects to the daemon, again after each lock: while the launcher waits behind a lock it has no connection,
    because a CRIU image of the waiting launcher must not contain one.
    """

    def __init__(self, files: Launcher, meet: Callable[[], RestartAuthority]) -> None:
        self._files = files
        self._meet = meet
        self._daemon: RestartAuthority | None = None
        self._lent: Start | None = None  # the start that the daemon asked for

    def turn(self, now: float, pid: int | None) -> float | None:
        """Run the periodic work of both, and return the earliest time at which one of them needs it again."""
        looks = [self._files.turn(now, pid)]
        if self._daemon is not None:
            looks.append(self._daemon.turn(now, pid))
        return min((look for look in looks if look is not None), default=None)

    def expected(self) -> None:
        """Do nothing: a launcher prestarts no process."""

    def is_ready(self, pid: int | None) -> None:
        """Do nothing: a launcher prestarts no process."""

    def started(self, pid: int, *, was_ready: bool = False) -> None:
        if self._daemon is None:
            self._daemon = self._meet()
        if self._lent is not None:
            self._files.settle(self._lent.command, self._lent.environ)
            self._lent = None
        self._files.started(pid)
        self._daemon.started(pid)

    def not_started(self, why: str) -> None:
        """Tell the authority that asked for the start why the command could not be started."""
        self._lent = None
        if self._daemon is not None and self._files.next_start() is None:
            self._daemon.not_started(why)
        else:
            self._files.not_started(why)

    def next_start(self) -> Start | GiveUp | None:
        """Return what one of them wants while no command runs; the launcher's files come first."""
        from hegmctl.supervisor import Start

        start = self._files.next_start()
        if start is None and self._daemon is not None:
            start = self._daemon.next_start()
            self._lent = start if isinstance(start, Start) else None
        return start

    def ended(self, status: int, *, sent_signal: int | None) -> bool:
        """Return whether the command has to be started again. Raises HegmError."""
        daemon = self._daemon
        if self._files.has_new_state():
            if daemon is not None:
                daemon.ended(status, sent_signal=sent_signal or signal.SIGUSR1)  # so the daemon waits for no state
                daemon.close()
                self._daemon = None
        elif daemon is not None and daemon.ended(status, sent_signal=sent_signal):
            self._files.left_to_daemon()
            return True
        return self._files.ended(status, sent_signal=sent_signal)

    def close(self) -> None:
        self._files.close()
        if self._daemon is not None:
            self._daemon.close()


def main() -> NoReturn:
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        complain(USAGE)
        return 0  # like HeGM
    is_debug = words[0] == "--debug"
    command = words[1:] if is_debug else words
    if not command:
        complain(USAGE)
        return 1
    try:
        return _launch(command, is_debug=is_debug)
    except HegmError as error:
        explain(error)
        return error.code.exit_status


def _launch(command: Sequence[str], *, is_debug: bool) -> int:
    from hegmcompat.control import Control
    from hegmcompat.launcher import Launcher
    from hegmcompat.rest import serve_beside
    from hegmctl.exec_command import require
    from hegmctl.restart_client import DaemonAuthority
    from hegmctl.supervisor import Supervisor

    surroundings = read_surroundings(os.environ)
    require_token_off_loopback(surroundings.host, surroundings.token)
    launcher = Launcher(surroundings, command, environ=os.environ, debug=say if is_debug else _ignore)
    require(launcher.command)
    socket_path = launcher.environ["HEGM_SOCKET"]

    def meet_daemon() -> RestartAuthority:
        return DaemonAuthority(
            socket_path, launcher.command, launcher.environ, say=warn, gpu=os.environ.get("HEGM_GPU")
        )

    # The main thread waits for the signals. The HTTP interface's threads start with all signals blocked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    control = Control(surroundings)
    at = surroundings.host, surroundings.port, surroundings.token
    server = serve_beside(control, *at, is_quiet=surroundings.is_quiet)
    # Workers start with SIGUSR1 blocked: it would end a worker whose agent has no handler yet.
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | {signal.SIGUSR1})
    try:
        return Supervisor(CombinedAuthority(launcher, meet_daemon), warn).run(launcher.first())
    finally:
        if server is not None:
            server.close()


def _ignore(_text: str) -> None:
    pass


if __name__ == "__main__":
    main()
