"""Writes the newest state of a component to disk soon after each change, and in the order of the changes.

Owns the time of each write, its thread, and retries while the disk cannot be written: the component continues
meanwhile. The component decides how its state becomes a file.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import anyio

from hegmd.errors import HegmError
from hegmd.system.condition import Condition
from hegmd.system.threads import run_detached

logger = logging.getLogger(__name__)

# How long a caller waits for the disk at most.
SAVED_WITHIN_S = 5.0
# How long until a state is written again that could not be written, unless it changes before.
RETRY_S = 5.0

State = TypeVar("State")


class StateSaving(Generic[State]):
    """Belongs to the event loop, and `run` has to be running. `write` blocks and raises OSError; then the file is as
    before. `report` gets why a state could not be written."""

    def __init__(
        self, write: Callable[[State], object], report: Callable[[str], object], *, name: str, retry_s: float = RETRY_S
    ) -> None:
        self._write_file = write
        self._report = report
        self._name = name
        self._retry_s = retry_s
        self._newest: State | None = None
        # The last change, the last one on disk, and the last one whose write has ended, with or without success.
        self._version: int = 0
        self._saved: int = 0
        self._tried: int = 0
        # At shutdown the loop's thread writes, while another may still be writing.
        self._lock = threading.Lock()
        self._written = 0
        self._news = Condition()

    def put(self, state: State) -> None:
        """This is the newest."""
        self._version += 1
        self._newest = state
        self._news.notify_all()

    async def run(self) -> None:
        """Write each change until cancelled; then write the last one."""
        try:
            while True:
                following, version = self._news.next, self._version
                if version == self._saved:
                    await following.wait()
                    continue
                is_saved = await self._write_detached()
                self._tried = version
                if is_saved:
                    self._saved = version
                self._news.notify_all()
                if not is_saved and self._version == version:
                    with anyio.move_on_after(self._retry_s):
                        await self._news.wait()
        finally:
            if self._version > self._saved:
                self._write(self._version, self._newest)

    async def until_saved(self, within_s: float = SAVED_WITHIN_S) -> bool:
        """Wait until every change is on disk, but not for long: a slow or full disk stops nothing. Whether it is."""
        version = self._version
        with anyio.move_on_after(within_s):
            while self._tried < version:
                await self._news.wait()
        return self._saved >= version

    async def _write_detached(self) -> bool:
        version, newest = self._version, self._newest
        try:
            return await run_detached(lambda _: self._write(version, newest), name=self._name)
        except HegmError as error:  # no thread can be started now
            self._report(f"{error.message}; {error.hint}")
            return False

    def _write(self, version: int, newest: State | None) -> bool:
        """True if the state is on disk. Blocks. Raises nothing."""
        with self._lock:
            if newest is None or version <= self._written:
                return True
            try:
                self._write_file(newest)
            except OSError as error:
                self._report(f"{error}; free space on that disk")
                return False
            self._written = version
            return True
