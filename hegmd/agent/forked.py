"""Drops what a forked child has of its parent's GPU: mappings and descriptors of NVIDIA's devices.

A forked child, such as a loader's worker, inherits them and cannot use them: CUDA does not work across a fork. They
only prevent a dump of the job, since only the driver knows their contents. A child of a parent without CUDA keeps
everything: NVML's descriptors, which it may use, look the same except for `-uvm`.

Runs in the child right after the fork, where only the forking thread exists; so what it needs was prepared before. What
cannot be dropped stays, and nothing is raised.
"""

from __future__ import annotations

import ctypes
import os

DEVICES = "/dev/nvidia"
ONLY_OF_CUDA = "-uvm"

_munmap = ctypes.CDLL(None).munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_munmap.restype = ctypes.c_int


def leave_gpu(devices: str = DEVICES) -> int:
    """Unmap and close what belongs to devices with these path prefixes; returns how many mappings and descriptors."""
    held = _descriptors(devices)
    if not any(path.startswith(devices + ONLY_OF_CUDA) for path in held.values()):
        return 0
    dropped = sum([int(_munmap(start, size_bytes) == 0) for start, size_bytes in _ranges(devices)])
    for fd in held:
        try:
            os.close(fd)
            dropped += 1
        except OSError:
            pass
    return dropped


def _descriptors(devices: str) -> dict[int, str]:
    found: dict[int, str] = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return found
    for name in names:
        try:
            path = os.readlink("/proc/self/fd/" + name)
        except OSError:  # the listing's own
            continue
        if path.startswith(devices):
            found[int(name)] = path
    return found


def _ranges(devices: str) -> list[tuple[int, int]]:
    """Address and size of each mapping of theirs."""
    wanted = os.fsencode(devices)
    found: list[tuple[int, int]] = []
    try:
        with open("/proc/self/maps", "rb") as maps:
            lines = maps.read().splitlines()
    except OSError:
        return found
    for line in lines:
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5].startswith(wanted):
            start, _, end = parts[0].partition(b"-")
            found.append((int(start, 16), int(end, 16) - int(start, 16)))
    return found
