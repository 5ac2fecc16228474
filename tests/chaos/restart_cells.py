"""The kills during a restart: every state of `migrate --via restart`, every process that takes part in it.

Pure. A cell is one kill. Besides the moments of `halts` there are those of the starting process, which reports its
progress itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.cells import CLIENT, DAEMON, KEEPER
from tests.chaos.halts import BEGUN, MOMENTS, RECORDED

#: The process that trains: the one that is to exit, is exiting, or has continued; and the one that is on its way up.
WORKER, LOADING = "worker", "loading worker"
SUPERVISOR = "supervisor"
VICTIMS = (DAEMON, SUPERVISOR, WORKER, LOADING, CLIENT, KEEPER)
#: No kill: the training ends as soon as it continues, before a boundary was reported; and that
#: while there is no daemon.
ENDING, ENDING_ALONE = "end of the training", "end without a daemon"

#: The states of a restart. In `restoring` there is no process, and then one that loads. In `settling` the process has
#: reported that it has the state, and gets an order to stop at its next boundary.
STATES = (
    *("planned", "reserving", "readying", "quiescing", "measuring", "offloading", "checkpointing"),
    *("restoring", "settling", "tidying", "done"),
)
RESTORING = "restoring"
SINCE = {"settling": RESTORING}
#: How far the process that is started says it is: Python runs; PyTorch is there; the model is made.
STARTED, IMPORTED, MADE = "started", "imported", "made"
ON_ITS_WAY = (STARTED, IMPORTED, MADE)
#: From here on its state is whole in the pool, so that the end of the process is no end of the job.
_NOT_SAVED = ("planned", "reserving", "readying", "quiescing", "measuring")


@dataclass(frozen=True, slots=True)
class RestartCell:
    """One kill: the victim, the state, and the moment within it."""

    state: str
    moment: str
    victim: str

    @property
    def ends(self) -> frozenset[str]:
        """The states in which the operation may end or wait."""
        if self.victim in (CLIENT, KEEPER, ENDING, ENDING_ALONE):
            return frozenset({"done"})
        if self.victim == SUPERVISOR:
            return frozenset({"done", "rolled-back", "suspended"})
        return frozenset({"done", "rolled-back"})

    @property
    def may_end_the_job(self) -> bool:
        """True if it kills a training whose state is not saved, or that has passed its boundary: that loses it."""
        if self.victim in (ENDING, ENDING_ALONE):
            return True
        is_over = self.moment == MOMENTS[-1]
        in_between = {"offloading": not is_over, "settling": is_over}.get(self.state, False)
        return self.victim == WORKER and (in_between or self.state in (*_NOT_SAVED, "tidying", "done"))


#: A way of its own that no draw is sure to have: the state is whole, and its process has not left yet.
TELLING = (RestartCell("checkpointing", RECORDED, DAEMON),)


def every_restart_cell() -> Iterator[RestartCell]:
    """All of them, one victim after the other."""
    for victim in VICTIMS:
        for state in STATES:
            for moment in _moments(victim, state):
                yield RestartCell(state, moment, victim)
    for victim in (ENDING, ENDING_ALONE):
        yield RestartCell(RESTORING, MADE, victim)
        yield RestartCell("settling", RECORDED, victim)


def _moments(victim: str, state: str) -> tuple[str, ...]:
    """Return the moments of that state that have such a victim and can be distinguished."""
    if victim == LOADING:
        return ON_ITS_WAY if state == RESTORING else ()
    if state == STATES[-1]:
        return RECORDED, BEGUN
    if state == RESTORING:
        return () if victim == WORKER else (*MOMENTS, *ON_ITS_WAY)
    return MOMENTS


def few_restart_cells(seed: int, count: int) -> list[RestartCell]:
    """Draw so many cells; no victim repeats before each has occurred once."""
    draw = random.Random(seed)
    by_victim = {victim: [cell for cell in every_restart_cell() if cell.victim == victim] for victim in VICTIMS}
    drawn: list[RestartCell] = []
    while len(drawn) < count:
        for victim in draw.sample(VICTIMS, len(VICTIMS)):
            drawn += [draw.choice(by_victim[victim])]
    return drawn[:count]
