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
    from hegmctl.supervisor import Desk

SUMMARY = "run a training that can leave, and go on from its state"
USAGE = (
    "Usage: hegm-launcher [--debug] <command> [args ...]\nExample: hegm-launcher --debug python train.py --epochs 100"
)


def main() -> NoReturn:
    """The program."""
    sys.exit(run(sys.argv[1:]))


def run(words: Sequence[str]) -> int:
    """Do what the words say; the exit status."""
    if not words or words[0] in ("-h", "--help"):
        complain(USAGE)
        return 0  # as HeGM has it
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
    from hegmcompat.both_desks import BothDesks
    from hegmcompat.control import Control
    from hegmcompat.launcher import Launcher
    from hegmcompat.rest import serve_beside
    from hegmctl.exec_command import require
    from hegmctl.restart_client import DaemonDesk
    from hegmctl.supervisor import Supervisor

    surroundings = read_surroundings(os.environ)
    require_token_off_loopback(surroundings.host, surroundings.token)
    launcher = Launcher(surroundings, command, environ=os.environ, debug=say if is_debug else _ignore)
    require(launcher.command)
    socket_path = launcher.environ["HEGM_SOCKET"]

    def meet_daemon() -> Desk:
        return DaemonDesk(socket_path, launcher.command, launcher.environ, say=warn, gpu=os.environ.get("HEGM_GPU"))

    # Signals are for the main thread, which waits for them: the interface's threads are born with all of them blocked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    control = Control(surroundings)
    at = surroundings.host, surroundings.port, surroundings.token
    server = serve_beside(control, *at, is_quiet=surroundings.is_quiet)
    # Held back in workers as well: until its agent is there to take it, SIGUSR1 would end one.
    signal.pthread_sigmask(signal.SIG_SETMASK, mask | {signal.SIGUSR1})
    try:
        return Supervisor(BothDesks(launcher, meet_daemon), warn).run(launcher.first())
    finally:
        if server is not None:
            server.close()


def _ignore(_text: str) -> None:
    pass


if __name__ == "__main__":
    main()
