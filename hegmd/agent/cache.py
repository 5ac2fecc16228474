"""GPU memory that PyTorch's allocator caches: returned to the driver while storages are offloaded, then allocated
again.

Activations, gradients and the workspaces of cuBLAS use memory that the allocator caches between steps. It is returned
before the process leaves its GPU, because the driver would transfer it. Without it the process would ask the driver for
memory at its next step, and fail if another process has taken it all. So it is allocated again right after the
storages, while the reservation is the process's own.

Records how much memory that was, and in which runs: the space between the storages, by stream. Each run is allocated as
one piece, whole if it fits. Memory that the allocator adds to each large storage is no run. Small runs only fill up to
the former size of the small segments. If the cache took more than before, it would have to cut another run, the next
step would need new memory, and the job would grow with each move. All pieces are held until the last storage is
allocated, and are then freed into the allocator's cache. So whatever fitted there before fits again. Memory that cannot
be allocated is counted and is no error: the storages are there, and the GPU may have free memory in time. The
allocator's statistics count these pieces as memory in use for a moment.

If the allocator reports no segments (cudaMallocAsync), all is one run. Private pools of CUDA graphs stay.
"""

from __future__ import annotations

from . import cuda_state
from .copying import round_up
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_MIB = 1 << 20
# PyTorch's allocator cuts up to 1 MiB from segments of 2 MiB, and less than 10 MiB from segments of 20.
_SMALL_BYTES, _UNIT_BYTES, _LARGE_BYTES, _SHARED_BYTES = _MIB, 2 * _MIB, 10 * _MIB, 20 * _MIB
_BLOCK_BYTES = 512
_SMALL_POOL = "small_pool"
# Each piece costs a driver call while the job is parked. More runs than this are merged, one piece for each stream.
MAX_RUNS = 64
_MAX_SMALL = 256


class Run:
    """A block of video memory that the allocator had free, or would have had between two steps."""

    __slots__ = ("device", "is_small", "size_bytes", "stream")

    def __init__(self, device: int, stream: int, size_bytes: int, *, is_small: bool) -> None:
        self.device = device
        self.stream = stream
        self.size_bytes = size_bytes
        self.is_small = is_small


class Cache:
    """The allocator's cache on the devices of the storages, from before these are freed until all are made again."""

    def __init__(
        self, torch: Any, segments: cuda_state.Segments, devices: list[int], storages: list[tuple[int, int]]
    ) -> None:
        """`storages` are where each begins, and its bytes; they still exist, each on one of the devices."""
        self._cuda: Any = torch.cuda
        self._torch = torch
        self._before = {device: self._reserved(device) for device in sorted(set(devices))}
        self._small_before = {device: self._reserved(device, _SMALL_POOL) for device in self._before}
        self._segments = [segment for segment in segments.all if segment.device in self._before]
        self._storages = [(address, round_up(size_bytes, _BLOCK_BYTES)) for address, size_bytes in storages]
        self._runs: list[Run] = []
        self._taken: set[Run] = set()
        self._held: list[int] = []
        self._is_taken = False
        #: How much could not be allocated again.
        self.short_bytes = 0
        #: Start and size of each segment that the allocator keeps while the storages are offloaded.
        self.left: list[tuple[int, int]] = []

    def note_given_back(self) -> None:
        """Record what the allocator still has after the storages are freed and the cache is returned.

        Never raises: the storages are offloaded. If the allocator reports nothing, all is one run.
        """
        self._runs, self._taken, self._is_taken, self.left = [], set(), False, []
        try:
            self.left = [(segment.address, segment.size_bytes) for segment in cuda_state.Segments(self._torch).all]
            self._runs = most_runs(runs_between(self._segments, sorted([*self._storages, *self.left])))
        except Exception as error:  # noqa: BLE001 - of any release of PyTorch, or a failure of CUDA's from before
            note(f"the layout of the cached memory is unknown: {error!r}")

    def take(self, storage_bytes: dict[int, int] | None = None) -> None:
        """Allocate it again and hold it. `storage_bytes` is for storages that are still to be allocated, by device.

        As long as there are such storages, only runs that fit beside them are taken; the others come with the last one.
        Never raises, and never takes more than before. Counts what the GPU lacks. Does nothing if all is held.
        """
        rest_bytes = storage_bytes or {}
        is_last = not any(rest_bytes.values())
        if self._is_taken:
            return
        self._is_taken, self.short_bytes = is_last, 0
        for device, before_bytes in self._before.items():
            try:
                self._take_on(device, before_bytes - rest_bytes.get(device, 0), is_last=is_last)
            except Exception as error:  # noqa: BLE001 - of any release of PyTorch; the storages are there all the same
                note(f"what was cached on GPU {device} is not taken again: {error!r}")
            short_bytes = before_bytes - self._reserved(device)
            if is_last and short_bytes >= _UNIT_BYTES:
                note(f"{short_bytes} bytes of the memory cached on GPU {device} cannot be allocated again")
                self.short_bytes += short_bytes

    def free_cached(self) -> None:
        """Free it into the allocator's cache. Does nothing if nothing is held."""
        held, self._held = self._held, []
        for address in held:
            self._cuda.caching_allocator_delete(address)

    def forgo(self) -> None:
        """Return all of it to the driver: it is allocated again once storages are made."""
        self.free_cached()
        self._is_taken, self._taken = False, set()

    def _take_on(self, device: int, goal_bytes: int, *, is_last: bool) -> None:
        """Allocate only what is free: an observer of PyTorch's allocations would see failed attempts."""
        most_bytes = self._reserved(device) + int(self._cuda.mem_get_info(device)[0])
        runs = [run for run in self._runs if run.device == device]
        small = [run for run in runs if run.is_small]
        if is_last:
            self._take_small(device, small, self._small_before[device], _SMALL_POOL, most_bytes)
        for run in runs:
            if run.is_small or run in self._taken:
                continue
            free_bytes = min(goal_bytes, most_bytes) - self._reserved(device)
            needed_bytes = _SHARED_BYTES if run.size_bytes < _LARGE_BYTES else round_up(run.size_bytes, _UNIT_BYTES)
            if needed_bytes <= free_bytes:
                self._hold(run, run.size_bytes)
            elif is_last and _whole(free_bytes) >= _LARGE_BYTES and run.size_bytes >= _LARGE_BYTES:
                self._hold(run, _whole(free_bytes))
        if not is_last:
            return
        # The rest: pieces too small for segments of their own, or without space so far.
        lacking_bytes, free_bytes = (end_bytes - self._reserved(device) for end_bytes in (goal_bytes, most_bytes))
        size_bytes = min(_whole(lacking_bytes), _whole(free_bytes))
        if size_bytes >= _LARGE_BYTES or (size_bytes >= _UNIT_BYTES and free_bytes >= _SHARED_BYTES):
            large = [run for run in runs if not run.is_small]
            self._hold(large[0] if large else Run(device, 0, 0, is_small=False), size_bytes)
        self._take_small(device, small, goal_bytes - _UNIT_BYTES + 1, "all", most_bytes)

    def _take_small(self, device: int, runs: list[Run], least_bytes: int, pool: str, most_bytes: int) -> None:
        """Allocate small pieces until the pool has that much, with what the storages have there."""
        for run in runs:
            if self._reserved(device, pool) >= least_bytes:
                return
            if run not in self._taken and most_bytes - self._reserved(device) >= _UNIT_BYTES:
                self._hold(run, run.size_bytes)

    def _hold(self, run: Run, size_bytes: int) -> None:
        self._taken.add(run)
        self._held.append(self._cuda.caching_allocator_alloc(size_bytes, device=run.device, stream=run.stream))

    def _reserved(self, device: int, pool: str = "all") -> int:
        """Return what the allocator has from the driver there. Flattened statistics take longer than a piece."""
        stats: Any = self._cuda.memory_stats_as_nested_dict(device)
        return int(stats["reserved_bytes"][pool]["current"])


