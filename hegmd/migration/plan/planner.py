"""Plans an operation: from a snapshot of the node and a request to a plan, or to the reasons why it is impossible.

Owns the checks before an operation and the messages of their results. Pure: `--dry-run` and the real operation run the
same code on the same snapshot, so they agree. A plan promises nothing: memory is only checked here. The machine
reserves it, and rolls back if another process took it first. Permissions are checked earlier, elsewhere.

All reasons are returned at once, each with the next step. `estimate` has the texts of a plan.

Longer than 400 lines because all checks of one plan are here, in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hegmd.errors import BUSY, REFUSED
from hegmd.memory.sizes import whole_size
from hegmd.migration.machine.operation import CHECKPOINT, QUIESCE, RESTART, RESUME, SUSPEND, JobProcess, Operation
from hegmd.migration.machine.wording import gigabytes, listed, named, resuming
from hegmd.migration.model import Candidate, GpuMemory, MigrationPlan, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan import (
    carrier_choice,
    communicator_rules,
    driver_rules,
    estimate,
    keep_context_rules,
    restart_rules,
    targets,
)
from hegmd.migration.plan.carrier_choice import Choice, Refusal
from hegmd.migration.plan.draft import Draft, candidate_of, left_by_others, memory_needed
from hegmd.migration.plan.estimate import DRIVER, SIMULATED
from hegmd.migration.plan.forecast import expected
from hegmd.migration.plan.members import NVIDIA, can_be_stopped, in_rank_order, members_named
from hegmd.node.gpu_sets import gpus_of, place_of
from hegmd.protocol.agents import not_connected
from hegmd.protocol.operations import BY_DRIVER, WORKER, PlannedProcess, Reason

# A suspend that leaves more than this share of the bytes where they are would not be worth the name.
MAX_LEFT_PERCENT = 50


def planned(snapshot: NodeSnapshotForPlan, request: PlanRequest) -> MigrationPlan | tuple[Reason, ...]:
    """Return the plan, or every reason against it. A restart is planned only if nothing else is possible."""
    found = _planned(snapshot, request)
    if isinstance(found, MigrationPlan) or request.via == RESTART or request.kind in (SUSPEND, CHECKPOINT, QUIESCE):
        return found
    if not request.allow_restart:
        return restart_rules.offer(found, tuple(members_named(Draft(snapshot, request))))
    other = _planned(snapshot, request.replace(via=RESTART))
    if isinstance(other, MigrationPlan):
        return other.replace(hazards=(restart_rules.why_not_better(found), *other.hazards))
    return (*found, *[reason for reason in other if reason not in found])


def against_leaving(snapshot: NodeSnapshotForPlan, request: PlanRequest) -> tuple[Reason, ...]:
    """Return every reason why those processes cannot be checkpointed, apart from free memory."""
    draft = Draft(snapshot, request)
    _place_members(draft)
    return tuple(draft.reasons)


def _place_members(draft: Draft) -> tuple[Candidate, ...]:
    members = in_rank_order(members_named(draft))
    places = [(candidate.pid, place_of(candidate.gpus)) for candidate in members]
    ranks = [one for one in members if one.agent is not None and one.agent.rank is not None]
    for job in {(rank.uid, rank.job) for rank in ranks if rank.job is not None}:
        own = [(rank.pid, place_of(rank.gpus)) for rank in ranks if (rank.uid, rank.job) == job]
        if targets.against_one_gpu(draft, own):
            return members
    if not targets.place_ranks(draft, places):
        return members
    for candidate in members:
        if can_be_stopped(draft, candidate):
            (_place if draft.request.kind != QUIESCE else _leave_in_place)(draft, candidate)
    if draft.request.kind != QUIESCE and draft.request.via != RESTART and not draft.request.keep_context:
        communicator_rules.judge(draft, members)
    return members


def _planned(snapshot: NodeSnapshotForPlan, request: PlanRequest) -> MigrationPlan | tuple[Reason, ...]:
    """With memory for every process from the start; or, for ranks that exchange GPUs, when all have left."""
    draft = Draft(expected(snapshot), request)
    found = _planned_in(draft)
    if isinstance(found, MigrationPlan):
        return found
    members = tuple(members_named(Draft(draft.snapshot, request)))
    left = communicator_rules.without_memory_of_leavers(draft.snapshot, draft.workers, members)
    return found if left is None else _planned_in(Draft(left, request, reserves_late=True))


def _planned_in(draft: Draft) -> MigrationPlan | tuple[Reason, ...]:
    request = draft.request
    members = _place_members(draft)
    if request.via == RESTART:
        restart_rules.judge_ranks(draft, members)
    if members and not draft.reasons and request.kind != QUIESCE:
        _judge_whole(draft, members)
    if draft.reasons or not members:
        return tuple(draft.reasons)
    return _plan(draft, request.kind, members)


def planned_resume(
    snapshot: NodeSnapshotForPlan, request: PlanRequest, op: Operation, *, leaves_failed: bool = True
) -> MigrationPlan | tuple[Reason, ...]:
    """Return the plan to resume a suspended operation, or every reason why it cannot be resumed.

    `leaves_failed`: on healthy GPUs in place of failing ones, if the request names none and the job fits there.
    """
    draft = Draft(expected(snapshot), request)
    if op.phase != "suspended":
        hint = f"watch it with: hegmctl op {op.id}"
        draft.against(REFUSED, f"operation {op.id} is {op.phase}; only a suspended operation can be resumed", hint)
        return tuple(draft.reasons)
    members: list[Candidate] = []
    ranks = sorted(op.live, key=lambda worker: (sys.maxsize if worker.rank is None else worker.rank, worker.pid))
    places = [(worker.pid, worker.previous_gpu or worker.first_gpu) for worker in ranks]
    of_ranks = [place for place, worker in zip(places, ranks, strict=True) if worker.rank is not None]
    if targets.against_one_gpu(draft, of_ranks):
        return tuple(draft.reasons)
    if not targets.place_ranks(draft, places):
        return tuple(draft.reasons)
    moved = targets.leave_failed_gpus(draft, op.live) if leaves_failed and request.to is None else ()
    for worker in op.live:
        candidate = candidate_of(snapshot, worker.pid)
        if worker.is_absent:
            _place_suspended(draft, worker, None)
            continue
        if candidate is None or (candidate.agent is None and worker.has_agent):
            hint = "wait some seconds for it to connect; if it does not, read the log of the job"
            draft.against(REFUSED, not_connected(worker.pid), hint, pid=worker.pid)
            continue
        members.append(candidate)
        _place_suspended(draft, worker, candidate)
    if draft.workers and not draft.reasons:
        for message, hint, pid in communicator_rules.against_one_gpu(draft, members):
            draft.against(REFUSED, message, hint, pid=pid)
        communicator_rules.judge_company(draft)
        held = {worker.pid: worker.reservations for worker in op.live}
        kept = {planned.pid: held[planned.pid].get(planned.to or "", 0) for planned in draft.workers}
        _judge_memory(draft, memory_needed(draft, kept))
    if draft.reasons:
        at_home = planned_resume(snapshot, request, op, leaves_failed=False) if moved else ()
        if not isinstance(at_home, MigrationPlan):
            return tuple(draft.reasons)
        why = f"the job resumes where it was: {draft.reasons[0].message}"
        return at_home.replace(hazards=(why, *at_home.hazards))
    plan = _plan(draft, RESUME, tuple(members))
    started = [_started_by(op)] if any(worker.is_absent for worker in op.live) else []
    return plan.replace(hazards=(*moved, *plan.hazards, *started))


def _started_by(op: Operation) -> str:
    return f"its `hegmctl run` restarts it if that is still running; otherwise run: {resuming(op)}"


def planned_return(
    snapshot: NodeSnapshotForPlan, suspended: MigrationPlan, to: str
) -> MigrationPlan | tuple[Reason, ...]:
    """The plan for the return of what that plan is going to suspend, to that GPU, or every reason why it cannot be."""
    pids = tuple([worker.pid for worker in suspended.workers])
    draft = Draft(expected(snapshot), PlanRequest(kind=RESUME, pids=pids, to=to))
    there = gpus_of(to)
    places = there if len(there) == len(suspended.workers) else [to] * len(suspended.workers)
    draft.workers += [
        worker.replace(gpu=None, to=place) for worker, place in zip(suspended.workers, places, strict=True)
    ]
    communicator_rules.judge_company(draft)
    _judge_memory(draft, memory_needed(draft, {}))
    members = tuple([candidate for candidate in snapshot.candidates if candidate.pid in pids])
    return tuple(draft.reasons) or _plan(draft, RESUME, members)


# ---- where to --------------------------------------------------------------------------------------------------------


def _place(draft: Draft, candidate: Candidate) -> None:
    request, source = draft.request, place_of(candidate.gpus)
    if request.kind == CHECKPOINT and candidate.agent is None:
        hint = f"start the job with hegmctl run; without an agent, suspend it: hegmctl suspend {candidate.pid}"
        draft.against(REFUSED, f"process {candidate.pid} has no agent, but an image needs one", hint, pid=candidate.pid)
        return
    if request.via == RESTART:
        restart_rules.place(draft, candidate)
        return
    own = targets.judge_source(draft, candidate.pid, source)
    to = None
    if own and request.kind not in (SUSPEND, CHECKPOINT):
        target = request.placement.get(str(candidate.pid), request.to or source)
        to = targets.destination(draft, candidate.pid, source, target)
        if to is None:
            return
        targets.judge_place(draft, to, source, own[0].vendor, own[0].chip)
    if not own:
        return
    if request.keep_context:
        keep_context_rules.place(draft, candidate, own)
    elif own[0].vendor == NVIDIA:
        _place_by_driver(draft, candidate, own, to)
    elif own[0].vendor == SIMULATED and candidate.agent is not None:
        _place_simulated(draft, candidate, to)
    else:
        message = f"{source} is of vendor {own[0].vendor}, which no carrier supports"
        draft.against(
            REFUSED,
            message,
            "use NVIDIA GPUs: hegmd moves running processes between those and between simulated ones",
            gpu=source,
        )


def _leave_in_place(draft: Draft, candidate: Candidate) -> None:
    """Plan a quiesce: the process keeps all its memory, so no GPU needs space and the driver is not used."""
    if candidate.agent is None:
        hint = f"start the job with hegmctl run; without an agent, suspend it: hegmctl suspend {candidate.pid}"
        message = f"process {candidate.pid} has no agent, so hegmd cannot park it at a boundary"
        draft.against(REFUSED, message, hint, pid=candidate.pid)
        return
    own = draft.gpu(candidate.gpus[0])
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=candidate.gpus[0],
            to=candidate.gpus[0],
            size_bytes=candidate.agent.size_bytes or 0,
            carrier="none",
            method=DRIVER if own is not None and own.vendor == NVIDIA else SIMULATED,
        )
    )


def _place_simulated(draft: Draft, candidate: Candidate, to: str | None) -> None:
    agent = candidate.agent
    carrier = draft.request.carrier
    if carrier not in {None, WORKER}:
        message = (
            f"{str(carrier)[:40]} cannot carry process {candidate.pid}: on simulated GPUs the process copies its bytes "
            "itself"
        )
        draft.against(REFUSED, message, f"use --carrier {WORKER}, or omit --carrier", pid=candidate.pid)
        return
    size_bytes = 0 if agent is None else agent.size_bytes or 0
    draft.choices[candidate.pid] = Choice(WORKER, pool_bytes=size_bytes)
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=candidate.gpus[0],
            to=to,
            size_bytes=size_bytes,
            left_alone_bytes=0 if agent is None else sum(item.size_bytes for item in agent.left_alone),
            carrier="none" if to == candidate.gpus[0] else WORKER,
            communicators=communicator_rules.mechanism(candidate, draft.request.kind),
        )
    )


def _place_by_driver(draft: Draft, candidate: Candidate, own: tuple[GpuMemory, ...], to: str | None) -> None:
    """A process whose context only NVIDIA's driver can checkpoint; the fastest possible carrier moves its storages."""
    source = place_of(candidate.gpus)
    stays = to == source
    for gpu in () if stays else own:
        for code, message, hint in driver_rules.against_leaving(draft.snapshot, candidate, gpu):
            way_out = keep_context_rules.offered(draft, candidate, hint)
            draft.against(code, message, way_out, pid=candidate.pid, gpu=gpu.id)
        for reason in () if to is None else driver_rules.against_moving(gpu):
            draft.against(*reason, pid=candidate.pid, gpu=gpu.id)
    there = [free for name in gpus_of(to) if (free := left_by_others(draft, name)) is not None]
    there = there if len(there) == len(own) else []  # a reason against that is in the draft
    choice = carrier_choice.choose_as_asked(draft.snapshot, draft.request, candidate, own, there)
    if isinstance(choice, Refusal):
        draft.against(REFUSED, choice.message, choice.hint, pid=candidate.pid)
        return
    vouched_bytes = 0 if candidate.agent is None else candidate.agent.size_bytes or 0
    by_driver = choice.carrier == BY_DRIVER
    driver_bytes = driver_rules.rest_of(candidate) + (vouched_bytes if by_driver and candidate.agent is not None else 0)
    stacks_bytes = 0 if by_driver else driver_rules.stacks_of(candidate)
    devices = () if by_driver or len(candidate.gpus) < 2 else driver_rules.devices_of(draft.snapshot, candidate)
    driver_bytes_by_gpu = driver_rules.shares_of(candidate, devices)
    driver_bytes = sum(driver_bytes_by_gpu) if driver_bytes_by_gpu else driver_bytes
    storage_bytes_by_gpu = driver_rules.storage_bytes_with_cache(candidate, devices, own) if devices else ()
    agent_overhead_bytes = 0 if by_driver else driver_rules.agent_overhead_of(candidate, own[0])
    if devices:  # all of one chip, so each context keeps the same for stacks
        each_bytes, stacks_bytes = stacks_bytes // len(devices), 0
        driver_bytes_by_gpu = tuple([max(0, driver_bytes - each_bytes) for driver_bytes in driver_bytes_by_gpu])
        driver_bytes = sum(driver_bytes_by_gpu)
        storage_bytes_by_gpu = tuple([size_bytes + each_bytes for size_bytes in storage_bytes_by_gpu])
        agent_overhead_bytes = sum(storage_bytes_by_gpu) - sum(device.size_bytes for device in devices)
    for reason in () if stays else driver_rules.against_memory(draft.snapshot, candidate, driver_bytes):
        draft.against(*reason, pid=candidate.pid)
    draft.choices[candidate.pid] = choice
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=source,
            to=to,
            size_bytes=candidate.vram_bytes or 0 if by_driver else vouched_bytes,
            carrier="none" if stays else choice.carrier,
            method=DRIVER,
            driver_bytes=max(0, driver_bytes - stacks_bytes),
            agent_overhead_bytes=stacks_bytes + agent_overhead_bytes,
            driver_bytes_by_gpu=driver_bytes_by_gpu,
            storage_bytes_by_gpu=storage_bytes_by_gpu,
            overlap_bytes=choice.overlap_bytes,
            own_bytes=0 if stays else carrier_choice.own_bytes(candidate, choice.carrier),
            communicators=communicator_rules.mechanism(candidate, draft.request.kind),
        )
    )


