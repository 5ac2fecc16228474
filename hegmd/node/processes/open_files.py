"""The other ends of a process tree's open files: pipes, terminals, Unix sockets, TCP connections.

Decides which ends are outside the tree, which of these a restore can redirect, and which prevent a dump. Pure.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from typing import NamedTuple

from hegmd.errors import REFUSED
from hegmd.node.processes.process_tree import Descriptor, Tree
from hegmd.node.processes.socket_peers import STREAMS, TcpEnd
from hegmd.protocol.operations import Reason

PTY_MAJORS = range(136, 144)
_V4_IN_V6 = "0000000000000000FFFF0000"


class Outlet(NamedTuple):
    """An open file whose other end is not in the tree: a pipe, a terminal, a socket to a log.

    The other end does not exist at the restore, so a file or /dev/null replaces it.
    """

    key: str
    fds: tuple[tuple[int, int], ...]  # process and descriptor
    is_read: bool
    is_written: bool


def refusal(message: str, hint: str, pid: int) -> Reason:
    """Return a reason against dumping that process."""
    return Reason(code=REFUSED.name, message=message, hint=hint, pid=pid)


def number_of(each: Descriptor) -> tuple[int, int]:
    """Major and minor number of a device."""
    return os.major(each.kind_device), os.minor(each.kind_device)


def has_pty_master(tree: Tree) -> bool:
    """Return True if the other side of the terminal is in the tree too."""
    return any(stat.S_ISCHR(each.mode) and number_of(each) == (5, 2) for each in tree.descriptors)


def outlets_of(tree: Tree) -> Iterator[Outlet]:
    """Return what the tree has one end of, while the other is outside."""
    groups: dict[str, list[Descriptor]] = {}
    for each in tree.descriptors:
        if (key := _outlet_key(tree, each)) is not None:
            groups.setdefault(key, []).append(each)
    for key, ends in groups.items():
        modes = {each.flags & os.O_ACCMODE for each in ends}
        is_read, is_written = modes != {os.O_WRONLY}, modes != {os.O_RDONLY}
        if key.startswith("pipe:") and is_read and is_written:
            continue  # both of its ends are in the tree
        yield Outlet(key, tuple((each.pid, each.fd) for each in ends), is_read, is_written)


def _outlet_key(tree: Tree, each: Descriptor) -> str | None:
    """Return CRIU's key for it, for both options; None if it has no other end, or one in the tree."""
    if each.target.startswith("pipe:["):
        return each.target
    if stat.S_ISCHR(each.mode) and number_of(each)[0] in PTY_MAJORS and not has_pty_master(tree):
        return f"tty[{each.kind_device:x}:{each.device:x}]"
    if each.target.startswith("socket:[") and each.fd in {0, 1, 2} and _is_output_socket(tree, each.inode):
        return each.target
    return None


def _is_output_socket(tree: Tree, inode: int) -> bool:
    """Return True for a stream to the journal, which units have for their output, or to a process outside that reads
    it as from a pipe: a restored job has one that copies its output.
    """
    end = tree.unix.get(inode)
    peer = tree.unix.get(end.peer) if end is not None and end.peer else None
    if end is None or peer is None:
        return False
    is_read = peer.name is None and end.kind in STREAMS and end.peer not in _inodes(tree)
    return is_read or peer.name == "/run/systemd/journal/stdout"


def unix_datagrams(tree: Tree) -> Iterable[int]:
    """Return its Unix sockets that are not streams, by inode."""
    inodes = {each.inode for each in tree.descriptors if each.target.startswith("socket:[")}
    return [inode for inode in inodes if inode in tree.unix and tree.unix[inode].kind not in STREAMS]


def is_named_elsewhere(tree: Tree, inode: int) -> bool:
    """Return True if its peer outside has a name, by which CRIU reconnects it."""
    peer = tree.unix[inode].peer
    return peer is not None and peer not in _inodes(tree) and peer in tree.unix and tree.unix[peer].name is not None


def _inodes(tree: Tree) -> frozenset[int]:
    return frozenset(each.inode for each in tree.descriptors if each.target.startswith("socket:["))


def reasons_of_unix(tree: Tree, agent_sockets: Collection[str], outlets: Collection[str]) -> Iterator[Reason]:
    """Yield a reason for each socket with a peer outside that can be neither redirected nor reconnected."""
    inside = _inodes(tree)
    for each in tree.descriptors:
        end = tree.unix.get(each.inode) if each.target.startswith("socket:[") else None
        # A connection that was not yet accepted has no peer.
        is_alone = end is None or (end.peer is None and not (end.is_connected and end.kind in STREAMS))
        if end is None or is_alone or end.peer in inside or each.target in outlets:
            continue
        peer = tree.unix.get(end.peer or 0)
        name = peer.name if peer is not None else None
        if name in agent_sockets or (end.kind not in STREAMS and name is not None):
            continue
        yield refusal(
            f"process {each.pid} has a Unix socket connected to a process outside the job (descriptor {each.fd}"
            f"{'' if name is None else ', to ' + name})",
            "have the script close it first: its peer will not exist when the job is restored",
            each.pid,
        )


def connections(tree: Tree) -> tuple[list[Descriptor], list[Descriptor]]:
    """Return TCP connections within the tree, and those to the outside."""
    sockets = [each for each in tree.descriptors if each.target.startswith("socket:")]
    mine = {each.inode: each for each in sockets if each.inode in tree.tcp}
    ends = {(_address(tree.tcp[inode].local), _address(tree.tcp[inode].remote)) for inode in mine}
    within: list[Descriptor] = []
    beyond: list[Descriptor] = []
    for inode, each in mine.items():
        other = (_address(tree.tcp[inode].remote), _address(tree.tcp[inode].local))
        (within if other in ends else beyond).append(each)
    return within, beyond


def _address(text: str) -> str:
    return text.removeprefix(_V4_IN_V6)


def reason_of_connection(each: Descriptor, end: TcpEnd) -> Reason:
    """Return the reason for a connection to the outside."""
    return refusal(
        f"process {each.pid} has a TCP connection to {_readable(end.remote)} (descriptor {each.fd})",
        "have the script close it first, or request closed connections: the restored job then finds them closed",
        each.pid,
    )


def _readable(address: str) -> str:
    host, _, port = _address(address).partition(":")
    octets = bytes.fromhex(host)
    if len(octets) == 4:
        return f"{'.'.join(str(octet) for octet in reversed(octets))}:{int(port, 16)}"
    words = [octets[at : at + 4][::-1].hex() for at in range(0, len(octets), 4)]
    joined = "".join(words)
    return f"[{':'.join(joined[at : at + 4] for at in range(0, len(joined), 4))}]:{int(port, 16)}"
