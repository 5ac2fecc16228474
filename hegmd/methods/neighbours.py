"""Others on a GPU, held still for the moment in which room there changes hands.

Between letting go of room and the driver's taking it for a restore, whoever allocates on that GPU could get it, and the
job that is to be restored would be lost for good. The driver's own lock holds a process's CUDA calls for that moment,
some tenths of a second, and nothing else of it. Who cannot be locked quickly is left alone.

A lock outlives whoever took it. So who is to be locked is on disk before, and the next run of the daemon lets go of
those that it finds there.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncGenerator, Callable, Container, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import anyio.to_thread

from hegmd.errors import HegmError
from hegmd.helper.link import HelperLost, Link

logger = logging.getLogger(__name__)

Who = tuple[int, int]

FILE_NAME = "held-still.json"
LOCK_S = 0.1
_DEADLINE_S = 10.0
_UNLOCK_WITHIN_S = 30.0


class Neighbours:
    """Locks and unlocks. `is_stopped` tells of whom the driver's calls would wait without end."""

    def __init__(
        self,
        helper: Link,
        folder: Path,
        *,
        start_ticks: Callable[[int], int | None],
        is_stopped: Callable[[int], bool],
        enabled: bool = True,
    ) -> None:
        self._helper = helper
        self._path = folder / FILE_NAME
        self._start_ticks = start_ticks
        self._is_stopped = is_stopped
        self._enabled = enabled
        self._noted: set[Who] = set()
        self._held: dict[Who, anyio.Event] = {}
        self._writing = anyio.Lock()

    @asynccontextmanager
    async def held_still(self, processes: Sequence[Who], *, but_for: Container[Who] = ()) -> AsyncGenerator[None]:
        """Hold still whoever of them can be, for as long as the block takes. Raises nothing of its own but OSError."""
        fit = [who for who in processes if self._enabled and self._is_there(who) and not self._is_stopped(who[0])]
        chosen = [who for who in fit if who not in but_for and who not in self._held]
        self._held.update({who: anyio.Event() for who in chosen})
        locked: list[Who] = []
        try:
            if chosen:
                await self._note(self._noted | set(chosen))
                async with anyio.create_task_group() as tasks:
                    for who in chosen:
                        tasks.start_soon(self._lock, who, locked)
            yield
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_UNLOCK_WITHIN_S):
                await self._let_go_of(chosen, locked)
            for who in chosen:
                self._held.pop(who).set()

    async def _let_go_of(self, chosen: Sequence[Who], locked: Sequence[Who]) -> None:
        left = {who for who in locked if not await self._unlock(who)}
        if chosen:
            await self._note((self._noted - set(chosen)) | left)

    async def let_be(self, who: Who) -> None:
        """Wait until that process is not held still by us, before anything else is done to it."""
        while (held := self._held.get(who)) is not None:
            await held.wait()

    async def let_go(self) -> None:
        """Unlock those that an earlier run of the daemon has held still when it ended."""
        try:
            noted = [(int(pid), int(ticks)) for pid, ticks in json.loads(self._path.read_bytes())]
        except FileNotFoundError:
            return
        except (OSError, ValueError, TypeError) as error:
            logger.warning("it is not known whom an earlier hegmd has held still: %s", error)
            return
        left = {who for who in noted if self._is_there(who) and not await self._unlock(who)}
        await self._note(self._noted | left)

    def _is_there(self, who: Who) -> bool:
        return self._start_ticks(who[0]) == who[1]

    async def _lock(self, who: Who, locked: list[Who]) -> None:
        """One that somebody else has locked stays theirs; where the helper was lost, it may be ours."""
        try:
            locked.append(who)
            await self._helper.call("lock", {"pid": who[0], "timeout_s": LOCK_S}, deadline_s=_DEADLINE_S)
        except HelperLost as error:
            logger.warning("process %d may be held still: %s", who[0], error.message)
        except HegmError as error:
            locked.remove(who)
            logger.info("process %d is not held still: %s", who[0], error.message)

    async def _unlock(self, who: Who) -> bool:
        """Whether it is certain that it is not held still by us any more."""
        if not self._is_there(who):
            return True
        try:
            state = await self._helper.call("state", {"pid": who[0]}, deadline_s=_DEADLINE_S)
            if state.values["state"] == "locked":
                await self._helper.call("unlock", {"pid": who[0]}, deadline_s=_DEADLINE_S)
        except HegmError as error:
            logger.warning("process %d may still be held still: %s", who[0], error.message)
            return False
        return True

    async def _note(self, whom: set[Who]) -> None:
        async with self._writing:
            self._noted = whom
            await anyio.to_thread.run_sync(self._write, sorted(whom))

    def _write(self, whom: list[Who]) -> None:
        if not whom:
            self._path.unlink(missing_ok=True)
            return
        fresh = self._path.with_suffix(".new")
        with fresh.open("w") as file:
            json.dump(whom, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._path)
