"""Stands in for held.py on a stub node: `pretended_held.py GIB`, of which it holds a thousandth."""

from __future__ import annotations

import os
import sys
import threading
import time

from tests.gpu.training.pretended import StandingAgent
from tests.stubs.cuda.program import Program

PAUSE_S = 0.02
STEP_S = 0.001


def main() -> None:
    program = Program(0, [int(sys.argv[1])] * 2)
    agent = StandingAgent(program) if "HEGM_RUN" in os.environ else None
    if agent is not None:
        threading.Thread(target=agent.attend, args=(os.environ["HEGM_SOCKET"],), daemon=True).start()
    _say(program.digest())
    pause, last = threading.Event(), time.monotonic()
    for count in range(int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 62):
        program.step()
        pause.wait(STEP_S)
        now = time.monotonic()
        if now - last > PAUSE_S and count:
            _say(f"pause {now} {now - last}")
            _say(program.digest())
            now = time.monotonic()
        last = now
        if agent is not None:
            agent.pass_boundary()
    for _ in range(5):
        _say(f"step {STEP_S}")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
