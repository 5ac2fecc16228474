"""The daemon's side of a copy session: open it, attach memory, copy, close it.

A session ends with the helper that it was opened in. Every call after `open` goes to that helper and raises HelperLost
when it has ended. The caller then opens a new session with the same descriptors, which hold all that was copied. The
part that was being copied is copied again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import anyio

from hegmd.errors import Refused
from hegmd.gpu_helper.link import HelperLost, HelperReply, Link
from hegmd.telemetry.step_timings import COPIES, note_step

#: Names of the address spaces of a session on the wire.
VIDEO, HOST = "video", "host"

# A context takes 0.1 s. Page tables of a pool in small pages take about 0.1 s per gigabyte.
_OPEN_S = 20.0
_MAP_BYTES_PER_S = 1e9
# Slower copies count as stuck: a fiftieth of the speed of the slower link.
_COPY_BYTES_PER_S = 1e9
_COPY_S = 20.0
_CLOSE_S = 20.0

Place = tuple[int, int, int, int]
Progress = Callable[[int], object]


class HeldAllocation(Protocol):
    """A reserved allocation of GPU memory."""

    @property
    def fd(self) -> int: ...
    @property
    def at(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class CopyReport(NamedTuple):
    """The result of a copy: the bytes, and the seconds of each part. Opening overlaps copying."""

    copied_bytes: int
    open_s: float
    copy_s: float
    close_s: float


class CopyClient:
    """Created by `open`. Not for concurrent use: calls run one after the other."""

    def __init__(self, link: Link, lane: str, helper: int, *, peer: bool, size_bytes: int = 0) -> None:
        self._link = link
        self.lane = lane
        self._helper = helper
        self._size_bytes = size_bytes
        #: Direction and start time of the copy that runs in the background.
        self._started: tuple[str, float] = "in", 0.0
        #: True if its GPUs access each other's memory directly. Otherwise copies between them go through the host.
        self.peer = peer
        #: Owner and version of the GPU memory that the carrier attached.
        self.attached: tuple[str, int] | None = None

    @classmethod
    async def open(
        cls, link: Link, lane: str, gpus: Sequence[str], host_fd: int | None = None, host_bytes: int = 0
    ) -> CopyClient:
        """Create contexts on these GPUs, by UUID, and map the given pool segment, if any.

        Closes an earlier session of that name first. Raises HelperLost, DriverFailed, Refused. Once it is asked for, it
        is returned even if the caller is cancelled: the caller has to close it, since it has contexts on GPUs.
        """
        await link.call("close", {"lane": lane}, deadline_s=_CLOSE_S)
        args = {"lane": lane, "gpus": list(gpus), "host_bytes": host_bytes}
        fds = () if host_fd is None else (host_fd,)
        deadline_s = _OPEN_S + host_bytes / _MAP_BYTES_PER_S
        answers: list[HelperReply] = []
        with anyio.CancelScope(shield=True):
            answers.append(await link.call("open", args, deadline_s=deadline_s, fds=fds))
        (answer,) = answers
        return cls(link, lane, answer.helper, peer=bool(answer.values["peer"]), size_bytes=host_bytes)

    async def attach_video(self, gpu: str, pieces: Sequence[HeldAllocation], base: int = 0) -> None:
        """Map that GPU memory as the session's address space, which begins at offset `base`. Raises as `open` does."""
        if not pieces:
            raise Refused("no GPU memory is reserved for the bytes", "reserve it first")
        args = {"gpu": gpu, "sizes": [piece.size_bytes for piece in pieces], "start": pieces[0].at - base}
        await self._call("attach-video", args, _OPEN_S, [piece.fd for piece in pieces])

    async def detach_first(self, pieces: int) -> int:
        """Unmap the first allocations of GPU memory and return their bytes. They are free once the daemon releases them
        too."""
        return int((await self._call("detach-video", {"pieces": pieces}, _CLOSE_S)).values["detached_bytes"])

    async def detach_video(self) -> None:
        """Unmap all GPU memory. It is free once the daemon releases it too."""
        await self._call("detach-video", {"pieces": None}, _CLOSE_S)

    async def mark(self, owner: str | None, size_bytes: int = 0) -> None:
        """Record in the pool segment how many of its bytes GPU memory of that owner has; None removes the record."""
        await self._call("mark", {"owner": owner, "size_bytes": size_bytes}, _CLOSE_S)

    async def copy_regions(self, direction: str, size_bytes: int) -> CopyReport:
        """Copy `size_bytes` from GPU memory to the pool segment (`out`), or back (`in`). Raises as `open` does."""
        deadline_s = _COPY_S + size_bytes / _COPY_BYTES_PER_S
        began = time.monotonic()
        answer = await self._call("shift", {"direction": direction, "size_bytes": size_bytes}, deadline_s)
        return _copied(answer, direction, began)

    async def shift_places(self, direction: str, places: Sequence[tuple[int, int, int]]) -> CopyReport:
        """Copy places: offset in GPU memory, offset in the segment, bytes."""
        deadline_s = _COPY_S + sum(place[2] for place in places) / _COPY_BYTES_PER_S
        args = {"direction": direction, "size_bytes": 0, "places": [list(place) for place in places]}
        began = time.monotonic()
        return _copied(await self._call("shift", args, deadline_s), direction, began)

    async def start_copy(self, direction: str, size_bytes: int) -> None:
        """Start a copy in the background. Later calls, `close` included, wait for its end."""
        self._started = direction, time.monotonic()
        await self._call("begin-shift", {"direction": direction, "size_bytes": size_bytes}, _COPY_S)

    async def finish_copy(self, size_bytes: int) -> CopyReport:
        """Wait for the background copy of so many bytes. Raises its error."""
        answer = await self._call("shifted", {}, _COPY_S + size_bytes / _COPY_BYTES_PER_S)
        return _copied(answer, *self._started)

    async def copy(
        self,
        gpu: str,
        direction: str,
        handles: Sequence[bytes],
        places: Sequence[Place],
        on_progress: Progress = lambda _: None,
        through: str | None = None,
    ) -> CopyReport:
        """Copy allocations of a process on that GPU `out` or `in`. A place is (handle, offset, bytes, offset in the
        space).

        `through` selects VIDEO or HOST if the session has both. The allocations are closed at the end, also after an
        error. Raises as `open` does.
        """
        deadline_s = _COPY_S + sum(place[2] for place in places) / _COPY_BYTES_PER_S
        args = {
            "gpu": gpu,
            "direction": direction,
            "through": through,
            "handles": list(handles),
            "places": list(places),
        }
        began = time.monotonic()
        answer = await self._call(
            "copy", args, deadline_s, on_progress=lambda event: on_progress(int(event["copied_bytes"]))
        )
        return _copied(answer, direction, began)

    async def close(self) -> None:
        """Close the session in the helper, with its contexts. Does nothing if the helper has ended."""
        try:
            await self._call("close", {}, _CLOSE_S + self._size_bytes / _MAP_BYTES_PER_S)
        except HelperLost:
            return

    async def _call(
        self,
        op: str,
        args: Mapping[str, object],
        deadline_s: float,
        fds: Sequence[int] = (),
        on_progress: Callable[[Mapping[str, Any]], object] | None = None,
    ) -> HelperReply:
        return await self._link.call(
            op,
            {"lane": self.lane, **args},
            deadline_s=deadline_s,
            fds=fds,
            on_progress=on_progress,
            helper=self._helper,
        )


def _copied(answer: HelperReply, direction: str, began: float) -> CopyReport:
    copied = CopyReport(**{name: answer.values[name] for name in CopyReport._fields})
    note_step(COPIES, direction, began, began + copied.copy_s, copied.copied_bytes)
    return copied
