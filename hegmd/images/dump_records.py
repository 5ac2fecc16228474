"""Who stands for an image: a note of each dump is on disk from before CRIU until its job goes on, or has ended.

Owns these notes. Whose parent has ended is in no tree of the job's any more, so that a daemon which comes after one
that was killed would never find the children of a job that was killed too: CRIU has stopped them, and nobody would let
them go on. A kernel that ends takes the processes along, so a note is not synced to the disk, and one of another boot
is of nobody. Blocks, but for no longer than a small file takes.
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
        """CRIU is about to stop these. Raises nothing: what has begun comes to its end on a full disk, too."""
        note: dict[str, object] = {"start_ticks": dict(people.start_ticks), "stopped": sorted(people.stopped)}
        try:
            note["boot"] = _BOOT_ID.read_text().strip()
            self._folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self._folder / op_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                json.dump(note, file)
        except OSError as error:
            logger.warning(
                "no note tells who stands for operation %s: %s; look at the disk of %s", op_id, error, self._folder
            )

    def people(self, op_id: str) -> ProcessSet | None:
        """Who stood for that operation, by number and start time; None where nobody knows, or of another boot.

        Raises HegmError where that cannot be read now: nobody is left standing for want of a descriptor.
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
        """They go on, or have ended. Raises nothing: what stays is taken away with its operation."""
        try:
            (self._folder / op_id).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("a note of who stood cannot be taken away: %s; see the disk of %s", error, self._folder)

    def keep_only(self, op_ids: Collection[str]) -> None:
        """At the start of a daemon: no other operation has anybody who stands. Raises nothing."""
        with suppress(OSError):
            for name in os.listdir(self._folder):
                if name not in op_ids:
                    self.forget(name)
