"""The process tree of an image: which processes it has, what prevents its dump, and its end.

Reads /proc, and decides who may get whose memory. Asks neither agents nor CRIU, and does not decide the order of a
dump. Everything blocks, except the checks of what was read before.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hegmd.errors import DENIED, NOT_FOUND, REFUSED, HegmError, Refused
from hegmd.images.criu.dumped import strangers
from hegmd.images.criu.needs import Needs
from hegmd.images.criu.privileges import CriuPrivileges, closed_to, privileges_for_root, to_dump
from hegmd.memory.pool_names import parse_name
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.methods.restore_lock import is_lock_name
from hegmd.node.processes.process_set import ProcessSet, continue_all, end_all, holders_of, population_of
from hegmd.node.processes.process_tree import Tell, Tree, pids_below, read_tree
from hegmd.node.processes.process_tree import TreeProcess as Process
from hegmd.node.processes.surroundings import variables_of
from hegmd.protocol.operations import Reason
from hegmd.system.programs import Rights

logger = logging.getLogger(__name__)

# torchrun sets it for its ranks.
_LAUNCHED = "TORCHELASTIC_RUN_ID"


def tree_of(pids: Sequence[int], tell: Tell) -> tuple[int, Tree]:
    """Return the root of the smallest tree with all of these processes, and the tree. Raises HegmError.

    The only rank of a launcher is connected to its launcher, as several are.
    """
    try:
        lines = [ancestors_of(pid) for pid in pids]
        if len(pids) == 1 and variables_of(pids[0], (_LAUNCHED,)):
            lines[0] = lines[0][1:]
        common = set(lines[0]).intersection(*lines[1:])
        root = next((pid for pid in lines[0] if pid in common), None)
        if root is None or root == 1:
            raise Refused(
                f"processes {', '.join(map(str, pids))} have no common parent that can be dumped with them",
                "start the ranks of a job by one launcher, such as torchrun",
            )
        return root, read_tree(root, tell=tell)
    except (ProcessLookupError, FileNotFoundError) as error:
        raise HegmError(NOT_FOUND, f"a process of the job has ended: {error}", "read the output of the job") from error


def outside_relatives(tree: Tree) -> Iterator[str]:
    """Yield notes about processes outside the tree whose group or session is in it: they cannot be restored with it.

    A process that it started as a daemon is one, for example.
    """
    for holder in holders_of(tree.pids):
        if holder.pid not in tree.pids:
            yield (
                f"process {holder.pid}, which is not in the job, uses its number {holder.number} as its {holder.what}: "
                "the job can be restored only after that process ends"
            )


def ancestors_of(pid: int) -> list[int]:
    """Return the process, its parent, and so on."""
    line = [pid]
    while line[-1] > 1:
        fields = Path(f"/proc/{line[-1]}/stat").read_bytes().rpartition(b")")[2].split()
        line.append(int(fields[1]))
    return line


def anonymous_bytes_of(pid: int) -> int:
    """Return the memory of a process that is in no file, and so in its image."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return 0


def guise_for(tree: Tree, needs: Needs, rights: Rights) -> CriuPrivileges | None:
    """Return the rights of CRIU; None for root's. Blocks."""
    return privileges_for_root(_without_pieces(tree), needs) if rights.uid == 0 else to_dump(tree, rights.groups)


def _without_pieces(tree: Tree) -> Tree:
    """Return the tree as it will be once the agents have closed pool segments and the lock, the daemon's files."""
    kept = (each for each in tree.descriptors if not _is_the_daemons(os.path.basename(each.path)))
    return replace(tree, descriptors=tuple(kept))


def _is_the_daemons(name: str) -> bool:
    return parse_name(name) is not None or is_lock_name(name)


def not_theirs(tree: Tree, needs: Needs, rights: Rights) -> list[Reason]:
    """Return the reasons against an image that would show others' memory, or that CRIU cannot make so."""
    if rights.uid == 0:
        return []
    gid, gids = tree.member(tree.root).gid, {rights.gid, *rights.groups}
    strange = [
        member
        for member in tree.members
        if member.uid != rights.uid or member.is_guarded or member.gid != gid or gid not in gids
    ]
    return [
        *(_not_theirs_reason(member, rights) for member in strange),
        *needs.only_by_root,
        *closed_to(_without_pieces(tree), rights.uid, frozenset(gids)),
    ]


def _not_theirs_reason(member: Process, rights: Rights) -> Reason:
    hint = "run the command as its owner or as root: an image contains all memory of a process"
    message = f"process {member.pid} runs as uid {member.uid}, and the image would belong to you, uid {rights.uid}"
    if member.uid == rights.uid:
        message = (
            f"process {member.pid} has other rights or another group (gid {member.gid}) than uid {rights.uid} here, or "
            "hides its memory from its own user"
        )
        hint = "end it first (sudo, su, passwd and ssh-agent are such processes), or have root write the image"
    return Reason(code=DENIED.name, message=message, hint=hint, pid=member.pid)


def require_no_more(dumped: Mapping[int, bool], tree: Tree, rights: Rights) -> None:
    """Raise HegmError if the image contains more than was checked: a new process, or one with other rights."""
    if strange := strangers(dumped, tree.pids, may_read_all=rights.uid == 0):
        raise HegmError(
            DENIED if rights.uid != 0 else REFUSED,
            f"process {strange[0]} joined the job or changed its rights while the image was written",
            "try again when the job starts no programs; the job continues",
            {"pids": strange},
        )


def resume_all(wish: Wish, dumped: ProcessSet) -> None:
    """Resume the tree and the processes in `dumped`, also orphaned ones, but none that a signal stopped before."""
    try:
        found = population_of(pids_below(wish.root_pid)).start_ticks
    except OSError as error:
        logger.warning(
            "the children of process %d cannot be read: %s; those that are known continue", wish.root_pid, error
        )
        found = {wish.root_pid: wish.root_ticks}
    if found.get(wish.root_pid) != wish.root_ticks:
        found = {}
    if people := {**dumped.start_ticks, **found}:
        continue_all(ProcessSet(people, dumped.stopped))


def end_tree(wish: Wish, member: Member, dumped: ProcessSet) -> None:
    """End everybody of the tree, and of those whom CRIU has had, the process itself last."""
    pids = [member.pid, *pids_below(wish.root_pid)]
    found = population_of(pids).start_ticks
    if found.get(wish.root_pid) != wish.root_ticks:  # it has ended, and another process may have its number
        found = {pid: ticks for pid, ticks in found.items() if (pid, ticks) == (member.pid, member.start_ticks)}
    orphans = {pid: ticks for pid, ticks in dumped.start_ticks.items() if pid not in found}
    end_all(ProcessSet({**orphans, **{pid: found[pid] for pid in reversed(pids) if pid in found}}))
