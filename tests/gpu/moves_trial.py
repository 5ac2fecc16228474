"""One case of the run over moves under way: what it asks of the daemon, and what has to be so afterwards.

Each case ends with the same questions: does the job continue with all its bytes, has NVML it where it belongs and
nowhere else, and is nothing held for it any more. Cases that want nothing of the node as a whole are run side by side;
the account of its memory is then taken by all of them at once, while none of them does anything, so they meet before
it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.protocol import operations as protocol
from hegmd.protocol.messages import Migrate, OperationReply, Request, Resume, Suspend
from tests.gpu.moves_jobs import Job, Jobs
from tests.gpu.moves_node import Account, Node, WentWrongError

MEET_WITHIN_S = 80.0


@dataclass
class Findings:
    """The findings of a case, for the table."""

    carrier: str = ""
    downtime_s: float | None = None
    gap_s: float | None = None
    account: str = ""
    notes: list[str] = field(default_factory=list)


class Trial:
    """The node, the jobs, and what was seen. `together` is where those meet that run side by side."""

    def __init__(self, node: Node, jobs: Jobs, together: threading.Barrier | None = None) -> None:
        self.node, self.jobs = node, jobs
        self.found = Findings()
        self._together = together

    def job(self, kind: str = "plain") -> Job:
        return self.jobs.ready(kind)

    def note(self, text: str) -> None:
        self.found.notes.append(text)

    def meet(self) -> None:
        """Wait for the others. Raises BrokenBarrierError if one of them failed: then there is no result."""
        if self._together is not None:
            self._together.wait(MEET_WITHIN_S)

    def look(self) -> Account:
        """Read the memory of every process, before any operation."""
        self.meet()
        account = self.node.gpus.account()
        self.meet()
        return account

    # -- what is asked -------------------------------------------------------------------------------------------------

    def migrate(self, job: Job, to: int | str, carrier: str | None = None) -> protocol.Operation:
        """Migrate by the command, or by the library if the carrier is given. For several GPUs, name the set."""
        place = to if isinstance(to, str) else f"gpu{to}"
        if carrier is not None:
            reply = self.node.ask(Migrate(pids=(job.pid,), to=place, carrier=carrier))
            return self._ended(reply, "done")
        return self._operation(self.node.hegmctl("migrate", str(job.pid), "--to", place), "done")

    def suspend(self, job: Job, carrier: str | None = None, *, keep_context: bool = False) -> protocol.Operation:
        if carrier is not None:
            request = Suspend(pids=(job.pid,), carrier=carrier, keep_context=keep_context)
            return self._ended(self.node.ask(request), "suspended")
        if keep_context:
            return self._operation(self.node.hegmctl("suspend", "--keep-context", str(job.pid)), "suspended")
        return self._operation(self.node.hegmctl("suspend", str(job.pid)), "suspended")

    def resume(self, job: Job, to: int | None = None) -> protocol.Operation:
        words = [] if to is None else ["--to", f"gpu{to}"]
        return self._operation(self.node.hegmctl("resume", str(job.pid), *words), "done")

    def begin(self, request: Request) -> str:
        """Have it done without waiting for that; the operation."""
        reply = self.node.ask(request)
        assert reply.operation is not None
        if reply.plan is not None:
            self.found.carrier = reply.plan.workers[0].carrier
        return reply.operation.id

    def begin_migrate(self, job: Job, to: int, carrier: str | None) -> str:
        return self.begin(Migrate(pids=(job.pid,), to=f"gpu{to}", carrier=carrier, wait=False))

    def begin_resume(self, job: Job) -> str:
        """Begin to resume a suspended job; returns the operation of the suspension."""
        return self.begin(Resume(pid=job.pid, wait=False))

    def _operation(self, answer: dict[str, Any], phase: str) -> protocol.Operation:
        return self._ended(OperationReply.from_plain(answer, "what hegmctl said"), phase)

    def _ended(self, reply: OperationReply, phase: str) -> protocol.Operation:
        operation = reply.operation
        assert operation is not None
        if reply.plan is not None:
            self.found.carrier = reply.plan.workers[0].carrier
        if operation.phase != phase:
            raise WentWrongError(f"operation {operation.id} is {operation.phase}: {operation.failure}")
        if operation.downtime_s is not None:
            self.found.downtime_s = operation.downtime_s
        return operation

    # -- what has to be so ---------------------------------------------------------------------------------------------

    def arrived(self, job: Job, gpu: int | tuple[int, ...], before: Account) -> None:
        """It runs on that GPU, or on all of these, with all it had, and there alone; nothing is held, here or there."""
        job.is_whole()
        self.meet()
        after = self.node.settle(before)
        places, wanted = after.places(job.pid), [gpu] if isinstance(gpu, int) else [*gpu]
        if list(places) != wanted:
            raise WentWrongError(f"process {job.pid} is on the GPUs {places}, and was to be on {wanted} alone")
        self._say_account(job, before, after)

    def _say_account(self, job: Job, before: Account, after: Account) -> None:
        was, now = before.places(job.pid), after.places(job.pid)
        places = [f"{mib:.0f}@{gpu}" for where in (was, now) for gpu, mib in where.items()]
        unowned = [after.unowned_mib(gpu) - before.unowned_mib(gpu) for gpu in range(len(after.used_mib))]
        self.found.account = "→".join(places) + " " + "/".join(f"{more:+.1f}" for more in unowned)

    def gone(self, job: Job, before: Account) -> None:
        """Check that it has nothing on any GPU, and nothing is reserved for it there."""
        self.meet()
        places = self.node.gpus.account().places(job.pid)
        if places:
            raise WentWrongError(f"suspended, process {job.pid} has {places} MiB")
        self.node.settle_gpus(before)
        self.meet()

    def kept(self, job: Job, suspended: protocol.Operation, before: Account) -> None:
        """Suspended, it has its context on its GPU, of the planned size, and the other memory is free."""
        self.meet()
        was, places = before.places(job.pid), self.node.gpus.account().places(job.pid)
        freed_mib = sum(was.values()) - sum(places.values())
        if list(places) != list(was) or freed_mib < 0.9 * (suspended.size_bytes >> 20):
            raise WentWrongError(f"process {job.pid} had {was} MiB and has {places} MiB with its context kept")
        stays_bytes = suspended.processes[0].stays_bytes
        if stays_bytes is None or abs((stays_bytes >> 20) - sum(places.values())) > RESTORE_MARGIN_BYTES >> 20:
            raise WentWrongError(f"process {job.pid} is said to keep {stays_bytes} bytes and has {places} MiB")
        self.node.settle_gpus(before)
        self.meet()

    def brought_home(self, job: Job, ended: protocol.Operation, source: int, to: int, before: Account) -> None:
        """After an interruption: wherever it ended, the job has to continue; one that waits is let continue first."""
        self.note(ended.phase + (f": {ended.failure.message[:150]}" if ended.failure else ""))
        if ended.phase == "suspended":
            self.note("resumed by hand")
            self.resume(job)
        elif ended.phase not in {"done", "rolled-back"}:
            raise WentWrongError(f"operation {ended.id} ended as {ended.phase}: {ended.failure}")
        gpu = to if ended.phase == "done" else source if ended.phase == "rolled-back" else job.gpu
        self.arrived(job, gpu, before)
        if ended.downtime_s is not None:
            self.found.downtime_s = ended.downtime_s
