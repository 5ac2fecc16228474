"""Plans of several operations in a row: a GPU that is emptied, and two jobs that exchange GPUs.

Owns the steps, their order, and which run concurrently. Each step is planned on the node as the steps before leave it,
so a dry run of the last step counts with the first. planner.py decides whether a single step is possible. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from hegmd.errors import REFUSED
from hegmd.migration.machine.operation import MIGRATE, SUSPEND
from hegmd.migration.machine.wording import listed
from hegmd.migration.model import Candidate, MigrationPlan, NodeSnapshotForPlan, PlanRequest, place_of_all
from hegmd.migration.plan.draft import candidate_of
from hegmd.migration.plan.forecast import after
from hegmd.migration.plan.members import in_rank_order, members_of
from hegmd.migration.plan.planner import planned, planned_return
from hegmd.protocol.operations import PEER, WORKER, Reason
from hegmd.protocol.snapshots import HEALTHY

_ON_ONE_EACH = "use hegmctl migrate: swap supports jobs on one GPU each, or of as many ranks on GPUs of their own"

Outcome = tuple[MigrationPlan, ...] | tuple[Reason, ...]


# ---- a GPU that is emptied -------------------------------------------------------------------------------------------


def occupants(snapshot: NodeSnapshotForPlan, gpu: str) -> Iterator[int]:
    """Return one process of each job on that GPU."""
    visited: set[int] = set()
    for candidate in snapshot.candidates:
        if gpu in candidate.gpus and candidate.pid not in visited:
            visited.update(member.pid for member in members_of(snapshot, candidate))
            yield candidate.pid


def departure(
    snapshot: NodeSnapshotForPlan, pid: int, gpu: str, to: Sequence[str]
) -> MigrationPlan | tuple[Reason, ...]:
    """Return the plan that moves a job off that GPU, to the first possible target; its other processes stay.

    Without targets, it tries the other healthy GPUs, the one with most free memory first. If all refuse, it returns the
    reasons of each.
    """
    candidate = candidate_of(snapshot, pid)
    members = () if candidate is None else members_of(snapshot, candidate)
    leaving = {member.pid: _leave(member, gpu) for member in members if gpu in member.gpus} or {pid: ""}
    reasons: dict[Reason, None] = {}
    for target in to or _others(snapshot, gpu):
        placement = {str(member): leave + target for member, leave in leaving.items()}
        request = PlanRequest(kind=MIGRATE, pids=(pid,), placement=placement)
        found = planned(snapshot, request)
        if isinstance(found, MigrationPlan):
            return found
        reasons.update(dict.fromkeys(found))
    if not reasons:
        hint = f"suspend what runs on it: hegmctl suspend {pid}"
        message = f"there is no other healthy GPU than {gpu}"
        return (Reason(code=REFUSED.name, message=message, hint=hint, pid=pid),)
    return tuple(reasons)


def _leave(member: Candidate, gpu: str) -> str:
    """Return the prefix of its target: a process on several GPUs moves only its part on `gpu`."""
    return f"{gpu}=" if len(member.gpus) > 1 else ""


def planned_drain(
    snapshot: NodeSnapshotForPlan, gpu: str, to: Sequence[str]
) -> tuple[tuple[MigrationPlan, ...], tuple[tuple[Reason, ...], ...]]:
    """The plans that empty a GPU, one for each job, and for each job that has to stay, why."""
    plans: list[MigrationPlan] = []
    stays: list[tuple[Reason, ...]] = []
    for pid in tuple(occupants(snapshot, gpu)):
        found = departure(snapshot, pid, gpu, to)
        if isinstance(found, MigrationPlan):
            plans.append(found)
            snapshot = after(snapshot, found)
        else:
            stays.append(found)
    return tuple(plans), tuple(stays)


def _others(snapshot: NodeSnapshotForPlan, gpu: str) -> list[str]:
    fit = [other for other in snapshot.gpus if other.state == "ok" and other.condition == HEALTHY]
    others = [other for other in fit if other.id != gpu]
    return [other.id for other in sorted(others, key=lambda other: -(other.free_bytes or 0))]


# ---- two jobs that change places -------------------------------------------------------------------------------------


def planned_swap(snapshot: NodeSnapshotForPlan, first: int, second: int) -> Outcome:
    """Return the steps by which two jobs, or two processes of one, change places, or every reason why they cannot.

    If one fits beside the other, these are two moves. If not, both go to the pool at the same time and return to the
    other GPU, each over its own GPU's link. If the pool cannot hold both, the first alone waits there. The second goes
    straight from GPU to GPU if that is faster than the pool. The same applies if one fits beside the other but without
    a context for the helper: copies by the process itself take several times as long.
    """
    if first == second:
        return (_against(f"process {first} cannot change places with itself", "name two processes; see hegmctl ps"),)
    one, other = candidate_of(snapshot, first), candidate_of(snapshot, second)
    if one is None or other is None or len(one.gpus) != 1 or len(other.gpus) != 1:
        return _not_to_be_moved(snapshot, (first, second))
    there, here = one.gpus[0], other.gpus[0]
    if there == here:
        hint = f"move one of them: hegmctl migrate {first} --to GPU; see hegmctl gpus"
        return (_against(f"{first} and {second} are both on {here}", hint),)
    if other in members_of(snapshot, one):  # which moves as one: two steps would each move all of it
        placement = {str(first): here, str(second): there}
        found = planned(snapshot, PlanRequest(kind=MIGRATE, pids=(first, second), placement=placement))
        return (found,) if isinstance(found, MigrationPlan) else found
    jobs = [in_rank_order(members_of(snapshot, candidate)) for candidate in (one, other)]
    gpus = [tuple(dict.fromkeys(gpu for member in job for gpu in member.gpus)) for job in jobs]
    for candidate, own in zip((one, other), gpus, strict=True):
        if len(own) > 1 and not _are_alike(jobs, gpus):
            message = f"the job of process {candidate.pid} is on {listed(own)}"
            return (_against(message, _ON_ONE_EACH, candidate.pid),)
    places = [place_of_all([member.gpus[0] for member in job]) or "" for job in jobs]
    return _exchange(snapshot, (first, places[1]), (second, places[0]))


def _are_alike(jobs: Sequence[tuple[Candidate, ...]], gpus: Sequence[tuple[str, ...]]) -> bool:
    """Return True if each rank of one job takes the place of one of the other, on a GPU that they do not share."""
    on_one_each = all(len(member.gpus) == 1 for job in jobs for member in job)
    return on_one_each and len(jobs[0]) == len(jobs[1]) and set(gpus[0]).isdisjoint(gpus[1])


def _exchange(snapshot: NodeSnapshotForPlan, first: tuple[int, str], second: tuple[int, str]) -> Outcome:
    refused: tuple[Reason, ...] = ()
    by_hand: Outcome = ()
    for order in ((first, second), (second, first)):
        found = _in_a_row(snapshot, order)
        if all(isinstance(step, MigrationPlan) for step in found):
            if not _is_carried_by(WORKER, found):
                return found
            by_hand = by_hand or found
        refused = refused or tuple(step for step in found if isinstance(step, Reason))
    by_one = _past_one_in_the_pool(snapshot, first, second)
    if _is_carried_by(PEER, [step for step in by_one if isinstance(step, MigrationPlan) and step.kind == MIGRATE]):
        return by_one
    by_both = _past_both_in_the_pool(snapshot, first, second)
    is_open = all(isinstance(step, MigrationPlan) for step in by_both)
    if by_hand and (not is_open or _is_carried_by(WORKER, by_both)):
        return by_hand
    return by_both if is_open else by_one


def _past_one_in_the_pool(snapshot: NodeSnapshotForPlan, first: tuple[int, str], second: tuple[int, str]) -> Outcome:
    (pid, here), (other, there) = first, second
    leaves = planned(snapshot, PlanRequest(kind=SUSPEND, pids=(pid,)))
    if not isinstance(leaves, MigrationPlan):
        return leaves
    empty = after(snapshot, leaves)
    moves = planned(empty, PlanRequest(kind=MIGRATE, pids=(other,), to=there))
    if not isinstance(moves, MigrationPlan):
        return moves
    comes = planned_return(after(empty, moves), leaves, here)
    return (leaves, moves, comes) if isinstance(comes, MigrationPlan) else comes


def _past_both_in_the_pool(snapshot: NodeSnapshotForPlan, first: tuple[int, str], second: tuple[int, str]) -> Outcome:
    leave: list[MigrationPlan] = []
    for pid, _ in (first, second):
        found = planned(snapshot, PlanRequest(kind=SUSPEND, pids=(pid,)))
        if not isinstance(found, MigrationPlan):
            return found
        leave.append(found)
        snapshot = after(snapshot, found)
    come: list[MigrationPlan] = []
    for left, (_, to) in zip(leave, (first, second), strict=True):
        found = planned_return(snapshot, left, to)
        if not isinstance(found, MigrationPlan):
            return found
        come.append(found)
        snapshot = after(snapshot, found)
    return (*leave, *come)


def _is_carried_by(carrier: str, steps: Iterable[MigrationPlan | Reason]) -> bool:
    """Return True if any of those has its bytes carried so in one of these steps."""
    return any(
        worker.carrier == carrier for step in steps if isinstance(step, MigrationPlan) for worker in step.workers
    )


def at_once(steps: Sequence[MigrationPlan]) -> Iterator[tuple[MigrationPlan, ...]]:
    """Yield the steps of a swap, in order. Consecutive steps to or from the pool run concurrently."""
    for kind, alike in groupby(steps, key=lambda step: step.kind):
        if kind == MIGRATE:
            yield from ((step,) for step in alike)
        else:
            yield tuple(alike)


def _in_a_row(snapshot: NodeSnapshotForPlan, moves: Sequence[tuple[int, str]]) -> Outcome:
    plans: list[MigrationPlan] = []
    for pid, to in moves:
        found = planned(snapshot, PlanRequest(kind=MIGRATE, pids=(pid,), to=to))
        if not isinstance(found, MigrationPlan):
            return found
        plans.append(found)
        snapshot = after(snapshot, found)
    return tuple(plans)


def _not_to_be_moved(snapshot: NodeSnapshotForPlan, pids: Sequence[int]) -> tuple[Reason, ...]:
    """Why: in the words in which a suspension of them would be refused."""
    reasons: dict[Reason, None] = {}
    for pid in pids:
        found = planned(snapshot, PlanRequest(kind=SUSPEND, pids=(pid,)))
        candidate = candidate_of(snapshot, pid)
        if not isinstance(found, MigrationPlan):
            reasons.update(dict.fromkeys(found))
        elif candidate is not None and len(candidate.gpus) > 1:
            message = f"process {pid} is on {listed(candidate.gpus)}"
            reasons[_against(message, _ON_ONE_EACH, pid)] = None
    return tuple(reasons)


def _against(message: str, hint: str, pid: int | None = None) -> Reason:
    return Reason(code=REFUSED.name, message=message, hint=hint, pid=pid)