def runs_between(segments: list[cuda_state.Segment], holes: list[tuple[int, int]]) -> list[Run]:
    """Return the parts of the segments outside the holes, as large as possible; both are sorted by address."""
    found: list[Run] = []
    at = 0
    for segment in segments:
        free_from, end = segment.address, segment.address + segment.size_bytes
        while at < len(holes) and sum(holes[at]) <= free_from:
            at += 1
        inside, is_own = at, False
        while inside < len(holes) and holes[inside][0] < end:
            found += _run(segment, holes[inside][0] - free_from, is_own=is_own)
            free_from = max(free_from, sum(holes[inside]))
            is_own = is_own or holes[inside][1] >= _LARGE_BYTES
            inside += 1
        found += _run(segment, end - free_from, is_own=is_own)
    return found


def _run(segment: cuda_state.Segment, size_bytes: int, *, is_own: bool) -> list[Run]:
    """Return that piece of the segment; none if the allocator could not use it.

    `is_own`: a large storage precedes it. The allocator rounds its segment up, so up to 2 MiB remain at the end.
    """
    least_bytes = 1 if segment.is_small else _UNIT_BYTES if is_own else _SMALL_BYTES + 1
    if size_bytes < least_bytes:
        return []
    return [Run(segment.device, segment.stream, size_bytes, is_small=segment.is_small)]


def most_runs(found: list[Run]) -> list[Run]:
    """Return small runs, by the MiB, and then large ones. Merges the smallest of very many, by stream."""
    kept: list[Run] = []
    for (device, stream), size_bytes in _by_stream([run for run in found if run.is_small]).items():
        count = min(_MAX_SMALL, -(-size_bytes // _SMALL_BYTES))
        kept += [Run(device, stream, _SMALL_BYTES, is_small=True) for _ in range(count)]
    large = sorted((run for run in found if not run.is_small), key=lambda run: run.size_bytes, reverse=True)
    kept += large[:MAX_RUNS]
    for (device, stream), size_bytes in _by_stream(large[MAX_RUNS:]).items():
        kept.append(Run(device, stream, size_bytes, is_small=False))
    return kept


def _by_stream(runs: list[Run]) -> dict[tuple[int, int], int]:
    sums: dict[tuple[int, int], int] = {}
    for run in runs:
        key = (run.device, run.stream)
        sums[key] = sums.get(key, 0) + run.size_bytes
    return sums


def _whole(size_bytes: int) -> int:
    """Round down to the units in which the allocator asks the driver."""
    return size_bytes // _UNIT_BYTES * _UNIT_BYTES
