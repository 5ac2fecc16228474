"""Copies raw bytes between tensors and a state file, by the quickest way that each device has.

Several threads copy host memory. Video memory is copied through a little pinned memory (`staging`). The agent's own
carrier uses no pinned memory, because it slows down the driver's checkpoint; here the process ends, or has just
started. PyTorch copies from and to any other device.

The GPU computes the checksums of its own memory while the bytes are copied. The CPU computes checksums as fast as it
copies, but cannot do both at once: it would halve the rate. The GPU sums the words of each page, as `checksums` does,
and the CPU adds the CRC. The CPU does all of it where the GPU cannot, and for small tensors.
"""

from __future__ import annotations

import ctypes
import sys
from binascii import crc32

from ....errors import HegmError
from ... import copying
from ...copying import PAGE_BYTES, PIECE_BYTES
from ...cuda_driver import Copies, OverlappingCopies
from ...notes import note
from ...staging import Ring, loads
from . import checksums, shadow
from .shadow import Shadows
from .tensors import CPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, TypeVar

    from ...copying import Copy, Span
    from .tensors import Raw

    Progress = Callable[[int], None]
    Driver = TypeVar("Driver", bound=Copies)


MIN_BYTES = 1 << 20
_WORD_BYTES = 8


class VideoSums:
    """Checksums that the GPU computes. All tensors are on one GPU; `places` are those that it can sum."""

    def __init__(self, raws: list[Raw], places: list[int]) -> None:
        self._torch: Any = sys.modules["torch"]
        self._mine = [(raw, place) for raw, place in zip(raws, places) if self._is_mine(raw)]
        self.places: set[int] = {place for _raw, place in self._mine}

    def _is_mine(self, raw: Raw) -> bool:
        tensor, address, size_bytes, _where = raw
        if size_bytes < MIN_BYTES or address % _WORD_BYTES or sys.byteorder != "little":
            return False
        return hasattr(self._torch, "sum") and not (address - tensor.untyped_storage().data_ptr()) % _WORD_BYTES

    def add(self, found: dict[int, int]) -> None:
        """Store the checksum of each part under its offset. Clears `places` if the GPU fails."""
        if not self._mine:
            return
        try:
            sums, rests = self._added()
        except Exception as error:  # noqa: BLE001 - of PyTorch or CUDA, such as no memory left for the sums
            note(f"the GPU does not add up, the processor does: {error!r}")
            self.places = set()
            return
        at = 0
        for index, ((_tensor, _address, size_bytes, _where), place) in enumerate(self._mine):
            words = size_bytes // PAGE_BYTES * _WORD_BYTES
            step = PIECE_BYTES // PAGE_BYTES * _WORD_BYTES
            for part, start in enumerate(range(0, words, step)):
                found[place + part * PIECE_BYTES] = crc32(sums[at + start : at + min(start + step, words)])
            tail_bytes = size_bytes % PAGE_BYTES
            if tail_bytes:
                last = place + size_bytes // PIECE_BYTES * PIECE_BYTES
                rest = rests[index * PAGE_BYTES : index * PAGE_BYTES + tail_bytes]
                found[last] = crc32(rest, found.get(last, 0))
            at += words

    def _added(self) -> tuple[memoryview, memoryview]:
        """Return the sums of all pages, and for each tensor a page with the bytes after its last whole page."""
        torch = self._torch
        where = self._mine[0][0][3]
        count = sum(raw[2] // PAGE_BYTES for raw, _place in self._mine)
        with torch.inference_mode():
            sums = torch.empty(count, dtype=torch.int64, device=where)
            rests = torch.empty(len(self._mine) * PAGE_BYTES, dtype=torch.uint8, device=where)
            at = 0
            for index, ((tensor, address, size_bytes, _where), _place) in enumerate(self._mine):
                storage = tensor.untyped_storage()
                first = address - storage.data_ptr()
                pages, tail_bytes = divmod(size_bytes, PAGE_BYTES)
                words = torch.empty(0, dtype=torch.int64, device=where)
                words.set_(
                    storage, first // _WORD_BYTES, (pages, PAGE_BYTES // _WORD_BYTES), (PAGE_BYTES // _WORD_BYTES, 1)
                )
                torch.sum(words, dim=1, out=sums[at : at + pages])
                at += pages
                if tail_bytes:
                    rest = torch.empty(0, dtype=torch.uint8, device=where)
                    rest.set_(storage, first + pages * PAGE_BYTES, (tail_bytes,), (1,))
                    rests[index * PAGE_BYTES : index * PAGE_BYTES + tail_bytes].copy_(rest)
            return _in_memory(sums), _in_memory(rests)


def _in_memory(tensor: Any) -> memoryview:
    """Return the tensor's bytes in host memory."""
    here = tensor.cpu()
    view = (ctypes.c_char * (here.numel() * here.element_size())).from_address(here.data_ptr())
    view.tensor = here  # which owns the memory
    return memoryview(view).cast("B")


def copy_pieces_out(
    fd: int, capacity_bytes: int, raws: list[Raw], places: list[int], found: dict[int, int], progress: Progress
) -> None:
    """Copy them to their places, and put the checksum of each part under its place. Raises OSError, HegmError."""
    driver = _driver_for([raw[3] for raw in raws], Copies)
    here, there, _fetched_ones = _by_memory(raws, places, driver)
    done = _CopyProgress(progress)
    with copying.Writing(fd, capacity_bytes) as write:
        copying.in_threads(checksums.summing(write, found), here, done.tell)
        done.add(here)
        for where, pairs in there.items():
            if driver is not None:
                _copy_video_out(driver, where, pairs, write, found, done)


def shadow_pieces_out(
    fd: int, capacity_bytes: int, raws: list[Raw], places: list[int], found: dict[int, int]
) -> Shadows | None:
    """Copy the pieces out, but make a shadow of those in GPU memory, which is fetched later.

    None, with nothing written, where nothing lies there, or a shadow has no room. Raises OSError, HegmError.
    """
    if not shadow.is_wanted():
        return None
    driver = _driver_for([raw[3] for raw in raws], OverlappingCopies)
    if driver is None:  # nothing is on a GPU, or PyTorch is to fetch it
        return None
    here, there, _fetched_ones = _by_memory(raws, places, driver)
    shadows = Shadows(driver)
    try:
        for where, pairs in there.items():
            with _SelectedGpu(where):
                if not shadows.add(where, pairs):
                    shadows.close()
                    return None
        if not shadows.add_host(here):
            with copying.Writing(fd, capacity_bytes) as write:
                copying.in_threads(checksums.summing(write, found), here, copying.ignore)
        shadows.wait()
    except BaseException:
        shadows.close()
        raise
    return shadows


def _by_memory(
    raws: list[Raw], places: list[int], driver: Copies | None
) -> tuple[list[Span], dict[str, list[tuple[Raw, int]]], list[Any]]:
    """The parts in host memory, those on each GPU, and those that PyTorch has fetched, which have to stay."""
    here: list[Span] = []
    there: dict[str, list[tuple[Raw, int]]] = {}
    fetched: list[Any] = []
    for raw, place in zip(raws, places):
        _owner, address, size_bytes, where = raw
        if where != CPU and driver is not None and where.startswith("cuda"):
            there.setdefault(where, []).append((raw, place))
            continue
        if where != CPU:
            copy, address = _fetched(raw)
            fetched.append(copy)
        here.append((address, place, size_bytes))
    return here, there, fetched


def _copy_video_out(
    driver: Copies, where: str, pairs: list[tuple[Raw, int]], write: Copy, found: dict[int, int], done: _CopyProgress
) -> None:
    """Copy all tensors of one GPU. Parts that the GPU could not sum are summed on the CPU after the copy."""
    spans = [(raw[1], place, raw[2]) for raw, place in pairs]
    with _Video(driver, where) as ring:
        added = VideoSums([raw for raw, _place in pairs], [place for _raw, place in pairs])
        wanted = added.places
        summing = checksums.summing(write, found)
        their_places = {
            place + start for _a, place, size in spans if place in wanted for start in range(0, size, PIECE_BYTES)
        }

        def move(host: int, place: int, size_bytes: int) -> None:
            (write if place in their_places else summing)(host, place, size_bytes)

        ring.out(loads(spans), move, done.tell, beside=lambda: added.add(found))
        left = [span for span in spans if span[1] in wanted - added.places]
        if left:
            ring.out(loads(left), summing, copying.ignore)
    done.add(spans)


def fill(pairs: Iterable[tuple[Any, Any]], progress: Progress | None = None) -> None:
    """Copy the first tensor of each pair, in host memory, into the second one of the same shape on any device.

    Raises HegmError, and PyTorch's error if they do not fit.
    """
    torch: Any = sys.modules["torch"]
    spans: dict[str, dict[int, Span]] = {}
    filled: list[Any] = []
    todo = list(pairs)
    driver = _driver_for([str(target.device) for _saved, target in todo], Copies)
    for saved, target in todo:
        where = str(target.device)
        if not _is_the_same_to_the_byte(saved, target) or (where != CPU and driver is None):
            with torch.inference_mode(target.is_inference()), torch.no_grad():
                target.copy_(saved)
            continue
        size_bytes = target.numel() * target.element_size()
        mine = spans.setdefault(where, {})
        if size_bytes > mine.get(target.data_ptr(), (0, 0, 0))[2]:  # a view can start where its base starts
            mine[target.data_ptr()] = (saved.data_ptr(), target.data_ptr(), size_bytes)
        filled.append(target)
    done = _CopyProgress(progress or copying.ignore)
    for where, by_target in spans.items():
        moves = list(by_target.values())
        if where == CPU or driver is None:
            copying.in_threads(_move, moves, done.tell)
        else:
            with _Video(driver, where) as ring:
                ring.into(loads(moves), _move, done.tell)
        done.add(moves)
    _note_changes(torch, filled)


def _note_changes(torch: Any, tensors: list[Any]) -> None:
    """Report the change in place to PyTorch (2.1 and later), for graphs that saved the old elements."""
    increment_version = getattr(torch.autograd.graph, "increment_version", None)
    if increment_version is not None:
        for tensor in tensors:
            increment_version(tensor)


class _CopyProgress:
    """Progress over several rounds of copying."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._before_bytes = 0

    def tell(self, so_far_bytes: int) -> None:
        self._progress(self._before_bytes + so_far_bytes)

    def add(self, spans: Iterable[Span]) -> None:
        self._before_bytes += sum(span[2] for span in spans)


def _move(source: int, target: int, size_bytes: int) -> None:
    ctypes.memmove(target, source, size_bytes)


def _is_the_same_to_the_byte(saved: Any, target: Any) -> bool:
    """Return True if copying the bytes is enough."""
    if saved.dtype != target.dtype or saved.shape != target.shape or not saved.numel():
        return False
    if saved.device.type != CPU or target.device.type not in (CPU, "cuda") or saved.stride() != target.stride():
        return False
    if target.is_conj() or target.is_neg() or saved.is_conj() or saved.is_neg():
        return False
    return _is_dense(target)


def _is_dense(tensor: Any) -> bool:
    """Return True if the elements have neither gaps nor overlaps, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _fetched(raw: Raw) -> tuple[Any, int]:
    """Copy the bytes to host memory with torch, and return the copy and its address."""
    tensor, address, _size_bytes, _where = raw
    storage = tensor.untyped_storage()
    copy = storage.cpu()
    return copy, copy.data_ptr() + address - storage.data_ptr()


def _driver_for(devices: Iterable[str], kind: type[Driver]) -> Driver | None:
    """Return the CUDA driver if one of the devices is an NVIDIA GPU; None if PyTorch has to copy, as for AMD's."""
    if not any(where.startswith("cuda") for where in devices):
        return None
    try:
        return kind()
    except (HegmError, AttributeError) as error:
        note(f"PyTorch copies: {error}")
        return None


class _SelectedGpu:
    """Select one GPU for this thread while the context lasts, and finish its work at the end."""

    def __init__(self, where: str) -> None:
        self._device = int(where.partition(":")[2] or 0)
        self._cuda: Any = sys.modules["torch"].cuda

    def __enter__(self) -> None:
        self._chosen = self._cuda.device(self._device)
        self._chosen.__enter__()
        try:
            self._cuda.synchronize(self._device)
        except BaseException:
            self._chosen.__exit__(None, None, None)
            raise

    def __exit__(self, *exc: object) -> None:
        self._chosen.__exit__(*exc)


class _Video:
    """Access to one GPU's memory while the context lasts. No kernel writes there meanwhile."""

    def __init__(self, driver: Copies, where: str) -> None:
        self._driver = driver
        self._chosen = _SelectedGpu(where)

    def __enter__(self) -> Ring:
        self._chosen.__enter__()
        try:
            self._ring = Ring(self._driver)
            return self._ring.__enter__()
        except BaseException:
            self._chosen.__exit__(None, None, None)
            raise

    def __exit__(self, *exc: object) -> None:
        self._ring.__exit__(*exc)
        self._chosen.__exit__(*exc)
