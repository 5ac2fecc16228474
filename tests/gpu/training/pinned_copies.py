"""How fast so many MiB are copied between a GPU and pinned memory, or, without a GPU, within the host: MIB.

Prints bytes a second as JSON, out of the GPU and into it: the best of some rounds.
"""

import json
import sys
import time

import torch

ROUNDS = 8
size_bytes = int(sys.argv[1]) << 20
on_gpu = torch.cuda.is_available()
host = torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=on_gpu)
there = torch.zeros(size_bytes, dtype=torch.uint8, device="cuda" if on_gpu else "cpu")


def rate(target: torch.Tensor, source: torch.Tensor) -> float:
    best = 0.0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        target.copy_(source)
        if on_gpu:
            torch.cuda.synchronize()
        best = max(best, size_bytes / (time.perf_counter() - began))
    return best


print(json.dumps({"out": rate(host, there), "in": rate(there, host)}))
