"""Resolve a worker of an operation to its live process, agent connection, method and carrier.

Finds a worker by pid, start time and token, and builds the MigratedProcess that methods and carriers take. Says which
workers are missing, and decides nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.migration.contracts import Carrier, Method, MigratedProcess, Rank, Respawn, start_key
from hegmd.migration.machine.operation import FORWARD, HOLD, Operation
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.run.image_service import Imager
from hegmd.workers.workers import AgentAway, AgentConnection, Workers

# A descriptor, and the number of the snapshot. The arguments are the operation and the process.
SlotFor = Callable[[str, AgentConnection], Awaitable["tuple[int, int] | None"]]


async def no_slot(_operation: str, _worker: AgentConnection) -> tuple[int, int] | None:
    """Return None: no snapshot is taken beside images."""
    return None


class Participants:
    """The workers, methods and carriers of this run of the daemon."""

    def __init__(
        self,
        workers: Workers,
        methods: Mapping[str, Method],
        carriers: Mapping[str, Carrier],
        *,
        start_ticks: Callable[[int], int | None],
        imager: Imager | None,
        slot_for: SlotFor = no_slot,
    ) -> None:
        self._workers = workers
        self.methods = methods
        self.carriers = carriers
        self._start_ticks = start_ticks
        self._imager = imager
        #: Returns the slot for a snapshot at the boundary where that process is parked for an image.
        self.slot_for = slot_for

    def is_alive(self, member: Member) -> bool:
        """Return True if the process still exists and its pid was not reused."""
        return self._start_ticks(member.pid) == member.start_ticks

    def connection(self, member: Member) -> int | None:
        """Return the number of its agent's connection; None while there is none."""
        worker = self._workers.find(member.pid)
        is_it = worker is not None and worker.identity.start_ticks == member.start_ticks and worker.connected
        return worker.connection if worker is not None and is_it else None

    def find(self, pid: int) -> AgentConnection | None:
        """The handle of whatever process has that pid now."""
        return self._workers.find(pid)

    def method(self, member: Member) -> Method:
        """Return the worker's method. Raises HegmError if this daemon lacks it, as after a start without its GPUs."""
        method = self.methods.get(member.method)
        if method is None:
            raise _not_here(member, "method", member.method)
        return method

    def carrier(self, member: Member) -> Carrier:
        """Raises HegmError, as `method`."""
        carrier = self.carriers.get(member.carrier)
        if carrier is None:
            raise _not_here(member, "carrier", member.carrier)
        return carrier

    def imager_for(self, member: Member) -> Imager:
        """Raises HegmError where this daemon can make no images."""
        if self._imager is None:
            raise _not_here(member, "maker of images", "criu")
        return self._imager

    def subject(self, op: Operation, member: Member) -> MigratedProcess:
        """The process, as its operation knows it now."""
        return MigratedProcess(
            operation=op.id,
            name=member.name,
            pid=member.pid,
            start_ticks=member.start_ticks,
            gpu=member.gpu,
            target_gpu=member.target_gpu,
            previous_gpu=member.previous_gpu,
            size_bytes=member.size_bytes,
            storage_reservation_bytes=member.reservation_bytes - member.driver_bytes,
            driver_bytes=member.driver_bytes,
            agent_overhead_bytes=member.agent_overhead_bytes,
            driver_bytes_by_gpu=member.driver_bytes_by_gpu,
            storage_bytes_by_gpu=member.storage_bytes_by_gpu,
            keeps_context=member.keeps_context,
            stays_bytes=member.stays_bytes,
            in_rounds=member.overlap_bytes > 0,
            reserves_late=op.reserves_late,
            stays_locked=bool(member.communicators),
            goes_on=not op.is_distributed and op.direction != HOLD and op.image is None,
            keeps_reservation=member.target_gpu is not None or member.kept_gpu is not None or len(op.workers) > 1,
            source_gpu_uuids=member.source_gpu_uuids,
            gpu_unknown=member.gpu_unknown,
            uid=op.owner_uid,
            run=member.run,
            respawn=_respawn(op),
            start=start_key(op.kind, op.direction, [one.target_gpu for one in op.workers], op.failed_returns),
            rank=member.rank,
            ranks=_ranks(op),
            agent=self.agent(member),
        )

    def agent(self, member: Member) -> AgentConnection | None:
        """Return the connection of that process and program, if there is one."""
        worker = self._workers.find(member.pid)
        if worker is None or worker.identity.start_ticks != member.start_ticks or worker.token != member.token:
            return None
        return worker

    def worker(self, member: Member) -> AgentConnection:
        """The handle of that process and program. Raises AgentAway."""
        worker = self.agent(member)
        if worker is None:
            raise AgentAway(member.pid, "it has not connected since hegmd was started")
        return worker


def _respawn(op: Operation) -> Respawn:
    """Return how it is started: in a rollback with its former command."""
    if op.respawn is None or op.direction != FORWARD:
        return Respawn()
    return Respawn(dict(op.respawn.set), op.respawn.unset, op.respawn.python)


def _ranks(op: Operation) -> tuple[Rank, ...]:
    """Return the ranks that a restart starts together; empty for any other operation."""
    if not op.restarts_together:
        return ()
    known = [Rank(one.name, one.rank, one.target_gpu) for one in op.live if one.rank is not None]
    return tuple(sorted(known, key=lambda one: one.number))


def _not_here(member: Member, kind: str, name: str) -> HegmError:
    return HegmError(
        UNAVAILABLE,
        f"process {member.pid} is moved by the {kind} {name}, which this run of hegmd does not have",
        "start hegmd with the GPUs that it had when the operation began, simulated or real",
        {"pid": member.pid},
    )
