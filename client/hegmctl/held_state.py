"""The state that a command is started from, or those of its ranks, and the right to continue from it.

The right is a descriptor with a lock (flock). The started process inherits it and keeps it as long as it lives; this
process keeps it until the operation is over, for another start. The process notes in the file (`claim_notes`) that it
has restored the state, and its supervisor that it has ended after that: then no process is started from the state
again, not by the next daemon either. Without a daemon the process also notes that it has trained on, and then its exit
is not a failure of the restart. Ranks, whose launcher leaves no descriptor open for them, each get their state and the
right from `rank_states`.
"""

from __future__ import annotations

import os

from hegmctl import claim_notes
from hegmctl.prestart import LOCK_FD, STATE, STATE_FD
from hegmctl.rank_states import STATES, RankStates

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from hegmctl.wire import Descriptors


class HeldState:
    """Owns the descriptors, and for ranks the sockets at which they get theirs. Closing twice is fine."""

    def __init__(self) -> None:
        self._state: int | None = None
        self._lock: int | None = None
        self._ranks: RankStates | None = None

    def take(self, ranks: Sequence[int], fds: Descriptors) -> None:
        """Replace the state and the right. Raises OSError if descriptors are missing: the job would start over."""
        self.close()
        awaited = len(ranks or (0,)) + 1
        if len(fds) != awaited:
            raise OSError(f"{len(fds)} of {awaited} descriptors have arrived")
        if ranks:
            states = {rank: fds.steal(index) for index, rank in enumerate(ranks)}
            self._ranks = RankStates(states, fds.steal(len(ranks)))
        else:
            self._state, self._lock = fds.steal(0), fds.steal(1)

    def enter(self, environ: dict[str, str]) -> None:
        """Set the variables that lead the process to its state, and remove those of an earlier start or `--env`."""
        for name in (STATE, STATE_FD, LOCK_FD, STATES):
            environ.pop(name, None)
        if self._state is not None:
            environ[STATE_FD] = str(self._state)
        if self._ranks is not None:
            environ[STATES] = self._ranks.address
        elif self._lock is not None:
            environ[LOCK_FD] = str(self._lock)

    @property
    def inherited(self) -> tuple[int | None, int | None]:
        """Return the descriptors of the state and of the right that the started process inherits.

        A launcher of ranks inherits none: it would have them in an image of the job.
        """
        return self._state, self._lock

    @property
    def right(self) -> int | None:
        """Return the right of a single process; a launcher has it for its ranks."""
        return self._lock

    def serve(self) -> None:
        """Serve the ranks that have asked."""
        if self._ranks is not None:
            self._ranks.serve()

    # ---- notes in the lock's file ------------------------------------------------------------------------------------

    def is_back(self) -> bool:
        """Return True if the process that has ended had restored the state. Ranks do not note it."""
        return self._lock is None or claim_notes.is_back(self._lock)

    def is_taken_up(self) -> bool:
        """Return True if the process has restored the state, or all ranks have trained on from theirs."""
        return self.is_back() if self._ranks is None else self._ranks.are_past

    def is_past(self) -> bool:
        """Return True if the process or all ranks have trained on from the state, as noted without a daemon."""
        if self._ranks is not None:
            return self._ranks.are_past
        return self._lock is not None and claim_notes.is_past(self._lock)

    def note_end(self) -> None:
        if self._lock is not None:
            claim_notes.note_end(self._lock)

    def forget_notes(self) -> None:
        """Clear the notes: the next process has not restored the state."""
        lock = self._lock if self._ranks is None else self._ranks.lock
        if lock is not None:
            claim_notes.forget(lock)

    # ---- letting go --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Close the descriptors, so that no process can start from the state. Ranks that ask get that answer."""
        if self._ranks is not None:
            self._ranks.end()
        held, self._state, self._lock = (self._state, self._lock), None, None
        for fd in held:
            if fd is not None:
                os.close(fd)

    def supersede(self) -> None:
        """Make way for another state: stop serving ranks."""
        if self._ranks is not None and self._ranks.lock is not None:
            self._close_ranks()
        self.end()

    def close(self) -> None:
        self.end()
        self._close_ranks()

    def _close_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
