"""The processes between a supervisor and the ranks that it restarts: stopped while the ranks exit, then ended.

A launcher such as torchrun takes the exit of a rank for a failure: it ends the others, and may restart them all from
the beginning. So it gets SIGSTOP before the first rank exits. Before the command is started again, it is ended with all
that is left below the supervisor, and with ranks whose launcher was killed. The caller ensures that the states of all
ranks are saved by then. Everything here blocks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hegmd.node.processes.process_set import ProcessSet, end_all, population_of, stop_all
from hegmd.node.processes.process_tree import pids_below
from hegmd.node.processes.procfs import start_ticks_of
from hegmd.node.processes.surroundings import parent_of, variables_of
from hegmd.workers.job_names import RUN

# torchrun counts in it how often it has started its ranks again by itself.
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def restarts_by_torchrun(command: int) -> int:
    """Return how often torchrun has started the ranks that live below that command again by itself; 0 without any."""
    counts = [variables_of(pid, (_RESTARTS,)).get(_RESTARTS, "") for pid in pids_below(command)[1:]]
    return max([int(count) for count in counts if count.isdecimal()], default=0)


def stop_launchers(rank: int, supervisor: int) -> None:
    """Stop every process between that rank and its supervisor; none if the rank is not below it."""
    stop_all(population_of(_between(rank, supervisor)))


def end_all_below(supervisor: int) -> None:
    """End everything that the supervisor's command started, the command first, so that it starts nothing again."""
    end_all(_stopped_below(supervisor, skipped=1))


def end_orphans(run: str, lock: Path) -> None:
    """End the processes of that run that have the lock open: the ranks of a launcher that was killed keep it.

    Call it while the run's command does not run.
    """
    wanted, holders = os.stat(lock), list[int]()
    everyone = population_of([int(name) for name in os.listdir("/proc") if name.isdigit()]).start_ticks
    for pid in everyone:
        with suppress(OSError):
            if variables_of(pid, (RUN,)).get(RUN) == run:
                opened = os.listdir(f"/proc/{pid}/fd")
                holders += [pid] if any(_is_same(f"/proc/{pid}/fd/{fd}", wanted) for fd in opened) else []
    end_all(ProcessSet({pid: everyone[pid] for pid in holders}))


def _is_same(path: str, wanted: os.stat_result) -> bool:
    with suppress(OSError):  # it was closed meanwhile
        return os.path.samestat(os.stat(path), wanted)
    return False


def end_with_all_below(pid: int, start_ticks: int) -> None:
    """End that very process, itself first, with whatever it has started; fine where it has ended."""
    if start_ticks_of(pid) == start_ticks:
        end_all(_stopped_below(pid))


def end_child(pid: int, parent: int) -> None:
    """End that process with whatever it has started, if it is a child of that parent."""
    if parent_of(pid) == parent:
        end_all(_stopped_below(pid))


def end_one(pid: int, start_ticks: int) -> None:
    """End that very process."""
    end_all(ProcessSet({pid: start_ticks}))


def _stopped_below(root: int, skipped: int = 0) -> ProcessSet:
    """Stop a process and all below it, without the first `skipped`, until none has started another meanwhile."""
    stopped: dict[int, int] = {}
    while True:
        found = population_of(pids_below(root)[skipped:]).start_ticks
        below = pids_below(root)  # another process may have got the number of one that has ended
        new = {pid: ticks for pid, ticks in found.items() if pid in below and stopped.get(pid) != ticks}
        if not new:
            return ProcessSet(stopped)
        stop_all(ProcessSet(new))
        stopped |= new


def _between(rank: int, supervisor: int) -> Iterable[int]:
    line: list[int] = []
    parent = parent_of(rank)
    while parent is not None and parent > 1 and parent != supervisor:
        line.append(parent)
        parent = parent_of(parent)
    return line if parent == supervisor else ()
