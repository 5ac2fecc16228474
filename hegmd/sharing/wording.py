"""The wording of sharing decisions: one short phrase for each case, with numbers.

Owns the words of reasons and of `hegmctl queue`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from hegmd.migration.machine.wording import gigabytes
from hegmd.node.doctor.facts import size_text
from hegmd.sharing.model import ARRIVING, GRANT, RESUME, RUNNING, Gpu, Job
from hegmd.sharing.room import GpuBudget
from hegmd.sharing.wanted import MemoryRequest

_VERBS = {GRANT: "its memory is kept", RESUME: "it resumes"}
_MAX_NAMES = 3
# A job or lease whose turn is after those of others waits for these.
FIRST = "others that come first"
# A new daemon decides nothing before this.
SETTLING = "until the jobs of before have connected to this daemon"


def admitted(request: MemoryRequest, chosen: Sequence[GpuBudget], sizes: Sequence[int]) -> str:
    """Return why it gets its GPUs now."""
    return f"{_then(request)} on {_places(chosen)}, which had {size_text(min(sizes))} free for it"


def follows(request: MemoryRequest, chosen: Sequence[GpuBudget]) -> str:
    """Return what happens to it next."""
    return f"{_then(request)} on {_places(chosen)}"


def leaving(chosen: Iterable[GpuBudget]) -> str:
    """Return whom it waits for, if they are leaving already."""
    names = sorted({name for room in chosen for name in room.leaving})
    return f"until {_listed(names)} {'has' if len(names) == 1 else 'have'} left {_places(chosen)}"


def turns(names: Sequence[str], now: float, at_s: float) -> str:
    """Return whose turn it waits for."""
    return f"until the turn of {_listed(names)} ends in {max(0.0, at_s - now):.0f} s"


class _Holder(NamedTuple):
    """A holder of GPU memory that may not be suspended for a request."""

    text: str
    size_bytes: int
    #: When that memory becomes free, and how an operator frees it sooner.
    ends: str


def occupied(
    request: MemoryRequest, chosen: Sequence[GpuBudget], needs_bytes: Sequence[int], now: float
) -> tuple[str, str]:
    """Return who has the memory and may not be suspended for `request`, the most first, and what happens next."""
    free_bytes = max(0, min(room.now_bytes for room in chosen))
    holders = [holder for room in chosen for holder in _holders(room, request, now)]
    holders.sort(key=lambda holder: (-holder.size_bytes, holder.text))
    texts = list(dict.fromkeys(holder.text for holder in holders))  # a job on two GPUs is one
    shown = [f"{size_text(free_bytes) if free_bytes else 'nothing'} is free", *texts[:_MAX_NAMES]]
    if len(texts) > _MAX_NAMES:
        shown.append(f"and {len(texts) - _MAX_NAMES} more")
    enough = [
        holder for holder in holders if len(chosen) == 1 and holder.size_bytes + chosen[0].soon_bytes >= needs_bytes[0]
    ]
    once = f" once {enough[0].ends}" if enough else ""
    return f"{_needed(request)} on {_places(chosen)}: {', '.join(shown)}", f"{follows(request, chosen)}{once}"


def _holders(room: GpuBudget, request: MemoryRequest, now: float) -> list[_Holder]:
    """Return the leases, jobs and other programs that keep a GPU from `request`."""
    found: list[_Holder] = []
    for lease in room.leases:
        of = f" of {lease.ends_with}" if lease.ends_with else ""
        ends = f"{lease.ends_with or f'lease {lease.id}'} ends; sooner: hegmctl release {lease.id}"
        found.append(_Holder(f"{size_text(lease.size_bytes)} is kept for lease {lease.id}{of}", lease.size_bytes, ends))
    for job, size_bytes in room.present:
        if why := _why_it_stays(job, request, now):
            found.append(_Holder(f"{job.name} with {size_text(size_bytes)} {why}", size_bytes, f"{job.name} ends"))
    for taker, size_bytes in room.takers:
        name = _name(taker)
        found.append(_Holder(f"{name} gets {size_text(size_bytes)}", size_bytes, f"{name} has ended"))
    if room.other_bytes > 0:
        ends = f"they end: hegmctl ps --gpu {room.gpu.id} lists them"
        found.append(_Holder(f"other programs use {size_text(room.other_bytes)}", room.other_bytes, ends))
    return found


def _why_it_stays(job: Job, request: MemoryRequest, now: float) -> str:
    """Return why a job on a GPU is not suspended for `request`; empty if it may be."""
    if job.state != RUNNING:
        return "is about to run" if job.state == ARRIVING else "cannot be suspended now"
    if job.priority > request.priority or not job.is_preemptible:
        return f"has priority {job.priority}"
    if job.hindrance:
        return "cannot be suspended"
    if not request.may_preempt(job.uid):
        return "belongs to another user"
    if job.retry_at_s is not None and job.retry_at_s > now:
        return "could not be suspended a moment ago"
    return f"has the same priority, {job.priority}" if job.priority == request.priority else ""


def held(rooms: Iterable[GpuBudget]) -> str:
    """Return which jobs wait before it for every GPU that it can have."""
    names = sorted({_name(room.hold.request) for room in rooms if room.hold is not None})
    return f"{_listed(names)}, which {'comes' if len(names) == 1 else 'come'} first" if names else FIRST


def full_pool(free_bytes: float) -> str:
    """Return that nothing can be suspended, because the pool is full."""
    return f"pool memory for the jobs that would be suspended: {size_text(int(free_bytes))} is free"


def unsuitable(request: MemoryRequest, gpus: Iterable[Gpu], rooms: Mapping[str, GpuBudget]) -> str:
    """Return that no GPU can ever have it."""
    known = [gpu for gpu in gpus if request.allowed_gpus is None or gpu.id in request.allowed_gpus]
    usable = [
        gpu for gpu in known if gpu.is_healthy and gpu.free_bytes is not None and request.chip in (None, gpu.chip)
    ]
    where = " or ".join(request.allowed_gpus) if request.allowed_gpus else "this node"
    kind = f" of type {request.chip}" if request.chip else ""
    if len(usable) < request.gpu_count:
        count = f"{request.gpu_count} healthy GPUs" if request.gpu_count > 1 else "a healthy GPU"
        return f"{count}{kind}: {where} has {len(usable) or 'none'}"
    largest = max(usable, key=lambda gpu: (rooms[gpu.id].capacity_bytes, gpu.id))
    place = f"{request.gpu_count} GPUs" if request.gpu_count > 1 else "a GPU"
    capacity_bytes = rooms[largest.id].capacity_bytes
    return f"{_exactly(request, capacity_bytes)} on {place}{kind}: {most_of(largest, capacity_bytes)}"


def most_of(gpu: Gpu, capacity_bytes: int) -> str:
    """Return how much of a GPU jobs and leases can have at most, and who has the rest."""
    others_bytes = gpu.total_bytes - gpu.kept_bytes - gpu.copying_bytes - gpu.contexts_bytes - capacity_bytes
    rest = [f"the driver and hegmd keep {gigabytes(gpu.kept_bytes)}"] if gpu.kept_bytes else []
    rest += [f"hegmd uses {gigabytes(gpu.copying_bytes)} until its copies end"] if gpu.copying_bytes else []
    rest += [f"suspended jobs keep contexts of {gigabytes(gpu.contexts_bytes)}"] if gpu.contexts_bytes else []
    rest += [f"other programs use {gigabytes(others_bytes)}"] if others_bytes > 0 else []
    of = f" of its {gigabytes(gpu.total_bytes)}: {_listed(rest)}" if rest else ""
    return f"{gpu.id} has at most {gigabytes(capacity_bytes)} for jobs{of}"


def displaced(beneficiary: MemoryRequest, gpus: Sequence[str], ran_s: float | None) -> str:
    """Return why a job has to leave; `ran_s` is how long its turn was, or None if its turn has not ended."""
    if ran_s is None:
        return f"{_name(beneficiary)} of priority {beneficiary.priority} needs {', '.join(gpus)}"
    return f"its turn of {ran_s:.0f} s on {', '.join(gpus)} has ended, and {_name(beneficiary)} waits"


def waits(what: str) -> str:
    """Return the words of `WaitReason.waits` as a part of a sentence."""
    return f"waits {what}" if what.startswith("until ") else f"waits for {what}"


def _name(request: MemoryRequest) -> str:
    """Return the name of a job, or the id of a lease: its name is its user's."""
    return f"lease {request.id}" if request.job is None else request.name


def _then(request: MemoryRequest) -> str:
    return _VERBS.get(request.action, "it starts")


def _needed(request: MemoryRequest) -> str:
    is_several = request.gpu_count > 1
    if request.needs_bytes is None:
        return "whole GPUs" if is_several else "a whole GPU"
    return f"{size_text(max(request.needs_bytes))}{' each' if is_several else ''}"


def _exactly(request: MemoryRequest, capacity_bytes: int) -> str:
    """Return the size so that it differs from the memory that a GPU has for it."""
    if request.needs_bytes is None:
        return "a whole GPU"
    return above(max(request.needs_bytes), capacity_bytes)


def above(size_bytes: int, capacity_bytes: int) -> str:
    """Return a size that is above a capacity: with the difference if both are the same in words."""
    if gigabytes(size_bytes) != gigabytes(capacity_bytes):
        return gigabytes(size_bytes)
    return f"{gigabytes(size_bytes)} and {size_bytes - capacity_bytes:,} bytes"


def _places(rooms: Iterable[GpuBudget]) -> str:
    return ", ".join(room.gpu.id for room in rooms)


def _listed(names: Sequence[str]) -> str:
    shown = [*names[:_MAX_NAMES], *([f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown) or "others"
