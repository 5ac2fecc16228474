"""What is said of images and of disks that are refused: by code, and with the next step."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from pathlib import Path

import pytest

from hegmd.errors import DENIED, INCOMPATIBLE, NOT_FOUND, REFUSED, UNAVAILABLE, Code, HegmError
from hegmd.image import shelf
from hegmd.image.folder import told
from hegmd.image.seal import MOST_BYTES, written
from tests.unit.image.directory import BLOCK_BYTES, MANIFEST, built, ignore


def refusal(path: Path, code: Code) -> str:
    with pytest.raises(HegmError) as refused:
        shelf.verify(str(path), ignore)
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
    assert "4711.0 is of version 7 with chunks of 8388608 bytes" in refusal(path, INCOMPATIBLE)


def test_a_manifest_that_is_too_large_is_neither_read_nor_written(tmp_path: Path) -> None:
    path = tmp_path / "image"
    built(path)
    os.truncate(path / "manifest.json", MOST_BYTES + 1)
    assert f"manifest.json has over {MOST_BYTES} bytes" in refusal(path, REFUSED)
    with pytest.raises(HegmError, match=f"and {MOST_BYTES} are the most that is read"):
        written(MANIFEST.replace(host="x" * MOST_BYTES))


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [
        (errno.ENOSPC, REFUSED, "free space or quota there"),
        (errno.EDQUOT, REFUSED, "free space or quota there"),
        (errno.EROFS, DENIED, "name a directory that you may write"),
        (errno.ENOENT, NOT_FOUND, "hegmctl images ls"),
        (errno.ELOOP, REFUSED, "name the directory itself"),
        (errno.EIO, UNAVAILABLE, "look at the disk"),
    ],
)
def test_what_a_disk_refuses_is_told_with_the_next_step(number: int, code: Code, words: str) -> None:
    with pytest.raises(HegmError) as refused, told("/images/one", "written"):
        raise OSError(number, os.strerror(number))
    assert refused.value.code is code
    assert words in refused.value.hint
