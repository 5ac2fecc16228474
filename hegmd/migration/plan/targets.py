"""The target of a process: what was requested, and the reasons against each GPU of it.

Owns the syntax of targets. For a process on one GPU the target is one GPU. For several it is one GPU for each
(`gpu2,gpu3`, in the order of `hegmctl ps`) or for some of them (`gpu0=gpu2`), while the others stay; a single name
would be ambiguous. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hegmd.errors import BAD_REQUEST, NOT_FOUND, REFUSED
from hegmd.migration.machine.operation import JobProcess
from hegmd.migration.machine.wording import listed, no_such_gpu
from hegmd.migration.model import GpuMemory
from hegmd.migration.plan import driver_rules
from hegmd.migration.plan.draft import Draft
from hegmd.migration.plan.members import NVIDIA
from hegmd.node.gpu_sets import CPU, gpus_of, is_several, place_of
from hegmd.protocol.snapshots import GONE, HEALTHY

_TO = "="


def destination(draft: Draft, pid: int, source: str | None, target: str, *, anew: bool = False) -> str | None:
    """Return the requested place, or None with the reason in the draft. `anew`: the process will be started."""
    here = gpus_of(source)
    if target == CPU:
        if not anew:
            hint = f"restart it without a GPU: hegmctl migrate {pid} --via restart --to {CPU}"
            draft.against(REFUSED, f"process {pid} cannot continue on the CPU without a restart", hint, pid=pid)
        return CPU if anew else None
    if _TO in target:
        return _exchanged(draft, pid, here, target)
    if _has_empty_name(draft, pid, target):
        return None
    there = gpus_of(target)
    if len(there) != max(1, len(here)) and not (anew and len(there) == 1):
        _against_count(draft, pid, here, there)
        return None
    return _require_distinct_gpus(draft, pid, there)


def place_ranks(draft: Draft, ranks: Sequence[tuple[int, str | None]]) -> bool:
    """Take several GPUs that were named for the ranks of a job apart: `gpu2,gpu3` in rank order, `gpu0=gpu2` by place.

    `ranks` has the pid of each, and where it is or was. False, with the reason in the draft, if the words fit no job.
    """
    target = draft.request.to
    if target is None or len(ranks) < 2 or any(is_several(source) for _, source in ranks):
        return True
    if not {_TO, ","}.intersection(target):
        return True
    if _TO in target:
        sources = tuple(dict.fromkeys(source for _, source in ranks if source is not None))
        pairs = [part.split(_TO) for part in target.split(",")]
        to = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1]}
        strange = [gpu for gpu in to if gpu not in sources]
        if len(to) != len(pairs) or strange:
            old = sources[0] if sources else "gpu0"
            new = next((gpu.id for gpu in draft.snapshot.gpus if gpu.id != old), old)
            hint = f"name a pair of GPUs, such as --to {old}{_TO}{new}; several are separated by commas"
            message = f"{target[:80]!r} does not say which GPU replaces which of {listed(sources) or 'none'}"
            draft.against(BAD_REQUEST, message, hint, pid=ranks[0][0])
            return False
        placement = {str(pid): to.get(source, source) for pid, source in ranks if source is not None}
    elif _has_empty_name(draft, ranks[0][0], target):
        return False
    else:
        there = gpus_of(target)
        if len(there) != len(ranks):
            each = ",".join((*there, *there * len(ranks))[: len(ranks)])
            hint = f"name a GPU for each in rank order, one of them as often as you want: --to {each}"
            message = f"the job has {len(ranks)} ranks, and {len(there)} GPUs were named"
            draft.against(REFUSED, message, hint, pid=ranks[0][0])
            return False
        placement = {str(pid): gpu for (pid, _), gpu in zip(ranks, there, strict=True)}
    draft.request = draft.request.replace(to=None, placement={**placement, **draft.request.placement})
    return True


def leave_failed_gpus(draft: Draft, workers: Iterable[JobProcess]) -> tuple[str, ...]:
    """Place processes that are resumed without `--to` on healthy GPUs of their chip in place of failing ones.

    Return a note for each such GPU. One without such another stays: a plan judges it like any other.
    """
    homes = {
        worker.pid: (gpus_of(worker.kept_gpu or worker.first_gpu), worker)
        for worker in workers
        if worker.gpu is None and not worker.gpu_unknown and not worker.keeps_context
    }
    gpus = {gpu.id: gpu for gpu in draft.snapshot.gpus}
    taken = {name for home, _ in homes.values() for name in home}
    spare = [gpu for gpu in gpus.values() if _is_healthy(gpu) and gpu.id not in taken and not (gpu.mig or gpu.mps)]
    spare.sort(key=lambda gpu: gpu.leased_bytes - (gpu.free_bytes or 0))
    instead: dict[str, str] = {}
    for home, worker in homes.values():
        for old in [gpus[name] for name in home if name in gpus and name not in instead]:
            fit = [one for one in spare if one.vendor == old.vendor and one.chip == (worker.chip or old.chip)]
            stays = old.vendor == NVIDIA and not worker.restarts and any(driver_rules.against_moving(old))
            if fit and not stays and not _is_healthy(old):
                spare.remove(fit[0])
                instead[old.id] = fit[0].id
    placement = {
        str(pid): place_of([instead.get(name, name) for name in home])
        for pid, (home, _) in homes.items()
        if not instead.keys().isdisjoint(home)
    }
    draft.request = draft.request.replace(placement={**placement, **draft.request.placement})
    return tuple([f"{old} is {_how(gpus[old])}: the job resumes on {new}" for old, new in instead.items()])


def _is_healthy(gpu: GpuMemory) -> bool:
    return gpu.state == "ok" and gpu.condition == HEALTHY


def _how(gpu: GpuMemory) -> str:
    return gpu.state if gpu.condition == HEALTHY else f"{gpu.condition} ({gpu.why})"


def _has_empty_name(draft: Draft, pid: int, asked: str) -> bool:
    """Return True, with the reason in the draft, if a name between the commas of `--to` is empty."""
    if all(gpus_of(asked)):
        return False
    ids = [gpu.id for gpu in draft.snapshot.gpus]
    hint = f"name GPUs with commas between them, such as --to {place_of(ids[:2])}; see hegmctl gpus"
    draft.against(BAD_REQUEST, f"{asked[:80]!r} has an empty name in it", hint, pid=pid)
    return True


def against_one_gpu(draft: Draft, ranks: Sequence[tuple[int, str | None]]) -> bool:
    """Return True, with the reason in the draft, if `--to` names one GPU for ranks of a job that are on several.

    Putting them on one GPU makes the job much slower, and NCCL does not allow it. A user can ask for it: `gpu3,gpu3`.
    """
    target = draft.request.to
    sources = tuple(dict.fromkeys(source for pid, source in ranks if str(pid) not in draft.request.placement))
    if (
        target is None
        or target == CPU
        or {_TO, ","}.intersection(target)
        or any(is_several(place) for place in sources)
    ):
        return False
    if len(sources) < 2 or not all(sources):
        return False
    here = [source for source in sources if source]
    by_room = sorted(draft.snapshot.gpus, key=lambda gpu: -(gpu.free_bytes or 0))
    others = [
        target,
        *[gpu.id for gpu in by_room if gpu.id not in (target, *here)],
        *[gpu for gpu in here if gpu != target],
    ]
    hint = f"name a GPU for each in rank order: --to {','.join((*others, *[target] * len(ranks))[: len(ranks)])}"
    if _have_nccl(draft, [pid for pid, _ in ranks]):  # which connects no two ranks on one GPU
        enough = len(others) >= len(ranks)
        hint = hint if enough else f"NCCL needs a GPU for each rank, and this node has {len(others)}; see hegmctl gpus"
    else:
        hint += f"; to put them all on {target}: --to {','.join([target] * len(ranks))}"
    message = f"the job has {len(ranks)} ranks, on {listed(tuple(here))}, and --to names one GPU"
    draft.against(REFUSED, message, hint, pid=ranks[0][0], gpu=target)
    return True


def _have_nccl(draft: Draft, pids: Sequence[int]) -> bool:
    agents = [candidate.agent for candidate in draft.snapshot.candidates if candidate.pid in pids]
    groups = [agent.communicators for agent in agents if agent is not None]
    return any(found is not None and found.uses_nccl for found in groups)


def _exchanged(draft: Draft, pid: int, here: tuple[str, ...], target: str) -> str | None:
    pairs = [part.split(_TO) for part in target.split(",")]
    to = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1]}
    if len(to) != len(pairs):
        hint = f"write, for example: hegmctl migrate {pid} --to gpu0=gpu2,gpu1=gpu3"
        draft.against(BAD_REQUEST, f"{target[:80]!r} does not map each source GPU to a target GPU", hint, pid=pid)
        return None
    strange = [gpu for gpu in to if gpu not in here]
    if strange:
        where = listed(here) if here else "no known GPU"
        hint = f"give a GPU that it uses before the {_TO}; see hegmctl ps"
        draft.against(REFUSED, f"process {pid} is on {where}, not on {listed(tuple(strange))}", hint, pid=pid)
        return None
    return _require_distinct_gpus(draft, pid, tuple([to.get(gpu, gpu) for gpu in here]))


def _require_distinct_gpus(draft: Draft, pid: int, there: tuple[str, ...]) -> str | None:
    """Check that each device has a GPU of its own: the driver's map is a permutation."""
    if len(set(there)) == len(there):
        return place_of(there)
    twice = next(gpu for gpu in there if there.count(gpu) > 1)
    message = f"two GPUs of process {pid} cannot both move to {twice}"
    draft.against(REFUSED, message, "give a separate GPU for each; see hegmctl gpus", pid=pid, gpu=twice)
    return None


