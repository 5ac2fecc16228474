"""The one door to libcuda: the process checkpoint calls, video memory as handles, other processes' memory, and copies.

Imported by the killable child alone. Every function is one step of the driver, blocks for as long as the driver takes,
and raises CudaError; deadlines are kept by whoever may kill this process. Nothing is remembered here: whoever calls
owns what is made. cuda-bindings has every call that is needed, the GPU pairs of a restore included (since 13.0), so
nothing goes past it to ctypes but the bytes of UUIDs and IPC handles, for which its releases have different names.

The driver's own word on each call was measured; tests/kit/driver.py holds what is relied upon, over the stub and on
real GPUs alike. Three calls destroy a job and are the caller's to avoid, since from here nothing can be seen of it:
`restore` onto a GPU without room, `checkpoint` of a process with live peer-to-peer NCCL communicators, and `checkpoint`
of one that has another process's memory open by CUDA IPC.

Longer than 400 lines because there is one door.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3  # of the caller, or of a target that does not use CUDA
UNKNOWN = 999
OPERATING_SYSTEM = 304  # of a target: gone, or not ours to touch
ILLEGAL_STATE = 401
NOT_READY = 600
NOT_SUPPORTED = 801
_PEER_ACCESS_ALREADY_ENABLED = 704

STATES = ("running", "locked", "checkpointed", "failed")
# The drivers that brought the checkpoint calls, and moving to another GPU with them, by the CUDA version they tell.
CHECKPOINT_SINCE = 12080

_UUID_BYTES = 16
_HANDLE_BYTES = 64
_PCI_BYTES = 32


class CudaError(Exception):
    """A call failed. `code` is CUDA's, `name` its name; None and a reason where the driver was not even reached."""

    def __init__(self, call: str, code: int | None, name: str) -> None:
        super().__init__(f"{call}: {name}" if code is None else f"{call}: {name} ({code})")
        self.call = call
        self.code = code
        self.name = name


class Device(NamedTuple):
    """A GPU as this process sees it. `uuid` and `pci` are as NVML and the daemon write them."""

    ordinal: int
    uuid: str
    pci: str
    total_bytes: int


def start() -> int:
    """Initialise the driver, which takes up to seconds and no video memory; the CUDA version it offers, as 13000.

    Twice is fine. A missing binding, library or GPU is a CudaError like any other.
    """
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
    """Of STATES. While a step is under way in the process, also one whose caller was killed, this waits for its end."""
    number = int(_call("cuCheckpointProcessGetState", pid))
    return STATES[number] if number < len(STATES) else f"state {number}"


def restore_thread(pid: int) -> int:
    """The thread of the process that the driver restores it with: one of the driver's own."""
    return int(_call("cuCheckpointProcessGetRestoreThreadId", pid))


def lock(pid: int, timeout_ms: int) -> None:
    """Have the process's CUDA calls wait, once its work is done. NOT_READY: not done in time, and all goes on."""
    if timeout_ms < 1:
        raise ValueError(f"a lock without a limit (timeout_ms={timeout_ms}) could block without end")
    arguments = _cuda().CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    _call("cuCheckpointProcessLock", pid, arguments)


def checkpoint(pid: int) -> None:
    """Take a locked process off its GPUs; what is left of its video memory goes into its own host memory."""
    _call("cuCheckpointProcessCheckpoint", pid, None)


def restore(pid: int, pairs: Iterable[tuple[str, str]] = ()) -> None:
    """Put a checkpointed process back, locked as before; with `pairs` of UUIDs (was, is to be) on other GPUs.

    The pairs are a permutation of every GPU of the node. Without room on the GPU this destroys the job for good.
    """
    listed = [_pair(old, new) for old, new in pairs]
    arguments = _cuda().CUcheckpointRestoreArgs()
    if listed:
        arguments.gpuPairs = listed
        arguments.gpuPairsCount = len(listed)
    _call("cuCheckpointProcessRestore", pid, arguments)


