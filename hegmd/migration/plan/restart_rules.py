"""The requirements of a restart, the reasons against it, and what it does not keep. Pure.

A restart is for moves where no memory of the process can go along: to a GPU of another vendor or chip, between CPU and
GPU, or to another environment or Python. The agent reports the size of the state and what could not be found again; the
supervisor starts the new process. Script variables that start from the beginning are listed before, by name, where the
agent knows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hegmd.errors import BUSY, REFUSED
from hegmd.memory.sizes import NEXT_TO_NOTHING_BYTES, whole_size
from hegmd.migration.machine.operation import BY_STATE, RESTART, SIMULATED
from hegmd.migration.machine.wording import gigabytes, listed, named
from hegmd.migration.model import AgentSurvey, Candidate, PlanRequest
from hegmd.migration.plan import communicator_rules, driver_rules, targets
from hegmd.migration.plan.carrier_choice import Choice
from hegmd.migration.plan.draft import Draft
from hegmd.node.gpu_sets import CPU, HINT_UNNUMBERED, ONLY_ITS_GPUS, UNNUMBERED, gpus_of, place_of, unseen_device
from hegmd.protocol.agents import UNSEEN
from hegmd.protocol.operations import PlannedProcess, Reason
from hegmd.protocol.supervision import ALONE

STEPS = (
    "reserve GPU and pool memory; quiesce; save the state; end the process; start it again; load the state; verify a "
    "boundary"
)
# The time until a Python that imports PyTorch reaches its first batch, without what the script loads.
START_S = 8.0
# A message carries 16 descriptors, and one of them is the restore lock.
MAX_RANKS = 15
# The agent, and what finds a script's loops.
OLDEST_PYTHON = (3, 9)
# Variables that hegmctl run and hegmd set at every start, and that identify the process.
_OWN = frozenset(
    ("HEGM_RUN", "HEGM_JOB", "HEGM_SOCKET", "HEGM_IMAGES", "HEGM_MSGPACK", "HEGM_READY_FD", "HEGM_READY_TELL")
) | {"HEGM_STATE", "HEGM_STATE_FD", "HEGM_STATE_LOCK_FD", "HEGM_STATES", "HEGM_RESTART"}
_WITH_ITS_DEVICES = f"omit --via restart, or {ONLY_ITS_GPUS}"
_GPUS = frozenset(("HEGM_GPU", "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"))
_DIRECT = (
    "make the script that starts it exec it (in a shell: exec python3 train.py), or give it to hegmctl run directly"
)
_SUPERVISED = "start the job with: hegmctl run --allow-restart -- COMMAND"


def place(draft: Draft, candidate: Candidate) -> None:
    """Add the process to the draft, or every reason against its restart on the requested target."""
    pid, agent, request = candidate.pid, candidate.agent, draft.request
    before = len(draft.reasons)
    source = place_of(candidate.gpus) or CPU
    if source != CPU and not targets.judge_source(draft, pid, source):
        return
    asked = request.placement.get(str(pid), request.to or source)
    to = targets.destination(draft, pid, source, asked, anew=True)
    if to is None:
        return
    for gpu in gpus_of(to):
        target = draft.gpu(gpu)
        targets.judge_target(draft, gpu, "" if target is None else target.vendor, None, stays=gpu in candidate.gpus)
    if len(candidate.gpus) > 1:
        _judge_several(draft, candidate, to)
    if agent is None:
        draft.against(REFUSED, f"process {pid} has no agent, which a restart needs", _SUPERVISED, pid=pid)
        return
    if agent.unknown is not None:
        message = f"process {pid} was attached while it ran, so a restart does not know {listed(agent.unknown)}"
        draft.against(REFUSED, message, f"move it without a restart, or {_SUPERVISED}", pid=pid)
        return
    if candidate.supervisor is None:
        draft.against(REFUSED, f"process {pid} has no supervisor that would restart it", _SUPERVISED, pid=pid)
        return
    if candidate.apart and not candidate.launched:
        between = (
            f"process {pid} was not started by its hegmctl run itself, which would take its exit for the end of the job"
        )
        is_rank = communicator_rules.communicators_of(candidate) is not None
        draft.against(REFUSED, between, HINT_UNNUMBERED if is_rank else _DIRECT, pid=pid)
    for refused in agent.refusals:
        hint = "declare it with hegm.keep or hegm.resumable, or move it without a restart"
        draft.against(REFUSED, f"process {pid}: {refused}", hint, pid=pid)
    if agent.unweighed is not None:
        draft.against(REFUSED, *agent.unweighed, pid=pid)
    elif agent.state_bytes is None and not agent.refusals:
        hint = "retry after its next batch boundary; if that does not help, read the log of the job"
        draft.against(REFUSED, f"the size of the state of process {pid} is unknown", hint, pid=pid)
    if request.respawn.python is not None and not candidate.python:
        hint = "omit --python, or start the job with: hegmctl run --allow-restart -- PYTHON SCRIPT"
        draft.against(REFUSED, f"the command of process {pid} does not begin with a Python", hint, pid=pid)
    _judge_python(draft, candidate)
    _judge_variables(draft, pid)
    if to == CPU and source != CPU and agent.state_bytes is not None:
        _judge_memory(draft, pid, agent.state_bytes)
    _judge_only_device(draft, candidate, to)
    if len(draft.reasons) == before:
        _enter(draft, candidate, source, to, agent)


def _judge_several(draft: Draft, candidate: Candidate, to: str) -> None:
    """Check that each device of a process on several GPUs has a GPU and keeps its number in the new process."""
    pid, agent, there = candidate.pid, candidate.agent, gpus_of(to)
    count = len(candidate.gpus)
    if len(there) != count:
        message = f"process {pid} is on {count} GPUs, and would be restarted on {to}: its script uses {count} devices"
        free = [gpu.id for gpu in draft.snapshot.gpus if gpu.id not in there]
        whole = place_of([*there, *free, *candidate.gpus][:count])
        draft.against(REFUSED, message, f"name a GPU for each, such as --to {whole}", pid=pid)
    elif len({gpu.vendor for name in there if (gpu := draft.gpu(name)) is not None}) > 1:
        message = f"process {pid} would be restarted on {to}, which are GPUs of different vendors"
        draft.against(REFUSED, message, "name GPUs of one vendor: one PyTorch uses one", pid=pid)
    if agent is None:
        return
    if agent.rank is not None:
        message = f"process {pid} is rank {agent.rank} of its job, on {count} GPUs: a restart knows one for a rank"
        draft.against(REFUSED, message, "omit --via restart", pid=pid)
        return
    numbers = [device.number for device in driver_rules.devices_of(draft.snapshot, candidate)]
    if not numbers or None in numbers:
        message = f"the agent of process {pid} does not report which of its devices is on which GPU"
        draft.against(REFUSED, message, "retry after its next batch boundary, or omit --via restart", pid=pid)
    elif (why := unseen_device(numbers, count)) is not None:
        draft.against(REFUSED, f"process {pid} {why}", _WITH_ITS_DEVICES, pid=pid)


def _judge_only_device(draft: Draft, candidate: Candidate, to: str) -> None:
    """Check that a process on one GPU that trains alone uses it as cuda:0, which it is in a new process."""
    numbers = [device.number for device in driver_rules.devices_of(draft.snapshot, candidate)]
    is_alone = (_world(candidate) or 1) == 1
    why = None if not is_alone or to == CPU or len(numbers) != 1 else unseen_device(numbers, 1)
    if why is not None:
        draft.against(REFUSED, f"process {candidate.pid} {why}", _WITH_ITS_DEVICES, pid=candidate.pid)


def _judge_python(draft: Draft, candidate: Candidate) -> None:
    """Check that the interpreter given in the request is a Python that can load the agent."""
    python, other = draft.request.respawn.python, candidate.other_python
    if python is None or not (other or candidate.no_python):
        return
    kind, _, version = other.removesuffix(f" {ALONE}").partition(" ")
    alone = other.endswith(f" {ALONE}")
    numbers = tuple([int(number) for number in version.split(".")[:2] if number.isdecimal()])
    if candidate.no_python:
        hint = "give --python a Python that the job's user can run there: PYTHON -c 'import sys; print(sys.version)'"
        draft.against(REFUSED, f"{python} is no Python: {candidate.no_python}", hint, pid=candidate.pid)
    elif kind != "cpython" or numbers < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        hint = f"give --python a CPython {oldest} or newer with the job's packages"
        draft.against(REFUSED, f"{python} is {other}, which cannot load a saved state", hint, pid=candidate.pid)
    elif alone:
        why = (
            "which is started with -E or -I, or drops PYTHONPATH: without the agent the training would start from "
            "the beginning"
        )
        message = f"{python} is {kind} {version}, {why}"
        draft.against(REFUSED, message, "give --python a Python that reads PYTHONPATH", pid=candidate.pid)


def _judge_variables(draft: Draft, pid: int) -> None:
    """Some of its environment is not for anybody to change: where it is, whose it is, and where its state is."""
    respawn = draft.request.respawn
    names = (*respawn.set, *respawn.unset)
    if own := sorted(_OWN.intersection(names)):
        hint = "remove it: hegmctl run sets it at every start"
        draft.against(REFUSED, f"{listed(tuple(own))} cannot be changed: hegmd identifies the job by it", hint, pid=pid)
    if places := sorted(_GPUS.intersection(names)):
        message = f"{listed(tuple(places))} cannot be changed: hegmd sets it to the target of --to"
        draft.against(REFUSED, message, "remove it, and give the GPU, or cpu, with --to", pid=pid)


def _judge_memory(draft: Draft, pid: int, state_bytes: int) -> None:
    """Check that the node's memory can hold the state twice: in the pool and in the new process."""
    available_bytes, needed_bytes = draft.snapshot.available_bytes, whole_size(state_bytes) + state_bytes
    if available_bytes is not None and available_bytes < needed_bytes:
        message = f"the node has {gigabytes(available_bytes)} of memory, and {gigabytes(needed_bytes)} are needed"
        hint = "free memory on the node: the state is in the pool and in the new process at once"
        draft.against(REFUSED, f"{message} for process {pid} to continue on the CPU", hint, pid=pid)


