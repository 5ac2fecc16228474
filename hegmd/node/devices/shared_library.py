"""A vendor's shared library, loaded once and let go of only when another file took its place.

Unloading is not free: measured with NVIDIA 580.159.04, each dlclose and new dlopen of libnvidia-ml leaves one eventfd
behind for good, while shutting down and initialising the same image leaves nothing. So the image stays, which holds no
device open, and is dropped when the file that its name leads to is another one or gone: after an upgrade of the driver
the old library could not speak to the new kernel module.

Knows nothing of what is in the library. The place where the loader found it is remembered: a second file of that name
that appears in another folder, with the first still there, is not noticed.
"""

from __future__ import annotations

import _ctypes
import ctypes
import os
import weakref
from collections.abc import Callable

_RTLD_DI_LINKMAP = 2  # dlfcn.h


class _LinkMap(ctypes.Structure):
    """The beginning of glibc's struct link_map."""

    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


class SharedLibrary:
    """One library by name or path. Belongs to one thread at a time; its image goes with it at the latest.

    Whoever calls into the image keeps this object, or the code goes from under the call.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._image: ctypes.CDLL | None = None
        self._release: Callable[[], object] | None = None
        self._path = ""
        self._file: tuple[int, int, int] | None = None

    def load(self) -> ctypes.CDLL:
        """The library, of the file that its name leads to now. Raises OSError, with nothing loaded.

        No call into an image that it gave before may be under way, and none may follow.
        """
        if self._image is not None and self._file is not None and _file_at(self._path) == self._file:
            return self._image
        self.unload()
        handle = _ctypes.dlopen(self.name, 0)
        release = weakref.finalize(self, _ctypes.dlclose, handle)
        release.atexit = False  # a call that hangs in there must not end the process in another way than it would
        self._release = release
        self._image = ctypes.CDLL(self.name, handle=handle)
        self._path = _path_of(handle)
        self._file = _file_at(self._path)
        return self._image

    def unload(self) -> None:
        """Let go of the image. No call into it may be under way. Doing it twice is fine."""
        release, self._release, self._image = self._release, None, None
        if release is not None:
            release()


def return_free_memory() -> None:
    """Have the C library give back what was freed: opening NVML 580.159.04 frees some 10 MiB that it would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have no such need
    if trim is not None:
        trim(0)


def _path_of(handle: int) -> str:
    """The path under which the dynamic loader found the library; links in it are not resolved. Empty if untold."""
    link_map = ctypes.POINTER(_LinkMap)()
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), _RTLD_DI_LINKMAP, ctypes.byref(link_map)) != 0:
        return ""
    return os.fsdecode(link_map.contents.l_name or b"")


def _file_at(path: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns
