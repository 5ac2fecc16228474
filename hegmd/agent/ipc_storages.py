"""Storages on a GPU whose bytes the daemon itself carries: shown to it, freed when it has them, made again, filled.

Owns which storages these are and how far each has come; the copying is the daemon's, through the handles of CUDA IPC
that are given out here. The order of the storages is settled when they are first shown and stays until all have their
bytes again. What is freed counts as out from the first byte on, so that a failure half way is mended by making and
filling all of them, which the daemon can always do: it has the bytes before anything is freed.

Storages are made on the stream that their memory was made on, because the allocator hands memory on in the order of its
own stream. Called in the agent's thread while the training thread is parked.
"""

from __future__ import annotations

import os
import sys

from ..errors import HegmError
from ..protocol.agents import NO_HANDLE
from . import cuda_state
from .cache import Cache
from .copying import round_up
from .cuda_driver import USUAL_STACK_BYTES, Driver
from .notes import note
from .refusals import not_made, refusal
from .torch_state import Laps
from .video_memory import VideoMemory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..protocol.agents import Span

# Where the next storage begins in the one space in which all lie: what copies on a GPU like best.
BORDER_BYTES = 512


def flat_bytes(sizes: list[int]) -> int:
    """How long the space is in which storages of those sizes lie one after the other."""
    return sum(round_up(size_bytes, BORDER_BYTES) for size_bytes in sizes)


