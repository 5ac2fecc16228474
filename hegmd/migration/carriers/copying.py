"""The common part of the carriers whose copies the GPU helper makes.

The agent shows its storages, the helper copies, the agent frees or fills them. Owns the order of these, which keeps the
bytes in one complete place at all times: they are freed only when all are copied, and the copies are released only when
the agent has recorded that it has its own. The agent decides where the bytes are in the flat address space, and counts
what is filled. So nothing is remembered here, and a new daemon continues where the last one stopped. A helper that is
lost costs the copy in progress and nothing else: the next helper repeats it, from memory that is held by descriptor.

What the helper cannot copy, the process copies itself, storage by storage and in both directions: storages without an
IPC handle, those that the driver lets no other process open, and everything if the helper fails. A process reaches only
host memory, so a carrier says which memory that is (`own_copies`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.copy_client import VIDEO, CopyClient, Place
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link
from hegmd.memory.sizes import MIB, round_bytes
from hegmd.migration.contracts import DriverOutOfMemory, Making, MigratedProcess, Progress
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.immediate import AtOnce
from hegmd.protocol.agents import NO_HANDLE, AgentReport, packed, unpacked
from hegmd.telemetry.log import fields
from hegmd.workers.workers import AgentAway, OrderFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Which storage, where in it, its bytes, and where in the space.
Span = tuple[int, int, int, int]

# A helper that is lost so often at one thing will be lost again.
_ATTEMPTS = 3
_ALIGNED_BYTES = 512
_OPEN_CALL = "cuIpcOpenMemHandle"
_OUT_OF_MEMORY = 2
OUT, IN = "out", "in"
_SPANS_AN_ORDER = 4096


class CopyingCarrier(AtOnce):
    """Base class of those carriers. A subclass says which memory holds the copies, and which GPUs the helper must
    reach.
    """

    name = ""
    #: The copy client's address space that crosses a link; bytes of the other one stay on their GPU.
    crosses = VIDEO

    def __init__(self, helper: Link, gpus: Gpus) -> None:
        self._helper = helper
        self.gpus = gpus
        self.routes: dict[str, CopyClient] = {}

    # -- for the carriers ----------------------------------------------------------------------------------------------

    async def attach(self, subject: MigratedProcess, route: CopyClient) -> None:
        """Have the video memory that is held for it as the route's, if that is to be there from the first."""

    async def reach(self, subject: MigratedProcess) -> list[str]:
        """The UUIDs of the GPUs that the copies touch, that of the process first."""
        raise NotImplementedError

    async def release(self, subject: MigratedProcess) -> None:
        """Give back the memory that is held for it."""
        raise NotImplementedError

    def space_bytes(self, subject: MigratedProcess) -> int:
        """How far the space reaches."""
        raise NotImplementedError

    def piece(self, subject: MigratedProcess) -> tuple[int, int] | None:
        """Return descriptor and size of the pool segment that the copy session is opened with, if there is one."""
        return None

    async def before_copy_out(self, subject: MigratedProcess, end_bytes: int) -> None:
        """Decide where the bytes go, which end at `end_bytes`. Nothing has been copied yet."""

    async def through(self, subject: MigratedProcess, route: CopyClient, end_bytes: int) -> str:
        """Return the copy client's address space that those bytes are read from or written to."""
        return VIDEO

    async def prepare_own_copies(self, subject: MigratedProcess, direction: str) -> None:
        """Prepare for storages that the process copies itself: have the bytes in memory that it reaches. May be called
        twice.

        On the way `out`, storages copied before may have to be copied again.
        """

    async def own_copies(
        self, subject: MigratedProcess, direction: str, spans: list[Span], on_progress: Progress
    ) -> None:
        """Have the process copy these between its storages and their places in the space."""
        raise NotImplementedError

    async def order_copy(
        self, subject: MigratedProcess, direction: str, fd: int, spans: list[Span], on_progress: Progress
    ) -> None:
        """Have the agent copy these between its storages and that memory. Raises OrderFailed, AgentAway."""
        done_bytes = 0
        for at in range(0, len(spans), _SPANS_AN_ORDER):
            batch = spans[at : at + _SPANS_AN_ORDER]
            tell = partial(_add, on_progress, done_bytes)
            await subject.worker.order("copy", fds=[fd], on_progress=tell, direction=direction, spans=packed(batch))
            done_bytes += sum(span[2] for span in batch)
        on_progress(done_bytes)

    async def passed(self, subject: MigratedProcess, route: CopyClient, at_bytes: int) -> None:
        """Everything before that place in the space is in the process again."""

    async def returned(self, subject: MigratedProcess, *, has_spare_memory: bool) -> None:
        """Called once all bytes are in the process. `has_spare_memory` is what `reload` found. Raises nothing."""

    # -- the contract --------------------------------------------------------------------------------------------------

    async def prepare(self, subject: MigratedProcess) -> None:
        """Have the helper ready to copy, before the process is asked to stop."""
        await self.with_route(subject, _nothing)

    async def arm_or_give(self, subject: MigratedProcess) -> None:
        """Prepare the copies; release everything if that fails, so that a caller that gets an error holds nothing."""
        try:
            await self.prepare(subject)
        except HegmError:
            await self.release(subject)
            raise

    async def abandon(self, subject: MigratedProcess) -> None:
        """Let the helper have nothing more to do with it."""
        route = self.routes.pop(lane_of(subject), None)
        if route is not None:
            await route.close()

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        """Raises HegmError; before the storages are freed, nothing has changed then."""
        report = await subject.worker.order("export", packed=True, partly=True)
        places = _places(report)
        end_bytes = _end_of(places)
        if end_bytes > self.space_bytes(subject):
            held_bytes = self.space_bytes(subject)
            raise Refused(
                f"process {subject.pid} has {end_bytes} bytes to offload, but {held_bytes} bytes are reserved for it",
                "try again: the process has grown since it was measured",
                {"needed_bytes": end_bytes, "held_bytes": held_bytes},
            )
        await self.before_copy_out(subject, end_bytes)
        await self._copy(subject, OUT, report, places, on_progress)
        freed = await subject.worker.order("free")
        return freed.size_bytes or 0

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Reload the bytes and return how many.

        Raises HegmError; unfilled bytes stay held, and the next call continues.
        """
        reservation_bytes = subject.storage_reservation_bytes - subject.agent_overhead_bytes
        most_bytes = round_bytes(reservation_bytes, subject.size_bytes) if subject.in_rounds else None
        done_bytes = 0
        while True:
            async with making() as made:
                report = await subject.worker.order("make", size_bytes=most_bytes, packed=True, partly=True)
                has_spare_memory = made()
                note_short(subject, report)
                done_bytes += await self._fill(subject, report, partial(_add, on_progress, done_bytes))
            if not report.left:
                await self.returned(subject, has_spare_memory=has_spare_memory)
                return done_bytes

    async def _fill(self, subject: MigratedProcess, report: AgentReport, on_progress: Progress) -> int:
        places = _places(report)
        await self._copy(subject, IN, report, places, on_progress)
        await subject.worker.order("filled", first=report.first or 0, count=len(places))
        if report.left:
            await self.with_route(subject, lambda route: self.passed(subject, route, _end_of(places)))
        return sum(place[2] for place in places)

    # -- copying -------------------------------------------------------------------------------------------------------

    async def _copy(
        self, subject: MigratedProcess, direction: str, report: AgentReport, places: list[Place], on_progress: Progress
    ) -> None:
        """Copy all places, each by the helper or else by the process itself."""
        tell = _rising(on_progress)
        own = [place for place in places if place[0] == NO_HANDLE]
        while True:
            if own:
                await self.prepare_own_copies(subject, direction)
            shown = [place for place in places if place not in own]
            failed = await self._copy_shown(subject, direction, report.handles, shown, tell)
            if not failed:
                break
            own += failed
        if own:
            numbers = {place[3]: number for number, place in enumerate(places, report.first or 0)}
            spans = [(numbers[at], 0, size_bytes, at) for _, _, size_bytes, at in sorted(own, key=lambda one: one[3])]
            own_bytes = sum(span[2] for span in spans)
            logger.info(
                "process %d itself copies %d storages %s, %d bytes", subject.pid, len(spans), direction, own_bytes
            )
            shown_bytes = sum(place[2] for place in places) - own_bytes
            await self.own_copies(subject, direction, spans, partial(_add, tell, shown_bytes))

    async def _copy_shown(
        self,
        subject: MigratedProcess,
        direction: str,
        handles: Sequence[bytes],
        places: list[Place],
        on_progress: Progress,
    ) -> list[Place]:
        """Copy by the helper, and return the places that it could not copy.

        Raises DriverOutOfMemory on the way out, where nothing is lost.
        """
        if not places:
            return []
        gpu = await self.gpus.uuid_of(subject.gpu or "")

        async def copy(route: CopyClient) -> None:
            through = await self.through(subject, route, _end_of(places))
            done = await route.copy(gpu, direction, handles, places, on_progress, through)
            logger.info("copied %s%s: %s", direction, "" if through == self.crosses else " within a GPU", done)

        try:
            await self.with_route(subject, copy)
        except (AgentAway, OrderFailed):
            raise
        except HegmError as error:
            if direction == OUT and isinstance(error, DriverOutOfMemory):
                raise
            numbers = sorted({place[0] for place in places})
            if not _is_about_one(error) or len(numbers) == 1:
                logger.warning("the helper cannot copy for process %d: %s", subject.pid, error.message)
                return places
            middle = numbers[len(numbers) // 2]  # the driver does not say which of them
            halves = [place for place in places if place[0] < middle], [place for place in places if place[0] >= middle]
            return [
                place
                for half in halves
                for place in await self._copy_shown(subject, direction, handles, half, _ignored)
            ]
        return []

    async def with_route(self, subject: MigratedProcess, work: Callable[[CopyClient], Awaitable[T]]) -> T:
        """Run `work` with a copy session. Opens the session if needed, and opens another if its helper was lost."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return await work(await self._route(subject))
            except DriverFailed as error:
                if error.number != _OUT_OF_MEMORY:
                    raise
                raise DriverOutOfMemory(
                    f"the driver has no memory left to copy for process {subject.pid}: {error.message}",
                    "free GPU memory on its GPU; its bytes are kept, and hegmd tries again",
                    {**error.facts, "pid": subject.pid},
                ) from error
            except HelperLost as error:
                self.routes.pop(lane_of(subject), None)
                if attempt == _ATTEMPTS:
                    raise
                logger.warning("copying for process %d starts again: %s", subject.pid, error.message)
        raise AssertionError("the last attempt returns or raises")

    async def _route(self, subject: MigratedProcess) -> CopyClient:
        """Return the copy client, ready to copy.

        Its contexts need GPU memory, so they are created under each GPU's lock.
        """
        route = self.routes.get(lane_of(subject))
        if route is None:
            uuids = await self.reach(subject)
            async with self.gpus.turns(self.gpus.name_of(uuid) for uuid in uuids):
                route = await CopyClient.open(self._helper, lane_of(subject), uuids, *(self.piece(subject) or ()))
            self.routes[lane_of(subject)] = route
            await self.attach(subject, route)
        return route


