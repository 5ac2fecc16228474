"""The process that accesses images: it has the rights of their owner and can be killed at any moment.

    python -m hegmd.images.files.child DESCRIPTOR

It writes or reads one image, and holds its lock until it exits, which it does with its socket. With the daemon's own
rights instead, it copies and sums CRIU's files in the daemon's private folder, so that root's CRIU reads nothing that a
caller could change meanwhile. It trusts the peer of its socket, and nothing that it finds on disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any

from hegmd.errors import CANCELLED, Bug, HegmError
from hegmd.gpu_helper.child import run
from hegmd.gpu_helper.wire import Handler, HelperReply, Request
from hegmd.images.files.catalogue import manifest_in, remove, sweep, trim
from hegmd.images.files.copy_file import copy
from hegmd.images.files.folder import (
    MANIFEST,
    SEAL,
    Folder,
    after,
    find,
    free_bytes_at,
    listed,
    make,
    opened_plain,
    summed,
)
from hegmd.images.files.refusals import refused_as
from hegmd.images.files.signature import read_manifest
from hegmd.protocol.images import ImageFile
from hegmd.protocol.record import plain_value
from hegmd.system.descriptors import Descriptors
from hegmd.system.direct_io import Progress

_PR_SET_DUMPABLE = 4
TELL_EVERY_S = 0.1
# Beside a job that trains: its own processes, such as a loader's, get nearly all of a processor that both want.
BESIDE_NICE = 10


class CurrentImage:
    """The one image that this process writes or reads."""

    def __init__(self) -> None:
        self._folder: Folder | None = None
        self._changed = threading.Condition()
        self._under_way = 0
        self._unwanted = False

    def requests(self) -> Mapping[str, Handler]:
        """Return the function of each request."""
        return {
            "give-way": self.give_way,
            "room": self.room,
            "make": self.make,
            "write": self.write,
            "take": self.take,
            "sum": self.sum,
            "finish": self.finish,
            "discard": self.discard,
            "open": self.open,
            "verify": self.verify,
            "read": self.read,
            "show": self.show,
            "sweep": self.sweep,
            "trim": self.trim,
            "keep": self.keep,
            "sum-of": self.sum_of,
        }

    def held(self) -> int:
        """Return 1 while there is an image: its lock ends with this process."""
        return int(self._folder is not None)

    @property
    def folder(self) -> Folder:
        if self._folder is None:
            raise Bug("a request names an image that was not opened")
        return self._folder

    @contextlib.contextmanager
    def _busy(self) -> Generator[None]:
        """Keep the directory while something is written."""
        with self._changed:
            self._require_wanted()
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def _wanted(self, progress: Progress) -> Progress:
        """Wrap `progress` so that it ends the running request once that is cancelled."""

        def tell(done_bytes: int) -> None:
            self._require_wanted()
            progress(done_bytes)

        return tell

    def _require_wanted(self) -> None:
        if self._unwanted:
            raise HegmError(
                CANCELLED, "the image was cancelled", "repeat the command to write it; its files are removed"
            )

    def give_way(self, request: Request) -> HelperReply:
        """Lower the priority of this process from now on. New threads inherit it from the first thread."""
        first = os.getpid()
        os.setpriority(os.PRIO_PROCESS, first, max(BESIDE_NICE, os.getpriority(os.PRIO_PROCESS, first)))
        return HelperReply({})

    # -- writing one ---------------------------------------------------------------------------------------------------

    def room(self, request: Request) -> HelperReply:
        """Return the free space for an image at that path."""
        return HelperReply({"free_bytes": free_bytes_at(str(request.args["path"]))})

    def make(self, request: Request) -> HelperReply:
        """Create a new directory. Returns the descriptor of the folder for CRIU."""
        self._folder = make(str(request.args["path"]))
        self._folder.reads_back = bool(request.args["read_back"])
        return HelperReply({"name": self._folder.name}, Descriptors([os.dup(self._folder.criu_fd)]))

    def write(self, request: Request) -> HelperReply:
        """Write bytes from the memory that came with the request, and read them back."""
        (memory_fd,) = request.fds.view()
        name, size_bytes = str(request.args["name"]), int(request.args["size_bytes"])
        with self._busy(), refused_as(self.folder.path, "written"):
            tell = self._wanted(progress_of(request))
            written = self.folder.write_bytes(name, str(request.args["id"]), memory_fd, size_bytes, tell)
        return HelperReply({name: getattr(written, name) for name in ("stored_bytes", "sum", "direct", "wrote_s")})

    def take(self, request: Request) -> HelperReply:
        """Copy CRIU's files, given as descriptors, into the image, and read the copies back."""
        with self._busy(), refused_as(self.folder.path, "written"):
            tell = self._wanted(progress_of(request))
            answer = _copied(request, self.folder.criu_fd, request.fds.view(), tell)
            pairs = zip(request.args["files"], answer.values["sums"], strict=True)
            files = [
                ImageFile(name=str(name), size_bytes=int(size), stored_bytes=int(size), sum=str(total))
                for (name, size), total in pairs
            ]
            self.folder.read_back(files, tell)
        return answer

    def sum(self, request: Request) -> HelperReply:
        """Return the checksums of CRIU's files in the image itself, after reading them back."""
        with self._busy(), refused_as(self.folder.path, "read"):
            tell = self._wanted(progress_of(request))
            files = summed(self.folder.criu_fd, tell)
            self.folder.read_back(files, tell)
            return HelperReply({"files": plain_value(files)})

    def finish(self, request: Request) -> HelperReply:
        """Read back what was not read back yet, and give it its manifest and its name."""
        data, seal = bytes(request.args["manifest"]), bytes(request.args["seal"])
        with self._busy(), refused_as(self.folder.path, "written"):
            manifest = read_manifest(self.folder.path, data, seal)
            self.folder.verify(manifest, self._wanted(progress_of(request)))
            self.folder.publish(data, seal)
        return HelperReply({})

    def discard(self, request: Request) -> HelperReply:
        """Remove the image. A running request that was cancelled is ended first."""
        with self._changed:
            self._unwanted = True
            self._changed.wait_for(lambda: not self._under_way)
        folder, self._folder = self.folder, None
        unnamed = os.path.join(os.path.dirname(folder.path), folder.name)
        folder.close()
        remove(unnamed)
        return HelperReply({})

    # -- reading one ---------------------------------------------------------------------------------------------------

    def open(self, request: Request) -> HelperReply:
        """Open an existing image of the caller: locked, with every file present. Returns its manifest as written."""
        folder = find(str(request.args["path"]))
        try:
            with refused_as(folder.path, "opened"):
                manifest_in(folder)
                folder.lock()
                folder.require_own(os.geteuid())
                manifest = manifest_in(folder)  # read again: before the lock it could have been replaced
                foreign = folder.foreign(manifest)
                data, seal = folder.read_small(MANIFEST), folder.read_small(SEAL)
        except BaseException:
            folder.close()
            raise
        self._folder = folder
        told_of = {"manifest": data, "seal": seal, "foreign": plain_value(foreign)}
        return HelperReply(told_of, Descriptors([os.dup(folder.criu_fd)]))

    def verify(self, request: Request) -> HelperReply:
        """Verify every byte of CRIU's files, or of the byte files."""
        with refused_as(self.folder.path, "read"):
            is_criu = bool(request.args.get("only_criu"))
            verify = self.folder.verify_criu_files if is_criu else self.folder.verify_byte_files
            verify(manifest_in(self.folder), progress_of(request))
        return HelperReply({})

    def read(self, request: Request) -> HelperReply:
        """Read bytes into the memory that came with the request."""
        (memory_fd,) = request.fds.view()
        file = self.folder.byte_file(str(request.args["name"]), str(request.args["id"]))
        with refused_as(self.folder.path, "read"):
            size_bytes, total = int(request.args["size_bytes"]), str(request.args["sum"])
            file.read(size_bytes, total, memory_fd, progress_of(request))
        return HelperReply({})

    def show(self, request: Request) -> HelperReply:
        """Return CRIU's files as descriptors, for a process that may not open them here."""
        fds = Descriptors([])
        try:
            with refused_as(self.folder.path, "read"):
                for name in request.args["names"]:
                    with opened_plain(str(name), self.folder.criu_fd) as fd:
                        fds.add(os.dup(fd))
        except BaseException:
            fds.close()
            raise
        return HelperReply({}, fds)

    def sweep(self, request: Request) -> HelperReply:
        """Remove what killed writers left."""
        return HelperReply({"gone": list(sweep(str(request.args["path"])))})

    def trim(self, request: Request) -> HelperReply:
        """Remove all images of a series except the newest."""
        args = request.args
        return HelperReply({"gone": list(trim(str(args["path"]), str(args["series"]), int(args["keep"])))})

    # -- with the daemon's own rights ----------------------------------------------------------------------------------

    def keep(self, request: Request) -> HelperReply:
        """Copy files into the private directory that came first with the request."""
        dir_fd, *files = request.fds.view()
        with refused_as("the daemon's private folder", "written"):
            return _copied(request, dir_fd, tuple(files), progress_of(request))

    def sum_of(self, request: Request) -> HelperReply:
        """Return the checksums of CRIU's files in the private folder that was sent along."""
        (dir_fd,) = request.fds.view()
        with refused_as("the daemon's private folder", "read"):
            files = summed(dir_fd, progress_of(request))
            sizes = {name: status.st_size for name, status in listed(dir_fd)}
            return HelperReply({"files": plain_value(files), "sizes": sizes})


