"""The files of this process's imported modules, and whether they are still the same.

A module that was imported long ago may have another version on disk now, after an installation or an edit. Files are
compared by size, time of change and inode, without reading them.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import ModuleType

    Mark = tuple[int, int, int, int]


class Sources:
    """The files of the recorded modules, and of the interpreter."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark | None] = {}
        for path in ("/proc/self/exe", sys.executable):
            self._marks[path] = _mark(path)

    def note(self, modules: Iterable[ModuleType]) -> None:
        """Record the files of these modules, if they are new."""
        for module in list(modules):
            spec = getattr(module, "__spec__", None)
            origin = None if spec is None or not spec.has_location else spec.origin
            if isinstance(origin, str) and origin not in self._marks:
                self._marks[origin] = _mark(origin)

    def check(self) -> None:
        """Raise RuntimeError with the first file that changed or no longer exists."""
        for path, before in self._marks.items():
            if _mark(path) != before:
                raise RuntimeError(f"{path} has changed since it was imported")


def _mark(path: str) -> Mark | None:
    """Return the file's identity; None if it is not a file, such as a module in an archive."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
