"""The common part of the carriers whose copies the GPU helper makes.

The agent shows its storages, the helper copies, the agent frees or fills them. Owns the order of these, which keeps the
bytes in one complete place at all times: they are freed only when all are copied, and the copies are released only when
the agent has recorded that it has its own. The agent decides where the bytes are in the flat address space, and counts
what is filled. So nothing is remembered here, and a new daemon continues where the last one stopped. A helper that is
lost costs the copy in progress and nothing else: the next helper repeats it, from memory that is held by descriptor.

The process copies itself what the helper cannot copy, storage by storage and in both directions: storages without an
IPC handle, those that the driver lets no other process open, and everything if the helper fails. A process reaches only
host memory, so a carrier says which memory that is (`own_copies`).

A process on several GPUs has a copy session for each of its devices, and these copy at the same time: every GPU has a
link of its own. For a session, `MigratedProcess.device` says which device it serves.

Longer than 400 lines because every copy has to be possible by the helper and by the process itself, for each device.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.copy_client import HOST, VIDEO, CopyClient, Place
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link
from hegmd.memory.sizes import MIB, round_bytes
from hegmd.migration.contracts import DriverOutOfMemory, Making, MigratedProcess, NoContext, NoCopy, Progress
from hegmd.migration.methods.gpus import Gpus
from hegmd.node.gpu_sets import gpus_of
from hegmd.protocol.agents import NO_HANDLE, AgentReport, packed, unpacked
from hegmd.system.task_group import parts_of, run_concurrently
from hegmd.telemetry.log import fields
from hegmd.workers.workers import AgentAway, OrderFailed

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: The number of a storage, the offset in it, the size in bytes, and the offset in the space.
Span = tuple[int, int, int, int]

# A helper that is lost so often at one thing will be lost again.
_ATTEMPTS = 3
_ALIGNED_BYTES = 512
_OPEN_CALL = "cuIpcOpenMemHandle"
_OUT_OF_MEMORY = 2
OUT, IN = "out", "in"
_SPANS_AN_ORDER = 4096

# Between a session's name and its device: no program's name has it, so `python3` never closes sessions of `python3.11`.
_BEFORE_DEVICE = "/"


class Share(NamedTuple):
    """The storages on one GPU of a process: their places in the carrier's space, and the number of each storage."""

    subject: MigratedProcess
    #: The UUID of that GPU.
    gpu: str
    places: tuple[Place, ...]
    numbers: tuple[int, ...]


