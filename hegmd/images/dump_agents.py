"""The agents of a job that is dumped: they disconnect while CRIU works, and are called back afterwards.

CRIU cannot dump a process with a connection to a process outside the dump. Knows which agents these are, where they
reconnect, and what they reported. Knows nothing of the image, and stops or kills no process.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from hegmd.errors import TIMEOUT, HegmError, Refused
from hegmd.images.rendezvous import Rendezvous
from hegmd.memory.pool import Key, Pool
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.migration.machine.operation import JobProcess as Member
from hegmd.migration.machine.operation import Operation
from hegmd.node.processes.process_tree import pids_below
from hegmd.protocol.images import ImageWorker
from hegmd.system.threads import run_detached
from hegmd.workers.agent_orders import AgentAway
from hegmd.workers.workers import AgentConnection, Workers

# An agent disconnects as soon as it has announced that, and checks about thirty times a second whether to reconnect.
HANGS_UP_WITHIN_S = 10.0
COMES_BACK_WITHIN_S = 30.0
# After this time an agent reconnects by itself, whether or not its daemon runs.
ASIDE_LIMIT_S = 4 * 3600.0


class DumpAgents:
    """Those of one job at a time, by its operation. `pool` says whether bytes outlive the daemon that holds them."""

    def __init__(self, places: Rendezvous, workers: Workers, pool: Pool, *, hangs_up_within_s: float) -> None:
        self.hangs_up_within_s = hangs_up_within_s
        self._places = places
        self._workers = workers
        self._pool = pool

    @property
    def sockets(self) -> tuple[str, ...]:
        return (str(self._places.socket_path),)

    @property
    def meeting(self) -> str:
        """Return the directory where they look for a request to reconnect."""
        return str(self._places.folder)

    async def disconnect(self, op: Operation, wish: Wish) -> None:
        """Have every agent of the job hang up and stay. Raises HegmError; some may have, and are to be called back.

        Also those of launchers and other processes of its tree, which are on no GPU and in no operation.
        """
        workers = [self._attending(op, member) for member in op.live]
        workers += [worker for worker in await self.unmoved_agents(op, wish) if worker.connected]
        for worker in workers:
            place = self._places.hold(worker.token)
            await worker.order("aside", path=place, limit_s=ASIDE_LIMIT_S)
        with anyio.move_on_after(self.hangs_up_within_s):
            await self._until(lambda: not any(worker.connected for worker in workers))
            return
        left = ", ".join(str(worker.pid) for worker in workers if worker.connected)
        raise HegmError(
            TIMEOUT, f"the agent of process {left} did not disconnect", "read the output of the job, then try again"
        )

    async def unmoved_agents(self, op: Operation, wish: Wish) -> list[AgentConnection]:
        """Return the agents of processes in its tree that the operation does not move."""
        pids = await run_detached(lambda _: pids_below(wish.root_pid), name="hegmd-tree")
        members = {member.pid for member in op.live}
        return [worker for worker in self._workers if worker.pid in pids and worker.pid not in members]

    async def call_back(self, op: Operation, wish: Wish) -> None:
        """Let the existing agents reconnect at their usual socket. Raises nothing."""
        members = list(op.live)
        await self.leave_places(op, wish)
        with anyio.move_on_after(COMES_BACK_WITHIN_S):
            await self._until(lambda: all(self._is_back(member) for member in members))

    async def leave_places(self, op: Operation, wish: Wish) -> None:
        """Have every agent of the job connect to its usual socket."""
        tokens = [member.token for member in op.live]
        for token in (*tokens, *(worker.token for worker in await self.unmoved_agents(op, wish))):
            if token:
                self._places.leave(token)

    def image_worker(self, member: Member) -> ImageWorker:
        """Return its agent's last report, and the size of its pool segment."""
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

    def _attending(self, op: Operation, member: Member) -> AgentConnection:
        worker = self._workers.find(member.pid)
        if worker is None or worker.token != member.token or not worker.connected:
            raise AgentAway(member.pid, "it cannot get the order to disconnect")
        if member.offloaded and not self._pool.outlives(Key(op.id, member.name)):
            raise Refused(
                f"only hegmd holds the bytes of process {member.pid}: they would be lost if it ended now",
                "start hegmd by systemd, or give it hugetlbfs or /dev/shm",
            )
        return worker

    def _is_back(self, member: Member) -> bool:
        """Return True if its agent is connected, or never will be."""
        worker = self._workers.find(member.pid)
        return worker is None or worker.token != member.token or worker.connected

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._workers.changed.wait()
