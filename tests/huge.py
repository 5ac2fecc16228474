"""Huge pages of hugetlbfs for a test, which most nodes have none of: asked of the kernel where that may be asked."""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

HUGE_PAGE_BYTES = 2 << 20
_COUNT = Path("/proc/sys/vm/nr_hugepages")
_LOCK = Path(tempfile.gettempdir()) / f"hegm-huge-pages-{os.geteuid()}.lock"


@contextmanager
def huge_memory(size_bytes: int) -> Iterator[int]:
    """A memfd of huge pages of at least that size. Skips the test on a node that has none and gives none."""
    count = -(-size_bytes // HUGE_PAGE_BYTES)
    fd = os.memfd_create("huge", os.MFD_CLOEXEC | os.MFD_HUGETLB)
    try:
        os.ftruncate(fd, count * HUGE_PAGE_BYTES)
        with _more_by(count):
            try:
                mmap.mmap(fd, count * HUGE_PAGE_BYTES).close()  # they are the file's from here on
            except OSError:
                pytest.skip(f"the node has no {count} huge pages to spare")
        yield fd
    finally:
        os.close(fd)


@contextmanager
def _more_by(count: int) -> Iterator[None]:
    """As many more as can be had, for one test at a time; those that are in use stay when they are given back."""
    with _LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = _COUNT.read_text()
        with suppress(OSError):
            _COUNT.write_text(str(int(before) + count))
        try:
            yield
        finally:
            with suppress(OSError):
                _COUNT.write_text(before)
