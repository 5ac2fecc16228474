"""The only module that calls libcuda: process checkpoints, exportable GPU memory, CUDA IPC, copies.

Only the killable child imports it. Each function is one driver call: it blocks as long as the driver does, and raises
CudaError. The caller keeps deadlines by killing the process, and owns what a call creates; this module stores nothing.
cuda-bindings has every call that is needed, the GPU pairs of a restore included (since 13.0). Only the bytes of UUIDs
and IPC handles go through ctypes, because releases of cuda-bindings name their fields differently.

`tests/kit/driver.py` lists what hegmd relies on, and checks it on the stub and on real GPUs. Three calls destroy a job,
and the caller must avoid them: `restore` onto a GPU without enough memory, `checkpoint` of a process with live
peer-to-peer NCCL communicators, and `checkpoint` of one that has memory of another process open by CUDA IPC.

Longer than 400 lines because all driver calls are in one module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3  # the caller, or a target that does not use CUDA
UNKNOWN = 999
OPERATING_SYSTEM = 304  # the target has ended, or permission is missing
ILLEGAL_STATE = 401
NOT_READY = 600
NOT_SUPPORTED = 801
_PEER_ACCESS_ALREADY_ENABLED = 704

STATES = ("running", "locked", "checkpointed", "failed")
# CUDA versions of the first drivers with checkpoint calls, and with restores on another GPU.
CHECKPOINT_SINCE = 12080

_UUID_BYTES = 16
_HANDLE_BYTES = 64
_PCI_BYTES = 32


class CudaError(Exception):
    """A driver call failed. `code` is CUDA's error, `name` its name. `code` is None if the driver could not be
    called."""

    def __init__(self, call: str, code: int | None, name: str) -> None:
        super().__init__(f"{call}: {name}" if code is None else f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name


class Device(NamedTuple):
    """A GPU as this process sees it. `uuid` and `pci` have the form that NVML and the daemon use."""

    ordinal: int
    uuid: str
    pci: str
    total_bytes: int


def start() -> int:
    """Initialise the driver and return its CUDA version, such as 13000. Takes up to seconds and no GPU memory."""
    try:
        _cuda().cuInit  # noqa: B018 - a binding that is only half there shows here
    except (ImportError, AttributeError) as error:
        raise CudaError("cuInit", None, f"the Python package cuda-bindings cannot be used: {error}") from None
    try:
        _checked("cuInit", _cuda().cuInit(0))
    except RuntimeError as error:
        raise CudaError("cuInit", None, f"libcuda.so.1 cannot be loaded: {error}") from None
    return int(_call("cuDriverGetVersion"))


def devices() -> list[Device]:
    """Every GPU that this process may see, in CUDA's order."""
    found: list[Device] = []
    for ordinal in range(int(_call("cuDeviceGetCount"))):
        device = _call("cuDeviceGet", ordinal)
        raw = _call("cuDeviceGetUuid", device)
        pci = _text(_call("cuDeviceGetPCIBusId", _PCI_BYTES, device)).lower()
        total_bytes = int(_call("cuDeviceTotalMem", device))
        found.append(Device(ordinal, _uuid_text(ctypes.string_at(raw.getPtr(), _UUID_BYTES)), pci, total_bytes))
    return found


# ---- other processes: lock, checkpoint, restore, unlock --------------------------------------------------------------


def state(pid: int) -> str:
    """Return one of STATES. Blocks while a checkpoint call runs in the process, even one whose caller was killed."""
    number = int(_call("cuCheckpointProcessGetState", pid))
    return STATES[number] if number < len(STATES) else f"state {number}"


def restore_thread(pid: int) -> int:
    """Return the thread of the process that the driver uses for restores."""
    return int(_call("cuCheckpointProcessGetRestoreThreadId", pid))


def lock(pid: int, timeout_ms: int) -> None:
    """Block the process's CUDA calls after its running kernels. NOT_READY: these did not finish in time, nothing is
    locked."""
    if timeout_ms < 1:
        raise ValueError(f"a lock without a limit (timeout_ms={timeout_ms}) could block without end")
    arguments = _cuda().CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    _call("cuCheckpointProcessLock", pid, arguments)


def checkpoint(pid: int) -> None:
    """Checkpoint a locked process: the rest of its GPU memory moves into its own host memory."""
    _call("cuCheckpointProcessCheckpoint", pid, None)


def restore(pid: int, pairs: Iterable[tuple[str, str]] = ()) -> None:
    """Restore a checkpointed process, which stays locked. `pairs` maps old GPU UUIDs to new ones.

    The pairs are a permutation of all GPUs of the node. If the GPU lacks memory, the job is destroyed.
    """
    listed = [_pair(old, new) for old, new in pairs]
    arguments = _cuda().CUcheckpointRestoreArgs()
    if listed:
        arguments.gpuPairs = listed
        arguments.gpuPairsCount = len(listed)
    _call("cuCheckpointProcessRestore", pid, arguments)


