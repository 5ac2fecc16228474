"""Simulates held.py on a stub node: `pretended_held.py GIB [waits] [rounds]`, of which it holds a thousandth.

It holds 2 MiB for 0.
"""

from __future__ import annotations

import os
import sys
import threading
import time

from tests.gpu.training.pretended import ParkingAgent
from tests.stubs.cuda.program import Program

PAUSE_S = 0.02
STEP_S = 0.001


def main() -> None:
    if "waits" in sys.argv:
        _say("waits")
        sys.stdin.readline()
    program = Program([0], [max(1, int(sys.argv[1]))] * 2)
    agent = ParkingAgent(program) if "HEGM_RUN" in os.environ else None
    if agent is not None:
        threading.Thread(target=agent.attend, args=(os.environ["HEGM_SOCKET"],), daemon=True).start()
    _say(program.digest())
    if "rounds" in sys.argv:
        for line in sys.stdin:
            _say(f"step {STEP_S + int(line) * 1e-9}")
        return
    pause, last, count = threading.Event(), time.monotonic(), 0
    while True:
        program.step()
        pause.wait(STEP_S)
        now = time.monotonic()
        if now - last > PAUSE_S and count:
            _say(f"pause {now} {now - last}")
            _say(program.digest())
            now = time.monotonic()
        last, count = now, count + 1
        if agent is not None:
            agent.pass_boundary()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
