"""A training whose batches take about so many milliseconds, that says at its end when each of them began.

It knows nothing of hegm. Trains until its input ends; then every begin, by the system's monotonic clock, is a line.
"""

import select
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

batch_s = float(sys.argv[1]) / 1000
torch.manual_seed(1)
torch.set_num_threads(1)
inputs = torch.randn(4096, 64)
targets = inputs.sum(1, keepdim=True)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=8, shuffle=True)
ended = select.poll()
ended.register(sys.stdin, select.POLLIN | select.POLLHUP)
began = []
while not ended.poll(0):
    for batch, target in loader:
        began.append(time.monotonic())
        while True:
            loss = torch.nn.functional.mse_loss(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            if time.monotonic() - began[-1] >= batch_s:
                break
        optimizer.step()
        if ended.poll(0):
            break
print(*began, sep="\n")
