"""Whole lives of a daemon, each drawn from one number: a node, what is asked, a schedule and its bad luck.

A life has a stormy part, in which anything may happen, and a calm one, in which only what is under way continues; by
the end of that every worker that lives has to train, every suspended job has to have been resumed, and nothing may be
held for anybody. `python -m tests.simulation.seeds SEED` lives one again and tells its story; with `restart` before the
seed, one of jobs that are moved by restart, with `ranks`, one of jobs whose ranks have communicators, and with `kept`,
one of jobs that keep their CUDA contexts while they are suspended.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from hegmd.migration.machine import events
from tests.simulation import kept, ranks, requests, restarted, weather
from tests.simulation.daemon import Daemon, Parts
from tests.simulation.kept import KeptContextActions
from tests.simulation.node import Node, Process, Violation
from tests.simulation.promises import check, judge
from tests.simulation.ranks import RankNodeActions
from tests.simulation.restarted import RestartNodeActions
from tests.simulation.weather import UNIT_BYTES

# How processes are moved in a life: by books, by the driver beside an agent, or by the driver alone.
SIMULATED, DRIVEN, ALONE = "simulated", "driven", "alone"
STORM_STEPS = 160
CALM_STEPS = 1500


@dataclass
class SeedResult:
    """How one seed went. `violation` is None when all promises were kept."""

    seed: int
    daemon: Daemon
    violation: str | None = None

    def __str__(self) -> str:
        ops = [str(op) for op in self.daemon.ops.values()]
        end = "all promises were kept" if self.violation is None else f"violated: {self.violation}"
        return "\n".join([f"seed {self.seed}", *self.daemon.story, end, *ops])


def live_restarts(
    seed: int,
    parts: Parts | None = None,
    *,
    odds: Mapping[str, float] | None = None,
    points: Callable[[Daemon, str], bool] | None = None,
) -> SeedResult:
    """The same of jobs that are moved by restart; these lives are others than those of the same seeds."""
    return live(seed, parts or Parts(hands=RestartNodeActions), odds=odds, points=points, born=_born_to_restart)


def live_ranks(
    seed: int,
    parts: Parts | None = None,
    *,
    odds: Mapping[str, float] | None = None,
    points: Callable[[Daemon, str], bool] | None = None,
) -> SeedResult:
    """The same of jobs whose ranks have communicators."""
    return live(seed, parts or Parts(hands=RankNodeActions), odds=odds, points=points, born=_born_with_ranks)


def live_kept(
    seed: int,
    parts: Parts | None = None,
    *,
    odds: Mapping[str, float] | None = None,
    points: Callable[[Daemon, str], bool] | None = None,
) -> SeedResult:
    """The same of jobs that keep their CUDA contexts while they are suspended."""
    return live(seed, parts or Parts(hands=KeptContextActions), odds=odds, points=points, born=_born_kept)


def live(
    seed: int,
    parts: Parts | None = None,
    *,
    born: Callable[[Random, Parts], Daemon] | None = None,
    odds: Mapping[str, float] | None = None,
    points: Callable[[Daemon, str], bool] | None = None,
) -> SeedResult:
    """Live the life of that seed, with other parts, and some odds other than it draws."""
    random = Random(seed)
    daemon = (born or _born)(random, parts or Parts())
    daemon.odds.update(odds or {})
    daemon.points = points
    life = SeedResult(seed, daemon)
    try:
        _storm(daemon, random)
        _calm(daemon)
        judge(daemon)
    except Violation as violation:
        life.violation = str(violation)
    daemon.hands.close()
    return life


def _born(random: Random, parts: Parts) -> Daemon:
    processes: dict[str, Process] = {}
    holds: dict[str, dict[str, int]] = {"gpu0": {}, "gpu1": {}, "gpu2": {}}
    is_distributed: dict[int, bool] = {}
    for job in range(random.choice((1, 1, 2))):
        ranks = random.choice((1, 1, 2, 3))
        is_distributed[job] = ranks > 1 and random.random() < 0.7
        for _ in range(ranks):
            pid, size = 100 + len(processes), random.randrange(1, 16)
            name = str(pid)
            gpu = random.choice(("gpu0", "gpu0", "gpu1")) if processes else "gpu0"
            processes[name] = Process(name, pid, f"agent of {name}", job, gpu, size)
            holds[gpu][name] = size
    drawn = random.choice((SIMULATED, SIMULATED, DRIVEN, ALONE))
    kind = ALONE if parts.means is not None else drawn
    node = Node(
        dict.fromkeys(holds, 90),
        processes,
        is_distributed,
        pool_free=random.choice((30, 120, 120)),
        driven=kind != SIMULATED,
        keeper=kind != SIMULATED or random.random() < 0.5,
        holds=holds,
    )
    if kind == ALONE:
        _leave_alone(node, random)
    return Daemon(node, random, weather.draw_odds(random), parts)


def _born_to_restart(random: Random, parts: Parts) -> Daemon:
    daemon = Daemon(restarted.drawn_node(random), random, weather.draw_odds(random), parts)
    daemon.odds.update(restarted.draw_odds(random))
    return daemon


def _born_with_ranks(random: Random, parts: Parts) -> Daemon:
    return Daemon(ranks.drawn_node(random), random, weather.draw_odds(random), parts)


def _born_kept(random: Random, parts: Parts) -> Daemon:
    daemon = Daemon(kept.drawn_node(random), random, weather.draw_odds(random), parts)
    daemon.odds.update(kept.draw_odds(random))
    return daemon


def _leave_alone(node: Node, random: Random) -> None:
    """Nothing has an agent, and other processes use the GPUs; sizes are such that the driver's margins matter."""
    node.alone = True
    for gpu, held in node.holds.items():
        node.capacity[gpu] = random.choice((50, 90)) * UNIT_BYTES
        held.clear()
    for process in node.processes.values():
        process.token, process.size_bytes = "", process.size_bytes * UNIT_BYTES
        node.holds[str(process.gpu)][process.name] = process.size_bytes
    for gpu, held in node.holds.items():  # three large ones on one GPU are more than the smaller kind has
        node.capacity[gpu] = max(node.capacity[gpu], sum(held.values()))
    node.is_distributed = dict.fromkeys(node.is_distributed, False)
    for index in range(random.choice((0, 1, 2, 3))):
        gpu = random.choice(list(node.capacity))
        node.strangers[f"other{index}"] = Process(f"other{index}", 900 + index, "", -1, gpu, 0)


