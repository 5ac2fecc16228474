"""Decides what CRIU needs for a process tree, and what prevents its dump, from what was read of the tree.

An option is given because the tree needs it, never as a precaution: an unneeded option does harm. It finds in advance
what CRIU would refuse after the job was stopped, as far as that is visible from outside; `error_messages` explains the
rest. Pure.

The needs are stored in an image's manifest, since the restore needs the same options: they have a plain form.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from hegmd.node.processes.open_files import (
    PTY_MAJORS,
    Outlet,
    connections,
    has_pty_master,
    is_named_elsewhere,
    number_of,
    outlets_of,
    reason_of_connection,
    reasons_of_unix,
    refusal,
    unix_datagrams,
)
from hegmd.node.processes.process_tree import Descriptor, Tree
from hegmd.protocol.operations import Reason

__all__ = ["Needs", "OpenFile", "Outlet", "needs_of"]

GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")
GHOST_LIMIT = "4095M"  # the largest that CRIU 4 takes

_KEPT = "inotify [eventfd] [eventpoll] [fanotify] [pidfd] [signalfd] [timerfd]".split()
# null, zero, full, random, urandom, kmsg and the controlling terminal, by major and minor number.
_PLAIN_DEVICES = frozenset([(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (1, 11), (5, 0), (5, 2)])
# A control group is not CRIU's business here, and a time namespace only matters if the others differ too.
_OWN_NAMESPACES = frozenset({"ipc", "mnt", "net", "pid", "user", "uts"})


class OpenFile(NamedTuple):
    """A regular file that a process has open: CRIU wants it to have that size again."""

    path: str
    size_bytes: int
    is_written: bool
    is_appended: bool = False  # True if every process that has it open only appends: then CRIU dumps it at any size


class Needs(NamedTuple):
    """The options for CRIU, what the restore has to provide, and the reasons against a dump."""

    pids: tuple[int, ...]
    dump_options: tuple[str, ...] = ()
    restore_options: tuple[str, ...] = ()
    outlets: tuple[Outlet, ...] = ()
    files: tuple[OpenFile, ...] = ()
    reasons: tuple[Reason, ...] = ()
    # Reasons that apply without root rights only.
    only_by_root: tuple[Reason, ...] = ()

    def plain(self) -> dict[str, Any]:
        """Return the plain form for a manifest, without the reasons: nothing was dumped against one."""
        return {
            "pids": list(self.pids),
            "dump_options": list(self.dump_options),
            "restore_options": list(self.restore_options),
            "outlets": [
                {
                    "key": each.key,
                    "fds": [list(fd) for fd in each.fds],
                    "read": each.is_read,
                    "written": each.is_written,
                }
                for each in self.outlets
            ],
            "files": [
                {
                    "path": each.path,
                    "size_bytes": each.size_bytes,
                    "written": each.is_written,
                    "appended": each.is_appended,
                }
                for each in self.files
            ],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Needs:
        """Return the needs of a plain form. Raises KeyError, TypeError and ValueError for anything else."""
        outlets = [
            Outlet(
                str(each["key"]), tuple((int(pid), int(fd)) for pid, fd in each["fds"]), each["read"], each["written"]
            )
            for each in plain["outlets"]
        ]
        files = [
            OpenFile(str(each["path"]), int(each["size_bytes"]), bool(each["written"]), bool(each["appended"]))
            for each in plain["files"]
        ]
        return cls(
            pids=tuple(int(pid) for pid in plain["pids"]),
            dump_options=tuple(str(word) for word in plain["dump_options"]),
            restore_options=tuple(str(word) for word in plain["restore_options"]),
            outlets=tuple(outlets),
            files=tuple(files),
        )


def needs_of(
    tree: Tree, *, gpu_pids: Collection[int] = (), agent_sockets: Collection[str] = (), close_connections: bool = False
) -> Needs:
    """Return what that tree needs.

    `gpu_pids` are processes whose GPU state a driver will have checkpointed by then. `agent_sockets` are the names of
    sockets that agents are connected to and will have left. With `close_connections`, TCP connections to other jobs are
    dropped: they are closed after the restore.
    """
    outlets = tuple(outlets_of(tree))
    reasons = [
        *_reasons_of_members(tree),
        *_reasons_of_descriptors(tree, gpu_pids),
        *_reasons_of_mappings(tree, gpu_pids),
        *reasons_of_unix(tree, agent_sockets, {outlet.key for outlet in outlets}),
    ]
    only_by_root = [*_reasons_of_confined(tree)]
    common: list[str] = []
    if _is_shell_job(tree):
        common.append("--shell-job")
    if any(each.is_locked for each in tree.descriptors):
        common.append("--file-locks")
    within, beyond = connections(tree)
    if beyond and not close_connections:
        reasons += [reason_of_connection(each, tree.tcp[each.inode]) for each in beyond]
    elif beyond:
        common.append("--tcp-close")
    elif within:
        only_by_root.append(_of_root(within[0].pid, "a TCP connection to another process of the job"))
        common += ["--tcp-established", "--network-lock", "nftables"]
    if any(is_named_elsewhere(tree, each) for each in unix_datagrams(tree)):
        common.append("--ext-unix-sk")
    dump = [*common, *_options_for_deleted(tree)]
    for outlet in outlets:
        if not outlet.key.startswith("pipe:"):
            dump += ["--external", outlet.key.replace("socket:[", "unix[")]
    restore = [*common, *(["--link-remap"] if "--link-remap" in dump else [])]
    pids = tuple(member.pid for member in tree.members)
    return Needs(pids, tuple(dump), tuple(restore), outlets, tuple(_files(tree)), tuple(reasons), tuple(only_by_root))


# ---- processes ------------------------------------------------------------------------------------------------------


def _reasons_of_members(tree: Tree) -> Iterator[Reason]:
    kinds = {kind for kind, _ in tree.namespaces}
    for member in tree.members:
        if member.tracer:
            yield refusal(
                f"process {member.pid} is traced by process {member.tracer}",
                "end the debugger or strace: a process can have one tracer only, and CRIU needs to trace it",
                member.pid,
            )
        own = sorted(
            kind
            for kind, name in member.namespaces
            if kind in _OWN_NAMESPACES & kinds and (kind, name) not in tree.namespaces
        )
        if own:
            yield refusal(
                f"process {member.pid} has namespaces of its own: {', '.join(own)}",
                "run hegmd inside the container or sandbox, or use the container runtime's checkpoint",
                member.pid,
            )
    root = tree.member(tree.root)
    if root.state in {"Z", "X"}:
        yield refusal(f"process {root.pid} has ended", "run: hegmctl ps", root.pid)
    for member in tree.members:
        if member.session == 0:
            yield refusal(
                f"process {member.pid} is in a session whose leader is outside this pid namespace",
                "start the job with setsid: it was started from outside the container (kubectl exec, docker exec, "
                "nsenter)",
                member.pid,
            )
        elif member.session not in tree.pids and member.session != root.session:
            yield refusal(
                f"process {member.pid} is in session {member.session}, whose leader is neither in the job nor its own",
                "checkpoint the process that started it, so that the image has the whole job",
                member.pid,
            )
        elif member.has_terminal and member.session in tree.pids and not has_pty_master(tree):
            yield refusal(
                f"process {member.pid} has a controlling terminal whose other side is outside the job",
                "start the job without a terminal (setsid, nohup, a unit), or checkpoint the shell that started it",
                member.pid,
            )


def _reasons_of_confined(tree: Tree) -> Iterator[Reason]:
    for member in tree.members:
        if member.is_confined:
            yield _of_root(member.pid, "a filter of system calls (seccomp)")


def _of_root(pid: int, what: str) -> Reason:
    return refusal(
        f"process {pid} has {what}, which CRIU cannot dump with a user's rights",
        "have root write and restore the image",
        pid,
    )


def _is_shell_job(tree: Tree) -> bool:
    """Return True if the leader of its session or group is outside, as with everything that a shell starts."""
    root = tree.member(tree.root)
    return root.session not in tree.pids or root.group not in tree.pids


# ---- descriptors ----------------------------------------------------------------------------------------------------


def _reasons_of_descriptors(tree: Tree, gpu_pids: Collection[int]) -> Iterator[Reason]:
    for each in tree.descriptors:
        if each.trouble is not None:
            yield refusal(
                f"process {each.pid} has {each.target} open (descriptor {each.fd}), which cannot be inspected: "
                f"{each.trouble}",
                "check the server of that file (mount, ps): a network disk or a FUSE program may have ended",
                each.pid,
            )
        elif each.target.startswith("anon_inode:") and each.target.removeprefix("anon_inode:") not in _KEPT:
            what = each.target.removeprefix("anon_inode:").strip("[]")
            yield refusal(
                f"process {each.pid} has {what} open (descriptor {each.fd}), which CRIU cannot dump",
                "have the script close it first, or switch it off in the library (io_uring: a setting of a loader or "
                "server; torchrun uses none with USE_LIBUV=0 under hegmctl run)",
                each.pid,
            )
        elif each.refers_to > 0 and each.refers_to not in tree.pids:
            yield refusal(
                f"process {each.pid} has a pidfd of process {each.refers_to} open (descriptor {each.fd}), which is not "
                "in the job",
                "have the script close it first: that process will not exist when the job is restored",
                each.pid,
            )
        elif stat.S_ISCHR(each.mode) and not _is_dumpable_device(each):
            if not each.path.startswith(GPU_DEVICES):
                yield refusal(
                    f"process {each.pid} has {each.path} open (descriptor {each.fd}), a device that CRIU cannot dump",
                    "have the script close it first",
                    each.pid,
                )
            elif each.pid not in gpu_pids:
                yield _left_of_gpu(each.pid, f"{each.path} open (descriptor {each.fd})")


def _is_dumpable_device(each: Descriptor) -> bool:
    return number_of(each) in _PLAIN_DEVICES or number_of(each)[0] in PTY_MAJORS


def _left_of_gpu(pid: int, what: str) -> Reason:
    return refusal(
        f"process {pid} has {what}, which CRIU cannot dump",
        "start the job with `hegmctl run`: its agent drops the GPU descriptors and mappings that a forked child "
        "inherits",
        pid,
    )


def _reasons_of_mappings(tree: Tree, gpu_pids: Collection[int]) -> Iterator[Reason]:
    visited: set[tuple[int, str]] = set()
    for each in tree.mappings:
        if each.path.startswith(GPU_DEVICES) and each.pid not in gpu_pids:
            if (each.pid, "gpu") not in visited:
                yield _left_of_gpu(each.pid, f"{each.path} mapped")
            visited.add((each.pid, "gpu"))
        elif each.path.startswith("/SYSV"):
            yield refusal(
                f"process {each.pid} has a System V shared memory segment mapped, which belongs to the whole node",
                "share memory through a file or a memfd: CRIU dumps System V memory only with a whole container",
                each.pid,
            )


def _options_for_deleted(tree: Tree) -> list[str]:
    """Return the options for deleted files: their bytes go into the image, unless they have another name."""
    deleted = [each for each in tree.descriptors if _is_regular(each) and each.is_deleted]
    mapped = [each for each in tree.mappings if each.is_deleted and _has_a_name(each.path)]
    options = ["--ghost-limit", GHOST_LIMIT] if deleted or mapped else []
    return [*options, "--link-remap"] if any(each.links for each in deleted) else options


def _is_regular(each: Descriptor) -> bool:
    return stat.S_ISREG(each.mode) and _has_a_name(each.target)


def _has_a_name(path: str) -> bool:
    """Return False for mappings that the kernel only shows as if they had a file."""
    return path.startswith("/") and not path.startswith(("/memfd:", "/SYSV", "/anon_hugepage", "/[aio]", "/dev/zero"))


def _files(tree: Tree) -> Iterator[OpenFile]:
    """Yield each file once. Sizes may change while it is read, so the caller reads while the job is parked."""
    found: dict[str, OpenFile] = {}
    for each in tree.descriptors:
        if _is_regular(each) and not each.is_deleted and not each.path.startswith(("/proc/", "/sys/")):
            before = found.get(each.path)
            is_written = each.is_written or (before is not None and before.is_written)
            is_appended = _is_appended(each) and (before is None or before.is_appended)
            found[each.path] = OpenFile(each.path, each.size_bytes, is_written, is_appended)
    return iter(found.values())


def _is_appended(each: Descriptor) -> bool:
    return each.flags & (os.O_ACCMODE | os.O_APPEND) == os.O_WRONLY | os.O_APPEND