def _place_suspended(draft: Draft, worker: JobProcess, candidate: Candidate | None) -> None:
    to = _place_resumed(draft, worker)
    if to is None or keep_context_rules.cannot_resume(draft, worker, to):
        return
    target = draft.gpu(next(iter(gpus_of(to)), None))
    stays = to if worker.keeps_context else None  # then the driver restores nothing there
    targets.judge_place(
        draft, to, stays, target.vendor if target else SIMULATED, None if worker.restarts else worker.chip
    )
    left = draft.gpu(next(iter(gpus_of(worker.previous_gpu)), None))
    for reason in driver_rules.against_moving(left) if left is not None and worker.previous_gpu != to else ():
        if worker.method == DRIVER:
            draft.against(*reason, pid=worker.pid, gpu=to)
    on = [gpu for name in gpus_of(to) if (gpu := draft.gpu(name)) is not None]
    contexts = tuple([gpu.context_bytes if carrier_choice.is_helped(worker.carrier) else 0 for gpu in on])
    context_bytes = max(contexts, default=0)
    by_gpu = contexts if worker.storage_bytes_by_gpu else ()
    draft.choices[worker.pid] = Choice(worker.carrier, target_bytes=context_bytes, target_bytes_by_gpu=by_gpu)
    draft.workers.append(
        PlannedProcess(
            pid=worker.pid,
            name=worker.name if candidate is None else named(candidate),
            gpu=worker.gpu if to == worker.gpu else None,
            to=to,
            size_bytes=worker.carried_bytes,
            carrier=worker.carrier,
            method=worker.method,
            driver_bytes=worker.driver_bytes,
            agent_overhead_bytes=worker.agent_overhead_bytes,
            driver_bytes_by_gpu=worker.driver_bytes_by_gpu,
            storage_bytes_by_gpu=worker.storage_bytes_by_gpu,
            overlap_bytes=worker.overlap_bytes,
            stays_bytes=worker.stays_bytes,
            communicators=worker.communicators,
        )
    )