def _storm(daemon: Daemon, random: Random) -> None:
    pace = random.choice((0.15, 1.0))  # slow parts run into their limits, quick ones come through
    requests.begin(daemon, random, requests.jobs(daemon)[0])
    for _ in range(STORM_STEPS):
        if not daemon.odds["begin"] and not daemon.running and not any(daemon.live_ops()):
            break
        daemon.now += pace * random.random() * random.choice((0.1, 0.1, 0.5, 4.0))
        weather.strike(daemon, random)
        requests.ask(daemon, random)
        _one_step(daemon, random)
        check(daemon)


def _one_step(daemon: Daemon, random: Random) -> None:
    """Something that is under way continues."""
    daemon.hands.overdue_parks()
    if random.random() < 0.7:
        daemon.hands.go_on()
    choice = random.randrange(10)
    if choice < 4 and daemon.queue:
        late = daemon.luck("late")
        daemon.take(*daemon.queue.pop(random.randrange(len(daemon.queue)) if late else 0))
    elif choice < 7 and daemon.running:
        daemon.perform(random.choice(daemon.running))
    elif choice < 9:
        _go_on(daemon, random.choice(list(daemon.node.processes.values())), random.random() < 0.5)
    else:
        _ring(daemon)


def _go_on(daemon: Daemon, process: Process, eager: bool) -> None:
    """A worker does what it does by itself."""
    if process.stopped:
        return
    if process.finishing and eager:
        process.finishing = False
    elif process.ending is not None and eager:
        process.ending()
    elif process.under_way and eager and (process.connected or daemon.random.random() < 0.5):
        daemon.go_on_alone(process)
    elif process.replaced and eager:
        daemon.attend_anew(process)
    elif process.alive and not process.connected and eager:
        daemon.reconnect(process)
    else:
        daemon.node.train(process.name)


def _ring(daemon: Daemon) -> None:
    """The alarms of all operations whose time is over."""
    for op in list(daemon.live_ops()):
        if op.deadline is not None and daemon.now >= op.deadline:
            daemon.take(op.id, events.DeadlinePassed())


def _calm(daemon: Daemon) -> None:
    """No more bad luck: what is under way ends, what is suspended is resumed."""
    weather.calm_down(daemon)
    daemon.queue += daemon.unwritten.items()
    daemon.unwritten.clear()
    for step in range(CALM_STEPS):
        daemon.hands.go_on()
        if not daemon.queue and not daemon.running:
            if _is_over(daemon):
                return
            requests.resume_what_is_suspended(daemon)
        if daemon.queue:
            daemon.take(*daemon.queue.pop(0))
        elif daemon.running and step % 3:
            daemon.perform(daemon.running[step % len(daemon.running)])
        else:
            _all_go_on(daemon)
        check(daemon)
    stuck = [(op.id, op.phase, op.direction, op.pending) for op in daemon.live_ops()]
    raise Violation(f"it never ends: {stuck}, nobody's: {sorted(daemon.node.unclaimed)}")


def _is_over(daemon: Daemon) -> bool:
    return not any(daemon.live_ops()) and not daemon.node.unclaimed and daemon.hands.is_idle


def _all_go_on(daemon: Daemon) -> None:
    for process in daemon.node.processes.values():
        _go_on(daemon, process, eager=True)
    daemon.now += 0.5
    daemon.hands.overdue_parks()
    waiting = all(running.begun for running in daemon.running) and not daemon.queue
    deadlines = [op.deadline for op in daemon.live_ops() if op.deadline is not None]
    if deadlines and waiting and daemon.random.random() < 0.2:
        daemon.now = max(daemon.now, min(deadlines))
    _ring(daemon)


def main(arguments: list[str]) -> int:
    """Tell the stories of those seeds; 1 if a promise was broken in any."""
    way = {"restart": live_restarts, "ranks": live_ranks, "kept": live_kept}.get("".join(arguments[:1]))
    lives = [(way or live)(int(seed)) for seed in arguments[way is not None :]]
    sys.stdout.write("\n\n".join(str(life) for life in lives) + "\n")
    return int(any(life.violation is not None for life in lives))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
