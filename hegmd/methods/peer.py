"""The peer carrier: the helper copies the storages straight to video memory that is held on the other GPU, over NVLink.

The copies lie where the process goes, so that filling its storages there is a copy within one GPU. Where that has not
room for copies and storages at once, the storages are made in rounds, and what a round has filled is given back first.
"""

from __future__ import annotations

from hegmd.errors import HegmError, Refused
from hegmd.helper.link import Link
from hegmd.helper.route import Route
from hegmd.methods.base import NoRoom, Progress, Subject
from hegmd.methods.copying import CopyingCarrier
from hegmd.methods.gpus import Gpus, VideoMemory, bytes_of, earlier_bytes_of

NAME = "peer"


class PeerCarrier(CopyingCarrier):
    """Copies in video memory, by descriptor."""

    name = NAME

    def __init__(self, helper: Link, gpus: Gpus, memory: VideoMemory) -> None:
        super().__init__(helper, gpus)
        self._memory = memory

    async def hold(self, subject: Subject, size_bytes: int) -> None:
        """On the GPU that it goes to, or wherever some is held for it already."""
        where = self._where(subject) or await self.gpus.uuid_of(subject.goal or "")
        if self.held_bytes(subject) < size_bytes:
            await self.disarm(subject)
        async with self.gpus.turn(self.gpus.name_of(where)):
            try:
                await self._memory.hold(self._owner(subject), where, size_bytes)
            except Refused as error:
                raise NoRoom(error.message, error.hint, error.facts) from error
        self.gpus.changed()
        try:
            await self._memory.keep(self._owner(subject), where)
        except HegmError:
            await self._memory.give(self._owner(subject), where)
            raise
        await self.arm_or_give(subject)

    async def give(self, subject: Subject) -> None:
        await self.disarm(subject)
        where = self._where(subject)
        if where is not None:
            await self._memory.give(self._owner(subject), where)
            self.gpus.changed()

    def held_bytes(self, subject: Subject) -> int:
        return sum(self._memory.of(self._owner(subject)).values())

    async def fetch(self, subject: Subject, on_progress: Progress) -> None:
        """Video memory is put nowhere else."""

    def space_bytes(self, subject: Subject) -> int:
        where = self._where(subject)
        pieces = () if where is None else self._memory.pieces(self._owner(subject), where)
        return pieces[-1].at + pieces[-1].size_bytes if pieces else 0

    async def reach(self, subject: Subject) -> list[str]:
        """Where it is, where it goes, and where its bytes are."""
        names = dict.fromkeys(name for name in (subject.gpu, subject.goal) if name is not None)
        uuids = [await self.gpus.uuid_of(name) for name in names]
        where = self._where(subject)
        return list(dict.fromkeys([*uuids, *([] if where is None else [where])]))

    async def attach(self, subject: Subject, route: Route) -> None:
        where = self._where(subject)
        if where is None:
            raise Refused(f"nothing is held for the bytes of process {subject.pid}", "see hegmctl op")
        await route.attach_video(where, self._memory.pieces(self._owner(subject), where))

    async def passed(self, subject: Subject, route: Route, at_bytes: int) -> None:
        """Pieces that nothing is in any more make room for the next round."""
        where = self._where(subject)
        if where is None or not subject.in_rounds:
            return
        pieces = self._memory.pieces(self._owner(subject), where)
        count = sum(piece.at + piece.size_bytes <= at_bytes for piece in pieces)
        if count:
            await route.detach_first(count)
            await self._memory.give_first(self._owner(subject), where, count)

    def _owner(self, subject: Subject) -> str:
        """Under what name its bytes are held, or are to be."""
        owner, earlier = bytes_of(subject), earlier_bytes_of(subject)
        return earlier if not self._memory.of(owner) and self._memory.of(earlier) else owner

    def _where(self, subject: Subject) -> str | None:
        """The GPU that its bytes are held on."""
        return next(iter(self._memory.of(self._owner(subject))), None)
