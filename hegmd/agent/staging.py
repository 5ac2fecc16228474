"""Copies GPU memory to the host and back through a little pinned memory, so that the link to the GPU is never idle.

The pinned memory (`pinned_buffers`) is divided into slots. While the GPU copies to or from one slot, threads move the
content of others. Small pieces share a slot, because each call waits for the interpreter. With 16 or more threads each
thread has one slot; fewer threads have more.

Two designs were rejected, measured on a link of 55 GB/s. Memory for each thread, allocated when it starts, gave 26 to
34 GB/s, because allocating took most of the time (51 with allocated memory). Pinning the whole state file ran at 31 to
46 GB/s, and unpinning at 53 to 73, which takes longer than the copy.

If memory cannot be pinned it is used unpinned, and without a stream of its own a slot uses the default stream. Both are
slower.
"""

from __future__ import annotations

import os

from ..errors import HegmError
from . import copying, pinned_buffers
from .copying import round_up
from .crew import share_out
from .notes import note
from .pinned_buffers import SLOT_BYTES, SLOTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from .copying import Copy, Span
    from .crew import Tell, Work
    from .cuda_driver import Copies

    #: A span and where in a slot it goes through.
    Part = tuple[Span, int]

THREADS = SLOTS
_BORDER_BYTES = 512


def loads(spans: Iterable[Span]) -> list[list[Part]]:
    """Split the spans into pieces, and group these so that each list fills a slot."""
    found: list[list[Part]] = []
    filled_bytes = SLOT_BYTES
    for span in copying.pieces(spans):
        if filled_bytes + span[2] > SLOT_BYTES:
            found.append([])
            filled_bytes = 0
        found[-1].append((span, filled_bytes))
        filled_bytes = round_up(filled_bytes + span[2], _BORDER_BYTES)
    return found


class Ring:
    """The transfer between the host and one GPU, in its creator's CUDA context, while the manager is entered."""

    def __init__(self, driver: Copies, threads: int = THREADS) -> None:
        self._driver = driver
        self._threads = max(1, min(threads, SLOTS, len(os.sched_getaffinity(0))))
        self._context = driver.context()
        self._is_pinned = self._is_at_rest = True

    def __enter__(self) -> Self:
        """Raises OSError."""
        self._ground = pinned_buffers.take()
        try:
            self._driver.pin(self._ground.address, pinned_buffers.SIZE_BYTES)
        except HegmError as error:
            note(f"copies are slower: {error.message}")
            self._is_pinned = False
        self._free = [self._ground.address + slot * SLOT_BYTES for slot in range(SLOTS)]
        return self

    def __exit__(self, *_exc: object) -> None:
        """Free the memory once no copy is under way in it; keep it if that is unknown."""
        try:
            if self._is_pinned and self._is_at_rest:
                self._driver.unpin(self._ground.address)
        except HegmError as error:
            self._note_stays(error)
        if self._is_at_rest:
            self._ground.close()
        else:
            self._ground.keep()

    def out(self, loads: list[list[Part]], move: Copy, tell: Tell) -> None:
        """Copy loads from GPU memory, and move each part on from its slot. Raises what `share_out` raises."""

        def finish(slot: _Slot, load: list[Part]) -> None:
            self._driver.wait(slot.stream)
            for (_video, place, size_bytes), within in load:
                move(slot.address + within, place, size_bytes)

        def begin(slot: _Slot, load: list[Part]) -> None:
            for (video, _place, size_bytes), within in load:
                self._driver.begin_out(slot.address + within, video, size_bytes, slot.stream)

        share_out(self._work(begin, finish), loads, tell, self._threads)

    def into(self, loads: list[list[Part]], move: Copy, tell: Tell) -> None:
        """Put loads into video memory: each part of one is moved into its slot first."""

        def finish(slot: _Slot, _load: list[Part]) -> None:
            self._driver.wait(slot.stream)

        def begin(slot: _Slot, load: list[Part]) -> None:
            for (host, _video, size_bytes), within in load:
                move(host, slot.address + within, size_bytes)
            for (_host, video, size_bytes), within in load:
                self._driver.begin_in(video, slot.address + within, size_bytes, slot.stream)

        share_out(self._work(begin, finish), loads, tell, self._threads)

    def _work(
        self, begin: Callable[[_Slot, list[Part]], None], finish: Callable[[_Slot, list[Part]], None]
    ) -> Work[list[Part]]:
        def work(take: Callable[[], list[Part] | None], tell: Tell) -> None:
            self._driver.use(self._context)
            slots = self._slots()
            try:
                _turn(slots, begin, finish, take, tell)
            finally:
                self._end(slots)

        return work

    def _slots(self) -> list[_Slot]:
        """Return the calling thread's slots, which no other thread uses until it ends."""
        streams: list[int | None] = []
        try:
            while len(streams) < SLOTS // self._threads:
                streams.append(self._driver.make_stream())
        except HegmError as error:
            note(f"copies are slower: {error.message}")
            streams += [None] * (SLOTS // self._threads - len(streams))
        return [_Slot(self._free.pop(), stream) for stream in streams]

    def _end(self, slots: list[_Slot]) -> None:
        try:
            for slot in slots:
                self._driver.wait(slot.stream)
            for slot in slots:
                if slot.stream is not None:
                    self._driver.end_stream(slot.stream)
        except HegmError as error:
            self._note_stays(error)
        self._free += [slot.address for slot in slots]

    def _note_stays(self, error: HegmError) -> None:
        note(f"staging memory was not freed: {error.message}")
        self._is_at_rest = False


def _turn(
    slots: list[_Slot],
    begin: Callable[[_Slot, list[Part]], None],
    finish: Callable[[_Slot, list[Part]], None],
    take: Callable[[], list[Part] | None],
    tell: Tell,
) -> None:
    """Start a load in each slot in turn, after finishing the one before it."""
    turn = 0

    def end() -> None:
        slot, load = slots[turn], slots[turn].load
        slot.load = []
        if load:
            finish(slot, load)
            tell(sum([part[0][2] for part in load]))

    while (load := take()) is not None:
        end()
        slots[turn].load = load
        begin(slots[turn], load)
        turn = (turn + 1) % len(slots)
    for _slot in slots:
        end()
        turn = (turn + 1) % len(slots)


class _Slot:
    """A slot's memory, its stream, and the copy under way in it."""

    def __init__(self, address: int, stream: int | None) -> None:
        self.address = address
        self.stream = stream
        self.load: list[Part] = []
