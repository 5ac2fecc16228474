"""One move of a training that is measured: asked for, seen by the training itself, and taken apart.

`once` does whatever of a task is missing next; how much there is already is looked up in the record.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from hegmd.errors import HegmError
from hegmd.protocol.messages import Migrate, OperationReply, Request, Resume, Suspend
from tests.gpu.bench_held import Held
from tests.gpu.bench_record import GIB, Record
from tests.gpu.moves_node import Node, WentWrongError
from tests.gpu.moves_parts import parts_of
from tests.gpu.moves_timing import Measured, rates_of, split_of

# The driver carries 2.8 GB/s out and 8 GB/s back; the worker's copies are between.
BYTES_PER_S = {"driver": 2.0e9, "worker": 10.0e9, "host": 20.0e9, "host-migrate": 20.0e9}
ACTIONS = {
    "peer": ("migrate",),
    "host": ("suspend", "resume"),
    "host-migrate": ("migrate",),
    "worker": ("migrate", "suspend", "resume"),
    "driver": ("migrate", "suspend", "resume"),
}
# The one that is suspended is on this GPU; migrations of these carriers are measured each way as often as asked for.
HOME = 0
# A job of 10 MiB is refused for peer while a temporary tensor of its step shares its memory.
ATTEMPTS = 5
BOTH_WAYS = {"peer"}


@dataclass(frozen=True)
class Downtime:
    """From when to when a job was parked, by the clock of its lines, and from when to when that was requested."""

    asked_utc: float
    began_at: float
    ended_at: float
    until_utc: float = math.inf

    @property
    def took_s(self) -> float:
        return self.ended_at - self.began_at

    def utc(self, at: float) -> float:
        """Return that moment by the clock of the log."""
        return at + time.time() - time.monotonic()


class MoveCounts:
    """The ways to move one, and how often each was gone."""

    def __init__(self, node: Node, record: Record, ends: float) -> None:
        self.node, self.record, self.ends = node, record, ends

    def needed_s(self, name: str, size_gib: int) -> float:
        """About what one of the kind takes."""
        return 2 * size_gib * GIB / BYTES_PER_S[name] if name in BYTES_PER_S else 2.0

    def is_done(self, name: str, size_gib: int, repeat: int) -> bool:
        return not self._missing(name, size_gib, repeat)

    def _missing(self, name: str, size_gib: int, repeat: int) -> list[str]:
        """Return the actions of a task that are due again."""
        carrier = name.partition("-")[0]
        wanted = {action: repeat * (2 if action == "migrate" and name in BOTH_WAYS else 1) for action in ACTIONS[name]}
        if len(self.node.gpus) == 1:
            wanted.pop("migrate", None)
        return [action for action, times in wanted.items() if self.record.count(size_gib, action, carrier) < times]

    def once(self, job: Held, name: str, repeat: int) -> None:
        carrier = name.partition("-")[0]
        missing = self._missing(name, job.size_gib, repeat)
        if carrier == "host":
            self.node.wait_until_ready()
        if "migrate" in missing:
            self.migrate(job, carrier)
        if "suspend" in missing or "resume" in missing:
            if self._place(job) != HOME:
                self.migrate(job, carrier if carrier == "driver" else "peer")
            self._suspend_and_resume(job, carrier)

    def _place(self, job: Held) -> int:
        (gpu,) = self.node.gpus.account().places(job.pid)
        return gpu

    def migrate(self, job: Held, carrier: str, *, noted: bool = True) -> Measured:
        source = self._place(job)
        request = Migrate(pids=(job.pid,), to=f"gpu{1 - source}", carrier=carrier)
        asked_at, reply, began_utc = self._ask_to_move(job, request)
        ended_at, took_s = job.pause_since(asked_at)
        stood = Downtime(began_utc, ended_at - took_s, ended_at)
        measured = self._taken_apart(job, reply, ("migrate", carrier, f"gpu{source} to {1 - source}"), stood)
        if noted:
            self.record.measure(measured)
        return measured

    def _ask_to_move(self, job: Held, request: Migrate) -> tuple[float, OperationReply, float]:
        """When it was asked for, the reply, and the former by the clock of the log."""
        for left in reversed(range(ATTEMPTS)):
            asked_at = time.monotonic()
            try:
                reply, _, began_utc = self._ask(request, "done")
            except HegmError:
                if not left or job.size_gib:
                    raise
                continue
            return asked_at, reply, began_utc
        raise AssertionError("the last attempt returns or raises")

    def _suspend_and_resume(self, job: Held, carrier: str) -> None:
        where = f"gpu{self._place(job)}"
        out, out_at, out_utc = self._ask(Suspend(pids=(job.pid,), carrier=carrier), "suspended")
        if places := self.node.gpus.account().places(job.pid):
            raise WentWrongError(f"suspended, process {job.pid} has {places} MiB")
        asked_at = time.monotonic()
        back, _, back_utc = self._ask(Resume(pid=job.pid), "done")
        ended_at, took_s = job.pause_since(asked_at)
        suspend_s = out_at - (ended_at - took_s)
        away, came = Downtime(out_utc, out_at - suspend_s, out_at, back_utc), Downtime(back_utc, asked_at, ended_at)
        self.record.measure(self._taken_apart(job, out, ("suspend", carrier, where), away))
        self.record.measure(self._taken_apart(job, back, ("resume", carrier, where), came))

    def _ask(self, request: Request, phase: str) -> tuple[OperationReply, float, float]:
        """The reply, when it came, and when it was asked for. Raises WentWrongError for one that went wrong."""
        began_utc = time.time()
        reply = self.node.ask(request)
        operation = reply.operation
        if operation is None or operation.phase != phase:
            raise WentWrongError(f"{request.op}: {operation}")
        return reply, time.monotonic(), began_utc

    def _taken_apart(self, job: Held, reply: OperationReply, way: tuple[str, str, str], stood: Downtime) -> Measured:
        assert reply.operation is not None
        story = self.node.story(reply.operation.id)
        story = story.replace(story=tuple(line for line in story.story if line.utc < stood.until_utc))
        log = self.node.log_since(stood.asked_utc, stood.until_utc)
        split = split_of(story, log, job.pid, stood.asked_utc)
        estimate_s = reply.plan.estimate_s if reply.plan is not None else None
        parts = parts_of(story, log, job.pid, stood.utc(stood.began_at), stood.utc(stood.ended_at))
        return Measured(job.size_gib, *way, stood.took_s, estimate_s, split, rates_of(log), parts)
