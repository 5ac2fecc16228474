"""Directories of the pool: private to one user, and their content is checked before it is used."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hegmd.errors import Bug, Refused
from hegmd.memory.pool_found import find_pieces
from hegmd.memory.pool_memory import Memory, make_memory
from hegmd.memory.pool_names import Key, PieceName, Source, parse_name
from hegmd.memory.pool_piece import MemoryKeeping
from hegmd.memory.pool_places import PoolDirectory, find_places
from hegmd.memory.spill_file import SpillFolder

NAME = str(PieceName(Key("7", "4711-9"), 4096, "00c0ffee"))


SOURCED = PieceName(Key("7", "4711"), 3, "ab12", Source(1000, 99))
CLAIMED = SOURCED.claimed_by(Key("9", "4711")).claimed_by(Key("12", "4711"))


@pytest.fixture
def place(tmp_path: Path) -> PoolDirectory:
    return PoolDirectory(tmp_path / "own", huge=False)


def put(place: PoolDirectory, name: str, size_bytes: int = 4096) -> Path:
    fd = place.create(name)
    os.ftruncate(fd, size_bytes)
    os.close(fd)
    place.finish(name)
    return place.folder / name


def test_names_of_segments_encode_the_owner_and_can_be_parsed() -> None:
    for name in (PieceName(Key("7", "4711-9"), 3, "ab12"), PieceName(Key("7", "4711"), 0), SOURCED, CLAIMED):
        assert parse_name(str(name)) == name
    for text in ("hegm-pool", "hegm-pool-7", "hegm-pool-7--3", "hegm-pool-7-4711-x", "x-7-4711-3", f"{NAME}/..", ""):
        assert parse_name(text) is None
    with pytest.raises(Bug):
        str(PieceName(Key("7-8", "4711"), 3))


def test_a_segment_names_its_former_owner_and_its_name_does_not_grow() -> None:
    assert (CLAIMED.key.operation, CLAIMED.before, CLAIMED.source) == ("12", ("9", "7"), SOURCED.source)
    name = CLAIMED
    for number in range(100, 200):
        name = name.claimed_by(Key(str(number), "4711"))
    assert name.before[0] == "198"
    assert len(str(name)) < 128


def test_a_directory_of_another_user_or_open_to_others_is_not_used(place: PoolDirectory) -> None:
    place.folder.mkdir(mode=0o755)
    with pytest.raises(PermissionError, match="private"):
        place.create(NAME)
    assert list(place.folder.iterdir()) == []


def test_a_link_to_a_directory_is_not_followed(place: PoolDirectory, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    place.folder.symlink_to(victim)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        place.create(NAME)
    assert list(victim.iterdir()) == []


def test_an_existing_file_is_never_overwritten(place: PoolDirectory) -> None:
    os.close(place.create(NAME))
    with pytest.raises(FileExistsError):
        place.create(NAME)


async def test_unfinished_segments_are_removed_and_the_others_are_found(place: PoolDirectory) -> None:
    put(place, NAME)
    os.close(place.create(f"{NAME}1"))
    found = await find_pieces(MemoryKeeping([place]))
    assert [str(piece.name) for piece in found.pieces] == [NAME]
    assert [path.name for path in place.folder.iterdir()] == [NAME]
    for piece in found.pieces:
        assert piece.memory is not None
        piece.memory.remove(NAME)
    assert not place.folder.exists(), "an empty directory is left"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: os.truncate(path, 100), "has 100 bytes and was made for 4096"),
        (lambda path: path.chmod(0o644), "mode 0644"),
        (lambda path: os.link(path, path.parent.parent / "second"), "2 names"),
        (lambda path: path.rename(path.with_name("hegm-pool-what")), "not one that hegmd uses"),
        (lambda path: (path.unlink(), os.mkfifo(path, 0o600)), "no file"),
        (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "cannot be opened"),
    ],
    ids=["cut", "readable", "linked", "renamed", "fifo", "symlink"],
)
async def test_a_changed_file_is_reported_and_stays(place: PoolDirectory, spoil: object, why: str) -> None:
    path = put(place, NAME)
    assert callable(spoil)
    spoil(path)
    found = await find_pieces(MemoryKeeping([place]))
    assert found.pieces == ()
    (distrusted,) = found.distrusted
    assert why in distrusted.why
    assert list(place.folder.iterdir()), "it was deleted"


async def test_a_directory_with_the_name_of_an_unfinished_file_hid_all_segments(place: PoolDirectory) -> None:
    put(place, NAME)
    (place.folder / "what.new").mkdir()
    found = await find_pieces(MemoryKeeping([place]))
    assert [str(piece.name) for piece in found.pieces] == [NAME]
    assert [one.name for one in found.distrusted] == ["what.new"]
    for piece in found.pieces:
        assert piece.memory is not None
        piece.memory.close()


async def test_a_directory_that_cannot_be_read_does_not_prevent_the_daemons_start(place: PoolDirectory) -> None:
    place.folder.mkdir(mode=0o777)
    place.folder.chmod(0o777)
    found = await find_pieces(MemoryKeeping([place], None, SpillFolder(place.folder / "none", spare_bytes=0)))
    assert found.pieces == ()
    assert "cannot be opened" in found.distrusted[0].why


def test_huge_pages_are_found_by_their_mount_and_state_directories_share_no_folder(tmp_path: Path) -> None:
    mounts, shared = tmp_path / "mounts", tmp_path / "shm"
    shared.mkdir()
    mounts.write_text(f"proc /proc proc rw 0 0\nshort line\nhuge {tmp_path} hugetlbfs rw,pagesize=2M 0 0\n")
    (one,) = find_places("a" * 32, mounts=mounts, shared_memory=shared)  # that mount uses ordinary pages in reality
    (other,) = find_places("b" * 32, mounts=tmp_path / "none", shared_memory=shared)
    assert (one.huge, one.folder.parent) == (False, shared)
    assert one.folder != other.folder
    assert str(os.geteuid()) in one.folder.name


def test_a_daemon_did_not_start_beside_a_mount_whose_path_is_not_utf_8(tmp_path: Path) -> None:
    """Users choose such paths: they mount by FUSE."""
    mounts, huge = tmp_path / "mounts", tmp_path / "größe"
    huge.mkdir()
    line = b"sshfs /home/ada/\xff fuse.sshfs rw 0 0\nhuge %b hugetlbfs rw,pagesize=2M 0 0\n"
    mounts.write_bytes(line % bytes(huge))
    assert find_places("a" * 32, mounts=mounts, shared_memory=tmp_path)


def squatted(shared: Path) -> Path:
    """A directory with the daemon's name that any user can write."""
    (place,) = find_places("a" * 32, mounts=shared / "none", shared_memory=shared)
    place.folder.mkdir()
    place.folder.chmod(0o777)
    return place.folder