def _place_resumed(draft: Draft, worker: JobProcess) -> str | None:
    """Return the target of a suspended process; None, with the reason in the draft, if it is unknown."""
    target = draft.request.placement.get(str(worker.pid), draft.request.to)
    if worker.gpu_unknown:
        to = targets.place_anywhere(draft, worker)
    elif worker.gpu is not None and worker.method == DRIVER and not worker.is_parked and not worker.offloaded:
        to = worker.gpu  # it was never off
    elif target is not None:
        return targets.destination(
            draft, worker.pid, worker.previous_gpu or worker.first_gpu, target, anew=worker.restarts
        )
    else:
        to = worker.kept_gpu or worker.first_gpu
    if to is None:
        hint = "name one with --to; see hegmctl gpus"
        draft.against(REFUSED, f"hegmd does not know on which GPU process {worker.pid} was", hint, pid=worker.pid)
    return to


# ---- whether it fits -------------------------------------------------------------------------------------------------


def _judge_whole(draft: Draft, members: tuple[Candidate, ...]) -> None:
    moving = draft.moving
    if not moving:
        where = listed(tuple(dict.fromkeys(str(worker.to) for worker in draft.workers)))
        pids = listed(tuple(str(worker.pid) for worker in draft.workers))
        who = f"process {pids} is" if len(draft.workers) == 1 else f"processes {pids} are"
        draft.against(REFUSED, f"{who} on {where} already", "name another GPU with --to; see hegmctl gpus")
        return
    communicator_rules.judge_company(draft)
    _judge_memory(draft, memory_needed(draft, {}))
    pooled_bytes = sum(draft.choices[worker.pid].pool_bytes for worker in moving)
    _judge_pool(draft, pooled_bytes, _pool_needed(draft))
    for worker in moving:
        if worker.method == DRIVER:
            continue  # the driver carries what no carrier takes
        whole = worker.size_bytes + worker.left_alone_bytes
        if draft.request.kind == SUSPEND and worker.left_alone_bytes * 100 > whole * MAX_LEFT_PERCENT:
            candidate = candidate_of(draft.snapshot, worker.pid)
            why = estimate.left_alone(candidate) if candidate else ""
            message = (
                f"{gigabytes(worker.left_alone_bytes)} of {gigabytes(whole)} of process {worker.pid} would stay "
                "on the GPU"
            )
            draft.against(REFUSED, message, f"the reasons: {why}", pid=worker.pid)


