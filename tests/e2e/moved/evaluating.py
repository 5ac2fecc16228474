"""A training that evaluates while a file exists: a restart cannot continue from there, so it waits."""

import os
import select
import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

with open("starts", "a", encoding="ascii") as starts:
    print(os.getpid(), os.environ.get("HEGM_GPU", "-"), file=starts)
torch.manual_seed(3)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
data = TensorDataset(torch.randn(8, 8))
for epoch in range(100_000):
    for (batch,) in DataLoader(data, batch_size=4, shuffle=True):
        loss = model(batch).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", epoch, loss.item().hex(), flush=True)
    if os.path.exists("over"):
        break
    for _ in range(1_000_000):
        if not os.path.exists(sys.argv[1]):
            break
        for (batch,) in DataLoader(data, batch_size=4):
            model(batch)
        select.select([], [], [], 0.01)  # at the pace of one that takes longer: it would keep a processor busy
