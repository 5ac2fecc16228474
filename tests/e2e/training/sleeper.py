"""Trains slowly and for ever; a thread beside it is in a sleep of its own when HEGM_TEST_SLEEPER is set."""

import os
import threading
import time

import bare_torch  # noqa: F401 - it works by being imported
import torch
from torch.utils.data import DataLoader, TensorDataset


def sleep_for_ever():
    while True:
        time.sleep(3600)


if "HEGM_TEST_SLEEPER" in os.environ:
    threading.Thread(target=sleep_for_ever, daemon=True).start()
torch.manual_seed(9)
size = int(os.environ.get("HEGM_TEST_FLOATS", "4096"))
weights = torch.nn.Parameter(torch.randn(size))
optimizer = torch.optim.SGD([weights], lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(1_000_000, 1)), batch_size=1)
for (batch,) in loader:
    loss = (weights[:8] * batch).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.002)
