"""Lock files for controllers: whole or not there, never where others could lead them, and gone with a restore."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.lock_files import LockFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir(mode=0o755)
    return made


def test_it_is_there_for_everybody_to_read_and_goes_with_its_own_job(folder: Path) -> None:
    locks = LockFiles(folder)
    umask = os.umask(0o077)
    try:
        made = locks.make(4711, "/images/one", "7 1700000000.5")
        locks.make(4712, "/images/two", "8 1700000000.5")
    finally:
        os.umask(umask)
    assert made == folder / "4711" / "lock"
    assert made.read_text() == "/images/one\n7 1700000000.5\n"
    assert made.stat().st_mode & 0o777 == 0o644
    assert locks.remove("7 1700000000.5") == [made]
    assert sorted(os.listdir(folder)) == ["4712"]


def test_a_second_one_takes_the_place_of_the_first_and_leaves_nothing_beside_it(folder: Path) -> None:
    locks = LockFiles(folder)
    locks.make(4711, "/images/one", "7 1.0")
    locks.make(4711, "/images/two", "8 1.0")
    assert os.listdir(folder / "4711") == ["lock"]
    assert locks.remove("7 1.0") == []
    assert (folder / "4711" / "lock").read_text().startswith("/images/two\n")


def test_what_else_is_in_the_folder_stays(folder: Path) -> None:
    locks = LockFiles(folder)
    locks.make(4711, "/images/one", "7 1.0")
    (folder / "4711" / "latest.pt").touch()
    (folder / "4713").mkdir()
    (folder / "notes").touch()
    locks.remove("7 1.0")
    assert sorted(os.listdir(folder)) == ["4711", "4713", "notes"]
    assert os.listdir(folder / "4711") == ["latest.pt"]


def test_nothing_is_written_where_others_could_lead_it_elsewhere(folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (folder / "4711").symlink_to(elsewhere)
    with pytest.raises(HegmError, match="cannot be written"):
        LockFiles(folder).make(4711, "/images/one", "7 1.0")
    (folder / "4712").mkdir()
    (folder / "4712").chmod(0o777)
    with pytest.raises(HegmError, match="can be written by others"):
        LockFiles(folder).make(4712, "/images/one", "7 1.0")
    folder.chmod(0o1777)
    with pytest.raises(HegmError, match="can be written by others"):
        LockFiles(folder).make(4713, "/images/one", "7 1.0")
    assert os.listdir(elsewhere) == []
    assert os.listdir(folder / "4712") == []


def test_a_link_in_the_place_of_a_lock_is_replaced_and_not_followed(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (folder / "4711").mkdir()
    (folder / "4711" / "lock").symlink_to(victim)
    LockFiles(folder).make(4711, "/images/one", "7 1.0")
    assert victim.read_text() == "untouched"
    assert not (folder / "4711" / "lock").is_symlink()


def test_a_folder_that_is_not_there_is_told_of_and_without_one_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(HegmError, match="No such file") as told:
        LockFiles(tmp_path / "nowhere").make(4711, "/images/one", "7 1.0")
    assert "ReadWritePaths" in told.value.hint
    assert LockFiles(tmp_path / "nowhere").remove("7 1.0") == []
    assert LockFiles(None).make(4711, "/images/one", "7 1.0") is None
    assert LockFiles(None).remove("7 1.0") == []
