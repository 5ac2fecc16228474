"""Writes the dump of a parked job: its processes by CRIU, their bytes, and the manifest of both.

Owns the last checks before CRIU is run, once the agents have disconnected, and what is written concurrently. Stops and
resumes no process, and undoes nothing: `dump_job` does.
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
from hegmd.system.task_group import Progress, parts_of, run_concurrently
from hegmd.system.threads import BoundedReads, run_detached

_POLL_INTERVAL_S = 0.05
# The number of operations whose dumped processes are remembered.
_MAX_REMEMBERED = 64


class Dumping:
    """Writes images. `take_snapshot` reads the node, `in_unit` runs CRIU as a unit of systemd.

    `notes` records the processes given to CRIU, for a daemon that starts after one that was killed.
    """

    def __init__(
        self,
        agents: DumpAgents,
        pool: Pool,
        *,
        take_snapshot: Callable[[], Awaitable[NodeSnapshot]],
        looks: BoundedReads,
        in_unit: bool,
        notes: DumpRecords,
    ) -> None:
        self._notes = notes
        self._agents = agents
        self._pool = pool
        self._take_snapshot = take_snapshot
        self._looks = looks
        self._in_unit = in_unit
        self._dumped: dict[str, ProcessSet] = {}

    def known_from(self, op: Operation, manifest: Manifest) -> None:
        """Record that an earlier daemon has dumped the processes of that image."""
        self._remember(op, ProcessSet(start_ticks_in(manifest)))

    async def dumped(self, op: Operation) -> ProcessSet | None:
        """Return the processes that CRIU has stopped, also orphaned ones; None if unknown. Raises HegmError."""
        if op.id not in self._dumped:
            noted = await run_detached(lambda _: self._notes.people(op.id), name="hegmd-note")
            if noted is not None:
                self._remember(op, noted)
        return self._dumped.get(op.id)

    async def forget_stopped(self, op: Operation) -> None:
        """Forget the processes that CRIU has stopped: they run or have exited. Raises HegmError."""
        await run_detached(lambda _: self._notes.forget(op.id), name="hegmd-note")

    def _remember(self, op: Operation, people: ProcessSet) -> None:
        self._dumped[op.id] = people
        for oldest in tuple(self._dumped)[:-_MAX_REMEMBERED]:
            del self._dumped[oldest]

    async def look_at_tree(self, op: Operation, wish: Wish) -> tuple[Tree, Needs]:
        """Return the processes to dump and what they need, without their agents' connections. Raises HegmError."""
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
        """Write all of an image, except the bytes of a job that trains on. Raises HegmError.

        The agents have disconnected, so the tree's present needs are those for CRIU.
        """
        tree, needs = await self._inspect_without_agents(op, wish)
        theirs = self._looks.at(lambda _: not_theirs(tree, needs, rights_of(wish)), name="hegmd-theirs")
        against = [*needs.reasons, *await theirs]
        if against:
            raise Refused(
                "\n".join(reason.message for reason in against),
                "; and ".join(dict.fromkeys(reason.hint for reason in against)),
            )
        attending = {member.pid: self._agents.image_worker(member) for member in op.live}
        if guise != await self._looks.at(lambda _: guise_for(tree, needs, rights_of(wish)), name="hegmd-guise"):
            raise Refused("the job changed its rights during the dump", "try again when the job starts no programs")
        stopped = frozenset(member.pid for member in tree.members if member.state == "T")
        people = ProcessSet({member.pid: member.start_ticks for member in tree.members}, stopped)
        self._remember(op, people)
        await run_detached(lambda _: self._notes.note(op.id, people), name="hegmd-note")
        node = await self._write_side_by_side(op, wish, lent, criu, (tree, needs, guise), on_progress)
        dumped = await run_detached(lambda _: dumped_processes(lent.criu_dir_fd), name="hegmd-dumped")
        require_no_more(dumped, tree, rights_of(wish))
        return composed(
            op,
            (await self._take_snapshot()).gpus,
            tree,
            needs,
            criu_version=criu.version,
            meeting=self._agents.meeting,
            attending=attending,
            unmoved_agents=[worker.token for worker in await self._agents.unmoved_agents(op, wish)],
            as_user=guise is not None,
            node=node,
        )

    async def write_bytes(self, op: Operation, member: Member, lent: ImageWriter, on_progress: Progress) -> None:
        """Write the pool's bytes of a process. Raises HegmError."""
        memory = await self._bytes_of(op, member)
        await lent.write_bytes(byte_name(member), memory.fd, used_bytes(member, memory), on_progress)

    async def _look_at_tree(self, op: Operation, wish: Wish, sockets: Collection[str]) -> tuple[Tree, Needs]:
        try:
            tree = await self._looks.at(lambda tell: read_tree(wish.root_pid, tell=tell), name="hegmd-tree")
        except ProcessLookupError as error:
            raise HegmError(NOT_FOUND, f"process {wish.root_pid} has ended", "read the output of the job") from error
        if tree.member(wish.root_pid).start_ticks != wish.root_ticks:
            raise HegmError(NOT_FOUND, f"process {wish.root_pid} has ended", "read the output of the job")
        return tree, needs_of(tree, gpu_pids=[member.pid for member in op.live], agent_sockets=sockets)

    async def _inspect_without_agents(self, op: Operation, wish: Wish) -> tuple[Tree, Needs]:
        """Return the tree without its agents' connections, which can stay visible for a moment."""
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
        """Write CRIU's files and, if the job is to end, its bytes; meanwhile describe this node for the manifest.

        If the job trains on, its bytes are only checked to be in the pool, and CRIU's files are not read back yet:
        both would lengthen its downtime.
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
            if not wish.leave_running:
                await lent.collect_criu_files()

        out: list[Callable[[], Awaitable[object]]] = []
        for member in op.live:
            if member.offloaded and wish.leave_running:
                out.append(partial(self._bytes_of, op, member))
            elif member.offloaded:
                out.append(partial(self.write_bytes, op, member, lent, progress_of(member.name)))
        await run_concurrently(*out, take, look)
        return node

    async def _bytes_of(self, op: Operation, member: Member) -> Memory:
        """Return the pool memory with all its bytes. Raises HegmError."""
        key = Key(op.id, member.name)
        await self._pool.fetch(key)
        memory = self._pool.memory(key)
        if member.carrier == HOST:
            require_unmarked(memory, member.pid)
        return memory


def rights_of(wish: Wish) -> Rights:
    """Return the rights of the user who requested the image."""
    return Rights(wish.uid, wish.gid, wish.groups)


def used_bytes(member: Member, memory: Memory) -> int:
    """Return how much of its segment belongs into an image: the bytes counted at the boundary, not the reservation."""
    if not member.size_bytes:  # not measured
        return memory.size_bytes
    return min(memory.size_bytes, whole_size(member.size_bytes))


def require_unmarked(memory: Memory, pid: int) -> None:
    """Raise HegmError if a mark in the segment says that its bytes are elsewhere: an image would lack them."""
    if read_mark(os.pread(memory.fd, MARK_BYTES, memory.size_bytes - MARK_BYTES)) is not None:
        raise Refused(
            f"the pool segment of process {pid} says that its bytes are elsewhere",
            "try again; if it fails again, resume and suspend the job, and read the log of hegmd",
            {"pid": pid},
        )
