"""The random generators of a loader's worker processes, read by the process that trains.

Only a worker that draws numbers for its batches knows the state of its generators; skipping its batches does not
reproduce it. So each worker writes its generators to memory shared with its parent after each batch: the last few,
because it works ahead. The parent reads them when a state is saved, and only then. In a restarted script a worker
starts its first batch with the given states.

The object reaches the worker as the function that loaders run there at the start (`worker_init_fn`), before the
script's own.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys

from ..values import rng
from . import sampler_rng

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

SLOT_BYTES = 32768
_HEADER = struct.Struct("<QQ")  # how many batches the worker had made, and bytes that follow
# A batch whose loop encloses another loop is given again, and each worker can be some batches ahead.
_BACK = 3


class Seeds:
    """The parent's side: the memory, as long as the loader's iterator lives."""

    def __init__(self, workers: int, ahead: int) -> None:
        """Raises OSError."""
        self.slots = ahead + _BACK
        self._workers = workers
        fd = os.memfd_create("hegm-loader-workers", os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, workers * self.slots * SLOT_BYTES)
            self._memory = mmap.mmap(fd, 0)
        except BaseException:
            os.close(fd)
            raise
        self.fd = fd

    def close(self) -> None:
        """Close the memory; the workers keep theirs. A forked child has a copy of its own."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
            self._memory.close()

    def after(self, worker: int, batches: int) -> Any:
        """Return the states of that worker after so many batches; None if they are not recorded."""
        import marshal

        start = (worker * self.slots + batches % self.slots) * SLOT_BYTES
        number, size_bytes = _HEADER.unpack_from(self._memory, start)
        if number != batches or not size_bytes:
            return None
        begin = start + _HEADER.size
        return marshal.loads(self._memory[begin : begin + size_bytes])  # noqa: S302 - what our own workers wrote

    def follower(self, script_init: Any, begin_with: dict[int, Any]) -> Follower:
        """Return what a worker has to run at its start."""
        return Follower(f"/proc/{os.getpid()}/fd/{self.fd}", self.slots, script_init, begin_with)


class Follower:
    """The worker's side; goes there by fork or by pickle."""

    def __init__(self, path: str, slots: int, script_init: Any, begin_with: dict[int, Any]) -> None:
        self._path = path
        self._slots = slots
        self._script_init = script_init
        self._begin_with = begin_with

    def __call__(self, worker: int) -> None:
        if self._script_init is not None:
            self._script_init(worker)
        # In the worker's own copy of the class.
        fetcher: Any = sys.modules["torch.utils.data._utils.fetch"]._MapDatasetFetcher
        fetcher.fetch = self._following(worker, fetcher.fetch)

    def _following(self, worker: int, fetch: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        import marshal

        fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        try:
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        first: list[Any] = [self._begin_with.get(worker)]
        made = [0]
        slots = self._slots
        held: list[Any] = []

        def follow(fetcher: Any, index: Any) -> Any:
            states, first[0] = first[0], None
            if not made[0]:
                held[:] = _held_by(fetcher.dataset) or ()
            if states is not None:
                _set(states, held)
            try:
                return fetch(fetcher, index)
            finally:
                made[0] += 1
                written = marshal.dumps(_read(held))
                # A generator that was created later would be missing when its state is set.
                is_known = _are_same(held, _held_by(fetcher.dataset))
                fits = is_known and len(written) <= SLOT_BYTES - _HEADER.size
                start = (worker * slots + made[0] % slots) * SLOT_BYTES
                _HEADER.pack_into(memory, start, made[0], len(written) if fits else 0)
                if fits:
                    memory[start + _HEADER.size : start + _HEADER.size + len(written)] = written

        return follow


def _held_by(dataset: Any) -> list[Any] | None:
    """Return the generators within it; None if the search is incomplete."""
    found, is_whole = sampler_rng.held_within([dataset], is_brief=True)
    return found if is_whole else None


def _are_same(held: list[Any], now: list[Any] | None) -> bool:
    return now is not None and list(map(id, held)) == list(map(id, now))


def _read(held: list[Any]) -> tuple[Any, Any]:
    return rng.read_shared(with_gpus=False), [rng.read(found) for found in held]


def _set(states: tuple[Any, Any], held: list[Any]) -> None:
    shared, own = states
    rng.set_shared(shared)
    for found, state in zip(held, own):
        rng.set_to(found, state)
