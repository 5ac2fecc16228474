"""Disturbances: unrequested events of a node's parts. Each kind has its odds in a life.

A kind is a name in `draw_odds`; its effect happens to the node, and the daemon gets its usual report.
"""

from __future__ import annotations

from random import Random

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from hegmd.migration.machine import events
from tests.simulation import restarted
from tests.simulation.daemon import Daemon
from tests.simulation.node import Process
from tests.simulation.restarted import RestartNodeActions

UNIT_BYTES = RESTORE_MARGIN_BYTES


def draw_odds(random: Random) -> dict[str, float]:
    """The odds of one life: from none at all to those of a node that falls apart."""
    stormy = random.choice((0.0, 0.3, 1.0, 1.0))

    def odds(*choices: float) -> float:
        return random.choice(choices) * stormy

    return {
        # of events
        "lose": odds(0.02),
        "double": odds(0.05, 0.3),
        "ghost": odds(0.2),
        "late": odds(0.2, 0.8),
        # of the daemon and its disk
        "crash": odds(0.0, 0.01, 0.02),
        "power": odds(0.0, 0.0, 0.0, 0.002),
        "amnesia": odds(0.0, 0.0, 0.0, 0.01),
        "full": odds(0.0, 0.0, 0.03),
        "break": odds(0.0, 0.0, 0.03),
        "read-only": odds(0.0, 0.0, 0.0, 0.02),
        "mend": 0.2,
        "jump": odds(0.0, 0.005),
        # of effects
        "fail": odds(0.0, 0.03, 0.15),
        "helper": odds(0.0, 0.05, 0.2),
        "busy": odds(0.0, 0.4),
        "grab": odds(0.0, 0.3),
        "hang": odds(0.0, 0.0, 0.05),
        "lie": odds(0.0, 0.0, 0.05),
        "ruin": odds(0.0, 0.0, 0.05),
        "snatch": odds(0.0, 0.5),
        "blind": odds(0.0, 0.0, 0.1),
        # of the node and its workers
        "die": odds(0.0, 0.0, 0.004),
        "exec": odds(0.0, 0.0, 0.003),
        "stop": odds(0.0, 0.0, 0.02),
        "disconnect": odds(0.0, 0.01, 0.03),
        "alone": odds(0.05),
        "fill": odds(0.0, 0.02),
        "grow": odds(0.0, 0.05),
        # of people
        "cancel": random.choice((0.0, 0.0, 0.0, 0.02)),
        "resume": 0.05,
        "begin": random.choice((0.0, 0.05)),
        "adopt": 0.1,
    }


def strike(daemon: Daemon, random: Random) -> None:
    """Whatever goes wrong in this moment."""
    if isinstance(daemon.hands, RestartNodeActions):
        restarted.strike(daemon.hands)
    process = random.choice(list(daemon.node.processes.values()))
    if daemon.node.alone:
        _strike_alone(daemon, random, process)
    else:
        if process.alive:
            _strike_worker(daemon, process)
        _strike_gpus(daemon, random)
    _strike_disk(daemon)
    if daemon.luck("jump"):
        daemon.now += random.choice((100.0, 4000.0))
        daemon.tell("the clock jumps")
    if daemon.luck("crash"):
        daemon.crash(b"")
    if daemon.luck("power"):
        daemon.crash(b"", power=True)
    if daemon.luck("amnesia") and not daemon.node.keeper:
        forget_everything(daemon)
    daemon.haunt()


def _strike_worker(daemon: Daemon, process: Process) -> None:
    node = daemon.node
    if daemon.luck("die"):
        daemon.tell(f"{process.name} dies")
        if isinstance(daemon.hands, RestartNodeActions):
            daemon.hands.end(process)
            return
        node.die(process.name)
        daemon.on_event(process.name, events.WorkerExited(worker=process.name))
        return
    if daemon.luck("exec") and process.runs and process.connected:
        daemon.tell(f"{process.name} runs another program")
        node.die(process.name)
        process.replaced = True
        daemon.attend_anew(process)
        return
    if daemon.luck("stop"):
        process.stopped = not process.stopped
        daemon.tell(f"{process.name} {'is stopped' if process.stopped else 'goes on'} by a signal")
    if process.stopped:
        return
    if daemon.luck("disconnect") and process.connected:
        daemon.tell(f"{process.name} disconnects")
        daemon.disconnect(process)
    impatient = not process.connected or daemon.luck("alone")
    if daemon.luck("alone") and impatient and node.come_back_alone(process.name):
        node.unclaimed.discard(process.name)
        daemon.tell(f"{process.name} goes on alone")
        if process.connected:
            daemon.disconnect(process, goes_on=False)  # as the agent does, to be asked again
    if daemon.luck("grow") and process.runs and process.has_bytes and process.gpu:
        size = process.size_bytes + daemon.random.randrange(1, 4)
        if node.reserve(process.name, process.gpu, size):
            process.size_bytes = size


