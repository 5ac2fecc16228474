"""Memory and processes on the node that no operation owns: listed, reported once, and changed only on request.

Has one source for each kind: pool segments, files that look like segments, and parked processes. Processes that a
driver has locked or checkpointed have a source of their own, next to the vendor's code. Decides nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from hegmd.errors import DENIED, NOT_FOUND, HegmError, Refused
from hegmd.memory.pool import Pool
from hegmd.memory.pool_found import UntrustedFile
from hegmd.migration.machine.adoption import DriverProcess, ParkedProcess, on_real_gpu
from hegmd.migration.machine.wording import no_such_process
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.operations.orphaned_memory import OrphanedMemory
from hegmd.protocol.operations import Orphan
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import fields
from hegmd.workers.workers import BACK, CAME, AgentConnection, Workers

logger = logging.getLogger(__name__)

SURVEY_LIMIT_S = 5.0


class Source(Protocol):
    """A kind of things that can be found."""

    def orphans(self) -> Iterable[Orphan]: ...

    async def drop(self, name: str) -> int | None:
        """Delete the orphan of that name, and return the freed bytes if known. Raises HegmError."""
        ...


class ByDriver(Protocol):
    """Asks a real GPU's driver about a process: `driver_orphans`."""

    async def inspect(self, pid: int) -> DriverProcess: ...


class SearchingSource(Protocol):
    """A source that must be asked to search."""

    async def search(self, *, thorough: bool, within_s: float) -> None: ...


class PoolOrphans:
    """Pool segments that were found at the start. `why` describes what became of the operation of that number."""

    def __init__(self, pool: Pool, why: Callable[[str], str]) -> None:
        self._pool = pool
        self._why = why

    def orphans(self) -> Iterable[Orphan]:
        for name, piece in self._pool.unclaimed().items():
            key, memory = piece.name.key, piece.memory
            worker, _, _ = key.worker.partition("-")
            where = (
                "disk" if memory is None else "nameless memory" if memory.place is None else str(memory.place.folder)
            )
            drop = f"hegmctl adopt --drop {name}"
            if worker.isdigit():
                pid, why = int(worker), self._why(key.operation)
                next_step = f"run: hegmctl adopt {worker}, if that process is parked; otherwise: {drop}"
            else:  # named by rank and slot
                pid, why = None, f"it is a snapshot of job {key.operation}, whose recovery has no record of it"
                next_step = f"nothing can continue from it; run: {drop}"
            yield Orphan(
                name=name,
                kind="bytes",
                pid=pid,
                size_bytes=piece.size_bytes,
                where=where,
                why=why,
                next=next_step,
                uid=None if piece.name.source is None else piece.name.source.uid,
            )

    async def drop(self, name: str) -> int | None:
        return await self._pool.drop_unclaimed(name)


class UntrustedFiles:
    """Files that look like pool segments and cannot be trusted. Users may check and remove them."""

    def __init__(self) -> None:
        self.found: tuple[UntrustedFile, ...] = ()

    def orphans(self) -> Iterable[Orphan]:
        for one in self.found:
            yield Orphan(
                name=one.name,
                kind="unknown",
                size_bytes=one.size_bytes,
                where=one.where,
                why=one.why,
                next=f"check it in {one.where}, and remove it if it is not needed",
            )

    async def drop(self, name: str) -> int | None:
        where = next(one.where for one in self.found if one.name == name)
        raise Refused(f"{name} in {where} is unknown to hegmd", "check it, and remove it if it is not needed")


