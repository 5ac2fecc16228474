"""The training is not in the main thread, and a loader is read inside another loader's loop."""

import threading

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset


def train():
    torch.manual_seed(5)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.Adam(model.parameters())
    outer = DataLoader(TensorDataset(torch.randn(60, 16)), batch_size=2, shuffle=True)
    inner = DataLoader(TensorDataset(torch.randn(24, 16)), batch_size=6, shuffle=True)
    for _epoch in range(3):
        for (batch,) in outer:
            for (other,) in inner:
                loss = (model(batch).mean(0) - other).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                print(loss.item().hex(), flush=True)


thread = threading.Thread(target=train)
thread.start()
thread.join()
