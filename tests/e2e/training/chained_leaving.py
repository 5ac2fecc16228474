"""A training that is killed and started again: each line names its process, its step, and depends on all before it.

Each start says in a file how far it is, and waits there while a pipe of that name is in the folder. Ends when its input
does, or after so many steps.
"""

import os
import select
import sys


def say(where: str) -> None:
    with open(os.path.join(folder, "starts"), "a", encoding="ascii") as starts:
        print(os.getpid(), where, file=starts)
    gate = os.path.join(folder, f"gate-{where}")
    if os.path.exists(gate):
        with open(gate, "rb") as waiting:
            waiting.read()


folder, steps = sys.argv[1], int(sys.argv[2])
say("started")

import torch  # noqa: E402 - that Python runs is said before
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402 - as above

PACE_S = 0.0 if steps else 0.03  # what a step takes at least, as on a GPU
BATCHES = 16

say("imported")
torch.manual_seed(7)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
ballast = torch.nn.Parameter(torch.randn(64, 1024))
optimizer = torch.optim.AdamW([*model.parameters(), ballast], lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
loader = DataLoader(TensorDataset(torch.randn(128, 16)), batch_size=8, shuffle=True)
say("made")
for epoch in range(1_000_000):
    for index, (batch,) in enumerate(loader):
        number = epoch * BATCHES + index
        if number + 1 > steps > 0 or (not steps and select.select([sys.stdin], [], [], PACE_S)[0]):
            sys.exit(0)
        loss = model(batch).pow(2).mean() + (ballast[number % 64] * ballast[(number * 7) % 64]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        print(os.getpid(), number, float(loss.item()).hex(), flush=True)
