"""Effects about the image of a job: written, filled from the pool, done away with, and its processes ended.

Owns what has to be so before each, such as that all bytes are where the image is written from; how images are made is
the imager's business. One function for each effect, which `executor` calls.
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
    """Has the imager do what an operation wants."""

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
        """Abandon a dump before a worker gets an order, or before its memory is released: no process waits for that
        image then.
        """
        image = op.image
        if image is not None and image.begun and not (op.hands_over or image.written or image.whole):
            await self._cast.imager_for(member).abandon(op)

    async def seal(self, op: Operation, member: Member, effect: effects.Seal, tell: Progress) -> Event:
        """It is written from the pool's memory; what carriers have ready beside that, on the job's own GPU, can go."""
        for each in op.workers:
            if each.pool_bytes and each.carrier in self._cast.carriers:
                with suppress(HegmError):  # it is given back with the memory, and said then
                    await self._cast.carriers[each.carrier].abandon(self._cast.subject(op, each))
        await self._cast.imager_for(member).seal(op, tell)
        return events.Sealed(**effect.ending())

    async def scrap(self, op: Operation, member: Member, effect: effects.Scrap, _: Progress) -> Event:
        await self._cast.imager_for(member).scrap(op)
        return events.Scrapped(**effect.ending())

    async def end(self, op: Operation, member: Member, effect: effects.End, _: Progress) -> Event:
        await self._cast.imager_for(member).end(op, member)
        return events.Ended(**effect.ending())
