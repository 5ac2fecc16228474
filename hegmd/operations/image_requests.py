"""The requests about images: writing an image of a job, and restoring a job from one.

Decides who may ask: the owner of all its processes, or root, because an image contains their memory, to which an
administrator of hegmd has no other right. Reports all reasons against a request before anything is done, and makes an
operation of a restored job. `dump_job` and `restore_job` do the work.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import NamedTuple

import anyio

from hegmd.errors import BAD_REQUEST, CANCELLED, DENIED, INTERNAL, REFUSED, TIMEOUT, HegmError, Refused
from hegmd.images.dump_job import InspectedTree, JobDumper
from hegmd.images.files.catalogue import size_of
from hegmd.images.files.open_image import Image
from hegmd.images.manifests import needs_in, unrevived
from hegmd.images.output_redirection import lost_streams, named_streams, redirected_streams
from hegmd.images.restore_checks import GrownFile
from hegmd.images.restore_job import JobRestorer
from hegmd.migration.machine import communicators
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import CHECKPOINT, RESUME, Failure, Operation
from hegmd.migration.machine.operation import ImageRequest as Wish
from hegmd.migration.model import MigrationPlan, NodeSnapshotForPlan, PlanRequest
from hegmd.migration.plan import keep_context_rules
from hegmd.migration.plan.estimate import from_image, with_image
from hegmd.migration.plan.planner import planned, planned_resume
from hegmd.migration.plan.throughput import IN, Throughputs
from hegmd.operations.operations import Operations, not_suspended
from hegmd.operations.request_context import (
    Emit,
    OperationResult,
    RequestContext,
    limit_of,
    plan_or_raise,
    plan_record,
    refusal,
)
from hegmd.operations.survey import PlanSurvey
from hegmd.protocol.operations import BY_DRIVER, OperationProgress, PlannedProcess, Reason
from hegmd.system.programs import Rights

# The least time for the resume after a restore that used nearly all of its limit: its bytes are in the pool by then.
MIN_LEFT_S = 1.0


class RestoreRequest(NamedTuple):
    """A requested restore: the image, the target, whether append-only files must have their former length, and the
    descriptors that its named streams are redirected to.
    """

    path: str
    to: str | None = None
    as_then: bool = False
    outlets: tuple[str, ...] = ()
    fds: tuple[int, ...] = ()


class Checkpoints:
    """The requests about images of jobs."""

    def __init__(
        self, operations: Operations, lookout: PlanSurvey, handoff: JobDumper, reviving: JobRestorer, paces: Throughputs
    ) -> None:
        self._operations = operations
        self._lookout = lookout
        self._handoff = handoff
        self._reviving = reviving
        self._paces = paces
        # Two of one user's images may want one pool and one number. Others do not wait for them: a user can stop what
        # works with that user's rights, CRIU too; then it is the pool, and CRIU, that refuse the later one.
        self._restoring: dict[int, anyio.Lock] = {}

    async def checkpoint(
        self, pid: int, path: str, rights: Rights, context: RequestContext, *, leave_running: bool = False
    ) -> OperationResult:
        """Write an image of a job, then end the job or let it train on. Raises HegmError with every reason."""
        _require_absolute(path)
        pid = await self._operations.named_one(pid)
        snapshot = await self._operations.look(context, [pid])
        plan = plan_or_raise(planned(snapshot, PlanRequest(kind=CHECKPOINT, pids=(pid,), carrier=context.carrier)))
        pids = [worker.pid for worker in plan.workers]
        _require_own(snapshot, pids, rights)
        inspected = await self._handoff.against(pids, path, plan.size_bytes, rights)
        if inspected.reasons:
            raise refusal(inspected.reasons)
        # A job that trains on is only parked while CRIU writes, including what the driver has put into its memory.
        with_it_bytes = plan.size_bytes if not leave_running else _driven_bytes(plan)
        size_bytes = inspected.criu_bytes + with_it_bytes
        whole_bytes = inspected.criu_bytes + plan.size_bytes
        plan = with_image(plan, snapshot.rates, size_bytes=size_bytes, leave_running=leave_running)
        plan = plan.replace(hazards=(*plan.hazards, *inspected.notes, _size_text(whole_bytes, path)))
        wish = _wish(path, rights, inspected, leave_running=leave_running)
        return await self._operations.carry_out(plan, snapshot, context, handoff=wish)

    async def handoff(self, pid: int, path: str, rights: Rights, context: RequestContext) -> OperationResult:
        """Have a suspended job in an image at that path; then its processes end. Raises HegmError; it is suspended."""
        _require_absolute(path)
        pid = await self._operations.named_one(pid)
        self._operations.check(context, [pid])
        op = self._operations.runner.of_process(pid)
        if op is None or op.phase != SUSPENDED:
            hint = f"run: hegmctl offload {pid}; or, for both steps: hegmctl checkpoint {pid} DIR"
            raise not_suspended(pid, op, hint)
        if (against := keep_context_rules.against_image(op)) is not None:
            raise Refused(*against, {"pid": pid})
        pids = [member.pid for member in op.live]
        plan = planned_handoff(op)
        inspected = await self._handoff.against(pids, path, plan.size_bytes, rights)
        reasons = inspected.reasons
        without = [member.pid for member in op.live if not member.has_agent]
        if without:
            message = f"process {without[0]} has no agent, but an image needs one"
            reasons = (*reasons, Reason(code=REFUSED.name, message=message, hint="start its job with hegmctl run"))
        if (against := communicators.against_image(op)) is not None:
            message, hint = against
            reasons = (*reasons, Reason(code=REFUSED.name, message=message, hint=hint))
        if reasons:
            raise refusal(reasons)
        size_bytes = plan.size_bytes + inspected.criu_bytes
        plan = with_image(plan, self._paces.rates(), size_bytes=size_bytes, leave_running=False)
        plan = plan.replace(hazards=(*plan.hazards, *inspected.notes, _size_text(size_bytes, path)))
        return await self._operations.hand_over(op, _wish(path, rights, inspected), plan, context)

    async def restore(self, wish: RestoreRequest, rights: Rights, context: RequestContext) -> OperationResult:
        """Bring a job back from an image. Raises HegmError with every reason why not.

        Once its processes are there, it is a suspended job: what fails from there on leaves it that.
        """
        _require_absolute(wish.path)
        streams = named_streams(wish.outlets, wish.fds)
        limit_s = limit_of(context)
        due = math.inf if limit_s is None else anyio.current_time() + limit_s
        plan: MigrationPlan | None = None
        op: Operation | None = None
        with anyio.CancelScope(deadline=due):
            async with self._reviving.opened(wish.path, rights) as image:
                if context.dry_run:
                    plan = await self._plan(image, wish, rights, streams, dry_run=True)
                    async with reading("", size_of(image.manifest), context.emit) as on_progress:
                        await self._reviving.rehearse(image, rights, on_progress)
                    return OperationResult(None, plan_record(plan))
                async with self._restoring.setdefault(rights.uid, anyio.Lock()):
                    plan = await self._plan(image, wish, rights, streams)
                    op = await self._bring_back(image, rights, context, streams)
                await self._handoff.forget(image.manifest)
        if op is None or plan is None:
            raise HegmError(
                TIMEOUT,
                f"the job was not restored from {wish.path} within {limit_s or 0:g} s; only its image is left",
                "restore it again with a longer --timeout",
                {"path": wish.path},
            )
        left_s = None if limit_s is None else max(MIN_LEFT_S, due - anyio.current_time())
        return await self._operations.resume_by_plan(op, plan, replace(context, dry_run=False, limit_s=left_s))

    async def _plan(
        self, image: Image, wish: RestoreRequest, rights: Rights, streams: Mapping[str, int], *, dry_run: bool = False
    ) -> MigrationPlan:
        manifest = image.manifest

        def planned_restore(node: NodeSnapshotForPlan) -> MigrationPlan | tuple[Reason, ...]:
            expected, op = self._reviving.expected(node, manifest)
            pids = tuple([worker.pid for worker in op.workers])
            return planned_resume(expected, PlanRequest(kind=RESUME, pids=pids, to=wish.to), op)

        found, snapshot = await self._operations.plan(lambda: self._lookout.snapshot([]), planned_restore)
        reasons: list[Reason] = [] if isinstance(found, MigrationPlan) else list(found)
        objections = await self._reviving.against(manifest, rights, as_then=wish.as_then)
        reasons += objections.reasons
        ends = needs_in(manifest).outlets
        try:
            redirected_streams(ends, streams)
        except HegmError as error:
            reasons.append(Reason(code=error.code.name, message=error.message, hint=error.hint))
        grown = to_cut_back(reasons, objections.grown)
        would_be_cut = grown if wish.as_then and dry_run else ()
        if (reasons and not would_be_cut) or not isinstance(found, MigrationPlan):
            refused = refusal(reasons)
            named = [[file.path, file.size_bytes] for file in grown]
            raise HegmError(refused.code, refused.message, refused.hint, {**refused.facts, "grown": named})
        cut = [f"{file.reason.message}: hegmctl truncates it to that size" for file in would_be_cut]
        notes = [*cut, *objections.notes, *_lost_text(lost_streams(ends, streams)), *_foreign_text(image)]
        plan = from_image(found, snapshot.rates, size_bytes=size_of(manifest))
        return plan.replace(hazards=(*plan.hazards, *notes))

    async def _bring_back(
        self, image: Image, rights: Rights, context: RequestContext, streams: Mapping[str, int]
    ) -> Operation:
        """Return the restored job as a suspended operation. Raises HegmError; then nothing of it remains."""
        runner = self._operations.runner
        manifest = image.manifest
        outlets = redirected_streams(needs_in(manifest).outlets, streams)
        began, began_utc = anyio.current_time(), time.time()
        op_id = runner.reserve_id()
        op: Operation | None = None
        size_bytes = sum(file.size_bytes for file in manifest.byte_files)
        try:
            async with reading(op_id, size_bytes, context.emit) as on_progress:
                op = await self._reviving.restore(image, op_id, rights, on_progress, outlets)
            await runner.begin(op)
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                if op is not None:
                    await self._reviving.undo(manifest, op_id)
                await runner.remember(unrevived(manifest, op_id, _failure(error, image.path), began_utc))
            raise
        try:  # from here on the operation owns the job, whatever happens to the request
            with suppress(HegmError):  # a client that has disconnected gets nothing
                await context.emit(OperationProgress(id=op_id, phase=SUSPENDED))
        finally:
            await self._reviving.settled(manifest, op_id)
        self._paces.note_image(IN, size_of(manifest), anyio.current_time() - began)
        return op


def planned_handoff(op: Operation) -> MigrationPlan:
    """Return the plan that writes a suspended job into an image: no GPU memory moves."""
    workers = [
        PlannedProcess(
            pid=worker.pid,
            name=worker.name,
            gpu=None,
            to=None,
            size_bytes=worker.carried_bytes,
            carrier=worker.carrier,
            method=worker.method,
        )
        for worker in op.live
    ]
    return MigrationPlan(
        kind=CHECKPOINT,
        way="agent",
        workers=tuple(workers),
        size_bytes=sum(worker.size_bytes for worker in workers),
        reservation_bytes={},
        gpu_free_bytes={},
        pool_needed_bytes=0,
        pool_free_bytes=0,
        estimate_s=0.0,
        is_distributed=op.is_distributed,
        steps=("write process and bytes",),
    )


def _failure(error: BaseException, path: str) -> Failure:
    """Return why a restore has failed; its image is unchanged."""
    if isinstance(error, HegmError):
        return Failure(code=error.code.name, message=error.message, hint=error.hint)
    if isinstance(error, anyio.get_cancelled_exc_class()):
        hint = "restore it again; with a longer --timeout if that was the limit"
        return Failure(code=CANCELLED.name, message=f"the restore from {path} was interrupted", hint=hint)
    hint = "read the traceback in the log of hegmd"
    return Failure(code=INTERNAL.name, message=f"the restore has failed: {type(error).__name__}", hint=hint)


@asynccontextmanager
async def reading(op_id: str, size_bytes: int, emit: Emit) -> AsyncGenerator[Callable[[int], object]]:
    """Report how much of an image was read while it is read: no operation exists yet that could.

    A report that was not sent in time is replaced by the next. A disconnected client gets none.
    """
    send, receive = anyio.create_memory_object_stream[int](1)

    def tell(moved_bytes: int) -> None:
        with suppress(anyio.WouldBlock):
            send.send_nowait(moved_bytes)

    async def pass_on() -> None:
        with suppress(HegmError):
            await emit(OperationProgress(id=op_id, phase="reading", size_bytes=size_bytes))
            async for moved_bytes in receive:
                await emit(OperationProgress(id=op_id, phase="reading", moved_bytes=moved_bytes, size_bytes=size_bytes))

    failure: HegmError | None = None
    with send, receive:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pass_on)
            try:
                yield tell
            except HegmError as error:  # raised unwrapped, without an exception group
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


def _size_text(size_bytes: int, path: str) -> str:
    return f"the image takes about {math.ceil(size_bytes / (1 << 20))} MiB in {path}, without its zeros"


def _driven_bytes(plan: MigrationPlan) -> int:
    return sum(worker.size_bytes for worker in plan.workers if worker.carrier == BY_DRIVER)


def _lost_text(names: Sequence[str]) -> Iterator[str]:
    for name in names:
        yield f"its {name} is not connected: its former reader has exited; redirect it with --{name} FILE"


def _foreign_text(image: Image) -> Iterator[str]:
    if image.foreign:
        yield f"{image.path} holds {', '.join(image.foreign[:3])}, which is not part of the image and is ignored"


def _wish(path: str, rights: Rights, inspected: InspectedTree, *, leave_running: bool = False) -> Wish:
    return Wish(
        path=path,
        uid=rights.uid,
        gid=rights.gid,
        groups=rights.groups,
        root_pid=inspected.root_pid,
        root_ticks=inspected.root_ticks,
        leave_running=leave_running,
    )


def to_cut_back(reasons: Sequence[Reason], grown: Sequence[GrownFile]) -> Sequence[GrownFile]:
    """Return the files to truncate, if that solves every problem of a restore; otherwise none.

    The caller truncates the named files, and what is cut off is lost; the job itself may still be writing to them.
    """
    named = [file.reason for file in grown]
    return grown if all(reason in named for reason in reasons) else ()


def _require_absolute(path: str) -> None:
    if not os.path.isabs(path) or "\0" in path:
        raise HegmError(BAD_REQUEST, f"{path[:200]!r} is not an absolute path", "give an absolute path")


def _require_own(snapshot: NodeSnapshotForPlan, pids: Sequence[int], rights: Rights) -> None:
    for candidate in snapshot.candidates:
        if candidate.pid in pids and rights.uid not in (0, candidate.uid):
            raise HegmError(
                DENIED,
                f"process {candidate.pid} belongs to uid {candidate.uid}, but its image would be yours",
                "run the command as its owner or as root: an image contains all memory of a process",
                {"pid": candidate.pid, "uid": candidate.uid},
            )
