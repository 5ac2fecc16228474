"""The effect of a job's communicators on a plan: how they are disconnected, at what cost, and the reasons against it.

The driver loses a job that it checkpoints with live communicators. So the agents disconnect them on all ranks, or the
job is refused with every reason by name, before anything stops. Owns these rules and their messages. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from hegmd.errors import REFUSED
from hegmd.migration.machine.communicators import SUSPEND as SUSPENSION
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import CHECKPOINT, QUIESCE, RESUME, SIMULATED, SUSPEND, JobProcess
from hegmd.migration.machine.wording import listed
from hegmd.migration.model import Candidate, GpuMemory, NodeSnapshotForPlan
from hegmd.migration.plan.draft import Draft, candidate_of
from hegmd.node.gpu_sets import HINT_UNNUMBERED, UNNUMBERED, gpus_of
from hegmd.protocol.messages import Communicators
from hegmd.protocol.operations import BY_DRIVER, KEEP_CONTEXT, PlannedProcess
from hegmd.protocol.proofs import FAILED, PROVEN, UNPROVEN, Combination, Proof

NONE, REPLACEMENT = "none", "replace"
# Seconds to disconnect and to connect again, with NCCL on two H200s: of a suspension for each group, and for all.
SUSPEND_GROUP_S, RESUME_S = 0.42, 0.45
ABORT_S, REPLACE_S = 1.0, 0.36

# Ranks that wait for one another once a step, or once in some steps, are at most so many batches apart.
CONNECTED_WITHIN = 16
_PROVE = "run: hegmctl doctor --nccl"
_RESTART = "use a restart instead: hegmctl run --allow-restart, then hegmctl migrate --via restart"


def communicators_of(candidate: Candidate) -> Communicators | None:
    """Return the agent's report of its groups with other ranks; None if it has none, or does not know."""
    groups = None if candidate.agent is None else candidate.agent.communicators
    return None if groups is None or (groups.mechanism == NONE and not groups.uncovered) else groups


def mechanism(candidate: Candidate, kind: str) -> str:
    """Return how its communicators are disconnected for that kind of operation; empty if it has none."""
    groups = communicators_of(candidate)
    if groups is None or groups.mechanism == NONE:
        return ""
    return REPLACEMENT if kind == CHECKPOINT else groups.mechanism


def are_independent(members: Sequence[Candidate]) -> bool:
    """Return True if the ranks train without one another: no group connects them, and their batch counts are far apart.

    They would wait long for one another at a common boundary. Counts that are close are not enough: ranks can be
    connected by something else than torch.distributed. Two single counts are of different moments, between which ranks
    with short steps make many. So each rank has two, and at one instant between them all ranks are compared.
    """
    counts: list[tuple[int, int]] = []
    for candidate in members:
        if communicators_of(candidate) is not None or candidate.agent is None or candidate.agent.counts is None:
            return False
        counts.append(candidate.agent.counts)
    if len(counts) < 2:
        return False
    return max(before for before, _ in counts) - min(after for _, after in counts) > CONNECTED_WITHIN


def judge(draft: Draft, members: Sequence[Candidate]) -> None:
    """Every reason why the communicators of that job cannot be disconnected."""
    ranks = [candidate for candidate in members if communicators_of(candidate) is not None]
    if not ranks:
        return
    proof = proof_of(draft.snapshot, members, [worker.to for worker in draft.workers])
    is_proving = any(candidate.pid in draft.snapshot.proving for candidate in members)
    if proof is not None and proof.verdict == FAILED and not is_proving:
        message = f"process {ranks[0].pid} has {described(proof.combination)}: with these a throwaway job failed"
        hint = f"{_PROVE} to try them again; or {_RESTART}"
        draft.against(REFUSED, f"{message} ({proof.detail})", hint, pid=ranks[0].pid)
    reasons = (*_against_groups(ranks), *_against_missing(ranks, members), *against_one_gpu(draft, ranks))
    for message, hint, pid in reasons:
        draft.against(REFUSED, message, hint, pid=pid)