class CopyingCarrier(NoCopy):
    """Base class of those carriers. A subclass knows the memory of the copies and the GPUs to be reached."""

    name = ""
    #: True if the storages of all GPUs are in one space. Otherwise each device has its own, which begins at 0.
    has_one_space = True
    #: The copy client's address space that crosses a link; bytes of the other one stay on their GPU.
    crosses = VIDEO

    def __init__(self, helper: Link, gpus: Gpus) -> None:
        self._helper = helper
        self.gpus = gpus
        self.routes: dict[str, CopyClient] = {}

    # -- for the carriers ----------------------------------------------------------------------------------------------

    async def attach(self, subject: MigratedProcess, route: CopyClient) -> None:
        """Give its video memory to the route, if the route needs it from the start."""

    async def reach(self, subject: MigratedProcess) -> list[str]:
        """The UUIDs of the GPUs that the copies touch, that of the process first."""
        raise NotImplementedError

    async def release(self, subject: MigratedProcess) -> None:
        raise NotImplementedError

    def space_bytes(self, subject: MigratedProcess) -> int:
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
        await self.prepare_sessions(subject, lambda _, __: _nothing())

    async def prepare_sessions(
        self, subject: MigratedProcess, ready: Callable[[MigratedProcess, CopyClient], Awaitable[None]]
    ) -> None:
        """Open a copy session for each of its devices, and have each one `ready`."""
        await run_concurrently(*[partial(self.with_route, one, partial(ready, one)) for one in by_device(subject)])

    async def prepare_or_release(self, subject: MigratedProcess) -> None:
        """Prepare the copies; release everything if that fails, so that a caller that gets an error holds nothing."""
        try:
            await self.prepare(subject)
        except HegmError:
            await self.release(subject)
            raise

    async def abandon(self, subject: MigratedProcess) -> None:
        """Have the helper drop it."""
        for lane in lanes_of(subject, self.routes):
            route = self.routes.pop(lane, None)
            if route is not None:
                await route.close()

    async def offload(self, subject: MigratedProcess, on_progress: Progress) -> int:
        """Raises HegmError; before the storages are freed, nothing has changed then."""
        report = await subject.worker.order("export", partly=True)
        shares = await self._shares(subject, OUT, report)
        for share in shares:
            end_bytes, held_bytes = _end_of(share.places), self.space_bytes(share.subject)
            if end_bytes > held_bytes:
                where = "" if share.subject is subject else f" on {self.gpus.name_of(share.gpu)}"
                raise Refused(
                    f"process {subject.pid} has {end_bytes} bytes to offload{where}, but {held_bytes} bytes are "
                    "reserved for it",
                    "try again: the process has grown since it was measured",
                    {"needed_bytes": end_bytes, "held_bytes": held_bytes},
                )
        await self.before_copy_out(subject, max((_end_of(share.places) for share in shares), default=0))
        await self._copy(OUT, report, shares, on_progress)
        freed = await subject.worker.order("free")
        return freed.size_bytes or 0

    async def reload(self, subject: MigratedProcess, on_progress: Progress, making: Making) -> int:
        """Reload the bytes and return how many. Raises HegmError; the rest stays held for the next call."""
        reservation_bytes = subject.storage_reservation_bytes - subject.agent_overhead_bytes
        most_bytes = round_bytes(reservation_bytes, subject.size_bytes) if subject.in_rounds else None
        done_bytes = 0
        while True:
            async with making() as made:
                report = await subject.worker.order("make", size_bytes=most_bytes, partly=True)
                has_spare_memory = made()
                note_short(subject, report)
                done_bytes += await self._fill(subject, report, partial(_add, on_progress, done_bytes))
            if not report.left:
                await self.returned(subject, has_spare_memory=has_spare_memory)
                return done_bytes

    async def _fill(self, subject: MigratedProcess, report: AgentReport, on_progress: Progress) -> int:
        shares = await self._shares(subject, IN, report)
        await self._copy(IN, report, shares, on_progress)
        count = sum(len(share.places) for share in shares)
        await subject.worker.order("filled", first=report.first or 0, count=count)
        if report.left:  # in rounds, which a process on several GPUs has not
            await self.with_route(subject, lambda route: self.passed(subject, route, _end_of(shares[0].places)))
        return sum(place[2] for share in shares for place in share.places)

    async def _shares(self, subject: MigratedProcess, direction: str, report: AgentReport) -> list[Share]:
        """Sort the storages by GPU. Raises Refused if it is not on the GPUs that its operation knows."""
        places, gpus, first = _places(report), gpus_of(subject.gpu), report.first or 0
        if len(gpus) < 2:
            uuid = await self.gpus.uuid_of(subject.gpu or "")
            return [Share(subject, uuid, tuple(places), tuple(range(first, first + len(places))))]
        uuids = [await self.gpus.uuid_of(gpu) for gpu in gpus]
        devices = report.devices or b""
        is_known = set(report.gpus) <= set(uuids) and len(devices) == len(places) and not first
        if not is_known or any(device >= len(report.gpus) for device in devices):
            raise Refused(
                f"process {subject.pid} does not report which of its storages are on which of {', '.join(gpus)}",
                "try again; if that does not help, let it copy its storages itself: --carrier worker",
                {"pid": subject.pid, "gpus": list(report.gpus)},
            )
        shares: list[Share] = []
        for device, uuid in enumerate(report.gpus):
            numbers = tuple([number for number, its in enumerate(devices) if its == device])
            its_places = [places[number] for number in numbers]
            if not self.has_one_space:
                its_places = _one_after_another([place[:3] for place in its_places], 0)
            session = replace(subject, device=self.session_of(subject, direction, device, uuids.index(uuid)))
            shares.append(Share(session, uuid, tuple(its_places), numbers))
        return shares

    def session_of(self, subject: MigratedProcess, direction: str, device: int, place: int) -> int:
        """Return the number of the session for that device, which is on the GPU at that place. Raises Refused."""
        return place

    # -- copying -------------------------------------------------------------------------------------------------------

    async def _copy(self, direction: str, report: AgentReport, shares: Sequence[Share], on_progress: Progress) -> None:
        """Copy all places, each by the helper or else, after it, by the process itself."""
        progress_of = parts_of(_rising(on_progress))
        left: dict[str, list[Span]] = {}

        async def copy(share: Share, tell: Progress) -> None:
            left[share.gpu] = await self._copy_share(share, direction, report.handles, tell)

        await run_concurrently(*[partial(copy, share, progress_of(share.gpu)) for share in shares])
        for share in shares:
            spans, subject = left[share.gpu], share.subject
            if not spans:
                continue
            own_bytes = sum(span[2] for span in spans)
            logger.info(
                "process %d itself copies %d storages %s, %d bytes", subject.pid, len(spans), direction, own_bytes
            )
            shown_bytes = sum(place[2] for place in share.places) - own_bytes
            await self.own_copies(subject, direction, spans, partial(_add, progress_of(share.gpu), shown_bytes))

    async def _copy_share(self, share: Share, direction: str, handles: Sequence[bytes], tell: Progress) -> list[Span]:
        """Have the helper copy what it can, and return what the process has to copy itself."""
        own = [place for place in share.places if place[0] == NO_HANDLE]
        while True:
            if own:
                await self.prepare_own_copies(share.subject, direction)
            shown = [place for place in share.places if place not in own]
            failed = await self._copy_shown(share, direction, handles, shown, tell)
            if not failed:
                break
            own += failed
        numbers = {place[3]: number for number, place in zip(share.numbers, share.places, strict=True)}
        return [(numbers[at], 0, size_bytes, at) for _, _, size_bytes, at in sorted(own, key=lambda one: one[3])]

    async def _copy_shown(
        self, share: Share, direction: str, handles: Sequence[bytes], places: list[Place], on_progress: Progress
    ) -> list[Place]:
        """Copy by the helper; return the places that it could not copy. Raises DriverOutOfMemory outwards; nothing is
        lost.
        """
        if not places:
            return []
        subject = share.subject

        async def copy(route: CopyClient) -> None:
            through = await self.through(subject, route, _end_of(places))
            done = await route.copy(share.gpu, direction, handles, places, on_progress, through)
            logger.info("copied %s%s: %s", direction, "" if through == self.crosses else " within a GPU", done)

        try:
            await self.with_route(subject, copy)
        except (AgentAway, OrderFailed):
            raise
        except HegmError as error:
            may_copy_itself = isinstance(error, NoContext) and self.crosses == HOST
            if direction == OUT and isinstance(error, DriverOutOfMemory) and not may_copy_itself:
                raise
            numbers = sorted({place[0] for place in places})
            if not _is_about_one(error) or len(numbers) == 1:
                logger.warning("the helper cannot copy for process %d: %s", subject.pid, error.message)
                return places
            middle = numbers[len(numbers) // 2]  # the driver does not say which of them
            halves = [place for place in places if place[0] < middle], [place for place in places if place[0] >= middle]
            return [
                place for half in halves for place in await self._copy_shown(share, direction, handles, half, _ignored)
            ]
        return []

    async def with_route(self, subject: MigratedProcess, work: Callable[[CopyClient], Awaitable[T]]) -> T:
        """Run `work` with a copy session. Opens the session if needed, and opens another if its helper was lost."""
        for attempt in range(1, _ATTEMPTS + 1):
            lacks: type[DriverOutOfMemory] = NoContext
            try:
                route = await self._route(subject)
                lacks = DriverOutOfMemory
                return await work(route)
            except DriverFailed as error:
                if error.number != _OUT_OF_MEMORY:
                    raise
                raise lacks(
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
        """Return the copy client. Its contexts need GPU memory, so they are created under each GPU's lock."""
        route = self.routes.get(lane_of(subject))
        if route is None:
            uuids = await self.reach(subject)
            async with self.gpus.turns(self.gpus.name_of(uuid) for uuid in uuids):
                route = self.routes.get(lane_of(subject))  # another task may have opened it meanwhile
                if route is not None:
                    return route
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
    """Ignore the progress of a part."""


def _add(on_progress: Progress, before_bytes: int, copied_bytes: int) -> None:
    on_progress(before_bytes + copied_bytes)


async def _nothing() -> None:
    """Do nothing: the caller only needs an open session."""


def lane_of(subject: MigratedProcess) -> str:
    """Return the name of its copy session; of several, of the one for its `device`."""
    lane = f"{subject.operation}.{subject.name}"
    return lane if subject.device is None else f"{lane}{_BEFORE_DEVICE}{subject.device}"


def lanes_of(subject: MigratedProcess, lanes: Iterable[str]) -> list[str]:
    """Return the names of its own copy sessions among these: that of its `device`, or all of them."""
    own = lane_of(subject)
    return [lane for lane in lanes if lane == own or (subject.device is None and lane.startswith(own + _BEFORE_DEVICE))]


def by_device(subject: MigratedProcess) -> list[MigratedProcess]:
    """Return the process once for each of its copy sessions: one, or one for each of its several GPUs."""
    count = len(gpus_of(subject.gpu or subject.target_gpu or subject.previous_gpu))
    if count < 2 or subject.device is not None:
        return [subject]
    return [replace(subject, device=device) for device in range(count)]


def _places(report: AgentReport) -> list[Place]:
    """Return where each storage is in the process and in the flat address space, where they follow one another.

    Raises BadValue for malformed packed places.
    """
    return _one_after_another(unpacked(report.places or b""), report.at_bytes or 0)


def _one_after_another(spots: Iterable[tuple[int, int, int]], at_bytes: int) -> list[Place]:
    places: list[Place] = []
    for handle, offset, size_bytes in spots:
        places.append((handle, offset, size_bytes, at_bytes))
        at_bytes += -(-size_bytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
    return places


def _end_of(places: Sequence[Place]) -> int:
    return max((at + size_bytes for _, _, size_bytes, at in places), default=0)
