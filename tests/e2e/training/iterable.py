"""An endless dataset without indices, and an evaluation with a loader of its own every few steps."""

import itertools

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset


class Stream(IterableDataset):
    def __iter__(self):
        for number in itertools.count():
            yield torch.randn(24) + number % 7, number % 3


torch.manual_seed(4)
model = torch.nn.Sequential(torch.nn.Linear(24, 96), torch.nn.BatchNorm1d(96), torch.nn.ReLU(), torch.nn.Linear(96, 3))
optimizer = torch.optim.RMSprop(model.parameters())
held_out = DataLoader(TensorDataset(torch.randn(40, 24)), batch_size=8)
for step, (batch, label) in enumerate(DataLoader(Stream(), batch_size=6)):
    loss = torch.nn.functional.cross_entropy(model(batch), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
    if step % 10 == 9:
        model.eval()
        with torch.no_grad():
            print(sum(model(rows).sum() for (rows,) in held_out).item().hex(), flush=True)
        model.train()
    if step == 300:
        break
