"""All operations and their journal: each fact about an operation is on disk before anything acts on it.

Owns the histories, the order of writes to the journal's file, and the wait for a disk that cannot be written.
Operations stop meanwhile, `trouble` says why, and events report its start and end. Decides nothing about an operation,
and starts none.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread

from hegmd.errors import NOT_FOUND, HegmError
from hegmd.migration.journal import records
from hegmd.migration.journal.disk import Disk
from hegmd.migration.journal.file import OPERATION_BYTES, JournalFile
from hegmd.migration.journal.records import History
from hegmd.migration.machine.next_effects import TERMINAL
from hegmd.system.background_tasks import stopping
from hegmd.telemetry.events import EventLog
from hegmd.telemetry.log import limited

logger = logging.getLogger(__name__)

# A failed write of the journal is repeated after this time.
RETRY_S = 1.0


class Ledger:
    """The operations of the node, oldest first. `open` comes before everything else."""

    def __init__(
        self,
        folder: Path,
        log: EventLog,
        *,
        disk: Disk | None = None,
        retry_s: float = RETRY_S,
        utc: Callable[[], float] = time.time,
    ) -> None:
        self._file = JournalFile(folder, disk)
        self._log = log
        self._retry_s = retry_s
        self._utc = utc
        self._histories: dict[str, History] = {}
        #: Operations whose first record is not on disk yet. A rewritten journal must not contain them.
        self._opening: set[str] = set()
        self._reserved = 0
        self._writing = anyio.Lock()
        self._has_ended = False
        self._told_of_trouble = False

    def open(self) -> None:
        """Read the journal. Blocks. Raises HegmError if it cannot be trusted."""
        reading = self._file.open()
        self._histories = dict(reading.histories)
        self.forget_oldest()
        if reading.torn:
            logger.warning("the journal ends within a record: the daemon was stopped while it wrote that")
        self._log_trouble()

    async def end(self) -> None:
        """Close the file once the present record is on disk. No record is written after it."""
        self._has_ended = True
        with anyio.CancelScope(shield=True):
            async with self._writing:
                self.close()

    def close(self) -> None:
        """Twice is fine."""
        self._file.close()

    @property
    def histories(self) -> Mapping[str, History]:
        return MappingProxyType(self._histories)

    @property
    def trouble(self) -> HegmError | None:
        """Why nothing can be written now; None while it can."""
        return self._file.trouble

    def history(self, op_id: str) -> History:
        """Return one operation and its story. Raises NOT_FOUND."""
        history = self._histories.get(op_id)
        if history is None:
            hint = "run: hegmctl ops"
            raise HegmError(NOT_FOUND, f"there is no operation {op_id[:40]!r}", hint, {"id": op_id[:40]})
        return history

    def next_id(self) -> str:
        known = (int(op_id) for op_id in self._histories if op_id.isdigit())
        return str(1 + max(known, default=0) if not self._reserved else 1 + max(self._reserved, *known))

    def reserve_id(self) -> str:
        """Return an id for a later operation. Memory that is reserved until then is reserved under that id."""
        op_id = self.next_id()
        self._reserved = int(op_id)
        return op_id

    async def enter(self, history: History, record: bytes) -> None:
        """Write a new operation's first record. Raises HegmError; then it is unknown. Takes its id before it awaits."""
        op_id = history.operation.id
        self._histories[op_id] = history
        self._opening.add(op_id)
        under_way = sum(known.operation.phase not in TERMINAL for known in self._histories.values())
        try:
            await self._append(history, record, ahead_bytes=OPERATION_BYTES * under_way)
        except BaseException:
            del self._histories[op_id]
            self._opening.discard(op_id)
            raise
        finally:
            self._log_trouble()

    async def write(self, history: History, record: bytes) -> None:
        """Write the record that leads to this history, however long that takes."""
        while True:
            try:
                await self._append(history, record)
            except HegmError as error:
                limited(logger, "journal", logging.ERROR, "operations are stopped: %s", error.message)
                self._log_trouble()
                await anyio.sleep(self._retry_s)
            else:
                self._log_trouble()
                return

    async def _append(self, history: History, record: bytes, *, ahead_bytes: int = 0) -> None:
        async with self._writing:
            if self._has_ended:  # a closed file would be opened again for the record
                raise stopping()
            known = tuple([known for op_id, known in self._histories.items() if op_id not in self._opening])
            await anyio.to_thread.run_sync(lambda: self._file.append(record, known, ahead_bytes=ahead_bytes))
            self._histories[history.operation.id] = history
            self._opening.discard(history.operation.id)

    def forget_oldest(self) -> None:
        """Forget ended operations beyond the number and age that are remembered. The next compaction drops them."""
        for old in records.forgotten(self._histories.values(), self._utc()):
            del self._histories[old]

    def _log_trouble(self) -> None:
        trouble = self.trouble
        if trouble is not None and not self._told_of_trouble:
            message = f"operations are stopped: {trouble.message}; {trouble.hint}"
            self._log.record("operation.journal-failed", "error", message)
        elif trouble is None and self._told_of_trouble:
            self._log.record(
                "operation.journal-mended", "info", "operations continue: hegmd can write the journal again"
            )
        self._told_of_trouble = trouble is not None
