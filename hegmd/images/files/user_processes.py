"""Processes with a user's rights, through which the daemon accesses what callers name.

The daemon opens no path of a caller: a link could lead it to anything that it may open. A user process has the caller's
user, group and groups, as the kernel reported them for the connection. Under systemd it is a transient unit: the
daemon's own sandbox may not change its user and has no writable disk. Its socket is its standard input, which
systemd-run passes on; so it ends with the daemon, whatever its parent is.

Belongs to the event loop, which it never blocks. `UserProcesses.run` must be running.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
from collections.abc import Mapping, Sequence

import anyio

from hegmd.errors import Refused
from hegmd.gpu_helper.calls import OnProgress, Role
from hegmd.gpu_helper.link import child_environment
from hegmd.gpu_helper.session import Session
from hegmd.gpu_helper.wire import HelperReply
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.system.programs import SYSTEM_PATH, Rights, find_program

ROLE = Role("the image writer", "read hegmd's log; to see what it left, run: hegmctl images ls")
# Without the user's own site-packages, whose code would run with descriptors of the daemon.
PROGRAM = (sys.executable, "-s", "-m", "hegmd.images.files.child")
START_WITHIN_S = 30.0
# EXIT_USER of systemd: it does not find the user (systemd.exec(5)).
_NO_ACCOUNT = 217
# A process that waits for a disk that hangs is left to the kernel.
END_WITHIN_S = 10.0


class UserProcess:
    """A such process. It exits when it is closed, with its locks and its running request."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._pidfd = -1
        with contextlib.suppress(OSError):  # it has ended already
            self._pidfd = os.pidfd_open(session.pid or 0)

    @property
    def pid(self) -> int | None:
        return self._session.pid

    async def call(
        self,
        op: str,
        args: Mapping[str, object] | None = None,
        *,
        fds: Sequence[int] = (),
        on_progress: OnProgress | None = None,
    ) -> HelperReply:
        """Call the process. No time limit of its own, since a disk may be slow; the caller can cancel.

        When cancelled, the request continues until the process is closed. Raises its error, and HelperLost.
        """
        return await self._session.call(op, args or {}, math.inf, fds, on_progress)

    def kill(self) -> None:
        """End it now. Fine when it has ended."""
        self._session.lose("is no longer needed", quietly=True)

    async def ended(self) -> None:
        """Wait until the process has ended and released its locks. Can be called twice.

        As a unit it is not our child: we reap systemd-run, and the unit ends a moment later, when its socket does.
        """
        await self._session.over.wait()
        if self._pidfd >= 0:
            with anyio.move_on_after(END_WITHIN_S):
                await anyio.wait_readable(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class UserProcesses(BackgroundTasks):
    """Starts processes with a caller's rights. `in_unit` starts them outside the daemon's sandbox, as units."""

    def __init__(self, *, in_unit: bool, program: Sequence[str] = PROGRAM, path: str = SYSTEM_PATH) -> None:
        self._in_unit = in_unit
        self._path = path
        self._program = tuple(program)
        self._environment = child_environment(os.environ)
        self._numbers = itertools.count(1)
        super().__init__()

    async def start(self, rights: Rights | None) -> UserProcess:
        """Start a process with these rights; None: with the daemon's own, in its sandbox. Raises HegmError."""
        tasks = self._open_tasks()
        number = next(self._numbers)
        session = Session(number, math.inf, ROLE)
        program, environment, become = self._program, self._environment, None
        if rights is not None and self._in_unit:
            runner = find_program("systemd-run", self._path) or "systemd-run"
            program = (runner, *unit_arguments(program, environment, rights, number))
            environment = {"PATH": SYSTEM_PATH}
        elif rights is not None and rights.uid != os.geteuid():
            become = rights
        tasks.start_soon(session.live, program, environment, START_WITHIN_S, become)
        try:
            await session.settled.wait()
        except anyio.get_cancelled_exc_class():
            session.lose("is no longer needed", quietly=True)
            raise
        if rights is not None and self._in_unit and session.status == _NO_ACCOUNT:
            raise Refused(
                f"uid {rights.uid} has no account on this node, and systemd runs nothing with rights of such a user",
                "have root repeat the command, or create an account with that uid again",
            )
        session.require()
        return UserProcess(session)


def unit_arguments(
    program: Sequence[str], environment: Mapping[str, str], rights: Rights, number: int
) -> tuple[str, ...]:
    """Return the arguments of `systemd-run` for the program with these rights and our standard input."""
    properties = ["NoNewPrivileges=yes", "UMask=0077", "LimitCORE=0"]
    if rights.uid:
        properties.append("CapabilityBoundingSet=")
    if rights.groups:
        properties.append(f"SupplementaryGroups={' '.join(map(str, rights.groups))}")
    return (
        *("--quiet", "--wait", "--pipe", "--collect", "--service-type=exec"),
        f"--unit=hegm-image-{os.getpid()}-{number}",
        *("--description=hegmd at work on an image", f"--uid={rights.uid}", f"--gid={rights.gid}"),
        *(f"--property={each}" for each in properties),
        *(f"--setenv={name}={value}" for name, value in environment.items()),
        *("--", *program),
    )
