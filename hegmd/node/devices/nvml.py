"""The only module that calls NVML: initialises the library, calls it through NVIDIA's binding, and releases the driver.

Sorts NVML's codes into four: an answer; None if this GPU, driver or binding has no answer; GpuLost or GpuFailed;
LibraryFailed. `nvml_gpu` has the questions; `nvidia` interprets the answers.

The binding (nvidia-ml-py, imported as pynvml) keeps the library and every function that it found for the life of the
process, and loads it by name only. So it is given a library that `shared_library` loaded, and `close` takes library and
functions away again: the next `Nvml` finds an upgraded or reloaded driver. Process lists are read past the binding,
which makes a Python object of each entry: 2,000 processes would cost more than the rest of a snapshot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from hegmd.node.devices.shared_library import SharedLibrary

UNINITIALIZED = 1
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
LIB_RM_VERSION_MISMATCH = 18

_INSUFFICIENT_SIZE = 7
_GPU_IS_LOST = 15
# The library as a whole is unusable, for every call.
_LIBRARY_WIDE = {UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH}
# Codes without an answer that are no errors: invalid argument (link 18 of 18), not supported, no permission, not found,
# function not found, ECC of a vGPU, argument version mismatch, deprecated. For the last two another function has the
# answer.
_UNTOLD = {2, 3, 4, 6, 13, 22, 25, 26}

_XID_CRITICAL_ERROR = 0x8
_EVENTS_PER_CALL = 1000  # an event storm must not block a snapshot forever

PROCESS_LISTS = ("graphics", "compute", "mps")
_PROCESS_FUNCTIONS = {
    "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
    "compute": "nvmlDeviceGetComputeRunningProcesses",
    "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
}
_MAX_ENTRY_BYTES = 32
_USUAL_ENTRY_BYTES = 24
_ENTRY_BYTES = (16, 24, 32)
_BLANK = 0xA5
_MAX_ENTRIES = 1 << 17  # no node has that many; a larger number from the driver is an error


class LibraryMissing(Exception):
    """The dynamic loader finds no library of that name."""


class LibraryFailed(Exception):
    """The library is unusable. `code` is NVML's, or None if it was not called."""

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code


class GpuLost(Exception):
    """The GPU is off the bus."""


class GpuFailed(Exception):
    """The driver reports an unexpected error for that GPU."""


class ProcessEntries(NamedTuple):
    """A process list as the driver wrote it: entries of pid (u32), 4 bytes of nothing, bytes used (u64) and more."""

    raw: bytes
    entry_bytes: int


