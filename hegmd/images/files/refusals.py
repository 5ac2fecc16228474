"""Explains why a directory cannot hold an image, or why one cannot be read, with a hint.

After a system error the path is checked once more, with the rights of the caller: the error does not say which part of
the path is meant.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Generator

from hegmd.errors import DENIED, NOT_FOUND, UNAVAILABLE, HegmError, Refused

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_TO_READ = ("opened", "read")
_NO_DIRECTORY = (errno.ELOOP, errno.ENOTDIR)
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


@contextlib.contextmanager
def refused_as(path: str, what: str) -> Generator[None]:
    """Turn an OSError of the block into a HegmError with a hint."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        message, facts = f"{path} cannot be {what}: {reason}", {"path": path, "errno": error.errno}
        if error.errno in _FULL:
            raise Refused(
                message,
                f"free space or quota there (df -h {shlex.quote(os.path.dirname(path))}), or name another place",
                facts,
            ) from error
        if error.errno in _CLOSED:
            may = "read" if what in _TO_READ and error.errno != errno.EROFS else "write"
            raise HegmError(DENIED, message, f"name a directory that you may {may}", facts) from error
        if error.errno == errno.ENOENT:
            message = f"{path} cannot be {what}: {_obstacle(path) or reason}"
            raise HegmError(NOT_FOUND, message, _step(path, what), facts) from error
        if error.errno in _NO_DIRECTORY:
            message = f"{path} cannot be {what}: {_obstacle(path) or 'it is a link or no directory'}"
            raise Refused(message, _step(path, what), facts) from error
        raise HegmError(UNAVAILABLE, message, "check the disk: dmesg, df -h", facts) from error


def taken(path: str) -> Refused:
    """Return the refusal for a path that already exists."""
    hint, facts = "name a new directory", {"path": path}
    if (found := _obstacle(path)) is not None:
        return Refused(f"{path} already exists: {found}", hint, facts)
    with contextlib.suppress(OSError):
        if {"manifest.json", "seal"} <= {*os.listdir(path)}:
            hint = f"{hint}; or remove that image: hegmctl images rm {shlex.quote(path)}"
            return Refused(f"{path} already exists: it is an image", hint, facts)
    return Refused(f"{path} already exists and is not an empty directory", hint, facts)


def _step(path: str, what: str) -> str:
    parent = os.path.dirname(path)
    if what != "made":
        return "name the directory itself; to list the images, run: hegmctl images ls"
    if os.path.lexists(parent):
        return "name a new directory in one that exists"
    return f"create it first, or name another directory: mkdir -p {shlex.quote(parent)}"


def _obstacle(path: str) -> str | None:
    """Return which part of that path is no directory or does not exist; None if there is none."""
    prefix = "/"
    for name in path.strip("/").split("/"):
        prefix = os.path.join(prefix, name)
        it = "it" if prefix == path else prefix
        try:
            kind = stat.S_IFMT(os.lstat(prefix).st_mode)
        except OSError as error:
            return f"there is no {prefix}" if error.errno == errno.ENOENT and prefix != path else None
        if kind == stat.S_IFLNK and (it == "it" or not os.path.isdir(prefix)):
            leads = "" if os.path.exists(prefix) else ", which does not exist"
            return f"{it} is a link to {os.readlink(prefix)}{leads}"
        if kind in _KINDS:
            return f"{it} is {_KINDS[kind]} and not a directory"
    return None
