"""Effects about the image of a job: write it, fill it from the pool, remove it, and end its processes.

Owns the preconditions of each, such as that the pool has all bytes before the image is written. The imager knows how
images are written. One function for each effect, which `executor` calls.
"""

from __future__ import annotations

from contextlib import suppress

from hegmd.errors import HegmError
from hegmd.migration.contracts import Progress
from hegmd.migration.machine import effects, events
from hegmd.migration.machine.events import Event
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation
from hegmd.migration.run.participants import Participants


class ImageEffects:
    """Makes the imager perform an operation's effects."""

    def __init__(self, cast: Participants) -> None:
        self._cast = cast

    async def dump(self, op: Operation, member: Member, effect: effects.Dump, tell: Progress) -> Event:
        imager = self._cast.imager_for(member)
        for each in op.live:  # the image is written from the pool
            if each.offloaded:
                async with self._cast.carrier(each).overlap_checkpoint(self._cast.subject(op, each)):
                    pass
        await (imager.find(op) if effect.find else imager.dump(op, tell))
        return events.Dumped(**effect.ending())

    async def abandon(self, op: Operation, member: Member) -> None:
        """Abandon a dump before a worker gets an order, or before its memory is released."""
        image = op.image
        if image is not None and image.begun and not (op.needs_image or image.written or image.whole):
            await self._cast.imager_for(member).abandon(op)

    async def seal(self, op: Operation, member: Member, effect: effects.Seal, tell: Progress) -> Event:
        """Write the rest of the image from the pool. First release what carriers still reserve on the job's GPU."""
        for each in op.workers:
            if each.pool_bytes and each.carrier in self._cast.carriers:
                with suppress(HegmError):  # it is returned with the memory, and logged then
                    await self._cast.carriers[each.carrier].abandon(self._cast.subject(op, each))
        await self._cast.imager_for(member).seal(op, tell)
        return events.Sealed(**effect.ending())

    async def scrap(self, op: Operation, member: Member, effect: effects.RemoveImageFiles, _: Progress) -> Event:
        await self._cast.imager_for(member).scrap(op)
        return events.ImageFilesRemoved(**effect.ending())

    async def end(self, op: Operation, member: Member, effect: effects.End, _: Progress) -> Event:
        await self._cast.imager_for(member).end(op, member)
        return events.Ended(**effect.ending())
