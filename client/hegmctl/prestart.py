"""The next process of a restart, started before its turn: it imports what takes long, and waits for a word from here.

One that was started long before anybody knew of what, `kept`, is asked once more when it is: whether all that it has is
still so on disk, and for what the training has imported since. What of its environment is not as it will be, it can
still be given, as far as it says that nothing in it has read that yet.

It is no job and no child that the supervisor speaks of until its turn: no signal is passed on to it, and its end is
nobody's. Who lets go of the pair of sockets ends it, so that it ends with this process as well. Only an installation
whose agent knows of such a start is trusted with one: any other would run the script at once.
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

# What its agent reads; see hegmd/agent/standby.py.
READY_FD = "HEGM_READY_FD"
TELL_UNREAD = "HEGM_READY_TELL"
IMPORTS, PATH, READY, GO = b"imports", b"path", b"ready", b"go"
# What differs from one start to the next with the same surroundings.
STATE, STATE_FD, LOCK_FD = "HEGM_STATE", "HEGM_STATE_FD", "HEGM_STATE_LOCK_FD"
OPERATION = "HEGM_RESTART"
# A rank's connection to its launcher; see hegmd/agent/ranks/line.py.
LINE_FD = "HEGM_RANK_FD"
_OF_ONE_START = frozenset((STATE, STATE_FD, LOCK_FD, STATES, OPERATION, LINE_FD, "RANK", "LOCAL_RANK"))
_DESCRIPTORS = (STATE_FD, LOCK_FD, LINE_FD)
# As long as PyTorch takes to be imported from a slow disk; from then on it is not waited for.
IMPORTS_WITHIN_S = 30.0
_MAX_BYTES = 1024
# What all of them report as unread; see `unread` in hegmd/agent/standby.py.
_MAY_BE_UNREAD = frozenset(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HEGM_GPU"))
_MESSAGE_BYTES = 1 << 20


class Beforehand:
    """What is to be made ready: the start that is expected, but for its state, and what to import for it."""

    __slots__ = ("command", "environ", "imports", "path")

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], imports: Sequence[str], path: Sequence[str]
    ) -> None:
        self.command = tuple(command)
        self.environ = plain_surroundings(environ)
        self.imports = imports
        self.path = path


def plain_surroundings(environ: Mapping[str, str]) -> dict[str, str]:
    """That environment without what belongs to one start."""
    return {name: value for name, value in environ.items() if name not in _OF_ONE_START}


class Readied:
    """One such process. Raises HegmError and OSError where there can be none."""

    def __init__(self, what: Beforehand, mask: set[signal.Signals]) -> None:
        self.what = what
        #: Whether it was there before what it is for now was known, and has not said yet that it is ready for that.
        self.is_kept = False
        self._began = what.environ
        #: While it imports for the first time it is not known what that reads.
        self._unread = _MAY_BE_UNREAD
        self._is_ready = self._is_settled = False
        self._deadline = monotonic() + IMPORTS_WITHIN_S
        _require_agent(what.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._line: socket.socket | None = ours
        with theirs:
            try:
                ours.setblocking(False)
                ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _MESSAGE_BYTES)
                fcntl.fcntl(ours.fileno(), fcntl.F_SETOWN, os.getpid())
                flags = fcntl.fcntl(ours.fileno(), fcntl.F_GETFL)
                fcntl.fcntl(ours.fileno(), fcntl.F_SETFL, flags | fcntl.FASYNC)
                ours.send(_message(IMPORTS, what.imports))
                ours.send(_message(PATH, what.path))
                environ = {**what.environ, READY_FD: str(theirs.fileno()), TELL_UNREAD: "1"}
                self.pid = start(what.command, environ, mask=mask, keep=(theirs.fileno(),)).pid
            except BaseException:
                ours.close()
                raise
        self._pidfd = os.pidfd_open(self.pid)

    def look(self) -> bool:
        """Read what it has said; whether it has just become ready, or never will be, or is no more."""
        said = b"" if self._line is None else _received(self._line)
        if said is None:
            return False
        is_news = not self._is_settled or self._line is not None
        self._is_settled = True
        what, *names = said.split(b"\0")
        if what == READY:
            self._is_ready, self._unread = True, frozenset(map(os.fsdecode, names))
            self.is_kept = False
        if what != READY or not self._fits(self.what.command, self.what.environ):
            self.end()
        return is_news

    def is_to_serve(self, what: Beforehand) -> bool:
        """Have it be for that start; False where it is not fit for it. Whether it is ready then, `look` tells anew."""
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
        """Whether it has imported all, and waits for its turn."""
        return self._is_ready and self._line is not None

    def awaited_until(self, command: Sequence[str], environ: Mapping[str, str]) -> float | None:
        """The monotonic instant until which that start is to wait for it; None where it is not to."""
        is_it = self._line is not None and not self._is_ready and self._fits(command, environ)
        return self._deadline if is_it and monotonic() < self._deadline else None

    def go_on_as(self, command: Sequence[str], environ: Mapping[str, str]) -> int | None:
        """Give it its turn as that start; its pid, or None where it cannot have it, and is ended."""
        self.look()
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
        """Have it end, quietly. Twice is fine."""
        line, self._line = self._line, None
        if line is not None:
            line.close()
            self._kill()

    def _fits(self, command: Sequence[str], environ: Mapping[str, str]) -> bool:
        is_it = tuple(command) == self.what.command and STATES not in environ
        return is_it and _differing(self._began, plain_surroundings(environ)) <= self._unread

    def _kill(self) -> None:
        """It is not waited for: in a call of the kernel that hangs it ends at some time, and is taken up then."""
        with suppress(ProcessLookupError, PermissionError):  # it may have become another user
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with suppress(ChildProcessError):  # it was taken up with others that have ended
            os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        os.close(self._pidfd)


def make_ready(what: Beforehand, mask: set[signal.Signals]) -> Readied | None:
    """Start it, with these signals blocked; None where there can be none, which its own start will tell of."""
    try:
        return Readied(what, mask)
    except (HegmError, OSError):
        return None


def _require_agent(environ: Mapping[str, str]) -> None:
    """See that its Python comes by an agent that waits. Raises OSError."""
    inject = environ.get("PYTHONPATH", "").partition(os.pathsep)[0]
    with open(os.path.join(inject, "sitecustomize.py"), encoding="utf-8") as file:
        if READY_FD not in file.read():
            raise OSError(f"the agent in {inject} is of an older release that cannot prestart")


def _message(what: bytes, words: Sequence[str]) -> bytes:
    return b"\0".join([what, *(os.fsencode(word) for word in words)])


def _received(line: socket.socket) -> bytes | None:
    """What has come; None where nothing has yet, and nothing at all where the other end is gone."""
    try:
        return line.recv(_MAX_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _differing(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


def _send_turn(line: socket.socket, began: Mapping[str, str], environ: Mapping[str, str]) -> None:
    """What it lacks of that environment: descriptors, which come along, then values, and names without one."""
    names = [name for name in _DESCRIPTORS if name in environ]
    rest = sorted(name for name in _OF_ONE_START.difference(_DESCRIPTORS) if name in environ)
    changed = sorted(_differing(began, plain_surroundings(environ)))
    words = [*names, *(f"{name}={environ[name]}" for name in [*rest, *changed] if name in environ)]
    words += [f"={name}" for name in changed if name not in environ]
    fds = [int(environ[name]) for name in names]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(fds)}i", *fds))]
    line.sendmsg([_message(GO, words)], rights if fds else [], socket.MSG_NOSIGNAL)
