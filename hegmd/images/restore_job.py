"""Restores jobs from images: its bytes into the pool, its processes by CRIU, its agents by their tokens.

Owns this order and what is undone when a step fails: the processes are killed and their memory is released, while the
image does not change. The bytes are read while CRIU restores. Once every agent is connected, parked and with known
bytes, the job becomes an ordinary suspended operation, and whatever happens later, `resume` restores it to its GPU.
`restore_checks` has the reasons against a restore.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio

from hegmd.errors import DENIED, NOT_FOUND, TIMEOUT, UNAVAILABLE, HegmError
from hegmd.gpu_helper.mark import MARK_BYTES
from hegmd.images.criu import run
from hegmd.images.criu.command_line import unit_name_for
from hegmd.images.criu.credentials import beyond, credentials_in
from hegmd.images.criu.privileges import CriuPrivileges, to_restore
from hegmd.images.criu.run import RestoredTree
from hegmd.images.files.images import Images, is_of_user
from hegmd.images.files.open_image import Image
from hegmd.images.manifests import candidates_in, meeting_in, needs_in, pool_bytes_in, revived, tokens_in
from hegmd.images.rendezvous import Rendezvous
from hegmd.images.restore_checks import RestoreCheck, RestoreProblems
from hegmd.images.restore_records import RestoreRecords
from hegmd.memory.pool import Key, Pool
from hegmd.memory.pool_memory import Memory
from hegmd.migration.machine.operation import Operation
from hegmd.migration.model import NodeSnapshotForPlan
from hegmd.node.criu_program import Criu
from hegmd.node.inventory import NodeSnapshot
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.protocol.images import ImageWorker, Manifest
from hegmd.protocol.operations import HOST
from hegmd.system.programs import Rights
from hegmd.system.task_group import Progress, parts_of, run_concurrently
from hegmd.system.threads import run_detached
from hegmd.workers.workers import AgentConnection, Workers

logger = logging.getLogger(__name__)

ATTENDS_WITHIN_S = 60.0
_POLL_INTERVAL_S = 0.5


class JobRestorer:
    """Restores jobs. `images` opens them, `criu` finds CRIU, `take_snapshot` reads the node.

    With `in_unit` each CRIU runs as a unit of systemd.
    """

    def __init__(  # noqa: PLR0913 - each part is named
        self,
        images: Callable[[], Images],
        places: Rendezvous,
        workers: Workers,
        pool: Pool,
        *,
        criu: Callable[[], Awaitable[Criu]],
        take_snapshot: Callable[[], Awaitable[NodeSnapshot]],
        in_unit: bool,
        simulated: bool,
        notes: RestoreRecords,
        by_owner: bool,
    ) -> None:
        self._notes = notes
        self._images = images
        self._places = places
        self._workers = workers
        self._pool = pool
        self._criu = criu
        self._take_snapshot = take_snapshot
        self._in_unit = in_unit
        by_whom = {"simulated": simulated, "by_owner": by_owner}
        self._scrutiny = RestoreCheck(places.folder, pool, criu=criu, in_unit=in_unit, **by_whom)
        self._coming: set[int] = set()
        self._back: dict[str, RestoredTree] = {}

    def is_coming(self, pid: int) -> bool:
        """True while that process is being restored and belongs to no operation yet."""
        return pid in self._coming

    @contextlib.asynccontextmanager
    async def opened(self, path: str, rights: Rights) -> AsyncGenerator[Image]:
        """Open the image at that path, locked against other restores. Raises HegmError."""
        image = await self._images().open(path, rights)
        try:
            yield image
        finally:
            await image.end()

    # -- reasons against a restore -------------------------------------------------------------------------------------

    def expected(self, snapshot: NodeSnapshotForPlan, manifest: Manifest) -> tuple[NodeSnapshotForPlan, Operation]:
        """Return the node and the operation as they will be once the processes exist, for the planner."""
        coming = candidates_in(manifest)
        others = [c for c in snapshot.candidates if c.pid not in {one.pid for one in coming}]
        return snapshot.replace(candidates=(*others, *coming)), revived(manifest, "", {}, snapshot.gpus, 0.0)

    async def against(self, manifest: Manifest, rights: Rights, *, as_then: bool) -> RestoreProblems:
        """Return every reason against a restore here and now, except those about GPUs. Raises HegmError.

        With `as_then`, append-only files must have their former length, too.
        """
        return await self._scrutiny.run(manifest, rights, as_then=as_then)

    # -- back ----------------------------------------------------------------------------------------------------------

    async def restore(
        self, image: Image, op_id: str, rights: Rights, on_progress: Progress, outlets: Mapping[str, int]
    ) -> Operation:
        """Restore its processes, parked, with their bytes in the pool under that operation's name. Returns the
        operation.

        `rights` are the caller's: the processes get no others. `outlets`: descriptors for ends that led out of the job.

        Raises HegmError, and then none of it exists; cancelling has the same effect. The caller must begin the
        operation or call `undo`.
        """
        manifest = image.manifest
        asked_utc = time.time()
        self._coming.update(worker.pid for worker in manifest.workers)
        try:
            unit = self._unit_of(manifest)
            await run_detached(lambda _: self._notes.note(op_id, manifest, unit), name="hegmd-note")
            await run_detached(lambda _: self._hold_places(manifest), name="hegmd-places")
            back = self._back[op_id] = await self._read_and_restore(image, op_id, rights, on_progress, outlets)
            await self._attend(manifest, back)
            gpus = (await self._take_snapshot()).gpus
            return revived(manifest, op_id, back.start_ticks, gpus, asked_utc)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                if isinstance(error, run.ProcessesLeft):
                    await self._notes.end_left(op_id)
                await self.undo(manifest, op_id)
            raise

    async def settled(self, manifest: Manifest, op_id: str) -> None:
        """Release the records of a restore: an operation includes the job, or it was undone. Raises nothing."""
        self._back.pop(op_id, None)
        self._coming.difference_update(worker.pid for worker in manifest.workers)
        with anyio.CancelScope(shield=True):
            await run_detached(lambda _: self._notes.forget(op_id), name="hegmd-note")
            await run_detached(lambda _: self._leave_places(manifest), name="hegmd-places")

    async def undo(self, manifest: Manifest, op_id: str) -> None:
        """End the restored processes of an operation that did not begin, and release their bytes. Raises nothing."""
        if (back := self._back.pop(op_id, None)) is not None:
            await run.end(back)
        for worker in manifest.workers:
            try:
                await self._pool.release(Key(op_id, str(worker.pid)))
            except HegmError as error:
                logger.warning("%s; %s", error.message, error.hint)
        await self.settled(manifest, op_id)

    def _leave_places(self, manifest: Manifest) -> None:
        folder = Path(meeting_in(manifest))
        for token in tokens_in(manifest):
            self._places.leave(token, folder)

    def _hold_places(self, manifest: Manifest) -> None:
        for token in tokens_in(manifest):
            self._places.hold(token, Path(meeting_in(manifest)))

    def _call_to_places(self, manifest: Manifest) -> None:
        for token in tokens_in(manifest):
            self._places.call(token, Path(meeting_in(manifest)))

    async def _read_and_restore(
        self, image: Image, op_id: str, rights: Rights, on_progress: Progress, outlets: Mapping[str, int]
    ) -> RestoredTree:
        """Read bytes and restore processes concurrently. A failure cancels the rest and ends restored processes."""
        came: list[RestoredTree] = []
        progress_of = parts_of(on_progress)

        async def restore() -> None:
            came.append(await self._restore(image, rights, outlets))

        parts = [
            partial(self._read, image, name, Key(op_id, str(worker.pid)), worker, progress_of(name))
            for worker in image.manifest.workers
            for name in worker.bytes
        ]
        try:
            await run_concurrently(*parts, restore)
        except BaseException:
            for one in came:
                await run.end(one)
            raise
        return came[0]

    async def _read(self, image: Image, name: str, key: Key, worker: ImageWorker, on_progress: Progress) -> None:
        memory = await self._pool.take(key, pool_bytes_in(image.manifest, worker))
        await image.read_bytes(name, memory.fd, on_progress)
        if worker.carrier == HOST:
            forget_mark(memory)

    async def _restore(self, image: Image, rights: Rights, outlets: Mapping[str, int]) -> RestoredTree:
        criu = await self._criu()
        manifest = image.manifest
        dir_fd, guise = await self._examined(image, rights)
        logs = self._images().own_folder()  # deleted afterwards: the error has the important lines of the log
        try:
            return await run.restore(
                criu,
                dir_fd,
                needs_in(manifest),
                log_dir_fd=logs.fd,
                unit_name=self._unit_of(manifest),
                description=f"restored from {image.path}",
                guise=guise,
                outlets=outlets,
                ranks=[worker.pid for worker in manifest.workers],
            )
        finally:
            with anyio.CancelScope(shield=True):
                await logs.close()

    async def _examined(self, image: Image, rights: Rights) -> tuple[int, CriuPrivileges | None]:
        """Return CRIU's files, every byte verified, and the rights for CRIU. Raises HegmError."""
        dir_fd = await image.private_criu_dir()
        if rights.uid == 0 and not is_of_user(image.manifest):
            return dir_fd, None
        return dir_fd, await run_detached(lambda _: guise_in(dir_fd, rights), name="hegmd-credentials")

    async def rehearse(self, image: Image, rights: Rights, on_progress: Progress) -> None:
        """Read all of the image as `bring_back` would, and change nothing. Raises HegmError for what that refuses."""
        await self._examined(image, rights)
        await image.verify(on_progress)

    def _unit_of(self, manifest: Manifest) -> str | None:
        """Return the unit for its processes; None without a service manager."""
        if not self._in_unit:
            return None
        root = next((one for one in manifest.processes if one.pid == manifest.root_pid), None)
        command = "" if root is None or root.command is None else os.path.basename(root.command.split(" ", 1)[0])
        return unit_name_for([str(manifest.root_pid), command])

    async def _attend(self, manifest: Manifest, back: RestoredTree) -> None:
        """Call the agents, and wait until all attend, parked. Raises HegmError."""
        await run_detached(lambda _: self._call_to_places(manifest), name="hegmd-places")
        await until_there(self._workers, manifest.workers, back.start_ticks)


