"""The handlers of requests about operations: translate between messages and `operations`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from hegmd.errors import HegmError
from hegmd.node.inventory import Inventory
from hegmd.operations.image_requests import Checkpoints, RestoreRequest
from hegmd.operations.job_requests import JobRequests
from hegmd.operations.lending import Lending
from hegmd.operations.operations import Operations
from hegmd.operations.orphans import Orphans
from hegmd.operations.request_context import OperationResult, RequestContext, Restarting
from hegmd.operations.sequences import MultiStepOperations, Outcome
from hegmd.operations.survey import May
from hegmd.protocol import messages as m
from hegmd.protocol.names import place_named
from hegmd.protocol.operations import OperationProgress, StoryLine
from hegmd.protocol.record import Record, as_list, as_map
from hegmd.server.auth import Policy
from hegmd.server.dispatch import Handler
from hegmd.server.session import Call
from hegmd.sharing.resumes import QueuedResumes
from hegmd.system.programs import Rights
from hegmd.workers.workers import Workers

# How long a caller waits for an inspection; after that it gets what is already known.
OPERATIONS_S = 1.0
ORPHANS_S = 20.0


class OperationHandlers:
    """A method per message."""

    def __init__(  # noqa: PLR0913 - the parts that it asks, each named
        self,
        policy: Policy,
        operations: Operations,
        sequences: MultiStepOperations,
        checkpoints: Checkpoints,
        orphans: Orphans,
        jobs: JobRequests,
        inventory: Inventory,
        workers: Workers,
        queued_resumes: QueuedResumes,
    ) -> None:
        self._jobs = jobs
        self._inventory = inventory
        self._checkpoints = checkpoints
        self._policy = policy
        self._operations = operations
        self._lending = Lending(operations, workers, queue=queued_resumes.enter)
        self._sequences = sequences
        self._queued_resumes = queued_resumes
        self._orphans = orphans

    def table(self) -> Mapping[type[m.Request], Handler]:
        handlers: dict[type[m.Request], Handler] = {
            m.Migrate: self.migrate,
            m.Quiesce: self.quiesce,
            m.Suspend: self.suspend,
            m.Resume: self.resume,
            m.Checkpoint: self.checkpoint,
            m.Handoff: self.handoff,
            m.Restore: self.restore,
            m.Drain: self.drain,
            m.Swap: self.swap,
            m.Operations: self.operations,
            m.Story: self.story,
            m.CancelOperation: self.cancel,
            m.Orphans: self.orphans,
            m.Adopt: self.adopt,
            m.DropOrphan: self.drop_orphan,
            m.AgentLend: self.lend,
            m.AgentReclaim: self.reclaim,
        }
        return {request: self._with_names(handler) for request, handler in handlers.items()}

    def _with_names(self, handler: Handler) -> Handler:
        """Return the handler, which names jobs instead of processes in the hints of its errors."""

        async def handle(call: Call, request: m.Request) -> Record:
            try:
                return await handler(call, request)
            except HegmError as error:
                may = self._may(call)
                error.hint = self._jobs.by_name(error.hint, may)
                reasons = [as_map(reason) or {} for reason in as_list(error.facts.get("reasons")) or ()]
                for reason in reasons:
                    if "hint" in reason:
                        reason["hint"] = self._jobs.by_name(str(reason["hint"]), may)
                if reasons:
                    error.facts["reasons"] = reasons
                raise

        return handle

    async def migrate(self, call: Call, request: m.Migrate) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        context = replace(context, carrier=request.carrier)
        restart = Restarting(request.via, request.allow_restart, request.set, request.unset, request.python)
        pids, to = await self._jobs.pids(request.pids, context.may), await self._place(request.to)
        return self._reply(await self._operations.migrate(pids, to, context, restart), call)

    async def quiesce(self, call: Call, request: m.Quiesce) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        pids = await self._jobs.pids(request.pids, context.may)
        return self._reply(await self._operations.quiesce(pids, request.hold_s, context), call)

    async def suspend(self, call: Call, request: m.Suspend) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        context = replace(context, carrier=request.carrier)
        pids, keep_context = await self._jobs.pids(request.pids, context.may), request.keep_context
        answer = await self._operations.suspend(pids, context, spill=request.spill, keep_context=keep_context)
        return self._reply(answer, call)

    async def resume(self, call: Call, request: m.Resume) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        to = await self._place(request.to)
        if (job := await self._queued_resumes.failed(request.pid, context.may)) is not None:
            await self._queued_resumes.start_failed(job, to, context)
            return m.OperationReply(recovered=job.id)
        pid = await self._jobs.pid(request.pid, context.may)
        resume = self._queued_resumes.resume if request.queue else self._operations.resume
        return self._reply(await resume(pid, to, context), call)

    async def checkpoint(self, call: Call, request: m.Checkpoint) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        context = replace(context, carrier=request.carrier)
        pid, rights = await self._jobs.pid(request.pid, context.may), _rights(call)
        answer = await self._checkpoints.checkpoint(
            pid, request.path, rights, context, leave_running=request.leave_running
        )
        return self._reply(answer, call)

    async def handoff(self, call: Call, request: m.Handoff) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        pid = await self._jobs.pid(request.pid, context.may)
        return self._reply(await self._checkpoints.handoff(pid, request.path, _rights(call), context), call)

    async def restore(self, call: Call, request: m.Restore) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        outlets, fds = request.outlets, tuple(call.fds.view())
        to = await self._place(request.to)
        wish = RestoreRequest(request.path, to, as_then=request.as_then, outlets=outlets, fds=fds)
        return self._reply(await self._checkpoints.restore(wish, _rights(call), context), call)

    async def drain(self, call: Call, request: m.Drain) -> m.Drained:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        gpu, *to = [str(await self._place(name)) for name in (request.gpu, *request.to)]
        return self._drained(await self._sequences.drain(gpu, tuple(to), context), call)

    async def swap(self, call: Call, request: m.Swap) -> m.Drained:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run, limit_s=request.limit_s)
        first, second = [await self._jobs.pid(one, context.may) for one in (request.first, request.second)]
        return self._drained(await self._sequences.swap(first, second, context), call)

    async def operations(self, call: Call, _: m.Operations) -> m.OperationsReply:
        await self._orphans.search(thorough=False, within_s=OPERATIONS_S)
        runner = self._operations.runner
        known = [self._jobs.with_job(runner.describe(op.id)) for op in runner.operations()]
        operations = tuple([self._policy.visible_operation(call.peer, operation) for operation in known])
        return m.OperationsReply(operations=operations, orphans=self._orphans.all())

    async def story(self, call: Call, request: m.Story) -> m.StoryReply:
        runner, policy, peer = self._operations.runner, self._policy, call.peer
        owner_uid = runner.history(request.id).operation.owner_uid

        async def emit(progress: OperationProgress) -> None:
            await call.emit(policy.visible_progress(peer, owner_uid, progress))

        if request.follow:
            await self._operations.follow(request.id, emit)
        history = runner.history(request.id)
        lines = [StoryLine.from_plain(line.to_plain(), "story") for line in history.story]
        return m.StoryReply(
            operation=policy.visible_operation(peer, self._jobs.with_job(runner.describe(request.id))),
            story=policy.visible_story(peer, owner_uid, lines),
            untold=history.untold,
        )

    async def cancel(self, call: Call, request: m.CancelOperation) -> m.OperationReply:
        ask = self._operations.drop if request.drop else self._operations.cancel
        return m.OperationReply(operation=self._jobs.with_job(await ask(request.id, self._context(call))))

    async def orphans(self, call: Call, _: m.Orphans) -> m.OrphansReply:
        await self._orphans.search(thorough=True, within_s=ORPHANS_S)
        return m.OrphansReply(orphans=self._orphans.all())

    async def adopt(self, call: Call, request: m.Adopt) -> m.OperationReply:
        context = self._context(call, wait=request.wait, dry_run=request.dry_run)
        pid, to = await self._jobs.pid(request.pid, context.may), await self._place(request.to)
        return self._reply(await self._operations.adopt(pid, to, context), call)

    async def drop_orphan(self, call: Call, request: m.DropOrphan) -> m.Dropped:
        freed_bytes = await self._orphans.drop(request.name, self._context(call).may)
        return m.Dropped(name=request.name, size_bytes=freed_bytes)

    async def lend(self, call: Call, _: m.AgentLend) -> m.Lent:
        return m.Lent(operation=await self._lending.lend(call.peer.pid, self._without_progress(call)))

    async def reclaim(self, call: Call, _: m.AgentReclaim) -> m.Reclaimed:
        await self._lending.reclaim(call.peer.pid, self._without_progress(call))
        return m.Reclaimed()

    def _without_progress(self, call: Call) -> RequestContext:
        """Return the context of a request that has no progress reports."""

        async def ignore_progress(_progress: OperationProgress) -> None:
            pass

        return replace(self._context(call), emit=ignore_progress)

    def _reply(self, answer: OperationResult, call: Call) -> m.OperationReply:
        operation, plan = answer.operation, answer.plan
        return m.OperationReply(
            operation=None if operation is None else self._jobs.with_job(operation),
            plan=None if plan is None else self._jobs.plan_with_jobs(plan, self._may(call)),
        )

    def _drained(self, outcome: Outcome, call: Call) -> m.Drained:
        may = self._may(call)
        return m.Drained(
            operations=tuple([self._jobs.with_job(operation) for operation in outcome.operations]),
            plans=tuple([self._jobs.plan_with_jobs(plan, may) for plan in outcome.plans]),
            left=tuple([reason.replace(hint=self._jobs.by_name(reason.hint, may)) for reason in outcome.left]),
        )

    def _may(self, call: Call) -> May:
        """Return whether the caller may act on processes of a user."""
        return partial(self._policy.may_act_on, call.peer)

    async def _place(self, text: str | None) -> str | None:
        """Return a target with the ids of its GPUs, however they were named."""
        if text is None:
            return None
        snapshot = self._inventory.latest or await self._inventory.fresh(0.0)
        return place_named(text, snapshot.gpus)

    def _context(
        self, call: Call, *, wait: bool = True, dry_run: bool = False, limit_s: float | None = None
    ) -> RequestContext:
        may = self._may(call)

        async def emit(progress: OperationProgress) -> None:
            waits = progress.waits
            if waits is not None:
                progress = progress.replace(waits=waits.replace(next=self._jobs.by_name(waits.next, may)))
            await call.emit(progress)

        by = f"uid {call.peer.uid} (pid {call.peer.pid})"
        return RequestContext(by=by, may=may, emit=emit, wait=wait, dry_run=dry_run, limit_s=limit_s)


def _rights(call: Call) -> Rights:
    """Return the caller's credentials from the kernel, with which images are written and read."""
    peer = call.peer
    return Rights(peer.uid, peer.gid, tuple(sorted(peer.groups)))
