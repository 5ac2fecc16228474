"""The CPython of another process, and how to make it run a script: the protocol of PEP 768, written from outside.

`sys.remote_exec` does the same, but only from a Python of the same version. hegmctl often runs an older one. The
target's own interpreter could do it, but root would then run a program that another user chose. So this module reads
where the target's runtime says that its fields are, and writes a path and a flag there. Owns nothing in the target: a
request that was not taken is withdrawn again.
"""

from __future__ import annotations

import os
import struct

from hegmd.errors import NOT_FOUND, HegmError, Refused

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

FIRST_VERSION = (3, 14)
# The offsets of the fields of `debugger_support` in `_Py_DebugOffsets` (Include/internal/pycore_debug_offsets.h). Their
# order is the same in both versions, and so are the fields before them that are read here.
_SUPPORT_AT = {(3, 14): 712, (3, 15): 840}
_COOKIE = b"xdebugpy"
_HEAD = struct.Struct("<8sQQ")  # cookie, version, whether it is free-threaded
_INTERPRETERS_HEAD_AT, _THREADS_MAIN_AT = 40, 80
_SUPPORT = struct.Struct("<6Q")
_POINTER = struct.Struct("<Q")
_FLAG = struct.Struct("<i")
# _PY_EVAL_PLEASE_STOP_BIT: the thread looks for a request at its next turn of the evaluation loop.
_PLEASE_STOP = 1 << 5
_PRERELEASE_BITS, _FINAL = 0xF0, 0xF0
_MAX_SCANNED_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


class NoPython(Exception):
    """The process has no Python runtime that publishes its layout."""