def unlock(pid: int) -> None:
    """Unlock a process."""
    _call("cuCheckpointProcessUnlock", pid, None)


# ---- contexts --------------------------------------------------------------------------------------------------------


def retain(ordinal: int) -> Any:
    """Take a reference to the GPU's primary context. The first creates it (0.1 s, about 0.5 GiB)."""
    return _call("cuDevicePrimaryCtxRetain", ordinal)


def release(ordinal: int) -> None:
    """Drop a reference to the primary context. The last one destroys it and everything in it."""
    _call("cuDevicePrimaryCtxRelease", ordinal)


def use(context: Any) -> None:
    """Make this the context of the calling thread; None for no context."""
    _call("cuCtxSetCurrent", context if context is not None else _cuda().CUcontext(0))


def enable_peer(context: Any, other: Any) -> None:
    """Let the first context access the second's memory, and make the first the thread's context. Twice is fine."""
    use(context)
    try:
        _call("cuCtxEnablePeerAccess", other, 0)
    except CudaError as error:
        if error.code != _PEER_ACCESS_ALREADY_ENABLED:
            raise


def memory(ordinal: int) -> tuple[int, int]:
    """Return free and total bytes of the GPU. Its context becomes the thread's, and is created if needed."""
    use(retain(ordinal))
    try:
        free, total = _call("cuMemGetInfo")
    finally:
        release(ordinal)
    return int(free), int(total)


def allocate(size_bytes: int) -> int:
    """Allocate GPU memory in the thread's context."""
    return int(_call("cuMemAlloc", size_bytes))


def free(address: int) -> None:
    """Free memory of `allocate`. No work may be queued in that context."""
    _call("cuMemFree", address)


# ---- video memory as handles, and as addresses -----------------------------------------------------------------------


def granularity(ordinal: int) -> int:
    """Return the unit of the sizes of `create`, `reserve` and `map_at`."""
    options = _cuda().CUmemAllocationGranularity_flags
    return int(_call("cuMemGetAllocationGranularity", _properties(ordinal), options.CU_MEM_ALLOC_GRANULARITY_MINIMUM))


def create(ordinal: int, size_bytes: int) -> Any:
    """Create GPU memory without address or context, for export. Raises OUT_OF_MEMORY or INVALID_VALUE (more than the
    GPU has).
    """
    return _call("cuMemCreate", size_bytes, _properties(ordinal), 0)


def export(handle: Any) -> int:
    """Return a descriptor that holds the memory. The caller closes it."""
    return int(_call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))


def import_(fd: int) -> Any:
    """Return a handle for the memory of the descriptor, which stays the caller's."""
    return _call("cuMemImportFromShareableHandle", fd, _descriptor_type())


def release_handle(handle: Any) -> None:
    """Release a handle. The memory stays while a mapping or a descriptor holds it."""
    _call("cuMemRelease", handle)


def reserve(size_bytes: int) -> int:
    """Reserve a range of addresses."""
    return int(_call("cuMemAddressReserve", size_bytes, 0, 0, 0))


def map_at(va: int, handle: Any, size_bytes: int) -> None:
    """Map all memory of a handle at an address in a reserved range. `access` makes it usable."""
    _call("cuMemMap", va, size_bytes, 0, handle, 0)


def access(va: int, size_bytes: int, ordinals: Iterable[int]) -> None:
    """Let these GPUs read and write a mapped range."""
    cuda = _cuda()
    listed: list[Any] = []
    for ordinal in ordinals:
        one = cuda.CUmemAccessDesc()
        one.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        one.location.id = ordinal
        one.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        listed.append(one)
    _call("cuMemSetAccess", va, size_bytes, listed, len(listed))


def unmap(va: int, size_bytes: int) -> None:
    """Unmap memory; the range stays reserved."""
    _call("cuMemUnmap", va, size_bytes)


def free_va(va: int, size_bytes: int) -> None:
    """Free a whole reserved range."""
    _call("cuMemAddressFree", va, size_bytes)


# ---- another process's memory, and host memory -----------------------------------------------------------------------


def open_ipc(handle: bytes) -> int:
    """Return the address, in the thread's context, of memory of another process, given its 64-byte handle."""
    if len(handle) != _HANDLE_BYTES:
        raise ValueError(f"an IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    opened = _cuda().CUipcMemHandle()
    ctypes.memmove(int(opened.getPtr()), handle, _HANDLE_BYTES)
    flags = _cuda().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(_call("cuIpcOpenMemHandle", opened, int(flags)))


def range_of(address: int) -> tuple[int, int]:
    """Return start and size of the allocation at this address: exactly what `open_ipc` opened."""
    start, size_bytes = _call("cuMemGetAddressRange", address)
    return int(start), int(size_bytes)


def ordinal_of(address: int) -> int:
    """Return the GPU that the driver counts the memory to: the first GPU of its process, also after a move
    (580.159)."""
    attribute = _cuda().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_call("cuPointerGetAttribute", attribute, address))


