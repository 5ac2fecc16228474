"""The one door to NVML: initialises the library, asks it through NVIDIA's own binding, and lets go of the driver.

It sorts NVML's codes into four: an answer; None for a question that this GPU, driver or binding has no answer to;
GpuLost or GpuFailed; LibraryFailed. The questions themselves are in nvml_gpu.py, and what an answer means for a record
or an operator is for nvidia.py to say.

The binding (nvidia-ml-py, imported as pynvml) keeps the library and every function it found in it for the life of the
process, and loads it by name only. So it is handed a library that `shared_library` loaded, and `close` takes library
and functions away from it: a driver that was upgraded or loaded anew is then found by the next `Nvml`. Process lists
are read past the binding, which makes a Python object with four attributes of each entry: 2,000 processes would cost
more than all the rest of a snapshot.
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
# The library as a whole is of no use any more: whatever is asked of it.
_LIBRARY_WIDE = {UNINITIALIZED, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, LIB_RM_VERSION_MISMATCH}
# No answer, and nothing wrong with that: invalid argument (link 18 of 18), not supported, no permission, not found,
# function not found, ECC of a vGPU, argument version mismatch, deprecated. The last two: another function has it.
_UNTOLD = {2, 3, 4, 6, 13, 22, 25, 26}

_XID_CRITICAL_ERROR = 0x8
_EVENTS_PER_CALL = 1000  # an event storm must not hold up a snapshot for good

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
_MAX_ENTRIES = 1 << 17  # no node has so many; a driver that says so is not believed


class LibraryMissing(Exception):
    """The dynamic loader finds no library of that name."""


class LibraryFailed(Exception):
    """The library cannot be used (any more). `code` is NVML's, or None when it did not get that far."""

    def __init__(self, code: int | None, words: str) -> None:
        super().__init__(words)
        self.code = code


class GpuLost(Exception):
    """That GPU is off the bus."""


class GpuFailed(Exception):
    """The driver answers a question about that GPU with an error that should not be."""


class ProcessEntries(NamedTuple):
    """A process list as the driver wrote it: entries of pid (u32), 4 bytes of nothing, bytes used (u64) and more."""

    raw: bytes
    entry_bytes: int


