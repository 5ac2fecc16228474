"""Holds 1 GiB that does not compress in the storages of a training, and goes through batches until it is ended."""

import time

import torch
from torch.utils.data import DataLoader

PIECES, PIECE = 16, 16 << 20  # of four bytes each

weights = [
    torch.nn.Parameter(torch.randint(-(1 << 31), 1 << 31, (PIECE,)).to(torch.int32).view(torch.float32))
    for _ in range(PIECES)
]
optimizer = torch.optim.SGD(weights, lr=1e-3)
for batch in DataLoader(range(1 << 40)):
    ((weights[0][:8].nan_to_num() * batch).sum()).backward()
    for weight in weights:
        weight.grad = None
    optimizer.step()
    time.sleep(0.005)
