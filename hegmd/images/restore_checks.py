"""Finds what prevents restoring a job from an image here and now: its owner, its pids, its files, the node.

The planner checks GPUs. Changes nothing. The findings can be outdated a moment later.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from errno import ELOOP
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hegmd.errors import BUSY, DENIED, REFUSED, UNAVAILABLE, HegmError
from hegmd.images.criu.needs import Needs
from hegmd.images.criu.node import Differences, differences
from hegmd.images.criu.privileges import rights_missing
from hegmd.images.files.images import is_of_user
from hegmd.images.manifests import meeting_in, needs_in, pool_bytes_in
from hegmd.memory.pool import Pool
from hegmd.memory.sizes import whole_size
from hegmd.migration.machine.operation import SIMULATED
from hegmd.node.criu_program import Criu
from hegmd.node.processes.process_set import DescriptorHolder, holders_of
from hegmd.node.processes.process_tree import Tell
from hegmd.protocol.images import Manifest
from hegmd.protocol.operations import Reason
from hegmd.system.programs import Rights
from hegmd.system.threads import BoundedReads, run_detached


class GrownFile(NamedTuple):
    """An output file of the job that has grown, its former size, and the reason against it."""

    path: str
    size_bytes: int
    reason: Reason


class RestoreProblems(NamedTuple):
    """The reasons against a restore, the files that have grown, and notes."""

    reasons: tuple[Reason, ...]
    grown: tuple[GrownFile, ...]
    notes: tuple[str, ...]


class RestoreCheck:
    """Checks images to restore. `criu` finds the program, `meeting` is where agents look for this daemon, `in_unit`
    gives each job a unit of systemd, and `by_owner` lets other users than root restore their own.
    """

    def __init__(
        self,
        meeting: Path,
        pool: Pool,
        *,
        criu: Callable[[], Awaitable[Criu]],
        in_unit: bool,
        simulated: bool,
        by_owner: bool,
    ) -> None:
        self._meeting = meeting
        self._pool = pool
        self._criu = criu
        self._in_unit = in_unit
        # The sandbox of a service has no /home and its own /tmp; the job will have the node's.
        self._root = Path("/proc/1/root") if in_unit else Path("/")
        self._simulated = simulated
        self._by_owner = by_owner
        self._looks = BoundedReads()

    async def run(self, manifest: Manifest, rights: Rights, *, as_then: bool) -> RestoreProblems:
        """Return every reason against a restore here and now, except those about GPUs. Raises HegmError.

        With `as_then`, append-only files must have their former length, too.
        """
        needs = needs_in(manifest)
        found = [*self._against_owner(manifest, rights), *self._against_node(manifest, rights)]
        try:
            await self._criu()
        except HegmError as error:
            found.append(Reason(code=error.code.name, message=error.message, hint=error.hint))
        found += await run_detached(lambda _: list(_taken(needs)), name="hegmd-restore")
        needed_bytes = sum(whole_size(pool_bytes_in(manifest, one)) for one in manifest.workers if one.bytes)
        if needed_bytes > self._pool.free_bytes():
            message = f"{needed_bytes >> 20} MiB of the pool are needed; {self._pool.free_bytes() >> 20} MiB are free"
            found.append(
                Reason(code=BUSY.name, message=message, hint="resume a suspended job, or raise pool.budget_bytes")
            )
        grown: list[GrownFile] = []
        notes: list[str] = []
        changed = partial(_changed_files, needs, self._root, as_then=as_then)
        found_of_files = await self._looks.at(lambda tell: list(changed(tell)), name="hegmd-files")
        for reason, longer, minds in found_of_files:
            if longer is not None:
                grown.append(longer)
            if minds or as_then:
                found.append(reason)
            else:
                notes.append(f"{reason.message}: what was written to it since then stays in it")
        differing = await self._looks.at(lambda tell: _differing(manifest, self._root, tell), name="hegmd-node")
        return RestoreProblems((*found, *differing.refusals), tuple(grown), (*notes, *differing.notes))

    def _against_owner(self, manifest: Manifest, rights: Rights) -> Iterator[Reason]:
        if rights.uid != 0 and not self._by_owner:
            yield Reason(
                code=DENIED.name,
                message="on this node only root restores images (images.restored_by)",
                hint="have root restore it",
            )
        as_user = rights.uid != 0 or is_of_user(manifest)
        missing = rights_missing(frozenset({rights.uid}), as_user=as_user, in_unit=self._in_unit)
        if missing is not None:
            yield missing
        for process in manifest.processes if rights.uid != 0 else ():
            if process.uid != rights.uid:
                yield Reason(
                    code=DENIED.name,
                    message=f"process {process.pid} of the image runs as uid {process.uid}; you are uid {rights.uid}",
                    hint="have root restore it",
                    pid=process.pid,
                )

    def _against_node(self, manifest: Manifest, rights: Rights) -> Iterator[Reason]:
        methods = {(worker.more or {}).get("method") for worker in manifest.workers}
        if self._simulated != (methods == {SIMULATED}):
            here = "simulated" if self._simulated else "real"
            hint = "restore it under a daemon of the same kind"
            yield Reason(
                code=REFUSED.name, message=f"it was written on other GPUs; those of this daemon are {here}", hint=hint
            )
        elsewhere = Path(meeting_in(manifest)) != self._meeting
        if elsewhere and rights.uid != 0:
            yield Reason(
                code=DENIED.name,
                message=f"its agents reconnect in {meeting_in(manifest)}, which belongs to another daemon",
                hint="have root restore it, or restore it under a daemon with the same socket path",
            )


# ---- checks of the node; these block ---------------------------------------------------------------------------------


def _taken(needs: Needs) -> Iterator[Reason]:
    for holder in holders_of(needs.pids):
        if not holder.is_zombie:
            yield Reason(
                code=REFUSED.name,
                message=_holder_text(holder),
                hint="end that process, or restore in a new pid namespace: unshare --pid --fork --mount-proc",
                pid=holder.number,
            )


def _holder_text(holder: DescriptorHolder) -> str:
    if holder.pid == holder.number:
        return f"the job needs the number of process {holder.pid}, which runs: it is the job itself or another process"
    return f"the job needs the number {holder.number}, which is the {holder.what} of process {holder.pid}"


def _differing(manifest: Manifest, root: Path, tell: Tell) -> Differences:
    """Return how this node differs from the image's. Raises HegmError."""
    try:
        return differences(manifest.node or {}, root=root, tell=tell)
    except (KeyError, TypeError) as error:
        message = f"the manifest does not describe its node: {type(error).__name__} {error}"
        hint = "restore it with the version of hegmd that wrote it"
        raise HegmError(UNAVAILABLE, message, hint) from error


