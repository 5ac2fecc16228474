"""What a restart takes of a process, what stands against one, and what it does not keep. Pure.

A restart is the way where nothing of the process can go: to a GPU of another vendor or chip, from the CPU to a GPU or
back, with another environment or Python. Its agent says what the state comes to and what would not be found again; who
would start it again is its supervisor. What of the script's own variables begins anew is said before by name, where the
agent can tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hegmd.errors import BUSY, REFUSED
from hegmd.memory.sizes import NEXT_TO_NOTHING_BYTES, whole_size
from hegmd.migration.machine.operation import BY_STATE, RESTART, SIMULATED
from hegmd.migration.machine.wording import gigabytes, listed, named
from hegmd.migration.model import AgentSurvey, Candidate, PlanRequest
from hegmd.migration.plan import targets
from hegmd.migration.plan.carrier_choice import Choice
from hegmd.migration.plan.draft import Draft
from hegmd.node.gpu_sets import CPU, gpus_of, place_of
from hegmd.protocol.operations import PlannedProcess, Reason
from hegmd.protocol.supervision import ALONE

STEPS = (
    "take room and pool; stop at a boundary; save the state; let the process leave; start it again; put the state "
    "back; see a boundary"
)
# Until a Python that imports PyTorch is at its first batch; what the script loads by itself comes on top.
START_S = 8.0
# How an agent begins what it says of the things that it has not gone through.
UNSEEN = "not looked at: "
# A message has 16 descriptors, and one of them is the right to go on from the states.
MAX_RANKS = 15
# The agent, and what finds a script's loops.
OLDEST_PYTHON = (3, 9)
# What every start has from hegmctl run and from hegmd: without these nobody would know whose the process is.
_OWN = frozenset(
    ("HEGM_RUN", "HEGM_JOB", "HEGM_SOCKET", "HEGM_IMAGES", "HEGM_MSGPACK", "HEGM_READY_FD", "HEGM_READY_TELL")
) | {"HEGM_STATE", "HEGM_STATE_FD", "HEGM_STATE_LOCK_FD", "HEGM_STATES", "HEGM_RESTART"}
_GPUS = frozenset(("HEGM_GPU", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
_DIRECT = "have whatever starts it become it (in a shell: exec python3 train.py), or name it to hegmctl run directly"
_SUPERVISED = "start the job with: hegmctl run --allow-restart -- COMMAND"


def place(draft: Draft, candidate: Candidate) -> None:
    """Enter the process into the draft, or all that stands against its restart where it was asked to be."""
    pid, agent, request = candidate.pid, candidate.agent, draft.request
    before = len(draft.reasons)
    source = place_of(candidate.gpus) or CPU
    if source != CPU and not targets.judge_source(draft, pid, source):
        return
    asked = request.placement.get(str(pid), request.to or source)
    to = targets.destination(draft, pid, source, asked, anew=True)
    if to is None:
        return
    target = draft.gpu(to)
    if to != CPU:
        targets.judge_target(draft, to, "" if target is None else target.vendor, None, stays=to in candidate.gpus)
    if len(gpus_of(to)) > 1 or len(candidate.gpus) > 1:
        message = f"process {pid} is on {listed(candidate.gpus)}, and is to be on {to}"
        draft.against(REFUSED, message, "a restart is of a process on one GPU, to one GPU", pid=pid)
    if agent is None:
        draft.against(REFUSED, f"process {pid} has no agent, which its state is found by", _SUPERVISED, pid=pid)
        return
    if candidate.supervisor is None:
        draft.against(REFUSED, f"nobody would start process {pid} again", _SUPERVISED, pid=pid)
        return
    if candidate.apart and not candidate.launched:
        between = f"process {pid} was started by another than its hegmctl run, which would take its leaving for its end"
        draft.against(REFUSED, between, _DIRECT, pid=pid)
    for refused in agent.refusals:
        hint = "say how with hegm.keep or hegm.resumable, or move it without a restart"
        draft.against(REFUSED, f"process {pid}: {refused}", hint, pid=pid)
    if agent.unweighed is not None:
        draft.against(REFUSED, *agent.unweighed, pid=pid)
    elif agent.state_bytes is None and not agent.refusals:
        hint = "it says so at its next batch boundary; ask again, and see the log of the job if it never does"
        draft.against(REFUSED, f"what the state of process {pid} comes to is not known", hint, pid=pid)
    if request.respawn.python is not None and not candidate.python:
        hint = "leave --python out, or start the job with: hegmctl run --allow-restart -- PYTHON SCRIPT"
        draft.against(REFUSED, f"the command of process {pid} does not begin with a Python", hint, pid=pid)
    _judge_python(draft, candidate)
    _judge_variables(draft, pid)
    if to == CPU and source != CPU and agent.state_bytes is not None:
        _judge_memory(draft, pid, agent.state_bytes)
    if len(draft.reasons) == before:
        _enter(draft, candidate, source, to, agent)


def _judge_python(draft: Draft, candidate: Candidate) -> None:
    """What would take the place of the Python of its command has to be one, and one that the agent can be in."""
    python, said = draft.request.respawn.python, candidate.other_python
    if python is None or not (said or candidate.no_python):
        return
    kind, _, version = said.removesuffix(f" {ALONE}").partition(" ")
    alone = said.endswith(f" {ALONE}")
    numbers = tuple([int(number) for number in version.split(".")[:2] if number.isdecimal()])
    if candidate.no_python:
        hint = "name one that the job's user can run there: PYTHON -c 'import sys; print(sys.version)'"
        draft.against(REFUSED, f"{python} is no Python: {candidate.no_python}", hint, pid=candidate.pid)
    elif kind != "cpython" or numbers < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        hint = f"name a CPython of {oldest} or newer, with the job's packages"
        draft.against(REFUSED, f"{python} is {said}, in which no state can be put back", hint, pid=candidate.pid)
    elif alone:
        why = "which is started with -E or -I, or drops PYTHONPATH: without the agent it would begin anew"
        message = f"{python} is {kind} {version}, {why}"
        draft.against(REFUSED, message, "name one that reads PYTHONPATH", pid=candidate.pid)


def _judge_variables(draft: Draft, pid: int) -> None:
    """Some of its environment is not for anybody to change: where it is, whose it is, and where its state is."""
    respawn = draft.request.respawn
    names = (*respawn.set, *respawn.unset)
    if own := sorted(_OWN.intersection(names)):
        hint = "leave it out: every start has it from hegmctl run"
        draft.against(REFUSED, f"{listed(tuple(own))} cannot be changed: hegmd knows the job by it", hint, pid=pid)
    if places := sorted(_GPUS.intersection(names)):
        message = f"{listed(tuple(places))} cannot be changed: it is set to where --to has the job go"
        draft.against(REFUSED, message, "leave it out, and name the GPU, or cpu, with --to", pid=pid)


def _judge_memory(draft: Draft, pid: int, state_bytes: int) -> None:
    """The memory of the node has to take what the GPU's had: in the pool, and once more in whoever goes on."""
    available_bytes, needed_bytes = draft.snapshot.available_bytes, whole_size(state_bytes) + state_bytes
    if available_bytes is not None and available_bytes < needed_bytes:
        message = f"the node has {gigabytes(available_bytes)} of memory, and {gigabytes(needed_bytes)} are needed"
        hint = "its state is in the pool, and once more in the process that goes on; end something first"
        draft.against(REFUSED, f"{message} for process {pid} to go on on the CPU", hint, pid=pid)


