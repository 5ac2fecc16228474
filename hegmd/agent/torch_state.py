"""Finds the PyTorch storages of this process, and which of them the agent can offload.

Reads `sys.modules` and never imports torch. Finds every tensor and storage that Python knows, each storage once. The
memory of a storage is freed and allocated again; the storage object, its tensors, views and versions stay. The agent
offloads only what can be freed and allocated again unnoticed; the rest is counted with a reason. If the process uses
CUDA these are GPU storages, and `cuda_state` adds its reasons. Otherwise CPU storages stand in for them, on simulated
GPUs.

Tensors that only C++ knows, such as the saved ones of a graph before its backward pass, are not found and stay. A
storage that they share with a tensor found here has more owners than Python knows, and is left alone, except the
gradient buckets that `reducer_buckets` knows.

Call it while the training thread is parked or in that thread itself: PyTorch writes `.grad` without a lock.
"""

from __future__ import annotations

import gc
import sys
from itertools import chain, compress
from time import monotonic

from . import addresses, cuda_state, reducer_buckets
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from ..protocol.messages import CudaFacts


OTHER_OWNER = "their memory belongs to something else, such as a numpy array or a mapped file"
SHARED = "they are shared with other processes"
OTHER_DEVICE = "they are on a device whose bytes the agent cannot copy"
UNSEEN_OWNER = "C++ code holds a reference to them, such as an autograd graph before its backward pass"
NO_MEMORY = "they have no memory of their own, like wrapped tensors"
SAME_MEMORY = "two storages share the same memory"
OLD_TORCH = "this PyTorch is too old to report the references to a storage"
UNREADABLE = "they cannot be inspected"
OUT_OF_MEMORY = "there is no memory for them where the others are copied"
NO_STORAGE = "they have no storage, like sparse tensors"
ADDRESS_KEPT = "the script has their address outside of PyTorch, such as from data_ptr(), so it must not change"


class LapTimer:
    """Starts when it is created; each lap starts at the end of the one before."""

    __slots__ = ("_last", "spent_ms")

    def __init__(self) -> None:
        self.spent_ms: dict[str, float] = {}
        self._last = monotonic()

    def end(self, name: str) -> None:
        """End a lap; a repeated name adds to it."""
        now = monotonic()
        self.spent_ms[name] = round(self.spent_ms.get(name, 0.0) + (now - self._last) * 1e3, 3)
        self._last = now


class FoundStorages:
    """The storages of this process: those vouched for, with their sizes, and the others by reason."""

    __slots__ = (
        "addresses",
        "buckets",
        "cuda",
        "laps",
        "left_alone",
        "numbers",
        "others",
        "own",
        "segments",
        "sizes",
        "storages",
    )

    def __init__(self) -> None:
        self.storages: list[Any] = []
        self.sizes: list[int] = []
        self.left_alone: dict[str, list[int]] = {}
        #: Its use of CUDA; None if it does not.
        self.cuda: CudaFacts | None = None
        #: The memory that contains them; None if CUDA is not in use.
        self.segments: cuda_state.Segments | None = None
        #: Addresses that the script keeps outside of PyTorch, in order, and numbers that may be such.
        self.addresses: list[int] = []
        self.numbers: list[int] = []
        #: Objects of the other classes that were asked for.
        self.others: list[Any] = []
        #: Storages whose C++ owners find their bytes through the storage object, such as gradient buckets.
        self.buckets: set[int] = set()
        #: The memory whose storages this process copies itself: start and size of each part.
        self.own: list[tuple[int, int]] = []
        #: How long the parts of the search took.
        self.laps = LapTimer()

    def take(self, storage: Any, size_bytes: int) -> None:
        self.storages.append(storage)
        self.sizes.append(size_bytes)

    def is_known(self, address: int, size_bytes: int) -> bool:
        """Return True if the script knows the storage's address. On the CPU a number may be a stale object's."""
        number_bytes = 1 if self.segments is None else size_bytes
        within = addresses.any_within
        return within(self.addresses, address, size_bytes) or within(self.numbers, address, number_bytes)

    def sort_by_address(self) -> None:
        """Sort by address: allocated again in this order, more storages get their former place."""
        pairs = sorted(zip(self.storages, self.sizes), key=lambda pair: int(pair[0].data_ptr()))
        self.storages, self.sizes = [storage for storage, _ in pairs], [size_bytes for _, size_bytes in pairs]

    def leave(self, why: str, size_bytes: int) -> None:
        """Count a storage that is left alone."""
        counted = self.left_alone.setdefault(why, [0, 0])
        counted[0] += 1
        counted[1] += size_bytes

    def keep_what_fits(self, given_bytes: int, required_bytes: Callable[[list[int]], int]) -> None:
        """Leave the smallest alone, as many as it takes: a process may hold more now than when it was surveyed."""
        if required_bytes(self.sizes) <= given_bytes:
            return
        order = sorted(range(len(self.sizes)), key=self.sizes.__getitem__, reverse=True)
        self.storages = [self.storages[index] for index in order]
        self.sizes = [self.sizes[index] for index in order]
        while self.sizes and required_bytes(self.sizes) > given_bytes:
            over_bytes = required_bytes(self.sizes) - given_bytes
            while self.sizes and over_bytes > 0:
                self.storages.pop()
                size_bytes = self.sizes.pop()
                over_bytes -= size_bytes
                self.leave(OUT_OF_MEMORY, size_bytes)


