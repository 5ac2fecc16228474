"""Restores that a daemon was killed in: a note of each is on disk from before CRIU until an operation has its job.

Owns these notes, and what a start does with one that it finds: no operation tells of that job, so whatever came back of
it is ended, the bytes that were read for it are given back, and the image is as it was. A process is known by its
number, by having been made after the note, and by the `hegmctl run` in its environment, which came with its memory: a
number alone may be somebody else's by then.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hegmd.criu.population import Population, end_all, population_of
from hegmd.detached import run_detached
from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.pool import Pool
from hegmd.protocol.images import Manifest
from hegmd.protocol.record import as_list, as_map
from hegmd.units import stop_unit

logger = logging.getLogger(__name__)

FOLDER_NAME = "reviving"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class HalfRevived:
    """The notes of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER_NAME

    def note(self, op_id: str, manifest: Manifest, unit: str | None) -> None:
        """A restore begins, whose job is to be that operation's. Raises HegmError."""
        runs = {str((worker.more or {}).get("run") or "") for worker in manifest.workers} - {""}
        note = {
            "boot": _BOOT_ID.read_text().strip(),
            "since_ticks": int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")),
            "pids": [process.pid for process in manifest.processes],
            "runs": sorted(runs),
            "unit": unit,
        }
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            fd = os.open(self._folder / op_id, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(fd, "w") as file:
                json.dump(note, file)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            message = f"the note of a restore cannot be written: {error.strerror or error}"
            raise HegmError(UNAVAILABLE, message, f"look at the disk of {self._folder}") from error

    def forget(self, op_id: str) -> None:
        """An operation has the job, or nobody any more. Raises nothing."""
        with suppress(OSError):
            os.unlink(self._folder / op_id)

    async def clear(self, begun: Sequence[str], pool: Pool) -> None:
        """At the start of a daemon: undo every restore whose operation is not among those that have begun."""
        for op_id, note in self._found():
            if op_id not in begun:
                logger.warning("hegmd was stopped while it restored a job as operation %s: what came of it ends", op_id)
                if isinstance(note.get("unit"), str):
                    await stop_unit(str(note["unit"]))
                await _end(note)
                for name, piece in pool.unclaimed().items():
                    if piece.name.key.operation == op_id and piece.name.source is None:
                        with suppress(HegmError):
                            await pool.drop_unclaimed(name)
            self.forget(op_id)

    def _found(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folder)):
                note: Mapping[str, object] | None = None
                with suppress(OSError, ValueError):
                    note = as_map(json.loads((self._folder / name).read_text()))
                yield name, note or {}


async def _end(note: Mapping[str, object]) -> None:
    await run_detached(lambda _: end_all(_of(note)), name="hegmd-end")


def _of(note: Mapping[str, object]) -> Population:
    """What lives of the processes of that note. Blocks."""
    pids, runs, since = as_list(note.get("pids")) or (), as_list(note.get("runs")) or (), note.get("since_ticks")
    if not isinstance(since, int) or note.get("boot") != _BOOT_ID.read_text().strip():
        return Population({})
    wanted = {f"HEGM_RUN={run}".encode() for run in runs}
    found = population_of([int(pid) for pid in pids]).start_ticks
    return Population({pid: ticks for pid, ticks in found.items() if ticks >= since and wanted & _environ(pid)})


def _environ(pid: int) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()