class Nvml:
    """The loaded and initialised library. One at a time in a process, because the binding has one.

    Everything raises LibraryFailed once the library stopped working.
    """

    def __init__(self, library: SharedLibrary) -> None:
        """Load and initialise it. Raises LibraryMissing or LibraryFailed; then nothing is initialised."""
        self._owner = library  # keeps the library loaded while this exists
        try:
            self._library: ctypes.CDLL | None = library.load()
        except OSError as error:
            if str(error) == f"{library.name}: cannot open shared object file: No such file or directory":
                raise LibraryMissing(str(error)) from None
            raise LibraryFailed(None, str(error)) from None
        self._events: Any = None
        self._process_lists: dict[str, Callable[..., int] | None] = {}
        self._entry_bytes: dict[str, int] = {}
        self._capacity = 256
        self._buffer = ctypes.create_string_buffer(self._capacity * _MAX_ENTRY_BYTES)
        self.binding: Any = None
        try:
            self._initialise()
        except BaseException:
            self._take_away()
            raise

    def _initialise(self) -> None:
        try:
            import pynvml  # noqa: TID251 - the only module that may import it
        except ImportError as error:
            raise LibraryFailed(None, f"the Python binding nvidia-ml-py cannot be imported: {error}") from None
        self.binding = pynvml
        self._hand_over(self._library)
        try:
            self.binding.nvmlInit()
        except self.binding.NVMLError as error:
            raise LibraryFailed(error.value, f"nvmlInit: {error}") from None

    def close(self) -> None:
        """Shut down; then no file of the driver is open. Twice is fine."""
        if self._library is None:
            return
        self._forget_events()
        with suppress(self.binding.NVMLError):  # the library may no longer work, which may be why it is closed
            self.binding.nvmlShutdown()
        self._take_away()

    def _take_away(self) -> None:
        self._library = None
        self._process_lists.clear()
        if self.binding is not None:
            self._hand_over(None)

    def _hand_over(self, library: ctypes.CDLL | None) -> None:
        """Give the binding this library, and drop the functions of the former one: their code may be unloaded."""
        self.binding.nvmlLib = library
        self.binding._nvmlGetFunctionPointer_cache.clear()
        self.binding._nvmlLib_refcount = 0

    # ---- asking -----------------------------------------------------------------------------------------------------

    def answer(self, function: str, *arguments: object) -> Any:
        """Return the result of the binding's function; None if there is no answer."""
        called = getattr(self.binding, function, None)
        if called is None:
            return None  # a binding older than that question
        try:
            return called(*arguments)
        except self.binding.NVMLError as error:
            return self._sorted(error.value, f"{function}: {error}")
        except UnicodeDecodeError:
            return None

    def _sorted(self, code: int, words: str) -> None:
        """Return None for a question without an answer; else the exception for the error."""
        if code in _UNTOLD:
            return
        if code in _LIBRARY_WIDE:
            raise LibraryFailed(code, words)
        if code == _GPU_IS_LOST:
            raise GpuLost(words)
        raise GpuFailed(words)

    def versions(self) -> tuple[str | None, str | None, str | None]:
        """Return the versions of the kernel driver and of this library, and the driver's highest CUDA version."""
        found: dict[str, Any] = {}
        for function in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion_v2"):
            with suppress(GpuFailed, GpuLost):
                found[function] = self.answer(function)
        cuda = found.get("nvmlSystemGetCudaDriverVersion_v2")
        return (
            known_text(found.get("nvmlSystemGetDriverVersion")),
            known_text(found.get("nvmlSystemGetNVMLVersion")),
            None if not cuda else f"{cuda // 1000}.{cuda % 1000 // 10}",
        )

    def device_count(self) -> int:
        try:
            count = self.answer("nvmlDeviceGetCount")
        except (GpuFailed, GpuLost) as failure:
            raise LibraryFailed(None, str(failure)) from None
        if count is None:
            raise LibraryFailed(None, "the library does not report the number of GPUs")
        return int(count)

    def handle(self, index: int) -> Any:
        """Return the handle of the GPU with that index. Raises GpuLost or GpuFailed."""
        handle = self.answer("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            raise GpuFailed("the driver denies access to the GPU")
        return handle

    # ---- events -----------------------------------------------------------------------------------------------------

    def watch(self, handles: Iterable[Any]) -> None:
        """Watch XID events of these GPUs only, as far as each supports it."""
        self._forget_events()
        with suppress(GpuFailed, GpuLost):
            self._events = self.answer("nvmlEventSetCreate")
        for handle in handles if self._events is not None else ():
            # the next snapshot finds the lost GPU and selects the GPUs to watch again
            with suppress(GpuFailed, GpuLost):
                self.answer("nvmlDeviceRegisterEvents", handle, _XID_CRITICAL_ERROR, self._events)

    def xids(self) -> Iterator[tuple[int, int]]:
        """Return the XID events since the last call, as GPU key and number. Never waits.

        Raises GpuLost if a watched GPU is off the bus: then no events arrive until `watch` is called with the others.
        """
        if self._events is None:
            return
        for _ in range(_EVENTS_PER_CALL):
            try:
                event = self.binding.nvmlEventSetWait_v2(self._events, 0)
            except self.binding.NVMLError as error:
                if error.value in _LIBRARY_WIDE or error.value == _GPU_IS_LOST:
                    self._sorted(error.value, f"nvmlEventSetWait_v2: {error}")
                # usually a timeout, which means that nothing happened; without events everything else still works
                return
            yield handle_key(event.device), int(event.eventData)

    def _forget_events(self) -> None:
        if self._events is not None:
            with suppress(self.binding.NVMLError):  # the driver may be unloaded, and the event set with it
                self.binding.nvmlEventSetFree(self._events)
            self._events = None

    # ---- processes --------------------------------------------------------------------------------------------------

    def process_entries(self, handle: Any, kind: str) -> ProcessEntries | None:
        """Return the list as raw bytes; None if it is unknown. Raises GpuLost or GpuFailed."""
        function = self._process_list(kind)
        if function is None:
            return None
        count = ctypes.c_uint(self._capacity)
        code = function(handle, ctypes.byref(count), self._buffer)
        while code == _INSUFFICIENT_SIZE and self._capacity < count.value * 2 <= _MAX_ENTRIES:
            self._capacity = count.value * 2  # more may start in between
            self._buffer = ctypes.create_string_buffer(self._capacity * _MAX_ENTRY_BYTES)
            count = ctypes.c_uint(self._capacity)
            code = function(handle, ctypes.byref(count), self._buffer)
        if code:
            self._sorted(code, f"{_PROCESS_FUNCTIONS[kind]}: {self.binding.NVMLError(code)}")
            return None
        entry_bytes = self._entry_bytes.get(kind)
        if entry_bytes is None:
            if not count.value:
                return ProcessEntries(b"", _USUAL_ENTRY_BYTES)
            self._entry_bytes[kind] = self._measured(function, handle)
            return self.process_entries(handle, kind)  # measuring has used the buffer
        listed = min(count.value, self._capacity)
        return ProcessEntries(ctypes.string_at(self._buffer, listed * entry_bytes), entry_bytes)

    def _process_list(self, kind: str) -> Callable[..., int] | None:
        if kind not in self._process_lists:
            name = _PROCESS_FUNCTIONS[kind]
            found = (getattr(self._library, name + suffix, None) for suffix in ("_v3", "_v2"))
            self._process_lists[kind] = next((function for function in found if function is not None), None)
        return self._process_lists[kind]

    def _measured(self, function: Callable[..., int], handle: Any) -> int:
        """Return the real length of an entry, from what the driver leaves of a blank buffer.

        Drivers 535.43 to 535.86 wrote 32 bytes an entry under a function name that otherwise writes 24; others are
        reported with 16. Reading those as 24 gives memory sizes as pids.
        """
        ctypes.memset(self._buffer, _BLANK, len(self._buffer))
        count = ctypes.c_uint(self._capacity)
        if function(handle, ctypes.byref(count), self._buffer) or not count.value:
            return _USUAL_ENTRY_BYTES
        written = len(self._buffer.raw.rstrip(bytes([_BLANK])))
        length, rest = divmod(written, count.value)
        return length if length in _ENTRY_BYTES and not rest else _USUAL_ENTRY_BYTES


def handle_key(handle: Any) -> int:
    """Return the key of a handle, by which events name GPUs."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def known_text(text: str | None) -> str | None:
    """Return None for texts that mean "no answer"."""
    stripped = (text or "").strip()
    return None if stripped.lower() in {"", "n/a", "[n/a]", "unknown", "[unknown error]"} else stripped
