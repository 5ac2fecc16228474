"""Files that are read and written in whole blocks and past the page cache, by several threads at once.

What spilled pieces and the bytes of images have in common: aligned buffers, `O_DIRECT` where the file system takes it,
and the sharing out of a file's chunks. What a file holds, and how it is known to be good, is its owner's.

Everything blocks and is called in a thread or in a process of its own.
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
    """To whole blocks."""
    return (size_bytes + BLOCK_BYTES - 1) // BLOCK_BYTES * BLOCK_BYTES


def chunks_of(size_bytes: int) -> range:
    """The numbers of the chunks that so many bytes are in."""
    return range((size_bytes + CHUNK_BYTES - 1) // CHUNK_BYTES)


@contextlib.contextmanager
def opened(path: str | Path, flags: int, *, dir_fd: int | None = None) -> Generator[int]:
    """The file, never one behind a link, read and written past the page cache where its file system can do that."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dir_fd)
    try:
        # Not at the opening: a file system that cannot would have made the file and then failed.
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_DIRECT)
        yield fd
    finally:
        os.close(fd)


def is_direct(fd: int) -> bool:
    """Whether that file goes past the page cache."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def each_chunk(
    size_bytes: int,
    work: Callable[[int, memoryview, int], None],
    progress: Progress,
    name: str,
    *,
    threads: int | None = None,
) -> None:
    """Have `work` called for each chunk by number, with a buffer of a whole number of blocks and the chunk's length.

    By so many threads at most; if not given, by as many as the crew finds right for work that keeps processors busy.
    """
    guard = threading.Lock()
    done_bytes = 0

    def start() -> Callable[[int], None]:
        buffer = mmap.mmap(-1, CHUNK_BYTES)  # on a page, as O_DIRECT wants it

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
    """As much as there is, up to the view's length. A file is read from a block's beginning."""
    got = 0
    while got < len(view):
        more = os.preadv(fd, [view[got:]], place + got)
        got += more
        if more == 0 or more % BLOCK_BYTES:  # the file ends here, and past the page cache nothing begins within a block
            break
    return got


def read_memory(fd: int, view: memoryview, place: int) -> int:
    """As `read_whole`, of a piece of the pool. Raises HegmError where the kernel gives no bytes: a broken page."""
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
    """All of the view."""
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done:]], place + done)


def shortened(held_bytes: int, size_bytes: int) -> Refused:
    """A piece of the pool is smaller than what was put into it. The job's user can do that; so can a fault of ours."""
    return Refused(
        f"the memory that holds the job's bytes has {held_bytes} bytes, and {size_bytes} were expected",
        "read the log of hegmd, and check which other process has that file open: it may have truncated it",
        {"held_bytes": held_bytes, "expected_bytes": size_bytes},
    )


def changed(whose: str, number: int, count: int) -> HegmError:
    """A chunk is not what it was when the job was taken off its GPU."""
    start = number * CHUNK_BYTES
    return HegmError(
        UNAVAILABLE,
        f"{whose}: chunk {number} of {count} has changed in memory since the job was suspended "
        f"(bytes {start} to {start + CHUNK_BYTES})",
        "check dmesg for memory errors, and restore the job from an image if there is one; the job stays suspended and "
        'its bytes are kept. To use them anyway, set pool.verify = "off", restart hegmd, and resume',
        {"chunk": number},
    )
