"""What this process does with CUDA through PyTorch: facts for the plan, and what stands against freeing a storage.

Reads `sys.modules`, never imports torch and never initialises CUDA. Where CUDA is in use its memory is what jobs are
moved for, and the CPU's storages stay where they are, uncounted. What the allocator says of its segments is asked once
a look: it tells whose memory a storage lies in, on which stream it was made, and whether graphs keep its address. What
the driver says of each, whether another process can be shown it, is asked once until the training thread has stood.
"""

from __future__ import annotations

import gc
import os
import sys

from ..errors import HegmError
from ..protocol.messages import CudaDevice, CudaFacts
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

GRAPHS = "a CUDA graph was captured, and it has their addresses in it"
SHARED_IPC = "they are shared with another process through CUDA IPC"
NOT_THE_ALLOCATORS = "their memory is not of PyTorch's own allocator"

HAZARD_GRAPHS, HAZARD_NCCL, HAZARD_IPC, HAZARD_MAPPED = "graphs", "nccl-p2p", "ipc-shared", "peer-mapped"
_DEFAULT_POOL = (0, 0)
# Of PyTorch's allocator, c10/cuda/CUDACachingAllocator.cpp.
_BLOCK_BYTES, _SMALL_BYTES, _UNIT_BYTES, _SHARED_BYTES, _LARGE_BYTES = 512, 1 << 20, 2 << 20, 20 << 20, 10 << 20
# Workspaces of cuBLAS as PyTorch sizes them, which are given back with the storages. One that is another size is taken
# for something that stays: its neighbours are then copied by the process itself, which is slower and as right.
_WORKSPACES = frozenset((1 << 20, 8 << 20, (8 << 20) + (128 << 10), 32 << 20))


def in_use() -> Any:
    """The module torch if CUDA was initialised in this process, or None."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


class Segment:
    """A piece of video memory that the allocator has of the driver."""

    __slots__ = ("address", "blocks", "device", "is_small", "size_bytes", "stream")

    def __init__(self, told: dict[str, Any]) -> None:
        self.address = int(told["address"])
        self.size_bytes = int(told["total_size"])
        self.device = int(told["device"])
        self.stream = int(told["stream"])
        self.is_small = told.get("segment_type") == "small"
        self.blocks: list[dict[str, Any]] = told.get("blocks", [])

    def used(self) -> dict[int, int]:
        """Its blocks that are in use: where each begins, and its bytes."""
        found: dict[int, int] = {}
        address = self.address
        for block in self.blocks:
            if str(block["state"]).startswith("active"):
                found[int(block.get("address", address))] = int(block["size"])
            address += int(block["size"])
        return found


class Showable:
    """Segments that the driver has shown to be showable: by address and size, since it may be asked of each but once.

    What changes that is a restore, and who is restored has stood: whoever lets the thread go on forgets all of them.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._refused: set[tuple[int, int]] = set()
        self._restored: set[tuple[int, int]] = set()

    def forget(self) -> None:
        """Ask of each anew."""
        self._known.clear()
        self._refused.clear()

    def note_restored(self, segments: list[tuple[int, int]]) -> None:
        """The driver brings these back, or has: where each begins, and its bytes. No others are such memory any more.

        It may give handles for them, which nobody can open (error 800).
        """
        self._restored = set(segments)

    def hidden(self, torch: Any, segments: list[Segment]) -> list[Segment]:
        """Those that cannot be shown to another process; what the driver has brought back cannot (580.159)."""
        unknown = [segment for segment in segments if not self._keys_of(segment) & (self._known | self._refused)]
        for device in sorted({segment.device for segment in unknown}):
            with torch.cuda.device(device):  # and back: this may be the training thread
                self._ask([segment for segment in unknown if segment.device == device])
        return [segment for segment in segments if self._keys_of(segment) & (self._restored | self._refused)]

    @staticmethod
    def _keys_of(segment: Segment) -> set[tuple[int, int]]:
        return {(segment.address, segment.size_bytes)}

    def _ask(self, segments: list[Segment]) -> None:
        try:
            from .cuda_driver import Driver
        except ImportError as error:
            note(f"video memory cannot be shown: {error}")
            self._refused.update(*map(self._keys_of, segments))
            return
        driver = Driver()
        for segment in segments:
            try:
                driver.handle_of(driver.allocation_of(segment.address))
                self._known.update(self._keys_of(segment))
            except HegmError as error:
                note(f"video memory cannot be shown: {error}")
                self._refused.update(self._keys_of(segment))


