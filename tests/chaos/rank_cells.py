"""The kills while a job of two ranks moves, goes into images and comes out of them: every state, for each victim.

Pure. A cell is one kill, or one rank that is stopped. Besides what is killed around any job there are a rank, which
the others wait for, and the launcher, whose store the ranks meet in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.cells import CLIENT, DAEMON
from tests.chaos.halts import BEGUN, MOMENTS, RECORDED
from tests.chaos.image_cells import AT_CRIU, CHECKPOINT, LEFT, READING, RESTORE, REVIVED, ImageCell

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
#: The waits of ranks for one another: a rank that is stopped there never arrives.
_WAITS = ("counting", "quiescing", "disconnecting", "reconnecting")


@dataclass(frozen=True, slots=True)
class RankCell:
    """One kill: the victim, the command, the state, and the moment within it."""

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
        """The states in which the operation may end or wait."""
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


# ---- images ----------------------------------------------------------------------------------------------------------

_INTO_AN_IMAGE = (*_GOING, "handing")
IMAGE_STATES = {
    CHECKPOINT: (*_INTO_AN_IMAGE, "ending", "done"),
    LEFT: (*_INTO_AN_IMAGE, "restoring", *_COMING, "sealing", "done"),
    RESTORE: (READING, "reserving", "restoring", *_COMING, "done"),
}
IMAGE_VICTIMS = (DAEMON, CLIENT, RANK, LAUNCHER)


class RankImageCell(ImageCell):
    """One kill during a dump or a restore of a job of ranks."""

    __slots__ = ()

    @property
    def ends(self) -> frozenset[str]:
        if self.victim == CLIENT and self.state == READING:
            return frozenset({"done", "rolled-back"})  # before there is an operation, a restore ends with its client
        if not self.may_end_the_job:
            return super().ends
        held = {"suspended"} if self.victim == LAUNCHER else set[str]()
        return frozenset({"done", "rolled-back", "lost"} | held)

    @property
    def may_end_the_job(self) -> bool:
        """Whether a process of the job is killed, without which the others cannot train on."""
        return self.victim in (RANK, LAUNCHER)


#: Kills while no image exists yet, while it is written from a running job, and while a job is restored from it.
TELLING_OF_IMAGES = (
    RankImageCell(LEFT, "tidying", RECORDED, DAEMON),
    RankImageCell(CHECKPOINT, "disconnecting", RECORDED, LAUNCHER),
    RankImageCell(RESTORE, "reconnecting", RECORDED, RANK),
)


def every_rank_image_cell() -> Iterator[RankImageCell]:
    """All of them, one victim after the other."""
    for victim in IMAGE_VICTIMS:
        for command, states in IMAGE_STATES.items():
            for state in states:
                for moment in _moments_of_images(victim, command, state):
                    yield RankImageCell(command, state, moment, victim)


def _moments_of_images(victim: str, command: str, state: str) -> tuple[str, ...]:
    is_of_job = victim in (RANK, LAUNCHER)
    if state == READING:
        return (REVIVED,) if is_of_job else (AT_CRIU, REVIVED)
    if is_of_job and state == "ending":
        return (RECORDED,)  # they end anyway
    if state == "done":
        return () if is_of_job and command == CHECKPOINT else (RECORDED, BEGUN)
    return MOMENTS
