"""The processes between a supervisor and the ranks that it restarts: stopped while the ranks exit, then ended.

A launcher such as torchrun takes the exit of a rank for a failure: it ends the others, and may restart them all from
the beginning. So it gets SIGSTOP before the first rank exits. Before the command is started again, it is ended with all
that is left below the supervisor. The caller ensures that the states of all ranks are saved by then. Everything here
blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from hegmd.node.processes.process_set import ProcessSet, end_all, population_of, stop_all
from hegmd.node.processes.process_tree import pids_below
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.node.processes.surroundings import parent_of


def stop_launchers(rank: int, supervisor: int) -> None:
    """Stop every process between that rank and its supervisor; none if the rank is not below it."""
    stop_all(population_of(_between(rank, supervisor)))


def end_all_below(supervisor: int) -> None:
    """End everything that the supervisor's command started, the command first, so that it starts nothing again."""
    end_all(population_of(pids_below(supervisor)[1:]))


def end_with_all_below(pid: int, start_ticks: int) -> None:
    """End that very process, itself first, with whatever it has started; fine where it has ended."""
    if start_ticks_of(pid) == start_ticks:
        end_all(population_of(pids_below(pid)))


def end_child(pid: int, parent: int) -> None:
    """End that process with whatever it has started, if it is a child of that parent."""
    if parent_of(pid) == parent:
        end_all(population_of(pids_below(pid)))


def end_one(pid: int, start_ticks: int) -> None:
    """End that very process."""
    end_all(ProcessSet({pid: start_ticks}))


def _between(rank: int, supervisor: int) -> Iterable[int]:
    line: list[int] = []
    parent = parent_of(rank)
    while parent is not None and parent > 1 and parent != supervisor:
        line.append(parent)
        parent = parent_of(parent)
    return line if parent == supervisor else ()
