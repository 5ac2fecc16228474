"""The rights of CRIU: those of the caller, and what CRIU cannot do without.

For a user, CRIU has that user, the group and groups of the job, and two capabilities: to choose pids and inspect
mappings (CAP_CHECKPOINT_RESTORE), and to drop what the job did not have (CAP_SETPCAP). For root, it has the rights of
the job's user, if one user has the whole job and that suffices, and otherwise root's. CRIU opens a job's files by path,
recreates deleted ones, binds sockets and removes old ones, and the owner of a folder on such a path can have put a link
there. With the user's rights it reaches nothing that the user could not: the kernel checks each access when it happens,
which no check before or after can do. Only CRIU's code runs with these rights; the capabilities are dropped before the
job's own code runs, and no one may trace a process that has them.

Rejected: to keep root's CRIU stopped (--action-script post-restore) until every open file is found to be the named one.
Before that, root has opened devices, created and unlinked files and changed owners by paths of the user.

State that only root may restore cannot be restored this way: see `needs`.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hegmd.errors import DENIED, REFUSED, HegmError
from hegmd.images.criu.credentials import Credentials
from hegmd.images.criu.needs import Needs
from hegmd.node.processes.process_tree import Descriptor, Tree
from hegmd.protocol.operations import Reason

CAP_SETPCAP, CAP_SYS_PTRACE, CAP_SYS_RESOURCE, CAP_CHECKPOINT_RESTORE = 8, 19, 24, 40
_NAMES = {
    CAP_SETPCAP: "CAP_SETPCAP",
    CAP_SYS_PTRACE: "CAP_SYS_PTRACE",
    CAP_SYS_RESOURCE: "CAP_SYS_RESOURCE",
    CAP_CHECKPOINT_RESTORE: "CAP_CHECKPOINT_RESTORE",
}
_IN_GUISE = (CAP_SETPCAP, CAP_CHECKPOINT_RESTORE)


class CriuPrivileges(NamedTuple):
    """User, group, further groups and capabilities, by number."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    capabilities: tuple[int, ...] = _IN_GUISE

    @property
    def word(self) -> str:
        """Return the argument for the parent program."""
        groups, capabilities = (",".join(map(str, each)) for each in (self.groups, self.capabilities))
        return f"{self.uid}:{self.gid}:{groups}:{capabilities}"


def privileges_for_root(tree: Tree, needs: Needs) -> CriuPrivileges | None:
    """Return the job's own user for a request of root, if that suffices for the whole job; None if CRIU needs root."""
    root = tree.member(tree.root)
    is_whole = all((each.uid, each.gid, each.groups) == (root.uid, root.gid, root.groups) for each in tree.members)
    is_plain = root.uid != 0 and is_whole and not any(each.is_guarded for each in tree.members)
    if not is_plain or needs.only_by_root or any(closed_to(tree, root.uid, frozenset({root.gid, *root.groups}))):
        return None
    return to_dump(tree, root.groups)


def to_dump(tree: Tree, groups: tuple[int, ...], *, proc_root: str = "/proc") -> CriuPrivileges:
    """Return the rights for a tree of one user with one group, when that user, in these groups, gets its image.

    Yama (kernel.yama.ptrace_scope) lets users trace their descendants only, if at all, which a job is not.
    """
    root = tree.member(tree.root)
    scope = Path(proc_root, "sys/kernel/yama/ptrace_scope")
    is_narrow = scope.exists() and scope.read_text().strip() != "0"
    return CriuPrivileges(root.uid, root.gid, groups, (*_IN_GUISE, CAP_SYS_PTRACE) if is_narrow else _IN_GUISE)


def to_restore(found: Sequence[Credentials], uid: int) -> CriuPrivileges:
    """Return the rights for threads that have no more than that user. Raises HegmError if they differ.

    CRIU gets those groups of the job that the user has: without root's rights it cannot change them.
    """
    kinds = {(each.gids, each.groups) for each in found}
    gids, groups = next(iter(kinds))
    if len(kinds) != 1 or len(gids) != 1:
        raise HegmError(
            DENIED,
            f"threads of the job had {len(kinds)} different sets of groups; with a user's rights CRIU can restore one",
            "have root restore it",
        )
    return CriuPrivileges(uid, next(iter(gids)), groups)


def closed_to(tree: Tree, uid: int, gids: frozenset[int]) -> Iterator[Reason]:
    """Yield a reason for each file that another user opened for the job, and this user could not open that way."""
    paths: set[str] = set()
    for each in tree.descriptors:
        if stat.S_ISREG(each.mode) and each.target.startswith("/") and each.target not in paths:
            permission = {os.O_RDONLY: 4, os.O_WRONLY: 2, os.O_RDWR: 6}.get(each.flags & os.O_ACCMODE, 6)
            owner, group = each.owner
            shift = 6 if owner == uid else 3 if group in gids else 0
            if permission & ~(each.mode >> shift) and not _has_list(each):
                paths.add(each.target)
                yield Reason(
                    code=DENIED.name,
                    message=f"process {each.pid} has {each.path} open, which uid {uid} has no permission to open",
                    hint="start the job from a shell of its own user, or have root write the image",
                    pid=each.pid,
                )


def _has_list(each: Descriptor) -> bool:
    """Return True if an access list decides who may open it, or if that is unknown."""
    try:
        return "system.posix_acl_access" in os.listxattr(f"/proc/{each.pid}/fd/{each.fd}")
    except OSError:
        return True


def rights_missing(uids: frozenset[int], *, as_user: bool, in_unit: bool, proc_root: str = "/proc") -> Reason | None:
    """Return which capabilities CRIU lacks to work on processes of these users; None if it has all.

    A unit of its own can have what the service manager may give; otherwise it has what the daemon has. CAP_SYS_RESOURCE
    is needed only for the limits of processes of other users.
    """
    permission = _IN_GUISE if as_user else (CAP_SYS_RESOURCE,) if uids - {0} else ()
    status = Path(proc_root, "1" if in_unit else "self", "status").read_text()
    held = next(line for line in status.splitlines() if line.startswith("CapBnd:" if in_unit else "CapPrm:"))
    lacking = [_NAMES[each] for each in permission if not int(held.split()[1], 16) >> each & 1]
    if not lacking:
        return None
    whom = "" if as_user else f" for processes of uid {min(uids - {0})}"
    hint = "add it to the capabilities of hegmd's container, as with --cap-add in Docker"
    return Reason(
        code=REFUSED.name,
        message=f"CRIU needs {' and '.join(lacking)}{whom}, which hegmd does not have",
        hint=hint if as_user else f"have that user run the command, or {hint}",
    )
