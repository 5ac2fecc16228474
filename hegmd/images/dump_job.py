"""Dumps jobs into images: agents disconnect, CRIU dumps the processes, their bytes are written beside that.

Owns this order, and what is undone when a step fails or is cancelled: the image is discarded, the processes run, and
their agents are called back before the failure is reported. A job that is to end stays stopped from the dump to its
end, since a thread that is not parked would write to files whose sizes are in the image; its bytes are written while
CRIU dumps. A job that trains on is only stopped for the dump: its bytes stay in the pool, and are written from there,
and verified, while it trains. The machine decides what follows from the outcome, `dump_files` writes, and `dump_agents`
disconnects the agents.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, NoReturn

import anyio

from hegmd.errors import Bug, HegmError, Refused
from hegmd.images.criu.needs import needs_of
from hegmd.images.criu.privileges import CriuPrivileges, rights_missing
from hegmd.images.dump_agents import HANGS_UP_WITHIN_S, DumpAgents
from hegmd.images.dump_files import Dumping, rights_of
from hegmd.images.dump_records import DumpRecords
from hegmd.images.dump_tree import (
    ancestors_of,
    anonymous_bytes_of,
    end_tree,
    guise_for,
    not_theirs,
    outside_relatives,
    resume_all,
    tree_of,
)
from hegmd.images.files.catalogue import size_of
from hegmd.images.files.images import Images
from hegmd.images.files.open_image import ImageWriter
from hegmd.images.hegm_lock_files import LockFiles
from hegmd.images.manifests import is_of, mark_in, mark_of
from hegmd.images.rendezvous import Rendezvous
from hegmd.memory.pool import Pool
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation
from hegmd.migration.plan.throughput import LEFT, OUT
from hegmd.node.criu_program import Criu
from hegmd.node.inventory import NodeSnapshot
from hegmd.node.processes.process_set import ProcessSet, population_of
from hegmd.node.processes.process_tree import Tree
from hegmd.protocol.images import Manifest
from hegmd.protocol.operations import Reason
from hegmd.system.programs import Rights
from hegmd.system.task_group import Progress, parts_of, run_concurrently
from hegmd.system.threads import BoundedReads, run_detached
from hegmd.workers.workers import Workers

logger = logging.getLogger(__name__)

# Time limit, so that an image on a disk that hangs does not block the end of an operation.
_LOOKS_WITHIN_S = 10.0
_MAX_REMEMBERED = 64
_LET_GO_AGAIN_S = 0.5


class RunningJobImage(NamedTuple):
    """An image whose job trains on: its processes are in it, and the bytes of these workers are still to be written.

    The workers are recorded as they were at the dump.
    """

    lent: ImageWriter
    manifest: Manifest
    out: tuple[Member, ...]
    took_s: float


class InspectedTree(NamedTuple):
    """A process tree: its root, the memory for an image, and reasons against a dump or a restore."""

    root_pid: int
    root_ticks: int
    criu_bytes: int
    reasons: tuple[Reason, ...]
    notes: tuple[str, ...]


class JobDumper:
    """Writes images of jobs. `images` knows the free space, `criu` finds the program, `take_snapshot` reads the
    node.

    `in_unit` runs CRIU as a unit of systemd, and `noted` is called with the size and duration of each image.
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
        locks: LockFiles,
        notes: DumpRecords,
        hangs_up_within_s: float = HANGS_UP_WITHIN_S,
        noted: Callable[[str, int, float], object] = lambda _direction, _size_bytes, _took_s: None,
    ) -> None:
        self._left: dict[str, RunningJobImage] = {}
        #: The latest operations whose processes this daemon has resumed.
        self._gone_on: dict[str, None] = {}
        self._noted = noted
        self._locks = locks
        self._images = images
        self._criu = criu
        self._in_unit = in_unit
        self._is_stopping = False
        self._looks = BoundedReads()
        self._agents = DumpAgents(places, workers, pool, hangs_up_within_s=hangs_up_within_s)
        self._dumping = Dumping(
            self._agents, pool, take_snapshot=take_snapshot, looks=self._looks, in_unit=in_unit, notes=notes
        )

    def stop(self) -> None:
        """Note that the daemon stops: dumps cancelled from now on are still wanted, and the next daemon finds them."""
        self._is_stopping = True

    # -- before anything is begun --------------------------------------------------------------------------------------

    async def against(self, pids: Sequence[int], path: str, size_bytes: int, rights: Rights) -> InspectedTree:
        """Return the tree to be dumped with these processes, and every reason against it.

        `size_bytes` is their GPU memory, for which the path needs free space. The processes run meanwhile, so the
        result may change: everything is checked again at the dump.
        """
        reasons: list[Reason] = []
        try:
            await self._criu()
        except HegmError as error:
            reasons.append(Reason(code=error.code.name, message=error.message, hint=error.hint))
        root, tree = await self._looks.at(lambda tell: tree_of(pids, tell), name="hegmd-tree")
        needs = needs_of(tree, gpu_pids=pids, agent_sockets=self._agents.sockets)
        guise = await self._looks.at(lambda _: guise_for(tree, needs, rights), name="hegmd-guise")
        reasons += [*needs.reasons, *self._lacking(tree, guise)]
        reasons += await self._looks.at(lambda _: not_theirs(tree, needs, rights), name="hegmd-theirs")
        criu_bytes = 0
        try:
            criu_bytes = await run_detached(lambda _: sum(map(anonymous_bytes_of, tree.pids)), name="hegmd-memory")
            await self._images().require_space(
                path, rights, criu_bytes=criu_bytes, bytes_of_gpus=size_bytes, apart=guise is not None
            )
        except HegmError as error:
            reasons.append(Reason(code=error.code.name, message=error.message, hint=error.hint))
        notes = await self._looks.at(lambda _: tuple(outside_relatives(tree)), name="hegmd-tree")
        return InspectedTree(root, tree.member(root).start_ticks, criu_bytes, tuple(reasons), notes)

    def _lacking(self, tree: Tree, guise: CriuPrivileges | None) -> Iterator[Reason]:
        uids = frozenset(member.uid for member in tree.members)
        missing = rights_missing(uids, as_user=guise is not None, in_unit=self._in_unit)
        if missing is not None:
            yield missing

    # -- the image -----------------------------------------------------------------------------------------------------

    async def dump(self, op: Operation, on_progress: Progress) -> None:
        """Write the image. Raises HegmError; after an error there is no image and the job is unchanged."""
        wish = _wish_of(op)
        self._gone_on.pop(op.id, None)
        lent: ImageWriter | None = None
        began = anyio.current_time()
        try:
            criu = await self._criu()
            tree, needs = await self._dumping.look_at_tree(op, wish)
            guise = await self._looks.at(lambda _: guise_for(tree, needs, rights_of(wish)), name="hegmd-guise")
            how = {"apart": guise is not None, "beside": wish.leave_running}
            lent = await self._images().lend(wish.path, rights_of(wish), **how)
            await self._agents.disconnect(op, wish)
            manifest = await self._dumping.write(op, wish, lent, criu, guise, on_progress)
            if not wish.leave_running:
                manifest = await lent.finish(manifest)
        except BaseException:
            with anyio.CancelScope(shield=True):
                if lent is not None:
                    await lent.discard()
                await self._go_on(op, wish)
            raise
        took_s = anyio.current_time() - began
        if not wish.leave_running:
            self._noted(OUT, size_of(manifest), took_s)
            return
        self._left[op.id] = RunningJobImage(
            lent, manifest, tuple([member for member in op.live if member.offloaded]), took_s
        )
        await self._go_on(op, wish)  # nothing that can fail or be cut off comes between the dump and this

    async def seal(self, op: Operation, on_progress: Progress) -> None:
        """Write the bytes of a job that trains on to its image, verify it and name it.

        Raises HegmError; then there is no image. Cancelling has the same effect. An incomplete image of an earlier
        daemon is removed.
        """
        wish = _wish_of(op)
        left = self._left.pop(op.id, None)
        if left is None:
            try:
                await self._require_whole(op, wish)
            except BaseException as error:
                if self._is_stopping and not isinstance(error, HegmError):
                    raise
                await self._leave_none(wish, error)
            return
        what = f"the image in {wish.path} was not written and is removed"
        try:
            progress_of = parts_of(on_progress)
            out = [partial(self._dumping.write_bytes, op, each, left.lent, progress_of(each.name)) for each in left.out]
            await run_concurrently(*out, left.lent.collect_criu_files)
            what = f"the image for {wish.path} was not finished; its files are removed"
            manifest = await left.lent.finish(left.manifest, on_progress)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await left.lent.discard()
            if not isinstance(error, HegmError):
                raise
            raise HegmError(
                error.code, f"{what}: {error.message}", f"{error.hint}; the job continues", error.facts
            ) from error
        self._noted(LEFT, sum(file.size_bytes for file in manifest.criu_files), left.took_s)

    async def scrap(self, op: Operation) -> None:
        """Leave nothing of an image that was written, or that was being read back. Raises nothing."""
        wish = _wish_of(op)
        left = self._left.pop(op.id, None)
        if left is not None:
            await left.lent.discard()
            return
        with contextlib.suppress(HegmError):
            await self._images().sweep(wish.path, rights_of(wish))

    async def _go_on(self, op: Operation, wish: Wish) -> None:
        """Resume the processes that were stopped, and call the agents back, if they exist. Raises nothing."""
        self._gone_on[op.id] = None
        for oldest in tuple(self._gone_on)[:-_MAX_REMEMBERED]:
            del self._gone_on[oldest]
        with anyio.CancelScope(shield=True):
            while True:
                try:
                    return await self._resume_processes(op, wish)
                except HegmError as error:  # no descriptor or thread is available; the job stays stopped until one is
                    logger.error("operation %s cannot end its job yet: %s; %s", op.id, error.message, error.hint)
                    await anyio.sleep(_LET_GO_AGAIN_S)

    async def _resume_processes(self, op: Operation, wish: Wish) -> None:
        dumped = await self._dumping.dumped(op) or ProcessSet({})
        await run_detached(lambda _: resume_all(wish, dumped), name="hegmd-let-go")
        await self._dumping.forget_stopped(op)
        await self._agents.call_back(op, wish)

    async def abandon(self, op: Operation) -> None:
        """Resume processes that are stopped for an unwanted image, unless this daemon has done so. Raises nothing.

        A dump that is cancelled undoes itself. But its daemon may have been killed meanwhile, or the dump may have
        ended while the cancellation was recorded.
        """
        if op.id in self._gone_on:
            return
        wish = _wish_of(op)
        await self._go_on(op, wish)
        with contextlib.suppress(HegmError), anyio.move_on_after(_LOOKS_WITHIN_S):
            await self._images().sweep(wish.path, rights_of(wish))

    # -- afterwards ----------------------------------------------------------------------------------------------------

    async def find(self, op: Operation) -> None:
        """Find out after a start whether the image is complete. If not, remove it and resume the job.

        If it is cancelled because the daemon exits, it changes nothing: the image may be complete, and then the job
        must end without having run beyond it.
        """
        wish = _wish_of(op)
        try:
            self._dumping.known_from(op, await self._require_whole(op, wish))
        except BaseException as error:
            if self._is_stopping and not isinstance(error, HegmError):
                raise
            await self._go_on(op, wish)
            await self._leave_none(wish, error)
        if wish.leave_running:
            await self._go_on(op, wish)

    async def _require_whole(self, op: Operation, wish: Wish) -> Manifest:
        """Return the image's manifest. Raises HegmError unless the image has its name and belongs to that operation."""
        image = await self._images().open(wish.path, rights_of(wish))
        try:
            if not is_of(image.manifest, op):
                raise Refused(
                    f"{wish.path} is the image of another operation",
                    "name another directory; that image was not changed",
                )
            return image.manifest
        finally:
            await image.end()

    async def _leave_none(self, wish: Wish, error: BaseException) -> NoReturn:
        """Remove an incomplete image, and raise the error or the cancellation."""
        with anyio.CancelScope(shield=True), contextlib.suppress(HegmError):
            await self._images().sweep(wish.path, rights_of(wish))
        if not isinstance(error, HegmError):
            raise error
        raise Refused(
            f"hegmd was stopped before the image in {wish.path} was complete: {error.message}",
            "repeat the command; the job continues",
        ) from error

    async def end(self, op: Operation, member: Member) -> None:
        """End the whole tree, its root last, so that the rest can still be found from there."""
        wish = _wish_of(op)
        try:
            await run_detached(lambda _: self._tell_controllers(op, wish), name="hegmd-lock")
        except HegmError as error:  # the image is whole, and so the job ends all the same
            logger.error("the lock file of operation %s was not written: %s; %s", op.id, error.message, error.hint)
        await self._agents.leave_places(op, wish)  # they are stopped, and no longer use the rendezvous
        dumped = await self._dumped(op, wish)
        await run_detached(lambda _: end_tree(wish, member, dumped), name="hegmd-end")
        await self._dumping.forget_stopped(op)

    async def _dumped(self, op: Operation, wish: Wish) -> ProcessSet:
        """Return the dumped processes. For a dump of another daemon the image names them, if it can be read."""
        if await self._dumping.dumped(op) is None:
            with contextlib.suppress(HegmError), anyio.move_on_after(_LOOKS_WITHIN_S):
                self._dumping.known_from(op, await self._require_whole(op, wish))
        return await self._dumping.dumped(op) or ProcessSet({})

    def _tell_controllers(self, op: Operation, wish: Wish) -> None:
        """Write the lock files while its parent exists: the first rank that ends takes the tree with it. Blocks."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if population_of([wish.root_pid]).start_ticks.get(wish.root_pid) == wish.root_ticks:
                self._locks.make(ancestors_of(wish.root_pid)[1], wish.path, mark_of(op))

    async def forget(self, manifest: Manifest) -> None:
        """Remove the lock file of a job that was restored. Raises nothing."""
        try:
            await run_detached(lambda _: self._locks.remove(mark_in(manifest)), name="hegmd-lock")
        except HegmError as error:
            logger.error("the lock file of a restored job was not removed: %s; %s", error.message, error.hint)


def _wish_of(op: Operation) -> Wish:
    if op.image is None:
        raise Bug(f"operation {op.id} is to be dumped without a directory")
    return op.image
