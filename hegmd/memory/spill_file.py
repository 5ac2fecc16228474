"""A pool segment as a file on disk: written past the page cache, with a checksum for each chunk, whole or absent.

Layout, all in blocks of 4096 bytes: a header (magic, version, sizes, the segment's mark, CRC-32 of itself), the bytes,
then the CRC-32 of each chunk and one of that table. A chunk's checksum starts from its number, so that swapped chunks
are found. The file is written under another name, synced, read back from the disk and compared, and only then renamed:
a file with its own name has been verified. A full disk leaves nothing behind and changes nothing.

All operations use the descriptor of the directory. A file of another owner, with a second name, or readable by others
is not trusted.

Everything blocks and runs in a thread; `unwanted` is checked between chunks. The memory is read with `pread` and never
mapped, since a job had its descriptor and could have truncated it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import NamedTuple

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.memory.pool_places import why_not_ours
from hegmd.system.direct_io import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Progress,
    changed,
    chunks_of,
    each_chunk,
    opened,
    read_memory,
    read_whole,
    rounded_up,
    shortened,
    write_whole,
)

MAGIC = b"HEGMSPIL"
VERSION = 1
ENDING, UNFINISHED = ".spill", ".spill.new"
# Other programs may have put any file into the directory: opening one must not block.
_TO_READ = os.O_RDONLY | os.O_NONBLOCK

_HEAD = struct.Struct("<8sIIQQ")  # magic, version, length of the name, bytes, chunk
_SUM = struct.Struct("<I")
_FREE_OF = "free space under {folder}, or name a directory with more of it as pool.spill_dir"


class ResultUnwanted(Exception):
    """The caller no longer needs the result."""


class FoundSpill(NamedTuple):
    """A file of an earlier daemon, by its header: its size, or why it is not trusted."""

    name: str
    size_bytes: int
    why_not: str = ""


class SpillFolder:
    """The directory of spilled segments. `spare_bytes` of its disk stay free for others."""

    def __init__(self, folder: Path, *, spare_bytes: int) -> None:
        self.folder = folder
        self._spare_bytes = spare_bytes

    def path(self, name: str) -> Path:
        return self.folder / (name + ENDING)

    def write(
        self,
        name: str,
        fd: int,
        size_bytes: int,
        unwanted: Callable[[], bool],
        progress: Progress,
        known: Sequence[int] | None = None,
    ) -> None:
        """Write the memory to a file of that name. Raises HegmError or Unwanted, and leaves nothing then.

        `known` are the checksums of its chunks, if taken before: bytes that changed since are not written.
        """
        fresh = name + UNFINISHED
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with self._opened() as folder:
                self._refuse_if_others_may_write(folder)
                self._refuse_without_space(folder, name, size_bytes)
                try:
                    with opened(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL, dir_fd=folder) as file:
                        self._refuse_if_not_ours(file)
                        os.posix_fallocate(file, 0, _file_bytes(size_bytes))
                        sums = _copy_out((fd, known), file, size_bytes, unwanted, progress)
                        _write_ends(file, _mark_of(name), size_bytes, sums)
                        os.fsync(file)
                        _compare(file, size_bytes, sums, unwanted)
                    if unwanted():  # the waiting caller may have ended long ago, and that memory may have other bytes
                        raise ResultUnwanted
                    os.rename(fresh, name + ENDING, src_dir_fd=folder, dst_dir_fd=folder)
                    os.fsync(folder)
                except BaseException:
                    with contextlib.suppress(OSError):
                        os.unlink(fresh, dir_fd=folder)
                    raise
        except OSError as error:
            raise self._failed(f"{size_bytes} bytes cannot be written to {self.folder / fresh}", error) from error

    def read(self, name: str, size_bytes: int, into: Callable[[int, memoryview], None], progress: Progress) -> None:
        """Pass every verified chunk of that segment to `into`, with its offset. Raises HegmError.

        `into` is called from several threads and must not keep the view.
        """
        path = self.path(name)
        try:
            with self._own(name) as file:
                found = _head_of(file, os.fstat(file).st_size)
                if found.why_not or found.name != _mark_of(name) or found.size_bytes != size_bytes:
                    raise _damaged(path, found.why_not or f"it is of {found.name}, with {found.size_bytes} bytes")
                _copy_in(file, size_bytes, _sums_of(file, path, size_bytes), path, into, progress)
        except OSError as error:
            raise self._failed(f"{path} cannot be read", error) from error

    def beginning(self, name: str, size_bytes: int) -> bytes:
        """Return the segment's first bytes, at most a block, unverified. Raises HegmError."""
        try:
            with self._own(name) as file, mmap.mmap(-1, BLOCK_BYTES) as block:
                os.preadv(file, [block], BLOCK_BYTES)
                return block[:size_bytes]
        except OSError as error:
            raise self._failed(f"{self.path(name)} cannot be read", error) from error

    def remove(self, name: str) -> None:
        """Delete the file. Does nothing if it does not exist. Raises HegmError."""
        try:
            with contextlib.suppress(FileNotFoundError), self._opened() as folder:
                os.unlink(name + ENDING, dir_fd=folder)
        except OSError as error:
            raise self._failed(f"{self.path(name)} cannot be removed", error) from error

    def rename(self, name: str, new_name: str) -> None:
        """Give a file to another owner; its mark does not change. Raises HegmError."""
        try:
            with self._opened() as folder:
                os.rename(name + ENDING, new_name + ENDING, src_dir_fd=folder, dst_dir_fd=folder)
                os.fsync(folder)
        except OSError as error:
            raise self._failed(f"{self.path(name)} cannot be renamed", error) from error

    def find(self) -> list[FoundSpill]:
        """Return what an earlier daemon left here; removes what it was still writing."""
        found: list[FoundSpill] = []
        try:
            with self._opened() as folder:
                for entry in sorted(os.listdir(folder)):
                    if entry.endswith(UNFINISHED):
                        with contextlib.suppress(OSError):  # a directory of that name is nothing that was being written
                            os.unlink(entry, dir_fd=folder)
                    elif entry.endswith(ENDING):
                        found.append(_look_at(folder, entry))
        except OSError:  # the directory does not exist or cannot be read, so it has nothing to offer
            return []
        return found

    @contextlib.contextmanager
    def _opened(self) -> Generator[int]:
        """Open the directory: all operations use its descriptor, so renames on the way do not matter."""
        folder = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield folder
        finally:
            os.close(folder)

    @contextlib.contextmanager
    def _own(self, name: str) -> Generator[int]:
        """Open that file for reading if we wrote it. Raises HegmError and OSError."""
        with self._opened() as folder, opened(name + ENDING, _TO_READ, dir_fd=folder) as file:
            why_not = why_not_ours(os.fstat(file))
            if why_not:
                raise _damaged(self.path(name), why_not)
            yield file

    def _refuse_if_others_may_write(self, folder: int) -> None:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
            raise Refused(
                f"{self.folder} can be written by others (uid {status.st_uid}, {stat.S_IMODE(status.st_mode):04o})",
                f"chown {os.geteuid()} {self.folder} && chmod 0700 {self.folder}",
            )

    def _refuse_if_not_ours(self, file: int) -> None:
        """Refuse to write a file that could not be trusted later: some file systems have no owners and modes."""
        why_not = why_not_ours(os.fstat(file))
        if why_not:
            raise Refused(
                f"a new file in {self.folder} is not private to its creator: {why_not}",
                "name a directory on a disk that keeps owners and modes, as pool.spill_dir",
            )

    def _refuse_without_space(self, folder: int, name: str, size_bytes: int) -> None:
        status = os.fstatvfs(folder)
        free_bytes = status.f_bavail * status.f_frsize
        needed_bytes = _file_bytes(size_bytes) + self._spare_bytes
        if free_bytes < needed_bytes:
            raise Refused(
                f"{self.folder} has {free_bytes >> 20} MiB free; {name} needs {_file_bytes(size_bytes) >> 20} MiB, and "
                f"{self._spare_bytes >> 20} MiB are kept free for other programs",
                _FREE_OF.format(folder=self.folder),
                {"free_bytes": free_bytes, "needed_bytes": needed_bytes},
            )

    def _failed(self, what: str, error: OSError) -> HegmError:
        message, facts = f"{what}: {error.strerror or error}", {"errno": error.errno}
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return Refused(message, _FREE_OF.format(folder=self.folder), facts)
        return HegmError(UNAVAILABLE, message, f"check the disk of {self.folder}: dmesg, df -h", facts)


