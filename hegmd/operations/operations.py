"""The requests on operations: takes a snapshot of the node, has a plan made, and has it carried out.

Owns requests on single operations, including those with several steps: a suspend that spills to disk, and the adoption
of an orphaned job. `sequences` has requests with several operations. The caller passes `may`, which is called with each
process's owner; the planner decides what is possible, and the runner does it.

Longer than 400 lines because every request that leads to an operation is here, in the order of the commands.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import anyio
import anyio.to_thread

from hegmd.errors import BAD_REQUEST, BUSY, DENIED, NOT_FOUND, REFUSED, TIMEOUT, HegmError, Refused
from hegmd.memory.pool import Key
from hegmd.migration.machine import events
from hegmd.migration.machine.adoption import adopted, adopted_of_driver
from hegmd.migration.machine.communicators import cannot_meet
from hegmd.migration.machine.describe import busy_message
from hegmd.migration.machine.machine import HOLDING, handle
from hegmd.migration.machine.next_effects import SETTLING, SUSPENDED
from hegmd.migration.machine.operation import (
    MIGRATE,
    QUIESCE,
    RESTART,
    RESUME,
    SUSPEND,
    ImageRequest,
    Limits,
    Operation,
    Respawn,
)
from hegmd.migration.machine.wording import no_such_process
from hegmd.migration.methods import launchers
from hegmd.migration.model import Candidate, MigrationPlan, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.migration.run.runner import Runner
from hegmd.node.inventory import Inventory, NodeSnapshot
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.node.processes.roll import has_ended
from hegmd.operations.orphaned_memory import OrphanedMemory
from hegmd.operations.orphans import ByDriver, ParkedOrphans
from hegmd.operations.request_context import (
    NO_RESTART,
    Emit,
    OperationResult,
    RequestContext,
    Restarting,
    limit_of,
    limits_of,
    plan_or_raise,
    plan_record,
)
from hegmd.operations.survey import May, PlanSurvey
from hegmd.operations.suspended import SuspendedOperations
from hegmd.protocol import operations as protocol
from hegmd.protocol.operations import Reason
from hegmd.protocol.snapshots import GpuProcess, Way
from hegmd.workers.job_names import JobNames
from hegmd.workers.workers import Workers

# After a start of the daemon, agents reconnect one by one. An earlier resume waits this long for them.
SETTLES_WITHIN_S = 5.0

Found = TypeVar("Found")


class Operations:
    """Creates and resumes operations on request."""

    def __init__(  # noqa: PLR0913 - the parts that it asks, each named
        self,
        inventory: Inventory,
        workers: Workers,
        lookout: PlanSurvey,
        runner: Runner,
        *,
        found: OrphanedMemory,
        suspended: SuspendedOperations,
        parked_orphans: ParkedOrphans,
        restart_allowed: Callable[[], bool] = lambda: False,
        jobs: JobNames | None = None,
        max_park_s: float | None = None,
    ) -> None:
        self._max_park_s = Limits().max_park_s if max_park_s is None else max_park_s
        self._restart_allowed = restart_allowed
        self._jobs = jobs
        self._inventory = inventory
        self._workers = workers
        self._lookout = lookout
        self._found = found
        self._suspended = suspended
        self._parked_orphans = parked_orphans
        self.runner = runner
        #: Whether a suspended operation, which was not its user's to resume, is so from now on; sharing sets it.
        self.keep_suspended: Callable[[Operation], bool] = lambda _op: False

    # -- single operations ---------------------------------------------------------------------------------------------

    async def migrate(
        self, pids: Sequence[int], to: str | None, context: RequestContext, restart: Restarting = NO_RESTART
    ) -> OperationResult:
        """Move jobs to another GPU. Raises HegmError with every reason why not."""
        if restart.via not in (None, RESTART):
            raise HegmError(
                BAD_REQUEST, f"there is no method {str(restart.via)[:40]!r}", "omit --via, or write --via restart"
            )
        if to is None and restart.via is None:
            raise HegmError(BAD_REQUEST, "migrate needs a target GPU", "run: hegmctl gpus")
        if restart.via is None and restart.respawn != Respawn():
            hint = "add --via restart"
            raise HegmError(BAD_REQUEST, "only a restart can change a job's environment or Python", hint)
        request = PlanRequest(
            kind=MIGRATE,
            pids=tuple(pids),
            to=to,
            carrier=context.carrier,
            via=restart.via,
            allow_restart=restart.via is not None or restart.allowed or self._restart_allowed(),
            respawn=restart.respawn,
        )
        return await self._perform(request, context)

    async def place(
        self, pids: Sequence[int], placement: Mapping[str, str], context: RequestContext
    ) -> OperationResult:
        """Move jobs so that each of these processes is on the GPU named for its pid. Raises HegmError as `migrate`."""
        return await self._perform(PlanRequest(kind=MIGRATE, pids=tuple(pids), placement=placement), context)

    async def quiesce(self, pids: Sequence[int], hold_s: float | None, context: RequestContext) -> OperationResult:
        """Quiesce jobs at a boundary, to resume automatically after `hold_s`. Raises HegmError like `migrate`."""
        if not pids:
            raise HegmError(BAD_REQUEST, f"{QUIESCE} needs at least one process", "give one or more pids")
        limits = limits_of(context.limit_s, hold_s)
        pids = await self.named(pids)
        snapshot = await self.look(context, pids)
        plan = plan_or_raise(planned(snapshot, PlanRequest(kind=QUIESCE, pids=tuple(pids))))
        return await self.carry_out(plan, snapshot, context, limits=limits)

    async def suspend(
        self, pids: Sequence[int], context: RequestContext, *, spill: bool = False, keep_context: bool = False
    ) -> OperationResult:
        """Take jobs off their GPUs, or only their bytes to disk. Raises HegmError with every reason why not."""
        pids = await self.named(pids)
        known = {op.id: op for pid in pids if (op := self.runner.of_process(pid)) is not None}
        if known and not spill and not context.dry_run and all(op.phase == SUSPENDED for op in known.values()):
            self.check(context, pids)
            kept = [self.keep_suspended(op) for op in known.values()]
            if all(kept):
                return OperationResult(self.runner.describe(next(reversed(known))), None)
        suspended = [self.runner.of_process(pid) for pid in pids] if spill else []
        if suspended and all(op is not None and op.phase == SUSPENDED for op in suspended):
            self.check(context, pids)
            op_ids = list(dict.fromkeys(op.id for op in suspended if op is not None))
            for op_id in op_ids:
                await self._see_spilled(op_id, self._suspended.spill(op_id), context)
            # The failure that left it suspended is not a failure of this request.
            return OperationResult(self.runner.describe(op_ids[-1]).replace(failure=None), None)
        request = PlanRequest(kind=SUSPEND, pids=tuple(pids), carrier=context.carrier, keep_context=keep_context)
        answer = await self._perform(request, context, spill=spill)
        if context.wait and answer.operation is not None and answer.operation.phase == SUSPENDED:
            if spill:
                await self._see_spilled(answer.operation.id, self._suspended.follow(answer.operation.id), context)
            else:
                await self._suspended.wait_a_moment(answer.operation.id)
        return answer

    async def _see_spilled(self, op_id: str, spilling: AsyncIterator[int], context: RequestContext) -> None:
        """Report the progress of a suspended operation's bytes to disk. Raises HegmError if writing fails."""
        size_bytes = self.runner.describe(op_id).size_bytes
        try:
            async for moved_bytes in spilling:
                await context.emit(
                    protocol.OperationProgress(
                        id=op_id, phase="spilling", moved_bytes=moved_bytes, size_bytes=size_bytes
                    )
                )
        except HegmError as error:
            raise HegmError(
                error.code,
                f"operation {op_id} is suspended, and its bytes stay in memory: {error.message}",
                error.hint,
                {**error.facts, "operation": op_id},
            ) from error

    async def resume(self, pid: int, to: str | None, context: RequestContext) -> OperationResult:
        """Resume a suspended job. Raises HegmError with every reason why it cannot be resumed."""
        pid = await self.named_one(pid)
        self.check(context, [pid])
        limit_of(context)
        op = await self.settled(pid, context)
        if op is not None and op.phase == HOLDING:
            return await self._release_held(op, pid, to, context)
        if op is None or op.phase != SUSPENDED:
            raise not_suspended(pid, op, "run: hegmctl ops")
        plan = await self._plan_resume(op, to, may_queue=True)
        if context.dry_run:
            return OperationResult(None, plan_record(plan))
        await self._claim_for(op)
        return await self._resume(op.id, plan, context)

    async def settled(self, pid: int, context: RequestContext) -> Operation | None:
        """The operation that has the process, after it was given time to find its agents: they come one by one."""
        op = self.runner.of_process(pid)
        if op is not None and op.phase == SETTLING.phase:
            with anyio.move_on_after(SETTLES_WITHIN_S):
                await self.follow(op.id, context.emit)
        return self.runner.of_process(pid)

    async def _release_held(self, op: Operation, pid: int, to: str | None, context: RequestContext) -> OperationResult:
        """Resume a quiesced job where it is."""
        for member in op.live:
            _refuse_elsewhere(member.pid, member.gpu, to, is_orphan=False)
        if context.dry_run:
            message = f"process {pid} is quiesced, and resumes where it is"
            raise Refused(message, "omit --dry-run", {"pid": pid})
        await self.runner.ask(op.id, events.ResumeRequested(cause=context.by, to={}))
        if context.wait:
            await self.follow(op.id, context.emit)
        return OperationResult(self.runner.describe(op.id), None)

    async def hand_over(
        self, op: Operation, wish: ImageRequest, plan: MigrationPlan, context: RequestContext
    ) -> OperationResult:
        """Have an image made of a suspended job. Raises HegmError; it is suspended then."""
        limit_s = limit_of(context)
        if context.dry_run:
            return OperationResult(None, plan_record(plan))
        await self._suspended.stop_spilling(op.id)
        try:
            await self.runner.ask(op.id, events.ImageRequested(cause=context.by, handoff=wish, limit_s=limit_s))
        finally:
            self._suspended.start_spilling_when_idle(op.id)
        return await self._outcome(op.id, plan, context)

    async def adopt(self, pid: int, to: str | None, context: RequestContext) -> OperationResult:
        """Make an operation of an orphaned job and resume it. Raises HegmError; then the job stays parked.

        Once the operation exists, a failed resume leaves it suspended, like any other.
        """
        pid = await self.named_one(pid)
        self.check(context, [pid])
        self._refuse_if_taken(pid)
        worker = self._workers.find(pid)
        by_driver = self._parked_orphans.by_driver
        if by_driver is not None and (worker is None or not self._parked_orphans.is_orphan(worker)):
            return await self._adopt_of_driver(by_driver, pid, to, context)
        op = adopted(self.runner.next_id(), await self._parked_orphans.job_of(pid), utc=time.time())
        for member in op.workers:
            _refuse_elsewhere(member.pid, member.gpu, to)
        plan = await self._plan_resume(op, to)
        if context.dry_run:
            return OperationResult(None, plan_record(plan))
        return await self._begin_adopted(op, plan, context)

    async def _adopt_of_driver(
        self, orphans: ByDriver, pid: int, to: str | None, context: RequestContext
    ) -> OperationResult:
        """Adopt a process that the driver has locked, and unlock it, or checkpointed, and restore it where it was."""
        driven = await orphans.inspect(pid)
        self._check_owner(context, driven.uid, f"process {pid}")  # it may be listed nowhere
        if driven.state == "running":
            raise Refused(f"process {pid} is not parked: there is nothing to adopt", "run: hegmctl ps", {"pid": pid})
        _refuse_elsewhere(pid, driven.gpu, to)
        op = adopted_of_driver(self.runner.next_id(), driven, utc=time.time())
        there = Candidate(
            pid=pid, start_ticks=driven.start_ticks, uid=driven.uid, name=driven.name, gpus=(), vram_bytes=None
        )
        plan = await self._plan_resume(op, to, there)
        return (
            OperationResult(None, plan_record(plan))
            if context.dry_run
            else await self._begin_adopted(op, plan, context)
        )

    async def _begin_adopted(self, op: Operation, plan: MigrationPlan, context: RequestContext) -> OperationResult:
        for worker in op.workers:  # nothing is awaited from here to the beginning
            self._refuse_if_taken(worker.pid)
        op = op.replace(id=self.runner.next_id())
        await self.runner.begin(op)
        await self._claim_for(op)
        return await self._resume(op.id, plan, context)

    async def resume_by_plan(self, op: Operation, plan: MigrationPlan, context: RequestContext) -> OperationResult:
        """Have a suspended operation resumed by a plan that was made before it began. Raises HegmError."""
        return await self._resume(op.id, plan, context)

    async def _plan_resume(
        self, op: Operation, to: str | None, *unlisted: Candidate, may_queue: bool = False
    ) -> MigrationPlan:
        pids = tuple([worker.pid for worker in op.live])
        request = PlanRequest(kind=RESUME, pids=pids, to=to, may_queue=may_queue)

        async def look() -> NodeSnapshotForPlan:
            snapshot = await self._lookout.snapshot([], leases_of=pids)
            listed = {candidate.pid for candidate in snapshot.candidates}
            also = [candidate for candidate in unlisted if candidate.pid not in listed]
            return snapshot.replace(candidates=(*snapshot.candidates, *also))

        found, _ = await self.plan(look, lambda snapshot: planned_resume(snapshot, request, op))
        return plan_or_raise(found)

    async def plan(
        self,
        look: Callable[[], Awaitable[NodeSnapshotForPlan]],
        make: Callable[[NodeSnapshotForPlan], Found],
        node: NodeSnapshotForPlan | None = None,
    ) -> tuple[Found, NodeSnapshotForPlan]:
        """Return the plans or reasons that `make` finds, and the state of the node that it found them in.

        A job's snapshot takes free memory of its GPU for seconds. So what is refused for a GPU is planned again once
        the snapshots there have ended. `node` is the state at the first attempt, if the caller has it.
        """
        node = node or await look()
        found = make(node)
        if await self._workers.wait_for_snapshots(set(_refused_gpus(found))):
            node = await look()
            found = make(node)
        return found, node

    async def _resume(self, op_id: str, plan: MigrationPlan, context: RequestContext) -> OperationResult:
        limit_s = limit_of(context)
        op = self.runner.history(op_id).operation
        names = {str(member.pid): member.name for member in op.workers}  # a restarted process keeps its name
        to = {names.get(pid, pid): gpu for pid, gpu in plan.destinations.items()}
        # Only the script decides when its block ends, so a lent job is not suspended again at a limit.
        await self.resume_at(op_id, to, context.by, None if op.lent else limit_s)
        with anyio.move_on_after(limit_s if op.lent else None):
            return await self._outcome(op_id, plan, context)
        message = f"the script of process {op.workers[0].pid} did not leave its hegm.released() block in time"
        raise HegmError(TIMEOUT, message, f"the job resumes at the end of the block; see: hegmctl op {op_id}")

    async def resume_at(self, op_id: str, to: Mapping[str, str], by: str, limit_s: float | None = None) -> None:
        """Have a suspended operation resumed, each worker by its name at that GPU. Raises HegmError."""
        await self._suspended.stop_spilling(op_id)
        try:
            await self.runner.ask(op_id, events.ResumeRequested(cause=by, to=to, limit_s=limit_s))
        finally:
            self._suspended.start_spilling_when_idle(op_id)

    async def named(self, pids: Sequence[int]) -> tuple[int, ...]:
        """Return the pids, with launchers of a job replaced by its processes that train."""
        found: dict[int, None] = {}
        latest = self._inventory.latest
        listed = {process.pid for process in latest.processes if process.gpus} if latest is not None else set[int]()
        for pid in pids:
            is_itself = self._jobs is None or pid in listed or self.runner.of_process(pid) is not None
            job = () if is_itself or self._jobs is None else await self._jobs.processes_of(pid)
            found.update(dict.fromkeys(job or (pid,)))
        return tuple(found)

    async def named_one(self, pid: int) -> int:
        """Return the named process: of a named job, its first."""
        return (await self.named([pid]))[0]

    async def _claim_for(self, op: Operation) -> None:
        """Give an operation the bytes that were found of its workers and that it has not. Raises HegmError."""
        for member in op.live:
            key, worker = Key(op.id, member.name), self._workers.find(member.pid)
            if worker is not None and worker.held_bytes and not self._found.has(worker, key):
                await self._found.claim(worker, key)

    async def _perform(self, request: PlanRequest, context: RequestContext, *, spill: bool = False) -> OperationResult:
        if not request.pids:
            raise HegmError(BAD_REQUEST, f"{request.kind} needs at least one process", "give one or more pids")
        request = request.replace(pids=await self.named(request.pids))
        within_s = limits_of(context.limit_s).park_s if request.allow_restart else None
        found, snapshot = await self.plan(
            lambda: self.look(context, request.pids, weighed_within_s=within_s, respawn=request.respawn),
            lambda snapshot: planned(snapshot, request),
        )
        return await self.carry_out(plan_or_raise(found), snapshot, context, spill=spill)

    async def carry_out(
        self,
        plan: MigrationPlan,
        snapshot: NodeSnapshotForPlan,
        context: RequestContext,
        *,
        spill: bool = False,
        handoff: ImageRequest | None = None,
        limits: Limits | None = None,
        swaps_to: str | None = None,
        swaps_with: tuple[int, ...] = (),
    ) -> OperationResult:
        """Have a plan of anything but a resume carried out that was just made from that snapshot."""
        self.check(context, [worker.pid for worker in plan.workers])
        owners = {candidate.pid: candidate.uid for candidate in snapshot.candidates}
        for worker in plan.workers:  # it may no longer be listed
            self._check_owner(context, owners.get(worker.pid), f"process {worker.pid}")
        if context.dry_run:
            return OperationResult(None, plan_record(plan))
        limits = (limits or limits_of(context.limit_s)).replace(max_park_s=self._max_park_s)
        chips = {gpu.id: gpu.chip for gpu in snapshot.gpus}
        holder = None if plan.kind == QUIESCE else self._holder(plan.workers[0].pid)
        for worker in plan.workers:  # another request may have come first since the snapshot; nothing is awaited below
            self._refuse_if_taken(worker.pid, but_for=holder)
        op_id = self.runner.next_id() if holder is None else holder.id
        op = plan.operation(op_id, snapshot.candidates, chips, limits=limits, utc=time.time())
        op = op.replace(spill=spill, image=handoff, lent=context.lent, swaps_to=swaps_to, swaps_with=swaps_with)
        if holder is None:
            await self.runner.begin(op)
        else:
            await self.runner.ask(op_id, events.Repurposed(cause=context.by, into=op))
        self._suspended.start_spilling_when_idle(op_id)
        return await self._outcome(op_id, plan, context)

    def _holder(self, pid: int) -> Operation | None:
        """The operation that holds that process at a boundary for whatever is wanted next."""
        op = self.runner.of_process(pid)
        return op if op is not None and op.phase == HOLDING else None

    def _refuse_if_taken(self, pid: int, but_for: Operation | None = None) -> None:
        op = self.runner.of_process(pid)
        if op is not None and (but_for is None or op.id != but_for.id):
            raise HegmError(BUSY, *busy_message(op, pid), {"pid": pid, "operation": op.id})

    async def _outcome(self, op_id: str, plan: MigrationPlan, context: RequestContext) -> OperationResult:
        if context.wait:
            await self.follow(op_id, context.emit)
        return OperationResult(self.runner.describe(op_id), plan_record(plan))

    async def follow(self, op_id: str, emit: Emit) -> None:
        """Report an operation's progress until it has ended or its job is suspended."""
        async for progress in self.runner.follow(op_id):
            await emit(progress)

    async def cancel(self, op_id: str, context: RequestContext) -> protocol.Operation:
        """Have an operation turned back. Raises HegmError."""
        op = self.runner.history(op_id).operation
        self._check_owner(context, op.owner_uid, f"operation {op_id}")
        await self.runner.ask(op_id, events.CancelRequested(cause="request", by=context.by))
        return self.runner.describe(op_id)

    async def drop(self, op_id: str, context: RequestContext) -> protocol.Operation:
        """Permanently discard the state that an operation holds for a process that has ended, or end ranks that could
        not connect again: only their owner knows whether they still can. Raises HegmError.
        """
        op = self.runner.history(op_id).operation
        self._check_owner(context, op.owner_uid, f"operation {op_id}")
        if cannot_meet(op):
            return await self._end_ranks(op)
        event = events.DropRequested(cause="request", by=context.by)
        handle(op, event, time.monotonic())  # a refusal changes nothing
        await self._suspended.stop_spilling(op_id)
        try:
            await self.runner.ask(op_id, event)
        finally:
            self._suspended.start_spilling_when_idle(op_id)
        async for _ in self.runner.follow(op_id):
            pass
        return self.runner.describe(op_id)

    async def _end_ranks(self, op: Operation) -> protocol.Operation:
        """Kill the processes of an operation, and wait until it has ended: their bytes are freed then."""
        for member in op.live:
            await anyio.to_thread.run_sync(launchers.end_one, member.pid, member.start_ticks)
        while self.runner.find(op.id) is not None:
            await self.runner.changed(op.id)
        return self.runner.describe(op.id)

    # -- who may -------------------------------------------------------------------------------------------------------

    async def ways(
        self, node: NodeSnapshot, processes: Sequence[GpuProcess], may: May
    ) -> Mapping[int, tuple[Way, ...]]:
        """In which ways each of those processes could be moved, by pid, as operations on them would be judged."""
        return await self._lookout.ways(node, processes, may)

    async def look(
        self,
        context: RequestContext,
        pids: Sequence[int],
        *,
        weighed_within_s: float | None = None,
        respawn: Respawn | None = None,
    ) -> NodeSnapshotForPlan:
        """Return a snapshot of the node to plan with. Raises DENIED if the caller may not act on one of the processes.

        A process that was unknown before may be known afterwards; then its owner is checked too.
        """
        self.check(context, pids)
        snapshot = await self._lookout.snapshot(
            pids, may=context.may, weighed_within_s=weighed_within_s, respawn=respawn
        )
        self.check(context, pids)
        return snapshot

    def check(self, context: RequestContext, pids: Iterable[int]) -> None:
        """Check that the caller may act on those processes, and on the operations that have them. Raises DENIED.

        A process may be known only through its operation: off its GPU, with a disconnected agent, or ended for a
        restart.
        """
        latest = self._inventory.latest
        # A process that has exited has no owner, and cannot be changed.
        listed = latest.processes if latest is not None else ()
        owners = {process.pid: process.uid for process in listed if not has_ended(process)}
        for pid in pids:
            worker = self._workers.find(pid)
            if worker is not None:
                self._check_owner(context, worker.identity.uid, f"process {pid}")
            elif pid in owners:
                self._check_owner(context, owners[pid], f"process {pid}")
            op = self.runner.of_process(pid)
            if op is not None:
                self._check_owner(context, op.owner_uid, f"operation {op.id}")

    def _check_owner(self, context: RequestContext, uid: int | None, what: str) -> None:
        if not context.may(uid):
            owner = "an unknown user" if uid is None else f"uid {uid}"
            raise HegmError(
                DENIED, f"{what} belongs to {owner}", "ask its owner, or an administrator of hegmd", {"uid": uid}
            )


