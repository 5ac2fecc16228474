"""The agent's few calls of the CUDA driver, in a worker where the driver is loaded and in use.

Never loads the driver, never creates a context: the caller's thread has that of the device. The driver frees nothing
here that the process did not have before.
"""

from __future__ import annotations

import ctypes

from ..errors import REFUSED, HegmError
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

HANDLE_BYTES = 64
# The default stack size of each GPU thread in a context.
USUAL_STACK_BYTES = 1024
_UUID_BYTES = 16
_OUT_OF_MEMORY = 2  # of CUresult
_LIMIT_STACK_SIZE = 0  # of CUlimit
_NON_BLOCKING = 1  # of CUstream_flags
_RELAXED = 2  # of CUstreamCaptureMode


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class Driver:
    """The process's own libcuda. Raises HegmError if it has none."""

    def __init__(self) -> None:
        try:
            library = ctypes.CDLL("libcuda.so.1", mode=_NO_LOAD)
        except OSError as error:
            raise HegmError(REFUSED, f"this process has not loaded the CUDA driver: {error}", _HINT) from error
        self._library = library
        pointer, size = ctypes.c_uint64, ctypes.c_size_t
        self._range = _bound(library.cuMemGetAddressRange_v2, ctypes.POINTER(pointer), ctypes.POINTER(size), pointer)
        self._show = _bound(library.cuIpcGetMemHandle, ctypes.POINTER(_Handle), pointer)
        self._out = _bound(library.cuMemcpyDtoH_v2, ctypes.c_void_p, pointer, size)
        self._in = _bound(library.cuMemcpyHtoD_v2, pointer, ctypes.c_void_p, size)
        self._device = _bound(library.cuDeviceGet, ctypes.POINTER(ctypes.c_int), ctypes.c_int)
        self._uuid = _bound(library.cuDeviceGetUuid_v2, ctypes.c_void_p, ctypes.c_int)
        self._attribute = _bound(library.cuDeviceGetAttribute, ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int)
        self._current = _bound(library.cuCtxGetCurrent, ctypes.POINTER(ctypes.c_void_p))
        self._use = _bound(library.cuCtxSetCurrent, ctypes.c_void_p)
        self._limit = _bound(library.cuCtxGetLimit, ctypes.POINTER(size), ctypes.c_int)
        self._set_limit = _bound(library.cuCtxSetLimit, ctypes.c_int, size)

    def allocation_of(self, address: int) -> int:
        """Return the start of the allocation that contains this address."""
        base, size_bytes = ctypes.c_uint64(), ctypes.c_size_t()
        _check("cuMemGetAddressRange", self._range(ctypes.byref(base), ctypes.byref(size_bytes), address))
        return base.value

    def handle_of(self, allocation: int) -> bytes:
        """Return the CUDA IPC handle by which another process opens that allocation."""
        handle = _Handle()
        _check("cuIpcGetMemHandle", self._show(ctypes.byref(handle), allocation))
        return ctypes.string_at(ctypes.byref(handle), HANDLE_BYTES)

    def uuid_of(self, ordinal: int) -> str:
        """Return the current GPU of this device, as `nvidia-smi -L` shows it; a move changes it."""
        device, raw = ctypes.c_int(), ctypes.create_string_buffer(_UUID_BYTES)
        _check("cuDeviceGet", self._device(ctypes.byref(device), ordinal))
        _check("cuDeviceGetUuid", self._uuid(raw, device.value))
        digits = raw.raw.hex()
        return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))

    def attribute(self, number: int, ordinal: int) -> int:
        """Return an attribute of the process's device, by its number in CUdevice_attribute."""
        device, value = ctypes.c_int(), ctypes.c_int()
        _check("cuDeviceGet", self._device(ctypes.byref(device), ordinal))
        _check("cuDeviceGetAttribute", self._attribute(ctypes.byref(value), number, device.value))
        return value.value

    def context(self) -> int | None:
        """Return the current context of this thread."""
        context = ctypes.c_void_p()
        _check("cuCtxGetCurrent", self._current(ctypes.byref(context)))
        return context.value

    def use(self, context: int | None) -> None:
        _check("cuCtxSetCurrent", self._use(context))

    def stack_bytes(self) -> int:
        size_bytes = ctypes.c_size_t()
        _check("cuCtxGetLimit", self._limit(ctypes.byref(size_bytes), _LIMIT_STACK_SIZE))
        return size_bytes.value

    def keep_stack_bytes(self, size_bytes: int) -> None:
        """Set that size; a kernel that needs more makes it grow."""
        _check("cuCtxSetLimit", self._set_limit(_LIMIT_STACK_SIZE, size_bytes))

    def copy_out(self, host: int, video: int, size_bytes: int) -> None:
        _check("cuMemcpyDtoH", self._out(host, video, size_bytes))

    def copy_in(self, video: int, host: int, size_bytes: int) -> None:
        _check("cuMemcpyHtoD", self._in(video, host, size_bytes))