def combination_of(
    snapshot: NodeSnapshotForPlan, members: Sequence[Candidate], to: Sequence[str | None] = ()
) -> Combination | None:
    """Return the facts that decide whether the communicators of that job survive a move; None for a job without any."""
    groups = [found for candidate in members if (found := communicators_of(candidate)) is not None and candidate.gpus]
    if not groups:
        return None
    known = {gpu.id: gpu for gpu in snapshot.gpus}
    sources = {gpu for candidate in members for gpu in candidate.gpus if gpu in known}
    targets = {gpu for place in to if place is not None for gpu in gpus_of(place) if gpu in known}
    used = [known[gpu] for gpu in sorted(sources | targets)]
    links = {_link(known[one], known[other]) for side in (sources, targets) for one, other in combinations(side, 2)}
    versions = [candidate.agent.framework_version or "" for candidate in members if candidate.agent is not None]
    library = next((found.library for found in groups if found.library), None)
    return Combination(
        driver=listed(sorted({gpu.driver_version or gpu.vendor for gpu in used})),
        library=library or listed(sorted({name for found in groups for name in found.backends})),
        framework_version=max(versions),
        chip=listed(sorted({gpu.chip or gpu.vendor for gpu in used})),
        links=listed(sorted(links)) or "none",
    )


def _link(one: GpuMemory, other: GpuMemory) -> str:
    if one.vendor == SIMULATED:
        return SIMULATED
    return "nvlink" if other.id in one.nvlinks else "pcie"


def proof_of(snapshot: NodeSnapshotForPlan, members: Sequence[Candidate], to: Sequence[str | None]) -> Proof | None:
    """Return the verdict on that job's combination; None for a job without communicators."""
    combination = combination_of(snapshot, members, to)
    if combination is None:
        return None
    proofs = {proof.combination: proof for proof in snapshot.proofs}
    return proofs.get(combination, Proof(combination=combination, verdict=UNPROVEN))


def described(combination: Combination) -> str:
    """The combination in a sentence."""
    library = combination.library
    return (
        f"driver {combination.driver}, {f'NCCL {library}' if library[:1].isdigit() else library}, "
        f"PyTorch {combination.framework_version}, chip {combination.chip} and links {combination.links}"
    )


def _against_groups(ranks: Sequence[Candidate]) -> Iterator[tuple[str, str, int]]:
    reasons: set[str] = set()
    for candidate in ranks:
        groups = communicators_of(candidate)
        for why in () if groups is None else groups.uncovered:
            if why not in reasons:
                reasons.add(why)
                message = f"process {candidate.pid} has communicators that its agent cannot disconnect: {why}"
                yield message, _RESTART, candidate.pid
        if groups is not None and groups.nvls and "nvls" not in reasons:
            reasons.add("nvls")
            message = (
                f"process {candidate.pid} may use NVLink multicast (NVLS), with which the driver's checkpoint hangs"
            )
            hint = "start the job with NCCL_NVLS_ENABLE=0: hegmctl run sets it unless --nvls keep is given"
            yield message, hint, candidate.pid


def against_one_gpu(draft: Draft, ranks: Sequence[Candidate]) -> Iterator[tuple[str, str, int]]:
    """NCCL connects no two ranks of a group on one GPU, except if they seem to be on different hosts. The driver would
    end those when it has restored them, because each waits for the other."""
    by_nccl = {candidate.pid for candidate in ranks if _uses_nccl(candidate)}
    kind = draft.request.kind
    there: dict[str, list[int]] = {}
    for worker in draft.workers:
        if worker.pid in by_nccl and worker.method != KEEP_CONTEXT:
            for gpu in gpus_of(worker.to or worker.gpu):
                there.setdefault(gpu, []).append(worker.pid)
    for gpu, pids in there.items():
        if len(pids) < 2:
            continue
        message = f"NCCL cannot connect ranks on one GPU, and {listed(tuple(map(str, pids)))} would be on {gpu}"
        hint = "name another GPU for each, in rank order, such as --to gpu2,gpu3"
        if kind in (SUSPEND, CHECKPOINT):
            message = (
                f"processes {listed(tuple(map(str, pids)))} use NCCL and are on {gpu}: after a restore by the "
                "driver one would end while it waits for another (XID 109)"
            )
            hint = "move them to a GPU each first: hegmctl migrate --to"
            hint = f"{hint}; or use --keep-context" if kind == SUSPEND else hint
        yield message, hint, pids[0]


