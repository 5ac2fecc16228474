"""The texts of a plan: the downtime, the steps and the hazards.

Owns these texts and the sum of the estimates. Decides nothing: the plan exists before this is called. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hegmd.migration.machine.operation import CHECKPOINT, MIGRATE, QUIESCE, RESTART, RESTORE, RESUME, SUSPEND
from hegmd.migration.machine.wording import gigabytes, listed
from hegmd.migration.model import CARRIERS, Candidate, MigrationPlan, NodeSnapshotForPlan, Rates
from hegmd.migration.plan import carrier_choice, restart_rules
from hegmd.migration.plan.draft import Draft, candidate_of
from hegmd.migration.plan.throughput import IN, LEFT, OUT, image_s
from hegmd.protocol.operations import BY_DRIVER, KEEP_CONTEXT, WORKER, PlannedProcess

SIMULATED = "simulated"
DRIVER = "driver"

_STEPS = {
    MIGRATE: "reserve GPU and pool memory; quiesce; offload; change GPU; reload; verify a boundary",
    SUSPEND: "reserve pool memory; quiesce; offload; release the GPU's memory",
    RESUME: "reserve GPU memory; reload; resume; verify a boundary; release pool memory",
    CHECKPOINT: "reserve pool memory; quiesce; offload; write process and bytes",
    QUIESCE: "quiesce; stay parked; resume",
}
_DRIVER_STEPS = {
    MIGRATE: "reserve GPU memory; {out}lock and checkpoint; restore on the other GPU and unlock; {in}verify that it "
    "runs there",
    SUSPEND: "{out}lock and checkpoint; verify that its GPU memory is free",
    RESUME: "reserve GPU memory; restore and unlock; {in}verify that it runs there",
    CHECKPOINT: "{out}lock and checkpoint; write process and bytes",
}
_KEEPING_STEPS = {
    SUSPEND: "reserve pool memory; quiesce; offload by {carrier}; verify that the memory of its storages is free",
    RESUME: "check that GPU memory is free; reload by {carrier}; resume; verify a boundary; release pool memory",
}
# The last steps of a checkpoint after which the job trains on.
_LEFT_RUNNING = (
    "write the process; reload; resume; verify a boundary; write the bytes from the pool and verify the image while "
    "the job trains"
)
_AROUND = {"out": "quiesce; offload by {carrier}; ", "in": "reload; resume; verify a boundary; "}


def with_image(plan: MigrationPlan, rates: Rates, *, size_bytes: int, leave_running: bool) -> MigrationPlan:
    """Return the plan of a checkpoint or handoff with the time to write its image, and its last steps."""
    made_s = image_s(rates, LEFT if leave_running else OUT, size_bytes)
    back_s = estimate_s(plan.workers, RESUME, rates) if leave_running else 0.0
    ends = (*plan.steps, "read all of it back", "end the job")
    return plan.replace(
        estimate_s=plan.estimate_s + made_s + back_s,
        image_s=made_s,
        ends=not leave_running,
        steps=(*plan.steps[:-1], *_LEFT_RUNNING.split("; ")) if leave_running else ends,
    )


def from_image(plan: MigrationPlan, rates: Rates, *, size_bytes: int) -> MigrationPlan:
    """The plan of a resume, of a job that comes out of an image of that size before it."""
    read_s = image_s(rates, IN, size_bytes)
    first = "read the image and restore the processes concurrently"
    return plan.replace(kind=RESTORE, estimate_s=plan.estimate_s + read_s, image_s=read_s, steps=(first, *plan.steps))


def estimate_s(
    moving: Sequence[PlannedProcess], kind: str, rates: Rates, snapshot: NodeSnapshotForPlan | None = None
) -> float:
    """Return the job's downtime in seconds, without its wait for a boundary. Without a snapshot, no copies overlap."""
    by_driver = [worker for worker in moving if worker.method in (DRIVER, KEEP_CONTEXT)]
    size_bytes = sum(worker.size_bytes for worker in moving if worker not in by_driver)
    seconds = [_driver_s(worker, kind, rates, snapshot) for worker in by_driver]
    # Ranks leave their GPUs and return at the same time; those on one GPU share its link.
    by_gpu: dict[str | None, float] = {}
    for worker, took_s in zip(by_driver, seconds, strict=True):
        place = worker.to if worker.gpu is None else worker.gpu
        by_gpu[place] = by_gpu.get(place, 0.0) + took_s
    are_ranks = bool(by_driver) and all(worker.communicators or worker.method == KEEP_CONTEXT for worker in by_driver)
    driver_s = max(by_gpu.values()) if are_ranks else sum(seconds)
    out_s = size_bytes / rates.out_bytes_per_s if kind != RESUME else 0.0
    in_s = size_bytes / rates.in_bytes_per_s if kind not in (SUSPEND, CHECKPOINT) else 0.0
    start_s = restart_rules.START_S if _is_restart(moving) else 0.0
    return out_s + in_s + driver_s + start_s + (0.0 if by_driver else rates.fixed_s)


