"""What the sharing policy says about a decision: one short sentence part for each case, with numbers.

Owns the words of reasons and of `hegmctl queue`. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hegmd.node.doctor.facts import size_text
from hegmd.sharing.model import GRANT, RESUME, Gpu
from hegmd.sharing.room import Room
from hegmd.sharing.wanted import Wanted

_VERBS = {GRANT: "its memory is kept", RESUME: "it resumes"}
_MAX_NAMES = 3


def admitted(wanted: Wanted, chosen: Sequence[Room], sizes: Sequence[int]) -> str:
    """Return why it gets its GPUs now."""
    return f"{_then(wanted)} on {_places(chosen)}, which had {size_text(min(sizes))} free for it"


def follows(wanted: Wanted, chosen: Sequence[Room]) -> str:
    """Return what happens to it next."""
    return f"{_then(wanted)} on {_places(chosen)}"


def leaving(chosen: Iterable[Room]) -> str:
    """Return whom it waits for, if they are leaving already."""
    names = sorted({name for room in chosen for name in room.leaving})
    return f"until {_listed(names)} {'has' if len(names) == 1 else 'have'} left {_places(chosen)}"


def turns(names: Sequence[str], now: float, at_s: float) -> str:
    """Return whose turn it waits for."""
    return f"until the turn of {_listed(names)} ends in {max(0.0, at_s - now):.0f} s"


def occupied(wanted: Wanted, chosen: Sequence[Room]) -> str:
    """Return that jobs and leases which may not be suspended for it have the memory."""
    needed = _needed(wanted)
    free_bytes = max(0, min(room.now_bytes for room in chosen))
    leased = {lease: size_bytes for room in chosen for lease, size_bytes in room.leased_bytes.items()}
    kept = ""
    if leased:
        kept = f", {size_text(sum(leased.values()))} is kept for {_listed([f'lease {lease}' for lease in leased])}"
    return (
        f"{needed} on {_places(chosen)}: {size_text(free_bytes)} is free{kept}, "
        "and too little of the rest may be suspended"
    )


def held(rooms: Iterable[Room]) -> str:
    """Return which jobs wait before it for every GPU that it can have."""
    names = sorted({room.hold.wanted.name for room in rooms if room.hold is not None})
    return f"{_listed(names)} before it" if names else "others before it"


def full_pool(free_bytes: float) -> str:
    """Return that nothing can be suspended, because the pool is full."""
    return f"room of the pool's memory for the jobs that would be suspended: {size_text(int(free_bytes))} is free"


def unsuitable(wanted: Wanted, gpus: Iterable[Gpu]) -> str:
    """Return that no GPU can ever have it."""
    known = [gpu for gpu in gpus if wanted.allowed_gpus is None or gpu.id in wanted.allowed_gpus]
    usable = [gpu for gpu in known if gpu.is_healthy and gpu.free_bytes is not None]
    where = " or ".join(wanted.allowed_gpus) if wanted.allowed_gpus else "this node"
    if not usable:
        return f"a healthy GPU: {where} has none"
    largest_bytes = max(gpu.total_bytes for gpu in usable)
    kind = f" of type {wanted.chip}" if wanted.chip else ""
    return f"{_needed(wanted)} on {wanted.gpu_count} GPU{kind}; the largest on {where} has {size_text(largest_bytes)}"


def displaced(beneficiary: Wanted, gpus: Sequence[str], ran_s: float | None) -> str:
    """Return why a job has to leave; `ran_s` is how long its turn was, or None if its turn has not ended."""
    if ran_s is None:
        return f"{beneficiary.name} of priority {beneficiary.priority} needs {', '.join(gpus)}"
    return f"its turn of {ran_s:.0f} s on {', '.join(gpus)} has ended, and {beneficiary.name} waits"


def waits(what: str) -> str:
    """Return the words of `Waiting.waits` as a part of a sentence."""
    return f"waits {what}" if what.startswith("until ") else f"waits for {what}"


def _then(wanted: Wanted) -> str:
    return _VERBS.get(wanted.action, "it starts")


def _needed(wanted: Wanted) -> str:
    return "a whole GPU" if wanted.needs_bytes is None else size_text(max(wanted.needs_bytes))


def _places(rooms: Iterable[Room]) -> str:
    return ", ".join(room.gpu.id for room in rooms)


def _listed(names: Sequence[str]) -> str:
    shown = [*names[:_MAX_NAMES], *([f"{len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else [])]
    return " and ".join([", ".join(shown[:-1]), shown[-1]]) if len(shown) > 1 else "".join(shown) or "others"
