"""Checks of the directories that the daemon writes to."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from hegmd.node.doctor import disk
from tests.unit.node.doctor.node import GIB, FileNode, gpu


def mounted(node: FileNode, *mounts: tuple[str, str]) -> None:
    lines = [
        f"{i} 1 8:{i} / {point} rw,relatime shared:1 - {kind} /dev/x rw\n" for i, (point, kind) in enumerate(mounts)
    ]
    node.write("proc/self/mountinfo", "".join(lines))


def test_a_directory_on_a_disk(node: FileNode) -> None:
    mounted(node, ("/", "ext4"))
    found = disk.state(node.facts())
    assert found.status == "ok"
    assert "(ext4) can be written" in found.summary
    assert not list(node.state_dir.iterdir()), "the attempt leaves nothing"


@pytest.mark.parametrize(
    ("kind", "words"), [("tmpfs", "is on tmpfs: it is lost"), ("nfs4", "is on nfs4: when its server hangs")]
)
def test_a_directory_on_something_else(node: FileNode, kind: str, words: str) -> None:
    mounted(node, ("/", "ext4"), (str(node.state_dir), kind))
    found = disk.state(node.facts())
    assert found.status == "warn"
    assert words in found.summary


def test_the_deepest_mount_counts_and_names_are_unescaped(node: FileNode, tmp_path: Path) -> None:
    spaced = tmp_path / "a b"
    spaced.mkdir(mode=0o700)
    mounted(node, (str(spaced).replace(" ", "\\040"), "xfs"), (str(spaced)[:-1], "tmpfs"), ("/", "ext4"))
    mount = disk.mount_of(node.facts(), spaced / "below")
    assert mount is not None
    assert mount.kind == "xfs"


def test_a_directory_that_is_missing(node: FileNode) -> None:
    node.state_dir.rmdir()
    found = disk.state(node.facts())
    assert (found.status, found.fix) == ("fail", f"sudo install -d -m 0700 {node.state_dir}")
    assert disk.state(node.facts(user_mode=True)).fix == f"install -d -m 0700 {node.state_dir}"


def test_a_directory_that_others_may_enter(node: FileNode) -> None:
    node.state_dir.chmod(0o755)
    assert disk.state(node.facts()).fix == f"sudo chmod 0700 {node.state_dir}"


def test_a_shared_directory_is_never_to_be_closed(node: FileNode) -> None:
    """The advice was once `chmod 0700 /tmp`."""
    node.state_dir.chmod(0o1777)
    found = disk.state(node.facts())
    assert (found.status, found.fix) == ("warn", "configure a directory of its own")


def test_a_directory_that_cannot_be_written_to(node: FileNode) -> None:
    """/proc/self/fdinfo is a directory in which not even root can make a file."""
    read_only = Path("/proc/self/fdinfo")
    found = disk.state(node.facts(state_dir=read_only))
    assert found.status == "fail"
    assert "/proc/self/fdinfo cannot be written: " in found.summary
    under_systemd = disk.state(node.facts(state_dir=read_only, under_systemd=True)).fix
    assert under_systemd == "sudo systemctl edit hegmd, with the lines [Service] and ReadWritePaths=/proc/self/fdinfo"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("under_systemd", [False, True])
def test_a_full_disk_is_not_mended_by_permissions(node: FileNode, number: int, under_systemd: bool) -> None:
    """The advice was once `ls -ld`, and under systemd to open a sandbox that was open."""
    facts = node.facts(under_systemd=under_systemd)
    found = disk.unwritable(facts, node.state_dir, OSError(number, os.strerror(number)))
    assert (found.status, found.fix) == ("fail", f"free space: du -xh --max-depth=1 {node.state_dir}")


def test_a_directory_closed_to_ordinary_users_is_not_a_fault(node: FileNode) -> None:
    found = disk.state(node.facts(uid=54321))
    assert found.status == "skip"
    assert "is closed to uid 54321, as it should be" in found.summary


def test_too_little_disk_space_for_state(node: FileNode) -> None:
    mounted(node, ("/", "ext4"))
    free = disk.free_on(node.state_dir)
    assert disk.judge_space(node.state_dir, "ext4", free + GIB).status == "warn"
    assert disk.judge_space(node.state_dir, "ext4", 1).status == "ok"


def test_images_have_a_directory_only_if_one_is_configured(node: FileNode) -> None:
    assert disk.images(node.facts()).status == "skip"


def test_disk_space_for_images_is_measured_by_the_largest_gpu(node: FileNode, tmp_path: Path) -> None:
    mounted(node, ("/", "ext4"))
    directory = tmp_path / "images"
    directory.mkdir(mode=0o700)
    small, huge = gpu(0, memory_total_bytes=1), gpu(1, memory_total_bytes=2**60)
    assert disk.images(node.facts(image_dir=directory, gpus=(small,))).status == "ok"
    assert disk.images(node.facts(image_dir=directory)).status == "ok"
    found = disk.images(node.facts(image_dir=directory, gpus=(small, huge)))
    assert found.status == "warn"
    assert found.summary.endswith("a full gpu1 takes 1048576 TiB")


def test_images_do_not_belong_in_memory(node: FileNode, tmp_path: Path) -> None:
    mounted(node, (str(tmp_path), "tmpfs"))
    directory = tmp_path / "images"
    directory.mkdir(mode=0o700)
    found = disk.images(node.facts(image_dir=directory))
    assert (found.status, found.fix) == ("warn", "set doctor.image_dir to a disk")
