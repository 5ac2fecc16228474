"""A process tree from /proc: its processes, their open files and mappings, and the peers of sockets.

Only reads; `images/criu/needs` judges. Reading maps takes a lock of the process, and reading an open file can wait for
a dead network disk. So callers use a thread that can be abandoned. A process that ends meanwhile is not in the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hegmd.node.processes.socket_peers import TcpEnd, UnixEnd, tcp_ends, unix_ends

Tell = Callable[[str], object]

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
_DELETED = " (deleted)"
# Fields of /proc/PID/stat after the name.
_STATE, _PARENT, _GROUP, _SESSION, _TERMINAL, _START_TICKS = 0, 1, 2, 3, 4, 19


class TreeProcess(NamedTuple):
    pid: int
    parent: int
    start_ticks: int
    state: str
    group: int
    session: int
    has_terminal: bool = False  # a controlling one
    tracer: int = 0
    threads: int = 1
    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()  # further ones
    is_confined: bool = False  # by a filter of system calls
    is_guarded: bool = False  # the kernel keeps its memory from its own user
    namespaces: tuple[tuple[str, str], ...] = ()
    command: tuple[str, ...] = ()


class Descriptor(NamedTuple):
    """An open descriptor."""

    pid: int
    fd: int
    target: str
    mode: int = stat.S_IFREG
    flags: int = 0
    size_bytes: int = 0
    inode: int = 0
    device: int = 0
    kind_device: int = 0  # which device it is, of a device
    links: int = 1
    owner: tuple[int, int] = (0, 0)  # user and group
    is_locked: bool = False
    refers_to: int = 0  # the process of a pidfd; -1 if it has ended
    trouble: str | None = None  # why its other facts are unknown

    @property
    def is_deleted(self) -> bool:
        """Return True if the file was unlinked or replaced."""
        return self.target.endswith(_DELETED)

    @property
    def path(self) -> str:
        """Return the name by which it was opened."""
        return self.target.removesuffix(_DELETED)

    @property
    def is_written(self) -> bool:
        """Return True if it is open for writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class Mapping(NamedTuple):
    pid: int
    path: str
    is_deleted: bool = False


@dataclass(frozen=True, slots=True)
class Tree:
    """A process and its descendants."""

    root: int
    members: tuple[TreeProcess, ...]
    descriptors: tuple[Descriptor, ...] = ()
    mappings: tuple[Mapping, ...] = ()
    unix: dict[int, UnixEnd] = field(default_factory=dict[int, UnixEnd])  # by inode, of the whole namespace
    tcp: dict[int, TcpEnd] = field(default_factory=dict[int, TcpEnd])
    # Those that CRIU can run in. A kind is listed twice if the daemon's namespace differs from the first process's.
    namespaces: tuple[tuple[str, str], ...] = ()

    @property
    def pids(self) -> frozenset[int]:
        return frozenset(member.pid for member in self.members)

    def member(self, pid: int) -> TreeProcess:
        return next(member for member in self.members if member.pid == pid)


def silent(_what: str) -> None:
    """A `tell` that does nothing."""


def read_tree(root: int, *, proc_root: str = "/proc", tell: Tell = silent) -> Tree:
    """Return the current tree. `tell` is called with the name of each file before the read, which can block forever.

    Raises ProcessLookupError if the process does not exist, and PermissionError if it may not be read.
    """
    proc = Path(proc_root)
    pids = pids_below(root, proc_root=proc_root)
    members = tuple(member for pid in pids if (member := _member(proc, pid)) is not None)
    if not members or members[0].pid != root:
        raise ProcessLookupError(f"there is no process {root}")
    descriptors = tuple(found for member in members for found in _descriptors(proc, member.pid, tell))
    mappings = tuple(found for member in members for found in _mappings(proc, member.pid))
    return Tree(
        root=root,
        members=members,
        descriptors=descriptors,
        mappings=mappings,
        unix=unix_ends() if any(found.target.startswith("socket:") for found in descriptors) else {},
        tcp=tcp_ends(proc / str(root)),
        # In a unit of its own, CRIU runs in the first process's namespaces, whatever the daemon's sandbox; otherwise in
        # the daemon's.
        namespaces=tuple(dict.fromkeys((*_first_namespaces(proc), *_namespaces(proc / "self")))),
    )


