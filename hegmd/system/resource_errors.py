"""What the node or the daemon has run out of, by the kernel's word, as an error that names the limit.

Whatever looks at /proc or at a file can meet it at any moment; at an edge, where it becomes an answer, it is told so.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence

from hegmd.errors import UNAVAILABLE, HegmError

__all__ = ["scarcity"]


def scarcity(error: BaseException) -> HegmError | None:
    """The error in words where it is of something that there may be more of in a moment; None where it is not.

    Of errors of work that was done side by side, where all are.
    """
    within: Sequence[BaseException] = getattr(error, "exceptions", ())  # of a group, which Python 3.10 has no name for
    if within:
        told = [scarcity(each) for each in within]
        return told[0] if all(told) else None
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return HegmError(
            UNAVAILABLE,
            f"hegmd has as many files open as it may, {limit}",
            "ask again; if that stays, raise LimitNOFILE= of hegmd.service (without systemd `ulimit -n`)",
            {"limit": "RLIMIT_NOFILE", "files": limit},
        )
    if error.errno == errno.ENFILE:
        message = "the node has as many files open as it may, by fs.file-max"
        return HegmError(UNAVAILABLE, message, "ask again; if that stays, raise it: sysctl fs.file-max")
    if error.errno == errno.ENOMEM:
        hint = "ask again; if that stays, free memory: `ps --sort=-rss -eo pid,rss,args` shows what has it"
        return HegmError(UNAVAILABLE, "the kernel has no memory left to look by", hint)
    return None
