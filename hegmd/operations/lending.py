"""Lending the GPU memory of a job: the suspend at the start of a `hegm.released()` block, and the resume at its end.

Combines the requests of one job: each rank sends its own, and the first starts the operation. The operation records
that the memory is lent, so that a restarted daemon knows which operation a job may end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from weakref import WeakKeyDictionary

import anyio

from hegmd.errors import BUSY, NOT_FOUND, REFUSED, HegmError, code_named
from hegmd.migration.machine.next_effects import SUSPENDED
from hegmd.migration.machine.operation import Operation
from hegmd.operations.operations import Operations
from hegmd.operations.request_context import RequestContext
from hegmd.protocol import operations as protocol
from hegmd.protocol.operations import WORKER
from hegmd.workers.workers import AgentConnection, Workers

# A script may reach its first block before its GPU and its memory are known. The request then waits this long, once.
KNOWN_WITHIN_S = 20.0


class Lending:
    """The two requests of agents. `queue` has a job wait for room, if its resume is refused."""

    def __init__(
        self,
        operations: Operations,
        workers: Workers,
        known_within_s: float = KNOWN_WITHIN_S,
        *,
        queue: Callable[[Operation], None] = lambda _op: None,
    ) -> None:
        self._operations = operations
        self._queue = queue
        self._workers = workers
        self._known_within_s = known_within_s
        self._runner = operations.runner
        self._first_refused: WeakKeyDictionary[AgentConnection, float] = WeakKeyDictionary()

    async def lend(self, pid: int, context: RequestContext) -> str:
        """Suspend the job of that process with its contexts kept; returns the operation's id. Raises HegmError."""
        while (op := self._runner.of_process(pid)) is not None:
            if not op.lent:
                message = f"operation {op.id} ({op.kind}, {op.phase}) has process {pid}"
                raise HegmError(BUSY, message, "ask again when it has ended", {"pid": pid, "operation": op.id})
            if op.phase == SUSPENDED:
                return op.id
            await self._until_suspended(op)
        # The process keeps a descriptor of its bytes with this carrier, so it can reload them without a daemon.
        context = replace(context, carrier=WORKER, lent=True)
        is_new = self._is_new(pid)
        try:
            answer = await self._operations.suspend((pid,), context, keep_context=True)
        except HegmError as error:
            if error.code is REFUSED and is_new:
                raise HegmError(BUSY, error.message, "ask again in a moment", error.facts) from error
            raise
        if answer.operation is None or answer.operation.phase != SUSPENDED:
            raise _failed(pid, answer.operation, "lend its GPU memory")
        return answer.operation.id

    def _is_new(self, pid: int) -> bool:
        """Return True if its GPU or its memory is not known yet, and it has not been refused for that for long."""
        worker = self._workers.find(pid)
        if worker is None or (worker.size_bytes is not None and worker.gpu is not None):
            return False
        now = anyio.current_time()
        return now - self._first_refused.setdefault(worker, now) < self._known_within_s

    async def reclaim(self, pid: int, context: RequestContext) -> None:
        """Resume the job of that process, if it is lent. Returns when it has left its block. Raises HegmError."""
        op = self._runner.of_process(pid)
        if op is None or not op.lent:
            message = f"no operation lends the GPU memory of process {pid}"
            raise HegmError(NOT_FOUND, message, "run: hegmctl ops", {"pid": pid})
        if op.phase != SUSPENDED:  # the job is still being suspended, or another rank has asked
            await self._until_suspended(op)
            op = self._runner.of_process(pid)
        if op is None or not op.lent:
            return
        try:
            answer = await self._operations.resume(pid, None, context)
        except HegmError as error:
            if (op := self._runner.of_process(pid)) is None or not op.lent:
                return  # another rank has asked meanwhile
            if error.code is REFUSED and op.phase == SUSPENDED:
                self._queue(op)
            raise
        if answer.operation is not None and answer.operation.phase == SUSPENDED:
            raise _failed(pid, answer.operation, "get its GPU memory back")

    async def _until_suspended(self, op: Operation) -> None:
        async for _ in self._runner.follow(op.id):
            pass


def _failed(pid: int, op: protocol.Operation | None, what: str) -> HegmError:
    reason = None if op is None else op.failure
    if reason is None:
        return HegmError(REFUSED, f"process {pid} could not {what}", "run: hegmctl ops", {"pid": pid})
    return HegmError(code_named(reason.code), reason.message, reason.hint, {"pid": pid})
