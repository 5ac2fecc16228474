"""Finds the daemon's socket, and explains why a daemon cannot be reached.

All programs use the same order: the given path, HEGM_SOCKET, the node's socket if it exists and the caller may use it,
and the socket of the user's own daemon. The node's daemon comes first because it knows more. It is skipped for callers
without permission, who could otherwise use their own daemon only by naming it each time. If a user has no runtime
directory, such as after `su` on a node without logind, `hegmctl run` starts a daemon in a directory of /tmp. It finds
that one too, unless another user could have put a socket into it.
"""

from __future__ import annotations

import os
from errno import EACCES, EAGAIN, ECONNREFUSED, ENOENT, ENOTDIR, EPERM
from stat import S_ISDIR, S_ISSOCK

from hegmd.errors import BUSY, DENIED, NO_DAEMON, UNAVAILABLE, USAGE, HegmError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SYSTEM_SOCKET = "/run/hegm/hegmd.sock"
TEMPORARY = "/tmp"  # noqa: S108 - a directory below it is used only if no other user can write to it
GROUP = "hegm"
_SYSTEMD_RUNS = "/run/systemd/system"
UNIT = "hegmd.socket"
UNIT_FOLDERS = tuple(f"{root}/systemd/system" for root in ("/etc", "/usr/local/lib", "/usr/lib", "/lib"))
MAX_PATH_BYTES = 107
_LISTENS = 0x10000  # __SO_ACCEPTCON: net/unix/af_unix.c shows it in /proc/net/unix
# As in hegmd/system/state_dir.py.
LOCK_NAME, SOCKET_NAME = "lock", "socket"


class Endpoint:
    """A socket's path, and why it was chosen. `others` are the paths that were tried before it."""

    __slots__ = ("origin", "others", "path")

    def __init__(self, path: str, origin: str, others: tuple[str, ...] = ()) -> None:
        self.path = path
        self.origin = origin
        self.others = others


def find_endpoint(
    path: str | None = None,
    environ: Mapping[str, str] | None = None,
    system_socket: str = SYSTEM_SOCKET,
    temporary: str = TEMPORARY,
) -> Endpoint:
    """Return the socket to use, without opening it. Raises HegmError USAGE for an invalid path."""
    environ = os.environ if environ is None else environ
    if path:
        return _checked(Endpoint(path, "--socket"))
    if named := environ.get("HEGM_SOCKET"):
        return _checked(Endpoint(named, "HEGM_SOCKET"))
    if os.access(system_socket, os.W_OK):
        return Endpoint(system_socket, "system")
    own = f"{_runtime_dir(environ)}/hegm/hegmd.sock"
    if os.path.exists(own):
        return _checked(Endpoint(own, "user", (system_socket,)))
    bare = _bare_socket(temporary)
    if os.path.exists(bare) and is_private(os.path.dirname(bare)):
        return Endpoint(bare, "user", (system_socket, own))
    return Endpoint(system_socket, "system", (own,))


def own_socket(environ: Mapping[str, str]) -> str:
    """Return where `hegmctl run` starts a daemon that is found without being named."""
    if os.geteuid() == 0 and not environ.get("XDG_RUNTIME_DIR"):
        return SYSTEM_SOCKET
    runtime_dir = _runtime_dir(environ)
    return f"{runtime_dir}/hegm/hegmd.sock" if os.access(runtime_dir, os.W_OK) else _bare_socket()


def is_private(folder: str) -> bool:
    """Return True if it is a directory of the caller, no link, that other users cannot write to."""
    try:
        state = os.lstat(folder)
    except OSError:
        return False
    return S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _runtime_dir(environ: Mapping[str, str]) -> str:
    path = environ.get("XDG_RUNTIME_DIR", "")
    # cron, su and sudo leave it out; hegmd --user falls back to the same place
    return path if path.startswith("/") else f"/run/user/{os.getuid()}"


