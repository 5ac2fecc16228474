"""Video memory to the host and back through a little pinned memory, so that the link to the GPU is never idle.

Owns that memory, in slots, two for each thread: while the GPU copies between one of them and its own memory, the thread
moves the other's bytes on. Small pieces go together in a slot, for each call waits for the interpreter.

What was rejected: one buffer a thread and copies that are waited for (25.8 GB/s out of an H200, 25.9 back, with 16
cores and a link of 55), and no buffers, but all of the state's file pinned: that is done at 31 to 53 GB/s, whatever the
threads, and undone at 57 to 73, which alone takes as long as the copy.

Where memory cannot be pinned it is used as it is, and where no stream can be had, the one that everybody has: slower.
"""

from __future__ import annotations

import ctypes
import mmap

from ...errors import HegmError
from .. import copying
from ..copying import PIECE_BYTES, round_up
from ..notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from ..copying import Copy, Span
    from ..crew import Tell, Work
    from ..cuda_driver import Copies

    Begin = Callable[[int, int, int, "int | None"], None]
    #: A span and where in a slot it goes through.
    Part = tuple[Span, int]

# Smaller ones cost more calls than they save, and larger ones leave the caches: as the daemon's own ring.
SLOT_BYTES = PIECE_BYTES
SLOTS = 2
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
    """The way between the host and one GPU, in the context that the thread has which makes it."""

    def __init__(self, driver: Copies, slots: int = SLOTS) -> None:
        self._driver = driver
        self._slots = slots
        self._context = driver.context()

    def out(self, move: Copy) -> Work[list[Part]]:
        """What threads do that fetch loads from video memory: each part of one is moved on from its slot."""

        def finish(slot: _Slot, load: list[Part]) -> None:
            self._driver.wait(slot.stream)
            for (_video, place, size_bytes), within in load:
                move(slot.address + within, place, size_bytes)

        def begin(slot: _Slot, load: list[Part]) -> None:
            for (video, _place, size_bytes), within in load:
                self._driver.begin_out(slot.address + within, video, size_bytes, slot.stream)

        return self._work(begin, finish)

    def into(self, move: Copy) -> Work[list[Part]]:
        """What threads do that put loads into video memory: each part of one is moved into its slot first."""

        def finish(slot: _Slot, _load: list[Part]) -> None:
            self._driver.wait(slot.stream)

        def begin(slot: _Slot, load: list[Part]) -> None:
            for (host, _video, size_bytes), within in load:
                move(host, slot.address + within, size_bytes)
            for (_host, video, size_bytes), within in load:
                self._driver.begin_in(video, slot.address + within, size_bytes, slot.stream)

        return self._work(begin, finish)

    def _work(
        self, begin: Callable[[_Slot, list[Part]], None], finish: Callable[[_Slot, list[Part]], None]
    ) -> Work[list[Part]]:
        def work(take: Callable[[], list[Part] | None], tell: Tell) -> None:
            self._driver.use(self._context)
            with _Lane(self._driver, self._slots) as slots:
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

        return work


class _Slot:
    """Where its memory is, its stream, and what is under way in it."""

    def __init__(self, address: int, stream: int | None) -> None:
        self.address = address
        self.stream = stream
        self.load: list[Part] = []


class _Lane:
    """The slots of one thread, for as long as the context lasts."""

    def __init__(self, driver: Copies, slots: int) -> None:
        self._driver = driver
        self._size_bytes = slots * SLOT_BYTES
        self._memory = mmap.mmap(-1, self._size_bytes)
        self._anchor: Any = ctypes.c_char.from_buffer(self._memory)
        self._start = ctypes.addressof(self._anchor)
        self._streams: list[int | None] = []
        self._slots = slots
        self._is_pinned = False

    def __enter__(self) -> list[_Slot]:
        copying.prefer_huge_pages([(self._start, 0, self._size_bytes)])
        copying.have_pages(self._start, self._size_bytes)
        try:
            self._driver.pin(self._start, self._size_bytes)
            self._is_pinned = True
            while len(self._streams) < self._slots:
                self._streams.append(self._driver.make_stream())
        except HegmError as error:
            note(f"copies are slower: {error.message}")
            self._streams += [None] * (self._slots - len(self._streams))
        return [_Slot(self._start + slot * SLOT_BYTES, stream) for slot, stream in enumerate(self._streams)]

    def __exit__(self, *exc: object) -> None:
        """Nothing is under way in it any more when its memory goes, and none does where that cannot be known."""
        try:
            for stream in self._streams:
                self._driver.wait(stream)
            for stream in self._streams:
                if stream is not None:
                    self._driver.end_stream(stream)
            if self._is_pinned:
                self._driver.unpin(self._start)
        except HegmError as error:
            note(f"memory that copies went through stays: {error.message}")
            _kept.append(self._memory)
        self._anchor = None


#: Memory that the GPU might still write to.
_kept: list[mmap.mmap] = []
