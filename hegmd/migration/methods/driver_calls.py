"""The driver's calls on a process, through the GPU helper: called, watched, and confirmed.

- A process that was stopped by a signal makes the calls hang: it is not called.
- The state is only answered when no call is running in the process, including one whose caller was killed.
- A long call is watched (`progress_probe`). One that makes no progress is abandoned: the helper and its other clients
  continue. Its outcome is then as unknown as after the helper was killed.
- A success counts once the process has the state that the call leads to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import anyio

from hegmd.errors import UNAVAILABLE, HegmError, Refused
from hegmd.gpu_helper.link import DriverFailed, HelperLost, Link, Stuck
from hegmd.memory.sizes import LAST_BYTES
from hegmd.migration.contracts import MigratedProcess
from hegmd.migration.methods.call_watchdog import watch
from hegmd.migration.methods.gpus import Gpus
from hegmd.migration.methods.other_processes import OtherProcesses
from hegmd.migration.methods.progress_probe import ProgressLimits
from hegmd.node.gpu_sets import gpus_of
from hegmd.telemetry.log import fields

logger = logging.getLogger(__name__)

RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"

LOCK_S = 10.0
DRIVER_CALL_TIMEOUT_S = 20.0
# Cost of a call: 2.8 GB/s off a GPU and 8 GB/s onto one were measured, and some 0.1 s without bytes.
STEP_S = 1.0
OUT_BYTES_PER_S = 2.8e9
IN_BYTES_PER_S = 8e9
# The limit of a call, even if bytes still move. After it the helper is killed with all its calls.
MAX_S = 300.0
MAX_BYTES_PER_S = 2.5e8
_POLL_INTERVAL_S = 0.05
_OUT_OF_MEMORY, _NOT_READY, _UNKNOWN = 2, 600, 999


class StateMismatch(HegmError):
    """The driver reported success, and the process is not in the state that the step leads to."""


class Steps:
    """Calls the helper. `patience` says how long to wait for a call that shows no progress."""

    def __init__(
        self, helper: Link, gpus: Gpus, other_processes: OtherProcesses, patience: ProgressLimits | None = None
    ) -> None:
        self._helper = helper
        self._gpus = gpus
        self._other_processes = other_processes
        self._patience = patience or ProgressLimits()
        # The GPUs that the driver listed, and for which helper: they do not change while that helper lives.
        self._devices: tuple[int | None, list[str]] = None, []

    @property
    def helper_pid(self) -> int | None:
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
        """Return the driver's state of the process, after any running call: at worst a whole checkpoint.

        A helper that is lost meanwhile costs a repetition: this changes nothing.
        """
        expected_s = step_s(subject.driver_bytes, OUT_BYTES_PER_S)
        try:
            answer = await self._call("state", subject, expected_s=expected_s)
        except HelperLost as error:
            if isinstance(error, Stuck):  # the next helper would be too
                raise
            logger.info("hegmd asks a new helper for the state of process %d: %s", subject.pid, error.message)
            answer = await self._call("state", subject, expected_s=expected_s)
        return str(answer["state"])

    async def lock(self, subject: MigratedProcess) -> None:
        """Lock the process. Raises Refused if its GPU kernels do not finish; then it keeps running."""
        try:
            await self._call("lock", subject, {"timeout_s": LOCK_S}, expected_s=LOCK_S)
        except DriverFailed as error:
            if error.number != _NOT_READY:
                raise
            raise Refused(
                f"the kernels of process {subject.pid} did not finish within {LOCK_S:g} s",
                "retry when it has fewer kernels queued; it keeps running",
                {"pid": subject.pid, "waited_s": LOCK_S},
            ) from error

    async def checkpoint(self, subject: MigratedProcess) -> None:
        """Checkpoint the process. Raises Refused if the driver found no memory: it reports that, or an unknown error on
        a full GPU.

        The process then stays where it is. Memory for it is more likely to be found later than memory for the driver.
        """
        try:
            await self._call("checkpoint", subject, expected_s=step_s(subject.driver_bytes, OUT_BYTES_PER_S))
        except DriverFailed as error:
            if error.number != _OUT_OF_MEMORY and not (error.number == _UNKNOWN and await self._is_full(subject)):
                raise
            raise Refused(
                f"process {subject.pid} cannot be checkpointed: {subject.gpu} has no free memory: {error.message}",
                f"free GPU memory on {subject.gpu}: the driver needs some for a checkpoint; the process keeps running "
                "there",
                {**error.facts, "pid": subject.pid, "gpu": subject.gpu},
            ) from error

    async def restore(self, subject: MigratedProcess, pairs: list[list[str]]) -> None:
        await self._call("restore", subject, {"pairs": pairs}, expected_s=step_s(subject.driver_bytes, IN_BYTES_PER_S))

    async def unlock(self, subject: MigratedProcess, state: str | None = None) -> None:
        """Unlock the process, if it is locked. `state` is its state, if the caller has just read it."""
        if (state or await self.state(subject)) == LOCKED:
            await self.unlock_at_once(subject)
            await self.expect(subject, "unlock", RUNNING)

    async def unlock_at_once(self, subject: MigratedProcess) -> None:
        """Unlock the process without reading its state before or after."""
        await self._call("unlock", subject, expected_s=0.0)

    async def expect(self, subject: MigratedProcess, op: str, *states: str) -> str:
        """The state that it is in: the call succeeded if the state is then one of these. Raises Untrue."""
        state = await self.state(subject)
        if state not in states:
            raise StateMismatch(
                UNAVAILABLE,
                f"{op} of process {subject.pid} returned success, but the process is {state}",
                "check hegmctl op, and dmesg for an Xid; hegmd retries or rolls back",
                {"pid": subject.pid, "asked": op, "state": state},
            )
        return state

    async def until_over(self, subject: MigratedProcess) -> None:
        """Wait until no driver call is running in the process, which is when the driver answers.

        A process stopped by a signal is waited for: its call continues with it.
        """
        while self._other_processes.may_be_there(subject.owner_key):
            try:
                if not self._other_processes.is_stopped(subject.pid):
                    state = await self.state(subject)
                    logger.info("a driver call for process %d was interrupted; the process is %s", subject.pid, state)
                    return
            except HelperLost as error:  # the next helper is asked
                logger.warning(
                    "hegmd asks the driver again how a call for process %d ended: %s", subject.pid, error.message
                )
            except HegmError as error:
                logger.warning(
                    "hegmd cannot find out how a driver call for process %d ended: %s", subject.pid, error.message
                )
                return
            await anyio.sleep(_POLL_INTERVAL_S)

    async def _call(
        self, op: str, subject: MigratedProcess, args: Mapping[str, object] | None = None, *, expected_s: float
    ) -> Mapping[str, Any]:
        if not self._other_processes.is_there(subject.owner_key):
            raise Refused(
                f"process {subject.pid} has exited, and its pid may belong to another process",
                "run: hegmctl ps; there is nothing left to move",
                {"pid": subject.pid, "asked": op},
            )
        if self._other_processes.is_stopped(subject.pid):
            raise Refused(
                f"process {subject.pid} is stopped (SIGSTOP); the driver call would block until it continues",
                f"run: kill -CONT {subject.pid}",
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
        """True if one of its GPUs has almost no free memory, as far as the driver reports it."""
        try:
            free = [(await self._gpus.gpu(gpu)).memory_free_bytes for gpu in gpus_of(subject.gpu)]
        except HegmError as error:
            logger.warning("hegmd cannot read how much memory is free on %s: %s", subject.gpu, error.message)
            return False
        return any(size_bytes is not None and size_bytes < LAST_BYTES for size_bytes in free)

    async def _free_bytes(self) -> int | None:
        """Return the free memory of all GPUs together, as far as the driver reports it."""
        try:
            return sum(gpu.memory_free_bytes or 0 for gpu in (await self._gpus.node()).gpus)
        except HegmError:
            return None


def step_s(size_bytes: int, bytes_per_s: float) -> float:
    """Return the expected duration of a step for that many bytes."""
    return STEP_S + size_bytes / bytes_per_s


def longest_s(size_bytes: int) -> float:
    """Return the longest duration of a call for a process of that size, even if bytes still move."""
    return MAX_S + size_bytes / MAX_BYTES_PER_S