def _changed_files(
    needs: Needs, root: Path, tell: Tell, *, as_then: bool
) -> Iterator[tuple[Reason, GrownFile | None, bool]]:
    """Yield files that have changed: the reason, the file if it has only grown, and whether CRIU would refuse it."""
    for file in needs.files:
        tell(file.path)
        try:
            size_bytes = _size_bytes(root, file.path)
        except OSError as error:
            message = f"{file.path}, which the job has open, does not exist: {error.strerror}"
            hint = "put it where it was when the image was written"
            yield Reason(code=REFUSED.name, message=message, hint=hint), None, True
            continue
        if size_bytes == file.size_bytes:
            continue
        has_grown = size_bytes > file.size_bytes and file.is_written
        reason = Reason(
            code=REFUSED.name,
            message=f"{file.path} has {size_bytes} bytes; it had {file.size_bytes} when the image was written",
            hint=_to_cut_back(as_then=as_then) if has_grown else "restore that version of the file",
        )
        minds = not (file.is_appended and has_grown)
        yield reason, GrownFile(file.path, file.size_bytes, reason) if has_grown else None, minds


def _to_cut_back(*, as_then: bool) -> str:
    """Return the hint about a file that has grown; `as_then`: the caller requested truncation already."""
    if as_then:
        return "solve the other problems first; if there are none, end the process that writes to it: fuser -v FILE"
    return "restore with --truncate-outputs to cut it back"


def _size_bytes(root: Path, path: str) -> int:
    """Return the size of the file of that name, which was no link when the image was written. Raises OSError.

    Another file that a link leads to may not be readable for the job's owner, so its size is not revealed.
    """
    fd = os.open(root / path.lstrip("/"), os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        found = os.readlink(f"/proc/self/fd/{fd}").removeprefix(str(root).rstrip("/"))
        if found != path or stat.S_ISLNK(status.st_mode):
            raise OSError(ELOOP, "a link now leads to another file")
        return status.st_size
    finally:
        os.close(fd)
