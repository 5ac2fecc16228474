"""The daemon reads each byte of an image back from the disk once, while it writes the rest."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.files.folder import make, summed
from hegmd.protocol.images import ImageFile
from tests.unit.images.files.directory import BLOCK_BYTES, MANIFEST, SIZE_BYTES, flip, ignore


def test_bytes_that_the_disk_has_otherwise_than_they_were_written_are_found_before_the_job_ends(tmp_path: Path) -> None:
    """The damage is done when all is written and nothing is read back yet: one flush is for more chunks than these."""
    memory = os.memfd_create("piece")
    os.pwrite(memory, os.urandom(SIZE_BYTES), 0)
    counts: list[int] = []

    def harm(done_bytes: int) -> None:
        counts.append(done_bytes)
        if len(counts) == 2:
            (unnamed,) = tmp_path.iterdir()
            flip(unnamed / "bytes" / "4711.0", BLOCK_BYTES + 4711)

    with make(str(tmp_path / "image")) as folder, pytest.raises(HegmError, match="chunk 0 of 2 does not match"):
        folder.write_bytes("4711.0", MANIFEST.id, memory, SIZE_BYTES, harm)
    os.close(memory)


def test_without_reading_back_the_disk_is_believed_until_a_restore(tmp_path: Path) -> None:
    memory = os.memfd_create("piece")
    os.pwrite(memory, os.urandom(SIZE_BYTES), 0)
    counts: list[int] = []

    def harm(done_bytes: int) -> None:
        counts.append(done_bytes)
        if len(counts) == 2:
            (unnamed,) = tmp_path.iterdir()
            flip(unnamed / "bytes" / "4711.0", BLOCK_BYTES + 4711)

    with make(str(tmp_path / "image")) as folder:
        folder.reads_back = False
        stored = folder.write_bytes("4711.0", MANIFEST.id, memory, SIZE_BYTES, harm)
        file = ImageFile(name="4711.0", size_bytes=SIZE_BYTES, stored_bytes=stored.stored_bytes, sum=stored.sum)
        folder.verify(MANIFEST.replace(byte_files=(file,)), ignore)
        assert counts[-1] == SIZE_BYTES
        with pytest.raises(HegmError, match="chunk 0 of 2 does not match"):
            folder.byte_file("4711.0", MANIFEST.id).read(SIZE_BYTES, stored.sum, memory, ignore)
        with pytest.raises(HegmError, match=r"bytes/4711\.0 is missing"):
            folder.verify(MANIFEST.replace(byte_files=(file, file)), ignore)
    os.close(memory)


def test_an_image_is_read_back_by_its_writer_and_again_by_a_verification(tmp_path: Path) -> None:
    memory = os.memfd_create("piece")
    os.pwrite(memory, os.urandom(SIZE_BYTES), 0)
    read: list[int] = []
    with make(str(tmp_path / "image")) as folder:
        (Path(f"/proc/self/fd/{folder.criu_fd}") / "core-4711.img").write_bytes(b"core")
        stored = folder.write_bytes("4711.0", MANIFEST.id, memory, SIZE_BYTES, ignore)
        criu_files = tuple(summed(folder.criu_fd, ignore))
        file = ImageFile(name="4711.0", size_bytes=SIZE_BYTES, stored_bytes=stored.stored_bytes, sum=stored.sum)
        manifest = MANIFEST.replace(criu_files=criu_files, byte_files=(file,))
        folder.verify(manifest, read.append)
        assert max(read) == len(b"core"), "its bytes were read back as they were written"
        del read[:]
        folder.verify(manifest, read.append)
        assert not read
        other = manifest.replace(byte_files=(file.replace(sum="0" * 64),))
        with pytest.raises(HegmError, match="its checksums differ"):
            folder.verify(other, ignore)
    os.close(memory)