def _judge_memory(draft: Draft, needed: Mapping[str, int]) -> None:
    for name, size_bytes in needed.items():
        gpu = draft.gpu(name)
        if gpu is None:
            continue
        if gpu.free_bytes is None:
            draft.against(
                REFUSED, f"hegmd does not know how much memory is free on {name}", "see hegmctl doctor", gpu=name
            )
        elif gpu.free_bytes - gpu.leased_bytes < size_bytes:
            kept = f", and {gigabytes(gpu.leased_bytes)} of it kept for leases and jobs (hegmctl queue)"
            leased = kept if gpu.leased_bytes else ""
            message = f"{name} has {gigabytes(gpu.free_bytes)} free{leased}, but {gigabytes(size_bytes)} are needed"
            left = {worker.gpu for worker in draft.workers if worker.to == name}
            others = [
                other.id
                for other in draft.snapshot.gpus
                if other.state == "ok"
                and other.chip == gpu.chip
                and (other.free_bytes or 0) - other.leased_bytes >= size_bytes
                if other.id not in left
            ]
            elsewhere = f"choose a GPU with enough free memory: {listed(tuple(others))}"
            hint = elsewhere if others else "suspend or migrate a job that uses it"
            hint += "; or add --queue, to wait for room" if draft.request.may_queue else ""
            draft.against(REFUSED, message, hint, gpu=name)


