"""Prestarts the next process of a restart: it imports the slow modules, and waits for its turn.

A process that was prestarted before its restart was known (`kept`) is asked again then: whether its modules are still
the same on disk, and to import what the training has imported since. Environment variables that have changed can still
be set, if the process reports that no code in it has read them.

Until its turn it is not part of the job: no signal is passed on to it, and its exit does not matter. It ends when the
socket pair is closed, so it ends with this process too. It is only started if the installation's agent supports it: an
older one would run the script at once.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
from contextlib import suppress
from time import monotonic

from hegmctl.parenthood import start
from hegmctl.rank_states import STATES
from hegmd.errors import HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The agent reads these; see hegmd/agent/standby.py.
READY_FD = "HEGM_READY_FD"
TELL_UNREAD = "HEGM_READY_TELL"
IMPORTS, PATH, READY, GO = b"imports", b"path", b"ready", b"go"
# The variables that differ between starts in the same environment.
STATE, STATE_FD, LOCK_FD = "HEGM_STATE", "HEGM_STATE_FD", "HEGM_STATE_LOCK_FD"
OPERATION = "HEGM_RESTART"
# A rank's connection to its launcher; see hegmd/agent/ranks/line.py.
LINE_FD = "HEGM_RANK_FD"
_OF_ONE_START = frozenset((STATE, STATE_FD, LOCK_FD, STATES, OPERATION, LINE_FD, "RANK", "LOCAL_RANK"))
_DESCRIPTORS = (STATE_FD, LOCK_FD, LINE_FD)
# The time to import PyTorch from a slow disk. After it, a start does not wait.
IMPORTS_WITHIN_S = 30.0
_MAX_BYTES = 1024
# All prestarted processes report these as unread; see `unread` in hegmd/agent/standby.py.
_MAY_BE_UNREAD = frozenset(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HEGM_GPU"))
_MESSAGE_BYTES = 1 << 20


class PrestartSpec:
    """The process to prestart: its expected start without the state, and the modules to import."""

    __slots__ = ("command", "environ", "imports", "path")

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], imports: Sequence[str], path: Sequence[str]
    ) -> None:
        self.command = tuple(command)
        self.environ = plain_surroundings(environ)
        self.imports = imports
        self.path = path


def plain_surroundings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return that environment without the variables of one start."""
    return {name: value for name, value in environ.items() if name not in _OF_ONE_START}