def _strike_alone(daemon: Daemon, random: Random, process: Process) -> None:
    """Disturb processes without an agent, and other processes on their GPUs, which start, grow, exit, and may be paused
    like others.
    """
    node = daemon.node
    _settle_changes(daemon)
    if process.alive and daemon.luck("die"):
        daemon.tell(f"{process.name} dies")
        node.die(process.name)
        daemon.on_event(process.name, events.WorkerExited(worker=process.name))
    if daemon.luck("stop") and process.alive:
        process.stopped = not process.stopped
        daemon.tell(f"{process.name} {'is stopped' if process.stopped else 'goes on'} by a signal")
    if process.alive and daemon.luck("grow"):
        node.grow(process, random.randrange(1, 4) * UNIT_BYTES)
    stranger = random.choice(list(node.strangers.values())) if node.strangers else None
    if stranger is None or stranger.gpu is None:
        return
    if daemon.luck("fill"):
        few = random.randrange(1, 5) * UNIT_BYTES
        much = node.free(stranger.gpu) - random.randrange(5) * UNIT_BYTES
        if node.grow(stranger, few if stranger.gpu in node.changing else max(few, much)):
            daemon.tell(f"{stranger.name} has {stranger.size_bytes >> 20} MiB on {stranger.gpu}")
    elif daemon.luck("fill") and stranger.runs:
        stranger.size_bytes = 0
        node.holds[stranger.gpu][stranger.name] = 0


def _settle_changes(daemon: Daemon) -> None:
    """Room that changes hands does so for as long as a restore is under way there."""
    node = daemon.node
    if any(process.ending is not None for process in node.processes.values()):
        return
    under_way = {running.effect.gpu for running in daemon.running if running.effect.tag == "restore"}
    for gpu in node.changing.keys() - under_way:
        del node.changing[gpu]


def _strike_gpus(daemon: Daemon, random: Random) -> None:
    if daemon.luck("fill"):
        node = daemon.node
        gpu = random.choice(list(node.capacity))
        node.reserve(f"other{random.randrange(3)}", gpu, node.free(gpu) - random.randrange(5))


def _strike_disk(daemon: Daemon) -> None:
    disk = daemon.disk
    if disk.is_mended():
        disk.full = daemon.luck("full")
        disk.read_only = daemon.luck("read-only")
        disk.breaks = daemon.random.randrange(1, 3) if daemon.luck("break") else 0
        if not disk.is_mended():
            daemon.tell("the disk is full" if disk.full else "the disk fails or cannot be written")
    elif daemon.luck("mend"):
        disk.mend()
        daemon.tell("the disk is well again")


def forget_everything(daemon: Daemon) -> None:
    """The state directory is gone with the daemon: a parked process has no owner until it is adopted."""
    daemon.tell("the journal is lost")
    daemon.ghosts.clear()  # numbers of operations start over
    daemon.disk.names.clear()
    daemon.disk.durable_names.clear()
    daemon.crash(b"")
    node = daemon.node
    for name, process in node.processes.items():
        for gpu, held in node.holds.items():
            if gpu != process.gpu:
                held.pop(name, None)
        if not process.parked:
            process.asked_at = None  # an agent withdraws what a daemon that is gone has asked for
        if process.alive and not daemon.ops and (process.parked or not process.has_bytes or process.under_way):
            node.unclaimed.add(name)


def calm_down(daemon: Daemon) -> None:
    """No more bad luck, and what it left behind is mended."""
    daemon.odds = {}
    daemon.disk.mend()
    daemon.tell("calm")
    node = daemon.node
    for process in node.processes.values():
        process.stopped = False
    daemon.hands.calm_down()
    for gpu in node.capacity if node.alone else ():  # so that waiters for memory get it at last
        node.capacity[gpu] *= 2
    strange = "other", "quicker"
    for held in node.holds.values():
        for name in [name for name in held if name.startswith(strange)]:
            del held[name]
