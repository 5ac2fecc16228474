"""The places where hegmctl looks for the daemon, and its message if there is none."""

from __future__ import annotations

import os
import socket
import sys
from errno import EACCES, EAGAIN, EIO
from functools import partial
from pathlib import Path

import pytest

from hegmctl.connection import connect
from hegmctl.endpoint import (
    SYSTEM_SOCKET,
    Endpoint,
    find_endpoint,
    is_private,
    require_no_others_socket,
    require_no_stopped_unit,
    unreachable,
)
from hegmd.config import load
from hegmd.errors import BUSY, DENIED, NO_DAEMON, UNAVAILABLE, USAGE, HegmError
from hegmd.system.state_dir import note_socket
from tests.patience import HANG_S
from tests.unit.hegmctl.running import as_nobody, command, environment


def test_the_option_comes_before_the_environment(socket_dir: Path) -> None:
    environ = {"HEGM_SOCKET": "/b", "XDG_RUNTIME_DIR": str(socket_dir)}
    assert find_endpoint("/a", environ).path == "/a"
    assert find_endpoint(None, environ).path == "/b"
    assert find_endpoint("", environ).origin == "HEGM_SOCKET"


def test_the_nodes_socket_comes_before_the_users_own(socket_dir: Path) -> None:
    system, own = socket_dir / "system", socket_dir / "hegm" / "hegmd.sock"
    own.parent.mkdir()
    own.touch()
    system.touch()
    environ = {"HEGM_SOCKET": "", "XDG_RUNTIME_DIR": str(socket_dir)}
    assert find_endpoint(None, environ, str(system)).path == str(system)
    system.unlink()
    assert find_endpoint(None, environ, str(system)).path == str(own)
    own.unlink()
    missing = find_endpoint(None, environ, str(system))
    assert (missing.path, missing.others) == (str(system), (str(own),))
    assert find_endpoint(None, {}, str(system)).path == str(system)


@pytest.mark.parametrize("environ", [{}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "relative"}])
def test_without_a_runtime_directory_it_tries_the_socket_of_the_users_daemon(
    socket_dir: Path, environ: dict[str, str]
) -> None:
    """`hegmd --user` listened below /run/user, and hegmctl from cron or su did not look there."""
    missing = find_endpoint(None, environ, str(socket_dir / "none"))
    listens_at = load(user_mode=True, environ={**environ, "HOME": str(socket_dir)}).daemon.socket
    assert missing.others == (str(listens_at),)
    assert missing.others[0].startswith("/run/user/")


def test_a_daemon_that_run_started_without_a_runtime_directory_is_found_again(socket_dir: Path) -> None:
    """`hegmctl run` started it in /tmp, and `hegmctl ps` in the next terminal said that no hegmd runs here."""
    system = str(socket_dir / "none")
    environ = {"XDG_RUNTIME_DIR": str(socket_dir / "gone")}
    folder = socket_dir / f"hegm-{os.geteuid()}"
    folder.mkdir(mode=0o700)
    bare = folder / "hegmd.sock"
    bare.touch()
    found = find_endpoint(None, environ, system, str(socket_dir))
    assert (found.path, found.origin) == (str(bare), "user")
    bare.unlink()
    assert find_endpoint(None, environ, system, str(socket_dir)).path == system


def test_a_folder_in_tmp_that_others_may_write_to_is_not_trusted(socket_dir: Path) -> None:
    """Any user could create /tmp/hegm-1000 before user 1000 did, and answer there as a daemon."""
    folder = socket_dir / f"hegm-{os.geteuid()}"
    folder.mkdir()
    (folder / "hegmd.sock").touch()
    looked = partial(find_endpoint, None, {"XDG_RUNTIME_DIR": "/gone"}, "/none", str(socket_dir))
    assert is_private(str(folder))
    folder.chmod(0o775)
    assert not is_private(str(folder))
    assert looked().path == "/none"
    folder.chmod(0o755)
    elsewhere = socket_dir / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)
    assert not is_private(str(folder)), "somebody else's link"
    assert looked().path == "/none"


@pytest.mark.thorough
def test_a_socket_that_the_caller_may_not_use_gives_way_to_the_callers_own(socket_dir: Path) -> None:
    system, own = socket_dir / "system", socket_dir / "hegm" / "hegmd.sock"
    own.parent.mkdir()
    own.touch()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(system))
        listener.listen()
        system.chmod(0o600)
        socket_dir.chmod(0o755)
        program = (
            "import sys; from hegmctl.endpoint import find_endpoint as find; print(find(None, None, sys.argv[1]).path)"
        )
        environ = environment(XDG_RUNTIME_DIR=str(socket_dir))
        found = as_nobody(sys.executable, "-c", program, str(system), environ=environ)
    assert found.stdout.strip() == str(own)


