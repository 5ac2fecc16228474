"""The use of CUDA by this process through PyTorch: facts for the plan, and reasons to leave a storage alone.

Reads `sys.modules`, never imports torch and never initialises CUDA. If the process uses CUDA, its GPU memory is what is
migrated, and CPU storages stay, uncounted. Each survey asks the allocator once for its segments: they tell to whom the
memory of a storage belongs, on which stream it was allocated, and whether graphs need its address. Whether CUDA IPC can
export a segment is asked once for each segment, until the training thread has been parked.
"""

from __future__ import annotations

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
NOT_THE_ALLOCATORS = "their memory was not allocated by PyTorch's own allocator"

HAZARD_GRAPHS, HAZARD_NCCL, HAZARD_IPC, HAZARD_MAPPED = "graphs", "nccl-p2p", "ipc-shared", "peer-mapped"
_DEFAULT_POOL = (0, 0)
# Constants of PyTorch's allocator, c10/cuda/CUDACachingAllocator.cpp.
_BLOCK_BYTES, _SMALL_BYTES, _UNIT_BYTES, _SHARED_BYTES, _LARGE_BYTES = 512, 1 << 20, 2 << 20, 20 << 20, 10 << 20
# Sizes of cuBLAS workspaces in PyTorch, which are freed with the storages. A workspace of another size counts as memory
# that stays; then the process itself copies the storages next to it, which is slower but as correct.
_WORKSPACES = frozenset((1 << 20, 8 << 20, (8 << 20) + (128 << 10), 32 << 20))


def in_use() -> Any:
    """Return the module torch if this process has initialised CUDA, or None."""
    torch: Any = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    return torch if is_initialized is not None and is_initialized() else None


class Segment:
    """A block of video memory that the allocator has from the driver."""

    __slots__ = ("address", "blocks", "device", "is_small", "size_bytes", "stream")

    def __init__(self, told: dict[str, Any]) -> None:
        self.address = int(told["address"])
        self.size_bytes = int(told["total_size"])
        self.device = int(told["device"])
        self.stream = int(told["stream"])
        self.is_small = told.get("segment_type") == "small"
        self.blocks: list[dict[str, Any]] = told.get("blocks", [])

    def used(self) -> dict[int, int]:
        """Return its blocks in use: start and size of each."""
        found: dict[int, int] = {}
        address = self.address
        for block in self.blocks:
            if str(block["state"]).startswith("active"):
                found[int(block.get("address", address))] = int(block["size"])
            address += int(block["size"])
        return found