def _against_count(draft: Draft, pid: int, here: tuple[str, ...], there: tuple[str, ...]) -> None:
    if len(here) < 2:
        message = f"process {pid} is on {place_of(here) or 'no GPU'}, but --to gives {len(there)} GPUs"
        draft.against(REFUSED, message, f"name one: hegmctl migrate {pid} --to {there[0]}", pid=pid)
        return
    free = [gpu.id for gpu in draft.snapshot.gpus if gpu.id not in here]
    others = [*dict.fromkeys([*(gpu for gpu in there if gpu not in here), *free]), *reversed(here)]
    whole = place_of(others[: len(here)])
    hint = (
        f"give one GPU for each, in that order: hegmctl migrate {pid} --to {whole}; or replace one of them: hegmctl "
        f"migrate {pid} --to {here[0]}{_TO}{there[0]}"
    )
    draft.against(REFUSED, f"process {pid} is on {listed(here)}, but --to gives {len(there)} GPU", hint, pid=pid)


def judge_place(draft: Draft, to: str, source: str | None, vendor: str, chip: str | None) -> None:
    """Add the reasons against each GPU of the target, for a process that is at `source`, if anywhere."""
    here = gpus_of(source)
    for number, gpu in enumerate(gpus_of(to)):
        judge_target(draft, gpu, vendor, chip, stays=number < len(here) and here[number] == gpu)


