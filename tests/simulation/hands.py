"""A model of the executor of effects, with every way in which one can end: the contract that
hegmd/migration/run/executor.py has to keep.

Orders use the connection that was reported to the machine last. What may be lost, late, half done or done twice is
drawn from the life's odds; what is done is done to the node, which says when it must not have been.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from hegmd.migration.machine import events
from hegmd.migration.machine.effects import Effect
from hegmd.migration.machine.events import BROKEN, DISCONNECTED, REFUSED, Event, Failed
from hegmd.migration.machine.operation import Operation
from tests.simulation.driver import CallRefused, Driver, HelperLost
from tests.simulation.node import CHECKPOINTED, LOCKED, Process, Violation

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon

ORDERS = frozenset(("offload", "checkpoint", "restore", "reload"))
# Those that a stopped worker does not answer, within the limit that is theirs.
ASKED_OF_AGENTS = frozenset(("survey", "inspect"))
FAILING = frozenset(
    (
        *("reserve", "reserve-pool", "survey", "offload", "checkpoint", "restore", "reload", "release", "verify"),
        *("release-reservation", "dump", "seal", "scrap", "end"),
    )
)


@dataclass
class Running:
    """An effect that is being performed, for which operation, and the connection that it goes by."""

    op_id: str
    effect: Any  # one of the classes in effects.py, each with its own fields
    connection: int
    since: float
    begun: bool = False


@dataclass
class NodeActions:
    """Does to the node what effects say."""

    daemon: Daemon
    random: Random
    driver: Driver = field(init=False)

    def __post_init__(self) -> None:
        self.driver = Driver(self.daemon.node, self.random, self.daemon.luck)

    def perform(self, running: Running) -> None:
        """End one effect, or lose its worker, or fail; a park only begins. Effects of one worker begin in their
        order.
        """
        daemon = self.daemon
        name = running.effect.worker
        same = (r for r in daemon.running if r.effect.worker == name and r.op_id == running.op_id and not r.begun)
        running = next(same, running)
        effect, process = running.effect, daemon.node.processes[name]
        daemon.must_be_durable(running)
        if effect.in_worker and not self._reaches(running, process):
            return
        running.begun = True
        if effect.tag in FAILING and daemon.luck("fail"):
            self._fail(running, process)
            return
        event = self.do(running, process)
        if event is not None:
            daemon.finish(running, event)

    def _reaches(self, running: Running, process: Process) -> bool:
        """Whether the worker can do it now; if it never will, the effect has ended."""
        daemon, effect = self.daemon, running.effect
        if process.replaced:
            if not self.knows_program(process):
                raise Violation(f"{effect.tag} went to another program, which runs in the place of {process.name}")
            daemon.finish(running, failure(effect, DISCONNECTED))
            return False
        if not process.alive:
            daemon.finish(running, None)
            daemon.post(running.op_id, events.WorkerExited(worker=process.name))
            return False
        if effect.tag == "inspect":
            running.connection = daemon.inspected[running.op_id, effect.number] = process.connection
        if not process.connected or process.connection != running.connection:
            daemon.finish(running, failure(effect, DISCONNECTED))
            return False
        if process.stopped and effect.tag in ASKED_OF_AGENTS:
            if daemon.now > running.since + 5.0:
                daemon.finish(running, failure(effect, BROKEN))
            running.begun = True
            return False
        if process.stopped and not (daemon.node.driven and effect.tag in {"checkpoint", "restore"}):
            running.begun = True
            return False
        if process.under_way and effect.tag != "inspect":
            raise Violation(f"{process.name} got the order {effect.tag} during {process.under_way}")
        return True

    def knows_program(self, process: Process) -> bool:
        """True if the agent's token shows that a process runs another program now."""
        return True

    def _fail(self, running: Running, process: Process) -> None:
        effect = running.effect
        if effect.tag in {"offload", "reload"} and self.random.random() < 0.3:
            self._give_up(running, process)
            return
        half_done = effect.in_worker and self.random.random() < 0.5
        if half_done:
            self.do(running, process)
        self.daemon.finish(running, failure(effect, BROKEN if half_done else REFUSED))

    def _give_up(self, running: Running, process: Process) -> None:
        """An agent that fails within an order reloads everything, lets the script continue, and connects again."""
        self.do(running, process)
        self.daemon.finish(running, failure(running.effect, BROKEN))
        if self.daemon.node.come_back_alone(process.name):
            self.daemon.tell(f"{process.name} gives up and goes on alone")
            self.daemon.disconnect(process, goes_on=False)

    def overdue_parks(self) -> None:
        """The agent itself abandons a park whose limit has passed."""
        daemon = self.daemon
        for running in list(daemon.running):
            process = daemon.node.processes[running.effect.worker]
            late = running.effect.tag == "park" and daemon.now > running.since + running.effect.limit_s
            if late and process.alive and not process.parked and not process.stopped:
                process.asked_at = None
                daemon.finish(running, failure(running.effect, REFUSED))

    # ---- what there is of a daemon besides its operations ------------------------------------------------------------

    def is_stale(self, op: Operation, event: Event) -> bool:
        """True if the event is of a process that no longer belongs to the operation."""
        return False

    def is_of(self, op: Operation, process: Process) -> bool:
        """Whether news of that process are news for the operation."""
        return True

    def rise(self) -> None:
        """The daemon has been started."""

    def fall(self) -> None:
        """It has been killed."""

    def close(self) -> None:
        """Its life has been lived."""

    def go_on(self) -> None:
        """Advance the effects that have begun."""

    def calm_down(self) -> None:
        """Nothing hangs from now on."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is done besides effects."""
        return True

    def drop_what_is_not_awaited(self, op: Operation) -> None:
        """Effects that the operation has abandoned end without an event, if they may be cancelled."""

    # ---- one effect --------------------------------------------------------------------------------------------------

    def do(self, running: Running, process: Process) -> Event | None:
        """Do it to the node. None for one that ends later, or not at all."""
        effect = running.effect
        ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
        node, name = self.daemon.node, effect.worker
        match effect.tag:
            case "reserve":
                done = node.reserve(name, effect.gpu, effect.size_bytes)
                return events.Reserved(**ends) if done else failure(effect, REFUSED)
            case "release-reservation":
                node.release_reservation(name, effect.gpu)
                return events.ReservationReleased(**ends)
            case "reserve-pool":
                done = node.reserve_pool(name, effect.size_bytes)
                return events.PoolReserved(**ends) if done else failure(effect, REFUSED)
            case "release-pool":
                node.release_pool(name)
                return events.PoolReleased(**ends)
            case "survey":
                return events.Surveyed(**ends, boundary=process.boundary, size_bytes=process.size_bytes)
            case "park":
                return self._park(running, process)
            case "withdraw" | "release":
                node.release(name)
                self._end_parks(name)
                return events.Withdrawn(**ends) if effect.tag == "withdraw" else events.Released(**ends)
            case "offload":
                node.offload(name)
                return events.Offloaded(**ends, size_bytes=process.size_bytes)
            case "checkpoint":
                return self.checkpoint(effect, process)
            case "restore":
                return self.restore(effect, process)
            case "hold":
                return events.Held(**ends)
            case "dump" | "end" | "seal" | "scrap":
                return self.hand_over(running, process)
            case "reload":
                node.reload(name)
                return events.Reloaded(**ends)
            case "verify":
                return events.Verified(**ends, boundary=process.boundary) if process.boundary > effect.beyond else None
        return self.inspect(running.op_id, effect, process)

    def hand_over(self, running: Running, process: Process) -> Event | None:
        """Write the image of its job, or end it; finish an image whose job has continued."""
        if running.effect.tag == "dump":
            return self.dump(running)
        if running.effect.tag in ("seal", "scrap"):
            return self.see_to_written(running)
        if process.alive:
            self.daemon.node.end(running.op_id, process.name)
        return events.Ended(effect=running.effect.number, worker=process.name)

    def dump(self, running: Running) -> Event | None:
        """A whole image stays whole; an inspection never starts over one that is not. The model undoes a dropped dump
        before it does anything else to the job.
        """
        effect, node = running.effect, self.daemon.node
        if self.daemon.ops[running.op_id].pending_numbered(effect.number) is None:
            self.daemon.finish(running, None)
            return None
        if running.op_id not in node.images:
            if effect.find:
                return failure(effect, REFUSED)
            names = [worker.name for worker in self.daemon.ops[running.op_id].live]
            if not all(self.steps_aside(node.processes[name]) for name in names):
                return failure(effect, REFUSED)
            if any(not node.processes[name].has_bytes and name not in node.pool for name in names):
                return failure(effect, REFUSED)  # they went with an earlier daemon; the agent has its own
            handoff = self.daemon.ops[running.op_id].image
            node.dump(running.op_id, names, goes_on=handoff is not None and handoff.leave_running)
        return events.Dumped(effect=effect.number, worker=effect.worker)

    def see_to_written(self, running: Running) -> Event | None:
        """Give an image its name, or remove it. The output of a daemon that was killed is not an image."""
        effect, node, daemon = running.effect, self.daemon.node, self.daemon
        ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
        if effect.tag == "scrap":
            node.scrap(running.op_id)
            return events.ImageFilesRemoved(**ends)
        if daemon.ops[running.op_id].pending_numbered(effect.number) is None:
            daemon.finish(running, None)
            return None
        if running.op_id in node.written:
            node.seal(running.op_id)
        return events.Sealed(**ends) if running.op_id in node.images else failure(effect, REFUSED)

    def steps_aside(self, process: Process) -> bool:
        """True if its agent obeys an order for an image: one that has resumed its job does not."""
        return process.alive and process.connected and process.parked and not process.stopped

    def _end_parks(self, name: str) -> None:
        daemon = self.daemon
        daemon.running = [r for r in daemon.running if r.effect.tag != "park" or r.effect.worker != name]

    def _park(self, running: Running, process: Process) -> Event | None:
        """Send the order; or, once parked, report where. A new order releases a worker parked before its boundary."""
        daemon, effect = self.daemon, running.effect
        ends: dict[str, Any] = {"effect": effect.number, "worker": effect.worker}
        for other in list(daemon.running):
            if other.effect.tag == "park" and other.effect.worker == process.name and other is not running:
                if other.op_id == running.op_id and other.effect.number > effect.number:
                    return failure(effect, REFUSED)
                daemon.running.remove(other)
        if process.parked and (effect.at is None or process.boundary >= effect.at):
            return events.Parked(**ends, boundary=process.boundary)
        if effect.at is not None and process.boundary >= effect.at and process.asked_at is None:
            return events.PassedBoundary(**ends, boundary=process.boundary)
        process.asked_at = effect.at if effect.at is not None else process.asked_at or process.boundary + 1
        process.parked = False
        return None

    def checkpoint(self, effect: Any, process: Process) -> Event:
        """Off the GPU. A real driver frees the memory, which is reserved again unless another process is quicker."""
        node = self.daemon.node
        done = events.Checkpointed(effect=effect.number, worker=effect.worker)
        if not node.driven:
            node.leave(process.name)
            return done
        source = process.gpu
        try:
            if self.driver.state(process) == CHECKPOINTED:
                return done
            if self.driver.state(process) != LOCKED:
                self.driver.lock(process)
            self.driver.checkpoint(process)
        except CallRefused:
            return failure(effect, REFUSED)
        except HelperLost:
            return failure(effect, BROKEN)
        if source is not None:
            if self.daemon.luck("grab"):
                node.reserve("quicker", source, node.free(source))
            node.reserve(process.name, source, process.size_bytes)
        return done

    def restore(self, effect: Any, process: Process) -> Event:
        """Onto the GPU. The driver is only called while room is held there for it."""
        node = self.daemon.node
        done = events.Restored(effect=effect.number, worker=effect.worker)
        if not node.driven:
            node.arrive(process.name, effect.gpu)
            return done
        try:
            if self.driver.state(process) == CHECKPOINTED:
                if not self.has_room(process, effect.gpu):
                    return failure(effect, REFUSED)
                self.driver.restore(process, effect.gpu)
            if self.driver.state(process) == LOCKED:
                self.driver.unlock(process)
        except CallRefused:
            return failure(effect, REFUSED)
        except HelperLost:
            return failure(effect, BROKEN)
        return done if process.gpu == effect.gpu else failure(effect, BROKEN)

    def has_room(self, process: Process, gpu: str) -> bool:
        """True if all that it needs is really held there for it."""
        return self.daemon.node.held(process.name, gpu) >= process.size_bytes

    def inspect(self, op_id: str, effect: Effect, process: Process) -> Event:
        """Its state. A process that was left locked is unlocked first: that changes nothing else."""
        node = self.daemon.node
        try:
            if node.driven and self.driver.state(process) == LOCKED and process.under_way is None:
                self.unlock(process)
        except HelperLost:
            return failure(effect, BROKEN)
        return events.Inspected(
            effect=effect.number,
            worker=effect.worker,
            parked=process.parked,
            boundary=process.boundary,
            out_bytes=0 if process.has_bytes else process.size_bytes,
            gpu=process.gpu,
            reservations={gpu: held[process.name] for gpu, held in node.holds.items() if process.name in held},
            pool_bytes=node.pool.get(process.name, 0),
            busy=self.is_busy(process),
        )

    def unlock(self, process: Process) -> None:
        self.driver.unlock(process)

    def is_busy(self, process: Process) -> bool:
        running = self.daemon.running
        carried = any(r.effect.worker == process.name and r.effect.tag in ORDERS for r in running)
        return process.under_way is not None or carried


def failure(effect: Effect, fault: str) -> Failed:
    message = f"{effect.tag} of {effect.worker} failed: {fault}"
    return Failed(effect=effect.number, worker=effect.worker, fault=fault, message=message, hint="try again")