@pytest.mark.parametrize("path", ["/" + "x" * 107, "/a\0b"])
def test_a_path_that_no_socket_can_have_is_a_mistake_of_usage(path: str) -> None:
    with pytest.raises(HegmError, match="a socket cannot have this path") as raised:
        find_endpoint(path)
    assert raised.value.code is USAGE


def _failure_of(path: Path) -> HegmError:
    with pytest.raises(HegmError) as raised:
        connect(str(path), timeout_s=HANG_S)
    return raised.value


def test_a_socket_is_left_to_the_daemon_whose_state_directory_notes_it(tmp_path: Path, socket_path: Path) -> None:
    folder = str(tmp_path)
    require_no_others_socket(str(socket_path), folder)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path))
    with pytest.raises(HegmError, match="has ended"):
        require_no_others_socket(str(socket_path), folder)
    note_socket(tmp_path, socket_path)
    require_no_others_socket(str(socket_path), folder)
    socket_path.unlink()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path))
    with pytest.raises(HegmError, match="has ended") as raised:
        require_no_others_socket(str(socket_path), folder)
    assert raised.value.code is NO_DAEMON


def test_the_socket_of_a_stopped_unit_is_left_to_systemd(tmp_path: Path) -> None:
    """Issue 19: after a clean stop of the node's hegmd, `hegmctl run` started its own daemon at that socket."""
    units, runs = tmp_path / "units", tmp_path / "systemd"
    for folder in (units, runs):
        folder.mkdir()
    folders = (str(tmp_path / "nothing"), str(units))
    require_no_stopped_unit(SYSTEM_SOCKET, folders, str(runs))
    (units / "hegmd.socket").touch()
    require_no_stopped_unit(str(tmp_path / "own.sock"), folders, str(runs))
    require_no_stopped_unit(SYSTEM_SOCKET, folders, str(tmp_path / "no systemd here"))
    with pytest.raises(HegmError, match="the hegmd of this node is stopped") as raised:
        require_no_stopped_unit(SYSTEM_SOCKET, folders, str(runs))
    assert raised.value.code is NO_DAEMON
    assert "systemctl start hegmd.socket" in raised.value.hint


def test_a_missing_socket_is_reported_with_the_command_that_creates_it(socket_path: Path) -> None:
    error = _failure_of(socket_path)
    assert error.code is NO_DAEMON
    assert error.message == f"there is no socket at {socket_path} (--socket)"
    assert f"`hegmd --socket {socket_path}`" in error.hint


def test_a_socket_left_by_its_daemon_is_distinguished_from_a_missing_one(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(socket_path))
    error = _failure_of(socket_path)
    assert error.code is NO_DAEMON
    assert "the daemon that created this socket has ended" in error.message


def test_a_file_that_is_not_a_socket_is_reported_as_such(socket_path: Path) -> None:
    socket_path.touch()
    assert _failure_of(socket_path).message == f"{socket_path} is not a socket"
    assert _failure_of(socket_path / "below").code is NO_DAEMON


@pytest.mark.parametrize(
    ("endpoint", "message", "hint"),
    [
        (Endpoint(SYSTEM_SOCKET, "system", ("/run/user/7/hegm/hegmd.sock",)), "nor at /run/user/7", "start"),
        (
            Endpoint("/run/user/7/hegm/hegmd.sock", "user", (SYSTEM_SOCKET,)),
            f"nor at {SYSTEM_SOCKET}",
            "`hegmd --user`",
        ),
        (Endpoint("/x", "HEGM_SOCKET"), "/x (HEGM_SOCKET)", "`hegmd --socket /x`"),
    ],
)
def test_every_searched_directory_is_named(endpoint: Endpoint, message: str, hint: str) -> None:
    error = unreachable(endpoint, FileNotFoundError(2, "No such file"))
    assert error.code is NO_DAEMON
    assert message in error.message
    assert hint in error.hint


def test_a_refused_user_learns_which_group_to_join() -> None:
    error = unreachable(Endpoint(SYSTEM_SOCKET, "system"), PermissionError(EACCES, "Permission denied"))
    assert error.code is DENIED
    assert "sudo usermod -aG hegm " in error.hint
    assert "log in again" in error.hint


def test_other_failures_keep_the_kernels_reason() -> None:
    endpoint = Endpoint("/x", "--socket")
    assert unreachable(endpoint, BlockingIOError(EAGAIN, "again")).code is BUSY
    error = unreachable(endpoint, OSError(EIO, "Input/output error"))
    assert error.code is UNAVAILABLE
    assert "Input/output error" in error.message


@pytest.mark.thorough
def test_a_socket_of_others_is_denied_and_not_missing(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen()
        socket_path.chmod(0o600)
        socket_path.parent.chmod(0o755)
        ran = as_nobody(*command("gpus"), environ=environment(socket_path))
    assert ran.returncode == DENIED.exit_status
    assert "you have no permission for the daemon's socket" in ran.stderr
    assert "usermod -aG hegm nobody" in ran.stderr