def not_suspended(pid: int, op: Operation | None, hint: str) -> HegmError:
    """Why a process cannot be resumed: it does not exist, is in no operation, or in one of another phase."""
    if op is None and start_ticks_of(pid) is None:
        return HegmError(NOT_FOUND, *no_such_process(pid), {"pid": pid})
    if op is not None:
        state, code = f"is not suspended: operation {op.id} has it, which is {op.phase}", REFUSED
    else:
        state, code = "is not suspended: no operation includes it", NOT_FOUND
    return HegmError(code, f"process {pid} {state}", hint, {"pid": pid})


def _refuse_elsewhere(pid: int, gpu: str | None, to: str | None, *, is_orphan: bool = True) -> None:
    """Refuse another GPU for a process that can only resume where it is."""
    if to is not None and gpu not in {None, to}:
        first = f"hegmctl adopt {pid}; then: " if is_orphan else ""  # a quiesced job is moved while it is parked
        raise Refused(
            f"process {pid} is on {gpu}, and can only resume there",
            f"run: {first}hegmctl migrate {pid} --to {to}",
            {"pid": pid},
        )


def _refused_gpus(found: object) -> Iterator[str]:
    """Yield the GPUs of all reasons in what a planner found."""
    if isinstance(found, Reason) and found.gpu is not None:
        yield found.gpu
    for part in cast("tuple[object, ...]", found) if isinstance(found, tuple) else ():
        yield from _refused_gpus(part)
