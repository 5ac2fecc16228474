"""The files that the modules of this process came from, as they were then: whether they are still the same.

What was imported long ago may be another version by now, as after an installation of packages or an edit. Whatever is
looked at is looked at without reading it: size, time of change and inode.
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
    """The files of the modules that were noted, and of the interpreter itself."""

    def __init__(self) -> None:
        self._marks: dict[str, Mark | None] = {}
        for path in ("/proc/self/exe", sys.executable):
            self._marks[path] = _mark(path)

    def note(self, modules: Iterable[ModuleType]) -> None:
        """Remember how the files of these are now, of those that are not known yet."""
        for module in list(modules):
            spec = getattr(module, "__spec__", None)
            origin = None if spec is None or not spec.has_location else spec.origin
            if isinstance(origin, str) and origin not in self._marks:
                self._marks[origin] = _mark(origin)

    def check(self) -> None:
        """Raises RuntimeError with the first that is another file now, or is not there any more."""
        for path, before in self._marks.items():
            if _mark(path) != before:
                raise RuntimeError(f"{path} has changed since it was imported")


def _mark(path: str) -> Mark | None:
    """None for what is no file by itself, such as a module in an archive."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
