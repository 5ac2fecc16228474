"""The kills around a checkpoint and a restore: each participating process, in each state.

Pure. A cell is one kill. Besides the moments of `halts` there are those of a restore before there is an operation, in
which no journal is written: CRIU is at work, and the processes are there.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.cells import CLIENT, DAEMON
from tests.chaos.halts import BEGUN, MOMENTS, RECORDED, UNRECORDED

CHECKPOINT, LEFT, RESTORE = "checkpoint", "leave-running", "restore"
#: CRIU itself, who writes and reads the image with its owner's rights, and the process that trains.
CRIU, HAND, WORKER = "CRIU", "image's hand", "training"
VICTIMS = (DAEMON, CLIENT, CRIU, HAND, WORKER)

_GOING = ("planned", "reserving", "quiescing", "measuring", "offloading", "checkpointing", "handing")
_COMING = ("restoring", "reloading", "releasing", "verifying", "tidying")
#: In a restore: from the command until there is an operation.
READING = "reading"
STATES = {
    CHECKPOINT: (*_GOING, "ending", "done"),
    LEFT: (*_GOING, *_COMING, "sealing", "done"),
    RESTORE: (READING, "reserving", *_COMING, "done"),
}
AT_CRIU, REVIVED = "CRIU works", "revived"
#: The only states in which there is such a process, and the moments at which it surely is.
_OF_CRIU = {(CHECKPOINT, "handing"): (BEGUN,), (LEFT, "handing"): (BEGUN,), (RESTORE, READING): (AT_CRIU,)}
_OF_HAND = {
    (CHECKPOINT, "handing"): (BEGUN,),
    (LEFT, "handing"): (BEGUN,),
    (LEFT, "sealing"): (RECORDED, BEGUN),
    (RESTORE, READING): (AT_CRIU,),
}


@dataclass(frozen=True, slots=True)
class ImageCell:
    """One kill: the victim, the command, the state, and the moment within it."""

    command: str
    state: str
    moment: str
    victim: str

    @property
    def ends(self) -> frozenset[str]:
        """The states in which the operation may end or wait, if there is one."""
        if self.victim == WORKER:
            return frozenset({"done", "rolled-back", "lost"})
        if self.victim == CLIENT:
            return frozenset({"done"})
        return frozenset({"done", "rolled-back", "suspended"} if self.command == RESTORE else {"done", "rolled-back"})

    @property
    def may_end_the_job(self) -> bool:
        """Whether the job itself is killed, or may be: by CRIU's end while it works inside of the job's processes."""
        return self.victim == WORKER or (self.victim == CRIU and self.command != RESTORE)


#: Kills that a random draw may miss: the daemon before any of the image exists, and after a whole image that the
#: journal knows of; CRIU within its dump, last, since the job may end by it.
TELLING = (
    ImageCell(CHECKPOINT, "handing", RECORDED, DAEMON),
    ImageCell(CHECKPOINT, "ending", RECORDED, DAEMON),
    ImageCell(CHECKPOINT, "handing", BEGUN, CRIU),
)


def every_image_cell() -> Iterator[ImageCell]:
    """All of them, one victim after the other: the last of them find what the others have left in one daemon."""
    for victim in VICTIMS:
        for command, states in STATES.items():
            for state in states:
                for moment in _moments(victim, command, state):
                    yield ImageCell(command, state, moment, victim)


def _moments(victim: str, command: str, state: str) -> tuple[str, ...]:
    """Return the moments of that state that have such a victim and can be distinguished."""
    if victim == CRIU:
        return _OF_CRIU.get((command, state), ())
    if victim == HAND:
        return _OF_HAND.get((command, state), ())
    if state == READING:
        return (REVIVED,) if victim == WORKER else (AT_CRIU, REVIVED)
    if (victim, state) == (WORKER, "ending"):
        return (RECORDED,)  # it ends anyway
    if state == STATES[command][-1]:
        return () if victim == WORKER else (RECORDED, BEGUN)
    if victim == WORKER and state != "handing":
        return RECORDED, UNRECORDED
    return MOMENTS


def few_image_cells(seed: int, count: int) -> list[ImageCell]:
    """Draw so many cells, each victim once before any comes twice. Keep the job: another one imports PyTorch again."""
    draw = random.Random(seed)
    lasting = [cell for cell in every_image_cell() if not cell.may_end_the_job]
    by_victim = {cell.victim: [one for one in lasting if one.victim == cell.victim] for cell in lasting}
    drawn: list[ImageCell] = []
    while len(drawn) < count:
        drawn += [draw.choice(by_victim[victim]) for victim in draw.sample(sorted(by_victim), len(by_victim))]
    return drawn[:count]