class Copies(Driver):
    """Asynchronous copies in streams, and pinned memory. A copy's memory must stay until it was waited for, even if
    failed.
    """

    def __init__(self) -> None:
        super().__init__()
        library = self._library
        pointer, size, stream = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._begin_out = _bound(library.cuMemcpyDtoHAsync_v2, ctypes.c_void_p, pointer, size, stream)
        self._begin_in = _bound(library.cuMemcpyHtoDAsync_v2, pointer, ctypes.c_void_p, size, stream)
        self._wait = _bound(library.cuStreamSynchronize, stream)
        self._make = _bound(library.cuStreamCreate, ctypes.POINTER(stream), ctypes.c_uint)
        self._end = _bound(library.cuStreamDestroy_v2, stream)
        self._pin = _bound(library.cuMemHostRegister_v2, ctypes.c_void_p, size, ctypes.c_uint)
        self._unpin = _bound(library.cuMemHostUnregister, ctypes.c_void_p)

    def make_stream(self) -> int | None:
        stream = ctypes.c_void_p()
        _check("cuStreamCreate", self._make(ctypes.byref(stream), _NON_BLOCKING))
        return stream.value

    def end_stream(self, stream: int | None) -> None:
        """Destroy the stream once its work is done."""
        _check("cuStreamDestroy", self._end(stream))

    def begin_out(self, host: int, video: int, size_bytes: int, stream: int | None) -> None:
        """Start a copy from GPU memory. None is the default stream."""
        _check("cuMemcpyDtoHAsync", self._begin_out(host, video, size_bytes, stream))

    def begin_in(self, video: int, host: int, size_bytes: int, stream: int | None) -> None:
        _check("cuMemcpyHtoDAsync", self._begin_in(video, host, size_bytes, stream))

    def wait(self, stream: int | None) -> None:
        _check("cuStreamSynchronize", self._wait(stream))

    def pin(self, address: int, size_bytes: int) -> None:
        """Make this memory accessible to the GPU."""
        _check("cuMemHostRegister", self._pin(address, size_bytes, 0))

    def unpin(self, address: int) -> None:
        _check("cuMemHostUnregister", self._unpin(address))


class Stacks:
    """The memory that the contexts of some GPUs keep for thread stacks, freed while the storages are offloaded.

    A context keeps 264 MiB on an H200: a third of the memory left for the driver, and 0.1 s of a checkpoint.
    """

    def __init__(self, driver: Driver, devices: Iterable[int], turn_to: Callable[[int], object]) -> None:
        """`turn_to` makes a device current in this thread."""
        self._driver = driver
        self._devices = sorted(set(devices))
        self._turn_to = turn_to
        self._freed: dict[int, int] = {}

    def give_back(self) -> None:
        """Free it. A context with a larger stack limit is left alone: the reservation covers the default only."""
        for device in self._devices:
            self._turn_to(device)
            try:
                kept_bytes = self._driver.stack_bytes()
                if 0 < kept_bytes <= USUAL_STACK_BYTES:
                    self._driver.keep_stack_bytes(0)
                    self._freed[device] = kept_bytes
            except HegmError as error:
                note(f"stacks of GPU {device} stay as they are: {error.message}")

    def take_back(self) -> None:
        """Restore the stack limits before anything else: a kernel that finds no memory for its stack fails the job."""
        for device, kept_bytes in sorted(self._freed.items()):
            self._turn_to(device)
            self._driver.keep_stack_bytes(kept_bytes)
        self._freed.clear()