def unlock(pid: int) -> None:
    """Let a locked process go on."""
    _call("cuCheckpointProcessUnlock", pid, None)


# ---- contexts --------------------------------------------------------------------------------------------------------


def retain(ordinal: int) -> Any:
    """The GPU's primary context, made where there is none (0.1 s and about 0.5 GiB there), held once more."""
    return _call("cuDevicePrimaryCtxRetain", ordinal)


def release(ordinal: int) -> None:
    """Hold the primary context once less; without holders it goes, with all that was made in it."""
    _call("cuDevicePrimaryCtxRelease", ordinal)


def use(context: Any) -> None:
    """Make this the context of the calling thread; None for none."""
    _call("cuCtxSetCurrent", context if context is not None else _cuda().CUcontext(0))


def enable_peer(context: Any, other: Any) -> None:
    """Let the first context reach the other's memory. Twice is fine. The thread's context is the first afterwards."""
    use(context)
    try:
        _call("cuCtxEnablePeerAccess", other, 0)
    except CudaError as error:
        if error.code != _PEER_ACCESS_ALREADY_ENABLED:
            raise


def memory(ordinal: int) -> tuple[int, int]:
    """Bytes free and in all on the GPU. Its context is the thread's afterwards; it is made where nobody holds one."""
    use(retain(ordinal))
    try:
        free, total = _call("cuMemGetInfo")
    finally:
        release(ordinal)
    return int(free), int(total)


def allocate(size_bytes: int) -> int:
    """Video memory of the thread's context, at an address of its own."""
    return int(_call("cuMemAlloc", size_bytes))


def free(address: int) -> None:
    """Give back what `allocate` gave, once nothing is under way in that context."""
    _call("cuMemFree", address)


# ---- video memory as handles, and as addresses -----------------------------------------------------------------------


def granularity(ordinal: int) -> int:
    """What the sizes of `create`, `reserve` and `map_at` are multiples of."""
    options = _cuda().CUmemAllocationGranularity_flags
    return int(_call("cuMemGetAllocationGranularity", _properties(ordinal), options.CU_MEM_ALLOC_GRANULARITY_MINIMUM))


def create(ordinal: int, size_bytes: int) -> Any:
    """Video memory that has no address yet and can be exported; no context is needed.

    OUT_OF_MEMORY, or INVALID_VALUE for more than the GPU has at all: nothing is taken.
    """
    return _call("cuMemCreate", size_bytes, _properties(ordinal), 0)


def export(handle: Any) -> int:
    """A descriptor that holds the memory by itself, whoever made it. It is the caller's to close."""
    return int(_call("cuMemExportToShareableHandle", handle, _descriptor_type(), 0))


def import_(fd: int) -> Any:
    """A handle for the memory that the descriptor holds. The descriptor stays the caller's."""
    return _call("cuMemImportFromShareableHandle", fd, _descriptor_type())


def release_handle(handle: Any) -> None:
    """Let go of a handle; the memory stays while a mapping or a descriptor holds it."""
    _call("cuMemRelease", handle)


def reserve(size_bytes: int) -> int:
    """A range of addresses with nothing behind it."""
    return int(_call("cuMemAddressReserve", size_bytes, 0, 0, 0))


def map_at(va: int, handle: Any, size_bytes: int) -> None:
    """Put the whole of a handle's memory at an address within a reserved range; `access` makes it usable."""
    _call("cuMemMap", va, size_bytes, 0, handle, 0)


def access(va: int, size_bytes: int, ordinals: Iterable[int]) -> None:
    """Let these GPUs read and write a range that is mapped throughout."""
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
    """Take what is mapped from an address; the range stays reserved."""
    _call("cuMemUnmap", va, size_bytes)


def free_va(va: int, size_bytes: int) -> None:
    """Give a reserved range back, as a whole."""
    _call("cuMemAddressFree", va, size_bytes)


# ---- another process's memory, and host memory -----------------------------------------------------------------------


