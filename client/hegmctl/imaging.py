"""The commands that write a running job into an image and bring one back.

The directory is named from the root on, because the daemon is elsewhere; it is opened with the caller's rights.
Outputs that have grown are cut back here, by the caller, so that nobody else's rights are in play: the daemon names
them when it refuses, and is asked again.
"""

from __future__ import annotations

import os
from errno import ELOOP

from hegmctl.operating import run_one
from hegmd.errors import REFUSED, HegmError
from hegmd.protocol.messages import Checkpoint, Handoff, Restore
from hegmd.protocol.record import as_list

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from hegmctl.session import Session


def checkpoint(session: Session) -> int:
    """`hegmctl checkpoint`."""
    arguments = session.arguments
    request = Checkpoint(
        pid=arguments.wholes("PID")[0],
        path=os.path.abspath(arguments.required("DIR")),
        leave_running=arguments.flag("leave-running"),
        limit_s=arguments.seconds("timeout"),
        wait=not arguments.flag("no-wait"),
        dry_run=arguments.flag("dry-run"),
        carrier=arguments.text("carrier"),
    )
    return run_one(session, request)


def handoff(session: Session) -> int:
    """`hegmctl handoff`."""
    arguments = session.arguments
    request = Handoff(
        pid=arguments.wholes("PID")[0],
        path=os.path.abspath(arguments.required("DIR")),
        limit_s=arguments.seconds("timeout"),
        wait=not arguments.flag("no-wait"),
        dry_run=arguments.flag("dry-run"),
    )
    return run_one(session, request)


def restore(session: Session) -> int:
    """`hegmctl restore`."""
    arguments = session.arguments
    cuts = arguments.flag("truncate-outputs")
    request = Restore(
        path=os.path.abspath(arguments.required("DIR")),
        to=arguments.text("to"),
        as_then=cuts,
        wait=not arguments.flag("no-wait"),
        dry_run=arguments.flag("dry-run"),
    )
    try:
        return run_one(session, request)
    except HegmError as refused:
        grown = as_list(refused.facts.get("grown"))
        if not cuts or request.dry_run or refused.code is not REFUSED or not grown:
            raise
        for path, size_bytes in cut_back(grown):
            session.sink.note(f"{path} was cut back to {size_bytes} bytes")
    return run_one(session, request)


def cut_back(grown: Iterable[object]) -> list[tuple[str, int]]:
    """Cut those files to those sizes; which were. Raises HegmError, and then some may have been."""
    done: list[tuple[str, int]] = []
    for each in grown:
        named = as_list(each)
        if named is None or len(named) != 2 or not isinstance(named[1], int):
            continue
        path, size_bytes = str(named[0]), named[1]
        try:
            if _cut(path, size_bytes):
                done.append((path, size_bytes))
        except OSError as error:
            raise HegmError(
                REFUSED,
                f"{path} cannot be cut back to {size_bytes} bytes: {error.strerror}",
                "have its owner do it, then restore again",
            ) from error
    return done


def _cut(path: str, size_bytes: int) -> bool:
    """Whether it was longer. Raises OSError.

    The path is the file's own, without a link on the way: what a link leads to now was never the job's, and whoever
    restores another's image could write there where that one cannot.
    """
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{fd}") != path:
            raise OSError(ELOOP, "a link leads to another file")
        is_longer = os.fstat(fd).st_size > size_bytes
        if is_longer:
            os.ftruncate(fd, size_bytes)
        return is_longer
    finally:
        os.close(fd)