async def until_there(
    workers: Workers,
    wanted: Sequence[ImageWorker],
    ticks: Mapping[int, int],
    *,
    within_s: float = ATTENDS_WITHIN_S,
    look_again_s: float = _POLL_INTERVAL_S,
) -> None:
    """Wait until the agents of those processes, which have these start times, attend, parked. Raises HegmError."""

    def missing() -> list[int]:
        return [one.pid for one in wanted if not _is_there(workers.find(one.pid), one.token, ticks.get(one.pid))]

    with anyio.move_on_after(within_s):
        while pids := missing():
            _require_alive(pids, ticks)  # no await between the check for missing agents and the wait for the next one
            # no event reports the exit of a process whose agent never connected
            with anyio.move_on_after(look_again_s):
                await workers.changed.wait()
        return
    if not (late := missing()):  # the last one connected just before the deadline
        return
    raise HegmError(
        TIMEOUT,
        f"the agent of process {late[0]} did not connect within {within_s:g} s after the restore",
        "restore it again, and read the log of hegmd; the image is complete",
        {"pids": late},
    )


def _require_alive(pids: Sequence[int], ticks: Mapping[int, int]) -> None:
    """Raise HegmError if a process has exited; one that cannot be read now is waited for."""
    for pid in pids:
        try:
            found = start_ticks_of(pid)
        except HegmError:
            continue
        if found is None or found != ticks.get(pid, found):
            message = f"process {pid} ended before its agent connected"
            raise HegmError(
                NOT_FOUND, message, "read the output of the job, then restore it again; the image is complete"
            )


