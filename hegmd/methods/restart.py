"""The method of a restart: the process leaves by ending, and its supervisor starts another that goes on from its state.

Nothing of the process itself moves, so it works between GPUs of any vendor and chip, and from and to the CPU. What has
to be right is that there is one process at a time and no more: with the memory the supervisor is handed a descriptor
with a lock on it (`flock`), which the new process inherits and so holds for as long as it lives, whoever else ends.
Whoever finds it locked starts nobody. The lock is on a file of its own: the memory is not to stay for as long as the
job.

The room for a process is held by the method of the GPUs that hegmd knows to hold room on, and let go of just before the
new process is started, which takes it by itself. A restart that finds none has lost nothing: the state is in the pool.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import anyio

from hegmd.errors import TIMEOUT, HegmError, Refused
from hegmd.methods.base import Left, Method, Reborn, Standing, Subject
from hegmd.methods.pooled import key_of
from hegmd.places import CPU
from hegmd.pool import Pool
from hegmd.protocol.snapshots import Gpu
from hegmd.supervisors import Supervisor, Supervisors
from hegmd.workers import Workers

NAME = "restart"
LEAVES_WITHIN_S = 60.0
# A supervisor tries to connect at least every five seconds.
SUPERVISOR_COMES_WITHIN_S = 12.0
_LOOK_AGAIN_S = 0.25
# What decides on which GPUs a process is, for each vendor; those of the others are taken away.
_VISIBLE = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES", "simulated": "HEGM_GPU"}
_OTHERS = ("ROCR_VISIBLE_DEVICES", *_VISIBLE.values())
# With these a process finds no GPU, and a simulated node puts it on none. HIP takes an empty list for no list at all.
_NOWHERE = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "HEGM_GPU": CPU}
# Whose GPUs room can be held on.
_HELD = frozenset(("nvidia", "simulated"))


class RestartMethod:
    """Ends processes and has others started. `by` holds room, `gpus` tells the GPUs as they were seen last, and in
    `folder`, the daemon's own, are the locks."""

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
    ) -> None:
        self._folder = folder
        self._workers = workers
        self._supervisors = supervisors
        self._pool = pool
        self._by = by
        self._gpus = gpus

    # -- room ----------------------------------------------------------------------------------------------------------

    async def hold_room(self, subject: Subject, gpu: str, size_bytes: int) -> None:
        if self._has_room_held(gpu):
            await self._by.hold_room(subject, gpu, size_bytes)

    async def give_room(self, subject: Subject, gpu: str) -> None:
        if self._has_room_held(gpu):
            await self._by.give_room(subject, gpu)

    def _has_room_held(self, place: str) -> bool:
        return place != CPU and self._gpu(place).vendor in _HELD

    def rooms(self, subject: Subject) -> Mapping[str, int]:
        return self._by.rooms(subject)

    def note_size(self, subject: Subject, size_bytes: int) -> None:
        """What it holds on a GPU is not what its state comes to."""

    def making(self, subject: Subject) -> AbstractAsyncContextManager[None]:
        """The new process makes its storages by itself."""
        return nullcontext()

    # -- away ----------------------------------------------------------------------------------------------------------

    async def checkpoint(self, subject: Subject) -> Left:
        """Have it leave, and wait for its end. Raises OrderFailed, AgentAway, and TIMEOUT where it may yet end."""
        worker = subject.agent
        if worker is not None and not worker.ended:
            given = await worker.give("leave")
            with anyio.move_on_after(LEAVES_WITHIN_S):
                await given.over.wait()
                if worker.connected:
                    await given.report()  # it says why it does not
                await self._until(lambda: worker.ended)
            if not worker.ended:
                hint = "see what it does at its end: exit handlers, and threads that it waits for"
                raise HegmError(TIMEOUT, f"process {worker.pid} did not end within {LEAVES_WITHIN_S:g} s", hint)
        return Left(room_bytes=0)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            await self._workers.news.wait()

    # -- back ----------------------------------------------------------------------------------------------------------

    async def restore(self, subject: Subject, gpu: str) -> Reborn:
        """Have another process started there, and wait until it has the state back. Raises HegmError with why not."""
        for held in tuple(self._by.rooms(subject)):
            await self.give_room(subject, held)
        asked: Supervisor | None = None
        while True:
            reborn = self._reborn(subject, gpu)
            if reborn is not None:
                return reborn
            supervisor = await self._supervisor(subject)
            if supervisor.offer.started and supervisor.serves(subject.operation):
                asked = supervisor  # an earlier run of the daemon may have asked for it
            elif asked is not None and asked is supervisor:
                why = supervisor.failure or "its supervisor says that it does not run"
                raise Refused(f"the job was not restarted on {gpu}: {why}", "see what it printed; its state is held")
            elif supervisor.offer.pid is None:
                await self._start(supervisor, subject, gpu)
                asked = supervisor
                continue  # what has come meanwhile is looked at before anything is waited for
            await self._something()

    async def _start(self, supervisor: Supervisor, subject: Subject, gpu: str) -> None:
        """Have the command started from the state. Raises OrderFailed, SupervisorAway."""
        variables = self._surroundings(gpu)
        respawn = subject.respawn
        memory = self._pool.memory(key_of(subject))
        claim = await anyio.to_thread.run_sync(_claimed, self._folder, subject.operation)
        try:
            supervisor.failure = ""
            await supervisor.order(
                "start",
                subject.operation,
                fds=[memory.fd, claim],
                set={**variables, **respawn.set},
                unset=tuple([name for name in (*_OTHERS, *respawn.unset) if name not in {**variables, **respawn.set}]),
                python=respawn.python,
            )
        finally:
            os.close(claim)

    def _surroundings(self, gpu: str) -> dict[str, str]:
        """By which variables a process finds itself on that GPU, or on none."""
        if gpu == CPU:
            return dict(_NOWHERE)
        known = self._gpu(gpu)
        return {_VISIBLE[known.vendor]: gpu if known.vendor == "simulated" else known.uuid}

    def _reborn(self, subject: Subject, gpu: str) -> Reborn | None:
        """The process that has the state of the operation back, if it is there."""
        for worker in self._workers:
            about = worker.about
            if worker.connected and about.restarted == subject.operation and worker.identity.uid == subject.uid:
                place = worker.gpu or about.gpu or gpu
                worker.gpu = None if place == CPU else place
                ticks = worker.identity.start_ticks
                new = replace(subject, pid=worker.pid, start_ticks=ticks, gpu=place, agent=worker)
                self._by.note_size(new, worker.size_bytes or subject.size_bytes)
                return Reborn(
                    gpu=gpu if about.gpu is None else about.gpu,
                    pid=worker.pid,
                    start_ticks=ticks,
                    token=worker.token,
                    run=about.run,
                    boundary=worker.boundary,
                )
        return None

    async def _supervisor(self, subject: Subject) -> Supervisor:
        """The one that is connected for this operation. Raises Refused when there is none after a while."""
        with anyio.move_on_after(SUPERVISOR_COMES_WITHIN_S):
            while True:
                found = self._supervisors.of_operation(subject.uid, subject.operation)
                found = found or self._supervisors.find(subject.uid, subject.run)
                if found is not None and found.connected:
                    return found
                if found is None and self._supervisors.has_ended(subject.uid, subject.run):
                    break
                with anyio.move_on_after(_LOOK_AGAIN_S):  # a connection ends a little before its process
                    await self._supervisors.news.wait()
        raise Refused(
            f"the `hegmctl run` that started process {subject.pid} is gone, and nobody else can start it again",
            f"its state is held: hegmctl run --allow-restart --resume {subject.operation} -- COMMAND",
            {"operation": subject.operation},
        )

    async def _something(self) -> None:
        """Wait for news of a worker or of a supervisor."""
        async with anyio.create_task_group() as tasks:

            async def first(news: anyio.Event) -> None:
                await news.wait()
                tasks.cancel_scope.cancel()

            tasks.start_soon(first, self._workers.news.next)
            tasks.start_soon(first, self._supervisors.news.next)

    # -- how it stands -------------------------------------------------------------------------------------------------

    async def verify(self, subject: Subject) -> None:
        """The next boundary, which the agent tells, proves all that there is."""

    async def inspect(self, subject: Subject) -> Standing:
        """One that lives has not left, or is the one that went on."""
        return Standing(gpu=subject.gpu or subject.left)

    def _gpu(self, name: str) -> Gpu:
        known = next((gpu for gpu in self._gpus() if gpu.id == name), None)
        if known is None:
            raise Refused(f"there is no GPU {name}", "see hegmctl gpus")
        return known


def _claimed(folder: Path, operation: str) -> int:
    """The right to go on from the state of that operation. Raises Refused where a process has it."""
    own = os.open(lock_path(folder, operation), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(own)
        raise Refused(
            f"a process that was started from the state of operation {operation} is there still",
            "leave it be, it says itself when it goes on; or end it first: nobody is started from one state twice",
        ) from error
    return own


def lock_path(folder: Path, operation: str) -> Path:
    """The file whose lock is the right to go on from the state of that operation."""
    return folder / f"restart-{operation}.lock"


def forget_claims(folder: Path, held: Container[str]) -> None:
    """Remove the locks of operations that hold no state any more. Blocks."""
    for path in folder.glob("restart-*.lock"):
        if path.stem.removeprefix("restart-") not in held:
            path.unlink(missing_ok=True)