def find(showable: cuda_state.ExportableSegments | None = None, also: tuple[type[object], ...] = ()) -> FoundStorages:
    """Find every storage of this process, and the objects of the classes `also`.

    `showable` is what is known about the memory on its GPUs. Each look at all objects takes 7 to 14 ms for 100,000 that
    the collector knows, so there is only one.
    """
    found = FoundStorages()
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "UntypedStorage"):
        return found
    found.segments = segments = cuda_state.Segments(torch) if cuda_state.in_use() is not None else None
    found.laps.end("segments")
    if segments is not None:
        also = (*also, torch.nn.DataParallel)
    with torch._C.DisableTorchFunctionSubclass():
        _judge_all(torch, _owners(torch, found, also), found, segments)
    found.laps.end("judge")
    if segments is not None:
        found.sort_by_address()
        sizes: dict[int, list[int]] = {}
        for storage, size_bytes in zip(found.storages, found.sizes):
            sizes.setdefault(int(storage.device.index), []).append(size_bytes)
        shares = cuda_state.SHARED_IPC in found.left_alone
        places = [(int(storage.data_ptr()), size) for storage, size in zip(found.storages, found.sizes)]
        found.own = segments.own(torch, showable or cuda_state.ExportableSegments(), places)
        own_bytes = sum(size_bytes for address, size_bytes in places if cuda_state.within(found.own, address))
        spread = cuda_state.is_data_parallel(torch, found.others)
        found.cuda = cuda_state.facts(torch, segments, sizes, own_bytes, shares=shares, spread=spread)
        found.laps.end("facts")
    return found


def version() -> tuple[str, str] | None:
    """Name and version of what trains here, if it is there."""
    torch: Any = sys.modules.get("torch")
    return None if torch is None else ("torch", str(getattr(torch, "__version__", "")))


def _owners(torch: Any, found: FoundStorages, also: tuple[type[object], ...]) -> dict[int, tuple[Any, set[int]]]:
    """Return each storage by its address, with the tensors that own it as far as Python knows."""
    storages: dict[int, tuple[Any, set[int]]] = {}
    keepers = addresses.kinds()
    tensors, bare, *several = objects_of(torch.Tensor, torch.UntypedStorage, *keepers, *also)
    found.addresses = addresses.kept(chain.from_iterable(several[: len(keepers)]))
    found.others = list(chain.from_iterable(several[len(keepers) :]))
    found.numbers = addresses.numbers()
    found.laps.end("objects")
    for tensor in _with_relatives(tensors):
        try:
            storage = torch.Tensor.untyped_storage(tensor)
        except (NotImplementedError, RuntimeError):
            found.leave(NO_STORAGE, 0)
            continue
        storages.setdefault(storage._cdata, (storage, set()))[1].add(tensor._cdata)
    for storage in bare:
        storages.setdefault(storage._cdata, (storage, set()))
    for bucket in reducer_buckets.storages(torch):
        found.buckets.add(bucket._cdata)
        storages.setdefault(bucket._cdata, (bucket, set()))
    return storages


