"""The state that a command is to be started from, or those of its ranks, and the right to go on from it.

That right is a descriptor with a lock (flock): the process that is started inherits it and holds it for as long as it
lives, and here it is kept until the operation is over, for another start. In that file (`claim_notes`) the process
notes that it has the state back, and its supervisor that it has then come to its end: whoever reads that later, the
next daemon too, starts nobody any more. Where there is no daemon to see it, the process notes as well that it has
trained on, and from then on its end is its own. Of ranks, whose launcher leaves no descriptor open for them, each has
its state and that right handed to it (`rank_states`).
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
    """Owns the descriptors, and of ranks the addresses at which these have theirs. Closing twice is fine."""

    def __init__(self) -> None:
        self._state: int | None = None
        self._lock: int | None = None
        self._ranks: RankStates | None = None

    def take(self, ranks: Sequence[int], fds: Descriptors) -> None:
        """Have these in the place of what there was. Raises OSError where not all of them are there: without its state
        the job would begin anew."""
        self.close()
        awaited = len(ranks or (0,)) + 1
        if len(fds) != awaited:
            raise OSError(f"{len(fds)} of {awaited} descriptors have come")
        if ranks:
            states = {rank: fds.steal(index) for index, rank in enumerate(ranks)}
            self._ranks = RankStates(states, fds.steal(len(ranks)))
        else:
            self._state, self._lock = fds.steal(0), fds.steal(1)

    def enter(self, environ: dict[str, str]) -> None:
        """Have who is started with that environment find it, and none of an earlier start, or by `--env`."""
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
        """The descriptors of the state and of the right, as who is started is to have them open."""
        return self._state, self._lock if self._ranks is None else self._ranks.lock

    @property
    def right(self) -> int | None:
        """That of one process; a launcher has it for its ranks, and goes on from nothing itself."""
        return self._lock

    def serve(self) -> None:
        """Hand over to the ranks that have asked."""
        if self._ranks is not None:
            self._ranks.serve()

    # ---- what is noted beside the right ------------------------------------------------------------------------------

    def is_back(self) -> bool:
        """Whether the process that has ended had put the state back. Ranks do not note it."""
        return self._lock is None or claim_notes.is_back(self._lock)

    def is_taken_up(self) -> bool:
        """Whether whom it is for has it: has put it back, or of ranks, have all trained on from theirs."""
        return self.is_back() if self._ranks is None else self._ranks.are_past

    def is_past(self) -> bool:
        """Whether what was started has trained on from the state, so that its end is its own, if no daemon says so."""
        if self._ranks is not None:
            return self._ranks.are_past
        return self._lock is not None and claim_notes.is_past(self._lock)

    def note_end(self) -> None:
        """Beside the word of the process that it had the state back."""
        if self._lock is not None:
            claim_notes.note_end(self._lock)

    def forget_notes(self) -> None:
        """The next process has not put the state back."""
        lock = self._lock if self._ranks is None else self._ranks.lock
        if lock is not None:
            claim_notes.forget(lock)

    # ---- letting go --------------------------------------------------------------------------------------------------

    def end(self) -> None:
        """Nobody is to be started from it any more; ranks that ask are told so."""
        if self._ranks is not None:
            self._ranks.end()
        held, self._state, self._lock = (self._state, self._lock), None, None
        for fd in held:
            if fd is not None:
                os.close(fd)

    def supersede(self) -> None:
        """Another one is to come: who was started from states of ranks is to end, and nobody else is given them."""
        if self._ranks is not None and self._ranks.lock is not None:
            self._close_ranks()
        self.end()

    def close(self) -> None:
        """Be there for nobody any more."""
        self.end()
        self._close_ranks()

    def _close_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            ranks.close()
