"""Where a process is to go: what was asked for as a place, and what stands against each GPU of it.

Owns the words in which a target can be named. For a process on one GPU that is one GPU. For one on several it is a GPU
for each of its devices (`gpu2,gpu3`, in the order in which `hegmctl ps` has them) or for some (`gpu0=gpu2`), the others
staying; one name alone would leave open what is meant. Pure.
"""

from __future__ import annotations

from hegmd.errors import BAD_REQUEST, NOT_FOUND, REFUSED
from hegmd.migration.machine.operation import JobProcess
from hegmd.migration.machine.wording import listed
from hegmd.migration.model import GpuMemory
from hegmd.migration.plan.draft import Draft
from hegmd.migration.plan.members import NVIDIA
from hegmd.node.gpu_sets import CPU, gpus_of, is_several, place_of

_TO = "="


def destination(draft: Draft, pid: int, source: str | None, asked: str, *, anew: bool = False) -> str | None:
    """The place that was asked for by those words; None, with the reason in the draft, if they name none.

    `anew` it is for a process that is yet to be started.
    """
    here = gpus_of(source)
    if asked == CPU:
        if not anew:
            hint = f"have it started again without a GPU: hegmctl migrate {pid} --via restart --to {CPU}"
            draft.against(REFUSED, f"process {pid} cannot go on on the CPU as it is", hint, pid=pid)
        return CPU if anew else None
    if _TO in asked:
        return _exchanged(draft, pid, here, asked)
    there = gpus_of(asked)
    if len(there) != max(1, len(here)) and not (anew and len(there) == 1):
        _against_count(draft, pid, here, there)
        return None
    return _of_its_own(draft, pid, there)


def _exchanged(draft: Draft, pid: int, here: tuple[str, ...], asked: str) -> str | None:
    pairs = [part.split(_TO) for part in asked.split(",")]
    to = {pair[0]: pair[1] for pair in pairs if len(pair) == 2 and pair[1]}
    if len(to) != len(pairs):
        hint = f"for example: hegmctl migrate {pid} --to gpu0=gpu2,gpu1=gpu3"
        draft.against(BAD_REQUEST, f"{asked[:80]!r} does not say which GPU takes the place of which", hint, pid=pid)
        return None
    strange = [gpu for gpu in to if gpu not in here]
    if strange:
        where = listed(here) if here else "no GPU that is known"
        hint = f"name a GPU that it is on, before the {_TO}; see hegmctl ps"
        draft.against(REFUSED, f"process {pid} is on {where}, not on {listed(tuple(strange))}", hint, pid=pid)
        return None
    return _of_its_own(draft, pid, tuple([to.get(gpu, gpu) for gpu in here]))


def _of_its_own(draft: Draft, pid: int, there: tuple[str, ...]) -> str | None:
    """Each device needs a GPU of its own: the driver's map is a permutation."""
    if len(set(there)) == len(there):
        return place_of(there)
    twice = next(gpu for gpu in there if there.count(gpu) > 1)
    message = f"two devices of process {pid} cannot come together on {twice}"
    draft.against(REFUSED, message, "name a GPU of its own for each; see hegmctl gpus", pid=pid, gpu=twice)
    return None


def _against_count(draft: Draft, pid: int, here: tuple[str, ...], there: tuple[str, ...]) -> None:
    if len(here) < 2:
        message = f"process {pid} is on {place_of(here) or 'no GPU'}, and {len(there)} GPUs were named"
        draft.against(REFUSED, message, f"name one: hegmctl migrate {pid} --to {there[0]}", pid=pid)
        return
    free = [gpu.id for gpu in draft.snapshot.gpus if gpu.id not in here]
    others = [*dict.fromkeys([*(gpu for gpu in there if gpu not in here), *free]), *reversed(here)]
    whole = place_of(others[: len(here)])
    hint = (
        f"name a GPU for each, in that order: hegmctl migrate {pid} --to {whole}; "
        f"or one for one of them: hegmctl migrate {pid} --to {here[0]}{_TO}{there[0]}"
    )
    draft.against(REFUSED, f"process {pid} is on {listed(here)}, and {len(there)} GPU was named", hint, pid=pid)


def judge_place(draft: Draft, to: str, source: str | None, vendor: str, chip: str | None) -> None:
    """What stands against each GPU of the place, for a process that is at `source`, if it is anywhere."""
    here = gpus_of(source)
    for number, gpu in enumerate(gpus_of(to)):
        judge_target(draft, gpu, vendor, chip, stays=number < len(here) and here[number] == gpu)


def judge_target(draft: Draft, to: str, vendor: str, chip: str | None, *, stays: bool) -> None:
    """What stands against that GPU."""
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


def judge_source(draft: Draft, pid: int, place: str) -> tuple[GpuMemory, ...]:
    """The GPUs that a process is on; none, with the reasons in the draft, where they do not all answer or differ."""
    found = {gpu: draft.gpu(gpu) for gpu in gpus_of(place)}
    own = [gpu for gpu in found.values() if gpu is not None and gpu.state == "ok"]
    for name, gpu in found.items():
        if gpu not in own:
            state = "unknown" if gpu is None else gpu.state
            hint = "nothing can be fetched from a GPU that does not answer; see hegmctl doctor"
            draft.against(REFUSED, f"{name} is {state}", hint, gpu=name)
    if len(own) != len(found):
        return ()
    if is_several(place) and len({(gpu.vendor, gpu.chip) for gpu in own}) > 1:
        message = f"process {pid} is on {listed(gpus_of(place))}, which are not of one chip"
        draft.against(REFUSED, message, "only processes on equal chips can be moved", pid=pid)
        return ()
    return tuple(own)


def place_anywhere(draft: Draft, worker: JobProcess) -> str | None:
    """It comes back where the driver had it, and nobody knows where that was: so there is to be room on every GPU."""
    gpus = tuple([gpu.id for gpu in draft.snapshot.gpus if gpu.vendor == NVIDIA])
    to = draft.request.placement.get(str(worker.pid), draft.request.to)
    if to is not None and gpus != (to,):
        message = f"on which GPU the driver had process {worker.pid} is not known, and it can only come back there"
        hint = f"leave --to out, and once it runs: hegmctl migrate {worker.pid} --to {to}"
        draft.against(REFUSED, message, hint, pid=worker.pid)
    for gpu in gpus:
        judge_target(draft, gpu, NVIDIA, worker.chip, stays=False)
    draft.anywhere[worker.pid] = gpus
    return gpus[0] if gpus else None
