"""Lives of jobs that keep their CUDA contexts while they are suspended: other processes may use their memory, and no
byte is lost.

`python -m tests.simulation.seeds kept SEED` tells one again.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from hegmd.migration.machine import events, machine
from hegmd.migration.machine.events import Event, Failed
from hegmd.migration.machine.operation import Operation
from tests.simulation import weather
from tests.simulation.daemon import Daemon, Parts
from tests.simulation.hands import Running
from tests.simulation.kept import KeptContextActions
from tests.simulation.mutants import Mutant
from tests.simulation.node import Process
from tests.simulation.requests import IMAGE
from tests.simulation.seeds import live_kept
from tests.wide import quick_first

# The quick part has the first few of the lives that differ by their seeds alone.
QUICK, SEEDS, CHUNK = 20, 520, 125
# A bug has to be found among so many.
ENOUGH = 300
QUIET = dict.fromkeys(weather.draw_odds(Random(0)), 0.0)
# Quiet lives in which jobs are suspended on GPUs of a driver and on simulated ones, alone and as ranks.
QUIET_SEEDS = (0, 1, 2, 3, 5, 8)
# Lives in which a reload fails because its memory is taken, and a checkpoint because the memory is still used.
RARE = (203, 263)


def test_every_promise_is_kept_in_a_few_lives() -> None:
    for seed in range(QUICK):
        life = live_kept(seed)
        assert life.violation is None, str(life)


@pytest.mark.thorough
@pytest.mark.parametrize("first", quick_first(range(QUICK, SEEDS, CHUNK), 1, most=1))
def test_every_promise_is_kept_whatever_happens(first: int) -> None:
    for seed in range(first, first + CHUNK):
        life = live_kept(seed)
        assert life.violation is None, str(life)


def test_the_lives_see_every_end_of_a_step() -> None:
    """Otherwise the seeds above prove less than they seem to."""
    observed: Counter[tuple[str, bool]] = Counter()

    class RecordingCarrier(KeptContextActions):
        def do(self, running: Running, process: Process) -> Event | None:
            done = super().do(running, process)
            if process.keeps_context:
                observed[running.effect.tag, isinstance(done, Failed)] += 1
            return done

    wanted = {(tag, False) for tag in ("reserve", "offload", "checkpoint", "restore", "reload", "inspect", "verify")}
    wanted |= {("reserve", True), ("reload", True)}
    for seed in (*RARE, *range(ENOUGH)):
        live_kept(seed, Parts(hands=RecordingCarrier))
        if wanted <= observed.keys():
            break
    assert wanted <= observed.keys()


class _Point:
    """Counts the points of a quiet life, and has its daemon killed at one of them."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.calls = at, 0

    def count(self, _daemon: Daemon, _point: str) -> bool:
        self.calls += 1
        return self.calls - 1 == self.at


# Every eighth point of the first life, every third of each, and all points of each.
POINTS = [(QUIET_SEEDS[0], 8), *((seed, every) for every in (3, 1) for seed in QUIET_SEEDS)]


@pytest.mark.thorough
@pytest.mark.parametrize(("seed", "every"), quick_first(POINTS, 1, most=1 + len(QUIET_SEEDS)))
def test_a_daemon_killed_at_any_point_of_a_quiet_life_breaks_no_promise(seed: int, every: int) -> None:
    """Before and after every record and every effect, while others take the memory that has become free."""
    for odds in (QUIET, {**QUIET, "grab": 1.0}):
        quiet = _Point()
        assert live_kept(seed, odds=odds, points=quiet.count).violation is None
        for at in range(0, quiet.calls, every):
            life = live_kept(seed, odds=odds, points=_Point(at).count)
            assert life.daemon.crashes == 1
            assert life.violation is None, f"killed at point {at}\n{life}"


# -- each promise can be broken ----------------------------------------------------------------------------------------


class IgnoresContextGpu(KeptContextActions):
    """The GPU of the context is not looked at."""

    def restore_kept(self, effect: Any, process: Process, home: str) -> Event:
        return super().restore_kept(effect, process, effect.gpu)


class ReportsFailedReloadAsDone(KeptContextActions):
    def do(self, running: Running, process: Process) -> Event | None:
        done = super().do(running, process)
        effect = running.effect
        if effect.tag == "reload" and isinstance(done, Failed):
            return events.Reloaded(effect=effect.number, worker=effect.worker)
        return done


def plans_any_gpu(op: Operation, event: Event, now: float) -> machine.Result:
    if isinstance(event, events.ResumeRequested):
        event = event.replace(to=dict.fromkeys(event.to, "gpu2"))
    return machine.handle(op, event, now)


def writes_an_image_of_it(op: Operation, event: Event, now: float) -> machine.Result:
    """A suspended job that keeps its context is dumped as if it had nothing on its GPU."""
    if isinstance(event, events.ResumeRequested) and op.phase == "suspended":
        event = events.ImageRequested(handoff=IMAGE)
    return machine.handle(op, event, now)


MUTANTS = {
    "restores_anywhere": Mutant(Parts(hands=IgnoresContextGpu, handle=plans_any_gpu)),
    "calls_a_failed_reload_done": Mutant(Parts(hands=ReportsFailedReloadAsDone), found_by=203),
    "writes_an_image_of_it": Mutant(Parts(hands=KeptContextActions, handle=writes_an_image_of_it)),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_an_injected_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    seeds = dict.fromkeys((mutant.found_by, *range(ENOUGH)))
    assert any(live_kept(seed, mutant.parts, odds=mutant.odds).violation is not None for seed in seeds)