def judge_target(draft: Draft, to: str, vendor: str, chip: str | None, *, stays: bool) -> None:
    """Add the reasons against that GPU."""
    target = draft.gpu(to)
    if target is None:
        ids = tuple(gpu.id for gpu in draft.snapshot.gpus)
        draft.against(NOT_FOUND, *no_such_gpu(to, ids), gpu=to)
    elif stays:
        return
    elif target.state != "ok":
        draft.against(REFUSED, f"{to} is {target.state}", "choose another with --to; see hegmctl gpus", gpu=to)
    elif target.condition == GONE:
        draft.against(REFUSED, f"{to} is gone: {target.why}", "choose another with --to; see hegmctl gpus", gpu=to)
    elif target.mig or target.mps:
        how = "cut into MIG instances" if target.mig else "shared through MPS"
        draft.against(REFUSED, f"{to} is {how}", "choose a GPU without MIG and MPS; see hegmctl gpus", gpu=to)
    elif target.vendor != vendor or (chip is not None and target.chip != chip):
        hint = "choose a GPU with the same chip; see hegmctl gpus"
        draft.against(REFUSED, f"{to} has another chip: {target.chip or 'unknown'}, not {chip}", hint, gpu=to)


def judge_source(draft: Draft, pid: int, place: str) -> tuple[GpuMemory, ...]:
    """The GPUs that a process is on; none, with the reasons in the draft, where they do not all answer or differ."""
    found = {gpu: draft.gpu(gpu) for gpu in gpus_of(place)}
    own = [gpu for gpu in found.values() if gpu is not None and gpu.state == "ok"]
    for name, gpu in found.items():
        if gpu not in own:
            state = "unknown" if gpu is None else gpu.state
            hint = "run: hegmctl doctor; hegmd cannot copy from a GPU that does not answer"
            draft.against(REFUSED, f"{name} is {state}", hint, gpu=name)
    if len(own) != len(found):
        return ()
    if is_several(place) and len({(gpu.vendor, gpu.chip) for gpu in own}) > 1:
        message = f"process {pid} is on {listed(gpus_of(place))}, which have different chips"
        draft.against(REFUSED, message, "run the job on GPUs of one chip: hegmd can only move it then", pid=pid)
        return ()
    return tuple(own)


def place_anywhere(draft: Draft, worker: JobProcess) -> str | None:
    """Return a target for a process whose former GPU is unknown, after checking every GPU: the driver may use any."""
    gpus = tuple([gpu.id for gpu in draft.snapshot.gpus if gpu.vendor == NVIDIA])
    to = draft.request.placement.get(str(worker.pid), draft.request.to)
    if to is not None and gpus != (to,):
        message = f"the former GPU of process {worker.pid} is unknown, and the driver can only restore it there"
        hint = f"omit --to; once it runs, run: hegmctl migrate {worker.pid} --to {to}"
        draft.against(REFUSED, message, hint, pid=worker.pid)
    for gpu in gpus:
        judge_target(draft, gpu, NVIDIA, worker.chip, stays=False)
    draft.anywhere[worker.pid] = gpus
    return gpus[0] if gpus else None
