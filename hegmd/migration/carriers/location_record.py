"""Decides whether GPU memory holds a job's bytes instead of the pool, from the mark in its segment.

The job has a descriptor of its segment and could write any name there, and so could the writer of an image: another
job's bytes would be copied to it. So a mark only counts if it names memory of the process itself: of its operation, or
of the one that its segment was claimed from. The segment's name has that, and only the daemon writes it.
"""

from __future__ import annotations

import os

from hegmd.errors import HegmError, Refused
from hegmd.gpu_helper.mark import MARK_BYTES, Mark, read_mark
from hegmd.memory.pool import Pool
from hegmd.migration.contracts import MigratedProcess
from hegmd.migration.methods.gpus import passing_name
from hegmd.migration.methods.pool_keys import key_of


class LocationRecords:
    """The marks in the segments of the pool."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def owners(self, subject: MigratedProcess) -> tuple[str, ...]:
        """Return the names of the owners whose GPU memory may hold the process's bytes."""
        piece = self._pool.by_owner().get(key_of(subject))
        before = () if piece is None else piece.name.before
        return tuple([passing_name(operation, subject.name) for operation in (subject.operation, *before)])

    def of(self, subject: MigratedProcess) -> Mark | None:
        """Return the mark that names the memory with the bytes, or None. Raises HegmError if damaged or foreign."""
        piece = self._pool.by_owner().get(key_of(subject))
        memory = None if piece is None else piece.memory
        if memory is None:
            return None
        mark = read_mark(os.pread(memory.fd, MARK_BYTES, memory.size_bytes - MARK_BYTES))
        own = self.owners(subject)
        if mark is not None and mark.owner not in own:
            raise Refused(
                f"the pool segment of process {subject.pid} says that its bytes are held for {mark.owner[:80]!r}, "
                f"which is not its own; its own are {' and '.join(sorted(own))}",
                "report this with the log of hegmd, unless the job wrote that record itself; nothing was read",
                {"pid": subject.pid, "owner": mark.owner},
            )
        return mark

    def is_unmarked(self, subject: MigratedProcess) -> bool:
        """True if it is certain that no GPU memory has the bytes. The mark of a segment on disk is unknown."""
        piece = self._pool.by_owner().get(key_of(subject))
        try:
            return (piece is None or piece.memory is not None) and self.of(subject) is None
        except HegmError:
            return False