def _bare_socket(temporary: str = TEMPORARY) -> str:
    return f"{temporary}/hegm-{os.geteuid()}/hegmd.sock"


def _checked(endpoint: Endpoint) -> Endpoint:
    size_bytes = len(os.fsencode(endpoint.path))
    if size_bytes > MAX_PATH_BYTES or "\0" in endpoint.path:
        raise HegmError(
            USAGE,
            f"a socket cannot have this path ({endpoint.origin}): {size_bytes} of {MAX_PATH_BYTES} bytes, or a NUL",
            "use a shorter path",
        )
    return endpoint


def unreachable(endpoint: Endpoint, error: OSError) -> HegmError:
    path = endpoint.path
    if error.errno in (ENOENT, ENOTDIR):
        return _missing(endpoint)
    if error.errno in (EACCES, EPERM):
        return _denied(path)
    if error.errno == ECONNREFUSED:
        if not _is_socket(path):
            return HegmError(NO_DAEMON, f"{path} is not a socket", f"name the daemon's socket; {_named_by(endpoint)}")
        return HegmError(
            NO_DAEMON, f"no process listens at {path}: the daemon that created this socket has ended", _start(endpoint)
        )
    if error.errno == EAGAIN:
        return HegmError(
            BUSY,
            f"the daemon at {path} accepts no more connections now",
            "try again; if it fails again, run: journalctl -u hegmd",
        )
    return HegmError(
        UNAVAILABLE, f"{path} does not accept a connection: {error.strerror or error}", "run: journalctl -u hegmd"
    )


def _running(endpoint: Endpoint) -> HegmError | None:
    """Return the error if a daemon runs but its socket's file was removed; None if no daemon is found."""
    for path in (endpoint.path, *endpoint.others):
        pid = holder(state_folders(path, SYSTEM_SOCKET, os.environ))
        by = "" if pid is None else f" (pid {pid})"
        if is_listened_at(path):
            again = "try again in a few seconds: hegmd creates the file again, or logs why it cannot"
            return HegmError(UNAVAILABLE, f"hegmd runs{by}, but its socket file {path} was removed", again)
        if pid is not None and endpoint.origin not in ("--socket", "HEGM_SOCKET"):
            see = "try again if it is starting; if it listens elsewhere, name that socket with --socket"
            return HegmError(UNAVAILABLE, f"hegmd runs{by}, but does not listen at {path}", see)
    return None


def _missing(endpoint: Endpoint) -> HegmError:
    running = _running(endpoint)
    if running is not None:
        return running
    if endpoint.origin in ("--socket", "HEGM_SOCKET"):
        return HegmError(NO_DAEMON, f"there is no socket at {endpoint.path} ({endpoint.origin})", _start(endpoint))
    places = " nor at ".join((endpoint.path, *endpoint.others))
    return HegmError(NO_DAEMON, f"no hegmd runs here: there is no socket at {places}", _start(endpoint))


def _start(endpoint: Endpoint) -> str:
    """Return the command that starts the missing daemon."""
    if endpoint.origin in ("--socket", "HEGM_SOCKET") and endpoint.path != SYSTEM_SOCKET:
        return f"check the path, or start a daemon there: `hegmd --socket {endpoint.path}`"
    if endpoint.origin == "user":
        return "start it: `hegmd --user`"
    if os.geteuid() == 0:
        return "start it: `systemctl start hegmd.socket`" if os.path.isdir(_SYSTEMD_RUNS) else "start it: `hegmd`"
    if os.path.isdir(_SYSTEMD_RUNS):
        return "start it: `sudo systemctl start hegmd.socket`, or one for your own processes: `hegmd --user`"
    return "start one for your own processes: `hegmd --user`"


def _named_by(endpoint: Endpoint) -> str:
    return f"this path comes from {endpoint.origin}" if endpoint.origin.isupper() else "`--socket PATH` does"