def test_a_directory_created_first_by_another_user_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its name is the same at every start, and any user can create a file in /dev/shm."""
    theirs = squatted(tmp_path)
    (place,) = find_places("a" * 32, mounts=tmp_path / "none", shared_memory=tmp_path)
    assert place.folder != theirs
    assert "check who created the former" in caplog.text
    path = put(place, NAME)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    theirs.rmdir()
    (again,) = find_places("a" * 32, mounts=tmp_path / "none", shared_memory=tmp_path)
    (found,) = again.find()
    os.close(found.fd)
    assert found.name == NAME, "what is there from before is lost"


def test_a_directory_stays_after_its_last_segment_so_that_no_other_user_can_create_it(place: PoolDirectory) -> None:
    place.keep()
    put(place, NAME)
    place.remove(NAME)
    assert place.folder.exists()
    place.leave()
    assert not place.folder.exists()


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a hugetlbfs of its own, which takes root")
def test_a_file_in_huge_pages_is_created_filled_and_found_again(tmp_path: Path) -> None:
    """In a mount namespace of its own. Without free pages the kernel refuses, and the pool reports that."""
    code = (
        "import ctypes, os, pathlib, sys\n"
        "root = pathlib.Path(sys.argv[1]); libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.unshare(0x20000); libc.mount(b'none', b'/', None, 0x44000, None)\n"
        "if libc.mount(b'huge', os.fsencode(root), b'hugetlbfs', 0, b'pagesize=2M'):\n"
        "    print('no hugetlbfs', os.strerror(ctypes.get_errno())); raise SystemExit\n"
        "from hegmd.memory.pool_memory import make_memory, read_huge_free_bytes\n"
        "from hegmd.memory.pool_names import Key, PieceName\n"
        "from hegmd.memory.pool_places import find_places\n"
        "place = find_places('a' * 32)[0]\n"
        "assert place.huge, place\n"
        "if read_huge_free_bytes() < 4 << 20:\n"
        "    print('no free huge pages'); raise SystemExit\n"
        "memory = make_memory(PieceName(Key('7', '1'), 1, 'ab'), 4 << 20, places=[place], huge=True)\n"
        "assert memory.huge and memory.place is place\n"
        "memory.close(); (found,) = place.find()\n"
        "assert (found.size_bytes, found.why_not) == (4 << 20, '')\n"
        "place.remove(found.name); print('seen')\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    if ran.stdout.strip() != "seen":
        pytest.skip(ran.stdout.strip())


def test_unavailable_memory_is_refused_with_numbers() -> None:
    """Issue 14, row 20: without the refusal the caller got no memory and continued."""

    def have_none(_memory: Memory) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    name = PieceName(Key("7", "4711"), 4096, "00c0ffee")
    with pytest.raises(Refused, match="the node has no 4 MiB for 4711: Cannot allocate memory") as refused:
        make_memory(name, 4 << 20, places=(), huge=False, fill=have_none)
    assert refused.value.facts == {"needed_bytes": 4 << 20, "errno": errno.ENOMEM}


def test_a_name_keeps_the_last_eight_operations_that_it_came_from() -> None:
    """Issue 14, row 20: a ninth was not noticed. Names of files are bounded, and each has up to 20 digits."""
    name = SOURCED
    for number in range(20):
        name = name.claimed_by(Key(str(number), "4711"))
    assert name.before == tuple(str(number) for number in range(18, 10, -1))
