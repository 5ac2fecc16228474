"""Spill files: whole or not there, and not one bit of one is mistaken for another."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from hegmd.errors import HegmError, Refused
from hegmd.memory.spill_file import ResultUnwanted, SpillFolder
from hegmd.memory.spilling import _with_errors_named
from hegmd.system.direct_io import BLOCK_BYTES, CHUNK_BYTES
from tests.patience import HANG_S

NAME = "hegm-pool-7-4711-3.ab12"
SIZE_BYTES = 2 * CHUNK_BYTES + 5 * BLOCK_BYTES


@pytest.fixture
def folder(tmp_path: Path) -> SpillFolder:
    return SpillFolder(tmp_path / "spill", spare_bytes=0)


@pytest.fixture
def memory():  # type: ignore[no-untyped-def] # a generator of a descriptor and its bytes
    fd = os.memfd_create("pool")
    data = os.urandom(SIZE_BYTES)
    os.pwrite(fd, data, 0)
    yield fd, data
    os.close(fd)


def never() -> bool:
    return False


def ignore(_so_far_bytes: int) -> None:
    pass


def read_all(folder: SpillFolder, name: str = NAME, size_bytes: int = SIZE_BYTES) -> bytes:
    data = bytearray(size_bytes)

    def take(place: int, view: memoryview) -> None:
        data[place : place + len(view)] = view

    folder.read(name, size_bytes, take, ignore)
    return bytes(data)


@pytest.mark.thorough
def test_bytes_are_equal_after_the_round_trip(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    observed: list[int] = []
    folder.write(NAME, memory[0], SIZE_BYTES, never, observed.append)
    assert observed[-1] == SIZE_BYTES
    assert read_all(folder) == memory[1]
    assert folder.path(NAME).stat().st_mode & 0o777 == 0o600
    assert folder.folder.stat().st_mode & 0o777 == 0o700
    (found,) = folder.find()
    assert (found.name, found.size_bytes, found.why_not) == (NAME, SIZE_BYTES, "")
    folder.remove(NAME)
    folder.remove(NAME)
    assert list(folder.folder.iterdir()) == []


@pytest.mark.thorough
def test_under_a_new_owners_name_it_is_the_same_piece_and_under_another_pieces_it_is_none(
    folder: SpillFolder, memory: tuple[int, bytes]
) -> None:
    folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    folder.rename(NAME, "hegm-pool-9-4711-3.ab12")
    assert read_all(folder, "hegm-pool-9-4711-3.ab12") == memory[1]
    folder.rename("hegm-pool-9-4711-3.ab12", "hegm-pool-9-4711-3.ffff")
    with pytest.raises(HegmError, match=r"it is of 3\.ab12"):
        read_all(folder, "hegm-pool-9-4711-3.ffff")
    assert "3.ab12" in folder.find()[0].why_not


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


@pytest.mark.thorough
def test_a_flipped_bit_is_found_wherever_it_is(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    path = folder.path(NAME)
    used_of_table = BLOCK_BYTES + SIZE_BYTES
    head = range(32 + len("3.ab12") + 4)
    table = range(used_of_table, used_of_table + 4 * 4)
    body = range(BLOCK_BYTES, used_of_table, SIZE_BYTES // 12 + 7)
    for place in (*head, *table, *body, used_of_table - 1):
        bit = place % 8
        _flip(path, place, bit)
        with pytest.raises(HegmError):
            read_all(folder)
        _flip(path, place, bit)
    assert read_all(folder) == memory[1]


@pytest.mark.thorough
def test_chunks_that_changed_places_are_found(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    os.pwrite(memory[0], bytes(2 * CHUNK_BYTES), 0)
    folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    assert read_all(folder)[:CHUNK_BYTES] == bytes(CHUNK_BYTES)
    with folder.path(NAME).open("rb") as file:  # the sums of two equal chunks, each in the other's place
        file.seek(BLOCK_BYTES + SIZE_BYTES)
        sums = file.read(8)
    assert sums[:4] != sums[4:], "equal chunks have equal sums, wherever they are"


@pytest.mark.thorough
@pytest.mark.parametrize("kept_bytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + CHUNK_BYTES, BLOCK_BYTES + SIZE_BYTES])
def test_a_truncated_file_is_reported(folder: SpillFolder, memory: tuple[int, bytes], kept_bytes: int) -> None:
    folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    os.truncate(folder.path(NAME), kept_bytes)
    with pytest.raises(HegmError, match="damaged"):
        read_all(folder)
    assert folder.find()[0].why_not


@pytest.mark.thorough
def test_memory_truncated_meanwhile_is_refused_and_kills_no_process(
    folder: SpillFolder, memory: tuple[int, bytes]
) -> None:
    """A job has the descriptor of its memory: if it truncates the file, SIGBUS would kill a process that has it
    mapped.
    """
    os.ftruncate(memory[0], CHUNK_BYTES + 100)
    with pytest.raises(Refused, match=r"has \d+ bytes, and \d+ were expected"):
        folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    assert list(folder.folder.iterdir()) == []


@pytest.mark.thorough
def test_a_cancelled_spill_leaves_nothing(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    cancel_requests = iter([False, True])
    with pytest.raises(ResultUnwanted):
        folder.write(NAME, memory[0], SIZE_BYTES, lambda: next(cancel_requests, True), ignore)
    assert list(folder.folder.iterdir()) == []


@pytest.mark.thorough
def test_a_cancelled_but_complete_copy_was_still_renamed(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    """A thread left behind by who waited for it named its file after other bytes had gone to that memory."""
    chunks = SIZE_BYTES // CHUNK_BYTES + 1
    cancel_requests = iter([False] * (2 * chunks))  # copied, synced and compared
    with pytest.raises(ResultUnwanted):
        folder.write(NAME, memory[0], SIZE_BYTES, lambda: next(cancel_requests, True), ignore)
    assert list(folder.folder.iterdir()) == []


def test_unfinished_files_of_a_killed_daemon_are_removed_at_the_next_start(folder: SpillFolder) -> None:
    folder.folder.mkdir(mode=0o700)
    (folder.folder / f"{NAME}.spill.new").write_bytes(b"half")
    (folder.folder / "somebody-elses").touch()
    assert folder.find() == []
    assert [path.name for path in folder.folder.iterdir()] == ["somebody-elses"]


def test_a_directory_that_others_can_write_is_refused(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    folder.folder.mkdir()
    folder.folder.chmod(0o777)
    with pytest.raises(Refused, match="written by others") as refused:
        folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    assert "chmod 0700" in refused.value.hint


def _in_mounted(folder: Path, size: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run code with that directory on a small file system of its own, in a mount namespace of its own."""
    prelude = (
        "import ctypes, os, pathlib, sys\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.unshare(0x20000); libc.mount(b'none', b'/', None, 0x44000, None)\n"
        f"assert not libc.mount(b'small', os.fsencode(sys.argv[1]), b'tmpfs', 0, b'size={size},mode=0700')\n"
        "from hegmd.errors import HegmError\n"
        "from hegmd.memory.spill_file import SpillFolder\n"
        "folder = SpillFolder(pathlib.Path(sys.argv[1]), spare_bytes=0)\n"
    )
    argv = [sys.executable, "-c", prelude + code, str(folder)]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=HANG_S)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system, which takes root")
