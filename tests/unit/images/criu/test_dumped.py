"""The owners of the memory in CRIU's files."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from hegmd.errors import HegmError
from hegmd.images.criu.dumped import dumped_processes, is_open, strangers

HEAD = (0x54564319, 0x57492820)
# mm_start_code of several bytes, a mapping (field 14) in which there is what looks like field 15, then that.
BEFORE = b"\x08\x80\x80\x80\x02" + b"\x72\x02\x78\x01"


def image(message: bytes, head: tuple[int, int] = HEAD) -> bytes:
    return struct.pack("<III", *head, len(message)) + message


@pytest.mark.parametrize(
    ("message", "is_so"), [(b"\x78\x01", True), (b"\x78\x00", False), (b"\x78\x02", False), (b"", False)]
)
def test_memory_is_opened_only_on_the_stated_gpu(message: bytes, is_so: bool) -> None:
    assert is_open(image(BEFORE + message)) is is_so


def test_each_process_is_reported(tmp_path: Path) -> None:
    (tmp_path / "mm-100.img").write_bytes(image(BEFORE + b"\x78\x01"))
    (tmp_path / "mm-101.img").write_bytes(image(BEFORE + b"\x78\x00"))
    (tmp_path / "core-100.img").write_bytes(b"another kind")
    assert _of(tmp_path) == {100: True, 101: False}


@pytest.mark.parametrize(
    "data", [b"", image(b"\x78\x01", (1, 2)), image(b"\x78\x01")[:-1], image(b"\x78"), image(b"\x7b\x00")]
)
def test_an_unsuitable_image_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mm-100.img").write_bytes(data)
    with pytest.raises(HegmError, match="does not name the process"):
        _of(tmp_path)


def _of(folder: Path) -> dict[int, bool]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return dumped_processes(fd)
    finally:
        os.close(fd)


def test_a_process_forked_just_before_the_freeze_belongs_to_the_job_after_a_restore() -> None:
    """Root's images had it, and their manifests did not: no operation, unit or rollback knew of it."""
    dumped = {4: True, 5: False, 6: True}
    assert strangers(dumped, {4, 5}, may_read_all=True) == [6]
    assert strangers(dumped, {4, 5}, may_read_all=False) == [5, 6]
    assert strangers(dumped, {4, 5, 6, 7}, may_read_all=True) == []
