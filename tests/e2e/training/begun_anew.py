"""A training that writes into a file, and opens another one every few batches."""

# ruff: noqa: SIM115 - a file that is open while the script runs is what is looked at
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
loader = DataLoader(TensorDataset(torch.arange(40.0).reshape(20, 2)), batch_size=1)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
part = open(os.devnull, "w")
count = 0
for (x,) in loader:
    if count == 5:
        part.close()
        part = open(os.devnull, "w")
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    count += 1
    part.write(f"{count}\n")
assert count == 20
