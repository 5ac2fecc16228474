"""What an operation would do, or why it cannot: from one look at the node and what was asked to a Plan or Reasons.

Owns the questions that are asked before anything is done, and the words of the answers. Pure: `--dry-run` and the real
thing run the same code on the same snapshot, so they say the same. It promises nothing: room and pool are only looked
at here and taken by the machine, which turns back when somebody was quicker. Who may ask is decided elsewhere, before.

All reasons are given at once, each with the next step, so that nobody has to find them out one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from hegmd.errors import BUSY, NOT_FOUND, REFUSED, Code
from hegmd.migration.candidates import Candidate, GpuRoom, Plan, Request, Snapshot
from hegmd.migration.forecast import expected
from hegmd.migration.operation import MIGRATE, RESUME, SUSPEND, Operation, Worker
from hegmd.migration.wording import gigabytes, listed, named
from hegmd.pieces import whole_size
from hegmd.protocol.operations import PlannedProcess, Reason

SIMULATED = "simulated"
# A suspend that leaves more than this share of the bytes where they are would not be worth the name.
MOST_LEFT_PERCENT = 50

_STEPS = {
    MIGRATE: "take room and pool; stop at a boundary; take the bytes out; change GPU; put them back; see a boundary",
    SUSPEND: "take pool; stop at a boundary; take the bytes out; give the GPU's room back",
    RESUME: "take room; put the bytes back; let it go on; see a boundary; give the pool back",
}


@dataclass(slots=True)
class _Draft:
    """What is being planned, and what was found against it so far."""

    snapshot: Snapshot
    request: Request
    workers: list[PlannedProcess] = field(default_factory=list[PlannedProcess])
    reasons: list[Reason] = field(default_factory=list[Reason])

    def against(self, code: Code, message: str, hint: str, *, pid: int | None = None, gpu: str | None = None) -> None:
        reason = Reason(code=code.name, message=message, hint=hint, pid=pid, gpu=gpu)
        if reason not in self.reasons:
            self.reasons.append(reason)

    def gpu(self, name: str | None) -> GpuRoom | None:
        return next((gpu for gpu in self.snapshot.gpus if gpu.id == name), None)


def planned(snapshot: Snapshot, request: Request) -> Plan | tuple[Reason, ...]:
    """The plan for a migration or a suspension, or every reason why there is none."""
    draft = _Draft(expected(snapshot), request)
    members = tuple(_members(draft))
    for candidate in members:
        if _can_be_stopped(draft, candidate):
            _place(draft, candidate)
    if members and not draft.reasons:
        _judge_whole(draft, members)
    if draft.reasons or not members:
        return tuple(draft.reasons)
    return _plan(draft, request.kind, members)


def planned_resume(snapshot: Snapshot, request: Request, op: Operation) -> Plan | tuple[Reason, ...]:
    """The plan for going on with a suspended operation, or every reason why it cannot."""
    draft = _Draft(expected(snapshot), request)
    if op.phase != "suspended":
        hint = f"watch it with: hegmctl op {op.id}"
        draft.against(REFUSED, f"operation {op.id} is {op.phase}; only a suspended one can be resumed", hint)
        return tuple(draft.reasons)
    members: list[Candidate] = []
    for worker in op.live:
        candidate = candidate_of(snapshot, worker.pid)
        if candidate is None or candidate.agent is None:
            hint = "it connects by itself within seconds; if it does not, see the log of the job"
            draft.against(REFUSED, f"the agent of process {worker.pid} is not connected", hint, pid=worker.pid)
            continue
        members.append(candidate)
        _place_suspended(draft, worker, candidate)
    if members and not draft.reasons:
        held = {worker.pid: worker.rooms for worker in op.live}
        kept = {planned.pid: held[planned.pid].get(planned.to or "", 0) for planned in draft.workers}
        _judge_room(draft, _room_needed(draft, kept))
    return tuple(draft.reasons) or _plan(draft, RESUME, tuple(members))


def planned_return(snapshot: Snapshot, suspended: Plan, to: str) -> Plan | tuple[Reason, ...]:
    """The plan for the return of what that plan is going to suspend, to that GPU, or every reason why it cannot be."""
    pids = tuple([worker.pid for worker in suspended.workers])
    draft = _Draft(expected(snapshot), Request(kind=RESUME, pids=pids, to=to))
    draft.workers += [worker.replace(gpu=None, to=to) for worker in suspended.workers]
    _judge_room(draft, _room_needed(draft, {}))
    members = tuple([candidate for candidate in snapshot.candidates if candidate.pid in pids])
    return tuple(draft.reasons) or _plan(draft, RESUME, members)


# ---- who moves -------------------------------------------------------------------------------------------------------


def candidate_of(snapshot: Snapshot, pid: int) -> Candidate | None:
    """The process of that pid."""
    return next((candidate for candidate in snapshot.candidates if candidate.pid == pid), None)


def members_of(snapshot: Snapshot, candidate: Candidate) -> tuple[Candidate, ...]:
    """The processes of its job, itself among them."""
    return tuple([c for c in snapshot.candidates if c.pid == candidate.pid or _is_same_job(c, candidate)])


def _members(draft: _Draft) -> Iterator[Candidate]:
    """The processes that were named, and with each the others of its job: a job moves as one."""
    seen: set[int] = set()
    for pid in draft.request.pids:
        candidate = candidate_of(draft.snapshot, pid)
        if candidate is None:
            draft.against(NOT_FOUND, f"process {pid} is on no GPU", "see who is with: hegmctl ps", pid=pid)
            continue
        for member in members_of(draft.snapshot, candidate):
            if member.pid not in seen:
                seen.add(member.pid)
                yield member


def _is_same_job(one: Candidate, other: Candidate) -> bool:
    return one.job is not None and one.job == other.job and one.uid == other.uid


def _can_be_stopped(draft: _Draft, candidate: Candidate) -> bool:
    before = len(draft.reasons)
    who = f"process {candidate.pid}"
    for op in draft.snapshot.running:
        if any(worker.pid == candidate.pid for worker in op.live):
            next_step = f"hegmctl resume {candidate.pid}" if op.phase == "suspended" else f"hegmctl op {op.id}"
            message = f"operation {op.id} ({op.kind}, {op.phase}) has {who} already"
            draft.against(BUSY, message, f"see: {next_step}", pid=candidate.pid)
            return False  # where it is and what it holds is that operation's doing, and no reason of its own
    if candidate.agent is not None and candidate.agent.rank is not None and not candidate.gpus:
        # It is among the candidates for its job's sake: the others must not leave without it.
        hint = "its ranks move together: ask again when all of them train"
        message = f"rank {candidate.agent.rank} ({who}) has not said yet what it holds"
        draft.against(REFUSED, message, hint, pid=candidate.pid)
        return False
    if candidate.agent is None:
        hint = "start the job with `hegmctl run`; a process without an agent cannot be stopped between two batches"
        draft.against(REFUSED, f"{who} has no agent", hint, pid=candidate.pid)
    elif candidate.agent.size_bytes is None:
        hint = "it has not trained yet, or its agent is just connecting; ask again in a moment"
        draft.against(REFUSED, f"the agent of {who} has not said yet what it holds", hint, pid=candidate.pid)
    if not candidate.gpus and candidate.agent is not None and candidate.agent.size_bytes == 0:
        hint = "a job can be moved once it has storages of PyTorch; hegmctl ps shows who is on the GPUs"
        draft.against(REFUSED, f"{who} holds nothing that could be moved", hint, pid=candidate.pid)
    elif len(candidate.gpus) != 1:
        where = f"on {listed(candidate.gpus)}" if candidate.gpus else "on no GPU that is known"
        hint = "only processes on one GPU can be moved"
        draft.against(REFUSED, f"{who} is {where}", hint, pid=candidate.pid)
    return len(draft.reasons) == before


# ---- where to --------------------------------------------------------------------------------------------------------


def _place(draft: _Draft, candidate: Candidate) -> None:
    request, source = draft.request, candidate.gpus[0]
    to = None if request.kind == SUSPEND else request.placement.get(str(candidate.pid), request.to or source)
    own = draft.gpu(source)
    if own is None or own.state != "ok":
        state = "unknown" if own is None else own.state
        hint = "nothing can be fetched from a GPU that does not answer; see hegmctl doctor"
        draft.against(REFUSED, f"{source} is {state}", hint, gpu=source)
        return
    if own.vendor != SIMULATED:
        hint = "this version moves processes between simulated GPUs only"
        draft.against(REFUSED, f"{source} is of vendor {own.vendor}, which no carrier serves yet", hint, gpu=source)
    if to is not None:
        _judge_target(draft, to, own.vendor, own.chip, stays=to == source)
    agent = candidate.agent
    assert agent is not None  # noqa: S101 - `_can_be_stopped` has seen it; for the type checkers
    left = sum(item.size_bytes for item in agent.left_alone)
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=source,
            to=to,
            size_bytes=agent.size_bytes or 0,
            left_alone_bytes=left,
            carrier="none" if to == source else "worker",
        )
    )


def _judge_target(draft: _Draft, to: str, vendor: str, chip: str | None, *, stays: bool) -> None:
    target = draft.gpu(to)
    if target is None:
        here = listed(tuple(gpu.id for gpu in draft.snapshot.gpus)) or "none"
        draft.against(NOT_FOUND, f"there is no GPU {to}", f"the GPUs here: {here}", gpu=to)
    elif stays:
        return
    elif target.state != "ok":
        draft.against(REFUSED, f"{to} is {target.state}", "choose another; see hegmctl gpus", gpu=to)
    elif target.mig or target.mps:
        how = "cut into MIG instances" if target.mig else "shared through MPS"
        draft.against(REFUSED, f"{to} is {how}", "choose a GPU that is whole; see hegmctl gpus", gpu=to)
    elif target.vendor != vendor or (chip is not None and target.chip != chip):
        hint = "a living process can only go to an equal chip; see hegmctl gpus"
        draft.against(REFUSED, f"{to} has another chip: {target.chip or 'unknown'}, not {chip}", hint, gpu=to)


def _place_suspended(draft: _Draft, worker: Worker, candidate: Candidate) -> None:
    request = draft.request
    to = request.placement.get(str(worker.pid), request.to or worker.keeps or worker.was_on)
    if to is None:
        hint = "name one with --to; see hegmctl gpus"
        draft.against(REFUSED, f"it is not known on which GPU process {worker.pid} was", hint, pid=worker.pid)
        return
    target = draft.gpu(to)
    _judge_target(draft, to, target.vendor if target else SIMULATED, worker.chip, stays=False)
    draft.workers.append(
        PlannedProcess(
            pid=worker.pid, name=named(candidate), gpu=None, to=to, size_bytes=worker.size_bytes, carrier="worker"
        )
    )


# ---- whether it fits -------------------------------------------------------------------------------------------------


def _judge_whole(draft: _Draft, members: tuple[Candidate, ...]) -> None:
    moving = [worker for worker in draft.workers if worker.to != worker.gpu]
    if not moving:
        where = listed(tuple(dict.fromkeys(str(worker.to) for worker in draft.workers)))
        pids = listed(tuple(str(worker.pid) for worker in draft.workers))
        who = f"process {pids} is" if len(draft.workers) == 1 else f"processes {pids} are"
        draft.against(REFUSED, f"{who} on {where} already", "name another GPU with --to; see hegmctl gpus")
        return
    _judge_room(draft, _room_needed(draft, {}))
    _judge_pool(draft, sum(worker.size_bytes for worker in moving), _pool_needed(moving))
    for worker in moving:
        whole = worker.size_bytes + worker.left_alone_bytes
        if draft.request.kind == SUSPEND and worker.left_alone_bytes * 100 > whole * MOST_LEFT_PERCENT:
            candidate = candidate_of(draft.snapshot, worker.pid)
            why = _left_alone(candidate) if candidate else ""
            message = f"of {gigabytes(whole)} of process {worker.pid}, {gigabytes(worker.left_alone_bytes)} would stay"
            draft.against(REFUSED, message, f"they are left alone because: {why}", pid=worker.pid)


def _room_needed(draft: _Draft, held: Mapping[int, int]) -> dict[str, int]:
    needed: dict[str, int] = {}
    for worker in draft.workers:
        if worker.to is not None and worker.to != worker.gpu:
            needed[worker.to] = needed.get(worker.to, 0) + worker.size_bytes - held.get(worker.pid, 0)
    return needed


def _judge_room(draft: _Draft, needed: Mapping[str, int]) -> None:
    for name, size_bytes in needed.items():
        gpu = draft.gpu(name)
        if gpu is None:
            continue
        if gpu.free_bytes is None:
            draft.against(REFUSED, f"how much is free on {name} is not known", "see hegmctl doctor", gpu=name)
        elif gpu.free_bytes < size_bytes:
            message = f"{name} has {gigabytes(gpu.free_bytes)} free and {gigabytes(size_bytes)} are needed"
            left = {worker.gpu for worker in draft.workers if worker.to == name}
            others = [
                other.id
                for other in draft.snapshot.gpus
                if other.state == "ok" and other.chip == gpu.chip and (other.free_bytes or 0) >= size_bytes
                if other.id not in left
            ]
            hint = f"there is room on {listed(tuple(others))}" if others else "suspend or move something off it first"
            draft.against(REFUSED, message, hint, gpu=name)


def _pool_needed(moving: Iterable[PlannedProcess]) -> int:
    """What the pool will be asked for: a piece for each that has any bytes, as large as pieces are made."""
    return sum(whole_size(worker.size_bytes) for worker in moving if worker.size_bytes)


def _judge_pool(draft: _Draft, carried_bytes: int, needed_bytes: int) -> None:
    pool = draft.snapshot.pool
    needed = f"{gigabytes(needed_bytes)} of the pool are needed for the {gigabytes(carried_bytes)} to be carried"
    if needed_bytes > pool.budget_bytes:
        message = f"{needed}, over its budget of {gigabytes(pool.budget_bytes)}"
        draft.against(REFUSED, message, "raise pool.budget_bytes in the configuration, if the node has the memory")
    elif needed_bytes > pool.free_bytes:
        message = f"{needed}, and {gigabytes(pool.free_bytes)} are free"
        draft.against(BUSY, message, "wait for what is in it, or resume what is suspended; see hegmctl ops")


# ---- the plan --------------------------------------------------------------------------------------------------------


def _plan(draft: _Draft, kind: str, members: tuple[Candidate, ...]) -> Plan:
    moving = [worker for worker in draft.workers if worker.to != worker.gpu]
    size_bytes = sum(worker.size_bytes for worker in moving)
    needed = _room_needed(draft, {})
    rates = draft.snapshot.rates
    out_s = size_bytes / rates.out_bytes_per_s if kind != RESUME else 0.0
    in_s = size_bytes / rates.in_bytes_per_s if kind != SUSPEND else 0.0
    world = max((c.agent.world_size or 1 for c in members if c.agent), default=1)
    free = {gpu.id: gpu.free_bytes for gpu in draft.snapshot.gpus if gpu.id in needed and gpu.free_bytes is not None}
    return Plan(
        kind=kind,
        way="agent",
        workers=tuple(draft.workers),
        size_bytes=size_bytes,
        room_needed_bytes=needed,
        room_free_bytes=free,
        pool_needed_bytes=0 if kind == RESUME else _pool_needed(moving),
        pool_free_bytes=draft.snapshot.pool.free_bytes,
        estimate_s=out_s + in_s + rates.fixed_s,
        lockstep=world > 1,
        hazards=tuple(_hazards(members, world)),
        steps=tuple(_STEPS[kind].split("; ")),
    )


def _hazards(members: tuple[Candidate, ...], world: int) -> Iterator[str]:
    for candidate in members:
        if candidate.agent is not None and candidate.agent.left_alone:
            yield f"process {candidate.pid} keeps what its agent leaves alone: {_left_alone(candidate)}"
    ranks = [c for c in members if c.agent and c.agent.rank is not None]
    if world > len(ranks) and world > 1:
        yield f"{len(ranks)} of the job's {world} ranks are here; the others wait for them meanwhile"


def _left_alone(candidate: Candidate) -> str:
    if candidate.agent is None:
        return ""
    items = candidate.agent.left_alone
    return "; ".join(f"{item.storages} storages, {gigabytes(item.size_bytes)}: {item.why}" for item in items)