def _is_there(worker: AgentConnection | None, token: str | None, start_ticks: int | None) -> bool:
    if worker is None or not worker.connected or worker.token != token:
        return False
    return worker.identity.start_ticks == start_ticks and worker.parked


def forget_mark(memory: Memory) -> None:
    """Clear the mark in a segment that was read from an image: its bytes are here, whatever the file says."""
    try:
        memory.zero(memory.size_bytes - MARK_BYTES, MARK_BYTES)
    except (OSError, ValueError) as error:  # the latter of a file that was cut
        message = f"the end of the last page of the image's bytes cannot be cleared: {error}"
        raise HegmError(UNAVAILABLE, message, "restore it again, and read the log of hegmd") from error


def guise_in(dir_fd: int, rights: Rights) -> CriuPrivileges:
    """Return the rights of CRIU. Raises HegmError unless every thread gets only rights that the caller has.

    For root these are a user's rights: the image was written that way.
    """
    found = credentials_in(dir_fd)
    uid, gids = rights.uid, frozenset({rights.gid, *rights.groups})
    if uid == 0:
        uid = max(found[0].uids)
        gids = frozenset(gid for each in found for gid in (*each.gids, *each.groups))
    reasons = list(beyond(found, uid, gids))
    if reasons or uid == 0:
        what = "\n".join(reason.message for reason in reasons) or "the image is opened as a user's, and belongs to root"
        raise HegmError(DENIED, what, "use another image, or write it again")
    return to_restore(found, uid)
