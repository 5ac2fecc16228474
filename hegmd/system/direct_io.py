"""Files that several threads read and write in whole blocks, past the page cache.

Shared by spilled pool segments and images: aligned buffers, `O_DIRECT` if the file system supports it, and dividing a
file into chunks. Callers know what a file holds and how to verify it.

Everything blocks, and runs in a thread or in a process of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Generator
from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.system.thread_pool import share_out, threads_for

BLOCK_BYTES = 4096
CHUNK_BYTES = 8 << 20

Progress = Callable[[int], object]


def rounded_up(size_bytes: int) -> int:
    """Round up to whole blocks."""
    return (size_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def chunks_of(size_bytes: int) -> range:
    """Return the chunk numbers of that many bytes."""
    return range((size_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES)


@contextlib.contextmanager
def opened(path: str | Path, flags: int, *, dir_fd: int | None = None) -> Generator[int]:
    """Open the file without following links, and use O_DIRECT if its file system supports it."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        # Not when opening: a file system without support creates the file and then fails.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        yield fd
    finally:
        os.close(fd)


def is_direct(fd: int) -> bool:
    """Return True if the file bypasses the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def each_chunk(
    size_bytes: int,
    work: Callable[[int, memoryview, int], None],
    progress: Progress,
    name: str,
    *,
    threads: int | None = None,
) -> None:
    """Call `work` for each chunk with its number, a buffer of whole blocks and the chunk's length.

    Uses at most `threads` threads. The default is the number of the thread pool for work that needs processors.
    """
    guard = threading.Lock()
    done_bytes = 0

    def start() -> Callable[[int], None]:
        buffer = mmap.mmap(-1, CHUNK_BYTES)  # page-aligned, as O_DIRECT requires

        def one(number: int) -> None:
            nonlocal done_bytes
            length = min(CHUNK_BYTES, size_bytes - number * CHUNK_BYTES)
            with memoryview(buffer) as whole, whole[: rounded_up(length)] as view:
                work(number, view, length)
            with guard:
                done_bytes += length
                progress(done_bytes)

        return one

    numbers = chunks_of(size_bytes)
    most = threads_for(len(numbers)) if threads is None else min(threads, max(1, len(numbers)))
    share_out(numbers, start, threads=most, name=name)


def read_whole(fd: int, view: memoryview, place: int) -> int:
    """Read up to the view's length. A file is read from the start of a block."""
    got = 0
    while got < len(view):
        more = os.preadv(fd, [view[got:]], place + got)
        got += more
        if more == 0 or more % BLOCK_BYTES:  # end of file; with O_DIRECT a read cannot start within a block
            break
    return got


def read_memory(fd: int, view: memoryview, place: int) -> int:
    """Like `read_whole`, for a pool segment. Raises HegmError if the kernel reports a broken page."""
    try:
        return read_whole(fd, view, place)
    except OSError as error:
        raise HegmError(
            UNAVAILABLE,
            f"the memory with the job's bytes cannot be read from byte {place} on: {error.strerror or error}",
            "check dmesg for memory errors (EDAC, MCE, hwpoison): a memory module may be broken; restore the job from "
            "an image if there is one",
            {"errno": error.errno, "at_bytes": place},
        ) from error


def write_whole(fd: int, view: memoryview, place: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done:]], place + done)


def shortened(held_bytes: int, size_bytes: int) -> Refused:
    """Return the error for a pool segment that is smaller than its contents: the job's user, or a bug, truncated it."""
    return Refused(
        f"the memory that holds the job's bytes has {held_bytes} bytes, and {size_bytes} were expected",
        "read the log of hegmd, and check which other process has that file open: it may have truncated it",
        {"held_bytes": held_bytes, "expected_bytes": size_bytes},
    )


def changed(whose: str, number: int, count: int) -> HegmError:
    """Return the error for a chunk that changed since the job was taken off its GPU."""
    start = number * CHUNK_BYTES
    return HegmError(
        UNAVAILABLE,
        f"{whose}: chunk {number} of {count} has changed in memory since the job was suspended "
        f"(bytes {start} to {start + CHUNK_BYTES})",
        "check dmesg for memory errors, and restore the job from an image if there is one; the job stays suspended and "
        'its bytes are kept. To use them anyway, set pool.verify = "off", restart hegmd, and resume',
        {"chunk": number},
    )
