"""A plan while it is made: the snapshot, the reasons found against it, and what each process would use. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hegmd.errors import Code
from hegmd.migration.machine.operation import RESTART
from hegmd.migration.model import Candidate, GpuMemory, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan.carrier_choice import Choice
from hegmd.migration.plan.forecast import reservations_for
from hegmd.node.gpu_sets import CPU, added, shared_out
from hegmd.protocol.operations import PlannedProcess, Reason


@dataclass(slots=True, eq=False, repr=False)
class Draft:
    """A plan in the making, and the reasons against it so far."""

    snapshot: NodeSnapshotForPlan
    request: PlanRequest
    workers: list[PlannedProcess] = field(default_factory=list[PlannedProcess])
    reasons: list[Reason] = field(default_factory=list[Reason])
    #: Whether memory is taken on the targets only when all processes have left their GPUs.
    reserves_late: bool = False
    #: The carrier and its memory, by pid.
    choices: dict[int, Choice] = field(default_factory=dict[int, Choice])
    #: The GPUs that each need a reservation for a process that may be restored on any of them, by pid.
    anywhere: dict[int, tuple[str, ...]] = field(default_factory=dict[int, tuple[str, ...]])

    def against(self, code: Code, message: str, hint: str, *, pid: int | None = None, gpu: str | None = None) -> None:
        """Record a reason. A reason that applies to several ranks, such as the driver's version, is recorded once."""
        reason = Reason(code=code.name, message=message, hint=hint, pid=pid, gpu=gpu)
        if all((known.message, known.hint) != (message, hint) for known in self.reasons):
            self.reasons.append(reason)

    def gpu(self, name: str | None) -> GpuMemory | None:
        return next((gpu for gpu in self.snapshot.gpus if gpu.id == name), None)

    @property
    def moving(self) -> list[PlannedProcess]:
        """Return the processes that are not left unchanged on their GPUs."""
        return [worker for worker in self.workers if worker.to != worker.gpu or worker.method == RESTART]


def candidate_of(snapshot: NodeSnapshotForPlan, pid: int) -> Candidate | None:
    """The process of that pid, if it could be moved at all."""
    return next((candidate for candidate in snapshot.candidates if candidate.pid == pid), None)


def memory_needed(draft: Draft, held: Mapping[int, int]) -> dict[str, int]:
    """Return the memory that the moving processes will take on each GPU, beyond their reservations, by pid."""
    needed: dict[str, int] = {}
    for worker in draft.moving:
        if worker.to is not None and worker.to not in (CPU, worker.gpu):
            choice = draft.choices.get(worker.pid, Choice(""))
            more_bytes = worker.reservation_bytes + choice.target_bytes - held.get(worker.pid, 0)
            places = dict.fromkeys(draft.anywhere.get(worker.pid, (worker.to,)), more_bytes)
            if worker.driver_bytes_by_gpu and more_bytes > 0:
                bytes_by_gpu = added(worker.driver_bytes_by_gpu, worker.storage_bytes_by_gpu)
                places = reservations_for(bytes_by_gpu, worker.gpu, worker.to)
                own = shared_out(worker.to, choice.target_bytes_by_gpu, 0)
                places = {gpu: size_bytes + own[gpu] for gpu, size_bytes in places.items()}
            for gpu, size_bytes in places.items():
                needed[gpu] = needed.get(gpu, 0) + size_bytes
    return needed


def left_by_others(draft: Draft, to: str | None) -> GpuMemory | None:
    """Return the target GPU with what the processes placed before leave free there."""
    gpu = draft.gpu(to)
    if gpu is None or gpu.free_bytes is None:
        return gpu
    return gpu.replace(free_bytes=max(0, gpu.free_bytes - memory_needed(draft, {}).get(gpu.id, 0)))
