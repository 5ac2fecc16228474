"""A training that ends once a file is there, or after so many steps."""

import sys
from pathlib import Path

import torch

torch.manual_seed(7)
model = torch.nn.Linear(1024, 1024)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
last = int(sys.argv[2]) if len(sys.argv) > 2 else None
step = 0
while step != last and not (last is None and Path(sys.argv[1]).exists()):
    loss = model(torch.randn(64, 1024)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, loss.item().hex(), flush=True)
    step += 1
print("end", flush=True)
