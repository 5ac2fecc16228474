"""A vendor's shared library, loaded once and unloaded only if another file replaced it.

Unloading is not free: with NVIDIA 580.159.04, each dlclose and dlopen of libnvidia-ml leaks an eventfd, while shutting
down and initialising the same image leaks nothing. So the image stays, with no device open. It is unloaded when the
file of its name is another one or gone: after an upgrade of the driver, the old library cannot talk to the new kernel
module.

Knows nothing about the library's contents. Remembers the path that the loader used: a second file of that name in
another folder is not noticed while the first exists.
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
    """A library by name or path. Belongs to one thread at a time; the image is unloaded with it at the latest.

    Code that calls into the image keeps this object alive.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._image: ctypes.CDLL | None = None
        self._release: Callable[[], object] | None = None
        self._path = ""
        self._file: tuple[int, int, int] | None = None

    def load(self) -> ctypes.CDLL:
        """Return the library of the file that its name leads to now. Raises OSError; then nothing is loaded.

        No call may be running in an image that it returned before, and none may follow.
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
        """Unload the image. No call may be running in it. Twice is fine."""
        release, self._release, self._image = self._release, None, None
        if release is not None:
            release()


def return_free_memory() -> None:
    """Let the C library return freed memory to the kernel: opening NVML 580.159.04 frees about 10 MiB that it would
    keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have no such need
    if trim is not None:
        trim(0)


def _path_of(handle: int) -> str:
    """Return the path of the library as the dynamic loader found it, with links; empty if unknown."""
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
