"""The mark in a piece of the pool that says who has its bytes."""

from __future__ import annotations

import os

import pytest

from hegmd.errors import HegmError
from hegmd.gpu_helper.host_memory import HostMemory
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, pack_mark, read_mark

SIZE_BYTES = 1 << 20


def test_a_mark_is_read_as_it_was_written_and_wiped_by_one_byte() -> None:
    mark = Mark("12.4711.passing", 32 << 30)
    packed = pack_mark(mark)
    assert len(packed) == MARK_BYTES
    assert read_mark(packed) == mark
    assert read_mark(b"\0" + packed[1:]) is None
    assert read_mark(bytes(MARK_BYTES)) is None


@pytest.mark.parametrize("damaged", [b"", b"12", b"x 7.1.passing", b"12 "])
def test_an_invalid_mark_does_not_count_as_none(damaged: bytes) -> None:
    """Otherwise hegmd would use other content of the pool as a job's bytes."""
    whole = pack_mark(Mark("7.1.passing", 1))
    start = whole[: whole.index(b"1 7.1")]
    with pytest.raises(HegmError, match="a pool segment says that its bytes are elsewhere, but not where") as refused:
        read_mark((start + damaged).ljust(MARK_BYTES, b"\0"))
    assert refused.value.hint


def test_the_mark_is_written_at_the_end_of_a_segment_only() -> None:
    """Through a mapping: files in huge pages cannot be written to."""
    fd = os.memfd_create("pool")
    os.ftruncate(fd, SIZE_BYTES)
    memory = HostMemory(fd, SIZE_BYTES)
    mark = Mark("7.1.passing", 5)
    memory.mark(mark)
    found = os.pread(fd, SIZE_BYTES, 0)
    assert read_mark(found[-MARK_BYTES:]) == mark
    assert found[:-MARK_BYTES] == bytes(SIZE_BYTES - MARK_BYTES)
    memory.mark(None)
    assert read_mark(os.pread(fd, MARK_BYTES, SIZE_BYTES - MARK_BYTES)) is None
    memory.close()
    memory.close()
    os.close(fd)
