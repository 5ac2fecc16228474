"""Supervisors and the operations that they serve: who attends, who goes on with a held state, and what each is told.

An operation that restarts a job tells its supervisor itself what to expect and when to start; here is what comes after.
Once it is over the supervisor is told to forget it, and where the job could not be started again, to give it up with
the state held. A supervisor that missed that, because the connection or the daemon was away, is told when it is back;
so is one that has a process ready for an operation that is over.

A state that is held can be gone on with by a new supervisor of the same user (`hegmctl run --resume`). That is an
ordinary resume of the operation, which has one supervisor at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import anyio

from hegmd.errors import DENIED, HegmError, Refused
from hegmd.migration.machine import events
from hegmd.migration.machine.next_effects import SUSPENDED, TERMINAL
from hegmd.migration.machine.operation import Operation
from hegmd.migration.run.runner import Runner
from hegmd.operations.operations import Operations
from hegmd.operations.request_context import RequestContext
from hegmd.protocol.messages import Supervise, SuperviseReport
from hegmd.protocol.operations import IMPORTING, LOADING, READIED, OperationProgress
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.workers.supervisors import Send, Supervisor, SupervisorAway, Supervisors, go_on_command
from hegmd.workers.workers import BACK, CAME, AgentConnection, Workers

logger = logging.getLogger(__name__)


class Restarts(BackgroundTasks):
    """The desk of supervisors. `run` has to be running for as long as they attend.

    `forget` is told of operations whose state nobody can go on from any more; `is_over` tells whether a process has
    gone on from that of an operation and come to its end, as its supervisor has left word, and blocks for a moment.
    """

    def __init__(
        self,
        supervisors: Supervisors,
        workers: Workers,
        runner: Runner,
        operations: Operations,
        *,
        forget: Callable[[str], object],
        is_over: Callable[[str], bool],
    ) -> None:
        super().__init__()
        self._forget = forget
        self._is_over = is_over
        self._supervisors = supervisors
        self._workers = workers
        self._runner = runner
        self._operations = operations
        self._watched: set[str] = set()
        supervisors.listen(self._look)
        workers.listen(self._hear)

    def take_over(self) -> None:
        """Follow what is under way from before this daemon: once, when this runs."""
        for op in self._runner.under_way():
            if self._tasks is not None and any(member.restarts for member in op.live):
                self._tasks.start_soon(self._look_for_end, op.id)
                self._watched.add(op.id)
                self._tasks.start_soon(self._watch, op.id)

    async def attend(self, key: object, pid: int, uid: int, offer: Supervise, send: Send) -> None:
        """Let a supervisor attend until it leaves. Raises HegmError when it cannot have what it wants."""
        if offer.resumes is not None:
            self._require_held(offer.resumes, uid)
        await self._supervisors.attend(key, pid, uid, offer, send)

    def report(self, key: object, report: SuperviseReport) -> None:
        """Take what a supervisor reports."""
        self._supervisors.report(key, report)

    def _require_held(self, op_id: str, uid: int) -> Operation:
        """The operation with a state that somebody of that user may go on from. Raises HegmError."""
        op = self._runner.history(op_id).operation
        if op.owner_uid != uid:
            hint = "a state is its owner's alone: run it as that user"
            raise HegmError(DENIED, f"the job of operation {op_id} belongs to uid {op.owner_uid}", hint)
        if op.phase != SUSPENDED or not any(member.is_absent for member in op.workers):
            hint = "hegmctl ops lists operations; one that holds a state is suspended, its process gone"
            raise Refused(f"operation {op_id} is {op.phase}, and holds no state to go on from", hint)
        serving = self._supervisors.of_operation(uid, op_id)
        if serving is not None and serving.connected:
            message = f"process {serving.pid} waits for operation {op_id} already"
            raise Refused(message, f"hegmctl resume {next(op.live).pid} has it go on there")
        return op

    # -- what is told --------------------------------------------------------------------------------------------------

    def _look(self, supervisor: Supervisor) -> None:
        """A supervisor came: what it waits for is watched from now on. Told from the event loop, must not wait."""
        op_id, readies = supervisor.offer.operation, supervisor.offer.readies
        if self._tasks is None:
            return
        if readies is not None and readies not in self._watched:
            self._watched.add(readies)  # it came with one: of an earlier daemon's, maybe, that is over
            self._tasks.start_soon(self._watch, readies)
        if op_id is None:
            return
        self._note_progress(op_id)
        if not supervisor.connected or supervisor.offer.pid is None:
            self._tasks.start_soon(self._look_for_end, op_id)
        if supervisor.offer.resumes is not None and supervisor.connected and not supervisor.has_asked:
            supervisor.has_asked = True
            self._tasks.start_soon(self._resume, supervisor, supervisor.offer.resumes)
        elif op_id not in self._watched:
            self._watched.add(op_id)
            self._tasks.start_soon(self._watch, op_id)
        elif supervisor.connected:
            self._tasks.start_soon(self._tell_of, op_id)

    def _note_progress(self, op_id: str) -> None:
        """Have the operation tell how far the process is that is to go on from its state."""
        op = next((op for op in self._runner.under_way() if op.id == op_id), None)
        absent = [] if op is None else [member for member in op.live if member.is_absent]
        supervisor = None if op is None else self._supervisors.of_operation(op.owner_uid, op_id)
        if self._tasks is None or not absent or supervisor is None or not supervisor.offer.started:
            return
        attends = supervisor.offer.pid is not None and self._workers.find(supervisor.offer.pid) is not None
        doing = LOADING if attends else READIED if supervisor.was_ready else IMPORTING
        if absent[0].successor_activity != doing:
            self._tasks.start_soon(
                self._ask, op_id, events.CameOn(worker=absent[0].name, doing=doing, cause="the start")
            )

    async def _ask(self, op_id: str, event: events.Event) -> None:
        try:
            await self._runner.ask(op_id, event)
        except HegmError as error:
            logger.debug("operation %s: %s", op_id, error.message)

    async def _look_for_end(self, op_id: str) -> None:
        """Have the operation know it where the process that went on from its state has come to its end."""
        try:
            op = self._runner.history(op_id).operation
            restarting = [member for member in op.live if member.restarts and member.state_saved]
            if op.phase not in TERMINAL and restarting and await anyio.to_thread.run_sync(self._is_over, op_id):
                await self._ask(op_id, events.TrainingEnded(worker=restarting[0].name, cause="its supervisor"))
        except HegmError as error:
            logger.debug("operation %s: %s", op_id, error.message)

    async def _watch(self, op_id: str) -> None:
        """Follow an operation, and tell of its end and of its rests."""
        try:
            while not await self._tell_of(op_id):
                await self._runner.changed(op_id)
                async for _ in self._runner.follow(op_id):
                    pass
        except HegmError as error:  # there is no such operation any more
            logger.debug("operation %s is not followed: %s", op_id, error.message)
            await self._tell(op_id, "forget")
        finally:
            self._watched.discard(op_id)

    async def _tell_of(self, op_id: str) -> bool:
        """Tell whoever serves it how it stands, where that is news; whether it is over."""
        op = self._runner.history(op_id).operation
        if op.phase in TERMINAL:
            self._forget(op_id)
            await self._tell(op_id, "forget", op)
        elif op.phase == SUSPENDED and op.failure is not None and any(member.is_absent for member in op.workers):
            await self._tell(op_id, "give-up", op)
        return op.phase in TERMINAL

    async def _tell(self, op_id: str, do: str, op: Operation | None = None) -> None:
        """Tell those who serve it, and nobody of another user's who says so."""
        for supervisor in self._supervisors:
            is_its = op is None or op.owner_uid == supervisor.uid
            serves = supervisor.serves(op_id) or (do == "forget" and supervisor.offer.readies == op_id)
            if not is_its or not supervisor.connected or not serves:
                continue
            try:
                if op is None or do == "forget":
                    await supervisor.tell(do, op_id)
                else:
                    why = "" if op.failure is None else f": {op.failure.message}"
                    hint = f"go on with: {go_on_command(op_id)}; or give it up for good: hegmctl cancel {op_id} --drop"
                    await supervisor.tell(do, op_id, message=f"its state is held by operation {op_id}{why}", hint=hint)
            except SupervisorAway as error:
                logger.debug("%s", error.message)

    def _hear(self, news: str, worker: AgentConnection) -> None:
        """Listens to the workers: one may have gone on from a state that is held, its supervisor gone meanwhile."""
        if news == CAME:
            for supervisor in self._supervisors:
                is_its_own = (supervisor.offer.pid, supervisor.uid) == (worker.pid, worker.identity.uid)
                if is_its_own and supervisor.offer.operation is not None:
                    self._note_progress(supervisor.offer.operation)
        if self._tasks is not None and news in (CAME, BACK) and worker.about.restarted is not None:
            self._tasks.start_soon(self._take_in, worker, worker.about.restarted)

    async def _take_in(self, worker: AgentConnection, op_id: str) -> None:
        """Have the operation that waits for somebody to go on from its state go on with that process."""
        try:
            op = self._runner.history(op_id).operation
            absent = [member for member in op.live if member.is_absent]
            if op.phase != SUSPENDED or op.owner_uid != worker.identity.uid or len(absent) != len(list(op.live)):
                return
            there = self._gone_on(op)
            found = [(member, there.get(member.rank) if op.restarts_together else worker) for member in absent]
            to = {
                member.name: one.about.gpu or member.kept_gpu or member.previous_gpu
                for member, one in found
                if one is not None
            }
            places = {name: gpu for name, gpu in to.items() if gpu is not None}
            if absent and len(places) == len(absent):  # of ranks, once the last of them has come
                by = f"process {worker.pid}, which has gone on from its state"
                await self._operations.resume_at(op_id, places, by)
        except HegmError as error:
            logger.warning("operation %s does not take process %d in: %s", op_id, worker.pid, error.message)

    def _gone_on(self, op: Operation) -> dict[int | None, AgentConnection]:
        """Who has gone on from the states of its ranks, by their numbers."""
        return {
            one.about.rank: one
            for one in self._workers
            if one.connected and one.about.restarted == op.id and one.identity.uid == op.owner_uid
        }

    async def _resume(self, supervisor: Supervisor, op_id: str) -> None:
        """Have the operation go on with that supervisor; it is told if that cannot be."""
        try:
            op = self._require_mine(supervisor, op_id)
            asked = RequestContext(
                by=f"its supervisor (pid {supervisor.pid})", may=lambda _: True, emit=_ignored, wait=False
            )
            await self._operations.resume(next(op.live).pid, supervisor.offer.gpu, asked)
        except HegmError as error:
            try:
                await supervisor.tell("give-up", op_id, message=error.message, hint=error.hint)
            except SupervisorAway as away:
                logger.debug("%s", away.message)
            return
        self._look(supervisor)

    def _require_mine(self, supervisor: Supervisor, op_id: str) -> Operation:
        op = self._runner.history(op_id).operation
        if self._supervisors.of_operation(supervisor.uid, op_id) is not supervisor:
            raise Refused(f"another process waits for operation {op_id} already", "see: hegmctl ps")
        return op


async def _ignored(_progress: OperationProgress) -> None:
    """Nobody watches."""