def round_of(sizes: list[int], most_bytes: int) -> int:
    """How many storages are the next round, of so many bytes at most but one at least.

    There are as few rounds as that makes, and each is about as large as the others: what a round has filled is given
    back before the next is made, and of the last that need not be waited for.
    """
    flat = [round_up(size_bytes, BORDER_BYTES) for size_bytes in sizes]
    share_bytes = -(-sum(flat) // _rounds(flat, most_bytes))
    count = batch_bytes = 0
    while count < len(flat) and (not count or (batch_bytes < share_bytes and batch_bytes + flat[count] <= most_bytes)):
        batch_bytes += flat[count]
        count += 1
    return count


def _rounds(sizes: list[int], most_bytes: int) -> int:
    """In how many rounds these are made, each as large as can be."""
    rounds, batch_bytes = 1, 0
    for size_bytes in sizes:
        if batch_bytes and batch_bytes + size_bytes > most_bytes:
            rounds, batch_bytes = rounds + 1, 0
        batch_bytes += size_bytes
    return rounds


class View:
    """Some storages, one after the other, as another process can reach them."""

    __slots__ = ("at_bytes", "first", "handles", "left", "spots")

    def __init__(self, first: int, at_bytes: int, left: int) -> None:
        self.first = first
        self.at_bytes = at_bytes
        self.left = left
        self.handles: list[bytes] = []
        #: Of each storage which handle it is behind, how far, and its bytes.
        self.spots: list[tuple[int, int, int]] = []


class Shown:
    """The storages, from the first time that they are shown until they have their bytes again."""

    def __init__(
        self,
        storages: list[Any],
        sizes: list[int],
        segments: cuda_state.Segments,
        own: list[tuple[int, int]] | None = None,
    ) -> None:
        """`own` are segments whose storages are not shown: where each begins, and its bytes."""
        self._torch: Any = sys.modules["torch"]
        self._driver = Driver()
        self._storages = storages
        self._sizes = sizes
        self._devices = [int(storage.device.index) for storage in storages]
        addresses = [int(storage.data_ptr()) for storage in storages]
        self._streams = [segments.stream_of(address) for address in addresses]
        self._cache = Cache(self._torch, segments, self._devices, list(zip(addresses, sizes)))
        self._own = own or []
        self._turned_to: int | None = None
        self._made = len(storages)
        self._filled = len(storages)
        self._stacks: dict[int, int] = {}
        self._is_noted = True
        #: What the parts of the last step took.
        self.laps = Laps()
        self.out = False

    def __len__(self) -> int:
        return len(self._storages)

    @property
    def size_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self._sizes)

    @property
    def required_bytes(self) -> int:
        """Bytes of the space in which they lie one after the other."""
        return flat_bytes(self._sizes)

    @property
    def short_bytes(self) -> int:
        """What its allocator had kept for later and could not have again with the storages that were made last."""
        return self._cache.short_bytes

    @property
    def left(self) -> list[tuple[int, int]]:
        """What its allocator has while they are out: where each segment begins, and its bytes."""
        return self._cache.left

    def show(self, *, partly: bool = False) -> View:
        """All of them. Raises HegmError where CUDA IPC cannot show them, with nothing changed.

        With `partly`, those have no handle: this process copies them itself.
        """
        if self.out:
            raise refusal("its storages are already freed and cannot be exported", "allocate them first")
        self.laps = Laps()
        self._wait_for_streams()
        return self._view(0, len(self._storages), self._own if partly else None)

    def free(self) -> None:
        """Free them. They are out from now on, also when this fails half way. Fine when they are out already.

        What that leaves with the allocator is still to be noted: `note_freed`.
        """
        self.laps = Laps()
        if not self.out:
            self._wait_for_streams()
        self.out = True
        self._made = self._filled = 0
        self._cache.forgo()
        for storage in self._storages:
            storage.resize_(0)
        self.laps.end("resize")
        self._is_noted = False
        cuda_state.give_back(self._torch)
        self.laps.end("give-back")
        self._give_back_stacks()
        self.laps.end("stacks")

    def note_freed(self) -> None:
        """Note what the allocator still has, for when all is made again; at the latest then. Never raises.

        It asks the driver for nothing, so it goes on beside a checkpoint of this process. Fine when it is noted.
        """
        if not self._is_noted:
            self._is_noted = True
            self._cache.note_given_back()

    def make(self, most_bytes: int | None, *, partly: bool = False) -> View:
        """Make the next ones again, so many bytes of them at most but one at least, and show them.

        With `partly`, those have no handle that lie in memory which this process had all the while: the driver may have
        brought it back, and then gives handles that nobody can open (error 800, 580.159).

        Those that were made and not filled are shown once more. Raises HegmError when there is no memory for them;
        then none of these is made.
        """
        self.laps = Laps()
        self.note_freed()
        first, last = self._filled, self._made
        if first == last:
            last = len(self._storages) if most_bytes is None else first + round_of(self._sizes[first:], most_bytes)
            self._make(first, last)
            self._made = last
        return self._view(first, last, sorted(self.left) if partly else None)

    def copy(self, direction: str, fd: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy parts of storages `out` into the descriptor, or `in` from there. Raises HegmError.

        Out of those that have not been freed, into those that were made and are not filled.
        """
        first, last = (0, 0 if self.out else len(self._storages)) if direction == "out" else (self._filled, self._made)
        for index, start, size_bytes, _ in spans:
            if direction not in {"out", "in"} or not first <= index < last or start + size_bytes > self._sizes[index]:
                raise refusal(
                    f"{size_bytes} bytes at {start} of storage {index} cannot be copied {direction}",
                    "ask for its state: storages are copied out before they are freed, and in after they are allocated",
                )
        storages = [self._storages[index] for index, *_ in spans]
        medium, self._turned_to = VideoMemory(storages), None
        where = [
            (int(storage.data_ptr()) + start, place, size_bytes)
            for storage, (_, start, size_bytes, place) in zip(storages, spans)
        ]
        try:
            if direction == "out":
                medium.copy_out(fd, os.fstat(fd).st_size, where, progress)
            else:
                medium.copy_in(fd, where, progress)
        except OSError as error:
            raise refusal(
                f"its storages could not be copied {direction}: {error}", "wait: hegmd tries again"
            ) from error

    def fill(self, first: int, count: int) -> None:
        """So many from that one on have their bytes. Fine when that is known already."""
        if first + count <= self._filled:
            return
        if first > self._filled or first + count > self._made:
            raise refusal(
                f"storages {first} to {first + count - 1} cannot be filled: made {self._made}, filled {self._filled}",
                "allocate the next ones first",
            )
        self._filled = first + count
        self.out = self._filled < len(self._storages)

    def _make(self, first: int, last: int) -> None:
        try:
            self._take_back_stacks()
            self.laps.end("stacks")
            for index in range(first, last):
                self._turn_to(self._devices[index])
                with self._stream_of(index):
                    self._storages[index].resize_(self._sizes[index])
            self.laps.end("resize")
            self._take_cache(last)
            self.laps.end("cache")
            self._wait_for_streams()
        except Exception as error:
            self._cache.forgo()
            for storage in self._storages[first:last]:
                storage.resize_(0)
            self._torch.cuda.empty_cache()
            if not first:
                self._give_back_stacks()
            raise not_made(sum(self._sizes[first:last]), error, on_gpu=True) from error

    def _take_cache(self, last: int) -> None:
        """With the first ones that are made, whose room is held; nothing else is put into it before all are made."""
        rest: dict[int, list[int]] = {}
        for device, size_bytes in zip(self._devices[last:], self._sizes[last:]):
            rest.setdefault(device, []).append(size_bytes)
        self._cache.take({device: sum(sizes) + cuda_state.padding_bytes(sizes) for device, sizes in rest.items()})
        if last == len(self._storages):
            self._cache.let_go()

    def _give_back_stacks(self) -> None:
        """What each context keeps for the stacks of its threads is a third of what is left, and the driver's to carry.

        It is 264 MiB on an H200, and 0.1 s of a checkpoint. A context that was told to keep more is left alone: the
        room that is held for the way back is for no more than the usual.
        """
        for device in sorted(set(self._devices)):
            self._turn_to(device)
            try:
                kept_bytes = self._driver.stack_bytes()
                if 0 < kept_bytes <= USUAL_STACK_BYTES:
                    self._driver.keep_stack_bytes(0)
                    self._stacks[device] = kept_bytes
            except HegmError as error:
                note(f"stacks of GPU {device} stay as they are: {error.message}")

    def _take_back_stacks(self) -> None:
        """Before anything else is made: a kernel that finds no memory for its stack fails the job."""
        for device, kept_bytes in sorted(self._stacks.items()):
            self._turn_to(device)
            self._driver.keep_stack_bytes(kept_bytes)
        self._stacks.clear()

    def _stream_of(self, index: int) -> Any:
        """The stream that a storage's memory was made on, as a context."""
        cuda = self._torch.cuda
        stream = self._streams[index]
        return cuda.stream(cuda.ExternalStream(stream, device=self._devices[index]) if stream else None)

    def _view(self, first: int, last: int, own: list[tuple[int, int]] | None) -> View:
        """`own` is memory whose storages have no handle; None where each is to have one."""
        view = View(first, flat_bytes(self._sizes[:first]), len(self._storages) - last)
        allocations: dict[int, int] = {}
        for index in range(first, last):
            self._turn_to(self._devices[index])
            address = int(self._storages[index].data_ptr())
            if own is not None and cuda_state.within(own, address):
                view.spots.append((NO_HANDLE, 0, self._sizes[index]))
                continue
            base = self._driver.allocation_of(address)
            if base not in allocations:
                allocations[base] = self._handle(view, base, is_needed=own is None)
            offset = 0 if allocations[base] == NO_HANDLE else address - base
            view.spots.append((allocations[base], offset, self._sizes[index]))
        self.laps.end("handles")
        return view

    def _handle(self, view: View, base: int, *, is_needed: bool) -> int:
        """The number of that allocation's handle in the view. Raises HegmError if it is needed and not to be had."""
        try:
            view.handles.append(self._driver.handle_of(base))
        except HegmError as error:
            if is_needed:
                raise
            note(f"{error.message}: this process copies what lies there itself")
            return NO_HANDLE
        return len(view.handles) - 1

    def _turn_to(self, device: int) -> None:
        """Have that device current in this thread, which is the agent's own."""
        if device != self._turned_to:
            self._torch.cuda.set_device(device)
            self._turned_to = device

    def _wait_for_streams(self) -> None:
        for device in sorted(set(self._devices)):
            self._torch.cuda.synchronize(device)
        self.laps.end("streams")
        note(f"streams of {len(set(self._devices))} GPUs are at rest")