class Nvml:
    """The library, loaded and initialised; one at a time in a process, since the binding has one.

    Everything raises LibraryFailed once it stopped working.
    """

    def __init__(self, library: SharedLibrary) -> None:
        """Load and initialise it. Raises LibraryMissing or LibraryFailed, with nothing initialised then."""
        self._owner = library  # as long as this lives, so that what it calls into stays loaded
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
            import pynvml  # noqa: TID251 - this module is the door
        except ImportError as error:
            raise LibraryFailed(None, f"the Python binding nvidia-ml-py cannot be imported: {error}") from None
        self.binding = pynvml
        self._hand_over(self._library)
        try:
            self.binding.nvmlInit()
        except self.binding.NVMLError as error:
            raise LibraryFailed(error.value, f"nvmlInit: {error}") from None

    def close(self) -> None:
        """Shut down, after which nothing of the driver is held open any more. Twice is fine."""
        if self._library is None:
            return
        self._forget_events()
        with suppress(self.binding.NVMLError):  # it may not work any more, which may be why it is closed
            self.binding.nvmlShutdown()
        self._take_away()

    def _take_away(self) -> None:
        self._library = None
        self._process_lists.clear()
        if self.binding is not None:
            self._hand_over(None)

    def _hand_over(self, library: ctypes.CDLL | None) -> None:
        """Make this the binding's library, and have it forget the functions of another: they would be jumped to."""
        self.binding.nvmlLib = library
        self.binding._nvmlGetFunctionPointer_cache.clear()
        self.binding._nvmlLib_refcount = 0

    # ---- asking -----------------------------------------------------------------------------------------------------

    def answer(self, function: str, *arguments: object) -> Any:
        """What the binding's function gives; None where there is no answer."""
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
        """None for a question without an answer; the exception that fits for everything else."""
        if code in _UNTOLD:
            return
        if code in _LIBRARY_WIDE:
            raise LibraryFailed(code, words)
        if code == _GPU_IS_LOST:
            raise GpuLost(words)
        raise GpuFailed(words)

    def versions(self) -> tuple[str | None, str | None, str | None]:
        """Of the kernel driver, of this library, and the highest CUDA that the driver offers."""
        found: dict[str, Any] = {}
        for function in ("nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion", "nvmlSystemGetCudaDriverVersion_v2"):
            with suppress(GpuFailed, GpuLost):
                found[function] = self.answer(function)
        cuda = found.get("nvmlSystemGetCudaDriverVersion_v2")
        return (
            told_text(found.get("nvmlSystemGetDriverVersion")),
            told_text(found.get("nvmlSystemGetNVMLVersion")),
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
        """What the GPU of that index is asked through. Raises GpuLost or GpuFailed."""
        handle = self.answer("nvmlDeviceGetHandleByIndex", index)
        if handle is None:
            raise GpuFailed("the driver denies access to the GPU")
        return handle

    # ---- events -----------------------------------------------------------------------------------------------------

    def watch(self, handles: Iterable[Any]) -> None:
        """Have XID events of these GPUs, and of no others, noted from now on, as far as each allows it."""
        self._forget_events()
        with suppress(GpuFailed, GpuLost):
            self._events = self.answer("nvmlEventSetCreate")
        for handle in handles if self._events is not None else ():
            with suppress(GpuFailed, GpuLost):  # the next snapshot finds out, and tells anew whom to watch
                self.answer("nvmlDeviceRegisterEvents", handle, _XID_CRITICAL_ERROR, self._events)

    def xids(self) -> Iterator[tuple[int, int]]:
        """The XID events since the last call, each as the GPU's key and the number; never waits for one.

        Raises GpuLost when a watched GPU is off the bus: then the others' events do not get through either, until
        `watch` is told anew whom to watch.
        """
        if self._events is None:
            return
        for _ in range(_EVENTS_PER_CALL):
            try:
                event = self.binding.nvmlEventSetWait_v2(self._events, 0)
            except self.binding.NVMLError as error:
                if error.value in _LIBRARY_WIDE or error.value == _GPU_IS_LOST:
                    self._sorted(error.value, f"nvmlEventSetWait_v2: {error}")
                return  # as a rule a timeout, which says that nothing happened; without events all else still holds
            yield handle_key(event.device), int(event.eventData)

    def _forget_events(self) -> None:
        if self._events is not None:
            with suppress(self.binding.NVMLError):  # the driver may be gone, and with it the set
                self.binding.nvmlEventSetFree(self._events)
            self._events = None

    # ---- processes --------------------------------------------------------------------------------------------------

    def process_entries(self, handle: Any, kind: str) -> ProcessEntries | None:
        """The list as raw bytes, None when it is not told. Raises GpuLost or GpuFailed."""
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
            self._sorted(code, f"{_PROCESS_FUNCTIONS[kind]}: {self._words(code)}")
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
        """How long an entry really is, by what the driver leaves of a blank buffer.

        Drivers 535.43 to 535.86 wrote 32 bytes an entry under the name of a function that before and after writes 24,
        others are reported with 16; reading them as 24 gives pids that are memory sizes.
        """
        ctypes.memset(self._buffer, _BLANK, len(self._buffer))
        count = ctypes.c_uint(self._capacity)
        if function(handle, ctypes.byref(count), self._buffer) or not count.value:
            return _USUAL_ENTRY_BYTES
        written = len(self._buffer.raw.rstrip(bytes([_BLANK])))
        length, rest = divmod(written, count.value)
        return length if length in _ENTRY_BYTES and not rest else _USUAL_ENTRY_BYTES

    def _words(self, code: int) -> str:
        return str(self.binding.NVMLError(code))


def handle_key(handle: Any) -> int:
    """What tells handles apart; events know GPUs by it."""
    return ctypes.cast(handle, ctypes.c_void_p).value or 0


def told_text(text: str | None) -> str | None:
    """None for the words that stand for no answer in a field of text."""
    stripped = (text or "").strip()
    return None if stripped.lower() in {"", "n/a", "[n/a]", "unknown", "[unknown error]"} else stripped
