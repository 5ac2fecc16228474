"""What can be asked of operations: looks at the node, has a plan made, and has it carried out.

Owns the two requests that are several operations in a row, `drain` and `swap`. Who may ask is told by the caller as
`may`, which is asked for each process's owner; what is possible is the planner's to say; what happens then is the
runner's.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from hegmd.errors import BAD_REQUEST, BUSY, DENIED, NOT_FOUND, REFUSED, Bug, HegmError, code_named
from hegmd.inventory import Inventory
from hegmd.lookout import Lookout
from hegmd.migration import events
from hegmd.migration.candidates import Plan, Request
from hegmd.migration.course import DONE, SUSPENDED
from hegmd.migration.operation import MIGRATE, RESUME, SUSPEND, Limits
from hegmd.migration.plan import planned, planned_resume
from hegmd.migration.runner import Runner
from hegmd.protocol import operations as told
from hegmd.protocol.operations import Reason
from hegmd.workers import Workers

May = Callable[[int | None], bool]
Emit = Callable[[told.OperationProgress], Awaitable[None]]

FRESH_S = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """How something is asked: by whom, and whether it is only for the plan and waited for."""

    by: str
    may: May
    emit: Emit
    wait: bool = True
    dry_run: bool = False
    limit_s: float | None = None
    carrier: str | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """An operation as it stands, and its plan."""

    operation: told.Operation | None
    plan: told.Plan | None


class Operations:
    """The desk at which operations are asked for."""

    def __init__(
        self,
        inventory: Inventory,
        workers: Workers,
        lookout: Lookout,
        runner: Runner,
        *,
        utc: Callable[[], float] = time.time,
    ) -> None:
        self._inventory = inventory
        self._workers = workers
        self._lookout = lookout
        self._utc = utc
        self.runner = runner

    # -- single operations ---------------------------------------------------------------------------------------------

    async def migrate(self, pids: Sequence[int], to: str, asked: Asked) -> Answer:
        """Move jobs to another GPU. Raises HegmError with every reason why not."""
        return await self._perform(Request(kind=MIGRATE, pids=tuple(pids), to=to, carrier=asked.carrier), asked)

    async def suspend(self, pids: Sequence[int], asked: Asked) -> Answer:
        """Take jobs off their GPUs. Raises HegmError with every reason why not."""
        return await self._perform(Request(kind=SUSPEND, pids=tuple(pids), carrier=asked.carrier), asked)

    async def resume(self, pid: int, to: str | None, asked: Asked) -> Answer:
        """Let a suspended job go on. Raises HegmError with every reason why not."""
        op = self.runner.of_process(pid)
        self._check(asked, [pid])
        if op is None or op.phase != SUSPENDED:
            state = "no operation has it" if op is None else f"operation {op.id} has it, which is {op.phase}"
            raise HegmError(
                NOT_FOUND if op is None else REFUSED,
                f"process {pid} is not suspended: {state}",
                "hegmctl ops lists what is suspended",
                {"pid": pid},
            )
        snapshot = await self._lookout.snapshot([])
        request = Request(kind=RESUME, pids=tuple([worker.pid for worker in op.live]), to=to)
        plan = _plan_or_raise(planned_resume(snapshot, request, op))
        if asked.dry_run:
            return Answer(None, _told_plan(plan))
        await self.runner.ask(op.id, events.ResumeAsked(cause=asked.by, to=plan.destinations))
        return await self._outcome(op.id, plan, asked)

    async def _perform(self, request: Request, asked: Asked) -> Answer:
        if not request.pids:
            raise HegmError(BAD_REQUEST, f"{request.kind} was asked of no process", "name one or more pids")
        self._check(asked, request.pids)
        snapshot = await self._lookout.snapshot(request.pids)
        plan = _plan_or_raise(planned(snapshot, request))
        self._check(asked, [worker.pid for worker in plan.workers])
        if asked.dry_run:
            return Answer(None, _told_plan(plan))
        limits = Limits() if asked.limit_s is None else Limits(park_s=asked.limit_s)
        chips = {gpu.id: gpu.chip for gpu in snapshot.gpus}
        for worker in plan.workers:  # somebody else may have been quicker since the snapshot; nothing is awaited below
            self._refuse_if_taken(worker.pid)
        op_id = self.runner.next_id()
        await self.runner.begin(plan.operation(op_id, snapshot.candidates, chips, limits=limits, utc=self._utc()))
        return await self._outcome(op_id, plan, asked)

    def _refuse_if_taken(self, pid: int) -> None:
        op = self.runner.of_process(pid)
        if op is not None:
            raise HegmError(
                BUSY,
                f"operation {op.id} ({op.kind}, {op.phase}) has process {pid} already",
                f"see: hegmctl op {op.id}",
                {"pid": pid, "operation": op.id},
            )

    async def _outcome(self, op_id: str, plan: Plan, asked: Asked) -> Answer:
        if asked.wait:
            await self.follow(op_id, asked.emit)
        return Answer(self.runner.describe(op_id), _told_plan(plan))

    async def follow(self, op_id: str, emit: Emit) -> None:
        """Tell how an operation comes on, until it is at rest."""
        async for progress in self.runner.follow(op_id):
            await emit(progress)

    async def cancel(self, op_id: str, asked: Asked) -> told.Operation:
        """Have an operation turned back. Raises HegmError."""
        op = self.runner.history(op_id).operation
        self._check_owner(asked, op.owner_uid, f"operation {op_id}")
        await self.runner.ask(op_id, events.CancelAsked(cause="request", by=asked.by))
        return self.runner.describe(op_id)

    # -- several in a row ----------------------------------------------------------------------------------------------

    async def drain(
        self, gpu: str, to: Sequence[str], asked: Asked
    ) -> tuple[list[told.Operation], list[told.Plan], list[told.Reason]]:
        """Move every job off a GPU, one after the other. Raises NOT_FOUND for a GPU that is not there."""
        node = await self._inventory.fresh(FRESH_S)
        names = [known.id for known in node.gpus]
        for name in (gpu, *to):
            if name not in names:
                raise HegmError(NOT_FOUND, f"there is no GPU {name[:40]!r}", f"the GPUs here: {', '.join(names)}")
        operations: list[told.Operation] = []
        plans: list[told.Plan] = []
        left: list[told.Reason] = []
        moved: set[int] = set()
        for process in node.processes:
            if process.pid in moved or not any(use.gpu == gpu for use in process.gpus):
                continue
            try:
                answer = await self._anywhere(process.pid, gpu, to, asked)
            except HegmError as error:
                left.append(_reason(error, process.pid))
                continue
            if answer.plan is not None:
                plans.append(answer.plan)
                moved.update(worker.pid for worker in answer.plan.workers)
            if answer.operation is not None:
                operations.append(answer.operation)
        return operations, plans if asked.dry_run else [], left

    async def _anywhere(self, pid: int, source: str, to: Sequence[str], asked: Asked) -> Answer:
        """Move a job to the first GPU that takes it: of those named, or of all, the one with most room first."""
        node = await self._inventory.fresh(FRESH_S)
        others = [gpu for gpu in node.gpus if gpu.id != source and gpu.state == "ok"]
        others.sort(key=lambda gpu: (gpu.memory_used_bytes or 0) - (gpu.memory_total_bytes or 0))
        error = HegmError(REFUSED, f"there is no other GPU than {source}", "suspend what is on it: hegmctl suspend")
        for target in to or [gpu.id for gpu in others]:
            try:
                return await self.migrate([pid], target, asked)
            except HegmError as refusal:
                error = refusal
        raise error

    async def swap(self, first: int, second: int, asked: Asked) -> list[told.Operation]:
        """Let two jobs change places. Raises HegmError when the first step is refused; then nothing was done."""
        self._check(asked, [first, second])
        await self._inventory.fresh(FRESH_S)
        there, here = self._place_of(first), self._place_of(second)
        if there == here:
            raise HegmError(REFUSED, f"{first} and {second} are both on {here}", "see hegmctl ps")
        try:
            one = await self.migrate([first], here, asked)
        except HegmError as error:
            if error.code is not REFUSED:
                raise
            return await self._swap_by_way_of_the_pool(first, second, there, here, asked)
        done = _operations(one)
        if _has_ended_well(one, DONE):
            done += _operations(await self.migrate([second], there, asked))
        return done

    async def _swap_by_way_of_the_pool(
        self, first: int, second: int, there: str, here: str, asked: Asked
    ) -> list[told.Operation]:
        """With no room for both at once: the first waits in the pool while the second moves."""
        suspended = await self.suspend([first], asked)
        if not _has_ended_well(suspended, SUSPENDED):
            return _operations(suspended)
        try:
            moved = await self.migrate([second], there, asked)
        except HegmError:
            await self.resume(first, there, asked)
            raise
        goal = here if _has_ended_well(moved, DONE) else there
        resumed = await self.resume(first, goal, asked)
        return [*_operations(resumed), *_operations(moved)]

    def _place_of(self, pid: int) -> str:
        """The one GPU that it is on, by what was settled on simulated GPUs and by the driver's word on others."""
        worker = self._workers.find(pid)
        if worker is not None and worker.gpu is not None:
            return worker.gpu
        latest = self._inventory.latest
        places = (
            [use.gpu for process in latest.processes if process.pid == pid for use in process.gpus] if latest else []
        )
        if len(places) != 1:
            raise HegmError(NOT_FOUND, f"process {pid} is not on one GPU", "see hegmctl ps", {"pid": pid})
        return places[0]

    # -- who may -------------------------------------------------------------------------------------------------------

    def _check(self, asked: Asked, pids: Iterable[int]) -> None:
        latest = self._inventory.latest
        owners = {process.pid: process.uid for process in latest.processes} if latest is not None else {}
        for pid in pids:
            worker = self._workers.find(pid)
            if worker is not None:
                self._check_owner(asked, worker.identity.uid, f"process {pid}")
            elif pid in owners:
                self._check_owner(asked, owners[pid], f"process {pid}")

    def _check_owner(self, asked: Asked, uid: int | None, what: str) -> None:
        if not asked.may(uid):
            owner = "nobody that is known" if uid is None else f"uid {uid}"
            raise HegmError(
                DENIED, f"{what} belongs to {owner}", "ask its owner, or an administrator of hegmd", {"uid": uid}
            )


def _plan_or_raise(result: Plan | tuple[Reason, ...]) -> Plan:
    """The plan, or an error that gives every reason: the first one's code, all messages, all hints."""
    if isinstance(result, Plan):
        return result
    if not result:
        raise Bug("a plan was refused without a reason")
    messages = "\n".join(dict.fromkeys(reason.message for reason in result))
    hints = "; ".join(dict.fromkeys(reason.hint for reason in result))
    facts = {"reasons": [reason.to_plain() for reason in result]}
    raise HegmError(code_named(result[0].code), messages, hints, facts)


def _told_plan(plan: Plan) -> told.Plan:
    return told.Plan.from_plain(plan.to_plain(), "plan")


def _reason(error: HegmError, pid: int) -> told.Reason:
    return told.Reason(code=error.code.name, message=error.message, hint=error.hint, pid=pid)


def _operations(answer: Answer) -> list[told.Operation]:
    return [] if answer.operation is None else [answer.operation]


def _has_ended_well(answer: Answer, phase: str) -> bool:
    op = answer.operation
    return op is not None and op.phase == phase and op.failure is None
