"""What is written of a job that stands: its processes by CRIU, their bytes beside that, and the manifest of both.

Owns what is looked at once more before CRIU is run, when the agents have hung up, and what is written at one time.
Nobody is stopped or called back here, and nothing is undone: that is `dump_job`'s.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from functools import partial

import anyio

from hegmd.errors import NOT_FOUND, HegmError, Refused
from hegmd.gpu_helper.mark import MARK_BYTES, read_mark
from hegmd.images.criu import run
from hegmd.images.criu.dumped import dumped_processes
from hegmd.images.criu.needs import Needs, needs_of
from hegmd.images.criu.node import describe
from hegmd.images.criu.privileges import CriuPrivileges
from hegmd.images.dump_agents import DumpAgents
from hegmd.images.dump_records import DumpRecords
from hegmd.images.dump_tree import guise_for, not_theirs, require_no_more
from hegmd.images.files.open_image import ImageWriter
from hegmd.images.manifests import byte_name, composed, start_ticks_in
from hegmd.memory.pool import Key, Pool
from hegmd.memory.pool_memory import Memory
from hegmd.memory.sizes import whole_size
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation
from hegmd.node.criu_program import Criu
from hegmd.node.inventory import NodeSnapshot
from hegmd.node.processes.process_set import ProcessSet
from hegmd.node.processes.process_tree import Tree, read_tree
from hegmd.protocol.images import Manifest
from hegmd.protocol.operations import HOST
from hegmd.system.programs import Rights
from hegmd.system.task_group import Progress, in_concert, parts_of
from hegmd.system.threads import Looks, run_detached

_POLL_INTERVAL_S = 0.05
# Of so many operations it is remembered whom CRIU has had.
_MAX_REMEMBERED = 64


class Dumping:
    """Writes images. `look` sees the node, `in_unit` runs CRIU as a unit of systemd's.

    `notes` has whom CRIU has had, for a daemon that comes after one that was killed.
    """

    def __init__(
        self,
        agents: DumpAgents,
        pool: Pool,
        *,
        look: Callable[[], Awaitable[NodeSnapshot]],
        looks: Looks,
        in_unit: bool,
        notes: DumpRecords,
    ) -> None:
        self._notes = notes
        self._agents = agents
        self._pool = pool
        self._look = look
        self._looks = looks
        self._in_unit = in_unit
        self._dumped: dict[str, ProcessSet] = {}

    def known_from(self, op: Operation, manifest: Manifest) -> None:
        """An earlier daemon has dumped those who are in that image."""
        self._remember(op, ProcessSet(start_ticks_in(manifest)))

    async def dumped(self, op: Operation) -> ProcessSet | None:
        """Whom CRIU has had: they stand, and whose parent has ended is in no tree any more. None where nobody knows.

        Raises HegmError where that cannot be looked at now.
        """
        if op.id not in self._dumped:
            noted = await run_detached(lambda _: self._notes.people(op.id), name="hegmd-note")
            if noted is not None:
                self._remember(op, noted)
        return self._dumped.get(op.id)

    async def none_stands(self, op: Operation) -> None:
        """Whom CRIU has had go on, or have ended. Raises HegmError for want of a descriptor or a thread."""
        await run_detached(lambda _: self._notes.forget(op.id), name="hegmd-note")

    def _remember(self, op: Operation, people: ProcessSet) -> None:
        self._dumped[op.id] = people
        for oldest in tuple(self._dumped)[:-_MAX_REMEMBERED]:
            del self._dumped[oldest]

    async def look_at_tree(self, op: Operation, wish: Wish) -> tuple[Tree, Needs]:
        """The processes that go along, and what they need, but for their agents' connections. Raises HegmError."""
        return await self._look_at_tree(op, wish, self._agents.sockets)

    async def write(
        self,
        op: Operation,
        wish: Wish,
        lent: ImageWriter,
        criu: Criu,
        guise: CriuPrivileges | None,
        on_progress: Progress,
    ) -> Manifest:
        """All of an image, but for the bytes of a job that is to go on. Raises HegmError.

        The agents have stepped aside: what the tree needs now is what CRIU is told.
        """
        tree, needs = await self._look_once_hung_up(op, wish)
        theirs = self._looks.at(lambda _: not_theirs(tree, needs, rights_of(wish)), name="hegmd-theirs")
        against = [*needs.reasons, *await theirs]
        if against:
            raise Refused(
                "\n".join(reason.message for reason in against),
                "; and ".join(dict.fromkeys(reason.hint for reason in against)),
            )
        attending = {member.pid: self._agents.told(member) for member in op.live}
        if guise != await self._looks.at(lambda _: guise_for(tree, needs, rights_of(wish)), name="hegmd-guise"):
            raise Refused("the job has got other rights meanwhile", "ask again when it starts no programs")
        stopped = frozenset(member.pid for member in tree.members if member.state == "T")
        people = ProcessSet({member.pid: member.start_ticks for member in tree.members}, stopped)
        self._remember(op, people)
        await run_detached(lambda _: self._notes.note(op.id, people), name="hegmd-note")
        node = await self._write_side_by_side(op, wish, lent, criu, (tree, needs, guise), on_progress)
        dumped = await run_detached(lambda _: dumped_processes(lent.criu_dir_fd), name="hegmd-dumped")
        require_no_more(dumped, tree, rights_of(wish))
        return composed(
            op,
            (await self._look()).gpus,
            tree,
            needs,
            criu_version=criu.version,
            meeting=self._agents.meeting,
            attending=attending,
            bystanders=[worker.token for worker in await self._agents.bystanders(op, wish)],
            as_user=guise is not None,
            node=node,
        )

    async def write_bytes(self, op: Operation, member: Member, lent: ImageWriter, on_progress: Progress) -> None:
        """What the pool has of a process. Raises HegmError."""
        memory = await self._bytes_of(op, member)
        await lent.write_bytes(byte_name(member), memory.fd, used_bytes(member, memory), on_progress)

    async def _look_at_tree(self, op: Operation, wish: Wish, sockets: Collection[str]) -> tuple[Tree, Needs]:
        try:
            tree = await self._looks.at(lambda tell: read_tree(wish.root_pid, tell=tell), name="hegmd-tree")
        except ProcessLookupError as error:
            raise HegmError(NOT_FOUND, f"process {wish.root_pid} has ended", "read the log of the job") from error
        if tree.member(wish.root_pid).start_ticks != wish.root_ticks:
            raise HegmError(NOT_FOUND, f"process {wish.root_pid} has ended", "read the log of the job")
        return tree, needs_of(tree, gpu_pids=[member.pid for member in op.live], agent_sockets=sockets)

    async def _look_once_hung_up(self, op: Operation, wish: Wish) -> tuple[Tree, Needs]:
        """The tree without its agents' connections, which may be seen a moment longer than heard; else as it is."""
        gpu_pids = [member.pid for member in op.live]
        with anyio.move_on_after(self._agents.hangs_up_within_s):
            while True:
                tree, needs = await self._look_at_tree(op, wish, ())
                theirs = needs_of(tree, gpu_pids=gpu_pids, agent_sockets=self._agents.sockets)
                if len(theirs.reasons) == len(needs.reasons):
                    return tree, needs
                await anyio.sleep(_POLL_INTERVAL_S)
        return await self._look_at_tree(op, wish, ())

    async def _write_side_by_side(
        self,
        op: Operation,
        wish: Wish,
        lent: ImageWriter,
        criu: Criu,
        taken: tuple[Tree, Needs, CriuPrivileges | None],
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
            await run.dump(
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
            if member.offloaded and wish.leave_running:
                out.append(partial(self._bytes_of, op, member))
            elif member.offloaded:
                out.append(partial(self.write_bytes, op, member, lent, progress_of(member.name)))
        await in_concert(*out, take, look)
        return node

    async def _bytes_of(self, op: Operation, member: Member) -> Memory:
        """The memory of the pool that has them all. Raises HegmError."""
        key = Key(op.id, member.name)
        await self._pool.fetch(key)
        memory = self._pool.memory(key)
        if member.carrier == HOST:
            require_unmarked(memory, member.pid)
        return memory


def rights_of(wish: Wish) -> Rights:
    """Those of whoever wants the image."""
    return Rights(wish.uid, wish.gid, wish.groups)


def used_bytes(member: Member, memory: Memory) -> int:
    """How much of its piece belongs into an image: by what was counted at the boundary, not by what was reserved."""
    if not member.size_bytes:  # nobody has counted
        return memory.size_bytes
    return min(memory.size_bytes, whole_size(member.size_bytes))


def require_unmarked(memory: Memory, pid: int) -> None:
    """Raises HegmError where a piece says that its bytes are elsewhere: an image of it would be without them."""
    if read_mark(os.pread(memory.fd, MARK_BYTES, memory.size_bytes - MARK_BYTES)) is not None:
        raise Refused(
            f"the bytes of process {pid} are not in the pool, by what its piece says",
            "ask again; if it is so once more, resume the job and suspend it, then read the log of hegmd",
            {"pid": pid},
        )
