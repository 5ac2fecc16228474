"""Jobs that are handed to an image: agents step aside, CRIU dumps the processes, their bytes go beside that.

Owns the order of these, and what is undone when any of it fails or is not wanted any more: the image is discarded, the
processes go on, and their agents are called back before anybody hears of the failure. A job that is to end stands still
from the dump to its end, since a thread of it that is not parked would go on writing to files whose sizes are in the
image; its bytes are written while CRIU dumps. One that goes on stands for the dump alone: its bytes are in the pool and
stay there, and are written from there, and read back, while it trains. What is decided from the outcome is the
machine's business.

Longer than 400 lines because what is begun, undone and found again after a restart is to be read against one another.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import anyio

from hegmd.agent_orders import AgentAway
from hegmd.concert import Progress, in_concert, parts_of
from hegmd.criu import runs
from hegmd.criu.dumped import dumped_processes
from hegmd.criu.guise import Guise, rights_missing
from hegmd.criu.needs import Needs, needs_of
from hegmd.criu.node import describe
from hegmd.criu.population import population_of
from hegmd.criu.program import Criu
from hegmd.criu.tree import Tree, pids_below, read_tree
from hegmd.detached import Looks, run_detached
from hegmd.errors import NOT_FOUND, TIMEOUT, Bug, HegmError, Refused
from hegmd.external import Rights
from hegmd.handed_tree import (
    ancestors_of,
    anonymous_bytes_of,
    end_tree,
    guise_for,
    let_all_go,
    not_theirs,
    require_no_more,
    tree_of,
)
from hegmd.helper.mark import MARK_BYTES, read_mark
from hegmd.image.images import Images, Lent
from hegmd.image.shelf import size_of
from hegmd.inventory import NodeSnapshot
from hegmd.lock_files import LockFiles
from hegmd.manifests import byte_name, composed, is_of, mark_in, mark_of
from hegmd.meeting import MeetingPlaces
from hegmd.migration.carriage import HOST
from hegmd.migration.operation import Handoff as Wish
from hegmd.migration.operation import Operation
from hegmd.migration.operation import Worker as Member
from hegmd.migration.paces import LEFT, OUT
from hegmd.pool import Key, Pool
from hegmd.pool_memory import Memory
from hegmd.protocol.images import ImageWorker, Manifest
from hegmd.protocol.operations import Reason
from hegmd.workers import Worker, Workers

logger = logging.getLogger(__name__)

# An agent hangs up as soon as it has said that it will, and looks about thirty times a second whether to come back.
HANGS_UP_WITHIN_S = 10.0
_LOOK_AGAIN_S = 0.05
COMES_BACK_WITHIN_S = 30.0
# After this an agent comes back by itself, whatever has become of its daemon.
ASIDE_LIMIT_S = 4 * 3600.0


@dataclass(frozen=True, slots=True)
class Left:
    """An image whose job goes on: its processes are in it, and these workers' bytes are still to be written from the
    pool. How a worker stood then is no matter of how it stands now."""

    lent: Lent
    manifest: Manifest
    out: tuple[Member, ...]
    took_s: float


@dataclass(frozen=True, slots=True)
class Looked:
    """A tree of processes as it was seen: its root, how much memory of theirs an image has, what is against one."""

    root_pid: int
    root_ticks: int
    criu_bytes: int
    reasons: tuple[Reason, ...]


class Handoff:
    """Makes images of jobs. `images` tells their room, `criu` finds the program, `look` sees the node.

    `in_unit` runs CRIU as a unit of systemd's, and `noted` is told how large an image was and how long it took.
    """

    def __init__(  # noqa: PLR0913 - what it puts together, each by its name
        self,
        images: Callable[[], Images],
        places: MeetingPlaces,
        workers: Workers,
        pool: Pool,
        *,
        criu: Callable[[], Awaitable[Criu]],
        look: Callable[[], Awaitable[NodeSnapshot]],
        in_unit: bool,
        locks: LockFiles,
        hangs_up_within_s: float = HANGS_UP_WITHIN_S,
        noted: Callable[[str, int, float], object] = lambda _direction, _size_bytes, _took_s: None,
    ) -> None:
        self._left: dict[str, Left] = {}
        self._noted = noted
        self._hangs_up_within_s = hangs_up_within_s
        self._locks = locks
        self._images = images
        self._places = places
        self._workers = workers
        self._pool = pool
        self._criu = criu
        self._look = look
        self._in_unit = in_unit
        self._is_stopping = False
        self._looks = Looks()

    def stop(self) -> None:
        """The daemon ends: what is cancelled from now on is not unwanted, and the next one finds it."""
        self._is_stopping = True

    # -- before anything is begun --------------------------------------------------------------------------------------

    async def against(self, pids: Sequence[int], path: str, size_bytes: int, rights: Rights) -> Looked:
        """The tree that is taken with these processes, and all that is against it.

        `size_bytes` are what they have on GPUs: so much at least is to have room at the path.
        The processes run meanwhile, so what is found can be another thing a moment later: it is looked at again then.
        """
        reasons: list[Reason] = []
        try:
            await self._criu()
        except HegmError as error:
            reasons.append(Reason(code=error.code.name, message=error.message, hint=error.hint))
        root, tree = await self._looks.at(lambda tell: tree_of(pids, tell), name="hegmd-tree")
        needs = needs_of(tree, gpu_pids=pids, agent_sockets=self._agent_sockets)
        guise = await self._looks.at(lambda _: guise_for(tree, needs, rights), name="hegmd-guise")
        reasons += [*needs.reasons, *self._lacking(tree, guise)]
        reasons += await self._looks.at(lambda _: not_theirs(tree, needs, rights), name="hegmd-theirs")
        criu_bytes = 0
        try:
            criu_bytes = await run_detached(lambda _: sum(map(anonymous_bytes_of, tree.pids)), name="hegmd-memory")
            await self._images().require_room(
                path, rights, criu_bytes=criu_bytes, bytes_of_gpus=size_bytes, apart=guise is not None
            )
        except HegmError as error:
            reasons.append(Reason(code=error.code.name, message=error.message, hint=error.hint))
        return Looked(root, tree.member(root).start_ticks, criu_bytes, tuple(reasons))

    def _lacking(self, tree: Tree, guise: Guise | None) -> Iterator[Reason]:
        uids = frozenset(member.uid for member in tree.members)
        missing = rights_missing(uids, as_user=guise is not None, in_unit=self._in_unit)
        if missing is not None:
            yield missing

    @property
    def _agent_sockets(self) -> tuple[str, ...]:
        return (str(self._places.socket_path),)

    # -- the image -----------------------------------------------------------------------------------------------------

    async def dump(self, op: Operation, on_progress: Progress) -> None:
        """Raises HegmError; there is no image then, and the job is as it was. Cancelled, the same."""
        wish = _wish_of(op)
        lent: Lent | None = None
        began = anyio.current_time()
        try:
            criu = await self._criu()
            tree, needs = await self._look_at_tree(op, wish, self._agent_sockets)
            guise = await self._looks.at(lambda _: guise_for(tree, needs, _rights(wish)), name="hegmd-guise")
            how = {"apart": guise is not None, "beside": wish.leave_running}
            lent = await self._images().lend(wish.path, _rights(wish), **how)
            await self._step_aside(op, wish)
            manifest = await self._write(op, wish, lent, criu, guise, on_progress)
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
        self._left[op.id] = Left(lent, manifest, tuple([member for member in op.live if member.out]), took_s)
        await self._go_on(op, wish)  # nothing that can fail or be cut off comes between the dump and this

    async def seal(self, op: Operation, on_progress: Progress) -> None:
        """Write the bytes of a job that has gone on to its image, read all of that back, and give it its name.

        Raises HegmError; there is no image then. Cancelled, the same. One that a daemon before this one had begun, and
        that is not whole by now, is none.
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
        did = "written"
        try:
            progress_of = parts_of(on_progress)
            out = [partial(self._write_bytes, op, each, left.lent, progress_of(each.name)) for each in left.out]
            await in_concert(*out)
            did = "good when it was read back"
            manifest = await left.lent.finish(left.manifest, on_progress)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                await left.lent.discard()
            if not isinstance(error, HegmError):
                raise
            message = f"the image in {wish.path} was not {did}, and is removed: {error.message}"
            raise HegmError(error.code, message, f"the job goes on; {error.hint}", error.facts) from error
        self._noted(LEFT, sum(file.size_bytes for file in manifest.criu_files), left.took_s)

    async def scrap(self, op: Operation) -> None:
        """Leave nothing of an image that was written, or that was being read back. Raises nothing."""
        wish = _wish_of(op)
        left = self._left.pop(op.id, None)
        if left is not None:
            await left.lent.discard()
            return
        with contextlib.suppress(HegmError):
            await self._images().sweep(wish.path, _rights(wish))

    async def _look_at_tree(self, op: Operation, wish: Wish, sockets: Collection[str]) -> tuple[Tree, Needs]:
        try:
            tree = await self._looks.at(lambda tell: read_tree(wish.root_pid, tell=tell), name="hegmd-tree")
        except ProcessLookupError as error:
            raise HegmError(NOT_FOUND, f"process {wish.root_pid} has ended", "see the log of the job") from error
        if tree.member(wish.root_pid).start_ticks != wish.root_ticks:
            raise HegmError(NOT_FOUND, f"process {wish.root_pid} has ended", "see the log of the job")
        return tree, needs_of(tree, gpu_pids=[member.pid for member in op.live], agent_sockets=sockets)

    async def _write(
        self, op: Operation, wish: Wish, lent: Lent, criu: Criu, guise: Guise | None, on_progress: Progress
    ) -> Manifest:
        """The agents have stepped aside: what the tree needs now is what CRIU is told."""
        tree, needs = await self._look_once_hung_up(op, wish)
        theirs = self._looks.at(lambda _: not_theirs(tree, needs, _rights(wish)), name="hegmd-theirs")
        against = [*needs.reasons, *await theirs]
        if against:
            raise Refused("\n".join(reason.message for reason in against), against[0].hint)
        attending = {member.pid: self._told(member) for member in op.live}
        if guise != await self._looks.at(lambda _: guise_for(tree, needs, _rights(wish)), name="hegmd-guise"):
            raise Refused("the job has got other rights meanwhile", "ask again when it starts no programs")
        node = await self._write_side_by_side(op, wish, lent, criu, (tree, needs, guise), on_progress)
        dumped = await run_detached(lambda _: dumped_processes(lent.criu_dir_fd), name="hegmd-dumped")
        require_no_more(dumped, tree, _rights(wish))
        return composed(
            op,
            (await self._look()).gpus,
            tree,
            needs,
            criu_version=criu.version,
            meeting=str(self._places.folder),
            attending=attending,
            bystanders=[worker.token for worker in await self._bystanders(op, wish)],
            as_user=guise is not None,
            node=node,
        )

    async def _look_once_hung_up(self, op: Operation, wish: Wish) -> tuple[Tree, Needs]:
        """The tree without its agents' connections, which may be seen a moment longer than heard; else as it is."""
        gpu_pids = [member.pid for member in op.live]
        with anyio.move_on_after(self._hangs_up_within_s):
            while True:
                tree, needs = await self._look_at_tree(op, wish, ())
                theirs = needs_of(tree, gpu_pids=gpu_pids, agent_sockets=self._agent_sockets)
                if len(theirs.reasons) == len(needs.reasons):
                    return tree, needs
                await anyio.sleep(_LOOK_AGAIN_S)
        return await self._look_at_tree(op, wish, ())

    async def _write_side_by_side(
        self,
        op: Operation,
        wish: Wish,
        lent: Lent,
        criu: Criu,
        taken: tuple[Tree, Needs, Guise | None],
        on_progress: Progress,
    ) -> Mapping[str, object]:
        """CRIU's files, and the bytes of a job that is to end; meanwhile what another node has to have is looked at.

        Of one that goes on they are only seen to be in the pool: for as long as they are written it would stand.
        """
        tree, needs, guise = taken
        node: dict[str, object] = {}
        progress_of = parts_of(on_progress)

        async def look() -> None:
            node.update(await self._looks.at(lambda tell: describe(tree, tell=tell), name="hegmd-node"))

        async def take() -> None:
            await runs.dump(
                criu,
                wish.root_pid,
                lent.criu_dir_fd,
                needs,
                leave_stopped=not wish.leave_running,
                in_unit=self._in_unit,
                guise=guise,
            )

        out: list[Callable[[], Awaitable[object]]] = []
        for member in op.live:
            if member.out and wish.leave_running:
                out.append(partial(self._bytes_of, op, member))
            elif member.out:
                out.append(partial(self._write_bytes, op, member, lent, progress_of(member.name)))
        await in_concert(*out, take, look)
        return node

    async def _write_bytes(self, op: Operation, member: Member, lent: Lent, on_progress: Progress) -> None:
        memory = await self._bytes_of(op, member)
        await lent.write_bytes(byte_name(member), memory.fd, memory.size_bytes, on_progress)

    async def _bytes_of(self, op: Operation, member: Member) -> Memory:
        """The memory of the pool that has them all. Raises HegmError."""
        key = Key(op.id, member.name)
        await self._pool.fetch(key)
        memory = self._pool.memory(key)
        if member.carrier == HOST:
            require_unmarked(memory, member.pid)
        return memory

    def _told(self, member: Member) -> ImageWorker:
        """What its agent has told of itself, and what its piece of the pool was made for."""
        worker = self._workers.find(member.pid)
        if worker is None:
            raise AgentAway(member.pid, "it has ended")
        about = worker.about
        frameworks = {about.framework: about.framework_version or ""} if about.framework else {}
        return ImageWorker(
            pid=member.pid,
            gpus=(),
            carrier=None,
            size_bytes=0,
            rest_bytes=0,
            bytes=(),
            agent_version=worker.program.version,
            frameworks={**frameworks, "python": about.python_version},
            more={"run": about.run},
        )

    # -- agents --------------------------------------------------------------------------------------------------------

    async def _step_aside(self, op: Operation, wish: Wish) -> None:
        """Have every agent of the job hang up and stay. Raises HegmError; some may have, and are to be called back.

        Those of launchers and other processes of its tree too, which are on no GPU and in no operation.
        """
        workers = [self._attending(op, member) for member in op.live]
        workers += [worker for worker in await self._bystanders(op, wish) if worker.connected]
        for worker in workers:
            place = self._places.hold(worker.token)
            await worker.order("aside", path=place, limit_s=ASIDE_LIMIT_S)
        with anyio.move_on_after(self._hangs_up_within_s):
            await self._until(lambda: not any(worker.connected for worker in workers))
            return
        left = ", ".join(str(worker.pid) for worker in workers if worker.connected)
        raise HegmError(
            TIMEOUT, f"the agent of process {left} did not hang up", "see the log of the job, and ask again"
        )

    async def _bystanders(self, op: Operation, wish: Wish) -> list[Worker]:
        """Processes of its tree with agents that attend, or did, and that it does not move."""
        pids = await run_detached(lambda _: pids_below(wish.root_pid), name="hegmd-tree")
        members = {member.pid for member in op.live}
        return [worker for worker in self._workers if worker.pid in pids and worker.pid not in members]

    def _attending(self, op: Operation, member: Member) -> Worker:
        worker = self._workers.find(member.pid)
        if worker is None or worker.token != member.token or not worker.connected:
            raise AgentAway(member.pid, "it cannot be told to step aside")
        if member.out and not self._pool.outlives(Key(op.id, member.name)):
            raise Refused(
                f"the bytes of process {member.pid} are held by hegmd alone, and would be lost if it ended meanwhile",
                "give hegmd a place that outlives it: hugetlbfs or /dev/shm, or start it by systemd",
            )
        return worker

    async def _go_on(self, op: Operation, wish: Wish) -> None:
        """Whoever was left stopped goes on, and the agents come back, as far as they are there. Raises nothing."""
        with anyio.CancelScope(shield=True):
            await run_detached(lambda _: let_all_go(wish), name="hegmd-let-go")
            members = list(op.live)
            await self._leave_places(op, wish)
            with anyio.move_on_after(COMES_BACK_WITHIN_S):
                await self._until(lambda: all(self._is_back(member) for member in members))

    async def _leave_places(self, op: Operation, wish: Wish) -> None:
        """Have every agent of the job come to its usual socket."""
        tokens = [member.token for member in op.live]
        for token in (*tokens, *(worker.token for worker in await self._bystanders(op, wish))):
            if token:
                self._places.leave(token)

    def _is_back(self, member: Member) -> bool:
        """Whether its agent attends, or never will."""
        worker = self._workers.find(member.pid)
        return worker is None or worker.token != member.token or worker.connected

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._workers.news.wait()

    # -- afterwards ----------------------------------------------------------------------------------------------------

    async def find(self, op: Operation) -> None:
        """After a restart: whether the image is whole. If it is not, what there is of it goes, and the job goes on.

        Cancelled because the daemon ends, it leaves all as it is: the image may be whole, and then the job is to end
        without having run on, with what it would write, beyond what is in the image.
        """
        wish = _wish_of(op)
        try:
            await self._require_whole(op, wish)
        except BaseException as error:
            if self._is_stopping and not isinstance(error, HegmError):
                raise
            await self._go_on(op, wish)
            await self._leave_none(wish, error)
        if wish.leave_running:
            await self._go_on(op, wish)

    async def _require_whole(self, op: Operation, wish: Wish) -> None:
        """Raise HegmError unless the image has its name, and is of that operation."""
        image = await self._images().open(wish.path, _rights(wish))
        try:
            if not is_of(image.manifest, op):
                raise Refused(f"{wish.path} is another image", "nothing was done to it")
        finally:
            await image.end()

    async def _leave_none(self, wish: Wish, error: BaseException) -> NoReturn:
        """Nothing is left of an image that was found not to be whole. Raises that, or the cancellation that it was."""
        with anyio.CancelScope(shield=True), contextlib.suppress(HegmError):
            await self._images().sweep(wish.path, _rights(wish))
        if not isinstance(error, HegmError):
            raise error
        raise Refused(
            f"hegmd was stopped before the image in {wish.path} was whole: {error.message}",
            "ask for it again; the job goes on",
        ) from error

    async def end(self, op: Operation, member: Member) -> None:
        """End the whole tree, the process itself last, so that what is left of it can still be found from there."""
        wish = _wish_of(op)
        try:
            await run_detached(lambda _: self._tell_controllers(op, wish), name="hegmd-lock")
        except HegmError as error:  # the image is whole, and so the job ends all the same
            logger.error("no lock file tells of operation %s: %s; %s", op.id, error.message, error.hint)
        await self._leave_places(op, wish)  # they are stopped, and will not look there any more
        await run_detached(lambda _: end_tree(wish, member), name="hegmd-end")

    def _tell_controllers(self, op: Operation, wish: Wish) -> None:
        """While its parent can still be told; of ranks, the first that ends takes the whole tree with it. Blocks."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if population_of([wish.root_pid]).start_ticks.get(wish.root_pid) == wish.root_ticks:
                self._locks.make(ancestors_of(wish.root_pid)[1], wish.path, mark_of(op))

    async def forget(self, manifest: Manifest) -> None:
        """The job of that image is back: nobody is to take it for gone. Raises nothing."""
        try:
            await run_detached(lambda _: self._locks.remove(mark_in(manifest)), name="hegmd-lock")
        except HegmError as error:
            logger.error("a lock file still tells of a job that is back: %s; %s", error.message, error.hint)


def _wish_of(op: Operation) -> Wish:
    if op.handoff is None:
        raise Bug(f"operation {op.id} is to be handed over, and nobody has said where to")
    return op.handoff


def _rights(wish: Wish) -> Rights:
    return Rights(wish.uid, wish.gid, wish.groups)


def require_unmarked(memory: Memory, pid: int) -> None:
    """Raises HegmError where a piece says that its bytes are elsewhere: an image of it would be without them."""
    if read_mark(os.pread(memory.fd, MARK_BYTES, memory.size_bytes - MARK_BYTES)) is not None:
        raise Refused(
            f"the bytes of process {pid} are not in the pool, by what its piece says",
            "ask again; if it is so once more, resume the job and suspend it, then see the log of hegmd",
            {"pid": pid},
        )
