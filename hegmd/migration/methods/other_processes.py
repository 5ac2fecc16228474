"""Others on a GPU, held still for the moment in which room there changes hands.

Between letting go of room and the driver's taking it for a restore, whoever allocates on that GPU could get it, and the
job that is to be restored would be lost for good. The driver's own lock holds a process's CUDA calls for that moment,
some tenths of a second, and nothing else of it. Who cannot be locked quickly is left alone, and told of.

Whoever is stopped by a signal, before or while it is asked about, is not waited for, since the driver would be: it
stands anyhow, and is asked again when it goes on. Nobody else's helper is ended for it.

A lock outlives whoever took it. So who is to be locked is on disk before, with whose restore it is for, and the next
run of the daemon lets go of those that it finds there: not before that restore is over, which the driver goes on with
by itself. Who cannot be unlocked is tried again until it is certain, and counts as held until then.
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
from hegmd.gpu_helper.link import Answer, DriverFailed, HelperLost, Link
from hegmd.migration.methods.call_watchdog import watch
from hegmd.migration.methods.progress_probe import Patience

logger = logging.getLogger(__name__)

Who = tuple[int, int]

FILE_NAME = "held-still.json"
LOCK_S = 0.1
# Storages of 32 GiB are made in some milliseconds.
MAX_PAUSE_S = 2.0
_DEADLINE_S = 10.0
# None of these calls moves any bytes, and each is over within milliseconds of its limit.
_PATIENCE = Patience(look_s=0.5, stopped_s=0.5, floor_s=5.0, times=0.0, quiet_s=5.0)
_UNLOCK_WITHIN_S = 30.0
_AGAIN_S = 1.0
# A state is answered when no step is under way any more; a restore goes at 8 GB/s, or 1 at worst.
_STEP_OVER_S = 300.0
# Errors of the driver that were seen to change nothing; after any other, the process may be locked all the same.
_NOTHING_DONE = frozenset((1, 3, 304, 401, 600))


class OtherProcesses:
    """Locks and unlocks. `is_stopped` tells of whom the driver's calls would wait without end.

    `still_s` is for how long they may be held where it is only a matter of time; 0: nobody is held still, ever.
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
        self._noted: dict[Who, Who | None] = {}  # for whose restore it is
        self._held: dict[Who, anyio.Event] = {}
        self._left: set[Who] = set()
        self._some_left = anyio.Event()
        self._writing = anyio.Lock()

    @asynccontextmanager
    async def paused(
        self, processes: Sequence[Who], *, but_for: Container[Who] = (), restored: Who | None = None
    ) -> AsyncGenerator[Sequence[Who]]:
        """Hold still whoever of them can be, for as long as the block takes; gives those who go on all the same.

        `restored` is who comes to their GPU meanwhile. One that a signal has stopped goes nowhere anyhow. Raises
        OSError, and HegmError when it cannot be seen whether they are there; then nothing was done.
        """
        there = [who for who in processes if who not in but_for and self.is_there(who)]
        fit = [who for who in there if self.max_pause_s and not self.is_stopped(who[0])]
        await self._until_free(fit)
        chosen = [who for who in fit if who not in but_for]  # no step between here and the next line
        self._held.update({who: anyio.Event() for who in chosen})
        locked: list[Who] = []
        loose: list[Who] = [] if self.max_pause_s else there
        try:
            if chosen:
                await self._note({**self._noted, **dict.fromkeys(chosen, restored)})
                async with anyio.create_task_group() as tasks:
                    for who in chosen:
                        tasks.start_soon(self._lock, who, locked, loose)
            yield loose
        finally:
            with anyio.CancelScope(shield=True):
                await self._let_go_of(chosen, locked)

    @asynccontextmanager
    async def excluded(self, who: Who) -> AsyncGenerator[None]:
        """Nobody holds that process still during the block: a lock that is seen in there is none of these."""
        await self._until_free([who])
        free = self._held[who] = anyio.Event()
        try:
            yield
        finally:
            del self._held[who]
            free.set()

    async def wait_until_unpaused(self, who: Who) -> None:
        """Wait until that process is not held still by us, before anything else is done to it."""
        await self._until_free([who])

    async def _until_free(self, whom: Sequence[Who]) -> None:
        """All of them at one moment: whoever waits has claimed none, so that no two wait for one another."""
        while held := [self._held[who] for who in whom if who in self._held]:
            await held[0].wait()

    async def _let_go_of(self, chosen: Sequence[Who], locked: Sequence[Who]) -> None:
        certain = set(chosen) - set(locked)
        with anyio.move_on_after(_UNLOCK_WITHIN_S):
            await self._unlock_all(locked, certain)
        self._leave(set(locked) - certain)
        for who in certain:
            self._held.pop(who).set()
        if chosen:
            await self._note(_without(self._noted, certain))

    async def _unlock_all(self, whom: Iterable[Who], certain: set[Who]) -> None:
        async def unlock(who: Who) -> None:
            if await self._unlock(who):
                certain.add(who)

        async with anyio.create_task_group() as tasks:
            for who in whom:
                tasks.start_soon(unlock, who)

    def _leave(self, whom: set[Who]) -> None:
        """To `run`, which does not give up."""
        if whom:
            pids = ", ".join(str(pid) for pid, _ in sorted(whom))
            logger.error("processes that may still stand, and are unlocked as soon as they can be: %s", pids)
            self._left |= whom
            self._some_left.set()

    async def run(self) -> None:
        """Unlock whoever an earlier daemon, or a step of ours that failed, has left standing, until cancelled."""
        await self.resume_all()
        while True:
            await self._some_left.wait()
            await anyio.sleep(_AGAIN_S)
            certain: set[Who] = set()
            await self._unlock_all(self._left, certain)
            self._left -= certain
            if not self._left:
                self._some_left = anyio.Event()
            for who in certain:
                self._held.pop(who).set()
            if certain:
                await self._note(_without(self._noted, certain))

    async def resume_all(self) -> None:
        """Unlock those that an earlier run of the daemon has held still when it ended; who cannot be is for `run`."""
        noted = self._noted_before()
        there = [who for who in noted if self.may_be_there(who) and who not in self._held]
        self._held.update({who: anyio.Event() for who in there})
        self._noted.update({who: noted[who] for who in there})
        for restored in dict.fromkeys(noted[who] for who in there):
            if restored is not None:
                await self._until_restored(restored)
        await self._let_go_of(there, there)
        await self._note(self._noted)

    async def _until_restored(self, who: Who) -> None:
        """The driver answers about a process when no step in it is under way any more. One that a signal has stopped
        would not answer, and its step goes on with it."""
        with anyio.move_on_after(_STEP_OVER_S):
            while self.may_be_there(who):
                try:
                    if not self.is_stopped(who[0]):
                        await self._helper.call(
                            "state",
                            {"pid": who[0]},
                            deadline_s=2 * _STEP_OVER_S,
                            watch=lambda: watch("state", who[0], Patience(floor_s=_STEP_OVER_S)),
                        )
                        return
                except HelperLost as error:
                    logger.warning("whether process %d is being restored is asked again: %s", who[0], error.message)
                except HegmError as error:
                    logger.warning("it is not known whether process %d is being restored: %s", who[0], error.message)
                    return
                await anyio.sleep(_AGAIN_S)
            return
        logger.error("others are let go of after %g s, whatever becomes of process %d", _STEP_OVER_S, who[0])

    def _noted_before(self) -> Mapping[Who, Who | None]:
        try:
            return _parsed(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            logger.warning("it is not known whom an earlier hegmd has held still: %s", error)
            return {}

    def is_there(self, who: Who) -> bool:
        """Whether it is still that process, and not another that got its number. Raises HegmError if that is hidden."""
        return self._start_ticks(who[0]) == who[1]

    def may_be_there(self, who: Who) -> bool:
        """The same, for those to whom nobody's being gone is to be believed without having been seen."""
        try:
            return self.is_there(who)
        except HegmError:
            return True

    async def _lock(self, who: Who, locked: list[Who], loose: list[Who]) -> None:
        """One that somebody else has locked stays theirs; where it is not certain, it may be ours, or go on."""
        try:
            locked.append(who)
            await self._ask("lock", who, timeout_s=LOCK_S)
            if not await self._is_locked(who):  # what is said to be done is looked at
                locked.remove(who)
                loose.append(who)
        except HegmError as error:
            if self.may_be_there(who):
                loose.append(who)
            if isinstance(error, DriverFailed) and error.number in _NOTHING_DONE:
                locked.remove(who)
                logger.info("process %d is not held still: %s", who[0], error.message)
            else:
                logger.warning("process %d may be held still: %s", who[0], error.message)

    async def _unlock(self, who: Who) -> bool:
        """Whether it is certain that it is not held still by us any more."""
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
            logger.warning("process %d may still be held still: %s", who[0], error.message)
            return False

    async def _is_locked(self, who: Who) -> bool:
        return bool((await self._ask("state", who)).values["state"] == "locked")

    async def _ask(self, op: str, who: Who, **args: object) -> Answer:
        return await self._helper.call(
            op, {"pid": who[0], **args}, deadline_s=_DEADLINE_S, watch=lambda: watch(op, who[0], _PATIENCE)
        )

    async def _note(self, whom: dict[Who, Who | None]) -> None:
        self._noted = whom  # before anything is waited for: whoever notes next goes on from here
        async with self._writing:
            lines = [[*who, *(restored or ())] for who, restored in sorted(self._noted.items())]
            await anyio.to_thread.run_sync(self._write, lines)

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


def _without(noted: dict[Who, Who | None], certain: set[Who]) -> dict[Who, Who | None]:
    return {who: restored for who, restored in noted.items() if who not in certain}


def _parsed(text: bytes) -> dict[Who, Who | None]:
    """Whom it names, and for whose restore; earlier releases did not say that. Raises ValueError or TypeError."""
    noted: dict[Who, Who | None] = {}
    for pid, ticks, *restored in json.loads(text):
        noted[int(pid), int(ticks)] = (int(restored[0]), int(restored[1])) if len(restored) == 2 else None
    return noted
