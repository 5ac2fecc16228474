"""An ordinary PyTorch training. It knows nothing of hegm: no import, no hook, no flag.

Each line that it prints is a step, its loss bit for bit, and the time.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

steps = int(sys.argv[1])
torch.manual_seed(1)
inputs = torch.randn(2048, 256)
targets = torch.sin(inputs.sum(1, keepdim=True))
model = torch.nn.Sequential(
    torch.nn.Linear(256, 2048),
    torch.nn.GELU(),
    torch.nn.Dropout(0.1),
    torch.nn.Linear(2048, 2048),
    torch.nn.GELU(),
    torch.nn.Linear(2048, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(inputs, targets), batch_size=16, shuffle=True)
step = 0
while step < steps:
    for batch, target in loader:
        loss = torch.nn.functional.mse_loss(model(batch), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        print(step, float(loss.item()).hex(), time.monotonic(), flush=True)
        if step == steps:
            break
