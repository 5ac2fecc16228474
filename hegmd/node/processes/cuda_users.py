"""Processes that have the CUDA driver's library in them, by /proc alone: for those of whom NVML is silent.

A process that the driver has checkpointed has no GPU's device open any more and is listed nowhere. What can still be
seen of it is that libcuda is mapped in it, and how much memory of its own it has, the bytes of its video memory among
it. That is read here. How the driver has it is the driver's to say, and its to be asked elsewhere.

Reading maps waits for the lock on the process's memory map, so whoever calls this does so in a thread that can be left
behind, and finds what was read until then. What may not be read belongs to somebody on whom hegmd may not act either.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from hegmd.node.processes.procfs import Unreadable, Vanished, read_kernel_facts

__all__ = ["CudaUser", "find_cuda_users", "read_cuda_user"]

_LIBRARY = b"/libcuda.so"
_DEVICES = "/dev/nvidia"
_MAPS_MAX_BYTES = 64 << 20
_STATUS_MAX_BYTES = 1 << 16
# Of the fields after the name in /proc/PID/stat.
_STATE, _PARENT, _FLAGS = 0, 1, 6
# PF_FORKNOEXEC of include/linux/sched.h: forked, and still the program that it was forked from.
_FORKED = 0x40
# Where a process's own memory is: in it, shared without a file, swapped out, in huge pages.
_OWN_MEMORY = (b"RssAnon", b"RssShmem", b"VmSwap", b"HugetlbPages")


@dataclass(frozen=True, slots=True)
class CudaUser:
    """One of them. `own_bytes` is all memory of its own, wherever that is; no less than what was put into it."""

    pid: int
    start_ticks: int
    uid: int
    name: str
    parent: int
    forked: bool
    stopped: bool
    has_devices: bool
    own_bytes: int

    @property
    def who(self) -> tuple[int, int]:
        """Its identity."""
        return self.pid, self.start_ticks


def find_cuda_users(found: MutableMapping[int, CudaUser], proc_root: str = "/proc") -> None:
    """Put every one of them into `found`, by pid, one after the other: what hangs leaves the others known. Blocks."""
    for entry in os.listdir(proc_root):
        if entry.isdigit() and int(entry) != os.getpid():
            user = read_cuda_user(int(entry), proc_root)
            if user is not None:
                found[user.pid] = user


def read_cuda_user(pid: int, proc_root: str = "/proc") -> CudaUser | None:
    """That process, if it is one. Blocks, maybe for as long as it keeps the lock on its memory map."""
    try:
        facts = read_kernel_facts(proc_root, pid)
        if not _maps_library(f"{proc_root}/{pid}/maps"):
            return None
        fields = _read(f"{proc_root}/{pid}/stat", 4096).rpartition(b")")[2].split()
        own_bytes = _own_bytes(_read(f"{proc_root}/{pid}/status", _STATUS_MAX_BYTES))
        has_devices = _has_devices(f"{proc_root}/{pid}/fd")
        if read_kernel_facts(proc_root, pid).start_ticks != facts.start_ticks:
            return None  # another process has its number by now
    except (Vanished, Unreadable, OSError):
        return None
    return CudaUser(
        pid=pid,
        start_ticks=facts.start_ticks,
        uid=facts.uid,
        name=facts.name,
        parent=int(fields[_PARENT]),
        forked=bool(int(fields[_FLAGS]) & _FORKED),
        stopped=fields[_STATE] in (b"T", b"t"),
        has_devices=has_devices,
        own_bytes=own_bytes,
    )


def _maps_library(path: str) -> bool:
    """Whether the library is among what is mapped; no more is read than that takes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        before, left_bytes = b"", _MAPS_MAX_BYTES
        while left_bytes > 0 and (part := os.read(descriptor, 1 << 16)):
            if _LIBRARY in before + part:
                return True
            before, left_bytes = part[-len(_LIBRARY) :], left_bytes - len(part)
    finally:
        os.close(descriptor)
    return False


def _has_devices(folder: str) -> bool:
    for entry in os.listdir(folder):
        try:
            if os.readlink(f"{folder}/{entry}").startswith(_DEVICES):
                return True
        except OSError:
            continue  # closed in between
    return False


def _own_bytes(status: bytes) -> int:
    kib = 0
    for line in status.splitlines():
        name, _, value = line.partition(b":")
        if name in _OWN_MEMORY:
            kib += int(value.split()[0])
    return kib << 10


def _read(path: str, size_bytes: int) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, size_bytes)
    finally:
        os.close(descriptor)
