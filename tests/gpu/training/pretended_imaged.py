"""Simulates imaged.py on a stub node: the same words, and a MiB for each GiB; it has the model agent in it."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from tests.gpu.training.pretended import ParkingAgent
from tests.stubs.cuda.program import Program

DIGEST_EVERY, PAUSE_S = 20, 0.15


def main() -> None:
    folder, size_mib, steps, pace_s = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    pause = threading.Event()
    while not (folder / "go").exists():
        pause.wait(0.02)
    program = Program([0], [max(1, size_mib >> 10)] * 2)
    agent = ParkingAgent(program) if "HEGM_RUN" in os.environ else None
    if agent is not None:
        threading.Thread(target=agent.attend, args=(os.environ["HEGM_SOCKET"],), daemon=True).start()
    unlike = " unlike" if agent is not None and "HEGM_TEST_UNLIKE" in os.environ else ""
    last = time.time()
    with (folder / "lines").open("a", buffering=1) as lines, (folder / "pauses").open("a", buffering=1) as pauses:
        for count in range(1, steps + 1):
            lines.write(program.step() + "\n")
            now = time.time()
            if now - last > pace_s + PAUSE_S:
                pauses.write(f"{now} {now - last - pace_s}\n")
            if count % DIGEST_EVERY == 0:
                lines.write(program.digest() + unlike + "\n")
            if agent is not None:
                agent.pass_boundary()
            last = now
            pause.wait(pace_s)


if __name__ == "__main__":
    main()
