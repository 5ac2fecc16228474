"""The Unix socket: passed by systemd or bound here; one session for each connection, within a limit.

Owner and mode of the socket are set before it listens, so that no client connects in between. A socket file without a
listener is replaced. If a daemon answers on it, this one refuses to start.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import resource
import socket
import stat
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.abc
import anyio.lowlevel

from hegmd.errors import BUSY, DENIED, REFUSED, HegmError
from hegmd.protocol.connection import ServerConnection
from hegmd.server.auth import Peer, Policy
from hegmd.server.session import Session
from hegmd.system.stream import PeerStream
from hegmd.telemetry.log import limited
from hegmd.telemetry.metrics import Counters

logger = logging.getLogger(__name__)

BACKLOG = 1024
# One in this many connections is reserved for administrators.
_KEPT_SHARE = 16
# Out of descriptors or memory: the connection stays in the backlog, and trying again at once would spin.
_PRESSED = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_PRESSED_PAUSE_S = 0.1


def bind(path: Path, mode: int, group_id: int | None, *, directory_mode: int = 0o755) -> socket.socket:
    """Return a listening socket there, in a directory that is made if needed. Raises HegmError, as if another daemon
    listens.
    """
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        path.parent.mkdir(mode=directory_mode, parents=True, exist_ok=True)
        _clear(path)
        listening.bind(str(path))
        try:
            if group_id is not None:
                os.chown(path, -1, group_id)
            path.chmod(mode)
            listening.listen(BACKLOG)
        except OSError:
            path.unlink()
            raise
    except HegmError:
        listening.close()
        raise
    except OSError as error:
        listening.close()
        raise HegmError(
            REFUSED,
            f"cannot listen at {path}: {error.strerror or error}",
            "choose another path with --socket, or make its directory writable for this user",
        ) from error
    return listening


def take_away(path: Path, bound: os.stat_result) -> None:
    """Remove the socket file that was bound, unless another daemon has replaced it since."""
    with contextlib.suppress(OSError):
        found = path.lstat()
        if (found.st_dev, found.st_ino, found.st_mtime_ns) == (bound.st_dev, bound.st_ino, bound.st_mtime_ns):
            path.unlink()


def _file_of(listening: socket.socket) -> tuple[int, int] | None:
    """Return the identity of the file at the socket's path."""
    try:
        found = os.lstat(listening.getsockname())
    except (OSError, ValueError):  # ValueError: a name in the abstract namespace
        return None
    return found.st_dev, found.st_ino


