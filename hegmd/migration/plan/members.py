"""Which processes move: the named ones and the others of their jobs, with the reasons against parking each. Pure.

A job moves as a whole: its ranks would wait for each other, and processes that started each other may share memory that
the driver restores only together.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from hegmd.errors import BUSY, NOT_FOUND, REFUSED, Code
from hegmd.migration.machine.describe import busy_message
from hegmd.migration.machine.machine import HOLDING
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import CHECKPOINT, QUIESCE, RESTART
from hegmd.migration.machine.wording import gigabytes, listed, no_such_process, otherwise
from hegmd.migration.model import Candidate, NodeSnapshotForPlan, Unreachable
from hegmd.migration.plan.draft import Draft, candidate_of

NVIDIA = "nvidia"


def members_of(snapshot: NodeSnapshotForPlan, candidate: Candidate) -> tuple[Candidate, ...]:
    """Return the processes that move together with it, including itself: those of its job, and related processes."""
    return tuple(
        [
            other
            for other in snapshot.candidates
            if other.pid == candidate.pid or _is_same_job(other, candidate) or _are_related(snapshot, other, candidate)
        ]
    )


def in_rank_order(members: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The ranks of a job in their order, and then the others as they come."""
    return tuple(sorted(members, key=_rank))


def _rank(candidate: Candidate) -> int:
    rank = None if candidate.agent is None else candidate.agent.rank
    return sys.maxsize if rank is None else rank


def members_named(draft: Draft) -> Iterator[Candidate]:
    """The named processes, each with the others that move with it."""
    visited: set[int] = set()
    for pid in draft.request.pids:
        candidate = candidate_of(draft.snapshot, pid)
        if candidate is None and pid in draft.snapshot.beginning:
            hint = (
                "wait until hegmctl ps lists it on a GPU, then retry; in a loop without a data loader, call "
                "hegm.boundary()"
            )
            message = f"process {pid} is starting up and is not on a GPU before its first batch"
            draft.against(REFUSED, message, hint, pid=pid)
            continue
        held = next((op for op in draft.snapshot.running if any(w.pid == pid and w.is_absent for w in op.live)), None)
        if candidate is None and held is not None:
            message = f"process {pid} has exited, and operation {held.id} ({held.phase}) keeps its state"
            draft.against(
                BUSY,
                message,
                otherwise(held) if held.phase == SUSPENDED else f"watch it with: hegmctl op {held.id}",
                pid=pid,
            )
            continue
        unreachable = next((one for one in draft.snapshot.unreachable if one.pid == pid), None)
        if candidate is None and unreachable is not None:
            draft.against(*_against_unreachable(unreachable), pid=pid)
            continue
        if candidate is None and pid in draft.snapshot.ended:
            draft.against(NOT_FOUND, *no_such_process(pid), pid=pid)
            continue
        if candidate is None:
            draft.against(NOT_FOUND, f"process {pid} is on no GPU", "run: hegmctl ps", pid=pid)
            continue
        for member in members_of(draft.snapshot, candidate):
            if member.pid not in visited:
                visited.add(member.pid)
                yield member


def _against_unreachable(process: Unreachable) -> tuple[Code, str, str]:
    """Why a process that the driver lists, and that is no candidate, cannot be moved."""
    held = "" if process.vram_bytes is None else f" with {gigabytes(process.vram_bytes)}"
    where = f"on {listed(process.gpus)}{held}"
    if process.ended:
        hint = "wait until the driver frees it; if it does not, find what has its GPU open: fuser -v /dev/nvidia*"
        return NOT_FOUND, f"process {process.pid} has exited, but the driver still lists it {where}", hint
    hint = "run hegmd as root, in the node's own pid namespace; see hegmctl ps"
    return REFUSED, f"process {process.pid} is {where}, but cannot be moved: {process.why}", hint


def _is_same_job(one: Candidate, other: Candidate) -> bool:
    return one.job is not None and one.job == other.job and one.uid == other.uid


def _are_related(snapshot: NodeSnapshotForPlan, one: Candidate, other: Candidate) -> bool:
    """True if one process started the other or both have one parent on a GPU: they may share what is restored."""
    return _first_parent(snapshot, one) == _first_parent(snapshot, other)


def _first_parent(snapshot: NodeSnapshotForPlan, candidate: Candidate) -> int:
    visited = {candidate.pid}
    while candidate.parent is not None and candidate.parent not in visited:
        parent = candidate_of(snapshot, candidate.parent)
        if parent is None:
            break
        candidate = parent
        visited.add(candidate.pid)
    return candidate.pid