def open_ipc(handle: bytes) -> int:
    """The address, in the thread's context, of memory that another process told of with 64 bytes."""
    if len(handle) != _HANDLE_BYTES:
        raise ValueError(f"an IPC handle has {_HANDLE_BYTES} bytes, not {len(handle)}")
    opened = _cuda().CUipcMemHandle()
    ctypes.memmove(int(opened.getPtr()), handle, _HANDLE_BYTES)
    flags = _cuda().CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(_call("cuIpcOpenMemHandle", opened, int(flags)))


def range_of(address: int) -> tuple[int, int]:
    """Where the allocation that has this address begins, and its bytes: what `open_ipc` opened, and no more."""
    start, size_bytes = _call("cuMemGetAddressRange", address)
    return int(start), int(size_bytes)


def ordinal_of(address: int) -> int:
    """The GPU that the memory counts as being on, which stays the first one when its process is moved (580.159)."""
    attribute = _cuda().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(_call("cuPointerGetAttribute", attribute, address))


def close_ipc(address: int) -> None:
    """Let go of what `open_ipc` opened."""
    _call("cuIpcCloseMemHandle", address)


def register(address: int, size_bytes: int) -> None:
    """Pin host memory for the copy engines of every GPU. Its pages should be present: pinning makes them one by one."""
    _call("cuMemHostRegister", address, size_bytes, int(_cuda().CU_MEMHOSTREGISTER_PORTABLE))


def unregister(address: int) -> None:
    _call("cuMemHostUnregister", address)


# ---- copies ----------------------------------------------------------------------------------------------------------


def create_stream() -> Any:
    """A stream of the thread's context that waits for no other."""
    return _call("cuStreamCreate", int(_cuda().CUstream_flags.CU_STREAM_NON_BLOCKING))


def destroy_stream(stream: Any) -> None:
    _call("cuStreamDestroy", stream)


def synchronize(stream: Any) -> None:
    """Wait until all that was queued on the stream is done; its errors show here."""
    _call("cuStreamSynchronize", stream)


def is_done(stream: Any) -> bool:
    """Whether nothing is left to do on the stream."""
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
    """Queue a copy. A context says that the address is video memory of it, None that it is host memory.

    Between two contexts the stream is the source's by habit: writing over NVLink is as fast as reading (394 GB/s).
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
    """The compute capability, which says what programs the GPU takes."""
    attributes = _cuda().CUdevice_attribute
    major = _call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ordinal)
    minor = _call("cuDeviceGetAttribute", attributes.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, ordinal)
    return int(major), int(minor)


def load(program: bytes) -> Any:
    """A program in the thread's context."""
    return _call("cuModuleLoadData", program)


def unload(module: Any) -> None:
    _call("cuModuleUnload", module)


def function_of(module: Any, name: str) -> Any:
    return _call("cuModuleGetFunction", module, name.encode())


def launch(function: Any, blocks: int, threads: int, stream: Any, values: tuple[int, ...]) -> None:
    """Queue a run of a function whose arguments are all of 64 bits."""
    kinds = (ctypes.c_uint64,) * len(values)
    _call("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, 0, stream, (values, kinds), 0)


# ---- the binding -----------------------------------------------------------------------------------------------------


def _cuda() -> Any:
    from cuda.bindings import driver  # noqa: TID251 - this module is the door

    return driver


def _call(name: str, *arguments: object) -> Any:
    """What the driver's function gives: nothing, one value or a tuple. Raises CudaError."""
    function = getattr(_cuda(), name, None)
    if function is None:
        raise CudaError(name, None, "not in this version of the package cuda-bindings")
    try:
        answer = function(*arguments)
    except RuntimeError:  # how the binding says that it looked the function up in vain
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
    """The driver's form of `GPU-01234567-89ab-...`."""
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
    """The binding pads text with whatever was in its buffer after the NUL."""
    return bytes(value).split(b"\0", 1)[0].decode("ascii", "replace").strip()
