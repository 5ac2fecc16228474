"""How ranks whose boundaries are counted differently stop at one place in their training.

An order to park names one count for all ranks. Ranks that count alike, such as those of DDP, are at one place there. A
stage of a pipeline without a data loader, or a rank that evaluates alone, counts otherwise: it parks where others wait
for it, or never gets to that count. So each rank publishes in the job's store whether it is parked, and how far it is
in each group. A parked rank that another one waits for continues to its next boundary, and the others then park at
their own next one. The ranks have met once all are parked and none waits for another. They count on from the ordered
number. Ranks that always wait for one another at their boundaries never meet, which is reported.

Counts only grow, and a parked rank's stay: so what a rank reads of the others may be old, but not wrong. Runs in a
thread of its own, since the store may not answer; `orders` parks and releases.
"""

from __future__ import annotations

import sys
from _thread import start_new_thread
from time import monotonic, sleep

from .messages import awaited_messages, behind, positions_of
from .notes import note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from .rank_agreement import Ranks, Statement

    #: For each group: this rank in it, its collectives, and the messages that it sent and received, by peer.
    Positions = dict[str, list[Any]]

_FIRST_POLL_S, _MAX_POLL_S = 0.001, 0.02
# How often a rank continues because a parked one is ahead in a collective. Then the numbers are taken to differ always.
_MAX_AHEAD = 3
# How often a parked rank continues in all. The stages of a pipeline meet after as many boundaries as there are stages;
# ranks that each receive before a boundary what another sends after it would continue for ever.
_MAX_ROUNDS = 32
# How long to wait for a rank that is in `Join`, which parks nowhere before the last batch of all ranks.
_JOIN_LIMIT_S = 1.0
_JOIN_FILE = "/torch/distributed/algorithms/join.py"


class Meeting:
    """One order to park, as this rank sees it.

    `ranks` returns the ranks of the job and `positions` how far this one is. Both are called in the meeting's thread,
    and `on_news` too.
    """

    def __init__(
        self, at: int, ranks: Callable[[], Ranks], positions: Callable[[], Positions], on_news: Callable[[], object]
    ) -> None:
        self._at = at
        self._ranks = ranks
        self._positions = positions
        self._on_news = on_news
        self._began = monotonic()
        self._times_ahead = self._rounds = 0
        # Counts how often this rank has parked or continued; odd while parked. A judgement for another count is void.
        self._parkings = 0
        self._judged: tuple[int, bool, bool] = (0, False, False)
        self._is_over = False
        #: Whether some rank's boundaries are counted otherwise, so that all park at their next one.
        self.is_uncounted = False
        self._is_in_join = False

    def start(self, training: int) -> Meeting:
        """Begin to publish and to read. `training` is the training thread."""
        start_new_thread(self._live, (training,))
        return self

    def end(self) -> None:
        """Publish nothing more."""
        self._is_over = True

    # ---- the agent's thread -----------------------------------------------------------------------------------------

    @property
    def is_parked(self) -> bool:
        """True from `park` until `go_on`."""
        return bool(self._parkings % 2)

    def park(self) -> None:
        """Record that this rank is parked, and stays so until `go_on`."""
        if not self.is_parked:
            self._parkings += 1

    def go_on(self) -> None:
        """Record that this rank continues."""
        if self.is_parked:
            self._parkings += 1

    @property
    def has_met(self) -> bool:
        """True once all ranks are parked at one place, or their store does not answer."""
        parkings, has_met, _ = self._judged
        return self._is_over or (has_met and parkings == self._parkings)

    @property
    def is_awaited(self) -> bool:
        """True if another rank waits for this parked one."""
        parkings, _, is_awaited = self._judged
        return is_awaited and parkings == self._parkings

    @property
    def never_meets(self) -> bool:
        """True if this rank was parked at many boundaries, and another one waited for it at each of them."""
        return self._rounds >= _MAX_ROUNDS

    @property
    def is_in_join(self) -> bool:
        """True if this rank has no batches left and waits in `Join` for the others, after the limit on that."""
        return self._is_in_join and monotonic() - self._began >= _JOIN_LIMIT_S

    # ---- its own thread ---------------------------------------------------------------------------------------------

    def _live(self, training: int) -> None:
        poll_s = _FIRST_POLL_S
        try:
            ranks = self._ranks()
            while not self._is_over:
                parkings = self._parkings
                self._is_in_join = not self.is_parked and _is_in_join(training)
                statement = self._statement(parkings)
                if parkings == self._parkings:
                    self._judge(parkings, ranks.rank, ranks.exchange("meeting", statement))
                self._on_news()
                sleep(poll_s)
                poll_s = min(2 * poll_s, _MAX_POLL_S)
        except Exception as error:  # noqa: BLE001 - the store has gone, say: then they park where they count alike
            note(f"the other ranks cannot be met: {error!r}")
            self._is_over = True
            self._on_news()

    def _statement(self, parkings: int) -> dict[str, Any]:
        return {
            "at": self._at,
            "parked": bool(parkings % 2),
            "uncounted": self.is_uncounted,
            "unmatched": self._times_ahead >= _MAX_AHEAD,
            "groups": self._positions(),
        }

    def _judge(self, parkings: int, rank: int, statements: list[Statement] | None) -> None:
        if statements is None or any(one["at"] != self._at for one in statements):
            return
        awaited = ranks_awaited(statements)
        is_awaited = bool(parkings % 2) and rank in awaited
        if is_awaited and (self._judged[0] != parkings or not self._judged[2]):
            self._rounds += 1
            self._times_ahead += awaited[rank]
        has_met = not awaited and all(one["parked"] for one in statements)
        self.is_uncounted = self.is_uncounted or is_awaited or any(one["uncounted"] for one in statements)
        self._judged = (parkings, has_met, is_awaited)


def ranks_awaited(statements: list[Statement]) -> dict[int, bool]:
    """Return each rank that another one waits for; True if only a parked one is ahead of it in a collective."""
    found: dict[int, bool] = {}
    for name in {name for one in statements for name in one["groups"]}:
        members = {one["groups"][name][0]: rank for rank, one in enumerate(statements) if name in one["groups"]}
        positions = positions_of(one["groups"][name] for one in statements if name in one["groups"])
        for own in awaited_messages(positions):
            found[members[own]] = False
        for own, other in behind(positions).items():
            is_parked = bool(statements[members[other]]["parked"])
            if not (is_parked and statements[members[own]]["unmatched"]):
                found.setdefault(members[own], is_parked)
    return found


def _is_in_join(thread: int) -> bool:
    """Return True if the thread has left its loop over batches, and takes part in the collectives of the others."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage] - documented all the same
    while frame is not None:
        if frame.f_code.co_filename.endswith(_JOIN_FILE):
            return True
        frame = frame.f_back
    return False
