"""Errors for a resource that the node or the daemon has run out of; each names the limit.

Any read of /proc or of a file can fail this way. The edge that answers a client converts the error.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Sequence

from hegmd.errors import UNAVAILABLE, HegmError


def scarcity(error: BaseException) -> HegmError | None:
    """Convert an error, or a group of nothing else, that is a temporary lack of a resource; None otherwise."""
    within: Sequence[BaseException] = getattr(error, "exceptions", ())  # of an exception group, which Python 3.10 lacks
    if within:
        scarce = [scarcity(each) for each in within]
        return scarce[0] if all(scarce) else None
    if not isinstance(error, OSError):
        return None
    if error.errno == errno.EMFILE:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return HegmError(
            UNAVAILABLE,
            f"hegmd has reached its limit of {limit} open files",
            "try again; if it happens again, raise LimitNOFILE= of hegmd.service (without systemd `ulimit -n`)",
            {"limit": "RLIMIT_NOFILE", "files": limit},
        )
    if error.errno == errno.ENFILE:
        message = "the node has reached its limit of open files, fs.file-max"
        return HegmError(UNAVAILABLE, message, "try again; if it happens again, raise it: sysctl fs.file-max")
    if error.errno == errno.ENOMEM:
        hint = "try again; if it happens again, free memory: ps --sort=-rss -eo pid,rss,args"
        return HegmError(UNAVAILABLE, "the kernel has no free memory for the request", hint)
    return None
