"""The processes that a dump has stopped: a record of each dump is on disk from before CRIU until its job runs or has
ended.

Owns these records. An orphaned process is no longer in the job's tree, so after a daemon and a job were killed, the
next daemon would never find the job's children: CRIU has stopped them, and nothing would resume them. The processes end
with the kernel, so a record is not synced to disk, and one of another boot is ignored. Blocks only for a small file.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from hegmd.node.processes.process_set import ProcessSet
from hegmd.protocol.record import as_list, as_map
from hegmd.system.resource_errors import scarcity

logger = logging.getLogger(__name__)

FOLDER_NAME = "standing"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class DumpRecords:
    """The notes of one state directory, by operation."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER_NAME

    def note(self, op_id: str, people: ProcessSet) -> None:
        """Record that CRIU is about to stop these processes. Raises nothing: a dump continues on a full disk too."""
        note: dict[str, object] = {"start_ticks": dict(people.start_ticks), "stopped": sorted(people.stopped)}
        try:
            note["boot"] = _BOOT_ID.read_text().strip()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self._folder / op_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                json.dump(note, file)
        except OSError as error:
            logger.warning(
                "the record of the processes stopped for operation %s was not written: %s; check the disk of %s",
                op_id,
                error,
                self._folder,
            )

    def people(self, op_id: str) -> ProcessSet | None:
        """Return the stopped processes of that operation, by pid and start time; None if unknown or from another boot.

        Raises HegmError if that cannot be read now: no process stays stopped for lack of a descriptor.
        """
        try:
            note = as_map(json.loads((self._folder / op_id).read_text())) or {}
            if note.get("boot") != _BOOT_ID.read_text().strip():
                return None
        except (OSError, ValueError) as error:
            if (scarce := scarcity(error)) is not None:
                raise scarce from error
            return None
        ticks = as_map(note.get("start_ticks")) or {}
        stopped = frozenset(pid for pid in as_list(note.get("stopped")) or () if isinstance(pid, int))
        return ProcessSet({int(pid): value for pid, value in ticks.items() if isinstance(value, int)}, stopped)

    def forget(self, op_id: str) -> None:
        """Remove the record: the processes run or have exited. Raises nothing; what remains goes with its operation."""
        try:
            (self._folder / op_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning(
                "a record of stopped processes was not removed: %s; check the disk of %s", error, self._folder
            )

    def keep_only(self, op_ids: Collection[str]) -> None:
        """Remove the records of all other operations, at the start of a daemon. Raises nothing."""
        with suppress(OSError):
            for name in os.listdir(self._folder):
                if name not in op_ids:
                    self.forget(name)