class PrestartedProcess:
    """A prestarted process. Raises HegmError and OSError if there can be none."""

    def __init__(self, what: PrestartSpec, mask: set[signal.Signals]) -> None:
        self.what = what
        #: True if it was started for another purpose, and has not reported yet that it is ready for this one.
        self.is_kept = False
        self._began = what.environ
        #: During its first import it is unknown what it reads.
        self._unread = _MAY_BE_UNREAD
        self._is_ready = self._is_settled = False
        self._deadline = monotonic() + IMPORTS_WITHIN_S
        _require_agent(what.environ)
        own_end, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line: socket.socket | None = own_end
        with child_end:
            try:
                own_end.setblocking(False)
                own_end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
                fcntl.fcntl(own_end.fileno(), fcntl.F_SETOWN, os.getpid())
                flags = fcntl.fcntl(own_end.fileno(), fcntl.F_GETFL)
                fcntl.fcntl(own_end.fileno(), fcntl.F_SETFL, flags | fcntl.FASYNC)
                own_end.send(_message(IMPORTS, what.imports))
                own_end.send(_message(PATH, what.path))
                environ = {**what.environ, READY_FD: str(child_end.fileno()), TELL_UNREAD: "1"}
                self.pid = start(what.command, environ, mask=mask, keep=(child_end.fileno(),)).pid
            except BaseException:
                own_end.close()
                raise
        self._pidfd = os.pidfd_open(self.pid)

    def check(self) -> bool:
        """Read its messages. Returns True if it has just become ready, or never will, or has ended."""
        data = b"" if self._line is None else _received(self._line)
        if data is None:
            return False
        is_news = not self._is_settled or self._line is not None
        self._is_settled = True
        what, *names = data.split(b"\0")
        if what == READY:
            self._is_ready, self._unread = True, frozenset(map(os.fsdecode, names))
            self.is_kept = False
        if what != READY or not self._fits(self.what.command, self.what.environ):
            self.end()
        return is_news

    def is_to_serve(self, what: PrestartSpec) -> bool:
        """Reserve it for that start; False if it does not fit. `check` then reports when it is ready."""
        if self._line is None or not self._fits(what.command, what.environ):
            return False
        before, self.what, self.is_kept = self.what, what, True
        if self._is_ready:
            self._is_ready = self._is_settled = False
            self._deadline = monotonic() + IMPORTS_WITHIN_S
            try:
                self._line.send(_message(IMPORTS, what.imports), socket.MSG_NOSIGNAL)
                self._line.send(_message(PATH, what.path), socket.MSG_NOSIGNAL)
            except OSError:  # it has just ended
                self.what = before
                return False
        return True

    @property
    def waits(self) -> bool:
        """Return True if it has imported everything and waits for its turn."""
        return self._is_ready and self._line is not None

    def awaited_until(self, command: Sequence[str], environ: Mapping[str, str]) -> float | None:
        """Return the monotonic instant until which that start has to wait for it; None if it need not."""
        is_it = self._line is not None and not self._is_ready and self._fits(command, environ)
        return self._deadline if is_it and monotonic() < self._deadline else None

    def activate_as(self, command: Sequence[str], environ: Mapping[str, str]) -> int | None:
        """Give it its turn as that start. Returns its pid, or None if it cannot; then it is ended."""
        self.check()
        line, self._line = self._line, None
        if line is None:
            return None
        try:
            if self._is_ready and self._fits(command, environ):
                _send_turn(line, self._began, environ)
                os.close(self._pidfd)
                return self.pid
        except OSError:
            pass  # it has just ended
        finally:
            line.close()
        self._kill()
        return None

    def end(self) -> None:
        """End it quietly. Calling it twice is fine."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
            self._kill()

    def _fits(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        is_it = tuple(command) == self.what.command and STATES not in environ
        return is_it and _differing(self._began, plain_surroundings(environ)) <= self._unread

    def _kill(self) -> None:
        """Kill it without waiting: if it hangs in the kernel it ends later, and is reaped then."""
        with suppress(ProcessLookupError, PermissionError):  # it may have become another user
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):  # it was taken up with others that have ended
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)


def make_ready(what: PrestartSpec, mask: set[signal.Signals]) -> PrestartedProcess | None:
    """Start it with these signals blocked. Returns None if there can be none; the job's own start then reports why."""
    try:
        return PrestartedProcess(what, mask)
    except (HegmError, OSError):
        return None


def _require_agent(environ: Mapping[str, str]) -> None:
    """Check that its Python gets an agent that can wait. Raises OSError."""
    inject = environ.get("PYTHONPATH", "").partition(os.pathsep)[0]
    with open(os.path.join(inject, "sitecustomize.py"), encoding="utf-8") as file:
        if READY_FD not in file.read():
            raise OSError(f"the agent in {inject} is of an older release that cannot prestart")


def _message(what: bytes, words: Sequence[str]) -> bytes:
    return b"\0".join([what, *(os.fsencode(word) for word in words)])


def _received(line: socket.socket) -> bytes | None:
    """Return what was received; None if nothing was, and empty bytes if the other end is closed."""
    try:
        return line.recv(_MAX_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _send_turn(line: socket.socket, began: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """Send what changes its environment to that one: descriptors, then values, and names to remove."""
    names = [name for name in _DESCRIPTORS if name in environ]
    rest = sorted(name for name in _OF_ONE_START.difference(_DESCRIPTORS) if name in environ)
    changed = sorted(_differing(began, plain_surroundings(environ)))
    words = [*names, *(f"{name}={environ[name]}" for name in [*rest, *changed] if name in environ)]
    words += [f"={name}" for name in changed if name not in environ]
    fds = [int(environ[name]) for name in names]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
    line.sendmsg([_message(GO, words)], rights if fds else [], socket.MSG_NOSIGNAL)
