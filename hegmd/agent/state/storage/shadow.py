"""A shadow of a state's video memory: copied within the GPU in milliseconds, and copied to the host while the training
continues.

Owns that memory. It is the driver's own: PyTorch's allocator does not know it, so it splits none of the job's blocks,
and is in no graph's pool. It is allocated only if the GPU has much more free memory than it needs, and freed as soon as
it was copied to the host. If the job uses so much memory meanwhile that little is left, the copying ends at once with
`CopyStopped`: then there is no snapshot, and the next one is taken without a shadow.
"""

from __future__ import annotations

import atexit
import os
from _thread import allocate_lock
from time import monotonic

from ....errors import HegmError
from ... import copying
from ...copying import round_up
from ...notes import note
from ...staging import Ring, loads
from . import checksums

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from ...copying import Span
    from ...cuda_driver import OverlappingCopies
    from .tensors import Raw

    #: Stores checksums by their places, and returns the places of those that it knows. In any thread.
    FinishSums = Callable[[dict[int, int]], set[int]]

#: `off` has the training wait until all is fetched.
SWITCH = "HEGM_SNAPSHOT_SHADOW"
# This share of the GPU's memory stays free for the job. If less than half of it is left, the shadow is abandoned.
SHARE_LEFT_FREE = 0.05
# Each copy has the interpreter for a moment, which the training needs: more threads would be quicker, and slow it down.
THREADS = 4
_BORDER_BYTES = 512


class CopyStopped(Exception):
    """The copying was stopped: the snapshot is no longer needed, or the job needs the memory."""


#: Whether the job needed the memory of the last one.
_was_squeezed = False


def is_wanted() -> bool:
    """Return True if the next snapshot may have a shadow."""
    global _was_squeezed
    was_squeezed, _was_squeezed = _was_squeezed, False
    return not was_squeezed and os.environ.get(SWITCH, "") not in ("off", "0")


class _InterpreterExit:
    """The end of the interpreter, after which CUDA must not be used: running copies end before it."""

    def __init__(self) -> None:
        self.has_come = False
        self.under_way = allocate_lock()
        self._is_awaited = False

    def expect(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            atexit.register(self._come)
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child, which lacks the thread that would release the lock."""
        self.under_way = allocate_lock()

    def _come(self) -> None:
        self.has_come = True
        with self.under_way:
            pass


_ending = _InterpreterExit()


class _Shadow:
    """On one GPU."""

    def __init__(self, driver: OverlappingCopies, address: int) -> None:
        self.context = driver.context()
        self.address = address
        self.spans: list[Span] = []
        #: For what the GPU has added up; None if it failed before that.
        self.finish_sums: FinishSums | None = None


class Shadows:
    """The shadows on all GPUs. Our threads that fetch them use no stream and no memory of the job."""

    def __init__(self, driver: OverlappingCopies) -> None:
        self._driver = driver
        self._made: list[_Shadow] = []

    def add(self, pairs: list[tuple[Raw, int]], sum_up: Callable[[], FinishSums]) -> bool:
        """Copy these, which are on the GPU of this thread; False if the GPU lacks memory for them.

        `sum_up` is called meanwhile. Raises HegmError.
        """
        sizes = [round_up(raw[2], _BORDER_BYTES) for raw, _place in pairs]
        began = monotonic()
        free_bytes, total_bytes = self._driver.memory()
        if free_bytes - sum(sizes) < total_bytes * SHARE_LEFT_FREE:
            note(f"snapshot: not enough memory for a shadow of {sum(sizes)} bytes: {free_bytes} are free")
            return False
        try:
            address = self._driver.take(sum(sizes))
        except HegmError as error:
            note(f"snapshot: no shadow: {error.message}")
            return False
        taken_s = monotonic() - began
        made = _Shadow(self._driver, address)
        self._made.append(made)
        stream = self._driver.make_stream()
        try:
            for (raw, place), size_bytes in zip(pairs, sizes):
                self._driver.begin_within(address, raw[1], raw[2], stream)
                made.spans.append((address, place, raw[2]))
                address += size_bytes
            made.finish_sums = sum_up()
        finally:
            self._driver.wait(stream)
            self._driver.end_stream(stream)
        note(f"snapshot: memory of the shadow {taken_s:.4f} s, with its copy {monotonic() - began:.4f} s")
        return True

    def fetch(self, fd: int, capacity_bytes: int, found: dict[int, int], is_over: Callable[[], bool]) -> None:
        """Write them to the descriptor and give their memory back. In any thread. Raises Ended, OSError, HegmError."""
        _ending.expect()
        with _ending.under_way, copying.Writing(fd, capacity_bytes) as write:
            summing = checksums.summing(write, found)
            while self._made:
                made = self._made[-1]
                summed = set[int]() if made.finish_sums is None else made.finish_sums(found)
                places = {
                    place + start
                    for _address, place, size_bytes in made.spans
                    if place in summed
                    for start in range(0, size_bytes, copying.PIECE_BYTES)
                }

                def move(host: int, place: int, size_bytes: int, places: set[int] = places) -> None:
                    if _ending.has_come or is_over():
                        raise CopyStopped
                    (write if place in places else summing)(host, place, size_bytes)

                self._driver.use(made.context)
                with Ring(self._driver, THREADS) as ring:
                    ring.out(loads(made.spans), move, self._look)
                self._give_back()

    def _look(self, _so_far_bytes: int) -> None:
        """End it where the job needs the memory."""
        global _was_squeezed  # noqa: PLW0603 - one process
        free_bytes, total_bytes = self._driver.memory()
        if free_bytes < total_bytes * SHARE_LEFT_FREE / 2:
            note(f"snapshot: the shadow is given up, {free_bytes} bytes are free")
            _was_squeezed = True
            raise CopyStopped

    def _give_back(self) -> None:
        made = self._made.pop()
        self._driver.use(made.context)
        self._driver.give_back(made.address)

    def close(self) -> None:
        """Give all of it back that is not fetched. Closing twice is fine."""
        while self._made:
            try:
                self._give_back()
            except HegmError as error:
                note(f"snapshot: memory of a shadow stays: {error.message}")
