"""A training of a given size that steps as fast as it can: held.py GIB [waits] [rounds]; it knows nothing of hegm.

Prints a digest of what it holds, at the start and after each pause; of a pause when it ended, how long it was beyond
a step, both in seconds of the clock that all processes share. With `waits` it has its imports behind it and touches no
GPU until there is a line on its standard input. With `rounds` it steps only when told: each line is a number of steps,
and is answered with what one of them took.
"""

import statistics
import sys
import time

import torch

size_gib, traits = int(sys.argv[1]), set(sys.argv[2:])
PIECES = 64
PAUSE_S = 0.05
if "waits" in traits:
    print("waits", flush=True)
    sys.stdin.readline()
torch.manual_seed(7)
gpu = torch.device("cuda:0")
held = [torch.randint(-(1 << 62), 1 << 62, ((size_gib << 27) // PIECES,), device=gpu) for _ in range(PIECES)]
model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10)).to(gpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
inputs, labels = torch.randn(32, 512, device=gpu), torch.randint(0, 10, (32,), device=gpu)


def step():
    loss = torch.nn.functional.cross_entropy(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def digest():
    print("digest", sum(int(piece.sum().item()) for piece in held), flush=True)


def median_step_s(steps):
    took = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return statistics.median(took)


for _ in range(50):
    step()
digest()
if "rounds" in traits:
    for line in sys.stdin:
        print("step", median_step_s(int(line)), flush=True)
    sys.exit()
last, usual = time.monotonic(), [0.001] * 50
while True:
    step()
    now = time.monotonic()
    if now - last > PAUSE_S:
        print("pause", now, now - last - statistics.median(usual), flush=True)
        digest()
        now = time.monotonic()
    else:
        usual = [*usual[1:], now - last]
    last = now
