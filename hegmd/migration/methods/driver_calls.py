"""The driver's calls about a process, by way of the helper: asked, watched while they last, and believed when seen.

- A process that was stopped by a signal makes the calls hang: it is not asked about.
- A state is answered when no step is under way in the process any more, also one whose caller was killed.
- A call that lasts is looked at (`progress_probe`), and one that comes to nothing is left alone: the helper and whoever
  else is served by it go on. Whether it took effect is then as little known as with a helper that was killed.
- Success counts when the process is seen to be in the state that a step leads to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import anyio

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link
from hegmd.memory.sizes import LAST_BYTES
from hegmd.migration.contracts import MigratedProcess
from hegmd.migration.methods.call_watchdog import watch
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.migration.methods.progress_probe import Patience
from hegmd.node.gpu_sets import gpus_of
from hegmd.telemetry.log import fields

__all__ = ["CHECKPOINTED", "FAILED", "LOCKED", "RUNNING", "Steps", "StateMismatch", "step_s"]

logger = logging.getLogger(__name__)

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"

LOCK_S = 10.0
DRIVER_CALL_TIMEOUT_S = 20.0
# What a step takes: 2.8 GB/s off a GPU and 8 GB/s onto one were measured, and some tenths of a second without bytes.
STEP_S = 1.0
OUT_BYTES_PER_S = 2.8e9
IN_BYTES_PER_S = 8e9
# However much moves meanwhile. Then the helper is ended, with all that it is asked.
MAX_S = 300.0
MAX_BYTES_PER_S = 2.5e8
_POLL_INTERVAL_S = 0.05
_OUT_OF_MEMORY, _NOT_READY, _UNKNOWN = 2, 600, 999


class StateMismatch(HegmError):
    """A step was said to be done, and the process is not in the state that it leads to."""


class Steps:
    """Asks the helper. `patience` says how long a call is waited for of which nothing is to be seen."""

    def __init__(
        self, helper: Link, gpus: Gpus, other_processes: OtherProcesses, patience: Patience | None = None
    ) -> None:
        self._helper = helper
        self._gpus = gpus
        self._other_processes = other_processes
        self._patience = patience or Patience()
        # What the driver showed, and to which helper: it shows one the same for as long as that lives.
        self._devices: tuple[int | None, list[str]] = None, []

    @property
    def helper_pid(self) -> int | None:
        """The helper, if there is one now."""
        return self._helper.pid

    async def uuids(self) -> list[str]:
        """Every GPU that the driver shows, in its order."""
        known, uuids = self._devices
        if known is None or known != self._helper.pid:
            answer = await self._helper.call("devices", deadline_s=DRIVER_CALL_TIMEOUT_S)
            uuids = [str(device["uuid"]) for device in answer.values["devices"]]
            self._devices = self._helper.pid, uuids
        return uuids

    async def state(self, subject: MigratedProcess) -> str:
        """Waits for the end of a step that is under way: at worst one that takes all its bytes off."""
        answer = await self._call("state", subject, expected_s=step_s(subject.driver_bytes, OUT_BYTES_PER_S))
        return str(answer["state"])

    async def lock(self, subject: MigratedProcess) -> None:
        """Raises Refused when its kernels do not come to an end; it goes on running then."""
        try:
            await self._call("lock", subject, {"timeout_s": LOCK_S}, expected_s=LOCK_S)
        except DriverFailed as error:
            if error.number != _NOT_READY:
                raise
            raise Refused(
                f"the kernels of process {subject.pid} did not come to an end within {LOCK_S:g} s",
                "ask again when it has less queued; it goes on running meanwhile",
                {"pid": subject.pid, "waited_s": LOCK_S},
            ) from error

    async def checkpoint(self, subject: MigratedProcess) -> None:
        """Raises Refused where it has found no memory: the driver says so, or that it does not know, on a full GPU.

        It stays where it is then, and what it needs there is more likely to be had than what the driver needs.
        """
        try:
            await self._call("checkpoint", subject, expected_s=step_s(subject.driver_bytes, OUT_BYTES_PER_S))
        except DriverFailed as error:
            if error.number != _OUT_OF_MEMORY and not (error.number == _UNKNOWN and await self._is_full(subject)):
                raise
            raise Refused(
                f"process {subject.pid} cannot be taken off {subject.gpu}, which somebody has filled: {error.message}",
                f"free some memory on {subject.gpu}: the driver needs a little itself; it runs on, or comes back there",
                {**error.facts, "pid": subject.pid, "gpu": subject.gpu},
            ) from error

    async def restore(self, subject: MigratedProcess, pairs: list[list[str]]) -> None:
        await self._call("restore", subject, {"pairs": pairs}, expected_s=step_s(subject.driver_bytes, IN_BYTES_PER_S))

    async def unlock(self, subject: MigratedProcess, state: str | None = None) -> None:
        """Fine for one that runs already. `state` is its own, where that was seen just now."""
        if (state or await self.state(subject)) == LOCKED:
            await self.unlock_at_once(subject)
            await self.expect(subject, "unlock", RUNNING)

    async def unlock_at_once(self, subject: MigratedProcess) -> None:
        """Without asking how it stands, before or after."""
        await self._call("unlock", subject, expected_s=0.0)

    async def expect(self, subject: MigratedProcess, op: str, *wanted: str) -> str:
        """The state that it is in: success counts when that is seen to be one of these. Raises Untrue."""
        state = await self.state(subject)
        if state not in wanted:
            raise StateMismatch(
                UNAVAILABLE,
                f"{op} of process {subject.pid} is said to be done, and the process is {state}",
                "it is tried again, or brought back; see hegmctl op, and dmesg for an Xid",
                {"pid": subject.pid, "asked": op, "state": state},
            )
        return state

    async def until_over(self, subject: MigratedProcess) -> None:
        """The driver answers about a process when no step in it is under way any more.

        One that a signal has stopped is waited for: its step goes on with it.
        """
        while self._other_processes.may_be_there(subject.owner_key):
            try:
                if not self._other_processes.is_stopped(subject.pid):
                    state = await self.state(subject)
                    logger.info("a step of process %d was cut off, and it is %s", subject.pid, state)
                    return
            except HelperLost as error:  # another one is asked
                logger.warning("how a step of process %d ended is asked again: %s", subject.pid, error.message)
            except HegmError as error:
                logger.warning("it is not known how a step of process %d ended: %s", subject.pid, error.message)
                return
            await anyio.sleep(_POLL_INTERVAL_S)

    async def _call(
        self, op: str, subject: MigratedProcess, args: Mapping[str, object] | None = None, *, expected_s: float
    ) -> Mapping[str, Any]:
        if not self._other_processes.is_there(subject.owner_key):
            raise Refused(
                f"process {subject.pid} has ended, and another may have its number",
                "there is nothing left to move; see hegmctl ps",
                {"pid": subject.pid, "asked": op},
            )
        if self._other_processes.is_stopped(subject.pid):
            raise Refused(
                f"process {subject.pid} is stopped by a signal, and the driver would wait for it without end",
                f"let it go on first: kill -CONT {subject.pid}",
                {"pid": subject.pid, "asked": op},
            )
        answer = await self._helper.call(
            op,
            {"pid": subject.pid, **(args or {})},
            deadline_s=longest_s(subject.driver_bytes),
            watch=lambda: watch(op, subject.pid, self._patience, expected_s=expected_s, free_bytes=self._free_bytes),
        )
        logger.info("%s of process %d", op, subject.pid, extra=fields(pid=subject.pid, values=dict(answer.values)))
        return answer.values

    async def _is_full(self, subject: MigratedProcess) -> bool:
        """Whether next to nothing is free on one of its GPUs, as far as their driver says it now."""
        try:
            free = [(await self._gpus.gpu(gpu)).memory_free_bytes for gpu in gpus_of(subject.gpu)]
        except HegmError as error:
            logger.warning("what is free on %s is not known: %s", subject.gpu, error.message)
            return False
        return any(size_bytes is not None and size_bytes < LAST_BYTES for size_bytes in free)

    async def _free_bytes(self) -> int | None:
        """On all GPUs together, as far as their driver says it now."""
        try:
            return sum(gpu.memory_free_bytes or 0 for gpu in (await self._gpus.seen()).gpus)
        except HegmError:
            return None


def step_s(size_bytes: int, bytes_per_s: float) -> float:
    """How long a step is expected to take for so much."""
    return STEP_S + size_bytes / bytes_per_s


def longest_s(size_bytes: int) -> float:
    """How long any call about a process with so much may take, whatever is seen to move."""
    return MAX_S + size_bytes / MAX_BYTES_PER_S
