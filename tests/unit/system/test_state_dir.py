"""One daemon per state directory, and no daemon in a directory that others can write."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.errors import REFUSED, HegmError
from hegmd.system.state_dir import StateDir
from tests.patience import HANG_S


def test_it_is_made_private(tmp_path: Path) -> None:
    with StateDir(tmp_path / "a" / "b") as state:
        assert state.path.stat().st_mode & 0o777 == 0o700
        assert (state.path / "lock").stat().st_mode & 0o777 == 0o600


def test_a_second_daemon_is_refused_by_the_pid_of_the_first(tmp_path: Path) -> None:
    with StateDir(tmp_path / "s"), pytest.raises(HegmError, match=f"pid {os.getpid()}") as caught:
        StateDir(tmp_path / "s")
    assert caught.value.code is REFUSED
    with StateDir(tmp_path / "s"):  # the first one is gone
        pass


def test_the_lock_goes_with_its_process(tmp_path: Path) -> None:
    made = f"StateDir(pathlib.Path({str(tmp_path / 's')!r}))"
    holder = f"import os, pathlib; from hegmd.system.state_dir import StateDir; {made}"
    subprocess.run([sys.executable, "-c", f"{holder}; os.kill(os.getpid(), 9)"], check=False, timeout=HANG_S)
    with StateDir(tmp_path / "s"):
        pass


def test_a_full_disk_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    """The pid is noted for people; that it could not be written ended the start with a traceback."""
    holder = (
        "import pathlib, resource, sys; from hegmd.system.state_dir import StateDir; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); held = StateDir(pathlib.Path(sys.argv[1])); "
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holder, str(tmp_path / "s")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        with pytest.raises(HegmError, match="another hegmd \\(pid unknown\\) holds"):
            StateDir(tmp_path / "s")


def test_a_directory_that_others_can_write_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(HegmError, match="written by others") as caught:
        StateDir(shared)
    assert "chmod 0700" in caught.value.hint


def test_a_path_to_a_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(HegmError, match="cannot be used") as caught:
        StateDir(file)
    assert "--state-dir" in caught.value.hint


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    state = tmp_path / "s"
    state.mkdir(mode=0o700)
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (state / "lock").symlink_to(victim)
    with pytest.raises(HegmError):
        StateDir(state)
    assert victim.read_text() == "precious"


def test_its_identity_stays_and_no_other_directory_has_it(tmp_path: Path) -> None:
    with StateDir(tmp_path / "one") as one, StateDir(tmp_path / "two") as two:
        identity = one.identity()
        assert len(identity) == 32
        assert identity != two.identity()
    with StateDir(tmp_path / "one") as again:
        assert again.identity() == identity
        (again.path / "identity").write_text("torn")
        assert again.identity() not in {identity, "torn"}


def test_a_daemon_did_not_start_with_an_identity_of_other_bytes(tmp_path: Path) -> None:
    with StateDir(tmp_path / "s") as state:
        (state.path / "identity").write_bytes(b"\xff\xfe")
        assert len(state.identity()) == 32


def test_an_identity_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    with StateDir(tmp_path / "s") as state:
        (state.path / ".identity.new").mkdir()
        with pytest.raises(HegmError, match="cannot be made") as caught:
            state.identity()
        assert "free space" in caught.value.hint