class ParkedOrphans:
    """Parked processes, or those with offloaded bytes, that belong to no operation. `in_hand` says which belong to one.

    On real GPUs, `by_driver` says whether the driver has a process checkpointed and how much memory its restore needs
    at most, since the measured figure was in the journal. `bytes_of` has the orphaned bytes.
    """

    def __init__(
        self,
        workers: Workers,
        in_hand: Callable[[int], bool],
        by_driver: ByDriver | None = None,
        bytes_of: OrphanedMemory | None = None,
    ) -> None:
        self._workers = workers
        self._bytes = bytes_of
        self._in_hand = in_hand
        self.by_driver = by_driver

    def connections(self) -> Sequence[AgentConnection]:
        return [worker for worker in self._workers if self.is_orphan(worker)]

    def is_orphan(self, worker: AgentConnection) -> bool:
        return worker.connected and (worker.parked or worker.held_bytes > 0) and not self._in_hand(worker.pid)

    async def job_of(self, pid: int) -> tuple[ParkedProcess, ...]:
        """Return that process and the other parked ones of its job, each surveyed. Raises HegmError."""
        worker = self._workers.find(pid)
        if worker is None or not worker.connected:
            if start_ticks_of(pid) is None:
                raise HegmError(NOT_FOUND, *no_such_process(pid), {"pid": pid})
            raise HegmError(NOT_FOUND, f"process {pid} has no connected agent", "run: hegmctl adopt", {"pid": pid})
        others = [other for other in self._workers if other is not worker and _is_same_job(worker, other)]
        found = [await self._parked_process(one) for one in (worker, *others) if one is worker or self.is_orphan(one)]
        if not self.is_orphan(worker):
            raise Refused(f"process {pid} is not parked: there is nothing to adopt", "run: hegmctl ps", {"pid": pid})
        return tuple(found)

    async def _parked_process(self, worker: AgentConnection) -> ParkedProcess:
        await worker.order("survey", limit_s=SURVEY_LIMIT_S)
        parked = ParkedProcess(
            pid=worker.pid,
            start_ticks=worker.identity.start_ticks,
            uid=worker.identity.uid,
            token=worker.token,
            rank=worker.about.rank,
            world_size=worker.about.world_size,
            gpu=worker.gpu or worker.about.gpu,
            boundary=worker.boundary,
            size_bytes=max(worker.size_bytes or 0, worker.held_bytes),
            held_bytes=worker.held_bytes,
            communicators=_mechanism(worker),
        )
        if self.by_driver is None:
            return parked
        in_video = self._bytes is not None and bool(await self._bytes.in_video(worker, str(worker.pid)))
        driven = await self.by_driver.inspect(worker.pid)
        return on_real_gpu(parked, driven, worker.about.mark, in_video=in_video)

    def orphans(self) -> Iterable[Orphan]:
        for worker in self.connections():
            out = f", {worker.held_bytes} bytes of it are offloaded" if worker.held_bytes else ""
            yield Orphan(
                name=str(worker.pid),
                kind="process",
                pid=worker.pid,
                size_bytes=worker.held_bytes,
                where="only hegmd has a copy" if worker.about.entrusted else "the process has a descriptor of them",
                why=f"its training thread is parked{out}, and it belongs to no operation",
                next=f"hegmctl adopt {worker.pid}",
                uid=worker.identity.uid,
            )

    async def drop(self, name: str) -> int | None:
        raise Refused(f"{name} is a process, not saved bytes", f"run: hegmctl adopt {name}; or kill it")


def _not_theirs(orphan: Orphan) -> HegmError:
    owner = "its owner is unknown" if orphan.uid is None else f"it is of uid {orphan.uid}"
    hint = "ask its owner, or an administrator of hegmd"
    return HegmError(DENIED, f"{orphan.name} can only be dropped by its owner: {owner}", hint, {"uid": orphan.uid})


def _mechanism(worker: AgentConnection) -> str:
    groups = worker.communicators
    return "" if groups is None or groups.mechanism == "none" else groups.mechanism


def _is_same_job(one: AgentConnection, other: AgentConnection) -> bool:
    run, other_run = one.about.run or one.about.job, other.about.run or other.about.job
    return run is not None and run == other_run and one.identity.uid == other.identity.uid


class Orphans:
    """All orphans. Listens to the workers, and reports each orphan once, as an event and in the log."""

    def __init__(self, sources: Sequence[Source], events: EventLog, searcher: SearchingSource | None = None) -> None:
        self._sources = sources
        self._searcher = searcher
        self._events = events
        self._reported: set[str] = set()

    def all(self) -> tuple[Orphan, ...]:
        """Return everything that needs a person now."""
        return tuple([orphan for source in self._sources for orphan in source.orphans()])

    async def search(self, *, thorough: bool, within_s: float) -> None:
        """Search now for orphans that are only found by asking the driver, within that time."""
        if self._searcher is not None:
            await self._searcher.search(thorough=thorough, within_s=within_s)

    async def drop(self, name: str, may: Callable[[int | None], bool]) -> int | None:
        """Delete the orphan of that name, and return the freed bytes. Raises HegmError.

        `may` returns whether the caller may act on that user's property; DENIED if not.
        """
        for source in self._sources:
            orphan = next((orphan for orphan in source.orphans() if orphan.name == name), None)
            if orphan is not None:
                if not may(orphan.uid):
                    raise _not_theirs(orphan)
                freed_bytes = await source.drop(name)
                self._events.record("pool.dropped", "warning", f"{name} was dropped", facts={"name": name})
                return freed_bytes
        raise HegmError(NOT_FOUND, f"there is no orphan {name[:120]!r}", "run: hegmctl adopt")

    def on_event(self, event: str, _worker: AgentConnection) -> None:
        if event in (CAME, BACK):
            self.tell()

    def tell(self) -> None:
        """Report orphans that were not reported yet."""
        orphans = self.all()
        self._reported &= {orphan.name for orphan in orphans}  # a pid may be a orphan's again, of another process
        for orphan in orphans:
            if orphan.name in self._reported:
                continue
            self._reported.add(orphan.name)
            message = f"{orphan.name} needs your attention: {orphan.why}; {orphan.next}"
            self._events.record(
                "pool.orphan", "warning", message, pid=orphan.pid, facts={"name": orphan.name, "kind": orphan.kind}
            )
            logger.warning("%s", message, extra=fields(name=orphan.name, kind=orphan.kind))
