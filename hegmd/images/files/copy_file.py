"""Copies CRIU's files in chunks, by several threads, and computes checksums of the written bytes.

The checksum is the SHA-256 of the SHA-256 of each 8 MiB. A cryptographic one is needed, because root's CRIU reads these
files; and a single one over all bytes would run at 1.1 GB/s on one core. Everything blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.system.direct_io import CHUNK_BYTES, Progress, chunks_of, each_chunk, opened, read_whole, write_whole

# Some wait for a disk while others are at their sums.
THREADS = 8


def sum_of(file: int, size_bytes: int, progress: Progress, *, from_disk: bool = True) -> str:
    """Return the checksum of the file's first bytes, from disk or the page cache. Raises HegmError, OSError."""
    if from_disk:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return _each(file, size_bytes, lambda _place, _view, _length: None, progress)


def copy(file: int, size_bytes: int, dir_fd: int, name: str, progress: Progress) -> str:
    """Copy its bytes to a new file and sync it. Returns the checksum. Raises HegmError and OSError."""
    with opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=dir_fd) as target:

        def write(place: int, view: memoryview, length: int) -> None:
            view[length:] = bytes(len(view) - length)
            write_whole(target, view, place)

        total = _each(file, size_bytes, write, progress)
        os.ftruncate(target, size_bytes)
        os.fsync(target)
    return total


def _each(file: int, size_bytes: int, then: Callable[[int, memoryview, int], None], progress: Progress) -> str:
    sums = [b""] * len(chunks_of(size_bytes))

    def one(number: int, view: memoryview, length: int) -> None:
        place = number * CHUNK_BYTES
        if read_whole(file, view, place) < length:
            raise HegmError(
                UNAVAILABLE,
                f"a CRIU file ends within chunk {number} of {len(sums)}: it should have {size_bytes} bytes",
                "use another image, or a complete copy of this one",
            )
        with view[:length] as data:
            sums[number] = hashlib.sha256(data).digest()
        then(place, view, length)

    each_chunk(size_bytes, one, progress, "copy", threads=THREADS)
    return hashlib.sha256(b"".join(sums)).hexdigest()
