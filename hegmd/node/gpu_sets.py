"""The GPUs of a process: one, or several, named in the order of its devices, as in `gpu2,gpu3`.

A process that trains on the CPU has a place too: it has no GPU and no reservation, and only a restart leads to it or
away from it.

Owns the notation of such a place, and calculations that are the same for one GPU and several. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

CPU = "cpu"
ONLY_ITS_GPUS = "start it with only its GPUs: hegmctl run --gpu, or CUDA_VISIBLE_DEVICES"
# Several processes of a job that are not told apart.
UNNUMBERED = "no RANK and WORLD_SIZE in their environment"
HINT_UNNUMBERED = (
    "start them with torchrun, which sets these for each rank (torch.multiprocessing.spawn does not), or start each as "
    "a separate job"
)
_BETWEEN = ","


def place_of(gpus: Iterable[str]) -> str:
    """Return the name of these GPUs as one place."""
    return _BETWEEN.join(gpus)


def gpus_of(place: str | None) -> tuple[str, ...]:
    """Return the GPUs of a place in the order of the process's devices; none for None and for the CPU."""
    return () if place is None or place == CPU else tuple(place.split(_BETWEEN))


def is_several(place: str | None) -> bool:
    return place is not None and _BETWEEN in place


def shared_out(place: str | None, bytes_by_gpu: Sequence[int], whole_bytes: int) -> dict[str, int]:
    """Return the need on each GPU of a place: the share of each device or, if unknown, all of it on each."""
    gpus = gpus_of(place)
    if len(bytes_by_gpu) == len(gpus):
        return dict(zip(gpus, bytes_by_gpu, strict=True))
    return dict.fromkeys(gpus, whole_bytes)


def added(shares: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    """Add two needs device by device. If one is not known by device, return the first alone."""
    return tuple([one + other for one, other in zip(shares, more, strict=True)]) if more else tuple(shares)


def more_than(needed: Mapping[str, int], own: Mapping[str, int]) -> dict[str, int]:
    """Return the need on each GPU beyond the memory already there."""
    return {gpu: max(0, size_bytes - own.get(gpu, 0)) for gpu, size_bytes in needed.items()}


def exchange(old: Sequence[str], new: Sequence[str]) -> dict[str, str]:
    """Return the permutation of all GPUs that moves devices from the old ones to the new ones.

    Displaced GPUs go to the freed ones, in order; other GPUs stay.
    """
    changed = dict(zip(old, new, strict=True))
    vacant = [gpu for gpu in old if gpu not in new]
    displaced = [gpu for gpu in new if gpu not in old]
    return {**changed, **dict(zip(displaced, vacant, strict=True))}


def unseen_device(numbers: Iterable[int | None], count: int) -> str | None:
    """Return, as what a job does, that it uses a device which a new process on `count` GPUs would not have.

    A new process sees only its GPUs, and numbers them from 0 on. None if it has all devices. `numbers` are those in
    use, as 1 of `cuda:1`; None counts as a device that it has.
    """
    last = max((number for number in numbers if number is not None), default=0)
    if last < count:
        return None
    sees = "one GPU only, as cuda:0" if count == 1 else f"{count} GPUs only, from cuda:0 to cuda:{count - 1}"
    return f"uses cuda:{last}, and a new process would see {sees}"
