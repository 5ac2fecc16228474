"""Processes with the CUDA driver's library mapped, found in /proc: those that NVML does not list.

A process that the driver has checkpointed has no GPU device open and is in no list. Still visible are its mapping of
libcuda and the size of its own memory, which includes the bytes of its GPU memory. The driver's state of it is read
elsewhere.

Reading maps takes the lock of the process's memory map. So callers use a thread that can be abandoned, and get what was
read until then. Unreadable processes belong to users on whose processes hegmd may not act.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import NamedTuple

from hegmd.node.processes.procfs import ProcessGone, Unreadable, read_kernel_facts

_LIBRARY = b"/libcuda.so"
_DEVICES = "/dev/nvidia"
_MAPS_MAX_BYTES = 64 << 20
_STATUS_MAX_BYTES = 1 << 16
# Indices of the fields after the name in /proc/PID/stat.
_STATE, _PARENT, _FLAGS = 0, 1, 6
# PF_FORKNOEXEC of include/linux/sched.h: forked, and still the program that it was forked from.
_FORKED = 0x40
# The fields that add up to a process's own memory: private, shared without a file, swapped out, in huge pages.
_OWN_MEMORY = (b"RssAnon", b"RssShmem", b"VmSwap", b"HugetlbPages")


class CudaUser(NamedTuple):
    """A such process. `own_bytes` is all its own memory, wherever that is."""

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
        return self.pid, self.start_ticks


def find_cuda_users(found: MutableMapping[int, CudaUser], proc_root: str = "/proc") -> None:
    """Add every such process to `found`, by pid, one after the other, so that one that hangs hides no earlier one.
    Blocks."""
    for entry in os.listdir(proc_root):
        if entry.isdigit() and int(entry) != os.getpid():
            user = read_cuda_user(int(entry), proc_root)
            if user is not None:
                found[user.pid] = user


def read_cuda_user(pid: int, proc_root: str = "/proc") -> CudaUser | None:
    """Return that process if it is one. May block as long as it holds the lock of its memory map."""
    maps = f"{proc_root}/{pid}/maps"
    try:
        if not _maps_library(maps):  # nor is it of nearly all processes, of which no other file is read
            return None
        facts = read_kernel_facts(proc_root, pid)
        if not _maps_library(maps):
            return None
        fields = _read(f"{proc_root}/{pid}/stat", 4096).rpartition(b")")[2].split()
        own_bytes = _own_bytes(_read(f"{proc_root}/{pid}/status", _STATUS_MAX_BYTES))
        has_devices = _has_devices(f"{proc_root}/{pid}/fd")
        if read_kernel_facts(proc_root, pid).start_ticks != facts.start_ticks:
            return None  # another process has its number by now
    except (ProcessGone, Unreadable, OSError):
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
    """Return True if the library is mapped. Reads no more than needed."""
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
