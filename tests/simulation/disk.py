"""A model of a disk under the real journal file: what was written is in memory, and on the disk once it was synced.

It can be full, read-only, or fail a sync; a daemon that is killed finds all that it wrote, a power cut leaves what was
synced and a part of the rest.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from hegmd.migration.journal.disk import Disk


@dataclass
class File:
    """One file without its name."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    reserved_bytes: int = 0


@dataclass
class ModelDisk(Disk):
    """The disk of one life. `breaks` is how many more syncs fail, of those that come."""

    random: Random
    full: bool = False
    read_only: bool = False
    breaks: int = 0
    names: dict[str, File] = field(default_factory=dict)
    durable_names: dict[str, File] = field(default_factory=dict)
    open_files: dict[int, File] = field(default_factory=dict)
    next_fd: int = 3

    def __post_init__(self) -> None:
        self.can_reserve = self.random.random() < 0.5

    def read(self, path: Path) -> bytes:
        if path.name not in self.names:
            raise FileNotFoundError(path)
        return bytes(self.names[path.name].data)

    def create(self, path: Path) -> int:
        self._refuse_read_only()
        self.names[path.name] = File()
        self.next_fd += 1
        self.open_files[self.next_fd] = self.names[path.name]
        return self.next_fd

    def write(self, fd: int, data: bytes) -> int:
        self._refuse_read_only()
        file = self.open_files[fd]
        size = len(data)
        if self.full and len(file.data) + size > file.reserved_bytes:
            size = self.random.choice((0, size // 2))
            if not size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.data += data[:size]
        return size

    def sync(self, fd: int) -> None:
        file = self.open_files[fd]
        if self._breaks_now():
            if self.random.random() < 0.5:
                file.durable = bytes(file.data)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file.durable = bytes(file.data)

    def cut(self, fd: int, size_bytes: int) -> None:
        self._refuse_read_only()
        file = self.open_files[fd]
        del file.data[size_bytes:]
        file.reserved_bytes = 0

    def reserve(self, fd: int, size_bytes: int) -> None:
        self._refuse_read_only()
        if not self.can_reserve:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.open_files[fd].reserved_bytes = size_bytes

    def rename(self, path: Path, target: Path) -> None:
        self._refuse_read_only()
        self.names[target.name] = self.names.pop(path.name)

    def remove(self, path: Path) -> None:
        self._refuse_read_only()
        self.names.pop(path.name, None)

    def sync_folder(self, folder: Path) -> None:
        if self._breaks_now():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.durable_names = dict(self.names)

    def _breaks_now(self) -> bool:
        if not self.breaks or self.random.random() < 0.5:
            return False
        self.breaks -= 1
        return True

    def close(self, fd: int) -> None:
        del self.open_files[fd]

    # ---- what happens to it ------------------------------------------------------------------------------------------

    def is_mended(self) -> bool:
        return not (self.full or self.read_only or self.breaks)

    def mend(self) -> None:
        self.full, self.read_only, self.breaks = False, False, 0

    def is_durable(self, name: str) -> bool:
        """Whether a power cut now would leave that file as it is."""
        file = self.names.get(name)
        return file is not None and self.durable_names.get(name) is file and file.durable == file.data

    def scribble(self, name: str, data: bytes) -> None:
        """Write a part of the bytes, as a daemon that is killed during the write, if it had the file open."""
        file = self.names.get(name)
        if file is not None and not self.read_only and any(file is known for known in self.open_files.values()):
            file.data += data

    def cut_power(self) -> None:
        """Keep a part of what was not synced, or nothing; the same for names."""
        for file in {id(file): file for file in (*self.names.values(), *self.durable_names.values())}.values():
            unsynced = bytes(file.data)[len(file.durable) :] if file.data.startswith(file.durable) else b""
            file.data = bytearray(file.durable + unsynced[: self.random.randrange(len(unsynced) + 1)])
            file.durable = bytes(file.data)
        if self.random.random() < 0.5:
            self.names = dict(self.durable_names)
        self.durable_names = dict(self.names)

    def _refuse_read_only(self) -> None:
        if self.read_only:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