def _enter(draft: Draft, candidate: Candidate, source: str, to: str, agent: AgentSurvey) -> None:
    state_bytes = agent.state_bytes or 0
    on_gpu_bytes = (candidate.vram_bytes or 0) if candidate.gpus else _expected_bytes(draft, agent, to)
    draft.choices[candidate.pid] = Choice(BY_STATE, pool_bytes=state_bytes)
    draft.workers.append(
        PlannedProcess(
            pid=candidate.pid,
            name=named(candidate),
            gpu=source,
            to=to,
            size_bytes=state_bytes,
            carrier=BY_STATE,
            method=RESTART,
            driver_bytes=max(0, on_gpu_bytes - state_bytes),
        )
    )


def _expected_bytes(draft: Draft, agent: AgentSurvey, to: str) -> int:
    """What one that was on no GPU takes on one at least: its state, and what a driver and its libraries have there."""
    target = draft.gpu(to)
    if target is None or target.vendor == SIMULATED:
        return agent.size_bytes or 0
    return (agent.state_bytes or 0) + NEXT_TO_NOTHING_BYTES


def judge_ranks(draft: Draft, members: Sequence[Candidate]) -> None:
    """All that stands against a restart of several processes as one."""
    if len(members) < 2 and all((_world(member) or 1) < 2 for member in members) and not are_launched(draft, members):
        return
    pids = listed(tuple([str(member.pid) for member in members]))
    worlds = {_world(member) for member in members}
    ranks = sorted([member.agent.rank for member in members if member.agent and member.agent.rank is not None])
    if len(worlds) != 1 or None in worlds or len(set(ranks)) != len(members):
        message = f"processes {pids} are no ranks by their environment (RANK and WORLD_SIZE)"
        hint = "start them with torchrun, whose ranks find their states again by these; or as a job each"
        draft.against(REFUSED, message, hint)
    elif ranks != list(range(worlds.pop() or 0)):
        message = f"of {_world(members[0])} ranks, {listed(tuple([str(rank) for rank in ranks]))} are here"
        draft.against(REFUSED, message, "a restart is of all ranks of a job, on one node; ask when all of them train")
    elif len(members) > MAX_RANKS:
        hint = "have the script save its own checkpoint, and start the ranks from that"
        draft.against(REFUSED, f"the job has {len(members)} ranks, and a restart is of {MAX_RANKS} at most", hint)
    elif any(member.supervisor is not None and not member.ranks for member in members):
        message = f"the hegmctl run that started processes {pids} is of a release that restarts no ranks"
        draft.against(REFUSED, message, "start the job with this release of hegmctl")
    else:
        _judge_places(draft)


