"""A training that ends once a file is there, at the pace of one that takes longer; or after so many steps, at once."""

import select
import sys
from pathlib import Path

import bare_torch  # noqa: F401 - it works by being imported
import torch

torch.manual_seed(7)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
last = int(sys.argv[2]) if len(sys.argv) > 2 else None
step = 0
while step != last and not (last is None and Path(sys.argv[1]).exists()):
    loss = model(torch.randn(8, 1024)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item().hex(), flush=True)
    step += 1
    if last is None:
        select.select([], [], [], 0.02)
print("end", flush=True)