def _against_missing(ranks: Sequence[Candidate], members: Sequence[Candidate]) -> Iterator[tuple[str, str, int]]:
    """A communicator is taken down on all its ranks or on none, so every rank has to be here, with an agent."""
    pids = listed(tuple(str(candidate.pid) for candidate in ranks))
    for candidate in members:
        if candidate.agent is None:
            message = f"process {candidate.pid} has no agent, and belongs to ranks with communicators ({pids})"
            yield message, "start all ranks with hegmctl run, in front of their launcher", candidate.pid
    if any(candidate.agent is not None and candidate.agent.rank is None for candidate in ranks):
        message = f"the ranks of the job have {UNNUMBERED}, and communicators can only be disconnected on all ranks"
        yield f"{message}: {pids}", HINT_UNNUMBERED, ranks[0].pid
        return
    world = max((candidate.agent.world_size or 1 for candidate in ranks if candidate.agent), default=1)
    here = [candidate for candidate in members if candidate.agent is not None and candidate.agent.rank is not None]
    without_agent = sum(candidate.agent is None for candidate in members)
    if world > len(here) + without_agent:
        known = f"{len(here)} of the job's {world} ranks are known here"
        message = f"{known}, but communicators can only be disconnected on all ranks"
        hint = (
            "the others have ended, have no agent, or are on other nodes; see hegmctl ps. Start all ranks with hegmctl "
            "run, in front of their launcher; a job on several nodes is restarted as a whole"
        )
        yield message, hint, ranks[0].pid


def without_memory_of_leavers(
    snapshot: NodeSnapshotForPlan, workers: Sequence[PlannedProcess], members: Sequence[Candidate]
) -> NodeSnapshotForPlan | None:
    """Return the node after all ranks of the job have left their GPUs, if a rank goes to the GPU of another; else None.

    Then no bytes are copied directly to a GPU: they wait in host memory until the other rank has left.
    """
    held = {candidate.pid: candidate for candidate in members if communicators_of(candidate) is not None}
    leaving: dict[str, int] = {}
    for worker in workers:
        candidate = held.get(worker.pid)
        if candidate is not None and worker.gpu is not None and worker.to != worker.gpu:
            own_bytes = candidate.vram_bytes or (candidate.agent.size_bytes if candidate.agent else None) or 0
            leaving[worker.gpu] = leaving.get(worker.gpu, 0) + own_bytes
    if not any(worker.pid in held and worker.to in leaving and worker.to != worker.gpu for worker in workers):
        return None
    gpus = [
        gpu.replace(nvlinks=(), free_bytes=None if gpu.free_bytes is None else gpu.free_bytes + leaving.get(gpu.id, 0))
        for gpu in snapshot.gpus
    ]
    return snapshot.replace(gpus=tuple(gpus))


def seconds(members: Sequence[Candidate], kind: str) -> float:
    """Return how much disconnecting and reconnecting adds to the parked time; ranks do it concurrently."""
    groups = [found for candidate in members if (found := communicators_of(candidate)) is not None and found.uses_nccl]
    if not groups:
        return 0.0
    is_suspension = groups[0].mechanism == SUSPENSION
    out_s = max(found.groups for found in groups) * SUSPEND_GROUP_S if is_suspension else ABORT_S
    in_s = RESUME_S if is_suspension else REPLACE_S
    return (0.0 if kind == RESUME else out_s) + (0.0 if kind == SUSPEND else in_s)


def costs(draft: Draft, members: Sequence[Candidate], kind: str) -> Iterator[str]:
    """Yield the costs that a user should know before agreeing."""
    groups = [found for candidate in members if (found := communicators_of(candidate)) is not None]
    if groups:
        ways = {
            SUSPENSION: "NCCL suspends its communicators and resumes them",
            REPLACEMENT: "each backend is aborted and replaced by a new one",
        }
        library = next((f", NCCL {found.library}" for found in groups if found.library), "")
        many = max(found.groups for found in groups)
        backends = listed(tuple(dict.fromkeys(name for found in groups for name in found.backends)))
        added = seconds(members, kind)
        took = f", which takes about {added:.1f} s" if added else ""
        yield (
            f"{len(groups)} ranks disconnect {many} group{'s' * (many != 1)} each ({backends}{library}): "
            f"{ways.get(groups[0].mechanism, groups[0].mechanism)}{took}"
        )
        if any(found.uses_nccl for found in groups):
            yield "the job trains without NVLink multicast (NCCL_NVLS_ENABLE=0), which can slow more than two GPUs"
            yield from _company(draft)
    if (proof := proof_of(draft.snapshot, members, [worker.to for worker in draft.workers])) is not None:
        yield from _verdict(proof, uses_nccl=any(found.uses_nccl for found in groups))
    if draft.reserves_late:
        yield (
            "ranks exchange GPUs that have no memory for both: it is reserved when all ranks have left; if another "
            "process takes it in that moment, the job waits with its bytes in host memory"
        )