class ExportableSegments:
    """Segments that CUDA IPC can export, by address and size. The driver is asked once for each.

    A restore changes that, and a restored process was parked. So letting the training thread continue forgets all of
    them.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, int]] = set()
        self._refused: set[tuple[int, int]] = set()
        self._restored: set[tuple[int, int]] = set()

    def forget(self) -> None:
        self._known.clear()
        self._refused.clear()

    def note_restored(self, segments: list[tuple[int, int]]) -> None:
        """Record the segments that the driver restores or has restored, as start and size, instead of earlier ones.

        The driver may give handles for them that other processes cannot open (error 800).
        """
        self._restored = set(segments)

    def hidden(self, torch: Any, segments: list[Segment]) -> list[Segment]:
        """Return the segments that cannot be exported; those that the driver has restored cannot (580.159)."""
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
            note(f"GPU memory cannot be exported: {error}")
            self._refused.update(*map(self._keys_of, segments))
            return
        driver = Driver()
        for segment in segments:
            try:
                driver.handle_of(driver.allocation_of(segment.address))
                self._known.update(self._keys_of(segment))
            except HegmError as error:
                note(f"GPU memory cannot be exported: {error}")
                self._refused.update(self._keys_of(segment))


class Segments:
    """The segments of PyTorch's allocator at one moment."""

    def __init__(self, torch: Any) -> None:
        self.allocator: str = str(torch.cuda.get_allocator_backend())
        told: list[dict[str, Any]] = torch.cuda.memory_snapshot() if self.allocator == "native" else []
        self.all = sorted((Segment(one) for one in told), key=lambda segment: segment.address)
        self._places = [(segment.address, segment.size_bytes) for segment in self.all]
        self.expandable = any(one.get("is_expandable") for one in told) or _asks_for_expandable()
        self.graphs = any(tuple(one.get("segment_pool_id", _DEFAULT_POOL)) != _DEFAULT_POOL for one in told)
        self._shared, self.received = _shared()

    def reason_against(self, storage: Any) -> str | None:
        """Return why CUDA leaves this storage alone; None if nothing does."""
        if self.graphs:
            return GRAPHS
        if storage._cdata in self._shared:
            return SHARED_IPC
        if self.allocator == "native" and self._segment_of(int(storage.data_ptr())) is None:
            return NOT_THE_ALLOCATORS
        return None

    def own(self, torch: Any, showable: ExportableSegments, storages: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the segments whose storages this process copies itself, as start and size.

        CUDA IPC cannot export them; or something in them stays here while the storages are offloaded. Then the driver
        restores the segment, the allocator allocates storages in it again, and other processes cannot open these.
        `storages` are start and size of each storage that leaves.
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
        """Return the driver's number of the stream on which the memory was allocated; 0 for the default one.

        The allocator reuses memory in the order of its stream, so storages have to be allocated on the same one again.
        """
        segment = self._segment_of(address)
        return 0 if segment is None else segment.stream

    def _segment_of(self, address: int) -> Segment | None:
        """Return the segment of the address. Segments are sorted by address."""
        at = _after(self._places, address)
        if not at:
            return None
        segment = self.all[at - 1]
        return segment if address < segment.address + segment.size_bytes else None


def within(places: list[tuple[int, int]], address: int) -> bool:
    """Return True if one of these ranges, sorted by address, contains the address."""
    at = _after(places, address)
    return at > 0 and address < sum(places[at - 1])


def _after(places: list[tuple[int, int]], address: int) -> int:
    """Return how many of these ranges start at that address or before it. The agent has no `bisect`."""
    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if places[middle][0] <= address else (low, middle)
    return low


def facts(
    torch: Any, segments: Segments, sizes: dict[int, list[int]], own_bytes: int, *, shares: bool, spread: bool
) -> CudaFacts:
    """Return what the plan needs to know of a process with storages of those sizes on its devices.

    `own_bytes` of them it copies itself. `spread`: a module is spread over its GPUs. PyTorch reports the UUIDs, and
    keeps reporting the same after a migration.
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
    if len(used) > 1 and HAZARD_NCCL not in hazards and spread:
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
    """Return what it has on each of its GPUs, if it is on several."""
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
                number=device,
            )
            for device in used
        )
    except (HegmError, ImportError) as error:
        note(f"its current GPUs are unknown: {error}")
        return ()


def padding_bytes(sizes: list[int]) -> int:
    """Return the most that PyTorch's allocator takes beyond the bytes of storages of these sizes on one GPU.

    Small ones share segments of 2 MiB, medium ones segments of 20 MiB, of which a rest stays unused. Large ones have
    segments of their own, in multiples of 2 MiB.
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
    """Return what the context on that GPU keeps for thread stacks; 0 if the script raised the default limit."""
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
    """Return True if PyTorch's allocator maps its memory for peer GPUs."""
    segments = Segments(torch)
    return segments.expandable or segments.allocator != "native"


def give_back(torch: Any) -> None:
    """Return cached memory and workspaces of cuBLAS to the driver. `cache` has recorded it, and allocates it again."""
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()


def _uuid(torch: Any, device: int) -> str:
    return f"GPU-{getattr(torch.cuda.get_device_properties(device), 'uuid', 'unknown')}"


def _asks_for_expandable() -> bool:
    """Return True if expandable segments are requested: the first allocation that needs one makes them so."""
    configuration = os.environ.get("PYTORCH_ALLOC_CONF", "") + "," + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return "expandable_segments:true" in configuration.lower().replace(" ", "")


def _shared() -> tuple[frozenset[int], bool]:
    """Return the addresses of storages that torch.multiprocessing has sent or received, and whether any is another
    GPU's.

    Only live ones count. Received memory ends with the sending process, and the driver cannot restore a process that
    has such memory open.
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


def is_data_parallel(torch: Any, objects: list[Any]) -> bool:
    """Return True if one of these is a module spread over several GPUs: then NCCL has communicators that are not
    listed."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    modules = [one for one in objects if issubclass(type(one), torch.nn.DataParallel)]
    return any(len(getattr(module, "device_ids", ())) > 1 for module in modules)


def _has_peer_communicators(torch: Any) -> bool:
    """Return True if a live NCCL communicator with peers may use peer-to-peer memory."""
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return False
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    groups: Any = getattr(getattr(distributed.distributed_c10d, "_world", None), "pg_map", None)
    if groups is None:
        return int(distributed.get_world_size()) > 1
    return any("nccl" in str(value[0]).lower() and int(group.size()) > 1 for group, value in list(groups.items()))