def are_launched(draft: Draft, members: Sequence[Candidate]) -> bool:
    """Whether a restart is of a launcher, which leaves nothing open for its ranks, if only for one."""
    return draft.request.via == RESTART and any(member.launched for member in members)


def _world(member: Candidate) -> int | None:
    return None if member.agent is None else member.agent.world_size


def _judge_places(draft: Draft) -> None:
    """Ranks find their GPUs by the order in which a variable names them: it has to name as many as before, and of one
    vendor."""
    pairs = {(worker.gpu, worker.to) for worker in draft.workers}
    sources, goals = {gpu for gpu, _ in pairs}, {to for _, to in pairs}
    vendors = {gpu.vendor for to in goals if (gpu := draft.gpu(to or "")) is not None}
    if len(pairs) != len(sources) or len(pairs) != len(goals):
        where = f"{len(sources)} GPUs would be on {len(goals)}"
        hint = "leave --to out, and they are started again where they are; all on one GPU can be named another"
        draft.against(REFUSED, f"ranks that are on {where}, or not those together that are now", hint)
    elif len(vendors) > 1:
        message = f"the ranks would be on GPUs of {listed(tuple(sorted(vendors)))}"
        draft.against(REFUSED, message, "name GPUs of one vendor")
    elif CPU in goals and len(goals) > 1:
        message = f"the ranks would be on {listed(tuple(sorted(str(to) for to in goals)))}"
        draft.against(REFUSED, message, "have all of them on GPUs, or all on the CPU")
    elif "simulated" in vendors and len(goals) > 1:
        message = f"the ranks would be on {listed(tuple(sorted(str(to) for to in goals)))}"
        draft.against(REFUSED, message, "simulated ranks have one GPU; name one")


def not_kept(members: Sequence[Candidate], request: PlanRequest) -> Iterator[str]:
    """What to know before saying yes."""
    for candidate in members:
        if not candidate.gpus and request.to not in (None, CPU):
            yield (
                f"what process {candidate.pid} takes on {request.to} is not known before it is there: room is held for "
                "its state and the driver's own, and not for what its batches need"
            )
        yield (
            f"process {candidate.pid} ends, and another goes on in its place; files that it writes are opened again as "
            "its script opens them"
        )
        names = None if candidate.agent is None else candidate.agent.begin_anew
        if names is None:
            yield f"process {candidate.pid}: its script's own variables may begin anew, but for what hegm.keep names"
        for name in names or ():
            is_unseen = name.startswith(UNSEEN)
            anew = (
                f"{name}; hegm.keep keeps what is changed there"
                if is_unseen
                else f"begins anew: {name}; hegm.keep keeps it"
            )
            yield f"process {candidate.pid}: {anew}"
    if request.respawn.set or request.respawn.unset or request.respawn.python is not None:
        changed = [*request.respawn.set, *request.respawn.unset]
        said = next((f" ({candidate.other_python})" for candidate in members if candidate.other_python), "")
        changed += [] if request.respawn.python is None else [f"the Python {request.respawn.python}{said}"]
        yield f"started with another {', '.join(changed)}: numbers may differ where libraries do"


def why_not_better(reasons: Sequence[Reason]) -> str:
    """Why it is a restart."""
    return "no better way: " + "; ".join(dict.fromkeys(reason.message for reason in reasons))


def offer(reasons: Sequence[Reason], members: Sequence[Candidate]) -> tuple[Reason, ...]:
    """The same reasons; where the job has a supervisor and is not busy, with the way that is open to it."""
    pids = [candidate.pid for candidate in members if candidate.supervisor is not None]
    if not pids or not reasons or any(reason.code == BUSY.name for reason in reasons):
        return tuple(reasons)
    last = reasons[-1]
    hint = f"{last.hint}; or have it started again there: hegmctl migrate {pids[0]} --via restart --to GPU --dry-run"
    return (*reasons[:-1], last.replace(hint=hint))