def _pool_needed(draft: Draft) -> int:
    """Return how many bytes the pool will need: one segment for each process with bytes for it, rounded up."""
    sizes = [draft.choices[worker.pid].pool_bytes for worker in draft.moving]
    return sum(whole_size(size_bytes) for size_bytes in sizes if size_bytes)


def _judge_pool(draft: Draft, carried_bytes: int, needed_bytes: int) -> None:
    pool = draft.snapshot.pool
    needed = f"{gigabytes(needed_bytes)} of the pool are needed to move {gigabytes(carried_bytes)}"
    if needed_bytes > pool.budget_bytes:
        message = f"{needed}, but its budget is {gigabytes(pool.budget_bytes)}"
        draft.against(REFUSED, message, "raise pool.budget_bytes in the configuration, if the node has the memory")
    elif needed_bytes > pool.free_bytes:
        message = f"{needed}, but {gigabytes(pool.free_bytes)} are free"
        draft.against(BUSY, message, "resume a suspended job, or wait for an operation that uses it; see hegmctl ops")


# ---- the plan --------------------------------------------------------------------------------------------------------


def _way(draft: Draft, members: tuple[Candidate, ...]) -> str:
    if any(worker.method == RESTART for worker in draft.moving):
        return RESTART
    return "agent" if any(candidate.agent is not None for candidate in members) else DRIVER


