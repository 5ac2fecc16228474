"""Whole lives of operations, each drawn from one number: a node, a request, a schedule and its bad luck.

A life has a stormy part, in which anything may happen, and a calm one, in which only what is under way goes on; by the
end of that every worker that lives has to train, or the operation has to be suspended and a resume has to work.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from hegmd.migration import events, journal, machine
from hegmd.migration.operation import MIGRATE, SUSPEND, Limits, Operation, Worker
from tests.simulation.daemon import Daemon, Handle
from tests.simulation.node import Node, Process, Violation

STORM_STEPS = 160
CALM_STEPS = 900
LIMITS = Limits(arm_s=20.0, park_s=20.0, move_s=30.0, verify_s=20.0, retry_s=5.0)


@dataclass
class Life:
    """How one seed went. `violation` is None when all promises were kept."""

    seed: int
    daemon: Daemon
    violation: str | None = None

    def __str__(self) -> str:
        return "\n".join([f"seed {self.seed}", *self.daemon.story, f"violated: {self.violation}", f"{self.daemon.op}"])


def live(
    seed: int,
    handle: Handle = machine.handle,
    *,
    acts_before_sync: bool = False,
    odds: Mapping[str, float] | None = None,
) -> Life:
    """Live the life of that seed, with some odds other than it draws."""
    random = Random(seed)
    daemon = _born(random)
    daemon.odds.update(odds or {})
    daemon.handle = handle
    daemon.acts_before_sync = acts_before_sync
    life = Life(seed, daemon)
    try:
        daemon.take(events.Begin())
        _storm(daemon, random)
        _calm(daemon, random)
        _judge(daemon)
    except Violation as violation:
        life.violation = str(violation)
    return life


def _born(random: Random) -> Daemon:
    count = random.choice((1, 1, 2, 3))
    kind = random.choice((MIGRATE, MIGRATE, SUSPEND))
    processes: dict[str, Process] = {}
    workers: list[Worker] = []
    holds: dict[str, dict[str, int]] = {"gpu0": {}, "gpu1": {}}
    for index in range(count):
        name, size = f"w{index}", random.randrange(1, 20)
        gpu = random.choice(("gpu0", "gpu0", "gpu1")) if index else "gpu0"
        processes[name] = Process(name, 100 + index, f"token{index}", gpu, size)
        holds[gpu][name] = size
        goal = None if kind == SUSPEND else "gpu1"
        workers.append(
            Worker(
                name=name,
                pid=100 + index,
                start_ticks=7,
                token=f"token{index}",
                origin=gpu,
                was_on=gpu,
                goal=goal,
                at=gpu,
                size_bytes=size,
                rooms={gpu: size},
            )
        )
    lockstep = count > 1 and random.random() < 0.7
    node = Node(
        {"gpu0": 70, "gpu1": 70},
        processes,
        lockstep,
        pool_free=random.choice((30, 80, 80)),
        imagined=random.random() < 0.5,
        holds=holds,
    )
    op = Operation(id="op1", kind=kind, lockstep=lockstep, workers=tuple(workers), limits=LIMITS)
    stormy = random.choice((0.0, 0.3, 1.0, 1.0))
    odds = {
        "lose": 0.02 * stormy,
        "double": random.choice((0.05, 0.3)) * stormy,
        "ghost": 0.2 * stormy,
        "late": random.choice((0.2, 0.8)) * stormy,
        "crash": random.choice((0.0, 0.02, 0.05)) * stormy,
        "fail": random.choice((0.0, 0.03, 0.15)) * stormy,
        "die": random.choice((0.0, 0.0, 0.004)) * stormy,
        "exec": random.choice((0.0, 0.0, 0.003)) * stormy,
        "disconnect": random.choice((0.0, 0.01, 0.03)) * stormy,
        "alone": 0.05 * stormy,
        "fill": random.choice((0.0, 0.02)) * stormy,
        "grow": random.choice((0.0, 0.05)) * stormy,
        "cancel": random.choice((0.0, 0.0, 0.0, 0.02)),
        "resume": 0.05,
    }
    return Daemon(node, op, random, odds)


def _storm(daemon: Daemon, random: Random) -> None:
    for _ in range(STORM_STEPS):
        if daemon.op.phase in machine.TERMINAL and not daemon.running:
            break
        daemon.now += random.random() * random.choice((0.1, 0.1, 0.5, 4.0))
        _bad_luck(daemon, random)
        _one_step(daemon, random)
        daemon.node.check(daemon.op)


def _one_step(daemon: Daemon, random: Random) -> None:
    """Something that is under way goes on."""
    daemon.overdue_parks()
    node = daemon.node
    choice = random.randrange(10)
    if choice < 4 and daemon.queue:
        late = daemon.luck("late")
        daemon.take(daemon.queue.pop(random.randrange(len(daemon.queue)) if late else 0))
    elif choice < 7 and daemon.running:
        daemon.perform(random.choice(daemon.running))
    elif choice < 9:
        process = random.choice(list(node.processes.values()))
        if process.under_way and random.random() < 0.5:
            daemon.go_on_alone(process)
        elif process.alive and not process.connected and random.random() < 0.5:
            daemon.reconnect(process)
        else:
            node.train(process.name)
    elif daemon.op.deadline is not None and daemon.now >= daemon.op.deadline:
        daemon.take(events.DeadlinePassed())


def _bad_luck(daemon: Daemon, random: Random) -> None:
    node = daemon.node
    process = random.choice(list(node.processes.values()))
    if daemon.luck("die") and process.alive:
        node.die(process.name)
        daemon.tell(f"{process.name} dies")
        daemon.post(events.WorkerGone(worker=process.name))
    if daemon.luck("exec") and process.runs and process.connected:
        _replace_program(daemon, process)
    if daemon.luck("disconnect") and process.alive and process.connected:
        daemon.tell(f"{process.name} disconnects")
        daemon.disconnect(process)
    impatient = not process.connected or daemon.luck("alone")
    if daemon.luck("alone") and process.alive and impatient and node.come_back_alone(process.name):
        daemon.tell(f"{process.name} goes on alone")
        if process.connected:
            daemon.disconnect(process, goes_on=False)  # as the agent does, to be asked anew
    if daemon.luck("fill"):
        gpu = random.choice(("gpu0", "gpu1"))
        node.take_room(f"other{random.randrange(3)}", gpu, node.free(gpu) - random.randrange(5))
    if daemon.luck("grow") and process.runs and process.has_bytes and process.gpu:
        size = process.size_bytes + random.randrange(1, 4)
        if node.take_room(process.name, process.gpu, size):
            process.size_bytes = size
    if daemon.luck("cancel"):
        daemon.take(events.CancelAsked(by="somebody"))
    if daemon.op.phase == "suspended" and daemon.luck("resume"):
        to = {name: random.choice(("gpu0", "gpu1")) for name in node.processes}
        daemon.take(events.ResumeAsked(to=to))
    if daemon.luck("crash"):
        daemon.crash(b"")
    daemon.haunt()


def _replace_program(daemon: Daemon, process: Process) -> None:
    """The process runs another program: to the operation it has ended, and another agent speaks from its pid."""
    daemon.tell(f"{process.name} runs another program")
    daemon.node.die(process.name)
    daemon.post(events.AgentBack(worker=process.name, token="another"))


def _calm(daemon: Daemon, random: Random) -> None:
    """No more bad luck: what is under way ends. A suspended operation is resumed when there is room for it."""
    daemon.odds = {}
    daemon.tell("calm")
    for step in range(CALM_STEPS):
        if _is_over(daemon):
            return
        if daemon.op.phase == "suspended" and not (daemon.queue or daemon.running) and _all_connected(daemon):
            _make_room(daemon)
            daemon.take(events.ResumeAsked(to=dict.fromkeys(daemon.node.processes, "gpu0")))
        if daemon.queue:
            daemon.take(daemon.queue.pop(0))
        elif daemon.running and step % 3:
            daemon.perform(daemon.running[step % len(daemon.running)])
        else:
            _go_on(daemon)
        daemon.node.check(daemon.op)
    raise Violation(f"it never ends: {daemon.op.phase}, heading {daemon.op.heading}, {daemon.op.pending}")


def _go_on(daemon: Daemon) -> None:
    for process in daemon.node.processes.values():
        if process.under_way:
            daemon.go_on_alone(process)
        elif process.alive and not process.connected:
            daemon.reconnect(process)
        daemon.node.train(process.name)
    daemon.now += 0.5
    daemon.overdue_parks()
    waiting = all(running.begun for running in daemon.running) and not daemon.queue
    if daemon.op.deadline is not None and waiting and daemon.random.random() < 0.2:
        daemon.now = max(daemon.now, daemon.op.deadline)
    if daemon.op.deadline is not None and daemon.now >= daemon.op.deadline:
        daemon.take(events.DeadlinePassed())


def _is_over(daemon: Daemon) -> bool:
    return daemon.op.phase in machine.TERMINAL and not daemon.queue and not daemon.running


def _all_connected(daemon: Daemon) -> bool:
    return all(process.connected for process in daemon.node.processes.values() if process.alive)


def _make_room(daemon: Daemon) -> None:
    for held in daemon.node.holds.values():
        for name in [name for name in held if name.startswith("other")]:
            del held[name]


def _judge(daemon: Daemon) -> None:
    """At the end: everybody trains where the operation says, and nothing is held that nobody needs."""
    node, op = daemon.node, daemon.op
    for worker in op.workers:
        process = node.processes[worker.name]
        if worker.gone and process.alive:
            raise Violation(f"{worker.name} is alive and the operation takes it for gone")
        if process.alive and not (process.runs and process.has_bytes):
            raise Violation(f"{worker.name} does not train at the end")
        if process.alive and (process.gpu != worker.goal or process.gpu != worker.at):
            raise Violation(f"{worker.name} is on {process.gpu} and not on {worker.goal}")
        rooms = {gpu for gpu, held in node.holds.items() if worker.name in held}
        if rooms != ({process.gpu} if process.alive else set()):
            raise Violation(f"room of {worker.name} is held on {sorted(rooms)}")
        if op.phase == "done" and process.alive and worker.touched and not process.proven:
            raise Violation(f"{worker.name} was called done before it had passed a boundary")
    if node.pool or node.copies:
        raise Violation(f"the pool still holds {node.pool}")
    if journal.read(daemon.disk).histories[op.id].operation != op:
        raise Violation("the journal does not lead to the operation as it is")


if __name__ == "__main__":
    sys.stdout.write(f"{live(int(sys.argv[1]))}\n")
