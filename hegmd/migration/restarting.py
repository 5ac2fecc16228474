"""What a restart takes of a process, what stands against one, and what it does not keep. Pure.

A restart is the way where nothing of the process can go: to a GPU of another vendor or chip, with another environment
or Python. Its agent says what the state comes to and what would not be found again; who would start it again is its
supervisor. What of the script's own variables begins anew is said before by name, where the agent can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hegmd.errors import REFUSED
from hegmd.migration import targets
from hegmd.migration.candidates import Candidate, Request
from hegmd.migration.carriage import Choice
from hegmd.migration.draft import Draft
from hegmd.migration.operation import BY_STATE, RESTART
from hegmd.migration.wording import listed, named
from hegmd.places import gpus_of
from hegmd.protocol.operations import PlannedProcess, Reason

STEPS = (
    "take room and pool; stop at a boundary; save the state; let the process leave; start it again; put the state "
    "back; see a boundary"
)
# Until a Python that imports PyTorch is at its first batch; what the script loads by itself comes on top.
START_S = 8.0
_SUPERVISED = "start the job with: hegmctl run --allow-restart -- COMMAND"


def place(draft: Draft, candidate: Candidate, to: str) -> None:
    """Enter the process into the draft, or all that stands against its restart on that GPU."""
    pid, agent, request = candidate.pid, candidate.agent, draft.request
    before = len(draft.reasons)
    target = draft.gpu(to)
    targets.judge_target(draft, to, "" if target is None else target.vendor, None, stays=to in candidate.gpus)
    if len(gpus_of(to)) != 1 or len(candidate.gpus) > 1:
        message = f"process {pid} is on {listed(candidate.gpus)}, and is to be on {to}"
        draft.against(REFUSED, message, "a restart is of a process on one GPU, to one GPU", pid=pid)
    if agent is None:
        draft.against(REFUSED, f"process {pid} has no agent, which its state is found by", _SUPERVISED, pid=pid)
        return
    if candidate.supervisor is None:
        draft.against(REFUSED, f"nobody would start process {pid} again", _SUPERVISED, pid=pid)
        return
    if (agent.world_size or 1) > 1:
        message = f"process {pid} is one of {agent.world_size} ranks, and only jobs of one process can be restarted"
        draft.against(
            REFUSED, message, "have the script save its own checkpoint, and start the ranks from that", pid=pid
        )
    for refused in agent.refusals:
        hint = "say how with hegm.keep or hegm.resumable, or move it without a restart"
        draft.against(REFUSED, f"process {pid}: {refused}", hint, pid=pid)
    if agent.state_bytes is None and not agent.refusals:
        hint = "it says so at its next batch boundary; ask again, and see the log of the job if it never does"
        draft.against(REFUSED, f"what the state of process {pid} comes to is not known", hint, pid=pid)
    if request.respawn.python is not None and not candidate.python:
        hint = "leave --python out, or start the job with: hegmctl run --allow-restart -- PYTHON SCRIPT"
        draft.against(REFUSED, f"the command of process {pid} does not begin with a Python", hint, pid=pid)
    if len(draft.reasons) == before:
        _enter(draft, candidate, to, agent.state_bytes or 0)


def _enter(draft: Draft, candidate: Candidate, to: str, state_bytes: int) -> None:
    draft.choices[candidate.pid] = Choice(BY_STATE, pool_bytes=state_bytes)
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=candidate.gpus[0],
            to=to,
            size_bytes=state_bytes,
            carrier=BY_STATE,
            method=RESTART,
            rest_bytes=max(0, (candidate.vram_bytes or 0) - state_bytes),
        )
    )


def not_kept(members: Sequence[Candidate], request: Request) -> Iterator[str]:
    """What to know before saying yes."""
    for candidate in members:
        yield (
            f"process {candidate.pid} ends, and another goes on in its place; files that it writes are opened again as "
            "its script opens them"
        )
        names = None if candidate.agent is None else candidate.agent.begin_anew
        if names is None:
            yield f"process {candidate.pid}: its script's own variables may begin anew, but for what hegm.keep names"
        for name in names or ():
            yield f"process {candidate.pid}: begins anew: {name}; hegm.keep keeps it"
    if request.respawn.set or request.respawn.unset or request.respawn.python is not None:
        changed = [*request.respawn.set, *request.respawn.unset]
        changed += [] if request.respawn.python is None else [f"the Python {request.respawn.python}"]
        yield f"started with another {', '.join(changed)}: numbers may differ where libraries do"


def why_not_better(reasons: Sequence[Reason]) -> str:
    """Why it is a restart."""
    return "no better way: " + "; ".join(dict.fromkeys(reason.message for reason in reasons))


def offer(reasons: Sequence[Reason], members: Sequence[Candidate]) -> tuple[Reason, ...]:
    """The same reasons; where the job has a supervisor, with the way that is open to it."""
    pids = [candidate.pid for candidate in members if candidate.supervisor is not None]
    if not pids or not reasons:
        return tuple(reasons)
    last = reasons[-1]
    hint = f"{last.hint}; or have it started again there: hegmctl migrate {pids[0]} --via restart --to GPU --dry-run"
    return (*reasons[:-1], last.replace(hint=hint))