def close_ipc(address: int) -> None:
    """Close memory of `open_ipc`."""
    _call("cuIpcCloseMemHandle", address)


def register(address: int, size_bytes: int) -> None:
    """Pin host memory for the copy engines of all GPUs. Its pages should be present: pinning faults them one by one."""
    _call("cuMemHostRegister", address, size_bytes, int(_cuda().CU_MEMHOSTREGISTER_PORTABLE))


def unregister(address: int) -> None:
    _call("cuMemHostUnregister", address)


# ---- copies ----------------------------------------------------------------------------------------------------------


def create_stream() -> Any:
    """Create a stream of the thread's context that waits for no other stream."""
    return _call("cuStreamCreate", int(_cuda().CUstream_flags.CU_STREAM_NON_BLOCKING))


def destroy_stream(stream: Any) -> None:
    _call("cuStreamDestroy", stream)


def synchronize(stream: Any) -> None:
    """Wait for all work of the stream. Raises its errors."""
    _call("cuStreamSynchronize", stream)


def is_done(stream: Any) -> bool:
    """Return True if the stream has no work left."""
    try:
        _call("cuStreamQuery", stream)
    except CudaError as error:
        if error.code != NOT_READY:
            raise
        return False
    return True


def copy_async(
    target: int, target_context: Any, source: int, source_context: Any, size_bytes: int, stream: Any
) -> None:
    """Queue a copy. A context marks an address as its GPU memory; None marks host memory.

    Between two contexts, use a stream of the source: writing over NVLink is as fast as reading (394 GB/s).
    """
    if target_context is None:
        _call("cuMemcpyDtoHAsync", target, source, size_bytes, stream)
    elif source_context is None:
        _call("cuMemcpyHtoDAsync", target, source, size_bytes, stream)
    elif target_context is source_context:
        _call("cuMemcpyDtoDAsync", target, source, size_bytes, stream)
    else:
        _call("cuMemcpyPeerAsync", target, target_context, source, source_context, size_bytes, stream)


# ---- programs for a GPU's processors ---------------------------------------------------------------------------------


def capability(ordinal: int) -> tuple[int, int]:
    """Return the compute capability, which determines the kernels that the GPU can run."""
    attributes = _cuda().CUdevice_attribute
    major = _call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal)
    minor = _call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, ordinal)
    return int(major), int(minor)


def load(program: bytes) -> Any:
    return _call("cuModuleLoadData", program)


def unload(module: Any) -> None:
    _call("cuModuleUnload", module)


def function_of(module: Any, name: str) -> Any:
    return _call("cuModuleGetFunction", module, name.encode())


def launch(function: Any, blocks: int, threads: int, stream: Any, values: tuple[int, ...]) -> None:
    """Queue a kernel whose arguments are all 64 bits wide."""
    kinds = (ctypes.c_uint64,) * len(values)
    _call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)


# ---- the binding -----------------------------------------------------------------------------------------------------


def _cuda() -> Any:
    from cuda.bindings import driver  # noqa: TID251 - this module is the door

    return driver


def _call(name: str, *arguments: object) -> Any:
    """Return the result of a driver call: None, a value or a tuple. Raises CudaError."""
    function = getattr(_cuda(), name, None)
    if function is None:
        raise CudaError(name, None, "not in this version of the package cuda-bindings")
    try:
        answer = function(*arguments)
    except RuntimeError:  # the binding raises this if the driver lacks the function
        raise CudaError(name, None, "not in this driver") from None
    return _checked(name, answer)


def _checked(name: str, answer: tuple[Any, ...]) -> Any:
    code = int(answer[0])
    if code:
        raise CudaError(name, code, str(getattr(answer[0], "name", answer[0])))
    return answer[1] if len(answer) == 2 else answer[1:]


def _properties(ordinal: int) -> Any:
    cuda = _cuda()
    properties = cuda.CUmemAllocationProp()
    properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = ordinal
    properties.requestedHandleTypes = _descriptor_type()
    return properties


def _descriptor_type() -> Any:
    return _cuda().CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _pair(old: str, new: str) -> Any:
    pair = _cuda().CUcheckpointGpuPair()
    pair.oldUuid, pair.newUuid = _uuid(old), _uuid(new)
    return pair


def _uuid(text: str) -> Any:
    """Convert `GPU-01234567-89ab-...` to the driver's form."""
    raw = bytes.fromhex(text.removeprefix("GPU-").replace("-", ""))
    if not text.startswith("GPU-") or len(raw) != _UUID_BYTES:
        raise ValueError(f"{text!r} is not a GPU UUID")
    uuid = _cuda().CUuuid()
    ctypes.memmove(int(uuid.getPtr()), raw, _UUID_BYTES)
    return uuid


def _uuid_text(raw: bytes) -> str:
    digits = raw.hex()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def _text(value: Any) -> str:
    """Cut the text at its NUL: the binding returns the buffer's rest too."""
    return bytes(value).split(b"\0", 1)[0].decode("ascii", "replace").strip()
