"""Video memory to the host and back through a little pinned memory, so that the link to the GPU is never idle.

Owns the slots that this memory (`pinned_buffers`) is shared out in: while the GPU copies between one of them and its
own memory, other threads, or the same with another slot, move theirs on. Small pieces go together in a slot, for each
call waits for the interpreter. A slot a thread is enough from 16 threads on; fewer threads have more.

What was rejected, at a link of 55 GB/s: memory for each thread, taken when it begins (26 to 34 GB/s, most of that the
taking: 51 both ways with the same threads over memory that is there), and no slots, but all of the state's file pinned:
that is done at 31 to 46 GB/s, whatever the threads, and undone at 53 to 73, which takes longer than the copy.

Where memory cannot be pinned it is used as it is, and where no stream can be had, the one that everybody has: slower.
"""

from __future__ import annotations

import os

from ....errors import HegmError
from ... import copying
from ...copying import round_up
from ...crew import share_out
from ...notes import note
from . import pinned_buffers
from .pinned_buffers import SLOT_BYTES, SLOTS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from typing_extensions import Self

    from ...copying import Copy, Span
    from ...crew import Tell, Work
    from ...cuda_driver import Copies

    #: A span and where in a slot it goes through.
    Part = tuple[Span, int]

THREADS = SLOTS
_BORDER_BYTES = 512


def loads(spans: Iterable[Span]) -> list[list[Part]]:
    """All of it in pieces, and these put together so that each list fills a slot as far as can be."""
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
    """The way between the host and one GPU, in the context that the thread has which makes it, for as long as the
    context lasts."""

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
        """Memory goes once nothing is under way in it, and stays where that cannot be known."""
        try:
            if self._is_pinned and self._is_at_rest:
                self._driver.unpin(self._ground.address)
        except HegmError as error:
            self._note_stays(error)
        if self._is_at_rest:
            self._ground.close()
        else:
            self._ground.keep()

    def out(self, loads: list[list[Part]], move: Copy, tell: Tell, beside: Callable[[], object] | None = None) -> None:
        """Fetch loads from video memory: each part of one is moved on from its slot. Raises what `share_out` raises."""

        def finish(slot: _Slot, load: list[Part]) -> None:
            self._driver.wait(slot.stream)
            for (_video, place, size_bytes), within in load:
                move(slot.address + within, place, size_bytes)

        def begin(slot: _Slot, load: list[Part]) -> None:
            for (video, _place, size_bytes), within in load:
                self._driver.begin_out(slot.address + within, video, size_bytes, slot.stream)

        share_out(self._work(begin, finish), loads, tell, self._threads, beside)

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
        """One thread's, which no other has until it ends."""
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
        note(f"memory that copies went through stays: {error.message}")
        self._is_at_rest = False


def _turn(
    slots: list[_Slot],
    begin: Callable[[_Slot, list[Part]], None],
    finish: Callable[[_Slot, list[Part]], None],
    take: Callable[[], list[Part] | None],
    tell: Tell,
) -> None:
    """Begin a load in each slot in turn, and finish what is in it before."""
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
    """Where its memory is, its stream, and what is under way in it."""

    def __init__(self, address: int, stream: int | None) -> None:
        self.address = address
        self.stream = stream
        self.load: list[Part] = []
