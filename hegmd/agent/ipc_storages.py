"""Storages on a GPU that the daemon copies: exported to it, freed, allocated again, filled.

Knows which storages these are and how far each one is; the daemon copies them through handles of CUDA IPC. The order of
the storages is fixed by the first export, until all have their bytes again. Storages count as offloaded from the first
freed byte on. After a failure in between, all of them are allocated and filled again, which is always possible: the
daemon has the bytes before anything is freed.

Storages are allocated on their former streams, because the allocator reuses memory in the order of its stream. Called
in the agent's thread while the training thread is parked.
"""

from __future__ import annotations

import os
import sys

from ..errors import HegmError
from ..protocol.agents import NO_HANDLE
from . import cuda_state
from .cache import Cache
from .copying import round_up
from .cuda_driver import Driver, Stacks
from .notes import note
from .refusals import not_made, refusal
from .torch_state import LapTimer
from .video_memory import VideoMemory

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..protocol.agents import Span

# The alignment of storages in the flat space that contains all of them; copies on a GPU are fastest with it.
BORDER_BYTES = 512


def flat_bytes(sizes: list[int]) -> int:
    """Return the size of the space in which storages of those sizes follow each other."""
    return sum(round_up(size_bytes, BORDER_BYTES) for size_bytes in sizes)


