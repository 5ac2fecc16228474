"""Simulates every training on a stub node: `STEPS MIB [fact=NAME=VALUE] [stay=N] pace=SECONDS digest=STEPS gpus=N`.

A CUDA program by the driver's functions alone; under `hegmctl run` it has the model agent in it, which really stops it
at a boundary. With HEGM_TEST_UNLIKE, its output under `hegmctl run` differs from its output otherwise.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from hegmd.protocol.messages import Order
from tests.e2e.cuda_agent import Agent
from tests.stubs.cuda.program import Program


class ParkingAgent(Agent):
    """The model agent, and the gate at which the loop below waits while it is parked."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self._gate = threading.Condition()
        self._asked = self._stands = False

    def pass_boundary(self) -> None:
        """Called by the loop at each boundary."""
        with self._gate:
            self.boundary += 1
            self._stands = True
            self._gate.notify_all()
            self._gate.wait_for(lambda: not self._asked)
            self._stands = False

    def make(self, order: Order) -> dict[str, Any]:
        try:
            return super().make(order)
        except SystemExit as error:  # as the program ends where there is no memory for it
            return {"result": "failed", "message": str(error.code), "hint": "let others free some"}

    def park(self, _: Order) -> dict[str, Any]:
        with self._gate:
            self._asked = True
            self._gate.wait_for(lambda: self._stands)
            self.parked = True
        return {}

    def withdraw(self, order: Order) -> dict[str, Any]:
        told = super().withdraw(order)
        with self._gate:
            self._asked = False
            self._gate.notify_all()
        return told

    def release(self, order: Order) -> dict[str, Any]:
        if order.restored:  # by the driver, with all its pieces: no other process can open these
            self.facts["expandable"] = True
        return self.withdraw(order)


def main() -> None:
    steps, size_mib = int(sys.argv[1]), int(sys.argv[2])
    given = [word.partition("=")[::2] for word in sys.argv[3:]]
    pace_s, digest_every = float(dict(given)["pace"]), int(dict(given)["digest"])
    program = Program([*range(int(dict(given)["gpus"]))], [size_mib // 2, size_mib - size_mib // 2])
    program.reach()  # as frameworks have it between GPUs of one process, which the driver does not bring back
    if "stay" in dict(given):  # as beside what a library keeps where Python does not see it
        program.stay(dict(given)["stay"])
    agent: ParkingAgent | None = None
    if "HEGM_RUN" in os.environ:
        agent = ParkingAgent(program)
        agent.tells_devices = len(program.ordinals) > 1
        agent.facts = dict(_fact(value) for name, value in given if name == "fact")
        threading.Thread(target=agent.attend, args=(os.environ["HEGM_SOCKET"],), daemon=True).start()
    pause = threading.Event()
    for step in range(steps):
        sys.stdout.write(program.step() + "\n")
        if (step + 1) % digest_every == 0:
            unlike = " unlike" if agent is not None and "HEGM_TEST_UNLIKE" in os.environ else ""
            sys.stdout.write(program.digest() + unlike + "\n")
        sys.stdout.flush()
        if agent is not None:
            agent.pass_boundary()
        pause.wait(pace_s)


def _fact(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    return name, tuple(filter(None, value.split(","))) if "," in value else {"yes": True}.get(value, value)


if __name__ == "__main__":
    main()
