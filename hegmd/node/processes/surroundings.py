"""Facts about a process, read from outside, that would make the driver's checkpoint fail or the process die.

Reads /proc/PID (state, ancestors, maps, environment, IPC namespace) and limits of control groups;
`migration.driver_rules` judges. Reading maps takes the lock of the process's memory map, so callers use a thread that
can be abandoned. A fact that cannot be read is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")
# cgroup version 1 writes a limit at least this large for no limit.
_NO_LIMIT_BYTES = 1 << 60
_STATE, _PARENT = 0, 1
_MAPS_MAX_BYTES = 64 << 20


class SurroundingFacts(NamedTuple):
    """The facts. None is unknown; `cgroup_free_bytes` None also means no limit."""

    stopped: bool = False
    nccl_shared: bool | None = None
    nccl_p2p_disabled: bool = False
    cgroup_free_bytes: int | None = None
    same_ipc: bool | None = None


def read_outside(pid: int, proc_root: str = "/proc", cgroups: Path = _CGROUPS) -> SurroundingFacts:
    """Read one process. May block while the process holds the lock of its memory map."""
    process = Path(proc_root) / str(pid)
    environment = _read(process / "environ").split(b"\0")
    return SurroundingFacts(
        stopped=_stat(process)[_STATE : _STATE + 1] in ([b"T"], [b"t"]),
        nccl_shared=_maps_nccl(process),
        nccl_p2p_disabled=b"NCCL_P2P_DISABLE=1" in environment,
        cgroup_free_bytes=_cgroup_free_bytes(process, cgroups),
        same_ipc=_is_in_our_ipc(process, Path(proc_root)),
    )


def parent_of(pid: int) -> int | None:
    """Return its parent's pid; None if unknown."""
    fields = _stat(Path("/proc") / str(pid))
    return int(fields[_PARENT]) if len(fields) > _PARENT else None


def variables_of(pid: int, names: Collection[str]) -> dict[str, str]:
    """Return these variables of its initial environment. May block while it holds the lock of its memory map."""
    found: dict[str, str] = {}
    for entry in _read(Path("/proc") / str(pid) / "environ").split(b"\0"):
        name, is_one, value = entry.decode(errors="surrogateescape").partition("=")
        if is_one and name in names:
            found[name] = value
    return found


def nearest_ancestor(pid: int, among: Collection[int]) -> int | None:
    """Return the nearest ancestor of a process among those given; None if there is none."""
    visited = {pid}
    while True:
        fields = _stat(Path("/proc") / str(pid))
        if len(fields) <= _PARENT:
            return None
        pid = int(fields[_PARENT])
        if pid in among:
            return pid
        if pid <= 1 or pid in visited:
            return None
        visited.add(pid)


def _stat(process: Path) -> list[bytes]:
    """The fields after the name, which may hold anything."""
    return _read(process / "stat").rpartition(b")")[2].split()


def _maps_nccl(process: Path) -> bool | None:
    """Return True if NCCL's shared segments are mapped: ranks on one node share them while a communicator exists."""
    maps = _read(process / "maps", _MAPS_MAX_BYTES)
    return b"/dev/shm/nccl-" in maps if maps else None


def _is_in_our_ipc(process: Path, proc: Path) -> bool | None:
    try:
        return (process / "ns/ipc").stat().st_ino == (proc / "self/ns/ipc").stat().st_ino
    except OSError:
        return None


def _cgroup_free_bytes(process: Path, cgroups: Path) -> int | None:
    """Return the least that its control groups let it grow; page cache counts as free."""
    found = [
        free_bytes for folder in _memory_groups(process, cgroups) if (free_bytes := _free_bytes_in(folder)) is not None
    ]
    return min(found, default=None)


def _memory_groups(process: Path, cgroups: Path) -> Iterator[Path]:
    """Return its control group with a memory controller, and that group's parents."""
    for line in _read(process / "cgroup").decode(errors="replace").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        folder = root / path.lstrip("/")
        while folder != root.parent:
            yield folder
            folder = folder.parent


def _free_bytes_in(folder: Path) -> int | None:
    for limit_name, used_name in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        limit, used = _number(folder / limit_name), _number(folder / used_name)
        if limit is not None and used is not None and limit < _NO_LIMIT_BYTES:
            return max(0, limit - used + _cache_bytes(folder))
    return None


def _cache_bytes(folder: Path) -> int:
    for line in _read(folder / "memory.stat").decode(errors="replace").splitlines():
        name, _, value = line.partition(" ")
        if name in {"inactive_file", "total_inactive_file"} and value.isdigit():
            return int(value)
    return 0


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path, size_bytes: int = 1 << 20) -> bytes:
    """Return the file's first bytes; empty if it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    parts: list[bytes] = []
    try:
        while size_bytes > 0 and (part := os.read(descriptor, min(size_bytes, 1 << 16))):
            parts.append(part)
            size_bytes -= len(part)
    except OSError:
        pass  # it has ended in between
    finally:
        os.close(descriptor)
    return b"".join(parts)