class Segments:
    """What PyTorch's allocator has of the driver, as it was when this was made."""

    def __init__(self, torch: Any) -> None:
        self.allocator: str = str(torch.cuda.get_allocator_backend())
        told: list[dict[str, Any]] = torch.cuda.memory_snapshot() if self.allocator == "native" else []
        self.all = sorted((Segment(one) for one in told), key=lambda segment: segment.address)
        self._places = [(segment.address, segment.size_bytes) for segment in self.all]
        self.expandable = any(one.get("is_expandable") for one in told) or _asks_for_expandable()
        self.graphs = any(tuple(one.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL for one in told)
        self._shared, self.received = _shared()

    def reason_against(self, storage: Any) -> str | None:
        """Why this storage is left alone; None if nothing of CUDA's is against it."""
        if self.graphs:
            return GRAPHS
        if storage._cdata in self._shared:
            return SHARED_IPC
        if self.allocator == "native" and self._segment_of(int(storage.data_ptr())) is None:
            return NOT_THE_ALLOCATORS
        return None

    def own(self, torch: Any, showable: Showable, storages: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Segments whose storages this process copies itself: where each begins, and its bytes.

        CUDA IPC cannot show them; or something in them stays here while the storages are away. Then the driver brings
        the segment back, the allocator makes storages in it again, and nobody else can open these. `storages` are
        where each that leaves begins, and its bytes.
        """
        if self.allocator != "native" or self.expandable:
            return []
        starts = {address for address, _ in storages}
        hidden = {segment.address for segment in showable.hidden(torch, self.all)}
        return [
            (segment.address, segment.size_bytes)
            for segment in self.all
            if segment.address in hidden
            or any(address not in starts and size not in _WORKSPACES for address, size in segment.used().items())
        ]

    def stream_of(self, address: int) -> int:
        """The stream that the memory there was made on, by its number for the driver; 0 for the default one.

        Memory is used again in the order of its own stream, so what is made again has to be made on the same.
        """
        segment = self._segment_of(address)
        return 0 if segment is None else segment.stream

    def _segment_of(self, address: int) -> Segment | None:
        """The segment that the address lies in; they are in the order of their addresses."""
        at = _after(self._places, address)
        if not at:
            return None
        segment = self.all[at - 1]
        return segment if address < segment.address + segment.size_bytes else None


def within(places: list[tuple[int, int]], address: int) -> bool:
    """Whether one of these places, which are in the order of their addresses, has that address in it."""
    at = _after(places, address)
    return at > 0 and address < sum(places[at - 1])


def _after(places: list[tuple[int, int]], address: int) -> int:
    """How many of these, which are in order, begin at that address or before it. The agent has no `bisect`."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if places[middle][0] <= address else (low, middle)
    return low


def facts(torch: Any, segments: Segments, sizes: dict[int, list[int]], own_bytes: int, *, shares: bool) -> CudaFacts:
    """What the plan has to know of the process, which has storages of those sizes on its devices.

    So many bytes of these it copies itself.

    The UUIDs are by PyTorch's word, which stays the same when a process has moved.
    """
    hazards: list[str] = []
    if segments.graphs:
        hazards.append(HAZARD_GRAPHS)
    if _has_peer_communicators(torch):
        hazards.append(HAZARD_NCCL)
    if segments.received or shares:
        hazards.append(HAZARD_IPC)
    used = sorted(sizes) or [
        device for device in range(torch.cuda.device_count()) if torch.cuda.memory_reserved(device)
    ]
    if len(used) > 1 and (segments.expandable or segments.allocator != "native"):
        hazards.append(HAZARD_MAPPED)
    if len(used) > 1 and HAZARD_NCCL not in hazards and is_data_parallel(torch):
        hazards.append(HAZARD_NCCL)
    return CudaFacts(
        gpus=tuple(_uuid(torch, device) for device in used),
        allocator=segments.allocator,
        expandable=segments.expandable or 0 < own_bytes == sum(map(sum, sizes.values())),
        own_bytes=own_bytes,
        reserved_bytes=sum(int(torch.cuda.memory_reserved(device)) for device in used),
        largest_bytes=max((max(several) for several in sizes.values()), default=0),
        stacks_bytes=sum(_stacks_bytes(torch, device) for device in used),
        padding_bytes=sum(map(padding_bytes, sizes.values())),
        devices=_devices(torch, used, sizes),
        hazards=tuple(hazards),
    )


def _devices(torch: Any, used: list[int], sizes: dict[int, list[int]]) -> tuple[CudaDevice, ...]:
    """What it has on each of its GPUs, where it is on several; for one the whole says it."""
    if len(used) < 2:
        return ()
    try:
        from .cuda_driver import Driver

        driver = Driver()
        return tuple(
            CudaDevice(
                uuid=driver.uuid_of(device),
                size_bytes=sum(sizes.get(device, ())),
                padding_bytes=padding_bytes(sizes.get(device, [])),
                reserved_bytes=int(torch.cuda.memory_reserved(device)),
            )
            for device in used
        )
    except (HegmError, ImportError) as error:
        note(f"on which GPUs it is now is not known: {error}")
        return ()


def padding_bytes(sizes: list[int]) -> int:
    """What PyTorch's allocator takes at most for storages of these sizes on one GPU, beyond their bytes.

    Small ones share segments of 2 MiB, those in the middle segments of 20 MiB, of which a part is left over that none
    fits into; large ones have segments of their own in whole units of 2 MiB.
    """
    small_bytes = sum(
        -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES for size_bytes in sizes if size_bytes <= _SMALL_BYTES
    )
    middle = [size_bytes for size_bytes in sizes if _SMALL_BYTES < size_bytes < _LARGE_BYTES]
    taken_bytes = -(-small_bytes // _UNIT_BYTES) * _UNIT_BYTES
    if middle:
        held_by_each = max(1, _SHARED_BYTES // max(middle))
        taken_bytes += -(-len(middle) // held_by_each) * _SHARED_BYTES
    taken_bytes += sum(
        -(-size_bytes // _UNIT_BYTES) * _UNIT_BYTES for size_bytes in sizes if size_bytes >= _LARGE_BYTES
    )
    return taken_bytes - sum(sizes)


def _stacks_bytes(torch: Any, device: int) -> int:
    """What the context on that GPU keeps for the stacks of its threads; 0 where it is told to keep more than usual."""
    try:
        from .cuda_driver import USUAL_STACK_BYTES, Driver

        with torch.cuda.device(device):  # and back: this may be the training thread
            kept_bytes = Driver().stack_bytes()
    except (HegmError, ImportError) as error:
        note(f"the stacks of GPU {device} are not known: {error}")
        return 0
    properties = torch.cuda.get_device_properties(device)
    threads = int(properties.multi_processor_count) * int(getattr(properties, "max_threads_per_multi_processor", 2048))
    return threads * kept_bytes if kept_bytes <= USUAL_STACK_BYTES else 0


def maps_for_peers(torch: Any) -> bool:
    """Whether PyTorch's allocator maps its memory for other GPUs, where these may reach it."""
    segments = Segments(torch)
    return segments.expandable or segments.allocator != "native"


def give_back(torch: Any) -> None:
    """Give the driver what PyTorch keeps for later: workspaces of cuBLAS, and memory that is free.

    What it comes to, `cache` has noted before, and takes it again with the storages.
    """
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()


def _uuid(torch: Any, device: int) -> str:
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', 'unknown')}"


def _asks_for_expandable() -> bool:
    """Segments become expandable with the first allocation that needs one, so what was asked for counts as well."""
    asked = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in asked.lower().replace(" ", "")


def _shared() -> tuple[frozenset[int], bool]:
    """Addresses of storages that torch.multiprocessing has sent or received, and whether any is from another's GPU.

    Only what is alive counts. What a process has received ends with the process that sent it, and the driver cannot
    bring back one that has such memory open.
    """
    reductions: Any = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    alive: set[int] = set()
    received = False
    for key, reference in list(cache.items()) if cache else ():
        try:
            if reference.expired():
                continue
            alive.add(int(reference.cdata))
        except Exception as error:  # noqa: BLE001 - another release may keep it otherwise
            note(f"the cache of shared storages cannot be read: {error!r}")
            continue
        # A pair of a handle and an offset; the CPU's have the numbers of a file, or a name.
        received = received or (isinstance(key, tuple) and isinstance(key[0], bytes))
    return frozenset(alive), received


def is_data_parallel(torch: Any) -> bool:
    """Whether a module is spread over several GPUs here: that has communicators of NCCL that nobody lists."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    kind = torch.nn.DataParallel
    modules: list[Any] = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]
    return any(len(getattr(module, "device_ids", ())) > 1 for module in modules)


def _has_peer_communicators(torch: Any) -> bool:
    """Whether a communicator of NCCL with peers is alive that may use peer-to-peer memory."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    groups: Any = getattr(getattr(distributed.distributed_c10d, "_world", None), "pg_map", None)
    if groups is None:
        return int(distributed.get_world_size()) > 1
    return any("nccl" in str(value[0]).lower() and int(group.size()) > 1 for group, value in list(groups.items()))
