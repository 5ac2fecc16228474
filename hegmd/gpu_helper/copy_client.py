"""One operation's lane as the daemon sees it: opened, given a space, copied through, closed.

A lane is gone with the helper that it was opened in. So every call after `open` is for that helper and no other, and
fails as HelperLost when it has gone; then a new route is opened and given the same descriptors, which have all that was
copied before. What a call that was in flight had copied of its part is unknown: it is copied again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hegmd.errors import Refused
from hegmd.gpu_helper.link import Answer, HelperLost, Link
from hegmd.telemetry.step_timings import COPIES, note_step

__all__ = ["HOST", "VIDEO", "Copied", "HelperLost", "CopyClient"]

#: The spaces of a lane, as the helper calls them.
VIDEO, HOST = "video", "host"

# A context takes 0.1 s; page tables of a pool in small pages some 0.1 s for each gigabyte.
_OPEN_S = 20.0
_MAP_BYTES_PER_S = 1e9
# Copies that go slower than this are taken for stuck: it is a fiftieth of what the slower of the two links gives.
_COPY_BYTES_PER_S = 1e9
_COPY_S = 20.0
_CLOSE_S = 20.0

Place = tuple[int, int, int, int]
Progress = Callable[[int], object]


class Held(Protocol):
    """A piece of held video memory: `vram.Piece`."""

    @property
    def fd(self) -> int: ...
    @property
    def at(self) -> int: ...
    @property
    def size_bytes(self) -> int: ...


class Copied(NamedTuple):
    """What was copied, and what took how long; opening goes on beside copying."""

    copied_bytes: int
    open_s: float
    copy_s: float
    close_s: float


class CopyClient:
    """Made by `open`. Not to be shared: its calls are done one after the other."""

    def __init__(self, link: Link, lane: str, helper: int, *, peer: bool, size_bytes: int = 0) -> None:
        self._link = link
        self._lane = lane
        self._helper = helper
        self._size_bytes = size_bytes
        #: Direction and begin of the copy that goes on by itself.
        self._started: tuple[str, float] = "in", 0.0
        #: Whether its GPUs reach each other's memory directly; copies between them go through the host otherwise.
        self.peer = peer
        #: Whose video memory its carrier has attached, and which version of it.
        self.attached: tuple[str, int] | None = None

    @classmethod
    async def open(
        cls, link: Link, lane: str, gpus: Sequence[str], host_fd: int | None = None, host_bytes: int = 0
    ) -> CopyClient:
        """Have contexts on these GPUs, by UUID, and that piece of the host pool as a space, if there is one.

        A lane of that name that was left over is closed first. Raises HelperLost, DriverFailed, Refused.
        """
        await link.call("close", {"lane": lane}, deadline_s=_CLOSE_S)
        args = {"lane": lane, "gpus": list(gpus), "host_bytes": host_bytes}
        fds = () if host_fd is None else (host_fd,)
        answer = await link.call("open", args, deadline_s=_OPEN_S + host_bytes / _MAP_BYTES_PER_S, fds=fds)
        return cls(link, lane, answer.helper, peer=bool(answer.values["peer"]), size_bytes=host_bytes)

    async def attach_video(self, gpu: str, pieces: Sequence[Held]) -> None:
        """Have that held video memory as the space, each piece at its own place. Raises as `open` does."""
        if not pieces:
            raise Refused("no GPU memory is reserved for the bytes", "reserve it first")
        args = {"gpu": gpu, "sizes": [piece.size_bytes for piece in pieces], "start": pieces[0].at}
        await self._call("attach-video", args, _OPEN_S, [piece.fd for piece in pieces])

    async def detach_first(self, pieces: int) -> int:
        """Let go of the first pieces of video memory; bytes. They are free once the daemon has given them back too."""
        return int((await self._call("detach-video", {"pieces": pieces}, _CLOSE_S)).values["detached_bytes"])

    async def detach_video(self) -> None:
        """Let go of all of its video memory, which is free once the daemon has given it back too."""
        await self._call("detach-video", {"pieces": None}, _CLOSE_S)

    async def mark(self, owner: str | None, size_bytes: int = 0) -> None:
        """Say in its piece of the host pool under whose name video memory has so many of its bytes; None for nobody."""
        await self._call("mark", {"owner": owner, "size_bytes": size_bytes}, _CLOSE_S)

    async def copy_regions(self, direction: str, size_bytes: int) -> Copied:
        """Copy so much `out` of its video memory to its piece of the host pool, or `in`. Raises as `open` does."""
        deadline_s = _COPY_S + size_bytes / _COPY_BYTES_PER_S
        began = time.monotonic()
        answer = await self._call("shift", {"direction": direction, "size_bytes": size_bytes}, deadline_s)
        return _copied(answer, direction, began)

    async def shift_places(self, direction: str, places: Sequence[tuple[int, int, int]]) -> Copied:
        """The same of some places: where each is in the video memory, where in the piece, and its bytes."""
        deadline_s = _COPY_S + sum(place[2] for place in places) / _COPY_BYTES_PER_S
        args = {"direction": direction, "size_bytes": 0, "places": [list(place) for place in places]}
        began = time.monotonic()
        return _copied(await self._call("shift", args, deadline_s), direction, began)

    async def start_copy(self, direction: str, size_bytes: int) -> None:
        """The same, going on by itself when this returns. Calls that come next wait for its end, `close` too."""
        self._started = direction, time.monotonic()
        await self._call("begin-shift", {"direction": direction, "size_bytes": size_bytes}, _COPY_S)

    async def finish_copy(self, size_bytes: int) -> Copied:
        """What came of that, of so many bytes, when it is over. Raises what it failed with."""
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
    ) -> Copied:
        """Copy `out` of a process's allocations on that GPU, or `in`, each place (handle, offset, bytes, at in space).

        `through` says by which of its spaces, VIDEO or HOST, where it has both. The allocations are closed when it
        returns or fails. Raises as `open` does.
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
        """Nothing of it is left in the helper, contexts included. Fine when the helper is gone."""
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
    ) -> Answer:
        return await self._link.call(
            op,
            {"lane": self._lane, **args},
            deadline_s=deadline_s,
            fds=fds,
            on_progress=on_progress,
            helper=self._helper,
        )


def _copied(answer: Answer, direction: str, began: float) -> Copied:
    copied = Copied(**{name: answer.values[name] for name in Copied._fields})
    note_step(COPIES, direction, began, began + copied.copy_s, copied.copied_bytes)
    return copied
