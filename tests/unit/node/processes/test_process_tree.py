"""hegmd reads process trees: real ones, and those of a /proc made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.node.processes.process_tree import pids_below, read_tree

HIDDEN = "import ctypes; ctypes.CDLL(None).prctl(4, 0); print('ready', flush=True); input()"
OPEN = "print('ready', flush=True); input()"


def is_guarded(text: str, uid: int) -> bool:
    """Return whether a program that runs as that user is unreadable for it."""
    as_user = {"user": uid, "group": uid, "extra_groups": []} if os.geteuid() == 0 else {}
    pipe = subprocess.PIPE
    argv = ["/usr/bin/env", "-i", os.path.realpath(sys.executable), "-IS", "-c", text]  # a clone may be below /root
    with subprocess.Popen(argv, cwd="/", stdin=pipe, stdout=pipe, text=True, **as_user) as process:  # type: ignore[call-overload] # by name
        try:
            assert process.stdout.readline() == "ready\n"
            return read_tree(process.pid).member(process.pid).is_guarded
        finally:
            process.kill()


@pytest.mark.thorough
def test_a_process_whose_memory_its_own_user_may_not_read_counted_as_theirs() -> None:
    """The code checked only the real user: a sudo or su that a user had started went into that user's image."""
    uid = os.getuid() or 65534
    assert is_guarded(HIDDEN, uid)
    assert not is_guarded(OPEN, uid)


def test_rights_of_another_user_are_detected(tmp_path: Path) -> None:
    process = tmp_path / "7"
    process.mkdir()
    (process / "stat").write_text("7 (su) S 1 7 7 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 5 0")
    (process / "environ").write_bytes(b"")
    mine = os.getuid()
    for effective, guarded in ((mine, False), (mine + 1, True)):
        (process / "status").write_text(f"Name:\tsu\nUid:\t{mine}\t{effective}\t{effective}\t{effective}\n")
        member = read_tree(7, proc_root=str(tmp_path)).member(7)
        assert (member.uid, member.is_guarded) == (mine, guarded)


def test_processes_of_a_tree_are_listed_without_their_open_files(tmp_path: Path) -> None:
    """A job that was stopped for an image stayed so when a disk was dead on which it had a file open."""
    for pid, parent in ((7, 1), (8, 7), (9, 8), (10, 1)):
        process = tmp_path / str(pid)
        process.mkdir()
        (process / "stat").write_text(f"{pid} (name) S {parent} 7 7")
        (process / "fd").write_text("no folder: to list it fails")
    assert pids_below(7, proc_root=str(tmp_path)) == [7, 8, 9]


def test_the_process_of_a_pidfd_is_known() -> None:
    pidfd = os.pidfd_open(os.getppid())
    try:
        found = next(
            descriptor
            for descriptor in read_tree(os.getpid()).descriptors
            if (descriptor.pid, descriptor.fd) == (os.getpid(), pidfd)
        )
    finally:
        os.close(pidfd)
    assert (found.target, found.refers_to) == ("anon_inode:[pidfd]", os.getppid())
