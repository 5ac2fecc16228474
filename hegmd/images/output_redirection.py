"""Redirects outputs of a restored job to descriptors of the caller, in place of ends that no longer exist.

Output into a former pipe or terminal is lost after a restore, so it goes to /dev/null unless a descriptor is given for
it. Owns which ends these are and which descriptors are accepted. A descriptor is reopened for the job with the daemon's
rights, so it grants only the rights of its sender.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Mapping, Sequence

from hegmd.errors import BAD_REQUEST, HegmError, Refused
from hegmd.node.processes.open_files import Outlet

STREAMS: Mapping[str, int] = {"stdout": 1, "stderr": 2}


def named_streams(names: Sequence[str], fds: Sequence[int]) -> dict[str, int]:
    """Return each descriptor by the name of its stream. Raises HegmError if one is not writable."""
    if len(names) != len(fds) or len(set(names)) != len(names) or not set(names) <= set(STREAMS):
        message = f"{len(fds)} descriptors came for the streams {', '.join(names)[:80] or 'without a name'}"
        hint = f"send one descriptor for each stream, in their order: {' and '.join(STREAMS)}"
        raise HegmError(BAD_REQUEST, message, hint)
    for name, fd in zip(names, fds, strict=True):
        _require_writable(name, fd)
    return dict(zip(names, fds, strict=True))


def redirected_streams(outlets: Sequence[Outlet], streams: Mapping[str, int]) -> dict[str, int]:
    """Return the descriptors by the ends that they replace. Raises Refused for a stream without such an end.

    If both streams of a job had one end, as with 2>&1, standard output's descriptor serves both.
    """
    led: dict[str, int] = {}
    for name, fd in streams.items():
        ends = _ends_of(outlets, STREAMS[name])
        if not ends:
            raise Refused(
                f"the job's {name} cannot be redirected: it is closed, or a file that is restored anyway",
                f"leave out --{name}; to list the files that the job has open, run: hegmctl images show DIR --json",
            )
        for end in ends:
            led.setdefault(end.key, fd)
    return led


def lost_streams(outlets: Sequence[Outlet], streams: Mapping[str, int]) -> tuple[str, ...]:
    """Return the names of streams whose output will be discarded."""
    led = {end.key for name in streams for end in _ends_of(outlets, STREAMS[name])}
    return tuple([name for name, fd in STREAMS.items() if any(e.key not in led for e in _ends_of(outlets, fd))])


def _ends_of(outlets: Sequence[Outlet], number: int) -> list[Outlet]:
    return [outlet for outlet in outlets if outlet.is_written and any(fd == number for _, fd in outlet.fds)]


def _require_writable(name: str, fd: int) -> None:
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_PATH or _access(fd) == os.O_RDONLY:
        raise Refused(f"the descriptor for {name} is not open for writing", "open it for writing")
    if stat.S_ISSOCK(os.fstat(fd).st_mode):
        raise Refused(f"the descriptor for {name} is a socket, which cannot be opened again", "use a file or a pipe")


def _access(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
