"""A compiled model, and a prefetching thread that reads the loader ahead."""

import os
import queue
import threading

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(6)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters())
forward = torch.compile(model, backend=os.environ.get("COMPILED_BY", "inductor"))
loader = DataLoader(TensorDataset(torch.randn(800, 32)), batch_size=4)
ahead = queue.Queue(maxsize=2)


def read_ahead():
    for (batch,) in loader:
        ahead.put(batch)
    ahead.put(None)


threading.Thread(target=read_ahead, daemon=True).start()
while (batch := ahead.get()) is not None:
    loss = forward(batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item().hex(), flush=True)