def objects_of(*types: type[object]) -> tuple[list[Any], ...]:
    """Return the collector's objects of each class. Uses `type`, because `isinstance` would run code of proxies.

    All ranks are parked meanwhile, so some 100,000 objects are filtered without a step of the interpreter for each.
    """
    kinds = [_with_subclasses(base) for base in types]
    of_any: frozenset[type[object]] = frozenset(kind for those in kinds for kind in those)
    all_objects = gc.get_objects()
    known = list(compress(all_objects, map(of_any.__contains__, map(type, all_objects))))
    return tuple([candidate for candidate in known if type(candidate) in those] for those in kinds)


def _with_subclasses(base: type[object]) -> frozenset[type[object]]:
    """Return the class and all its subclasses. Uses `type` itself: a class may define methods of any name."""
    found: set[type[object]] = set()
    left: list[type[object]] = [base]
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left.extend(type.__subclasses__(kind))
    return frozenset(found)


def _with_relatives(tensors: list[Any]) -> list[Any]:
    """Add the tensors that PyTorch attaches to them: gradients, and the bases of views."""
    relatives: list[Any] = []
    for tensor in tensors:
        if _is_leaf(tensor) and tensor.grad is not None:
            relatives.append(tensor.grad)
        if tensor._is_view():
            relatives.append(tensor._base)
    return [*tensors, *relatives]


def _is_leaf(tensor: Any) -> bool:
    """Return True if it can have a gradient. PyTorch raises for views of a split tensor that was written to."""
    try:
        return bool(tensor.is_leaf)
    except RuntimeError:
        return False


def _judge_all(
    torch: Any, storages: dict[int, tuple[Any, set[int]]], found: FoundStorages, segments: cuda_state.Segments | None
) -> None:
    counts: dict[int, int] = {}
    judged: list[tuple[Any, int, int, str | None]] = []
    for storage, tensors in storages.values():
        try:
            size_bytes = storage.nbytes()
            if size_bytes == 0 or storage.device.type == "meta":
                continue
            if segments is not None and storage.device.type == "cpu":
                continue  # it is not on the GPU, so it is not in the way
            owners = sys.maxsize - 1 if storage._cdata in found.buckets else len(tensors)
            why = _reason_against(torch, storage, owners, segments)
            address = storage.data_ptr() if why is None else 0
        except Exception as error:  # noqa: BLE001 - storages of any class and make; this one is left alone
            note(f"a storage cannot be inspected: {error!r}")
            found.leave(UNREADABLE, 0)
            continue
        if why is None and address == 0:
            why = NO_MEMORY
        if why is None and found.is_known(address, size_bytes):
            why = ADDRESS_KEPT
        counts[address] = counts.get(address, 0) + 1
        judged.append((storage, size_bytes, address, why))
    for storage, size_bytes, address, why in judged:
        reason = SAME_MEMORY if why is None and counts[address] > 1 else why
        if reason is None:
            found.take(storage, size_bytes)
        else:
            found.leave(reason, size_bytes)


def _reason_against(torch: Any, storage: Any, owners: int, segments: cuda_state.Segments | None) -> str | None:
    """Return why this storage with that many possible owners is left alone; None if it can be offloaded."""
    if storage.device.type != ("cpu" if segments is None else "cuda"):
        return OTHER_DEVICE
    if segments is None and storage.is_shared():  # storages on GPUs always report that they are shared
        return SHARED
    if not storage.resizable():
        return OTHER_OWNER
    count_owners = getattr(torch._C, "_storage_Use_Count", None)
    if count_owners is None:
        return OLD_TORCH
    if count_owners(storage._cdata) > owners + 1:  # the one is the Python object of the storage itself
        return UNSEEN_OWNER
    return None if segments is None else segments.reason_against(storage)
