"""The third part of `make demo`: two trainings share one GPU by turns, and an urgent one gets in and out.

No GPU is needed: it is simulated, with room for one of the trainings. The script checks its claims as the second part
does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec

from contrib.demo.moving import PATIENCE_S, Node, NotAsTold, Training, run_tour, tell, undisturbed

STEPS, URGENT_STEPS = 160, 30
# The daemon reserves as much as a training declares. This training needs far less, so that a small machine can run the
# demonstration.
GPU, NEEDS = "1x8GiB", "5GiB"
SETTINGS = '[sharing]\nslices = "on"\nmin_quantum_s = 2\n'


def tour(node: Node) -> None:
    """The demonstration."""
    tell(f"Two trainings of {STEPS} steps, a GPU with room for one, and no losses but theirs to compare with.")
    expected = undisturbed(node, STEPS)
    started: list[Training] = []

    def start(name: str, steps: int, *options: str) -> Training:
        words = ("--gpu", "auto", "--bytes", NEEDS, "--name", name, *options)
        print(f"\n  $ hegmctl run {' '.join(words)} -- python train.py {steps}", flush=True)
        started.append(Training(node, steps, words, name))
        return started[-1]

    with node.daemon(GPU, SETTINGS):
        try:
            first = start("first", STEPS)
            first.await_steps(10)
            second = start("second", STEPS)
            await_that(lambda: second.lines() != [], "the second training has no turn")
            tell("The second one has its turn, and the first one waits for the next:")
            node.show("hegmctl queue")
            tell("Something urgent comes:")
            urgent = start("urgent", URGENT_STEPS, "--priority", "production")
            urgent.await_steps(5)
            node.show("hegmctl queue")
            for training in started:
                if training.process.wait(PATIENCE_S * 2):
                    raise NotAsTold(f"{training.path.name} did not end well")
            node.show("hegmctl events --kind sharing")
        finally:
            for training in started:
                training.end()
    for training in started:
        losses = [line[1] for line in training.lines()]
        if not losses or losses != expected[: len(losses)]:
            raise NotAsTold(f"the losses of {training.path.name} differ")
    tell("All three have ended. Every loss is bit for bit that of an undisturbed run.")


def await_that(holds: Callable[[], bool], otherwise: str) -> None:
    """Wait until that is so."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise NotAsTold(otherwise)
        time.sleep(0.05)


def main() -> int:
    """Run the tour; the exit status."""
    if find_spec("torch") is None:
        return 0
    return run_tour(tour)


if __name__ == "__main__":
    sys.exit(main())
