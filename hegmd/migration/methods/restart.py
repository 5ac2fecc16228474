"""The restart method: the process exits, and its supervisor starts a new one that continues from its state.

No memory of the process moves, so this works between GPUs of any vendor and chip, and from and to the CPU. There must
never be two processes of one state: along with the memory, the supervisor gets a descriptor with a lock on it
(`flock`). The new process inherits it and so holds it while it lives, whatever else exits. If the lock is taken,
nothing is started. The lock is on a file of its own, since the memory is freed before the job ends.

Ranks exit and are started together. Each has its own state and is told to exit, but their launcher is one command: it
is stopped before and ended after them (`launchers`). The first rank to be restored starts it, with the states of all,
and each waits for its own. A start that fails has failed for all ranks.

The method of the target GPUs makes the reservation, which is released just before the new process starts and allocates
the memory itself. A restart without enough memory loses nothing: the state is in the pool.

Longer than 400 lines because one start is awaited by all processes that it restores, alone or as ranks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio

from hegmd.errors import TIMEOUT, HegmError, Refused
from hegmd.memory.pool import Pool
from hegmd.migration.contracts import (
    CheckpointResult,
    Made,
    Method,
    MigratedProcess,
    ProcessState,
    ReplacedBy,
    TrainingFinished,
    goal_of_start,
)
from hegmd.migration.methods import launchers
from hegmd.migration.methods.pool_keys import key_of
from hegmd.migration.methods.rank_startup import NO_PROCESS, RankPosition, StartingRank, position_of, ranks_below
from hegmd.migration.methods.restore_lock import claimed, has_finished, has_passed, lock_path, note_passed
from hegmd.node.gpu_sets import CPU, gpus_of
from hegmd.node.processes.procfs import ProcessKey
from hegmd.protocol.messages import AgentAttend
from hegmd.protocol.snapshots import Gpu
from hegmd.system.condition import Condition
from hegmd.workers.agent_orders import AgentAway
from hegmd.workers.supervisors import Supervisor, Supervisors, go_on_command
from hegmd.workers.workers import AgentConnection, Workers

logger = logging.getLogger(__name__)

NAME = "restart"
LEAVES_WITHIN_S = 60.0
# The variable that selects GPUs, by vendor; those of the other vendors are unset.
SIMULATED = "simulated"
_VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES", SIMULATED: "HEGM_GPU"}
_OTHERS = ("ROCR_VISIBLE_DEVICES", *_VISIBLE.values())
# With these a process finds no GPU, and a simulated node puts it on none. HIP takes an empty list for no list at all.
_NOWHERE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "HEGM_GPU": CPU}
# Vendors on whose GPUs memory can be reserved.
_HELD = frozenset(("nvidia", SIMULATED))


@dataclass(slots=True, eq=False, repr=False)
class _JobStart:
    """A start of a job, awaited by every process that it restores."""

    key: str
    turn: anyio.Lock = field(default_factory=anyio.Lock)
    waiting: int = 0
    #: The supervisor that was asked, the rank that failed first, and why.
    supervisor: Supervisor | None = None
    #: True if this daemon requested the start, so that it receives a report for each rank.
    is_ours: bool = False
    fallen: str = ""
    failure: HegmError | None = None


class RestartMethod:
    """Ends processes and has new ones started.

    `by` makes reservations, `gpus` returns the latest snapshot of the GPUs, and `folder`, the daemon's own, has the
    locks. `position_of` finds a rank's position below its supervisor, `ranks_below` lists the ranks there; both block.
    """

    name = NAME

    def __init__(
        self,
        workers: Workers,
        supervisors: Supervisors,
        pool: Pool,
        *,
        by: Method,
        gpus: Callable[[], Sequence[Gpu]],
        folder: Path,
        position_of: Callable[[int, int], RankPosition | None] = position_of,
        ranks_below: Callable[[int], tuple[ProcessKey | None, Mapping[int, ProcessKey]]] = ranks_below,
    ) -> None:
        self._folder = folder
        self._line_of = position_of
        self._ranks_below = ranks_below
        self._workers = workers
        self._supervisors = supervisors
        self._pool = pool
        self._by = by
        self._gpus = gpus
        self._starts: dict[str, _JobStart] = {}
        self._superseded = Condition()

    # -- reservations --------------------------------------------------------------------------------------------------

    async def reserve(self, subject: MigratedProcess, gpu: str, size_bytes: int) -> None:
        if self._has_reservation(gpu):
            await self._by.reserve(subject, gpu, size_bytes)

    async def release(self, subject: MigratedProcess, gpu: str) -> None:
        if self._has_reservation(gpu):
            await self._by.release(subject, gpu)

    def _has_reservation(self, place: str) -> bool:
        return place != CPU and self._gpu(gpus_of(place)[0]).vendor in _HELD

    def reservations(self, subject: MigratedProcess) -> Mapping[str, int]:
        return self._by.reservations(subject)

    def note_size(self, subject: MigratedProcess, size_bytes: int) -> None:
        """Do nothing: the GPU memory of a process is not the size of its state."""

    def storage_allocation(self, subject: MigratedProcess) -> AbstractAsyncContextManager[Made]:
        """Do nothing: the new process allocates its own storages."""
        return nullcontext(lambda: False)

    # -- away ----------------------------------------------------------------------------------------------------------

    async def checkpoint(self, subject: MigratedProcess) -> CheckpointResult:
        """Have it leave, and wait for its end. Raises OrderFailed, AgentAway, and TIMEOUT where it may yet end."""
        worker = subject.agent
        if worker is not None and not worker.ended and subject.ranks:
            await self._leave_launcher(subject, worker)
        elif worker is not None and not worker.ended:
            order = await worker.give("leave")
            with anyio.move_on_after(LEAVES_WITHIN_S):
                await order.over.wait()
                if worker.connected:
                    await order.report()  # it says why it does not
                await self._until(lambda: worker.ended)
            if not worker.ended:
                hint = "check its exit handlers and the threads that it joins"
                raise HegmError(TIMEOUT, f"process {worker.pid} did not exit within {LEAVES_WITHIN_S:g} s", hint)
        return CheckpointResult(reserved_bytes=0)

    async def _leave_launcher(self, subject: MigratedProcess, worker: AgentConnection) -> None:
        """End a rank once all states are saved: it exits by itself, so that its output is complete, or is killed.

        Its launcher must not notice. Raises SupervisorAway, OrderFailed.
        """
        supervisor = self._supervisors.find(subject.uid, subject.run)
        if supervisor is not None:
            await supervisor.order("expect", subject.operation, launches=True)
            await anyio.to_thread.run_sync(launchers.stop_launchers, worker.pid, supervisor.pid)
        if worker.parked:
            with anyio.move_on_after(LEAVES_WITHIN_S):
                try:
                    order = await worker.give("leave")
                    await order.over.wait()
                    if worker.connected:
                        await order.report()
                    await self._until(lambda: worker.ended)
                except HegmError as error:
                    logger.warning("killing process %d, which did not exit: %s", worker.pid, error.message)
        if not worker.ended:
            await anyio.to_thread.run_sync(launchers.end_one, worker.pid, worker.identity.start_ticks)
            await self._until(lambda: worker.ended)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._workers.changed.wait()

    # -- back ----------------------------------------------------------------------------------------------------------

    async def restore(self, subject: MigratedProcess, gpu: str) -> ReplacedBy | TrainingFinished:
        """Have another process started there, and wait until it has the state back. Raises HegmError with why not."""
        if await self._is_over(subject):
            return TrainingFinished()
        for held in tuple(self._by.reservations(subject)):
            await self.release(subject, held)
        rank = StartingRank()
        with self._start_of(subject) as start:
            while self._starts.get(subject.operation) is start:
                reborn = self._reborn(subject, gpu)
                if reborn is not None:
                    return reborn
                try:
                    supervisor = await self._supervisor(subject)
                except Refused:
                    if await self._is_over(subject):
                        return TrainingFinished()
                    raise
                if start.failure is not None:
                    raise start.failure
                if _has_started(supervisor, subject):
                    start.supervisor = supervisor  # an earlier run of the daemon may have asked for it
                    if subject.ranks:
                        await self._look_after(rank, start, supervisor, subject)
                    if self._reborn(subject, gpu) is not None:
                        continue  # it arrived during the wait for its supervisor, and will not come again
                elif start.supervisor is supervisor:
                    why = supervisor.failure or "its supervisor reports that it is not running"
                    message = f"the job was not restarted on {gpu}: {'; '.join(filter(None, (start.fallen, why)))}"
                    start.failure = Refused(message, "read what it printed")
                    continue
                elif supervisor.offer.pid is None or subject.ranks:
                    await self._have_started(start, supervisor, subject, gpu)
                    continue  # handle what has arrived before waiting
                with anyio.move_on_after(rank.look_again_s):
                    await self._something()
        raise Refused(f"the job is no longer started on {gpu}", "wait: it is started on another GPU")

    @contextmanager
    def _start_of(self, subject: MigratedProcess) -> Generator[_JobStart, None, None]:
        """Hold the start that all processes to be restored now share; it replaces an earlier one."""
        operation = subject.operation
        start = self._starts.get(operation)
        if start is None or start.key != subject.start:
            start = self._starts[operation] = _JobStart(subject.start)
            self._superseded.notify_all()
        start.waiting += 1
        try:
            yield start
        finally:
            start.waiting -= 1
            if not start.waiting and self._starts.get(operation) is start:
                del self._starts[operation]

    async def _have_started(self, start: _JobStart, supervisor: Supervisor, subject: MigratedProcess, gpu: str) -> None:
        """Start the command, unless another rank has; before that, end what is left of its launcher."""
        async with start.turn:
            if start.supervisor is supervisor or start.failure is not None:
                return
            try:
                if supervisor.offer.pid is not None:
                    await self._end_command(supervisor, subject.operation)
                else:
                    await self._start(supervisor, subject, gpu)
                    start.supervisor, start.is_ours = supervisor, True
            except HegmError as error:
                start.failure = error
                raise

    async def _look_after(
        self, rank: StartingRank, start: _JobStart, supervisor: Supervisor, subject: MigratedProcess
    ) -> None:
        """End the launcher of a rank that failed; its supervisor then handles the job like any that has exited."""
        for worker in self._workers:
            about, who = worker.about, (worker.pid, worker.identity.start_ticks)
            is_it = (about.rank, about.run, worker.identity.uid) == (subject.rank, supervisor.run, subject.uid)
            if is_it and who != subject.owner_key and not rank.knows(who):
                rank.note(who, await anyio.to_thread.run_sync(self._line_of, worker.pid, supervisor.pid))
        command = supervisor.offer.pid
        if command is not None and not start.is_ours:
            found, ranks = await anyio.to_thread.run_sync(self._ranks_below, command)
            number = subject.rank or 0
            if found is not None and not await anyio.to_thread.run_sync(
                has_passed, self._folder, subject.operation, number
            ):
                rank.note_below(found, ranks, number)
        fallen = rank.fallen(anyio.current_time())
        if fallen is None:
            return
        if not start.fallen:
            process = "not seen by the running hegmd" if fallen.rank == NO_PROCESS else f"process {fallen.rank[0]}"
            start.fallen = f"rank {subject.rank} ({process}) ended before its first boundary"
            logger.warning("operation %s: %s", subject.operation, start.fallen)
        if rank.is_left_behind(anyio.current_time()):
            async with start.turn:
                await anyio.to_thread.run_sync(launchers.end_with_all_below, *fallen.command)

    async def _end_command(self, supervisor: Supervisor, operation: str) -> None:
        """End what is left of a launcher whose ranks have exited. Raises OrderFailed, SupervisorAway."""
        await supervisor.order("expect", operation, launches=True)
        await anyio.to_thread.run_sync(launchers.end_all_below, supervisor.pid)
        while supervisor.offer.pid is not None and supervisor.connected:
            await self._something()

    async def _is_over(self, subject: MigratedProcess) -> bool:
        return await anyio.to_thread.run_sync(has_finished, self._folder, subject.operation)

    async def _start(self, supervisor: Supervisor, subject: MigratedProcess, gpu: str) -> None:
        """Have the command started from the state, or from those of all ranks. Raises OrderFailed, SupervisorAway."""
        states = [key_of(replace(subject, name=rank.name)) for rank in subject.ranks] or [key_of(subject)]
        for state in states:
            await self._pool.fetch(state)
        memories = [self._pool.memory(state).fd for state in states]
        lock = lock_path(self._folder, subject.operation)
        if subject.ranks and supervisor.run and await anyio.Path(lock).exists():
            await anyio.to_thread.run_sync(launchers.end_orphans, supervisor.run, lock)
        claim = await anyio.to_thread.run_sync(claimed, self._folder, subject.operation)
        try:
            supervisor.failure = ""
            await supervisor.order(
                "start",
                subject.operation,
                fds=[*memories, claim],
                ranks=tuple([rank.number for rank in subject.ranks]),
                key=subject.start,
                **self.surroundings_of(subject, gpu),
            )
        finally:
            os.close(claim)

    def surroundings_of(self, subject: MigratedProcess, gpu: str) -> Mapping[str, Any]:
        """Return what differs for the process to be started: variables, and the Python."""
        places = [rank.target_gpu or gpu for rank in subject.ranks] or [gpu]
        respawn = subject.respawn
        variables = {**self._surroundings(places), **respawn.set}
        unset = tuple([name for name in (*_OTHERS, *respawn.unset) if name not in variables])
        return {"set": variables, "unset": unset, "python": respawn.python}

    def variables_for(self, gpus: Sequence[str]) -> dict[str, Any]:
        """Return what a start on these GPUs needs in its environment: variables to set, and those to leave out."""
        variables = self._surroundings(gpus)
        return {"set": variables, "unset": tuple([name for name in _OTHERS if name not in variables])}

    def _surroundings(self, places: Sequence[str]) -> dict[str, str]:
        """Return the variables that select the place of a process, or those of ranks, in their order.

        A simulated GPU is named once for each rank. CUDA and HIP take no GPU twice: ranks on one share its number.
        """
        if CPU in places:
            return dict(_NOWHERE)
        if all(place == places[0] for place in places):
            places = places[:1]
        known = [self._gpu(gpu) for place in places for gpu in gpus_of(place)]
        vendor, played = known[0].vendor, known[0].plays
        uuids = ",".join(dict.fromkeys([gpu.uuid for gpu in known]))
        if vendor != SIMULATED:
            return {_VISIBLE[vendor]: uuids}
        found = {_VISIBLE[SIMULATED]: ",".join([gpu.id for gpu in known])}
        return found if played is None else {**found, _VISIBLE[played]: uuids}

    def _reborn(self, subject: MigratedProcess, gpu: str) -> ReplacedBy | None:
        """Return the process that has loaded the operation's state, if there is one.

        Never the process to be replaced: it has exited, although its connection may still be open. A rank has to be
        from this start: a launcher may start ranks of an earlier one again on its own.
        """
        supervisor = self._known(subject)
        if subject.ranks and supervisor is not None and not _has_started(supervisor, subject):
            return None
        is_earlier = supervisor is not None and _has_started_before(supervisor, subject)
        if supervisor is not None and is_earlier:
            gpu = goal_of_start(supervisor.offer.key)
        for worker in self._workers:
            about = worker.about
            is_it = not subject.ranks or about.rank == subject.rank
            is_it = is_it and worker.connected and not worker.ended and about.restarted == subject.operation
            is_it = is_it and (worker.pid, worker.identity.start_ticks) != subject.owner_key
            if is_it and worker.identity.uid == subject.uid:
                own = _own_gpu(about)
                place = worker.gpu or own or gpu
                worker.gpu, worker.on_cpu = None if place == CPU else place, place == CPU
                ticks = worker.identity.start_ticks
                new = replace(subject, pid=worker.pid, start_ticks=ticks, gpu=place, agent=worker)
                self._by.note_size(new, worker.size_bytes or subject.size_bytes)
                return ReplacedBy(
                    gpu=gpu if own is None else own,
                    pid=worker.pid,
                    start_ticks=ticks,
                    token=worker.token,
                    run=about.run,
                    boundary=worker.boundary,
                    is_earlier=is_earlier,
                )
        return None

    async def _supervisor(self, subject: MigratedProcess) -> Supervisor:
        """Return the supervisor that is connected for this operation. Raises Refused after a while."""
        found = await self._supervisors.come(subject.uid, subject.run, lambda: self._known(subject))
        if found is not None:
            return found
        raise Refused(
            f"the `hegmctl run` that started process {subject.pid} has exited, and no other process can restart the "
            "job",
            f"resume it from its saved state: {go_on_command(subject.operation)}",
            {"operation": subject.operation},
        )

    def _known(self, subject: MigratedProcess) -> Supervisor | None:
        """The supervisor that lives, connected or not."""
        found = self._supervisors.of_operation(subject.uid, subject.operation)
        return found or self._supervisors.find(subject.uid, subject.run)

    async def _something(self) -> None:
        """Wait for news of a worker or of a supervisor, or for another start."""
        async with anyio.create_task_group() as tasks:

            async def first(event: anyio.Event) -> None:
                await event.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, self._workers.changed.next)
            tasks.start_soon(first, self._supervisors.changed.next)
            tasks.start_soon(first, self._superseded.next)

    # -- state ---------------------------------------------------------------------------------------------------------

    async def verify(self, subject: MigratedProcess) -> None:
        """Do nothing: the next boundary, which the agent reports, is the proof."""

    async def lock(self, subject: MigratedProcess) -> None:
        """Its ranks leave by ending, and their communicators end with them."""

    async def unlock(self, subject: MigratedProcess) -> None:
        """It was never locked."""

    async def note_resumed(self, subject: MigratedProcess) -> None:
        """Record that the new process has trained: from now on its supervisor does not start another from that state.

        Raises AgentAway if it has exited already: it may have been replaced.
        """
        rank = subject.rank or 0
        if not await anyio.to_thread.run_sync(note_passed, self._folder, subject.operation, rank, subject.owner_key):
            raise AgentAway(subject.pid, "the process has ended")

    async def inspect(self, subject: MigratedProcess) -> ProcessState:
        """Report the process as present: it has not exited yet, or it is the successor."""
        return ProcessState(gpu=subject.gpu or subject.previous_gpu)

    def _gpu(self, name: str) -> Gpu:
        known = next((gpu for gpu in self._gpus() if gpu.id == name), None)
        if known is None:
            raise Refused(f"there is no GPU {name}", "run: hegmctl gpus")
        return known


def _own_gpu(about: AgentAttend) -> str | None:
    """Return the GPU that a simulated process was started for: of several, a rank takes its own in their order."""
    names = gpus_of(about.gpu)
    return about.gpu if about.rank is None or len(names) < 2 else names[about.rank % len(names)]


def _has_started(supervisor: Supervisor, subject: MigratedProcess) -> bool:
    """Return True if its command runs from the state of the operation; of ranks, from the start that is wanted now."""
    is_it = supervisor.offer.started and supervisor.serves(subject.operation)
    return is_it and (not subject.ranks or supervisor.offer.key == subject.start)


def _has_started_before(supervisor: Supervisor, subject: MigratedProcess) -> bool:
    """True if its command runs, or is retried, by an order for another start than the present one."""
    is_known = bool(supervisor.offer.key) and not subject.ranks
    return is_known and _has_started(supervisor, subject) and supervisor.offer.key != subject.start
