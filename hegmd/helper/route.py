"""One operation's lane as the daemon sees it: opened, given a space, copied through, closed.

A lane is gone with the helper that it was opened in. So every call after `open` is for that helper and no other, and
fails as HelperLost when it has gone; then a new route is opened and given the same descriptors, which have all that was
copied before. What a call that was in flight had copied of its part is unknown: it is copied again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from hegmd.errors import Refused
from hegmd.helper.link import Answer, HelperLost, Link

__all__ = ["Copied", "HelperLost", "Route"]

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


class Route:
    """Made by `open`. Not to be shared: its calls are done one after the other."""

    def __init__(self, link: Link, lane: str, helper: int, *, peer: bool, size_bytes: int = 0) -> None:
        self._link = link
        self._lane = lane
        self._helper = helper
        self._size_bytes = size_bytes
        #: Whether its GPUs reach each other's memory directly; copies between them go through the host otherwise.
        self.peer = peer

    @classmethod
    async def open(cls, link: Link, lane: str, gpus: Sequence[str]) -> Route:
        """Have contexts on these GPUs, by UUID. A lane of that name that was left over is closed first.

        Raises HelperLost, DriverFailed, Refused.
        """
        await link.call("close", {"lane": lane}, deadline_s=_CLOSE_S)
        answer = await link.call("open", {"lane": lane, "gpus": list(gpus)}, deadline_s=_OPEN_S)
        return cls(link, lane, answer.helper, peer=bool(answer.values["peer"]))

    async def attach_video(self, gpu: str, pieces: Sequence[Held]) -> None:
        """Have that held video memory as the space, each piece at its own place. Raises as `open` does."""
        if not pieces:
            raise Refused("no video memory is held that bytes could go to", "hold some first")
        self._size_bytes = sum(piece.size_bytes for piece in pieces)
        args = {"gpu": gpu, "sizes": [piece.size_bytes for piece in pieces], "start": pieces[0].at}
        await self._call("attach-video", args, _OPEN_S, [piece.fd for piece in pieces])

    async def attach_host(self, fd: int, size_bytes: int) -> None:
        """Have that piece of the host pool as the space. Raises as `open` does."""
        self._size_bytes = size_bytes
        await self._call("attach-host", {"size_bytes": size_bytes}, _OPEN_S + size_bytes / _MAP_BYTES_PER_S, [fd])

    async def detach_first(self, pieces: int) -> int:
        """Let go of the first pieces of video memory; bytes. They are free once the daemon has given them back too."""
        return int((await self._call("detach-video", {"pieces": pieces}, _CLOSE_S)).values["detached_bytes"])

    async def copy(
        self,
        gpu: str,
        direction: str,
        handles: Sequence[bytes],
        places: Sequence[Place],
        on_progress: Progress = lambda _: None,
    ) -> Copied:
        """Copy `out` of a process's allocations on that GPU, or `in`, each place (handle, offset, bytes, at in space).

        The allocations are closed again when it returns or fails. Raises as `open` does.
        """
        deadline_s = _COPY_S + sum(place[2] for place in places) / _COPY_BYTES_PER_S
        args = {"gpu": gpu, "direction": direction, "handles": list(handles), "places": list(places)}
        answer = await self._call(
            "copy", args, deadline_s, on_progress=lambda event: on_progress(int(event["copied_bytes"]))
        )
        return Copied(**{name: answer.values[name] for name in Copied._fields})

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