def _is_socket(path: str) -> bool:
    try:
        return S_ISSOCK(os.stat(path).st_mode)
    except OSError:
        return False


def _denied(path: str) -> HegmError:
    """Return the error for a user outside the group, or for a session that is older than the membership."""
    message = f"you have no permission for the daemon's socket {path}"
    user, in_group = _membership()
    if in_group:
        return HegmError(
            DENIED,
            f"{message}: {user} is in the group {GROUP}, but this session is older than that",
            f"log in again, or run: newgrp {GROUP}",
        )
    return HegmError(
        DENIED,
        message,
        f"join the group: `sudo usermod -aG {GROUP} {user}`, then log in again; "
        "or start a daemon for your own processes: `hegmd --user`",
    )


def _membership() -> tuple[str, bool]:
    """Return the caller's name, and whether the user database has it in the group."""
    import grp
    import pwd

    try:
        user = pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return "USER", False
    try:
        group = grp.getgrnam(GROUP)
    except KeyError:
        return user, False
    return user, user in group.gr_mem and group.gr_gid not in os.getgroups()


def is_listened_at(path: str) -> bool:
    """Return True if a socket bound to that path listens, even if its file is gone."""
    name = os.fsencode(path)
    try:
        with open("/proc/net/unix", "rb") as lines:
            next(lines, b"")
            for line in lines:
                fields = line.rstrip(b"\n").split(None, 7)
                if len(fields) == 8 and fields[7] == name and int(fields[3], 16) & _LISTENS:
                    return True
    except (OSError, ValueError):
        pass  # it is not known, as in a container without /proc
    return False


def holder(folders: Iterable[str]) -> str | None:
    """Return the pid of the daemon that locks the first locked state directory; None if none is locked."""
    import fcntl

    for folder in folders:
        try:
            fd = os.open(f"{folder}/{LOCK_NAME}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
        except OSError:
            continue
        finally:
            os.close(fd)
    return None


def require_no_stopped_unit(
    path: str, folders: Sequence[str] = UNIT_FOLDERS, systemd_runs: str = _SYSTEMD_RUNS
) -> None:
    """Raise NO_DAEMON if `path` is the node's socket and systemd has a unit for it, which is stopped then.

    Another daemon there would take its place: the unit could not start, and other users' jobs would find no daemon.
    """
    installed = os.path.isdir(systemd_runs) and any(os.path.exists(f"{folder}/{UNIT}") for folder in folders)
    if path == SYSTEM_SOCKET and installed:
        raise HegmError(
            NO_DAEMON,
            f"the hegmd of this node is stopped: systemd does not listen at {path}",
            f"start it: systemctl start {UNIT}; or run without a daemon: --no-daemon-start",
        )


def require_no_others_socket(path: str, folder: str) -> None:
    """Raise NO_DAEMON if a daemon on another state directory than `folder` has left its socket there.

    Its jobs wait for that daemon. Another daemon in its place would give them new ids, and would not know their
    operations.
    """
    try:
        found = os.lstat(path)
    except OSError:
        return
    if not S_ISSOCK(found.st_mode):
        return
    try:
        with open(f"{folder}/{SOCKET_NAME}", encoding="ascii", errors="replace") as file:
            noted = file.read().split()
    except OSError:
        noted = []
    if noted != [str(found.st_dev), str(found.st_ino), str(found.st_mtime_ns)]:
        raise HegmError(
            NO_DAEMON,
            f"the daemon that created the socket {path} has ended, and `hegmctl run` had not started it",
            "start it again as before, so that its jobs find it; or run without it: --no-daemon-start; "
            f"if no job needs it, run: rm {path}",
        )


def state_folders(path: str, system_socket: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the default state directory of the daemon at that socket."""
    own = environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    started_by_run = f"{path}.state"
    return ("/var/lib/hegm",) if path == system_socket else (started_by_run, f"{own}/hegm")