def judge_company(draft: Draft) -> None:
    """Refuse GPUs on which ranks with NCCL that the driver has restored would run beside other processes.

    The GPU interrupts no kernel of a restored process for another process (driver 580.159.04). A kernel of NCCL waits
    for other ranks: until they come, the GPU's other processes wait too, and after 5 s the driver ends the rank.
    """
    in_operation = {worker.pid for op in draft.snapshot.running if op.phase != SUSPENDED for worker in op.live}
    is_image = draft.request.kind == CHECKPOINT  # where an image is made, it is restored
    for worker in draft.workers:
        is_restored = worker.method == BY_DRIVER and worker.to != worker.gpu and _may_use_nccl(draft, worker)
        for gpu in () if worker.to == worker.gpu else gpus_of(worker.gpu if is_image else worker.to):
            for pid, needs_gpu in _others_on(draft, gpu).items():
                ranks, beside = (worker.pid, pid) if is_restored else (pid, worker.pid)
                if is_restored or (needs_gpu and not is_image):
                    message = (
                        f"process {ranks} uses NCCL and needs {gpu} for itself after a restore by the driver "
                        f"(XID 109), but process {beside} would be there too"
                    )
                    first = f"end, suspend or move process {pid} first"
                    if pid in in_operation:
                        first = f"wait until the operation on process {pid} has ended (hegmctl ops)"
                    hint = f"{first}, or {'migrate this job' if is_image else 'choose another GPU'}; see hegmctl ps"
                    draft.against(REFUSED, message, hint, pid=worker.pid, gpu=gpu)


def _others_on(draft: Draft, gpu: str) -> dict[int, bool]:
    """Return the processes of other jobs that may compute on that GPU now, or after an operation that is under way, and
    whether each needs it for itself.
    """
    moving = {worker.pid for worker in draft.workers}
    jobs = {(one.uid, one.job) for one in draft.snapshot.candidates if one.pid in moving and one.job is not None}
    own = {one.pid for one in draft.snapshot.candidates if (one.uid, one.job) in jobs} | moving
    idle = {worker.pid for op in draft.snapshot.running if op.phase == SUSPENDED for worker in op.live}
    found: dict[int, bool] = {}
    for one in draft.snapshot.candidates:
        if gpu in one.gpus and one.pid not in idle:
            found[one.pid] = one.agent is not None and one.agent.driver_restored and _uses_nccl(one)
    for other in draft.snapshot.unreachable:
        if gpu in other.gpus and not other.ended:
            found[other.pid] = False
    for op in draft.snapshot.running:
        for worker in () if op.phase == SUSPENDED else op.live:
            if gpu in _places_of(worker):
                will_be_restored = op.kind != QUIESCE and worker.method == BY_DRIVER and _may_use_nccl(draft, worker)
                found[worker.pid] = found.get(worker.pid, False) or will_be_restored
    return {pid: needs_gpu for pid, needs_gpu in found.items() if pid not in own}


def _places_of(worker: JobProcess) -> Iterator[str]:
    """Yield the GPUs on which an operation that is under way may leave that process; a rollback leads to the origin."""
    for place in (worker.target_gpu, worker.origin_gpu, worker.kept_gpu):
        yield from gpus_of(place)


def _may_use_nccl(draft: Draft, worker: PlannedProcess | JobProcess) -> bool:
    """Return True unless its agent reports other backends. An image does not say which backends its ranks have."""
    candidate = candidate_of(draft.snapshot, worker.pid)
    if candidate is None or candidate.agent is None or candidate.agent.communicators is None:
        # The driver moves ranks without an agent too, if they were started with NCCL_P2P_DISABLE=1.
        is_seen = candidate is not None and candidate.agent is None and bool(candidate.around.nccl_shared)
        return bool(worker.communicators) or is_seen
    return candidate.agent.communicators.uses_nccl


def _uses_nccl(candidate: Candidate) -> bool:
    groups = None if candidate.agent is None else candidate.agent.communicators
    return groups is not None and groups.uses_nccl


def _company(draft: Draft) -> Iterator[str]:
    """Name the processes beside ranks that leave their GPUs: the ranks cannot return as long as they are there."""
    pids = {pid for worker in draft.moving for gpu in gpus_of(worker.gpu) for pid in _others_on(draft, gpu)}
    if pids:
        others = [f"process {pid}" for pid in sorted(pids)]
        yield (
            f"{listed(others)} {'is' if len(others) == 1 else 'are'} on its GPUs too: a job with NCCL can only be "
            "resumed on GPUs that it has for itself"
        )


def _verdict(proof: Proof, *, uses_nccl: bool) -> Iterator[str]:
    """Return True if a throwaway job was moved with the same combination. Jobs without NCCL need none."""
    if proof.verdict == PROVEN:
        yield f"proven by hegmctl doctor --nccl: {described(proof.combination)}"
    elif proof.verdict == UNPROVEN and uses_nccl:
        yield f"not proven yet: {described(proof.combination)}; before a job that matters, {_PROVE}"