def can_be_stopped(draft: Draft, candidate: Candidate) -> bool:
    """Return True if nothing speaks against stopping it; what does is in the draft."""
    before = len(draft.reasons)
    who = f"process {candidate.pid}"
    for op in draft.snapshot.running:
        if op.phase == HOLDING and draft.request.kind != QUIESCE:
            continue  # a quiesced job can become another operation
        if any(worker.pid == candidate.pid for worker in op.live):
            draft.against(BUSY, *busy_message(op, candidate.pid, draft.request.kind), pid=candidate.pid)
            return False  # its GPU and memory depend on that operation, so they are no reasons of their own
        is_its = candidate.job is not None and candidate.uid == op.owner_uid
        if is_its and any(worker.restarts and worker.run == candidate.job for worker in op.live):
            message = f"operation {op.id} ({op.kind}, {op.phase}) has restarted {who} and waits for its next boundary"
            draft.against(BUSY, message, f"run: hegmctl op {op.id}", pid=candidate.pid)
            return False
    on_cpu = candidate.on_cpu and not candidate.gpus
    if candidate.agent is not None and candidate.agent.rank is not None and not candidate.gpus and not on_cpu:
        # It is among the candidates for its job's sake: the others must not leave without it.
        hint = (
            "retry when all ranks train: they move together; in the loop of a rank without a data loader and an "
            "optimizer, call hegm.boundary()"
        )
        message = f"rank {candidate.agent.rank} ({who}) has not reported its memory yet"
        draft.against(REFUSED, message, hint, pid=candidate.pid)
        return False
    if candidate.agent is None:
        if not are_of(draft, candidate, NVIDIA):
            hint = "start the job with `hegmctl run`; only a process with an agent can be quiesced"
            draft.against(REFUSED, f"{who} has no agent", hint, pid=candidate.pid)
    elif candidate.agent.size_bytes is None:
        hint = "retry in a few seconds: it has not trained yet, or its agent is connecting"
        draft.against(REFUSED, f"the agent of {who} has not reported its memory yet", hint, pid=candidate.pid)
    if on_cpu:
        if draft.request.via != RESTART:
            hint = "run: hegmctl ps; only a job on a GPU can be suspended"
            draft.against(REFUSED, f"{who} trains on the CPU, and uses no GPU", hint, pid=candidate.pid)
    elif not candidate.gpus and candidate.agent is not None and candidate.agent.size_bytes == 0:
        hint = "retry once it has PyTorch tensors on a GPU; see hegmctl ps"
        draft.against(REFUSED, f"{who} holds no GPU memory that could be moved", hint, pid=candidate.pid)
    elif not candidate.gpus:
        hint = "run: hegmctl ps; only a process on a known GPU can be moved"
        draft.against(REFUSED, f"{who} is on no known GPU", hint, pid=candidate.pid)
    elif len(candidate.gpus) > 1 and draft.request.via != RESTART:
        _judge_several(draft, candidate, f"{who} is on {listed(candidate.gpus)}")
    return len(draft.reasons) == before


def _judge_several(draft: Draft, candidate: Candidate, who_is: str) -> None:
    """The driver's restore loses a process on several GPUs with peer access. Only code inside the
    process can see and undo that."""
    if not are_of(draft, candidate, NVIDIA):
        hint = "use one GPU per process: several are supported on NVIDIA GPUs only"
        draft.against(REFUSED, who_is, hint, pid=candidate.pid)
    elif candidate.agent is None:
        hint = "start the job with `hegmctl run`: its agent disables peer access before a move"
        message = f"{who_is}, but without an agent hegmd cannot see whether these GPUs access one another's memory"
        draft.against(
            REFUSED,
            f"{message}: then the driver could checkpoint it but might fail to restore it",
            hint,
            pid=candidate.pid,
        )
    elif candidate.agent.cuda is None:
        hint = "use PyTorch for access between GPUs: hegmd's agent can only disable PyTorch's"
        draft.against(REFUSED, f"{who_is}, but its agent does not know how it uses them", hint, pid=candidate.pid)
    elif draft.request.kind == CHECKPOINT:
        hint = f"suspend it instead: hegmctl suspend {candidate.pid}"
        draft.against(REFUSED, f"{who_is}, but an image supports processes on one GPU only", hint, pid=candidate.pid)


def are_of(draft: Draft, candidate: Candidate, vendor: str) -> bool:
    """Return True if all its GPUs are that vendor's."""
    gpus = [draft.gpu(name) for name in candidate.gpus]
    return bool(gpus) and all(gpu is not None and gpu.vendor == vendor for gpu in gpus)
