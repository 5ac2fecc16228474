"""The cells of the campaign: each victim is killed in every state of every command, at each moment that can be
distinguished.

Pure. A cell is one kill, or one fault. To add a victim: a name here, and in node.py or gpu_node.py where it is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from tests.chaos.halts import BEGUN, MOMENTS, RECORDED

MIGRATE, SUSPEND, RESUME, DRAIN = "migrate", "suspend", "resume", "drain"
DAEMON, CLIENT, KEEPER, BOTH = "daemon", "client", "keeper", "daemon and keeper"
VICTIMS = (DAEMON, CLIENT, KEEPER, BOTH)
#: Faults of a living worker: its agent's connection ends, ends within a frame, or carries nonsense; or the whole
#: process is stopped for a while.
CUT, HALF, SPOILT, STOPPED = "cut socket", "half a frame", "nonsense", "stopped worker"
FAULTS = (CUT, HALF, SPOILT, STOPPED)
#: The GPU helper, on nodes that have one: killed, stopped for a while, and stopped until its daemon ends it.
HELPER, STILL, HUNG = "helper", "stopped helper", "hung helper"
OF_THE_HELPER = (HELPER, STILL, HUNG)

_GOING = ("planned", "reserving", "quiescing", "measuring", "offloading", "checkpointing")
_COMING = ("restoring", "reloading", "releasing", "verifying", "tidying")
#: The states that a command goes through, in order; at the last one there is nothing left to do.
STATES = {
    MIGRATE: (*_GOING, *_COMING, "done"),
    SUSPEND: (*_GOING, "leaving", "suspended"),
    RESUME: ("reserving", *_COMING, "done"),
    DRAIN: (*_GOING, *_COMING, "done"),
}
#: States in which a deadline of seconds ends a hung helper. A state query of the driver has five minutes, since a
#: driver call may be running.
_SOON_OVER = frozenset({"reserving", "offloading", "reloading"})
#: The same for a process without an agent, which only the driver can move.
_STATES_BARE = {
    MIGRATE: ("planned", "reserving", "checkpointing", "restoring", "verifying", "tidying", "done"),
    SUSPEND: ("planned", "checkpointing", "leaving", "suspended"),
    RESUME: ("reserving", "restoring", "verifying", "done"),
    DRAIN: ("planned", "reserving", "checkpointing", "restoring", "verifying", "tidying", "done"),
}
#: How an operation may end when the daemon, its helper or the agent's connection did, under it.
ENDS = {
    MIGRATE: frozenset({"done", "rolled-back"}),
    SUSPEND: frozenset({"suspended", "rolled-back"}),
    RESUME: frozenset({"done", "suspended", "rolled-back"}),
    DRAIN: frozenset({"done", "rolled-back"}),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One kill: the victim, the command, the state, the moment within it, and the kind of job."""

    command: str
    state: str
    moment: str
    victim: str
    with_agent: bool | None = None  # None: the job whose turn it is

    def fits(self, *, has_agent: bool) -> bool:
        """Whether a job with or without an agent can be struck so."""
        goes_through = STATES if has_agent else _STATES_BARE
        return self.state in goes_through[self.command] and self.with_agent in (None, has_agent)

    @property
    def ends(self) -> frozenset[str]:
        """The states in which the operation may end or wait."""
        lived = self.victim in (CLIENT, KEEPER, STOPPED, STILL)
        return frozenset({STATES[self.command][-1]}) if lived else ENDS[self.command]


def every_cell(victims: Sequence[str] = VICTIMS) -> Iterator[Cell]:
    """All of them, one victim after the other: the last of them find what the others have left in one daemon."""
    for victim, (command, states) in product(victims, STATES.items()):
        for state, moment in product(states, MOMENTS):
            is_too_dear = victim == HUNG and (moment != RECORDED or command == DRAIN or state not in _SOON_OVER)
            if not is_too_dear and (state != states[-1] or moment in (RECORDED, BEGUN)):
                yield Cell(command, state, moment, victim)


def for_both_kinds(cells: Iterable[Cell]) -> Iterator[Cell]:
    """Each for a job with an agent, and for one without where that goes through it."""
    for cell, with_agent in product(cells, (True, False)):
        if cell.fits(has_agent=with_agent):
            yield replace(cell, with_agent=with_agent)


def few_cells(victims: Sequence[str], commands: Sequence[str] = tuple(STATES)) -> Iterator[Cell]:
    """Every state of these commands once, with victims and moments in turn."""
    turn = 0
    for command in commands:
        states = STATES[command]
        for state in states[:-1]:
            yield Cell(command, state, MOMENTS[turn % 3], victims[turn % len(victims)])
            turn += 1