def _plan(draft: Draft, kind: str, members: tuple[Candidate, ...]) -> MigrationPlan:
    moving = draft.moving
    needed = memory_needed(draft, {})
    world = max((c.agent.world_size or 1 for c in members if c.agent), default=1)
    free = {gpu.id: gpu.free_bytes for gpu in draft.snapshot.gpus if gpu.id in needed and gpu.free_bytes is not None}
    are_ranks = any(worker.communicators for worker in draft.workers)
    is_restart = any(worker.method == RESTART for worker in moving)
    waits_for_ranks = world > 1 and (is_restart or not communicator_rules.are_independent(members))
    keep_notes = tuple(keep_context_rules.notes(draft, kind))
    late = draft.reserves_late
    costs = tuple(communicator_rules.costs(draft, members, kind)) if are_ranks else ()
    return MigrationPlan(
        kind=kind,
        way=_way(draft, members),
        workers=tuple(draft.workers),
        size_bytes=sum(worker.size_bytes for worker in moving),
        reservation_bytes=needed,
        gpu_free_bytes=free,
        pool_needed_bytes=0 if kind == RESUME else _pool_needed(draft),
        pool_free_bytes=draft.snapshot.pool.free_bytes,
        pool_ready_bytes=draft.snapshot.pool.ready_bytes,
        estimate_s=estimate.estimate_s(moving, kind, draft.snapshot.rates, draft.snapshot)
        + (0.0 if keep_notes else communicator_rules.seconds(members, kind)),
        is_distributed=waits_for_ranks or are_ranks or restart_rules.are_launched(draft, members),
        hazards=(*keep_notes, *estimate.hazards(draft, members, world), *costs),
        steps=estimate.steps(moving, kind),
        reserves_late=late,
        respawn=draft.request.respawn if is_restart else None,
    )
