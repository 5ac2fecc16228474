"""The kills during the moves of a job of two ranks: every state of every command, for each victim.

Pure. A cell is one kill, or one rank that is stopped. Besides what is killed around any job there are a rank, which
the others wait for, and the launcher, whose store the ranks meet in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.cells import CLIENT, DAEMON
from tests.chaos.halts import BEGUN, MOMENTS, RECORDED

EXCHANGE, SUSPEND, RESUME, PART, SWAP = "exchange ranks", "suspend ranks", "resume ranks", "move one rank", "swap ranks"
RANK, LAUNCHER, STUCK = "rank", "launcher", "stuck rank"
VICTIMS = (DAEMON, CLIENT, RANK, LAUNCHER, STUCK)

_GOING = (
    *("planned", "reserving", "counting", "quiescing", "measuring"),
    *("disconnecting", "locking", "checkpointing"),
)
_COMING = ("reloading", "reconnecting", "releasing", "verifying", "tidying")
#: The states that each command takes the job through, in order.
STATES = {
    EXCHANGE: (*_GOING, "restoring", *_COMING, "done"),
    SUSPEND: (*_GOING, "leaving", "suspended"),
    RESUME: ("reserving", "restoring", *_COMING, "done"),
    PART: (*_GOING, "restoring", "unlocking", *_COMING, "done"),
    SWAP: (*_GOING, "restoring", *_COMING, "done"),
}
#: The waits of ranks for one another: one that is stopped there never comes.
_WAITS = ("counting", "quiescing", "disconnecting", "reconnecting")


@dataclass(frozen=True, slots=True)
class RankCell:
    """One kill: of whom, during which command, in which state, at which moment of it."""

    command: str
    state: str
    moment: str
    victim: str

    @property
    def ends_the_job(self) -> bool:
        """Whether the job cannot train on: ranks do not without each other, and their launcher's store is gone."""
        return self.victim in (RANK, LAUNCHER)

    @property
    def ends(self) -> frozenset[str]:
        """The states in which the operation may come to rest."""
        last = STATES[self.command][-1]
        if self.victim == CLIENT:
            return frozenset({last})
        held = {"suspended"} if self.command in (SUSPEND, RESUME) or self.victim in (LAUNCHER, STUCK) else set[str]()
        lost = {"lost"} if self.victim == RANK else set[str]()
        return frozenset({last, "rolled-back"}) | held | lost


#: Three kills that one job can have: while its ranks wait for one another, and on the way off their GPUs.
TELLING = (
    RankCell(PART, "unlocking", RECORDED, DAEMON),
    RankCell(SWAP, "reconnecting", BEGUN, DAEMON),
    RankCell(EXCHANGE, "locking", RECORDED, RANK),
)


def every_rank_cell() -> Iterator[RankCell]:
    """All of them, one victim after the other."""
    for victim in VICTIMS:
        for command, states in STATES.items():
            for state in states:
                for moment in _moments(victim, state, is_last=state == states[-1]):
                    yield RankCell(command, state, moment, victim)


def _moments(victim: str, state: str, *, is_last: bool) -> tuple[str, ...]:
    if victim == STUCK:
        return (RECORDED,) if state in _WAITS else ()
    return (RECORDED, BEGUN) if is_last else MOMENTS
