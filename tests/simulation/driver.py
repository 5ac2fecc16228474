"""A model of the driver's checkpoint calls, made through a helper that can be killed, hang or answer nonsense.

It follows what was measured: lock, checkpoint, restore and unlock in that order, a restore that ends locked, a call in
the wrong order that changes nothing, a process that ends a call by itself when its caller was killed, a stopped process
at which every call hangs. And the trap: **a restore without room, and the job is lost for good.**
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tests.simulation.node import CHECKPOINTED, FAILED, LOCKED, RUNNING, Node, Process, Violation


class HelperLost(Exception):
    """The helper was killed, hung, or said something that was not asked: what it did is not known."""


class CallRefused(Exception):
    """The driver answered with an error and changed nothing."""


@dataclass
class Driver:
    """The calls, by process. `luck` decides what becomes of the helper at each of them."""

    node: Node
    random: Random
    luck: Callable[[str], bool]

    def state(self, process: Process) -> str:
        """What the driver says; blocks, until the helper is given up, at a process that does not answer."""
        self._ask(process)
        if process.driver == FAILED:
            raise Violation(f"the driver has lost {process.name}")
        return process.driver

    def lock(self, process: Process) -> None:
        self._ask(process)
        self._must_be(process, RUNNING)
        if self.luck("busy"):
            raise CallRefused("600: its queue did not drain in time")
        self._do(process, lambda: _become(process, LOCKED))

    def checkpoint(self, process: Process) -> None:
        self._ask(process)
        self._must_be(process, LOCKED)
        if not process.parked:
            raise Violation(f"{process.name} was checkpointed while it trains")
        self._do(process, lambda: self._take_off(process))

    def restore(self, process: Process, gpu: str) -> None:
        """The room that the daemon held goes to the driver in the moment of the call."""
        self._ask(process)
        self._must_be(process, CHECKPOINTED)

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
        self._must_be(process, LOCKED)
        self._do(process, lambda: _become(process, RUNNING))

    def _take_off(self, process: Process) -> None:
        if process.gpu is not None:
            self.node.holds.get(process.gpu, {}).pop(process.name, None)
        process.gpu = None
        _become(process, CHECKPOINTED)

    def _ask(self, process: Process) -> None:
        if process.stopped or process.finishing:
            raise HelperLost(f"no answer about {process.name}; the helper was killed")

    def _must_be(self, process: Process, state: str) -> None:
        if process.driver != state:
            raise CallRefused(f"401: it is {process.driver} and not {state}")

    def _do(self, process: Process, change: Callable[[], None]) -> None:
        if not self.luck("helper"):
            change()
            return
        how = self.random.randrange(3)
        if how:  # the call had begun: the process ends it by itself, at once or some time later
            change()
            process.finishing = how == 1
        raise HelperLost("the helper was killed in the middle of a call")


def _become(process: Process, state: str) -> None:
    process.driver = state
