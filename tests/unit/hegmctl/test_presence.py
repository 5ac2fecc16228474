"""How hegmctl tells an unreachable daemon from a missing one: by the kernel's list of sockets and the daemon's lock."""

from __future__ import annotations

import socket
from pathlib import Path

from hegmctl.endpoint import Endpoint, holder, is_listened_at, unreachable
from hegmd.errors import NO_DAEMON, UNAVAILABLE
from hegmd.system.state_dir import StateDir


def _missing(path: Path, origin: str = "--socket") -> tuple[str, str]:
    error = unreachable(Endpoint(str(path), origin), FileNotFoundError(2, "No such file"))
    return error.code.name, error.message


def test_a_running_daemon_without_its_socket_file_is_not_reported_as_missing(socket_path: Path) -> None:
    """Issue 14, row 16: «no hegmd runs here»."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(socket_path))
        assert not is_listened_at(str(socket_path)), "bound, and nobody listens"
        listening.listen()
        socket_path.unlink()
        assert is_listened_at(str(socket_path))
        assert not is_listened_at(f"{socket_path}x")
        with StateDir(Path(f"{socket_path}.state")) as state:
            pid = (state.path / "lock").read_text().strip()
            gone = f"hegmd runs (pid {pid}), but its socket file {socket_path} was removed"
            assert _missing(socket_path) == (UNAVAILABLE.name, gone)
        assert _missing(socket_path) == (UNAVAILABLE.name, f"hegmd runs, but its socket file {socket_path} was removed")
    assert _missing(socket_path)[0] == NO_DAEMON.name


def test_the_lock_of_an_ended_daemon_is_ignored(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    with StateDir(folder):
        assert holder([str(tmp_path / "none"), str(folder)]) is not None
    assert holder([str(folder)]) is None
