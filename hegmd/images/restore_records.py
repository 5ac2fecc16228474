"""Restores that were interrupted by the end of a daemon: each has a record on disk from before CRIU until its job has
an operation.

Owns these records, and what a start does with one: no operation has that job, so its processes are killed, their memory
is released, and the image does not change. Its unit, or parent.py, holds all of it. A process alone is recognised by
its pid, by a start time after the record, and by its command line or the `hegmctl run` in its environment, which were
restored with its memory: a pid alone may belong to another process. A CRIU that still works has none of these yet; its
parent.py kills it. A record that could not be removed may describe a job that has an operation: processes that belong
or belonged to an operation are not touched.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hegmd.errors import UNAVAILABLE, HegmError
from hegmd.images.criu.command_line import IMAGES
from hegmd.memory.pool import Pool
from hegmd.node.processes.process_set import ProcessSet, ask, end_all, population_of
from hegmd.protocol.images import Manifest
from hegmd.protocol.record import as_list, as_map
from hegmd.system.threads import run_detached
from hegmd.system.transient_units import stop_unit

logger = logging.getLogger(__name__)

FOLDER_NAME = "reviving"
# The command line of those whom CRIU has made and given nothing of their own yet.
_OF_CRIU = frozenset((b"restore", b"--images-dir", IMAGES.encode()))
_MAX_ROUNDS = 3
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RestoreRecords:
    """The notes of one state directory."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = state_dir / FOLDER_NAME

    def note(self, op_id: str, manifest: Manifest, unit: str | None) -> None:
        """Record that a restore starts, whose job that operation will have. Raises HegmError."""
        runs = {str((worker.more or {}).get("run") or "") for worker in manifest.workers} - {""}
        note = {
            "boot": _BOOT_ID.read_text().strip(),
            "since_ticks": int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")),
            "root": manifest.root_pid,
            "pids": [process.pid for process in manifest.processes],
            "commands": [process.command or "" for process in manifest.processes],
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
            message = f"the record of a restore cannot be written: {error.strerror or error}"
            raise HegmError(UNAVAILABLE, message, f"check the disk of {self._folder}: df -h, dmesg") from error

    def forget(self, op_id: str) -> None:
        """Drop the record of a restore that has an operation or was undone. Never raises: leftovers are recognised."""
        try:
            os.unlink(self._folder / op_id)
        except FileNotFoundError:
            pass
        except OSError as error:
            logger.warning("the record of a restore cannot be removed: %s; check the disk of %s", error, self._folder)

    async def end_left(self, op_id: str) -> None:
        """End what remains of a restore whose parent program was killed. Raises nothing: processes that survive keep
        the job's pids, and the next restore names them.
        """
        for _ in range(_MAX_ROUNDS):  # a process may have forked just before it was killed
            try:
                if not await run_detached(lambda _: self._end_found(op_id), name="hegmd-end"):
                    return
            except (HegmError, OSError) as error:
                logger.error("what a restore left cannot be read: %s", error)

    def _end_found(self, op_id: str) -> bool:
        """Return True if there was a process to end."""
        came = [_of(note) for name, note in self._found() if name == op_id]
        if not came or not came[0]:
            return False
        logger.warning("a restore failed; the processes that it left are ended: %s", sorted(came[0]))
        end_all(ProcessSet(came[0]))
        return True

    async def clear(self, begun: Collection[str], taken: Collection[tuple[int, int]], pool: Pool) -> None:
        """Undo, at the start of a daemon, every restore whose operation has not begun.

        `taken` are the processes that any operation has or had, by pid and start time.
        """
        for op_id, note in self._found():
            if op_id not in begun:
                await self._undo(op_id, note, taken)
                for name, piece in pool.unclaimed().items():
                    if piece.name.key.operation == op_id and piece.name.source is None:
                        with suppress(HegmError):
                            await pool.drop_unclaimed(name)
            self.forget(op_id)

    async def _undo(self, op_id: str, note: Mapping[str, object], taken: Collection[tuple[int, int]]) -> None:
        came = await run_detached(lambda _: _of(note), name="hegmd-note")
        if came is None:
            return
        if not came.keys().isdisjoint({pid for pid, ticks in taken if came.get(pid) == ticks}):
            logger.warning("the record of operation %s is outdated: its job was restored as another operation", op_id)
            return
        logger.warning(
            "hegmd was stopped while it restored a job as operation %s: the job's processes are ended", op_id
        )
        if isinstance(note.get("unit"), str):
            await stop_unit(str(note["unit"]))
        await run_detached(lambda _: _end(came, parents_of(note)), name="hegmd-end")

    def _found(self) -> Iterator[tuple[str, Mapping[str, object]]]:
        with suppress(FileNotFoundError):
            for name in sorted(os.listdir(self._folder)):
                note: Mapping[str, object] | None = None
                with suppress(OSError, ValueError):
                    note = as_map(json.loads((self._folder / name).read_text()))
                yield name, note or {}


def _end(came: Mapping[int, int], attendants: Mapping[int, int]) -> None:
    """Kill them and, through their parent.py, everything that they or CRIU have created."""
    for pid, ticks in attendants.items():
        logger.warning("the parent of a restored job, process %d, gets SIGTERM, to end the job", pid)
        ask(pid, ticks, signal.SIGUSR1)
    end_all(ProcessSet(came))


def parents_of(note: Mapping[str, object]) -> Mapping[int, int]:
    """Return the parent programs of that restore with their start times: by their command lines, of the daemon's user,
    and started after the record. Blocks.
    """
    root, since = note.get("root"), note.get("since_ticks")
    if not isinstance(root, int) or not isinstance(since, int):
        return {}
    found: list[int] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):
                words = Path("/proc", name, "cmdline").read_bytes().split(b"\0")
                at = words.index(b"tend") if b"tend" in words else -1
                is_one = (
                    at > 0 and words[at - 1].endswith(b"/criu/parent.py") and words[at + 2 : at + 3] == [b"%d" % root]
                )
                if is_one and Path("/proc", name).stat().st_uid == os.geteuid():
                    found.append(int(name))
    return {pid: ticks for pid, ticks in population_of(found).start_ticks.items() if ticks >= since}


def _of(note: Mapping[str, object]) -> Mapping[int, int] | None:
    """Return the live processes of that record, with their start times; None if from another boot. Blocks."""
    if note.get("boot") != _BOOT_ID.read_text().strip():
        return None  # the restored processes ended with that kernel
    pids, commands, runs = (as_list(note.get(name)) or () for name in ("pids", "commands", "runs"))
    since = note.get("since_ticks")
    if not isinstance(since, int):
        return {}
    command_of = dict(zip(map(int, pids), commands, strict=False))
    variables = {f"HEGM_RUN={run}".encode() for run in runs}
    found = population_of(command_of or map(int, pids)).start_ticks
    return {
        pid: ticks
        for pid, ticks in found.items()
        if ticks >= since
        and (
            variables & _words(pid, "environ")
            or _command(pid) == (command_of.get(pid) or None)
            or _words(pid, "cmdline") >= _OF_CRIU
        )
    }


def _words(pid: int, name: str) -> frozenset[bytes]:
    try:
        return frozenset(Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0"))
    except OSError:
        return frozenset()


def _command(pid: int) -> str | None:
    """Return the command line in a manifest's form; None if there is none or the process is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    except OSError:
        return None
    return " ".join(map(os.fsdecode, words)) or None
