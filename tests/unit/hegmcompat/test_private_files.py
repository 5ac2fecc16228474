"""Files that are their owner's alone: modes, links, and nothing half written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hegmcompat import private_files
from hegmd.errors import HegmError


def test_folders_and_files_are_their_owners_whatever_the_umask_is(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint" / "7"
    umask = os.umask(0)
    try:
        private_files.make_folder(folder)
        private_files.write(folder / "lock", b"7")
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (folder.parent, folder, folder / "lock")] == [0o700, 0o700, 0o600]
    assert os.listdir(folder) == ["lock"]
    assert private_files.read(folder / "lock", 10) == b"7"


def test_a_folder_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "7").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HegmError, match="cannot be used"):
        private_files.make_folder(tmp_path / "7")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    os.chown(tmp_path / "7", 12345, 12345)
    with pytest.raises(HegmError, match="belongs to user 12345"):
        private_files.make_folder(tmp_path / "7")


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("whole")
    (tmp_path / "lock").symlink_to(victim)
    assert private_files.read(tmp_path / "lock", 10) is None
    assert private_files.identity(tmp_path / "lock") is None
    private_files.write(tmp_path / "lock", b"7")
    assert victim.read_text() == "whole"
    assert not (tmp_path / "lock").is_symlink()


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "latest.pt")
    assert private_files.read(tmp_path / "latest.pt", 10) is None
    assert private_files.identity(tmp_path / "latest.pt") is None


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "lock").mkdir()
    with pytest.raises(IsADirectoryError):
        private_files.write(tmp_path / "lock", b"7")
    assert os.listdir(tmp_path) == ["lock"]
