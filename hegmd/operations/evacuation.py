"""Moves jobs off a GPU that is failing, before it fails: as `hegmctl drain` would, and again for those that stayed.

Decides only when to drain. The drain decides where jobs go and whether they can move.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import anyio

from hegmd.errors import HegmError
from hegmd.migration.machine.next_effects import DONE
from hegmd.operations.request_context import RequestContext
from hegmd.operations.sequences import Outcome
from hegmd.protocol.operations import OperationProgress
from hegmd.protocol.snapshots import FAILING, Gpu
from hegmd.system.background_tasks import BackgroundTasks
from hegmd.telemetry.events import EventLog

logger = logging.getLogger(__name__)

BY = "evacuation"
# A GPU is drained again after this time if some jobs could not be moved, or if a new job started on it.
AGAIN_S = 60.0

Drain = Callable[[str, Sequence[str], RequestContext], Awaitable[Outcome]]


class Evacuation(BackgroundTasks):
    """A task for each GPU that is failing for one of the causes in `on`. `run` must be running."""

    def __init__(
        self, drain: Drain, events: EventLog, *, sleep: Callable[[float], Awaitable[None]] = anyio.sleep
    ) -> None:
        self._drain = drain
        self._events = events
        self._sleep = sleep
        #: The causes for which it is done; none for never.
        self.on: tuple[str, ...] = ()
        self._gpus: dict[str, Gpu] = {}
        self._draining: set[str] = set()
        super().__init__()

    def see(self, gpus: Sequence[Gpu]) -> None:
        """Take the current state of the GPUs. Called from the event loop; does not wait."""
        self._gpus = {gpu.id: gpu for gpu in gpus}
        for gpu in gpus:
            if self._is_due(gpu.id) and gpu.id not in self._draining and self._tasks is not None:
                self._draining.add(gpu.id)
                self._tasks.start_soon(self._evacuate, gpu.id, name=f"evacuation of {gpu.id}")

    def _is_due(self, name: str) -> bool:
        gpu = self._gpus.get(name)
        is_failing = gpu is not None and gpu.state == "ok" and gpu.health.condition == FAILING
        return is_failing and gpu is not None and not set(self.on).isdisjoint(gpu.health.causes)

    async def _evacuate(self, name: str) -> None:
        """Drain that GPU for as long as it is failing."""
        logger.warning("%s is failing, and its jobs are moved to other GPUs: %s", name, self._gpus[name].health.reason)
        reported: frozenset[object] = frozenset()
        try:
            while self._is_due(name):
                reported = await self._drain_once(name, reported)
                await self._sleep(AGAIN_S)
        finally:
            self._draining.discard(name)

    async def _drain_once(self, name: str, reported: frozenset[object]) -> frozenset[object]:
        """Drain it once; return the jobs that stay, with the kind of reason. `reported` has those of the last drain.

        It is reported only if that has changed: the numbers in the reasons change each time.
        """
        why = self._gpus[name].health.reason
        context = RequestContext(by=BY, may=lambda _uid: True, emit=_discard_progress)
        try:
            outcome = await self._drain(name, (), context)
        except HegmError as error:
            refused: frozenset[object] = frozenset({error.code.name})
            if refused != reported:
                message = f"{name} is failing, and its jobs cannot be moved: {error.message}"
                self._record("warning", message, name, error.hint)
            return refused
        moved = [operation for operation in outcome.operations if operation.phase == DONE]
        failed = [one for one in outcome.operations if one.phase != DONE]
        stay = [f"process {reason.pid} stays: {reason.message}" for reason in outcome.left]
        stay += [f"operation {one.id} ended {one.phase}" for one in failed]
        who: frozenset[object] = frozenset(
            [(reason.pid, reason.code) for reason in outcome.left]
            + [(process.pid, one.phase) for one in failed for process in one.processes]
        )
        if moved:
            self._record("info", f"{len(moved)} jobs were moved off {name}, which is failing: {why}", name)
        if stay and who != reported:
            message = f"{name} is failing, and not all jobs can be moved: {'; '.join(stay)}"
            hint = next((reason.hint for reason in outcome.left if reason.hint), "see: hegmctl ops")
            self._record("warning", message, name, hint)
        return who

    def _record(self, severity: str, message: str, name: str, hint: str = "") -> None:
        message = f"{message}; {hint}" if hint else message
        self._events.record("gpu.evacuated", severity, message, gpu=name)
        logger.log(logging.WARNING if severity == "warning" else logging.INFO, "%s", message)


async def _discard_progress(_progress: OperationProgress) -> None:
    """Discard progress: no client follows."""