def _clear(path: Path) -> None:
    """Remove a socket without a listener. Raises HegmError for anything else at the path."""
    try:
        found = path.lstat()
    except OSError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise HegmError(REFUSED, f"{path} exists and is not a socket", "rename it, or choose another --socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass  # a daemon listens: with a full backlog, or not for this user
    raise HegmError(
        REFUSED,
        f"another hegmd listens at {path}",
        "stop it first (systemctl stop hegmd.socket hegmd.service), or choose another --socket",
    )


class Admission:
    """Counts connections and decides whether one more is accepted."""

    def __init__(self, policy: Policy, clients: int, clients_per_uid: int) -> None:
        self.policy = policy
        self.clients = clients
        self.clients_per_uid = clients_per_uid
        self._by_uid: Counter[int] = Counter()

    @property
    def current(self) -> int:
        return self._by_uid.total()

    def enter(self, peer: Peer) -> None:
        """Count the peer in. Raises DENIED or BUSY; then nothing is counted."""
        if not self.policy.may_connect(peer):
            raise HegmError(
                DENIED,
                f"this daemon is private to uid {self.policy.daemon_uid}; you are uid {peer.uid}",
                "start your own with `hegmd --user`, or use the system's: systemctl start hegmd",
            )
        kept = 0 if self.policy.may_act_on_all(peer) else self.clients // _KEPT_SHARE
        if self.current >= self.clients - kept:
            raise HegmError(
                BUSY,
                f"{self.current} clients are connected, which is the limit",
                "try again later, or have limits.clients raised in hegmd.toml",
            )
        if self._by_uid[peer.uid] >= self.clients_per_uid:
            raise HegmError(
                BUSY,
                f"uid {peer.uid} has {self.clients_per_uid} connections, which is the limit for one user",
                "close some, or have limits.clients_per_uid raised in hegmd.toml",
            )
        self._by_uid[peer.uid] += 1

    def leave(self, peer: Peer) -> None:
        self._by_uid[peer.uid] -= 1
        if not self._by_uid[peer.uid]:
            del self._by_uid[peer.uid]


class Listener:
    """Accepts on one listening socket, which it owns, until it is stopped.

    If the socket's file is gone, no client can connect: `take` continues with another socket.
    """

    def __init__(
        self,
        listening: socket.socket,
        admission: Admission,
        open_session: Callable[[PeerStream, Peer], Session],
        counters: Counters,
    ) -> None:
        listening.setblocking(False)
        self._listening = listening
        self._replaced: list[socket.socket] = []
        self._file = _file_of(listening)
        self._admission = admission
        self._open_session = open_session
        self._counters = counters
        self._sessions: set[Session] = set()
        self._accepting = anyio.CancelScope()
        self._waiting = anyio.CancelScope()
        self._pressed = False

    @property
    def path(self) -> str:
        return str(self._listening.getsockname())

    @property
    def is_found(self) -> bool:
        """Return True if its file is at its path, or if the socket has no file."""
        path = self._listening.getsockname()
        has_file = isinstance(path, str) and path.startswith("/")
        return not has_file or (self._file is not None and self._file == _file_of(self._listening))

    def take(self, listening: socket.socket) -> None:
        """Accept on that socket from now on. The former one is closed once its backlog is accepted."""
        listening.setblocking(False)
        self._replaced.append(self._listening)
        self._listening = listening
        self._file = _file_of(listening)
        self._waiting.cancel()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Accept until `stop`, after which every session says goodbye. Cancellation ends sessions at once."""
        try:
            async with anyio.create_task_group() as tasks:
                task_status.started()
                with self._accepting:
                    while True:
                        await self._accept(tasks)
                self._listening.close()
                for session in list(self._sessions):
                    tasks.start_soon(session.stop)
        finally:
            for listening in (self._listening, *self._replaced):
                listening.close()

    def stop(self) -> None:
        """Stop accepting, notify every peer, and let `run` return."""
        self._accepting.cancel()

    async def _accept(self, tasks: anyio.abc.TaskGroup) -> None:
        listening = self._replaced[0] if self._replaced else self._listening
        try:
            connection, _ = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError) as error:
            if listening is not self._listening:
                if isinstance(error, BlockingIOError):  # its backlog is empty
                    self._replaced.remove(listening)
                    listening.close()
                return
            with anyio.CancelScope() as self._waiting:
                await anyio.wait_readable(listening)
            return
        except OSError as error:
            if error.errno not in _PRESSED:
                raise
            self._log_shortage(error)
            await anyio.sleep(_PRESSED_PAUSE_S)
            return
        self._log_recovery()
        self._admit(connection, tasks)
        await anyio.lowlevel.checkpoint()  # many new connections must not starve the others

    def _log_shortage(self, error: OSError) -> None:
        """Log the lack of resources once while it lasts: accepting is tried ten times a second."""
        if not self._pressed:
            self._pressed = True
            limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            why = f"{error.strerror}; hegmd may have {limit} open, raise LimitNOFILE= of hegmd.service"
            limited(logger, "accept", logging.ERROR, "cannot accept connections: %s", why)

    def _log_recovery(self) -> None:
        if self._pressed:
            self._pressed = False
            limited(logger, "accept-again", logging.INFO, "connections are accepted again")

    def _admit(self, connection: socket.socket, tasks: anyio.abc.TaskGroup) -> None:
        try:
            peer = peer_of(connection)
            self._admission.enter(peer)
        except OSError:
            connection.close()
        except HegmError as error:
            self._turn_away(connection, error)
        else:
            tasks.start_soon(self._serve, PeerStream(connection), peer, name=f"session of pid {peer.pid}")

    def _turn_away(self, connection: socket.socket, error: HegmError) -> None:
        """Send the reason if that is possible without waiting, and close."""
        self._counters.refused(error.code.name)
        limited(logger, f"refused-{error.code.name}", logging.WARNING, "connection refused: %s", error.message)
        reply = ServerConnection(frame_bytes=0, requests_in_flight=0).error(None, error)
        with connection, contextlib.suppress(OSError):
            connection.setblocking(False)
            connection.send(reply, socket.MSG_NOSIGNAL)

    async def _serve(self, stream: PeerStream, peer: Peer) -> None:
        session = self._open_session(stream, peer)
        self._sessions.add(session)
        self._counters.connected()
        try:
            await session.serve()
        finally:
            self._sessions.discard(session)
            self._counters.disconnected()
            self._admission.leave(peer)


# The kernel's credentials of a peer.
SO_PEERGROUPS = 59  # Linux 4.13; Python's socket module has no name for it
_UCRED = struct.Struct("iII")
_GID = struct.Struct("I")
_SMALL_BYTES = 1024  # the most that Python's getsockopt takes: 256 groups
_LARGE_BYTES = 65_536 * _GID.size  # NGROUPS_MAX groups


def peer_of(connection: socket.socket) -> Peer:
    """Return the peer. Raises OSError if the socket has lost its file."""
    pid, uid, gid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid=pid, uid=uid, gid=gid, groups=_groups_of(connection))


def _groups_of(connection: socket.socket) -> frozenset[int]:
    """Return supplementary groups: an administrator adds a user to a group there.

    If the kernel cannot report them, only the primary group counts, which is the safe side.
    """
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _SMALL_BYTES)
    except OSError as error:
        raw = _many_groups_of(connection) if error.errno == errno.ERANGE else b""
    return frozenset(gid for (gid,) in _GID.iter_unpack(raw))


def _many_groups_of(connection: socket.socket) -> bytes:
    """Return more than 256 groups of the peer, which Python's getsockopt cannot return."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_LARGE_BYTES)
    size = ctypes.c_uint32(_LARGE_BYTES)
    option = (connection.fileno(), socket.SOL_SOCKET, SO_PEERGROUPS, buffer, ctypes.byref(size))
    if libc.getsockopt(*option) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return buffer.raw[: size.value]
