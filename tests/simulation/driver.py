"""A model of the driver's checkpoint calls, and of a helper that makes them by hand.

It follows what was measured: lock, checkpoint, restore and unlock in that order, a restore that ends locked, a call in
the wrong order that changes nothing, a map that names every GPU, a process that ends a call by itself when its caller
was killed, a stopped process at which every call hangs. And the trap: **a restore without memory, and the job is lost
for good.**
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from random import Random

from hegmd.memory.sizes import RESTORE_MARGIN_BYTES
from tests.simulation.node import CHECKPOINTED, FAILED, LOCKED, RUNNING, Node, Process, Violation

ILLEGAL_ARGUMENT, ILLEGAL_STATE, NOT_READY = 1, 401, 600


class HelperLost(Exception):
    """The helper was killed, hung, or sent an unexpected reply: what it did is not known."""


class CallRefused(Exception):
    """The driver answered with an error and changed nothing."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(f"{number}: {why}")
        self.number = number


@dataclass
class Calls:
    """The effects of each call on a process without an agent, and on the GPUs."""

    node: Node

    def state(self, process: Process) -> str:
        return process.driver

    def lock(self, process: Process) -> None:
        must_be(process, RUNNING)
        process.driver = LOCKED

    def checkpoint(self, process: Process) -> None:
        must_be(process, LOCKED)
        if process.gpu is not None:
            self.node.holds[process.gpu].pop(process.name, None)
        process.came_from, process.gpu = process.gpu, None
        process.driver = CHECKPOINTED

    def restore(self, process: Process, map_of_gpus: Mapping[str, str]) -> None:
        """Onto the GPU that it came from, or the one that the map has in its place; a margin is needed meanwhile."""
        must_be(process, CHECKPOINTED)
        uuids = set(self.node.uuids)
        if map_of_gpus and not map_of_gpus.keys() == uuids == set(map_of_gpus.values()):
            raise CallRefused(ILLEGAL_ARGUMENT, "the map does not name every GPU")
        source = str(process.came_from)
        gpu = map_of_gpus.get(source, source)
        if self.node.free(gpu) < process.size_bytes + RESTORE_MARGIN_BYTES:
            process.driver = FAILED
            raise Violation(f"{process.name} was restored on {gpu} where {self.node.free(gpu)} are free: it is lost")
        self.node.holds.setdefault(gpu, {})[process.name] = process.size_bytes
        process.gpu, process.driver = gpu, LOCKED

    def unlock(self, process: Process) -> None:
        must_be(process, LOCKED)
        process.driver = RUNNING


def must_be(process: Process, state: str) -> None:
    if process.driver != state:
        raise CallRefused(ILLEGAL_STATE, f"it is {process.driver} and not {state}")


@dataclass
class Driver:
    """The calls, by process. `luck` decides what becomes of the helper at each of them."""

    node: Node
    random: Random
    luck: Callable[[str], bool]

    def state(self, process: Process) -> str:
        """Return the driver's state; at a process that does not answer, block until the helper is given up."""
        self._ask(process)
        if process.driver == FAILED:
            raise Violation(f"the driver has lost {process.name}")
        return process.driver

    def lock(self, process: Process) -> None:
        self._ask(process)
        must_be(process, RUNNING)
        if self.luck("busy"):
            raise CallRefused(NOT_READY, "its queue did not drain in time")
        self._do(process, lambda: _become(process, LOCKED))

    def checkpoint(self, process: Process) -> None:
        self._ask(process)
        must_be(process, LOCKED)
        if not process.parked:
            raise Violation(f"{process.name} was checkpointed while it trains")
        self._do(process, lambda: self._take_off(process))

    def restore(self, process: Process, gpu: str) -> None:
        """The room that the daemon held goes to the driver in the moment of the call."""
        self._ask(process)
        must_be(process, CHECKPOINTED)

        held = self.node.held(process.name, gpu)
        if held < process.size_bytes:
            process.driver = FAILED
            raise Violation(f"{process.name} was restored on {gpu} without room that is held for it: it is lost")

        def put_on() -> None:
            process.gpu = gpu
            _become(process, LOCKED)

        self._do(process, put_on)

    def unlock(self, process: Process) -> None:
        self._ask(process)
        must_be(process, LOCKED)
        self._do(process, lambda: _become(process, RUNNING))

    def _take_off(self, process: Process) -> None:
        if process.gpu is not None:
            self.node.holds.get(process.gpu, {}).pop(process.name, None)
        process.gpu = None
        _become(process, CHECKPOINTED)

    def _ask(self, process: Process) -> None:
        if process.stopped or process.finishing:
            raise HelperLost(f"no answer about {process.name}; the helper was killed")

    def _do(self, process: Process, change: Callable[[], None]) -> None:
        if not self.luck("helper"):
            change()
            return
        how = self.random.randrange(3)
        if how:  # the call had begun: the process finishes it, at once or some time later
            change()
            process.finishing = how == 1
        raise HelperLost("the helper was killed in the middle of a call")


def _become(process: Process, state: str) -> None:
    process.driver = state