def _enter(draft: Draft, candidate: Candidate, source: str, to: str, agent: AgentSurvey) -> None:
    state_bytes = agent.state_bytes or 0
    on_gpu_bytes = (candidate.vram_bytes or 0) if candidate.gpus else _expected_bytes(draft, agent, to)
    rests, shares = _shares(candidate, state_bytes)
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
            driver_bytes=sum(rests) if rests else max(0, on_gpu_bytes - state_bytes),
            driver_bytes_by_gpu=rests,
            storage_bytes_by_gpu=shares,
        )
    )


def _shares(candidate: Candidate, state_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what a process on several GPUs needs on each: besides its state, and for its share of the state.

    Each share is in proportion to the memory there, so that the sum on each GPU is what the process has there now.
    """
    if len(candidate.gpus) < 2:
        return (), ()
    held = [candidate.driver_bytes_by_gpu.get(gpu, 0) for gpu in candidate.gpus]
    whole_bytes = sum(held)
    shares = [state_bytes * each // whole_bytes if whole_bytes else state_bytes // len(held) for each in held]
    shares[0] += state_bytes - sum(shares)
    return tuple([max(0, each - share) for each, share in zip(held, shares, strict=True)]), tuple(shares)


def _expected_bytes(draft: Draft, agent: AgentSurvey, to: str) -> int:
    """Return the least that a process from the CPU takes on a GPU: its state, the driver and libraries."""
    target = draft.gpu(to)
    if target is None or target.vendor == SIMULATED:
        return agent.size_bytes or 0
    return (agent.state_bytes or 0) + NEXT_TO_NOTHING_BYTES


def judge_ranks(draft: Draft, members: Sequence[Candidate]) -> None:
    """Add every reason against a restart of several processes as one job."""
    if len(members) < 2 and all((_world(member) or 1) < 2 for member in members) and not are_launched(draft, members):
        return
    pids = listed(tuple([str(member.pid) for member in members]))
    worlds = {_world(member) for member in members}
    ranks = sorted([member.agent.rank for member in members if member.agent and member.agent.rank is not None])
    if len(worlds) != 1 or None in worlds or len(set(ranks)) != len(members):
        message = f"processes {pids} have {UNNUMBERED}"
        draft.against(REFUSED, message, HINT_UNNUMBERED)
    elif ranks != list(range(worlds.pop() or 0)):
        message = f"of {_world(members[0])} ranks, {listed(tuple([str(rank) for rank in ranks]))} are here"
        draft.against(
            REFUSED, message, "retry when all ranks of the job train on this node: a restart needs all of them"
        )
    elif len(members) > MAX_RANKS:
        hint = "save a checkpoint in the script, and start the ranks from that"
        draft.against(REFUSED, f"the job has {len(members)} ranks, but a restart supports {MAX_RANKS} at most", hint)
    elif not draft.reasons:
        _judge_devices_of_ranks(draft, members)
        _judge_places(draft)
        for message, next_step, pid in communicator_rules.against_one_gpu(draft, members):
            draft.against(REFUSED, message, next_step, pid=pid)


def _judge_devices_of_ranks(draft: Draft, members: Sequence[Candidate]) -> None:
    """Check that the numbers of their devices fit to as many GPUs as they have: new ranks see their targets only."""
    devices = [device for member in members for device in driver_rules.devices_of(draft.snapshot, member)]
    goes_to_cpu = any(worker.to == CPU for worker in draft.workers)
    count = len({gpu for member in members for gpu in member.gpus})
    why = None if goes_to_cpu or not count else unseen_device([device.number for device in devices], count)
    if why is not None:
        draft.against(REFUSED, f"a rank {why}", _WITH_ITS_DEVICES)


def are_launched(draft: Draft, members: Sequence[Candidate]) -> bool:
    """Return True if a restart is of a launcher, which leaves nothing open for its ranks, if only for one."""
    return draft.request.via == RESTART and any(member.launched for member in members)


def _world(member: Candidate) -> int | None:
    return None if member.agent is None else member.agent.world_size


def _judge_places(draft: Draft) -> None:
    """Check that the started ranks can find their GPUs: by the order in which one variable names these."""
    places = [str(worker.to) for worker in draft.workers]
    goals = tuple(dict.fromkeys(places))
    vendors = {gpu.vendor for to in goals if (gpu := draft.gpu(to)) is not None}
    if len(vendors) > 1:
        message = f"the ranks would be on GPUs of {listed(tuple(sorted(vendors)))}"
        draft.against(REFUSED, message, "name GPUs of one vendor")
    elif CPU in goals and len(goals) > 1:
        message = f"the ranks would be on {listed(tuple(sorted(goals)))}"
        draft.against(REFUSED, message, "choose GPUs for all ranks, or the CPU for all")
    elif SIMULATED not in vendors and not _keep_order(draft, places, goals):
        message = f"hegmd cannot place the ranks on {','.join(places)}: each finds its GPU by its number"
        each = ",".join([goals[number % len(goals)] for number in range(len(places))])
        draft.against(REFUSED, message, f"name the GPUs in turn, such as --to {each}; or omit --to")


def _keep_order(draft: Draft, places: Sequence[str], goals: Sequence[str]) -> bool:
    """Return True if each rank's number leads to its target: GPUs replace one another, or ranks take them in turn."""
    replaced = {(worker.gpu, worker.to) for worker in draft.workers}
    is_exchange = len(replaced) == len(goals) == len({gpu for gpu, _ in replaced})
    return is_exchange or all(place == goals[number % len(goals)] for number, place in enumerate(places))


def share_gpus(members: Sequence[Candidate], workers: Sequence[PlannedProcess]) -> Iterator[str]:
    """Yield what the script has to do if ranks that had a GPU each share one after a restart."""
    sources = {worker.gpu for worker in workers}
    goals = {worker.to for worker in workers}
    if len(members) > 1 and CPU not in goals and len(goals) < len(sources):
        yield (
            f"{len(workers)} ranks share {len(goals)} GPU{'s' * (len(goals) != 1)}, so the script has to take its GPU "
            "by LOCAL_RANK modulo the number of visible GPUs"
        )


def not_kept(members: Sequence[Candidate], request: PlanRequest) -> Iterator[str]:
    """Yield what a user should know before agreeing to a restart."""
    for candidate in members:
        if not candidate.gpus and request.to not in (None, CPU):
            yield (
                f"the memory that process {candidate.pid} needs on {request.to} is unknown before it runs there: "
                "hegmd reserves memory for its state and the driver, but not for its batches"
            )
        yield (f"process {candidate.pid} exits, and a new process continues; its script opens its output files again")
        names = None if candidate.agent is None else candidate.agent.begin_anew
        if names is None:
            yield f"process {candidate.pid}: only script variables given to hegm.keep are sure to keep their values"
        for name in names or ():
            is_unseen = name.startswith(UNSEEN)
            anew = (
                f"{name}; call hegm.keep to keep changes there"
                if is_unseen
                else f"starts from the beginning: {name}; call hegm.keep to keep it"
            )
            yield f"process {candidate.pid}: {anew}"
    if request.respawn.set or request.respawn.unset or request.respawn.python is not None:
        changed = [*request.respawn.set, *request.respawn.unset]
        other = next((f" ({candidate.other_python})" for candidate in members if candidate.other_python), "")
        changed += [] if request.respawn.python is None else [f"the Python {request.respawn.python}{other}"]
        yield f"started with another {', '.join(changed)}: results may differ if its libraries differ"


def why_not_better(reasons: Sequence[Reason]) -> str:
    """Why it is a restart."""
    return "other methods are not possible:  " + "; ".join(dict.fromkeys(reason.message for reason in reasons))


def offer(reasons: Sequence[Reason], members: Sequence[Candidate]) -> tuple[Reason, ...]:
    """The same reasons; if the job has a supervisor and is not busy, with the possible method."""
    pids = [candidate.pid for candidate in members if candidate.supervisor is not None]
    if not pids or not reasons or any(reason.code == BUSY.name for reason in reasons):
        return tuple(reasons)
    last = reasons[-1]
    hint = f"{last.hint}; or restart it there: hegmctl migrate {pids[0]} --via restart --to GPU --dry-run"
    return (*reasons[:-1], last.replace(hint=hint))