def round_of(sizes: list[int], most_bytes: int) -> int:
    """Return how many storages are in the next round of at most that many bytes, but at least one.

    There are as few rounds as possible, of about the same size: the memory that a round has filled is freed before the
    next round, and freeing that of the last one need not be waited for.
    """
    flat = [round_up(size_bytes, BORDER_BYTES) for size_bytes in sizes]
    share_bytes = -(-sum(flat) // _rounds(flat, most_bytes))
    count = batch_bytes = 0
    while count < len(flat) and (not count or (batch_bytes < share_bytes and batch_bytes + flat[count] <= most_bytes)):
        batch_bytes += flat[count]
        count += 1
    return count


def _rounds(sizes: list[int], most_bytes: int) -> int:
    """Return the number of rounds if each one is as large as possible."""
    rounds, batch_bytes = 1, 0
    for size_bytes in sizes:
        if batch_bytes and batch_bytes + size_bytes > most_bytes:
            rounds, batch_bytes = rounds + 1, 0
        batch_bytes += size_bytes
    return rounds


class View:
    """Some storages, one after the other, as another process can reach them."""

    __slots__ = ("at_bytes", "devices", "first", "gpus", "handles", "left", "spots")

    def __init__(self, first: int, at_bytes: int, left: int) -> None:
        self.first = first
        self.at_bytes = at_bytes
        self.left = left
        self.handles: list[bytes] = []
        #: For each storage: its handle, its offset behind it, and its bytes.
        self.spots: list[tuple[int, int, int]] = []
        #: If they are on several GPUs: the UUIDs of these, in the order of the devices, and the device of each storage.
        self.gpus: list[str] = []
        self.devices = b""


class IpcStorages:
    """The storages, from the first time that they are shown until they have their bytes again."""

    def __init__(
        self,
        storages: list[Any],
        sizes: list[int],
        segments: cuda_state.Segments,
        own: list[tuple[int, int]] | None = None,
    ) -> None:
        """`own` are segments whose storages are not exported: start and size of each."""
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
        # Not our own method: in a cycle of references the storages would stay until the garbage collector's next run.
        self._stacks = Stacks(self._driver, self._devices, self._torch.cuda.set_device)
        self._is_noted = True
        #: How long the parts of the last step took.
        self.laps = LapTimer()
        self.out = False

    def __len__(self) -> int:
        return len(self._storages)

    @property
    def size_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def required_bytes(self) -> int:
        """Return the size of the space in which they follow each other."""
        return flat_bytes(self._sizes)

    @property
    def short_bytes(self) -> int:
        """Return how much cached memory the allocator could not get back with the storages that were allocated last."""
        return self._cache.short_bytes

    @property
    def left(self) -> list[tuple[int, int]]:
        """Return what the allocator keeps while they are offloaded: start and size of each segment."""
        return self._cache.left

    def show(self, *, partly: bool = False) -> View:
        """Export all of them. Raises HegmError if CUDA IPC cannot export them, with nothing changed.

        `partly` leaves those without a handle: this process copies them itself.
        """
        if self.out:
            raise refusal("its storages are already freed and cannot be exported", "allocate them first")
        self.laps = LapTimer()
        self._wait_for_streams()
        return self._view(0, len(self._storages), self._own if partly else None)

    def free(self) -> None:
        """Free them. They are out from now on, also when this fails half way. Fine when they are out already.

        The allocator's remaining memory must still be recorded: `note_freed`.
        """
        self.laps = LapTimer()
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
        self._stacks.give_back()
        self._turned_to = None
        self.laps.end("stacks")

    def note_freed(self) -> None:
        """Record what the allocator still has, at the latest when all is allocated again. Never raises.

        Makes no driver call, so it can run during a checkpoint of this process. Calling it again is fine.
        """
        if not self._is_noted:
            self._is_noted = True
            self._cache.note_given_back()

    def make(self, most_bytes: int | None, *, partly: bool = False) -> View:
        """Allocate the next storages, at most that many bytes but at least one storage, and export them.

        With `partly`, storages in memory that this process kept meanwhile have no handle: the driver may have restored
        that memory, and then gives handles that other processes cannot open (error 800, 580.159).

        Storages that were allocated and not filled are exported again. Raises HegmError if there is no memory for them;
        then none of these is allocated.
        """
        self.laps = LapTimer()
        self.note_freed()
        first, last = self._filled, self._made
        if first == last:
            last = len(self._storages) if most_bytes is None else first + round_of(self._sizes[first:], most_bytes)
            self._make(first, last)
            self._made = last
        return self._view(first, last, sorted(self.left) if partly else None)

    def copy(self, direction: str, fd: int, spans: list[Span], progress: Callable[[int], None]) -> None:
        """Copy parts of storages `out` to the descriptor, or `in` from it. Raises HegmError.

        Out from those that are not freed, into those that were allocated and are not filled.
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
        """Record that this many storages from `first` on have their bytes. Calling it again is fine."""
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
            self._stacks.take_back()
            self._turned_to = None
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
                self._stacks.give_back()
                self._turned_to = None
            raise not_made(sum(self._sizes[first:last]), error, on_gpu=True) from error

    def _take_cache(self, last: int) -> None:
        """Allocate the cached memory with the first storages; nothing else goes into it before all are allocated."""
        rest: dict[int, list[int]] = {}
        for device, size_bytes in zip(self._devices[last:], self._sizes[last:]):
            rest.setdefault(device, []).append(size_bytes)
        self._cache.take({device: sum(sizes) + cuda_state.padding_bytes(sizes) for device, sizes in rest.items()})
        if last == len(self._storages):
            self._cache.free_cached()

    def _stream_of(self, index: int) -> Any:
        cuda = self._torch.cuda
        stream = self._streams[index]
        return cuda.stream(cuda.ExternalStream(stream, device=self._devices[index]) if stream else None)

    def _view(self, first: int, last: int, own: list[tuple[int, int]] | None) -> View:
        """`own` is memory whose storages have no handle; None if all have one."""
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
        used = sorted(set(self._devices))
        if len(used) > 1:
            view.gpus = [self._driver.uuid_of(device) for device in used]
            view.devices = bytes(used.index(device) for device in self._devices[first:last])
        self.laps.end("handles")
        return view

    def _handle(self, view: View, base: int, *, is_needed: bool) -> int:
        """Return the number of that allocation's handle. Raises HegmError if it is needed and not available."""
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
        note(f"streams of {len(set(self._devices))} GPUs are idle")
