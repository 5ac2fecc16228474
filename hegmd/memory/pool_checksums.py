"""Checksums of suspended bytes in the pool's memory: taken after the suspend, compared before the bytes are used.

A chunk of 8 MiB has a CRC-32 that starts with its number, as in spill files and images, so that swapped chunks are
found. Checksums are taken after the downtime, so they cost the job none; a bit that flips before that is not found.
They are stored in a small file for each segment in the state directory, for the next daemon. The files are not synced:
a reboot ends the memory. A missing or damaged file means that the checksums are unknown.

Measured on 16 cores beside an H200 with 32 GiB in small pages: 4.2 s to take them with 4 threads, 1.3 s to compare them
with 16; one core sums 2.0 GB/s. A resume of 32 GiB takes 1.3 to 2.0 s longer by that, unless the bytes were compared
ahead: sharing knows when a turn ends, and a job trains meanwhile. Rejected: summing during the copy, because
the processor sums as fast as it copies and would halve the rate of the copy for which a job is parked.

The memory is read by `preadv` and never mapped: for a page with a memory error the call fails, while a mapping would
end the process by SIGBUS. Everything here blocks and runs in a thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from hegmd.errors import HegmError
from hegmd.memory.spill_file import ResultUnwanted
from hegmd.system.direct_io import CHUNK_BYTES, changed, chunks_of, each_chunk, read_memory, shortened

logger = logging.getLogger(__name__)

MAGIC = b"HEGMSUM1"
_SUM = struct.Struct("<I")
# No caller waits for the sums, so other work keeps its processors. A resuming job does wait for the comparison.
SUMMING_THREADS = 4
# For so long a comparison counts: a job that resumes later compares again.
COMPARED_FOR_S = 60.0
COMPARING_THREADS = 16


def sums_of(fd: int, size_bytes: int, unwanted: Callable[[], bool]) -> tuple[int, ...]:
    """Return the checksum of each chunk. Raises HegmError for unreadable memory, and Unwanted."""
    return _summed(fd, size_bytes, unwanted, min(SUMMING_THREADS, _processors()), None)


def compare(
    fd: int, size_bytes: int, known: Sequence[int], unwanted: Callable[[], bool], whose: str, threads: int
) -> bool:
    """Return True. Raise HegmError if that memory has changed since it was summed, Unwanted if it is not wanted."""
    if len(known) != len(chunks_of(size_bytes)):
        raise changed(whose, min(len(known), len(chunks_of(size_bytes))), len(known))
    try:
        _summed(fd, size_bytes, unwanted, min(threads, _processors()), (known, whose))
    except HegmError as error:
        if not error.message.startswith(whose):
            raise HegmError(error.code, f"{whose}: {error.message}", error.hint, error.facts) from error
        raise
    return True


def _summed(
    fd: int, size_bytes: int, unwanted: Callable[[], bool], threads: int, known: tuple[Sequence[int], str] | None
) -> tuple[int, ...]:
    found = [0] * len(chunks_of(size_bytes))

    def add_up(number: int, view: memoryview, length: int) -> None:
        if unwanted():
            raise ResultUnwanted
        with view[:length] as chunk:
            if read_memory(fd, chunk, number * CHUNK_BYTES) < length:
                raise shortened(os.fstat(fd).st_size, size_bytes)
            found[number] = zlib.crc32(chunk, number + 1)
        if known is not None and found[number] != known[0][number]:
            raise changed(known[1], number, len(found))

    each_chunk(size_bytes, add_up, lambda _: None, "pool sums", threads=threads)
    return tuple(found)


def _processors() -> int:
    return len(os.sched_getaffinity(0))


class SumFolder:
    """The files of the checksums, named by segment, which outlive the daemon."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def keep(self, mark: str, sums: Sequence[int]) -> None:
        """Store the checksums of that segment. Raises nothing: without them the next daemon compares nothing."""
        table = MAGIC + b"".join(_SUM.pack(one) for one in sums)
        fresh = self.folder / f".{mark}.{secrets.token_hex(4)}"
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            try:
                with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
                    file.write(table + _SUM.pack(zlib.crc32(table)))
                fresh.rename(self.folder / mark)
            except OSError:
                with contextlib.suppress(OSError):
                    fresh.unlink()
                raise
        except OSError as error:
            logger.warning("the checksums of %s are not kept beyond the end of this daemon: %s", mark, error)

    def load(self, mark: str) -> tuple[int, ...] | None:
        try:
            data = (self.folder / mark).read_bytes()
        except OSError:
            return None
        table, total = data[: -_SUM.size], data[-_SUM.size :]
        if not table.startswith(MAGIC) or len(data) % _SUM.size or total != _SUM.pack(zlib.crc32(table)):
            logger.warning("the checksums of %s are damaged, and its bytes are not compared with them", mark)
            return None
        return tuple([one for (one,) in _SUM.iter_unpack(table[len(MAGIC) :])])

    def drop(self, mark: str) -> None:
        """Forget the checksums of that segment. Raises nothing."""
        with contextlib.suppress(OSError):
            (self.folder / mark).unlink()

    def drop_all_but(self, marks: Iterable[str]) -> None:
        """Forget checksums of segments that no longer exist, as after a reboot. Raises nothing."""
        kept = set(marks)
        with contextlib.suppress(OSError):
            for name in os.listdir(self.folder):
                if name not in kept:
                    self.drop(name)
