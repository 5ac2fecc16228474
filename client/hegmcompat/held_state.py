"""A saved state in the launcher's own memory, so that an image of the waiting launcher contains it, as HeGM's did.

Such an image can be restored on nodes without the checkpoint files, and the file is then written from memory. If there
is not enough memory, only the file has the state, and a warning says so: running out of memory would kill the launcher.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

from hegmcompat import private_files

_PIECE_BYTES = 64 << 20
# Memory that has to stay free beside the copy.
_MARGIN_BYTES = 256 << 20


class HeldState:
    """The bytes of one file, and which file that was."""

    def __init__(self, path: Path, memory: mmap.mmap | None, identity: tuple[int, int, int, int]) -> None:
        self._path = path
        self._memory = memory
        self._identity = identity

    @property
    def size_bytes(self) -> int:
        return self._identity[2]

    @property
    def is_held(self) -> bool:
        """Return True if the bytes are in memory, and not in the file only."""
        return self._memory is not None

    def put_back(self) -> None:
        """Write the file again if it is missing or different. Raises OSError, also if its bytes are not held."""
        if private_files.identity(self._path) == self._identity:
            return
        if self._memory is None:
            raise FileNotFoundError(2, "it was removed or replaced, and was not held in memory", str(self._path))
        private_files.make_folder(self._path.parent)
        with memoryview(self._memory) as data:
            private_files.write(self._path, data[: self.size_bytes])

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def take(path: Path, available_bytes: int | None = None) -> HeldState:
    """Read that file into memory if there is enough. Raises OSError."""
    with private_files.opened(path) as fd:
        found = os.fstat(fd)
        identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
        free_bytes = _available_bytes() if available_bytes is None else available_bytes
        if found.st_size == 0 or (free_bytes is not None and found.st_size + _MARGIN_BYTES > free_bytes):
            return HeldState(path, None, identity)
        memory = mmap.mmap(-1, found.st_size)
        try:
            _fill(memory, fd)
        except BaseException:
            memory.close()
            raise
        return HeldState(path, memory, identity)


def _fill(memory: mmap.mmap, fd: int) -> None:
    with memoryview(memory) as whole:
        at = 0
        while at < len(whole):
            read_bytes = os.preadv(fd, [whole[at : at + _PIECE_BYTES]], at)
            if read_bytes == 0:
                raise OSError(0, f"it ended at {at} of {len(whole)} bytes")
            at += read_bytes


def _available_bytes() -> int | None:
    """Return the available memory of the node and our control group; None if neither reports it."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    with suppress(OSError, ValueError, IndexError):
        groups = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
        group = Path(f"/sys/fs/cgroup{groups[0]}")
        most, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        found += [int(most) - int(used)] if most != "max" else []
    return min(found, default=None)
