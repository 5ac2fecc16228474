"""Where a process is: on one GPU, or on several, which are named in the order of its devices, as in `gpu2,gpu3`.

Or on none at all, by its own choice: one that trains on the CPU is at a place as well, which has no GPU and no room
that is to be held, and which a process only comes to, and leaves, by being started anew.

Owns how such a place is written, and what is the same for one GPU and for several. Most of what moves knows of places
alone: they are where a worker is, where it is to be, and what room is held on. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

CPU = "cpu"
_BETWEEN = ","


def place_of(gpus: Iterable[str]) -> str:
    """What those GPUs are called as one place."""
    return _BETWEEN.join(gpus)


def gpus_of(place: str | None) -> tuple[str, ...]:
    """The GPUs of a place, in the order of the process's devices; none for None and for the CPU."""
    return () if place is None or place == CPU else tuple(place.split(_BETWEEN))


def is_several(place: str | None) -> bool:
    """Whether that place is more than one GPU."""
    return place is not None and _BETWEEN in place


def shared_out(place: str | None, bytes_by_gpu: Sequence[int], whole_bytes: int) -> dict[str, int]:
    """What is needed on each GPU of a place: a share for each device, or, where none are known, all of it anywhere."""
    gpus = gpus_of(place)
    if len(bytes_by_gpu) == len(gpus):
        return dict(zip(gpus, bytes_by_gpu, strict=True))
    return dict.fromkeys(gpus, whole_bytes)


def added(shares: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    """What each device needs of both; the first alone where of the other nothing is known by device."""
    return tuple([one + other for one, other in zip(shares, more, strict=True)]) if more else tuple(shares)


def more_than(needed: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """What is needed on each GPU beyond what is there already."""
    return {gpu: max(0, size_bytes - own.get(gpu, 0)) for gpu, size_bytes in needed.items()}


def exchange(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Which GPU takes the place of which when devices go from the old ones to the new ones; a permutation of them all.

    What they displace goes to where room was made, in their order; GPUs that are not named stay.
    """
    changed = dict(zip(old, new, strict=True))
    vacant = [gpu for gpu in old if gpu not in new]
    displaced = [gpu for gpu in new if gpu not in old]
    return {**changed, **dict(zip(displaced, vacant, strict=True))}