class OverlappingCopies(Copies):
    """Copies that run while the training continues, and driver memory for them. Raises HegmError.

    Threads that use it make no call that would spoil a CUDA graph which another thread records meanwhile.
    """

    def __init__(self) -> None:
        super().__init__()
        library = self._library
        pointer, size, stream = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p
        self._take = _bound(library.cuMemAlloc_v2, ctypes.POINTER(pointer), size)
        self._give_back = _bound(library.cuMemFree_v2, pointer)
        self._within = _bound(library.cuMemcpyDtoDAsync_v2, pointer, pointer, size, stream)
        self._memory = _bound(library.cuMemGetInfo_v2, ctypes.POINTER(size), ctypes.POINTER(size))
        self._exchange = _bound(library.cuThreadExchangeStreamCaptureMode, ctypes.POINTER(ctypes.c_int))

    def use(self, context: int | None) -> None:
        """Use that context in this thread, whatever another thread records."""
        super().use(context)
        mode = ctypes.c_int(_RELAXED)
        _check("cuThreadExchangeStreamCaptureMode", self._exchange(ctypes.byref(mode)))

    def within(self, context: int | None) -> _Within:
        """Use that context in this thread, and at the end again the one that it had."""
        return _Within(self, context)

    def memory(self) -> tuple[int, int]:
        """Return how much memory of the GPU is free, and how much it has."""
        free_bytes, total_bytes = ctypes.c_size_t(), ctypes.c_size_t()
        _check("cuMemGetInfo", self._memory(ctypes.byref(free_bytes), ctypes.byref(total_bytes)))
        return free_bytes.value, total_bytes.value

    def take(self, size_bytes: int) -> int:
        address = ctypes.c_uint64()
        _check("cuMemAlloc", self._take(ctypes.byref(address), size_bytes))
        return address.value

    def give_back(self, address: int) -> None:
        """Free it, once nothing is under way in it."""
        _check("cuMemFree", self._give_back(address))

    def begin_within(self, to: int, video: int, size_bytes: int, stream: int | None) -> None:
        """Copy from video memory to video memory of the same GPU."""
        _check("cuMemcpyDtoDAsync", self._within(to, video, size_bytes, stream))


class _Within:
    def __init__(self, driver: OverlappingCopies, context: int | None) -> None:
        self._driver = driver
        self._context = context

    def __enter__(self) -> None:
        self._before = self._driver.context()
        self._driver.use(self._context)

    def __exit__(self, *_exc: object) -> None:
        self._driver.use(self._before)


class PeerAccess:
    """Access from one GPU of this process to the memory of another, by the contexts that it has already."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1", mode=_NO_LOAD)
        self._driver = Driver()
        pointer, number = ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int)
        self._count = _bound(library.cuDeviceGetCount, number)
        self._state = _bound(library.cuDevicePrimaryCtxGetState, ctypes.c_int, ctypes.POINTER(ctypes.c_uint), number)
        self._retain = _bound(library.cuDevicePrimaryCtxRetain, pointer, ctypes.c_int)
        self._release = _bound(library.cuDevicePrimaryCtxRelease_v2, ctypes.c_int)
        self._can = _bound(library.cuDeviceCanAccessPeer, number, ctypes.c_int, ctypes.c_int)
        self._enable = _bound(library.cuCtxEnablePeerAccess, ctypes.c_void_p, ctypes.c_uint)
        self._disable = _bound(library.cuCtxDisablePeerAccess, ctypes.c_void_p)

    def devices(self) -> list[int]:
        """Return the devices with a context."""
        count, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        _check("cuDeviceGetCount", self._count(ctypes.byref(count)))
        found: list[int] = []
        for device in range(count.value):
            state = self._state(device, ctypes.byref(flags), ctypes.byref(is_active))
            _check("cuDevicePrimaryCtxGetState", state)
            if is_active.value:
                found.append(device)
        return found

    def is_possible(self, device: int, other: int) -> bool:
        can = ctypes.c_int()
        _check("cuDeviceCanAccessPeer", self._can(ctypes.byref(can), device, other))
        return bool(can.value)

    def end(self, device: int, other: int) -> bool:
        """Disable that device's access to the other's memory; False if there was none."""
        code = self._between(device, other, self._disable)
        if code == _NOT_ENABLED:
            return False
        _check("cuCtxDisablePeerAccess", code)
        return True

    def begin(self, device: int, other: int) -> int:
        """Enable that device's access to the other's memory. Returns the driver's answer: it refuses after a
        restore."""

        def enable(context: int | None) -> Any:
            return self._enable(context, 0)

        return self._between(device, other, enable)

    def _between(self, device: int, other: int, do: Any) -> int:
        """Do it to the other's context in the first one's, which is current meanwhile."""
        before = self._driver.context()
        here, there = self._retained(device), self._retained(other)
        try:
            self._driver.use(here)
            return int(do(there))
        finally:
            self._driver.use(before)
            self._release(device)
            self._release(other)

    def _retained(self, device: int) -> int | None:
        context = ctypes.c_void_p()
        _check("cuDevicePrimaryCtxRetain", self._retain(ctypes.byref(context), device))
        return context.value


_NOT_ENABLED = 705  # of CUresult
_NO_LOAD = 4  # RTLD_NOLOAD, which `os` has only by its number on some systems
_HINT = "start the job with HEGM_AGENT_DEBUG=FILE to log more; it continues"


def _bound(function: Any, *kinds: Any) -> Any:
    function.argtypes = kinds
    function.restype = ctypes.c_int
    return function


def _check(call: str, code: int) -> None:
    if code:
        what = f"{code}, out of memory" if code == _OUT_OF_MEMORY else str(code)
        raise HegmError(REFUSED, f"{call} answered {what}", _HINT, {"call": call, "code": code})
