"""Asks a program which Python it is, before a job is started with it: as this user, in the job's environment.

Never waits: its output and its exit raise signals in this process, which checks it then. It is ended when its time is
over, or when the answer is no longer needed.
"""

from __future__ import annotations

import fcntl
import os
import re
import signal
from contextlib import suppress
from errno import ENOENT, ENOTDIR

from hegmctl.exec_command import places_of
from hegmctl.isolation import PATHS
from hegmd.protocol.supervision import ALONE

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

WITHIN_S = 5.0
_MARK = "hegm-python"
# A script that passes its words on to a Python may take the environment from it as well.
_ASK = (
    f"import os, sys; print('{_MARK}', sys.implementation.name, '.'.join(map(str, sys.version_info[:3])), "
    f"*['{ALONE}'] * (sys.flags.ignore_environment "
    f"or sys.argv[1] not in os.environ.get('{PATHS}', '').split(os.pathsep)))"
)
_ANSWER = re.compile(rf"{_MARK} ([a-z]+ [0-9]+(?:\.[0-9]+)+(?: {ALONE})?)")
# Without what site-packages would run at a start, such as the agent. No -I: whether a script that passes its words on
# to a Python adds one is to be seen.
_WORDS = ("-S", "-c", _ASK)
_MAX_BYTES = 1 << 14
_MAX_LINE = 200


class NoPython(Exception):
    """The program cannot be asked, and why."""


class ProbeResult:
    """The answer: which Python it is, such as «cpython 3.12.4», or why it is not a Python."""

    __slots__ = ("is_python", "text")

    def __init__(self, text: str, *, is_python: bool) -> None:
        self.text = text
        self.is_python = is_python


class Probe:
    """A program that is asked for its Python. `number` identifies the order that needs the answer."""

    def __init__(self, number: int, python: str, environ: Mapping[str, str], now: float) -> None:
        """Raises NoPython if it cannot be started."""
        self.number = number
        self.deadline = now + WITHIN_S
        self._output_bytes = b""
        self._output, write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.fcntl(self._output, fcntl.F_SETOWN, os.getpid())
            flags = fcntl.fcntl(self._output, fcntl.F_GETFL)
            fcntl.fcntl(self._output, fcntl.F_SETFL, flags | fcntl.FASYNC)
            self._pidfd = os.pidfd_open(_started(python, environ, write_end))
        except BaseException:
            os.close(self._output)
            raise
        finally:
            os.close(write_end)

    def check(self, now: float) -> ProbeResult | None:
        """Return its answer; None while there is none."""
        try:
            while data := os.read(self._output, 4096):
                self._output_bytes = (self._output_bytes + data)[-_MAX_BYTES:]
        except BlockingIOError:
            is_late = now >= self.deadline
            return ProbeResult(f"it does not answer within {WITHIN_S:g} s", is_python=False) if is_late else None
        lines = [line.strip() for line in self._output_bytes.decode(errors="replace").splitlines() if line.strip()]
        for line in lines:
            if (found := _ANSWER.fullmatch(line)) is not None:
                return ProbeResult(found[1], is_python=True)
        last = repr(lines[-1][:_MAX_LINE]) if lines else "nothing"
        return ProbeResult(f"asked for its version, it says {last}", is_python=False)

    def close(self) -> None:
        """End it if it still runs, and reap it."""
        os.close(self._output)
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):  # one that hangs in the kernel is reaped later like any other child
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)


class Probes:
    """The programs that are asked now, each with the number of its order. Closing twice is fine."""

    def __init__(self) -> None:
        self._requested: list[Probe] = []

    def ask(self, number: int, python: str, environ: Mapping[str, str], now: float) -> None:
        """Ask a program. Raises NoPython and OSError."""
        self._requested.append(Probe(number, python, environ, now))

    def answers(self, now: float) -> Iterator[tuple[int, ProbeResult]]:
        """Yield each answer once. The caller may close all probes meanwhile."""
        for probe in tuple(self._requested):
            data = probe.check(now) if probe in self._requested else None
            if data is not None:
                self._requested.remove(probe)
                probe.close()
                yield probe.number, data

    @property
    def deadline(self) -> float | None:
        return min([probe.deadline for probe in self._requested], default=None)

    def close(self) -> None:
        requested, self._requested = self._requested, []
        for probe in requested:
            probe.close()


def _started(python: str, environ: Mapping[str, str], output: int) -> int:
    """Start it and return its pid. Raises NoPython."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, output, 1),
        (os.POSIX_SPAWN_DUP2, output, 2),
    ]
    words = [*_WORDS, environ.get(PATHS, "").partition(os.pathsep)[0]]
    number = ENOENT
    for path in places_of(python, environ):
        try:
            return os.posix_spawn(path, [path, *words], environ, file_actions=actions, setsigmask=())
        except OSError as error:
            if error.errno not in (ENOENT, ENOTDIR):
                number = error.errno or ENOENT
    raise NoPython(f"it cannot be started: {os.strerror(number)}")
