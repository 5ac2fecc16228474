"""Holds 1 GiB that does not compress in the storages of a training, and goes through batches until it is ended."""

import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

PIECES, PIECE = 16, 16 << 20  # of four bytes each


def noise() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randint(-(1 << 31), 1 << 31, (PIECE,)).to(torch.int32).view(torch.float32))


weights = [noise() for _ in range(PIECES)]
optimizer = torch.optim.SGD(weights, lr=1e-3)
loader = DataLoader(TensorDataset(torch.ones(4096)))
pace = threading.Event()
while True:
    for (batch,) in loader:
        (weights[0][:8].nan_to_num() * batch).sum().backward()
        weights[0].grad = None
        optimizer.step()
        pace.wait(0.005)