# ---- layout ----------------------------------------------------------------------------------------------------------


def _file_bytes(size_bytes: int) -> int:
    return BLOCK_BYTES + rounded_up(size_bytes) + rounded_up(_SUM.size * (len(chunks_of(size_bytes)) + 1))


def _mark_of(name: str) -> str:
    """Return the part of a segment's name that no owner changes: size, nonce and source."""
    return name.rpartition("-")[2].partition(".from.")[0]


def _write_ends(file: int, mark: str, size_bytes: int, sums: list[int]) -> None:
    """Write the header, and the table of checksums with its own checksum."""
    title = mark.encode()
    head = _HEAD.pack(MAGIC, VERSION, len(title), size_bytes, CHUNK_BYTES) + title
    table = b"".join(_SUM.pack(one) for one in sums)
    for data, place in ((head, 0), (table, BLOCK_BYTES + rounded_up(size_bytes))):
        whole = data + _SUM.pack(zlib.crc32(data))
        with mmap.mmap(-1, rounded_up(len(whole))) as block:
            block[: len(whole)] = whole
            write_whole(file, memoryview(block), place)


def _head_of(file: int, file_bytes: int) -> FoundSpill:
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        if os.preadv(file, [block], 0) < BLOCK_BYTES:
            return FoundSpill("", 0, "it is cut short")
        magic, version, length, size_bytes, chunk_bytes = _HEAD.unpack_from(block)
        if magic != MAGIC:
            return FoundSpill("", 0, "it is not a spill file")
        end = _HEAD.size + length
        if end + _SUM.size > BLOCK_BYTES or _SUM.unpack_from(block, end)[0] != zlib.crc32(block[:end]):
            return FoundSpill("", 0, "its header does not match its checksum")
        name = block[_HEAD.size : end].decode("utf-8", "replace")
    if version != VERSION or chunk_bytes != CHUNK_BYTES:
        return FoundSpill(name, size_bytes, f"it is of version {version}, and this hegmd reads {VERSION}")
    if file_bytes < _file_bytes(size_bytes):
        return FoundSpill(name, size_bytes, f"it has {file_bytes} bytes and should have {_file_bytes(size_bytes)}")
    return FoundSpill(name, size_bytes)