class RemotePython:
    """The runtime of a process, open for reading and writing. Raises HegmError if it cannot be opened.

    A context manager: leaving it closes the target's memory and changes nothing.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._is_asked = False
        self._memory = _open_memory(pid)
        try:
            self._runtime = self._find_runtime()
            _, version, _ = _HEAD.unpack(self._read(self._runtime, _HEAD.size))
        except BaseException:
            os.close(self._memory)
            raise
        self.version = (version >> 24 & 0xFF, version >> 16 & 0xFF)
        self.is_final = version & _PRERELEASE_BITS == _FINAL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._memory)

    @property
    def is_known(self) -> bool:
        """Return True if this release of hegmctl knows the fields of that version."""
        return self.version in _SUPPORT_AT and self.is_final

    def is_enabled(self) -> bool:
        """Return True if that process allows others to make it run scripts."""
        interpreter, _ = self._interpreter()
        enabled_at = interpreter + self._support()[2]
        return self._flag(enabled_at)

    def request(self, path: str) -> None:
        """Have the main thread run that script at its next turn of the evaluation loop. Raises HegmError."""
        encoded = os.fsencode(path) + b"\0"
        _, thread = self._interpreter()
        breaker_offset, requests, _, pending_offset, path_offset, path_bytes = self._support()
        if len(encoded) > path_bytes:
            raise Refused(f"the path {path} is longer than {path_bytes - 1} bytes", "set TMPDIR to a shorter path")
        self._write(thread + requests + path_offset, encoded)
        self._is_asked = True
        self._write(thread + requests + pending_offset, _FLAG.pack(1))
        breaker_at = thread + breaker_offset
        breaker = self._pointer(breaker_at)
        self._write(breaker_at, _POINTER.pack(breaker | _PLEASE_STOP))

    def withdraw(self) -> bool:
        """Withdraw the request, if there is one. Return True if the thread had not taken it yet."""
        if not self._is_asked:
            return True
        _, thread = self._interpreter()
        _, requests, _, pending_offset, _, _ = self._support()
        pending_at = thread + requests + pending_offset
        if not self._flag(pending_at):
            return False
        self._write(pending_at, _FLAG.pack(0))
        return True

    def _support(self) -> tuple[int, ...]:
        return _SUPPORT.unpack(self._read(self._runtime + _SUPPORT_AT[self.version], _SUPPORT.size))

    def _interpreter(self) -> tuple[int, int]:
        """Return the main interpreter, and the state of its main thread."""
        interpreter = self._pointer(self._runtime + self._pointer(self._runtime + _INTERPRETERS_HEAD_AT))
        thread = interpreter and self._pointer(interpreter + self._pointer(self._runtime + _THREADS_MAIN_AT))
        if not thread:
            raise Refused(f"the Python of process {self._pid} is starting or ending", "retry while it trains")
        return interpreter, thread

    def _find_runtime(self) -> int:
        """Return the address of its runtime: the cookie, in the writable part of a mapped file. Raises NoPython."""
        left_bytes = _MAX_SCANNED_BYTES
        for start, end in _writable_parts(self._pid):
            for at in range(start, min(end, start + left_bytes), _PIECE_BYTES):
                size_bytes = min(_PIECE_BYTES, end - at)
                try:
                    found = os.pread(self._memory, size_bytes, at).find(_COOKIE)
                except OSError:  # a page beyond the end of its file, or of a device
                    continue
                # The name of the section is aligned, and another string with these letters need not be.
                if found >= 0 and found % 8 == 0:
                    return at + found
            left_bytes -= end - start
        raise NoPython

    def _flag(self, address: int) -> bool:
        return _FLAG.unpack(self._read(address, _FLAG.size)) == (1,)

    def _pointer(self, address: int) -> int:
        (pointer,) = _POINTER.unpack(self._read(address, _POINTER.size))
        return int(pointer)

    def _read(self, address: int, size_bytes: int) -> bytes:
        try:
            data = os.pread(self._memory, size_bytes, address)
        except OSError as error:
            raise self._unreadable(address) from error
        if len(data) < size_bytes:
            raise self._unreadable(address)
        return data

    def _write(self, address: int, data: bytes) -> None:
        try:
            os.pwrite(self._memory, data, address)
        except OSError as error:
            raise self._unreadable(address) from error

    def _unreadable(self, address: int) -> HegmError:
        message = f"the memory of process {self._pid} cannot be accessed at {address:#x}"
        return Refused(message, f"check that it runs: hegmctl ps {self._pid}")


def python_named_by(pid: int) -> str | None:
    """Return the version of the mapped Python from its file name, such as 3.11; None without one."""
    for name in mapped_names(pid):
        for prefix in ("libpython", "python"):
            rest = name.removeprefix(prefix)
            digits = rest[: len(rest) - len(rest.lstrip("0123456789."))].strip(".")
            if rest != name and digits.startswith("3"):
                return digits
    return None


def mapped_names(pid: int) -> Iterator[str]:
    """Yield the base names of the files mapped in that process, each once. Raises HegmError."""
    visited: set[str] = set()
    for line in _maps(pid):
        name = line.rpartition("/")[2].removesuffix(" (deleted)") if "/" in line else ""
        if name and name not in visited:
            visited.add(name)
            yield name


def _writable_parts(pid: int) -> Iterator[tuple[int, int]]:
    """Yield the writable parts of mapped files, those of Python first. Never those of a device."""
    parts: list[tuple[bool, int, int]] = []
    for line in _maps(pid):
        span, access, *rest = line.split(None, 5)
        if access.startswith("rw") and len(rest) == 4 and rest[3].startswith("/") and not rest[3].startswith("/dev/"):
            start, _, end = span.partition("-")
            parts.append(("python" not in rest[3].rpartition("/")[2], int(start, 16), int(end, 16)))
    for _, first, last in sorted(parts):
        yield first, last


def _maps(pid: int) -> list[str]:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            return file.read().splitlines()
    except PermissionError as error:
        raise not_permitted(pid) from error
    except OSError as error:
        raise gone(pid) from error


def _open_memory(pid: int) -> int:
    try:
        return os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise not_permitted(pid) from error
    except OSError as error:
        raise gone(pid) from error


def gone(pid: int) -> HegmError:
    return HegmError(NOT_FOUND, f"there is no process {pid}", "list the processes: hegmctl ps", {"pid": pid})


def not_permitted(pid: int) -> HegmError:
    """Return the error for a process whose memory the caller may not read."""
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope", encoding="ascii") as file:
            scope = file.read().strip()
    except OSError:
        scope = "0"
    why = f" (kernel.yama.ptrace_scope is {scope})" if scope != "0" else ""
    hint = f"run it as root: sudo hegmctl attach {pid}" if os.geteuid() else "give it CAP_SYS_PTRACE"
    return Refused(f"the kernel does not let this user access the memory of process {pid}{why}", hint, {"pid": pid})