def note_short(subject: MigratedProcess, report: AgentReport) -> None:
    """Log that the agent could not restore its allocator's cache: the next training step may lack that memory."""
    if report.short_bytes:
        logger.warning(
            "process %d lost %d MiB of its reservation on %s to other processes: its next step may lack memory",
            subject.pid,
            report.short_bytes // MIB,
            subject.gpu,
            extra=fields(pid=subject.pid, short_bytes=report.short_bytes),
        )


def _is_about_one(error: HegmError) -> bool:
    """True if the driver lets no other process open that memory, such as memory that it restored."""
    return isinstance(error, DriverFailed) and error.call == _OPEN_CALL


def _rising(on_progress: Progress) -> Progress:
    """Return a callback that passes on only increases, because a repeated copy starts from zero."""
    most_bytes = 0

    def tell(copied_bytes: int) -> None:
        nonlocal most_bytes
        if copied_bytes > most_bytes:
            most_bytes = copied_bytes
            on_progress(copied_bytes)

    return tell


def _ignored(_: int) -> None:
    """How far a part is."""


def _add(on_progress: Progress, before_bytes: int, copied_bytes: int) -> None:
    on_progress(before_bytes + copied_bytes)


async def _nothing(_: CopyClient) -> None:
    """Do nothing: the caller only needs an open session."""


def lane_of(subject: MigratedProcess) -> str:
    return f"{subject.operation}.{subject.name}"


def _places(report: AgentReport) -> list[Place]:
    """Return where each storage is in the process and in the flat address space, where they follow one another.

    Raises BadValue for malformed packed places.
    """
    if report.packed_places is None:  # an agent of an earlier release
        spots = [(place.handle, place.offset, place.size_bytes) for place in report.places]
    else:
        spots = unpacked(report.packed_places)
    places: list[Place] = []
    at_bytes = report.at_bytes or 0
    for handle, offset, size_bytes in spots:
        places.append((handle, offset, size_bytes, at_bytes))
        at_bytes += -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return places


def _end_of(places: list[Place]) -> int:
    return max((at + size_bytes for _, _, size_bytes, at in places), default=0)