def _sums_of(file: int, path: Path, size_bytes: int) -> list[int]:
    count = len(chunks_of(size_bytes))
    used = _SUM.size * count
    with mmap.mmap(-1, rounded_up(used + _SUM.size)) as block:
        got = os.preadv(file, [block], BLOCK_BYTES + rounded_up(size_bytes))
        if got < used + _SUM.size or _SUM.unpack_from(block, used)[0] != zlib.crc32(block[:used]):
            raise _damaged(path, "its table of checksums does not match its own checksum")
        return [one for (one,) in _SUM.iter_unpack(block[:used])]


def _look_at(folder: int, entry: str) -> FoundSpill:
    name = entry.removesuffix(ENDING)
    try:
        with opened(entry, _TO_READ, dir_fd=folder) as file:
            status = os.fstat(file)
            if why_not := why_not_ours(status):
                return FoundSpill(name, status.st_size, why_not)
            found = _head_of(file, status.st_size)
    except OSError as error:
        return FoundSpill(name, 0, f"it cannot be read: {error.strerror or error}")
    why_not = found.why_not or ("" if found.name == _mark_of(name) else f"it is of {found.name}")
    return FoundSpill(name, found.size_bytes, why_not)


def _damaged(path: Path, why: str) -> HegmError:
    return HegmError(
        UNAVAILABLE,
        f"{path} is damaged: {why}",
        "the job stays parked; check the disk, and put the file back from a copy if there is one",
        {"path": str(path)},
    )


# ---- copying ---------------------------------------------------------------------------------------------------------


def _copy_out(
    memory: tuple[int, Sequence[int] | None],
    file: int,
    size_bytes: int,
    unwanted: Callable[[], bool],
    progress: Progress,
) -> list[int]:
    """Copy the chunks to the file; return their checksums, which have to equal known ones."""
    fd, known = memory
    sums = [0] * len(chunks_of(size_bytes))

    def copy(number: int, view: memoryview, length: int) -> None:
        if unwanted():
            raise ResultUnwanted
        if read_memory(fd, view[:length], number * CHUNK_BYTES) < length:
            raise shortened(os.fstat(fd).st_size, size_bytes)
        sums[number] = zlib.crc32(view, number + 1)
        if known is not None and known[number] != sums[number]:
            raise changed("what was to be written to disk", number, len(sums))
        write_whole(file, view, BLOCK_BYTES + number * CHUNK_BYTES)

    each_chunk(size_bytes, copy, progress, "spill")
    return sums


def _compare(file: int, size_bytes: int, sums: list[int], unwanted: Callable[[], bool]) -> None:
    """Raise HegmError if the disk returns other bytes than were written."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # for a file system that uses the page cache anyway

    def compare(number: int, view: memoryview, length: int) -> None:
        if unwanted():
            raise ResultUnwanted
        got = read_whole(file, view, BLOCK_BYTES + number * CHUNK_BYTES)
        if got < length or zlib.crc32(view, number + 1) != sums[number]:
            raise HegmError(
                UNAVAILABLE,
                f"the disk returned other bytes than were written, in chunk {number} of a spill file",
                "the bytes stay in memory; do not trust that disk: smartctl, dmesg",
            )

    each_chunk(size_bytes, compare, lambda _: None, "spill")


def _copy_in(
    file: int, size_bytes: int, sums: list[int], path: Path, into: Callable[[int, memoryview], None], progress: Progress
) -> None:
    def copy(number: int, view: memoryview, length: int) -> None:
        got = read_whole(file, view, BLOCK_BYTES + number * CHUNK_BYTES)
        if got < length or zlib.crc32(view, number + 1) != sums[number]:
            raise _damaged(path, f"chunk {number} of {len(sums)} does not match its checksum")
        with view[:length] as bytes_of_it:
            into(number * CHUNK_BYTES, bytes_of_it)

    each_chunk(size_bytes, copy, progress, "spill")
