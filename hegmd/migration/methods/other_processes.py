"""Pauses other processes on a GPU while memory there changes its owner.

Between the release of a reservation and the driver's allocation for a restore, another process on that GPU could take
the memory, and the job would be lost. The driver's lock blocks a process's CUDA calls for these tenths of a second, and
nothing else. A process that cannot be locked quickly is left alone and reported.

A process stopped by a signal, before or during the call, is not waited for, since the driver would wait: it cannot
allocate anyway, and is called again once it continues. No helper of another client is killed for it.

A lock outlives its caller. So the pids to lock, and the restore that they are locked for, are on disk before. The next
run of the daemon unlocks what it finds there, but not before that restore is over, which the driver finishes on its
own. A process that cannot be unlocked is retried until its state is certain, and counts as paused until then.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Container, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.gpu_helper.link import DriverFailed, HelperLost, HelperReply, Link
from hegmd.migration.methods.call_watchdog import watch
from hegmd.migration.methods.progress_probe import ProgressLimits
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

ProcessKey = tuple[int, int]

FILE_NAME = "held-still.json"
# A process whose CUDA calls do not end within this time is not paused, and may take memory that is passed to a job. 0.1
# s was too short on a machine with busy cores.
LOCK_S = 0.3
# Storages of 32 GiB are made in some milliseconds.
MAX_PAUSE_S = 2.0
_DEADLINE_S = 10.0
# None of these calls moves any bytes, and each ends within milliseconds of its limit.
_PATIENCE = ProgressLimits(look_s=0.5, stopped_s=0.5, floor_s=5.0, times=0.0, quiet_s=5.0)
_UNLOCK_WITHIN_S = 30.0
_AGAIN_S = 1.0
# The driver reports a state once no step is running. A restore copies 8 GB/s, or 1 in the worst case.
_STEP_OVER_S = 300.0
# Errors of the driver that change nothing; after any other, the process may be locked all the same.
_NOTHING_DONE = frozenset((1, 3, 304, 401, 600))


class OtherProcesses:
    """Locks and unlocks processes. `is_stopped` says for which pids a driver call would block.

    `max_pause_s` limits pauses that are not for a restore; 0: nothing is ever paused.
    """

    def __init__(
        self,
        helper: Link,
        folder: Path,
        *,
        start_ticks: Callable[[int], int | None],
        is_stopped: Callable[[int], bool],
        max_pause_s: float = MAX_PAUSE_S,
    ) -> None:
        self._helper = helper
        self._path = folder / FILE_NAME
        self._start_ticks = start_ticks
        self.is_stopped = is_stopped
        self.max_pause_s = max_pause_s
        self._noted: dict[ProcessKey, ProcessKey | None] = {}  # for whose restore it is
        self._held: dict[ProcessKey, anyio.Event] = {}
        self._left: set[ProcessKey] = set()
        self._some_left = anyio.Event()
        self._writing = anyio.Lock()

    @asynccontextmanager
    async def paused(
        self,
        processes: Sequence[ProcessKey],
        *,
        but_for: Container[ProcessKey] = (),
        restored: ProcessKey | None = None,
    ) -> AsyncGenerator[Sequence[ProcessKey]]:
        """Pause those of the processes that can be paused, during the block. Yields those that still run.

        `restored` is the process that is restored onto their GPU meanwhile. A process stopped by a signal does not run
        anyway. None is paused whose pid cannot be recorded, as on a full disk. Raises HegmError if it is unknown
        whether they exist; then nothing was done.
        """
        there = [who for who in processes if who not in but_for and self.is_there(who)]
        fit = [who for who in there if self.max_pause_s and not self.is_stopped(who[0])]
        await self._until_free(fit)
        chosen = [who for who in fit if who not in but_for]  # no step between here and the next line
        self._held.update({who: anyio.Event() for who in chosen})
        locked: list[ProcessKey] = []
        loose: list[ProcessKey] = [] if self.max_pause_s else there
        try:
            if chosen and not await self._note({**self._noted, **dict.fromkeys(chosen, restored)}):
                loose += chosen
            elif chosen:
                async with anyio.create_task_group() as tasks:
                    for who in chosen:
                        tasks.start_soon(self._lock, who, locked, loose)
            yield loose
        finally:
            with anyio.CancelScope(shield=True):
                await self._unlock_and_forget(chosen, locked)

    @asynccontextmanager
    async def excluded(self, who: ProcessKey) -> AsyncGenerator[None]:
        """Keep that process unpaused during the block: a lock that is found meanwhile is not ours."""
        await self._until_free([who])
        free = self._held[who] = anyio.Event()
        try:
            yield
        finally:
            del self._held[who]
            free.set()

    async def wait_until_unpaused(self, who: ProcessKey) -> None:
        """Wait until we do not pause that process, before something else is done to it."""
        await self._until_free([who])

    async def _until_free(self, whom: Sequence[ProcessKey]) -> None:
        """Wait until none of them is paused. Claims nothing while waiting, so that two callers cannot deadlock."""
        while held := [self._held[who] for who in whom if who in self._held]:
            await held[0].wait()

    async def _unlock_and_forget(self, chosen: Sequence[ProcessKey], locked: Sequence[ProcessKey]) -> None:
        certain = set(chosen) - set(locked)
        with anyio.move_on_after(_UNLOCK_WITHIN_S):
            await self._unlock_all(locked, certain)
        self._leave(set(locked) - certain)
        for who in certain:
            self._held.pop(who).set()
        if chosen:
            await self._note(_without(self._noted, certain))

    async def _unlock_all(self, whom: Iterable[ProcessKey], certain: set[ProcessKey]) -> None:
        async def unlock(who: ProcessKey) -> None:
            if await self._unlock(who):
                certain.add(who)

        async with anyio.create_task_group() as tasks:
            for who in whom:
                tasks.start_soon(unlock, who)

    def _leave(self, whom: set[ProcessKey]) -> None:
        """To `run`, which does not give up."""
        if whom:
            pids = ", ".join(str(pid) for pid, _ in sorted(whom))
            logger.error("processes that may still be paused; hegmd unlocks them as soon as possible: %s", pids)
            self._left |= whom
            self._some_left.set()

    async def run(self) -> None:
        """Unlock processes that an earlier daemon or a failed call left locked, until cancelled."""
        await self.resume_all()
        while True:
            await self._some_left.wait()
            await anyio.sleep(_AGAIN_S)
            certain: set[ProcessKey] = set()
            await self._unlock_all(self._left, certain)
            self._left -= certain
            if not self._left:
                self._some_left = anyio.Event()
            for who in certain:
                self._held.pop(who).set()
            if certain:
                await self._note(_without(self._noted, certain))

    async def resume_all(self) -> None:
        """Unlock the processes that an earlier daemon had paused. `run` retries those that cannot be unlocked."""
        noted = self._noted_before()
        there = [who for who in noted if self.may_be_there(who) and who not in self._held]
        self._held.update({who: anyio.Event() for who in there})
        self._noted.update({who: noted[who] for who in there})
        for restored in dict.fromkeys(noted[who] for who in there):
            if restored is not None:
                await self._until_restored(restored)
        await self._unlock_and_forget(there, there)
        await self._note(self._noted)

    async def _until_restored(self, who: ProcessKey) -> None:
        """Wait until no driver call is running in the process, at most `_STEP_OVER_S`.

        A process stopped by a signal does not answer; its call continues with it.
        """
        with anyio.move_on_after(_STEP_OVER_S):
            while self.may_be_there(who):
                try:
                    if not self.is_stopped(who[0]):
                        await self._helper.call(
                            "state",
                            {"pid": who[0]},
                            deadline_s=2 * _STEP_OVER_S,
                            watch=lambda: watch("state", who[0], ProgressLimits(floor_s=_STEP_OVER_S)),
                        )
                        return
                except HelperLost as error:
                    logger.warning("hegmd asks again whether process %d is being restored: %s", who[0], error.message)
                except HegmError as error:
                    logger.warning(
                        "hegmd cannot find out whether process %d is being restored: %s", who[0], error.message
                    )
                    return
                await anyio.sleep(_AGAIN_S)
            return
        logger.error(
            "other processes are resumed after %g s, although the restore of process %d has not ended",
            _STEP_OVER_S,
            who[0],
        )

    def _noted_before(self) -> Mapping[ProcessKey, ProcessKey | None]:
        try:
            return _parsed(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            logger.warning("hegmd cannot find out which processes an earlier hegmd paused: %s", error)
            return {}

    def is_there(self, who: ProcessKey) -> bool:
        """Return True if it is still the same process. Raises HegmError if that is hidden."""
        return self._start_ticks(who[0]) == who[1]

    def may_be_there(self, who: ProcessKey) -> bool:
        """Like `is_there`, but True if that cannot be found out."""
        try:
            return self.is_there(who)
        except HegmError:
            return True

    async def _lock(self, who: ProcessKey, locked: list[ProcessKey], loose: list[ProcessKey]) -> None:
        """Lock a process, unless another program has; an uncertain one counts as both ours and running."""
        try:
            locked.append(who)
            await self._ask("lock", who, timeout_s=LOCK_S)
            if not await self._is_locked(who):  # confirm the lock
                locked.remove(who)
                loose.append(who)
        except HegmError as error:
            if self.may_be_there(who):
                loose.append(who)
            if isinstance(error, DriverFailed) and error.number in _NOTHING_DONE:
                locked.remove(who)
                logger.info("process %d is not paused: %s", who[0], error.message)
            else:
                logger.warning("process %d may be paused: %s", who[0], error.message)

    async def _unlock(self, who: ProcessKey) -> bool:
        """True if it is certain that we do not pause it."""
        try:
            if not self.is_there(who):
                return True
            if self.is_stopped(who[0]):
                return False
            if not await self._is_locked(who):
                return True
            await self._ask("unlock", who)
            return not await self._is_locked(who)
        except HegmError as error:
            logger.warning("process %d may still be paused: %s", who[0], error.message)
            return False

    async def _is_locked(self, who: ProcessKey) -> bool:
        return bool((await self._ask("state", who)).values["state"] == "locked")

    async def _ask(self, op: str, who: ProcessKey, **args: object) -> HelperReply:
        return await self._helper.call(
            op, {"pid": who[0], **args}, deadline_s=_DEADLINE_S, watch=lambda: watch(op, who[0], _PATIENCE)
        )

    async def _note(self, whom: dict[ProcessKey, ProcessKey | None]) -> bool:
        """Record who may be paused. Returns False if the disk does not take it. Raises nothing."""
        self._noted = whom  # before the first await: the next call builds on this
        async with self._writing:
            lines = [[*who, *(restored or ())] for who, restored in sorted(self._noted.items())]
            try:
                await anyio.to_thread.run_sync(self._write, lines)
            except OSError as error:
                limited(logger, "held-still", logging.ERROR, "%s cannot be written: %s; df -h", self._path, error)
                return False
        return True

    def _write(self, whom: list[list[int]]) -> None:
        if not whom:
            self._path.unlink(missing_ok=True)
            return
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(whom, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)


def _without(
    noted: dict[ProcessKey, ProcessKey | None], certain: set[ProcessKey]
) -> dict[ProcessKey, ProcessKey | None]:
    return {who: restored for who, restored in noted.items() if who not in certain}


def _parsed(text: bytes) -> dict[ProcessKey, ProcessKey | None]:
    """Return the paused processes, each with the process whose restore it is for. Raises ValueError or TypeError."""
    noted: dict[ProcessKey, ProcessKey | None] = {}
    for pid, ticks, *restored in json.loads(text):
        noted[int(pid), int(ticks)] = (int(restored[0]), int(restored[1])) if len(restored) == 2 else None
    return noted
