"""What is struck when: every state of every command, at each moment that can be told apart, for each victim.

Pure. A cell is one kill, or one fault. To add a victim, such as a helper process of the daemon: a name here, and in
node.py where it is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from tests.chaos.halts import BEGUN, MOMENTS, RECORDED

MIGRATE, SUSPEND, RESUME, DRAIN = "migrate", "suspend", "resume", "drain"
DAEMON, CLIENT, KEEPER, BOTH = "daemon", "client", "keeper", "daemon and keeper"
VICTIMS = (DAEMON, CLIENT, KEEPER, BOTH)
#: What is done to the worker, which lives: its agent's connection ends, ends within a frame, carries nonsense; and the
#: whole process stands still for a while.
CUT, HALF, SPOILT, STOPPED = "cut socket", "half a frame", "nonsense", "stopped worker"
FAULTS = (CUT, HALF, SPOILT, STOPPED)

_GOING = ("planned", "arming", "quiescing", "measuring", "evacuating", "checkpointing")
_COMING = ("restoring", "refilling", "releasing", "verifying", "tidying")
#: The states that a command goes through, in order; at the last one there is nothing left to do.
STATES = {
    MIGRATE: (*_GOING, *_COMING, "done"),
    SUSPEND: (*_GOING, "leaving", "suspended"),
    RESUME: ("arming", *_COMING, "done"),
    DRAIN: (*_GOING, *_COMING, "done"),
}
#: How an operation may end when the daemon or the agent's connection did, under it.
ENDS = {
    MIGRATE: frozenset({"done", "undone"}),
    SUSPEND: frozenset({"suspended", "undone"}),
    RESUME: frozenset({"done", "suspended", "undone"}),
    DRAIN: frozenset({"done", "undone"}),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kill: of whom, during which command, in which state, at which moment of it."""

    command: str
    state: str
    moment: str
    victim: str

    @property
    def ends(self) -> frozenset[str]:
        """The states in which the operation may come to rest."""
        lived = self.victim in (CLIENT, KEEPER, STOPPED)
        return frozenset({STATES[self.command][-1]}) if lived else ENDS[self.command]


def every_cell(victims: Sequence[str] = VICTIMS) -> Iterator[Cell]:
    """All of them, one victim after the other: the last of them find what the others have left in one daemon."""
    for victim, (command, states) in product(victims, STATES.items()):
        for state, moment in product(states, MOMENTS):
            if state != states[-1] or moment in (RECORDED, BEGUN):
                yield Cell(command, state, moment, victim)


def few_cells(victims: Sequence[str]) -> Iterator[Cell]:
    """Every state of every command once, with victims and moments in turn."""
    turn = 0
    for command, states in STATES.items():
        for state in states[:-1]:
            yield Cell(command, state, MOMENTS[turn % 3], victims[turn % len(victims)])
            turn += 1
