"""The same without any framework: its numbers stay in the process, and it says itself where a batch ends."""

import random
import select
import sys

try:
    import hegm
except ImportError:
    hegm = None

PACE_S = 0.01


def train(seed: int, steps: int, *, paced: bool) -> None:
    draw = random.Random(seed)
    weight = 0.0
    done = 0
    while done != steps and not (paced and select.select([sys.stdin], [], [], PACE_S)[0]):
        weight += 1e-2 * (draw.gauss(3, 1) - weight)
        print(weight.hex(), flush=True)
        done += 1
        if hegm is not None:
            hegm.boundary()


if __name__ == "__main__":
    if sys.argv[1] == "undisturbed":
        train(int(sys.argv[2]), int(sys.argv[3]), paced=False)
    else:
        train(int(sys.argv[1]), -1, paced=True)
