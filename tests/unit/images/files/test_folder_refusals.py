"""Messages about refused images and disks: code and next step."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

import pytest

from hegmd.errors import DENIED, INCOMPATIBLE, NOT_FOUND, REFUSED, UNAVAILABLE, Code, HegmError
from hegmd.images.files import catalogue
from hegmd.images.files.folder import LOCK, find, free_bytes_at, make
from hegmd.images.files.refusals import refused_as
from hegmd.images.files.signature import MAX_BYTES, written
from tests.cells import in_one_test
from tests.unit.images.files.directory import BLOCK_BYTES, MANIFEST, built, ignore


def refusal(path: Path, code: Code) -> str:
    with pytest.raises(HegmError) as refused:
        catalogue.verify(str(path), ignore)
    assert refused.value.code is code, refused.value
    return refused.value.message


def test_bytes_that_a_later_hegmd_wrote_are_not_guessed_at(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    with (path / "bytes/4711.0").open("r+b") as file:
        head = bytearray(file.read(BLOCK_BYTES))
        struct.pack_into("<I", head, 8, 7)  # the version
        end = 32 + struct.unpack_from("<I", head, 12)[0]
        struct.pack_into("<I", head, end, zlib.crc32(head[:end]))
        file.seek(0)
        file.write(head)
    assert "4711.0 has version 7 and chunks of 8388608 bytes" in refusal(path, INCOMPATIBLE)


@pytest.mark.thorough
def test_a_manifest_that_is_too_large_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    os.truncate(path / "manifest.json", MAX_BYTES + 1)
    assert f"manifest.json has more than {MAX_BYTES} bytes" in refusal(path, REFUSED)
    with pytest.raises(HegmError, match=f"the limit is {MAX_BYTES}"):
        written(MANIFEST.replace(host="x" * MAX_BYTES))
    room = MAX_BYTES - len(written(MANIFEST.replace(host="")))
    assert len(written(MANIFEST.replace(host="x" * room))) == MAX_BYTES


@in_one_test(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, REFUSED, "free space or quota there"),
        (errno.EDQUOT, REFUSED, "free space or quota there"),
        (errno.EROFS, DENIED, "name a directory that you may write"),
        (errno.ENOENT, NOT_FOUND, "hegmctl images ls"),
        (errno.ELOOP, REFUSED, "name the directory itself"),
        (errno.EIO, UNAVAILABLE, "check the disk"),
    ],
)
def test_an_error_of_the_disk_is_reported_with_the_next_step(number: int, code: Code, words: str) -> None:
    with pytest.raises(HegmError) as refused, refused_as("/images/one", "written"):
        raise OSError(number, os.strerror(number))
    assert refused.value.code is code
    assert words in refused.value.hint


def test_an_unreadable_directory_is_not_reported_as_unwritable() -> None:
    for what, step in (("opened", "that you may read"), ("written", "that you may write")):
        with pytest.raises(HegmError, match="Permission denied") as refused, refused_as("/images/one", what):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        assert refused.value.hint == f"name a directory {step}"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "why", "step"),
    [
        ("file", "already exists: it is a file and not a directory", "name a new directory"),
        ("file/x", "cannot be made: {}/file is a file and not a directory", "name a new directory in one that exists"),
        ("pipe", "already exists: it is a pipe and not a directory", "name a new directory"),
        ("dangling", "already exists: it is a link to gone, which does not exist", "name a new directory"),
        (
            "dangling/x",
            "cannot be made: {}/dangling is a link to gone, which does not exist",
            "name a new directory in one that exists",
        ),
        ("round/x", "cannot be made: {}/round is a link to round, which does not exist", "in one that exists"),
        ("to-full", "already exists: it is a link to full", "name a new directory"),
        ("gone/x", "cannot be made: there is no {}/gone", "mkdir -p {}/gone"),
        ("full", "already exists and is not an empty directory", "name a new directory"),
        ("image", "already exists: it is an image", "or remove that image: hegmctl images rm {}/image"),
    ],
)
def test_the_hint_for_a_foreign_directory_was_to_remove_it(tmp_path: Path, name: str, why: str, step: str) -> None:
    """`hegmctl images rm /dev/null`, for one."""
    _furnish(tmp_path)
    with pytest.raises(HegmError) as refused:
        free_bytes_at(f"{tmp_path}/{name}")
    assert refused.value.message.endswith(why.format(tmp_path))
    assert step.format(tmp_path) in refused.value.hint
    assert ("images rm" in refused.value.hint) is (name == "image")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file", "it is a file and not a directory"),
        ("dangling", "it is a link to gone, which does not exist"),
        ("to-full", "it is a link to full"),
        ("gone", "No such file or directory"),
        ("gone/x", "there is no {}/gone"),
    ],
)
def test_a_directory_that_is_not_an_image_is_reported_as_such(tmp_path: Path, name: str, why: str) -> None:
    _furnish(tmp_path)
    with pytest.raises(HegmError) as refused:
        find(f"{tmp_path}/{name}")
    assert refused.value.message == f"{tmp_path}/{name} cannot be opened: {why.format(tmp_path)}"
    assert "name the directory itself" in refused.value.hint


def _furnish(folder: Path) -> None:
    (folder / "file").touch()
    os.mkfifo(folder / "pipe")
    for name, target in (("dangling", "gone"), ("round", "round"), ("to-full", "full")):
        (folder / name).symlink_to(target)
    (folder / "full" / "other").mkdir(parents=True)
    built(folder / "image")


def test_a_lock_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    (path / LOCK).unlink(missing_ok=True)
    (path / LOCK).symlink_to(tmp_path / "elsewhere")
    with find(str(path)) as image, pytest.raises(OSError, match="Too many levels of symbolic links"):
        image.lock()


def test_an_image_whose_directory_was_renamed_meanwhile_is_not_published(tmp_path: Path) -> None:
    with make(str(tmp_path / "image")) as folder:
        (tmp_path / folder.name).rename(tmp_path / "elsewhere")
        with pytest.raises(FileNotFoundError):
            folder.publish(b"{}", b"")
    assert not (tmp_path / "image").exists()
