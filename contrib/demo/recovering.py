"""The fourth part of `make demo`: a training loses its GPU and its process, and makes every step all the same.

No GPU is needed: it is simulated. The end of the process is real. The script checks its claims as the second part does.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.util import find_spec
from typing import Any

from contrib.demo.moving import PATIENCE_S, Node, NotAsTold, Training, run_tour, tell, undisturbed

STEPS = 100
OPTIONS = ("--recover=0.5s", "--gpu", "gpu0", "--name", "train")


def recovery(node: Node) -> dict[str, Any]:
    """Return the daemon's record of the job's recoveries; empty before the first."""
    jobs = node.ask("recovery")["jobs"]
    return jobs[0] if jobs else {"state": "", "recoveries": []}


def await_recovery(node: Node, gpus: list[str]) -> None:
    """Wait until it is protected, after a recovery on these GPUs if there are any."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = recovery(node)
        last = found["recoveries"][-1] if found["recoveries"] else {"gpus": [], "result": "recovered"}
        if found["state"] == "protected" and (last["gpus"], last["result"]) == (gpus, "recovered"):
            return
        if time.monotonic() > deadline:
            raise NotAsTold(f"it is not recovered: {found}")


def tour(node: Node) -> None:
    """The demonstration."""
    expected = undisturbed(node, STEPS)
    tell(f"A training of {STEPS} steps on gpu0, with snapshots in host memory.")
    with node.daemon():
        print(f"\n  $ hegmctl run {' '.join(OPTIONS)} -- python train.py {STEPS}", flush=True)
        training = Training(node, STEPS, OPTIONS)
        try:
            await_recovery(node, [])
            training.await_steps(5)
            pid = next(process["pid"] for process in node.ask("ps")["processes"] if process["gpus"])
            tell("Its GPU falls off the bus, and its process is killed:")
            node.show("hegmctl simulate fault gpu0 lost")
            print(f"\n  $ kill -KILL {pid}", flush=True)
            os.kill(pid, signal.SIGKILL)
            await_recovery(node, ["gpu1"])
            tell("It trains on gpu1:")
            node.show("hegmctl gpus")
            node.show("hegmctl recovery train")
            if training.process.wait(PATIENCE_S):
                raise NotAsTold("the training did not end well")
        finally:
            training.end()
    steps = {int(line[0]): line[1] for line in training.lines()}
    repeated = {(int(line[0]), line[1]) for line in training.lines()}
    if [steps.get(number) for number in range(1, STEPS + 1)] != expected or len(repeated) != STEPS:
        raise NotAsTold("the losses differ")
    tell("The training has ended. Every loss, of repeated steps too, is bit for bit that of an undisturbed run.")


def main() -> int:
    """Run the tour; the exit status."""
    if find_spec("torch") is None:
        return 0
    return run_tour(tour)


if __name__ == "__main__":
    sys.exit(main())