def _copied(request: Request, dir_fd: int, files: tuple[int, ...], tell: Progress) -> HelperReply:
    """Copy the files under their names. Returns the checksum of each."""
    sums: list[str] = []
    before_bytes = 0
    for fd, (name, size_bytes) in zip(files, request.args["files"], strict=True):
        sums.append(copy(fd, int(size_bytes), dir_fd, str(name), after(before_bytes, tell)))
        before_bytes += int(size_bytes)
    os.fsync(dir_fd)
    return HelperReply({"sums": sums})


def progress_of(request: Request) -> Progress:
    """Return a function that reports progress to the daemon, at limited intervals."""
    told_at_s = 0.0

    def tell(done_bytes: int) -> None:
        nonlocal told_at_s
        now_s = time.monotonic()
        if now_s - told_at_s >= TELL_EVERY_S:
            told_at_s = now_s
            request.tell({"done_bytes": done_bytes})

    return tell


def make_ready() -> tuple[Mapping[str, Handler], Callable[[], int], Mapping[str, Any]]:
    """Return the table of requests. The process has descriptors of the daemon, so its user may not inspect it."""
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    os.umask(0o077)
    work = CurrentImage()
    return work.requests(), work.held, {"uid": os.geteuid()}


if __name__ == "__main__":
    run(make_ready)
