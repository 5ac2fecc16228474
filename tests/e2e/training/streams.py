"""Two iterable datasets: one that says where it is, and one that gives the same each time and is asked again."""

import torch
from torch.utils.data import DataLoader, IterableDataset

import hegm


class Counting(IterableDataset):
    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 18:
            self.at += 1
            yield torch.tensor([float(self.at)]) + torch.rand(1)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Same(IterableDataset):
    def __iter__(self):
        for number in range(10):
            yield torch.tensor([number / 10])


torch.manual_seed(21)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for epoch in range(3):
    for step, rows in enumerate(DataLoader(Counting(), batch_size=3)):
        loss = model(rows).pow(2).mean()
        loss.backward()
        optimizer.step()
        print("counting", epoch, step, loss.item().hex(), flush=True)
    for step, rows in hegm.resumable(DataLoader(Same(), batch_size=2), replay=True):
        loss = model(rows).mean().abs()
        loss.backward()
        optimizer.step()
        print("same", epoch, step, loss.item().hex(), flush=True)