def pids_below(root: int, *, proc_root: str = "/proc") -> list[int]:
    """Return the root, then its children, and so on. Reads no open files, so that no dead disk blocks it."""
    proc = Path(proc_root)
    children: dict[int, list[int]] = {}
    for name in os.listdir(proc):
        if name.isdigit() and len(fields := _stat_fields(proc / name)) > _PARENT:
            children.setdefault(int(fields[_PARENT]), []).append(int(name))
    order = [root]
    for pid in order:
        order.extend(sorted(children.get(pid, [])))
    return order


def _stat_fields(process: Path) -> list[bytes]:
    """Return the fields after the name, which may contain anything; empty if the process has ended."""
    try:
        return (process / "stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _member(proc: Path, pid: int) -> TreeProcess | None:
    process = proc / str(pid)
    fields = _stat_fields(process)
    if len(fields) <= _START_TICKS:
        return None
    status = _status(process)
    command = _bytes(process / "cmdline").rstrip(b"\0").split(b"\0")
    uids, gids = ([int(each) for each in status.get(kind, "0").split()] for kind in ("Uid", "Gid"))
    return TreeProcess(
        pid=pid,
        parent=int(fields[_PARENT]),
        start_ticks=int(fields[_START_TICKS]),
        state=fields[_STATE].decode(),
        group=int(fields[_GROUP]),
        session=int(fields[_SESSION]),
        has_terminal=int(fields[_TERMINAL]) != 0,
        tracer=int(status.get("TracerPid", "0")),
        threads=int(status.get("Threads", "1")),
        uid=uids[0],
        gid=gids[0],
        groups=tuple(int(each) for each in status.get("Groups", "").split()),
        is_confined=status.get("Seccomp", "0") == "2",
        is_guarded=_is_guarded(process, uids) or set(gids) != {gids[0]},
        namespaces=_namespaces(process),
        command=tuple(os.fsdecode(word) for word in command),
    )


def _is_guarded(process: Path, uids: list[int]) -> bool:
    """Return True if its own user may not inspect it: it has, or had, other rights, or hides its memory.

    The kernel gives such a process's files in /proc to root (dumpable, man 5 proc).
    """
    try:
        return {*uids, (process / "environ").stat().st_uid} != {uids[0]}
    except (FileNotFoundError, ProcessLookupError):
        return False


def _status(process: Path) -> dict[str, str]:
    lines = _bytes(process / "status").decode("utf-8", "replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _namespaces(process: Path) -> tuple[tuple[str, str], ...]:
    """Return its readable namespaces; none if it has ended."""
    found: list[tuple[str, str]] = []
    for kind in NAMESPACES:
        try:
            found.append((kind, os.readlink(process / "ns" / kind)))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return tuple(found)


def _first_namespaces(proc: Path) -> tuple[tuple[str, str], ...]:
    """Return those of the first process; None if even root may not read them."""
    try:
        return _namespaces(proc / "1")
    except PermissionError:
        return ()


def _descriptors(proc: Path, pid: int, tell: Tell) -> Iterator[Descriptor]:
    process = proc / str(pid)
    try:
        names = os.listdir(process / "fd")
    except (FileNotFoundError, ProcessLookupError):
        return
    for name in sorted(names, key=int):
        target = "?"
        try:
            target = os.readlink(process / "fd" / name)
            tell(target)
            visited = os.stat(process / "fd" / name)
            info = (process / "fdinfo" / name).read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError as error:  # the server of the file system does not answer, or the disk is broken
            yield Descriptor(pid=pid, fd=int(name), target=target, trouble=error.strerror or str(error))
            continue
        facts = dict(line.split(":", 1) for line in info.decode("utf-8", "replace").splitlines() if ":" in line)
        yield Descriptor(
            pid=pid,
            fd=int(name),
            target=target,
            mode=visited.st_mode,
            flags=int(facts.get("flags", "0"), 8),
            size_bytes=visited.st_size,
            inode=visited.st_ino,
            device=visited.st_dev,
            kind_device=visited.st_rdev,
            links=visited.st_nlink,
            owner=(visited.st_uid, visited.st_gid),
            is_locked="lock" in facts,
            refers_to=int(facts.get("Pid", "0")),
        )


def _mappings(proc: Path, pid: int) -> Iterator[Mapping]:
    """Return each mapped file once; memory without a file is left out."""
    visited: set[str] = set()
    for line in _bytes(proc / str(pid) / "maps").splitlines():
        parts = line.split(None, 5)
        if len(parts) == 6 and parts[5].startswith((b"/", b"anon_inode:")):
            name = os.fsdecode(parts[5])
            if name not in visited:
                visited.add(name)
                yield Mapping(pid, name.removesuffix(_DELETED), name.endswith(_DELETED))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
