"""The desk at which images are asked for: a job into one, and a job out of one.

Owns who may (the owner of all its processes, or root: an image holds their memory, which an administrator of hegmd has
no other right to), what is said against it before anything is done, and the way from a job that came back to its
operation. Handing over and bringing back are `handoff`'s and `reviving`'s.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import anyio

from hegmd.errors import BAD_REQUEST, DENIED, NOT_FOUND, REFUSED, HegmError
from hegmd.external import Rights
from hegmd.handoff import Handoff
from hegmd.image.images import Image
from hegmd.lookout import Lookout
from hegmd.migration.candidates import Plan, Request, Snapshot
from hegmd.migration.course import SUSPENDED
from hegmd.migration.operation import CHECKPOINT, RESUME, Operation
from hegmd.migration.operation import Handoff as Wish
from hegmd.migration.plan import planned, planned_handoff, planned_resume
from hegmd.operations import Answer, Asked, Operations, plan_or_raise, refusal, told_plan
from hegmd.protocol.images import Manifest
from hegmd.protocol.operations import Reason
from hegmd.reviving import Grown, Reviving


class Checkpoints:
    """What can be asked about images of jobs."""

    def __init__(self, operations: Operations, lookout: Lookout, handoff: Handoff, reviving: Reviving) -> None:
        self._operations = operations
        self._lookout = lookout
        self._handoff = handoff
        self._reviving = reviving
        # Two of one user's images may want one pool and one number. Others do not wait for them: a user can stop what
        # works with that user's rights, CRIU too; then it is the pool, and CRIU, that refuse the later one.
        self._restoring: dict[int, anyio.Lock] = {}

    async def checkpoint(
        self, pid: int, path: str, rights: Rights, asked: Asked, *, leave_running: bool = False
    ) -> Answer:
        """Have a job in an image at that path; then it ends, or goes on. Raises HegmError with every reason why not."""
        _require_absolute(path)
        self._operations.check(asked, [pid])
        snapshot = await self._lookout.snapshot([pid])
        plan = plan_or_raise(planned(snapshot, Request(kind=CHECKPOINT, pids=(pid,), carrier=asked.carrier)))
        pids = [worker.pid for worker in plan.workers]
        _require_own(snapshot, pids, rights)
        root, ticks, reasons = await self._handoff.against(pids, path, plan.size_bytes, rights)
        if reasons:
            raise refusal(reasons)
        plan = _with_end(plan, leave_running=leave_running)
        wish = Wish(
            path=path,
            uid=rights.uid,
            gid=rights.gid,
            groups=rights.groups,
            root_pid=root,
            root_ticks=ticks,
            leave_running=leave_running,
        )
        return await self._operations.carry_out(plan, snapshot, asked, handoff=wish)

    async def handoff(self, pid: int, path: str, rights: Rights, asked: Asked) -> Answer:
        """Have a suspended job in an image at that path; then its processes end. Raises HegmError; it is suspended."""
        _require_absolute(path)
        self._operations.check(asked, [pid])
        op = self._operations.runner.of_process(pid)
        if op is None or op.phase != SUSPENDED:
            state = "no operation has it" if op is None else f"operation {op.id} has it, which is {op.phase}"
            raise HegmError(
                NOT_FOUND if op is None else REFUSED,
                f"process {pid} is not suspended: {state}",
                f"take it off its GPU first: hegmctl offload {pid}; or do both: hegmctl checkpoint {pid} DIR",
                {"pid": pid},
            )
        pids = [member.pid for member in op.live]
        plan = planned_handoff(op)
        root, ticks, reasons = await self._handoff.against(pids, path, plan.size_bytes, rights)
        without = [member.pid for member in op.live if not member.has_agent]
        if without:
            message = f"process {without[0]} has no agent, which an image needs"
            reasons = (*reasons, Reason(code=REFUSED.name, message=message, hint="start its job with hegmctl run"))
        if reasons:
            raise refusal(reasons)
        wish = Wish(path=path, uid=rights.uid, gid=rights.gid, groups=rights.groups, root_pid=root, root_ticks=ticks)
        return await self._operations.hand_over(op, wish, plan, asked)

    async def restore(
        self, path: str, to: str | None, rights: Rights, asked: Asked, *, as_then: bool = False
    ) -> Answer:
        """Bring a job back from the image at that path. Raises HegmError with every reason why not.

        Once its processes are there, it is a suspended job: what fails from there on leaves it that.
        """
        _require_absolute(path)
        async with self._reviving.opened(path, rights) as image:
            if asked.dry_run:
                return Answer(None, told_plan(await self._plan(image.manifest, to, rights, as_then=as_then)))
            async with self._restoring.setdefault(rights.uid, anyio.Lock()):
                plan = await self._plan(image.manifest, to, rights, as_then=as_then)
                op = await self._bring_back(image, rights)
            await self._handoff.forget(image.manifest)
        return await self._operations.go_on_with(op, plan, replace(asked, dry_run=False))

    async def _plan(self, manifest: Manifest, to: str | None, rights: Rights, *, as_then: bool) -> Plan:
        snapshot, op = self._reviving.expected(await self._lookout.snapshot([]), manifest)
        request = Request(kind=RESUME, pids=tuple([worker.pid for worker in op.workers]), to=to)
        found = planned_resume(snapshot, request, op)
        reasons: list[Reason] = [] if isinstance(found, Plan) else list(found)
        objections = await self._reviving.against(manifest, rights, as_then=as_then)
        reasons += objections.reasons
        if reasons or not isinstance(found, Plan):
            refused = refusal(reasons)
            grown = [[file.path, file.size_bytes] for file in to_cut_back(reasons, objections.grown)]
            raise HegmError(refused.code, refused.message, refused.hint, {**refused.facts, "grown": grown})
        return found.replace(hazards=(*found.hazards, *objections.notes))

    async def _bring_back(self, image: Image, rights: Rights) -> Operation:
        """The job as an operation that has begun, at rest. Raises HegmError; nothing of it is there then."""
        runner = self._operations.runner
        manifest = image.manifest
        op_id = runner.reserve_id()
        op = await self._reviving.bring_back(image, op_id, rights, lambda _: None)
        try:
            await runner.begin(op)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._reviving.undo(manifest, op_id)
            raise
        await self._reviving.settled(manifest, op_id)
        return op


def to_cut_back(reasons: Sequence[Reason], grown: Sequence[Grown]) -> Sequence[Grown]:
    """The files that it is enough to cut back, if it is: while anything else stands against a restore, none is named.

    Who asked cuts what is named, and what is cut off is gone; the job itself may be what still writes there.
    """
    named = [file.reason for file in grown]
    return grown if all(reason in named for reason in reasons) else ()


def _require_absolute(path: str) -> None:
    if not os.path.isabs(path) or "\0" in path:
        raise HegmError(BAD_REQUEST, f"{path[:200]!r} is no absolute path", "name the directory from the root on")


def _require_own(snapshot: Snapshot, pids: Sequence[int], rights: Rights) -> None:
    for candidate in snapshot.candidates:
        if candidate.pid in pids and rights.uid not in (0, candidate.uid):
            raise HegmError(
                DENIED,
                f"process {candidate.pid} belongs to uid {candidate.uid}, and its image would be yours",
                "an image holds all of a process's memory: have its owner make it, or root",
                {"pid": candidate.pid, "uid": candidate.uid},
            )


def _with_end(plan: Plan, *, leave_running: bool) -> Plan:
    """The plan with its last step."""
    last = "put the bytes back; let it go on; see a boundary" if leave_running else "end the job"
    return plan.replace(steps=(*plan.steps, *last.split("; ")))
