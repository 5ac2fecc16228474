"""Lock files for controllers: whole or not there, never where others could lead them, and gone with a restore."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.hegm_lock_files import LockFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "checkpoint"
    made.mkdir(mode=0o755)
    return made


def test_it_is_readable_by_all_users_and_removed_with_its_own_job(folder: Path) -> None:
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


def test_a_file_with_a_number_for_its_name_kept_the_lock_files_of_jobs_that_were_back(folder: Path) -> None:
    """Controllers took a job for gone that trained, and the log blamed the folder that all of them are in."""
    locks = LockFiles(folder)
    (folder / "1").write_text("somebody else's")
    (folder / "2").symlink_to("/nowhere")
    made = locks.make(4711, "/images/one", "7 1700000000.5")
    assert made is not None
    for number in (1, 2):
        with pytest.raises(
            HegmError, match=f"{folder}/{number} is not a directory, so no lock file can be created in it"
        ):
            locks.make(number, "/images/two", "8 1700000000.5")
    assert locks.remove("7 1700000000.5") == [made]


def test_a_second_one_replaces_the_first_and_leaves_nothing_behind(folder: Path) -> None:
    locks = LockFiles(folder)
    locks.make(4711, "/images/one", "7 1.0")
    locks.make(4711, "/images/two", "8 1.0")
    assert os.listdir(folder / "4711") == ["lock"]
    assert locks.remove("7 1.0") == []
    assert (folder / "4711" / "lock").read_text().startswith("/images/two\n")


def test_the_unfinished_file_of_a_killed_daemon_is_removed(folder: Path) -> None:
    """A file of another job, which may be in the course of being written, stays."""
    LockFiles(folder).make(4711, "/images/one", "7 1.0")
    (half,) = cut_off_names(folder, "7 1.0")
    LockFiles(folder).make(4711, "/images/two", "8 1.0")
    (other,) = cut_off_names(folder, "8 1.0")
    assert LockFiles(folder).remove("7 1.0") == []
    assert sorted(os.listdir(folder / "4711")) == sorted([other, "lock"]), half
    LockFiles(folder).remove("8 1.0")
    assert os.listdir(folder) == []


KILLED_IN_ITS_WRITE = """
import resource, signal, sys
from pathlib import Path
from hegmd.images.hegm_lock_files import LockFiles

signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
LockFiles(Path(sys.argv[1])).make(4711, "/images/one", sys.argv[2])
"""


def cut_off_names(folder: Path, mark: str) -> list[str]:
    """Return the files that a process killed during the write leaves in that folder."""
    before = set(os.listdir(folder / "4711"))
    ran = subprocess.run([sys.executable, "-c", KILLED_IN_ITS_WRITE, str(folder), mark], check=False)
    assert ran.returncode == -signal.SIGXFSZ
    return sorted(set(os.listdir(folder / "4711")) - before)


def test_other_files_in_the_directory_stay(folder: Path) -> None:
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
    with pytest.raises(HegmError, match="4711 is not a directory"):
        LockFiles(folder).make(4711, "/images/one", "7 1.0")
    (folder / "4712").mkdir()
    (folder / "4712").chmod(0o777)
    with pytest.raises(HegmError, match="can be written by other users"):
        LockFiles(folder).make(4712, "/images/one", "7 1.0")
    folder.chmod(0o1777)
    with pytest.raises(HegmError, match="can be written by other users"):
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


def test_a_missing_directory_is_reported_and_nothing_is_created_without_one(tmp_path: Path) -> None:
    with pytest.raises(HegmError, match="No such file") as error:
        LockFiles(tmp_path / "nowhere").make(4711, "/images/one", "7 1.0")
    assert "ReadWritePaths" in error.value.hint
    assert LockFiles(tmp_path / "nowhere").remove("7 1.0") == []
    assert LockFiles(None).make(4711, "/images/one", "7 1.0") is None
    assert LockFiles(None).remove("7 1.0") == []