def test_a_real_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path) -> None:
    code = (
        "fd = os.memfd_create('m'); os.truncate(fd, 32 << 20)\n"
        f"try: folder.write({NAME!r}, fd, 32 << 20, lambda: False, lambda _: None)\n"
        "except HegmError as error: print(error.code.name, error.hint)\n"
        "print(os.listdir(sys.argv[1]))\n"
    )
    ran = _in_mounted(tmp_path, "16m", code)
    assert ran.returncode == 0, ran.stderr
    output, left = ran.stdout.splitlines()
    assert output.startswith("refused free space under")
    assert left == "[]"


def test_a_limit_on_the_size_of_files_is_a_refusal(tmp_path: Path) -> None:
    """EFBIG in the middle, as a quota gives EDQUOT: not a traceback, and no half of a file."""
    code = (
        "import os, pathlib, resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from hegmd.errors import HegmError\n"
        "from hegmd.memory.spill_file import SpillFolder\n"
        "fd = os.memfd_create('m'); os.truncate(fd, 32 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"try: SpillFolder(pathlib.Path(sys.argv[1]), spare_bytes=0).write({NAME!r}, fd, 32 << 20, bool, bool)\n"
        "except HegmError as error: print(error.code.name)\n"
        "print(os.listdir(sys.argv[1]))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert ran.stdout.splitlines() == ["refused", "[]"], ran.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


@pytest.mark.thorough
def test_a_progress_that_fails_ends_it(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    def fail(_so_far_bytes: int) -> None:
        raise ConnectionError

    with pytest.raises(HegmError):
        folder.write(NAME, memory[0], SIZE_BYTES, never, fail)
    assert list(folder.folder.iterdir()) == []


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["link", "pipe", "foreign", "shared", "second name"])
def test_a_file_planted_under_a_segments_name_is_not_read(
    folder: SpillFolder, memory: tuple[int, bytes], tmp_path: Path, how: str
) -> None:
    folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    path = folder.path(NAME)
    if how == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    elif how == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    elif how == "foreign":
        if os.geteuid():
            pytest.skip("only root can give a file away")
        os.chown(path, 12345, 12345)
    elif how == "shared":
        path.chmod(0o644)
    else:
        os.link(path, tmp_path / "second")
    (found,) = folder.find()
    assert found.why_not, "it is believed"
    for read in (lambda: read_all(folder), lambda: folder.beginning(NAME, 8)):
        with pytest.raises(HegmError):
            read()


def test_a_link_in_the_place_of_a_file_to_be_written_leads_nowhere(
    folder: SpillFolder, memory: tuple[int, bytes], tmp_path: Path
) -> None:
    folder.folder.mkdir(mode=0o700)
    target = tmp_path / "target"
    target.write_bytes(b"somebody's")
    (folder.folder / f"{NAME}.spill.new").symlink_to(target)
    with pytest.raises(HegmError):
        folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    assert target.read_bytes() == b"somebody's"


def test_a_rename_of_a_missing_file_is_an_error(folder: SpillFolder, memory: tuple[int, bytes]) -> None:
    with pytest.raises(HegmError, match="cannot be renamed"):
        folder.rename(NAME, f"{NAME}5")


@pytest.mark.thorough
def test_the_folder_is_made_with_those_above_it(tmp_path: Path, memory: tuple[int, bytes]) -> None:
    folder = SpillFolder(tmp_path / "state" / "spill", spare_bytes=0)
    folder.write(NAME, memory[0], SIZE_BYTES, never, ignore)
    assert read_all(folder) == memory[1]


def test_a_file_that_cannot_be_removed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "spill").touch()
    with pytest.raises(HegmError, match="cannot be removed: Not a directory"):
        SpillFolder(tmp_path / "spill", spare_bytes=0).remove(NAME)


async def test_the_progress_of_a_thread_is_passed_on_while_it_works() -> None:
    observed: list[int] = []
    passed = anyio.Event()

    async def work(tell: Callable[[int], object]) -> str:
        tell(5)
        await passed.wait()
        return "done"

    def progress(so_far_bytes: int) -> None:
        observed.append(so_far_bytes)
        passed.set()

    assert await _with_errors_named(work, progress) == "done"
    assert observed == [5]
