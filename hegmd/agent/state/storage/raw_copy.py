"""Copies raw bytes between tensors and a state file, by the quickest way that each device has.

Several threads copy host memory. Video memory is copied through a little pinned memory (`staging`). The agent's own
carrier uses no pinned memory, because it slows down the driver's checkpoint; here the process ends, or has just
started. PyTorch copies from and to any other device.

A GPU adds up its own memory before it is copied: calls of PyTorch beside the copies would slow these down by a fifth,
because both need the interpreter.
"""

from __future__ import annotations

import sys
from time import monotonic

from ....errors import HegmError
from ... import copying
from ...cuda_driver import Copies, OverlappingCopies
from ...notes import note
from ...staging import Ring, loads
from . import checksums
from .shadow import Shadows, release, usable_stream
from .tensors import CPU

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any, TypeVar

    from typing_extensions import Self

    from ...copying import Copy, Span
    from .tensors import Raw

    Progress = Callable[[int], None]
    Driver = TypeVar("Driver", bound=Copies)


def copy_pieces_out(
    fd: int,
    capacity_bytes: int,
    raws: list[Raw],
    places: list[int],
    found: dict[int, int],
    progress: Progress,
    *,
    with_shadow: bool = False,
) -> Shadows | None:
    """Copy them to their places, and put the checksum of each part under its place.

    Return the shadow of those that are still to be written, `with_shadow` as many as the GPUs have memory for; None
    if all are written. Raises OSError, HegmError.
    """
    driver = _driver_for([raw[3] for raw in raws], OverlappingCopies)
    here, there, _fetched_ones = _by_memory(raws, places, driver)
    done = _CopyProgress(progress)
    with copying.Writing(fd, capacity_bytes) as write:
        if driver is None:
            copying.in_threads(checksums.summing(write, found), here, done.tell)
            return None
        shadows = Shadows(driver)
        try:
            for where, spans in there.items():
                with _SelectedGpu(where):
                    left = shadows.add(where, spans) if with_shadow else spans
                    _copy_video_out(driver, where, left, write, found, done)
            if not shadows.add_host(here):
                copying.in_threads(checksums.summing(write, found), here, done.tell)
            return shadows if shadows.wait() else None
        except BaseException:
            shadows.close()
            raise


def _by_memory(
    raws: list[Raw], places: list[int], driver: Copies | None
) -> tuple[list[Span], dict[str, list[Span]], list[Any]]:
    """The parts in host memory, those on each GPU, and those that PyTorch has fetched, which have to stay."""
    here: list[Span] = []
    there: dict[str, list[Span]] = {}
    fetched: list[Any] = []
    for raw, place in zip(raws, places):
        _owner, address, size_bytes, where = raw
        if where != CPU and driver is not None and where.startswith("cuda"):
            there.setdefault(where, []).append((address, place, size_bytes))
            continue
        if where != CPU:
            copy, address = _fetched(raw)
            fetched.append(copy)
        here.append((address, place, size_bytes))
    return here, there, fetched


def _copy_video_out(
    driver: OverlappingCopies, where: str, spans: list[Span], write: Copy, found: dict[int, int], done: _CopyProgress
) -> None:
    """Copy these, which are on the GPU of this thread. Raises OSError, HegmError."""
    if not spans:
        return
    began = monotonic()
    with _GpuAddsUp(driver, where, spans) as added_up, Ring(driver) as ring:
        copy = added_up.storing(ring, write, found)
        prepared = monotonic()
        ring.out(loads(spans), copy, done.tell)
    done.add(spans)
    size_bytes = sum(span[2] for span in spans)
    note(f"{size_bytes} bytes of {where} copied in {monotonic() - began:.4f} s, added up in {prepared - began:.4f} s")


class _GpuAddsUp:
    """Has the GPU of this thread add up spans of its memory, and has memory for the sums while the context lasts."""

    def __init__(self, driver: OverlappingCopies, where: str, spans: list[Span]) -> None:
        self._sums = checksums.GpuSums(spans)
        self._stream = 0
        self._driver = driver
        self._where = where
        self._sums_at: int | None = None
        #: The owner of that memory, if it is memory that the job has freed and PyTorch has kept.
        self._tensor: Any = None

    def __enter__(self) -> Self:
        if self._sums.size_bytes:
            try:
                self._sums_at = self._driver.take(self._sums.size_bytes)
            except HegmError:
                self._sums_at = self._in_cached_memory()
            if self._sums_at is not None:
                self._stream = usable_stream(self._driver)
                self._sums.begin(self._where, self._stream, self._sums_at)
        return self

    def _in_cached_memory(self) -> int | None:
        torch: Any = sys.modules["torch"]
        try:
            self._tensor = torch.empty(self._sums.size_bytes, dtype=torch.uint8, device=self._where)
        except Exception as error:  # noqa: BLE001 - of PyTorch or CUDA
            note(f"the GPU does not add up, the processor does: {error!r}")
            return None
        return int(self._tensor.data_ptr())

    def storing(self, ring: Ring, write: Copy, found: dict[int, int]) -> Copy:
        """Return a copy function that also stores each part's checksum. Raises HegmError."""
        if self._sums_at is not None:
            self._driver.wait(self._stream)
        return self._sums.storing(ring, write, found)

    def __exit__(self, *_exc: object) -> None:
        own = self._sums_at if self._tensor is None else None
        release(self._driver, self._driver.context(), self._stream, own)


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
            copying.in_threads(checksums.move, moves, done.tell)
        else:
            with _Video(driver, where) as ring:
                ring.into(loads(moves), checksums.move, done.tell)
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
