"""Supervisors and the operations that they serve: which are connected, which restart a saved state, and which messages
each gets.

An operation that restarts a job tells its supervisor itself what to expect and when to start; this module does the
rest. When the operation has ended, the supervisor gets the message to forget it, and if the job could not be started
again, to give up while the state is kept. A supervisor that missed a message, because the connection or the daemon was
down, gets it when it reconnects. So does one with a process prestarted for an operation that has ended.

A new supervisor of the same user can continue from a saved state (`hegmctl run --resume`). This is an ordinary resume
of the operation, which has one supervisor at a time.
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
from hegmd.protocol.names import job_number
from hegmd.protocol.operations import IMPORTING, LOADING, READIED, OperationProgress
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.workers.supervisors import Send, Supervisor, SupervisorAway, Supervisors, go_on_command
from hegmd.workers.workers import BACK, CAME, AgentConnection, Workers

logger = logging.getLogger(__name__)


class Restarts(BackgroundTasks):
    """Serves the supervisors. `run` must be running while they are connected.

    `forget` is called with operations whose state is no longer needed. `is_over` says whether a successor has finished
    its training, according to its supervisor's record; it blocks briefly. `require_kept` raises HegmError unless that
    user may continue from the kept state of that job in that process.
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
        require_kept: Callable[[str, int, int], object],
    ) -> None:
        super().__init__()
        self._forget = forget
        self._is_over = is_over
        self._require_kept = require_kept
        self._supervisors = supervisors
        self._workers = workers
        self._runner = runner
        self._operations = operations
        self._watched: set[str] = set()
        supervisors.listen(self._look)
        workers.listen(self._on_worker_event)

    def _on_start(self) -> None:
        """Follow the operations that an earlier daemon started."""
        for op in self._runner.under_way():
            if self._tasks is not None and any(member.restarts for member in op.live):
                self._tasks.start_soon(self._look_for_end, op.id)
                self._watched.add(op.id)
                self._tasks.start_soon(self._watch, op.id)

    async def attend(self, key: object, pid: int, uid: int, offer: Supervise, send: Send) -> None:
        """Register a supervisor until it disconnects. Raises HegmError if its request is not allowed."""
        if offer.resumes is not None and _is_recovery(offer.resumes):
            self._require_kept(offer.resumes, uid, pid)
        elif offer.resumes is not None:
            self._require_held(offer.resumes, uid)
        await self._supervisors.attend(key, pid, uid, offer, send)

    def report(self, key: object, report: SuperviseReport) -> None:
        """Take what a supervisor reports."""
        self._supervisors.report(key, report)

    def _require_held(self, op_id: str, uid: int) -> Operation:
        """Return the operation with a saved state that this user may continue from. Raises HegmError."""
        op = self._runner.history(op_id).operation
        if op.owner_uid != uid:
            hint = "run the command as that user: only the owner may use a saved state"
            raise HegmError(DENIED, f"the job of operation {op_id} belongs to uid {op.owner_uid}", hint)
        if op.phase != SUSPENDED or not any(member.is_absent for member in op.workers):
            hint = "run: hegmctl ops; one with a saved state is suspended and its process has exited"
            raise Refused(f"operation {op_id} is {op.phase}, and keeps no saved state", hint)
        serving = self._supervisors.of_operation(uid, op_id)
        if serving is not None and serving.connected:
            message = f"process {serving.pid} waits for operation {op_id} already"
            raise Refused(message, f"hegmctl resume {next(op.live).pid} resumes it there")
        return op

    # -- messages to supervisors ---------------------------------------------------------------------------------------

    def _look(self, supervisor: Supervisor) -> None:
        """Watch the operation that a connected supervisor waits for. Called from the event loop; must not wait."""
        op_id, readies = supervisor.offer.operation, supervisor.offer.readies
        if self._tasks is None:
            return
        if readies is not None and readies not in self._watched:
            self._watched.add(readies)  # it came with one: of an earlier daemon's, maybe, that is over
            self._tasks.start_soon(self._watch, readies)
        if op_id is None or _is_recovery(op_id):
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
            self._tasks.start_soon(self._send_state, op_id)

    def _note_progress(self, op_id: str) -> None:
        """Report the progress of the operation's successor."""
        op = self._runner.find(op_id)
        absent = [] if op is None else [member for member in op.live if member.is_absent]
        supervisor = None if op is None else self._supervisors.of_operation(op.owner_uid, op_id)
        if self._tasks is None or not absent or supervisor is None or not supervisor.offer.started:
            return
        attends = supervisor.offer.pid is not None and self._workers.find(supervisor.offer.pid) is not None
        doing = LOADING if attends else READIED if supervisor.was_ready else IMPORTING
        if absent[0].successor_activity != doing:
            self._tasks.start_soon(
                self._ask, op_id, events.SuccessorProgress(worker=absent[0].name, doing=doing, cause="the start")
            )

    async def _ask(self, op_id: str, event: events.Event) -> None:
        try:
            await self._runner.ask(op_id, event)
        except HegmError as error:
            logger.debug("operation %s: %s", op_id, error.message)

    async def _look_for_end(self, op_id: str) -> None:
        """Report to the operation that its successor has finished its training, if it has."""
        try:
            op = self._runner.history(op_id).operation
            restarting = [member for member in op.live if member.restarts and member.state_saved]
            if op.phase not in TERMINAL and restarting and await anyio.to_thread.run_sync(self._is_over, op_id):
                await self._ask(op_id, events.TrainingEnded(worker=restarting[0].name, cause="its supervisor"))
        except HegmError as error:
            logger.debug("operation %s: %s", op_id, error.message)

    async def _watch(self, op_id: str) -> None:
        """Follow an operation, and notify its supervisor when it ends or its job is suspended."""
        try:
            while not await self._send_state(op_id):
                await self._runner.changed(op_id)
                async for _ in self._runner.follow(op_id):
                    pass
        except HegmError as error:  # the operation no longer exists
            logger.debug("operation %s cannot be followed: %s", op_id, error.message)
            await self._tell(op_id, "forget")
        finally:
            self._watched.discard(op_id)

    async def _send_state(self, op_id: str) -> bool:
        """Send the operation's state to its supervisor, if it changed. Return True if the operation has ended."""
        op = self._runner.history(op_id).operation
        if op.phase in TERMINAL:
            self._forget(op_id)
            await self._tell(op_id, "forget", op)
        elif op.phase == SUSPENDED and op.failure is not None and any(member.is_absent for member in op.workers):
            await self._tell(op_id, "give-up", op)
        return op.phase in TERMINAL

    async def _tell(self, op_id: str, do: str, op: Operation | None = None) -> None:
        """Tell the supervisors that serve the operation, except those of other users that claim to."""
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
                    hint = f"continue with: {go_on_command(op_id)}; or discard it: hegmctl cancel {op_id} --drop"
                    await supervisor.tell(do, op_id, message=f"operation {op_id} keeps its state{why}", hint=hint)
            except SupervisorAway as error:
                logger.debug("%s", error.message)

    def _on_worker_event(self, event: str, worker: AgentConnection) -> None:
        """Handle news of the workers: one may have continued from a saved state after its supervisor exited."""
        if event == CAME:
            for supervisor in self._supervisors:
                is_its_own = (supervisor.offer.pid, supervisor.uid) == (worker.pid, worker.identity.uid)
                if is_its_own and supervisor.offer.operation is not None:
                    self._note_progress(supervisor.offer.operation)
        restarted = worker.about.restarted
        if self._tasks is not None and event in (CAME, BACK) and restarted is not None and not _is_recovery(restarted):
            self._tasks.start_soon(self._take_in, worker, restarted)

    async def _take_in(self, worker: AgentConnection, op_id: str) -> None:
        """Resume an operation that waits for a successor with that process."""
        try:
            op = self._runner.history(op_id).operation
            absent = [member for member in op.live if member.is_absent]
            if op.phase != SUSPENDED or op.owner_uid != worker.identity.uid or len(absent) != len(list(op.live)):
                return
            there = self._successors(op)
            found = [(member, there.get(member.rank) if op.restarts_together else worker) for member in absent]
            to = {
                member.name: one.about.gpu or member.kept_gpu or member.previous_gpu
                for member, one in found
                if one is not None
            }
            places = {name: gpu for name, gpu in to.items() if gpu is not None}
            if absent and len(places) == len(absent):  # for ranks, once the last one has connected
                by = f"process {worker.pid}, which continues from its saved state"
                await self._operations.resume_at(op_id, places, by)
        except HegmError as error:
            logger.warning("operation %s does not accept process %d: %s", op_id, worker.pid, error.message)

    def _successors(self, op: Operation) -> dict[int | None, AgentConnection]:
        """Return the processes that continue from the states of its ranks, by rank."""
        return {
            one.about.rank: one
            for one in self._workers
            if one.connected and one.about.restarted == op.id and one.identity.uid == op.owner_uid
        }

    async def _resume(self, supervisor: Supervisor, op_id: str) -> None:
        """Resume the operation with that supervisor, and notify the supervisor if that fails."""
        try:
            op = self._require_mine(supervisor, op_id)
            context = RequestContext(
                by=f"its supervisor (pid {supervisor.pid})", may=lambda _: True, emit=_ignored, wait=False
            )
            await self._operations.resume(next(op.live).pid, supervisor.offer.gpu, context)
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
            raise Refused(f"another process waits for operation {op_id} already", "run: hegmctl ps")
        return op


def _is_recovery(name: str | None) -> bool:
    """Whether a start is from a snapshot: then it names the job, and no operation."""
    return name is not None and job_number(name) is not None


async def _ignored(_progress: OperationProgress) -> None:
    """Discard progress: no client follows."""
