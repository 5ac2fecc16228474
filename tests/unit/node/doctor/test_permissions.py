"""Checks of the daemon's own rights and of its socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hegmd.node.doctor import permissions
from hegmd.node.doctor.facts import NodeFacts
from tests.unit.node.doctor.node import FileNode

CAP_NEEDED = 1 << 19 | 1 << 1 | 1 << 5


@contextmanager
def listening(path: Path, mode: int) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(mode)
        yield


def ours(node: FileNode, path: Path, **changes: object) -> NodeFacts:
    """Facts of a daemon that runs as this very user, with this very user's group as the hegm group."""
    owner = {"uid": os.geteuid(), "group_id": {"hegm": os.getegid()}.get, "group_name": {os.getegid(): "hegm"}.get}
    return node.facts(socket_path=path, **{**owner, **changes})


# -- rights ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capabilities", "status", "words"),
    [
        (CAP_NEEDED, "ok", "root, with the capabilities"),
        (2**41 - 1, "ok", "root, with the capabilities"),
        (1 << 19 | 1 << 2 | 1 << 5, "warn", "root without CAP_DAC_OVERRIDE: other users' processes cannot be"),
        (CAP_NEEDED & ~(1 << 19), "warn", "root without CAP_SYS_PTRACE"),
        (0, "warn", "root without CAP_SYS_PTRACE, CAP_DAC_OVERRIDE, CAP_KILL"),
    ],
)
def test_capabilities(node: FileNode, capabilities: int, status: str, words: str) -> None:
    node.write("proc/self/status", f"CapPrm:\t{0:016x}\nCapEff:\t{capabilities:016x}\nCapBnd:\t{2**41 - 1:016x}\n")
    found = permissions.rights(node.facts())
    assert found.status == status
    assert words in found.summary


def test_a_daemon_that_is_not_root(node: FileNode) -> None:
    assert permissions.rights(node.facts(uid=1000)).status == "warn"
    assert permissions.rights(node.facts(uid=1000, user_mode=True)).summary == "user mode: processes of uid 1000 only"


# -- group -------------------------------------------------------------------------------------------------------------


def test_the_group(node: FileNode) -> None:
    assert "group hegm exists (gid 991)" in permissions.group(node.facts()).summary
    missing = permissions.group(node.facts(group="gpu"))
    assert (missing.status, missing.fix) == ("warn", "sudo groupadd --system gpu")
    assert permissions.group(node.facts(user_mode=True)).status == "skip"


# -- socket ------------------------------------------------------------------------------------------------------------


def test_a_socket_for_the_group(node: FileNode, socket_path: Path) -> None:
    with listening(socket_path, 0o660):
        found = permissions.socket(ours(node, socket_path))
    assert (found.status, found.summary) == ("ok", f"{socket_path} (0660, group hegm)")


@pytest.mark.parametrize(
    ("mode", "words", "fix"),
    [
        (0o666, "is open to every user of the node", "sudo chmod 0660"),
        (0o600, "is closed to group hegm", "sudo chgrp hegm"),
    ],
)
def test_a_socket_with_a_wrong_mode(node: FileNode, socket_path: Path, mode: int, words: str, fix: str) -> None:
    with listening(socket_path, mode):
        found = permissions.socket(ours(node, socket_path))
    assert found.status == "warn"
    assert words in found.summary
    assert found.fix is not None
    assert found.fix.startswith(fix)


def test_a_socket_of_another_group(node: FileNode, socket_path: Path) -> None:
    with listening(socket_path, 0o660):
        found = permissions.socket(ours(node, socket_path, group_id={"hegm": os.getegid() + 1}.get))
    assert found.status == "warn"
    assert "is closed to group hegm" in found.summary


def test_a_users_own_socket(node: FileNode, socket_path: Path) -> None:
    with listening(socket_path, 0o666):
        facts = ours(node, socket_path, user_mode=True)
        assert permissions.socket(facts).status == "ok", "its directory lets nobody else in"
        socket_path.parent.chmod(0o755)
        assert permissions.socket(facts).fix == f"chmod 0600 {socket_path}"


def test_no_socket(node: FileNode, socket_path: Path) -> None:
    facts = ours(node, socket_path)
    found = permissions.socket(facts)
    assert (found.status, found.fix) == ("fail", "start hegmd as root")
    node.write("run/systemd/system/some.unit")
    assert permissions.socket(facts).fix == "sudo systemctl restart hegmd.socket hegmd.service"
    assert permissions.socket(ours(node, socket_path, user_mode=True)).fix == "systemctl --user restart hegmd.socket"


def test_something_else_in_its_place(node: FileNode, socket_path: Path) -> None:
    socket_path.write_text("")
    assert "is not a socket" in permissions.socket(ours(node, socket_path)).summary


def test_a_directory_in_which_others_could_replace_it(node: FileNode, socket_path: Path) -> None:
    socket_path.parent.chmod(0o777)
    found = permissions.socket(ours(node, socket_path))
    assert (found.status, found.fix) == ("fail", f"sudo chmod go-w {socket_path.parent}")


def test_a_directory_of_another_user(node: FileNode, socket_path: Path) -> None:
    if os.geteuid() == 0:
        os.chown(socket_path.parent, 54321, -1)
        assert "belongs to uid 54321" in permissions.socket(ours(node, socket_path)).summary
    else:
        found = permissions.socket(ours(node, socket_path, uid=54321))
        assert f"belongs to uid {os.geteuid()}" in found.summary


def test_a_directory_that_is_missing(node: FileNode, tmp_path: Path) -> None:
    found = permissions.socket(node.facts(socket_path=tmp_path / "run" / "hegmd.sock"))
    assert (found.status, found.fix) == ("fail", f"sudo install -d -m 0755 {tmp_path}/run")