def _driver_s(worker: PlannedProcess, kind: str, rates: Rates, snapshot: NodeSnapshotForPlan | None) -> float:
    if worker.method == KEEP_CONTEXT:  # no call of the driver, so no copy overlaps one
        rates, snapshot = rates.replace(driver_out_s=0.0, driver_in_s=0.0), None
    return carrier_choice.estimate_s(
        kind,
        CARRIERS[worker.carrier],
        worker.size_bytes,
        worker.driver_bytes,
        rates,
        worker.overlap_bytes,
        _copies(snapshot, kind, worker),
        worker.own_bytes,
    )


def _copies(snapshot: NodeSnapshotForPlan | None, kind: str, worker: PlannedProcess) -> carrier_choice.OverlappedCopies:
    if snapshot is None:
        return carrier_choice.OverlappedCopies()
    at = None if kind == RESUME else worker.gpu
    return carrier_choice.overlapped_copies(snapshot, worker.carrier, worker.size_bytes, at, worker.to)


def _is_restart(moving: Sequence[PlannedProcess]) -> bool:
    return any(worker.method == RESTART for worker in moving)


def steps(moving: list[PlannedProcess], kind: str) -> tuple[str, ...]:
    return tuple(_steps(moving, kind).split("; "))


def _steps(moving: list[PlannedProcess], kind: str) -> str:
    if kind == QUIESCE:
        return _STEPS[kind]
    if not moving:
        return "unlock; verify that it runs"
    if _is_restart(moving) and kind != RESUME:
        return restart_rules.STEPS
    if all(worker.method == KEEP_CONTEXT for worker in moving):
        return _KEEPING_STEPS[kind].format(carrier=listed(tuple(dict.fromkeys(worker.carrier for worker in moving))))
    if all(worker.method != DRIVER for worker in moving):
        return _STEPS[kind]
    carriers = listed(tuple(dict.fromkeys(w.carrier for w in moving if w.carrier != BY_DRIVER)))
    around = {name: text.format(carrier=carriers) if carriers else "" for name, text in _AROUND.items()}
    return _DRIVER_STEPS[kind].format(**around)


def hazards(draft: Draft, members: tuple[Candidate, ...], world: int) -> tuple[str, ...]:
    """Return what a user should know before agreeing to the plan."""
    stopped = tuple(_stopped(members))
    if _is_restart(draft.moving):
        shared = restart_rules.share_gpus(members, draft.workers)
        return (*stopped, *shared, *restart_rules.not_kept(members, draft.request))
    own = tuple(_own_copies(draft))
    return (*stopped, *_hazards(members, world), *_closed_carriers(draft), *own, *_unknown_places(draft))


def _stopped(members: tuple[Candidate, ...]) -> Iterator[str]:
    """Warn about stopped processes first, since nothing happens before they continue."""
    pids = " ".join(str(candidate.pid) for candidate in members if candidate.stopped)
    if pids:
        are = f"processes {pids} are" if " " in pids else f"process {pids} is"
        yield f"{are} stopped by a signal or a debugger, which hegmd would wait for; run: kill -CONT {pids}"


def _closed_carriers(draft: Draft) -> Iterator[str]:
    """Name what closed a faster carrier, for users who can change it."""
    for worker in draft.moving:
        why = draft.choices[worker.pid].why if worker.pid in draft.choices else ""
        candidate = candidate_of(draft.snapshot, worker.pid)
        if why and candidate is not None and candidate.agent is not None:
            yield f"the bytes of process {worker.pid} go by {worker.carrier}: {why}"


def _own_copies(draft: Draft) -> Iterator[str]:
    """Name the bytes that do not go by the chosen carrier."""
    for worker in draft.moving:
        if worker.own_bytes:
            yield (
                f"{gigabytes(worker.own_bytes)} of process {worker.pid} go by {WORKER} and not by "
                f"{worker.carrier}: they share memory with tensors that stay in the process, which another process "
                "cannot open later"
            )


def _unknown_places(draft: Draft) -> Iterator[str]:
    for pid, gpus in draft.anywhere.items():
        yield (
            f"the former GPU of process {pid} is unknown: the driver restores it there, and hegmd reserves memory on "
            f"{listed(gpus)} until then"
        )


def _hazards(members: tuple[Candidate, ...], world: int) -> Iterator[str]:
    for candidate in members:
        if candidate.agent is not None and candidate.agent.left_alone:
            yield f"process {candidate.pid} keeps what its agent does not offload: {left_alone(candidate)}"
        if candidate.agent is None:
            yield (
                f"process {candidate.pid} has no agent, so hegmd cannot see whether it uses managed memory or CUDA "
                "IPC; the driver cannot restore a process that uses CUDA IPC"
            )
        if len(candidate.gpus) > 1:
            yield (
                f"process {candidate.pid} is on several GPUs: once moved, copies between these go through host "
                "memory, and a kernel that reads another GPU's memory directly fails"
            )
    ranks = [c for c in members if c.agent and c.agent.rank is not None]
    if world > len(ranks) and world > 1:
        yield f"{len(ranks)} of the job's {world} ranks are on this node; the others wait for them"


def left_alone(candidate: Candidate) -> str:
    """Return what its agent does not offload, and why, in words."""
    if candidate.agent is None:
        return ""
    items = candidate.agent.left_alone
    return "; ".join(f"{item.storages} storages, {gigabytes(item.size_bytes)}: {item.why}" for item in items)
